"""Keys and values of a text's beginning, copied to another text's slot instead of computed again."""

from __future__ import annotations


class KeysValues:
    """The KV segment's array [layers][sequences][head_values][context_tokens][head_width], as `view` has it flat.
    head_values: keys and values of every key head."""

    def __init__(
        self, view: memoryview, *, layers: int, sequences: int, head_values: int, context_tokens: int, head_width: int
    ) -> None:
        self._view = view
        self._layers, self._sequences, self._head_values = layers, sequences, head_values
        self._context_tokens, self._head_width = context_tokens, head_width

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` positions of one slot to another. Copying again changes nothing.

        Raises ValueError for a slot or a length that there is not.
        """
        if not (
            0 <= source < self._sequences and 0 <= target < self._sequences and 0 <= tokens <= self._context_tokens
        ):
            raise ValueError(f"copying {tokens} tokens from slot {source} to {target}: there is no such place")
        stride, count = self._context_tokens * self._head_width, tokens * self._head_width
        for layer in range(self._layers):
            for number in range(self._head_values):
                read, write = (
                    ((layer * self._sequences + slot) * self._head_values + number) * stride
                    for slot in (source, target)
                )
                self._view[write : write + count] = self._view[read : read + count]

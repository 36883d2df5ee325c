"""From tokens to text, piece by piece: what may be shown now, and what must wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from neuronpipe.native import lib
from neuronpipe.plans.package.tokenizer import open_tokenizer, panics_are_errors
from neuronpipe.services.coordinator.spelling import Spelling


class Tokenizer(Protocol):
    """What the core needs of a tokenizer. `tokenizer.json` alone decides about special tokens."""

    @property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes of text."""
        ...

    def encode(self, text: str, *, frame: bool = True) -> list[int]:
        """Token ids of a text. frame: with the tokens that the file puts round a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes of one token, as in `Token`; empty for an id that no token has."""
        ...

    @property
    def special_tokens(self) -> list[int]:
        """Ids of tokens that are no text."""
        ...

    def pieces(self, count: int) -> list[bytes]:
        """The bytes of the first `count` ids. Raises ValueError when names may mean other bytes than `piece` finds."""
        ...


class FileTokenizer:
    """A package's tokenizer.json through the `tokenizers` library."""

    def __init__(self, text: str) -> None:
        self._library = open_tokenizer(text, "tokenizer.json")
        lib.np_memory_give_back()  # reading takes twice what stays
        self._spelling: Spelling | None = None
        names = map(self._library.id_to_token, range(self._library.get_vocab_size()))
        # A token's name has a character for each byte, or more; normalizers may shorten a text a little.
        self._longest_token_bytes = max(16, *(len(name.encode()) for name in names if name))

    @property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes of text."""
        return self._longest_token_bytes

    def encode(self, text: str, *, frame: bool = True) -> list[int]:
        """Token ids of a text. frame: with the tokens that the file's post-processor puts round a text."""
        with panics_are_errors():
            return list(self._library.encode(text, add_special_tokens=frame).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return str(self._library.decode(list(tokens), skip_special_tokens=True))

    def piece(self, token: int) -> bytes:
        """The bytes of one token: its name, as the file's decoder spells bytes."""
        if self._spelling is None:
            self._spelling = Spelling.of(self._library)
        name = self._library.id_to_token(token)
        return b"" if name is None else self._spelling.bytes_of(name)

    @property
    def special_tokens(self) -> list[int]:
        """Ids of tokens that are no text."""
        return [token for token, added in self._library.get_added_tokens_decoder().items() if added.special]

    def pieces(self, count: int) -> list[bytes]:
        """The bytes of the first `count` ids. Raises ValueError when names may mean other bytes than `piece` finds."""
        pieces = [self.piece(token) for token in range(count)]
        if self._spelling is None or not self._spelling.every_byte:
            raise ValueError("its decoder is neither ByteLevel nor ByteFallback")
        return pieces


class TextStream:
    """The text of a growing token list. Holds back incomplete UTF-8 and what may become a stop string.

    Only a short tail is decoded per token: `_anchor` moves along so that the work per token does not grow.
    """

    TAIL_TOKENS = 16

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-self.TAIL_TOKENS :])
        self._seen = tokenizer.decode(self._ids)
        self._held = ""
        self.shown = ""  # everything that was given out so far
        self._stop = tuple(s for s in stop if s)
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token; returns the text that may be shown. Sets `stopped` when a stop string was met."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("�"):
            return ""  # a character that is not complete yet
        self._held += text[len(self._seen) :]
        self._seen = text
        if len(self._ids) > 2 * self.TAIL_TOKENS:
            self._ids = self._ids[-self.TAIL_TOKENS :]
            self._seen = self._tokenizer.decode(self._ids)
        return self._release()

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        rest = "" if self.stopped else self._held + self._tokenizer.decode(self._ids)[len(self._seen) :]
        self._held = ""
        self.shown += rest
        return rest

    def _release(self) -> str:
        """Cut the held text at a stop string; keep back its longest end that begins one."""
        for stop in self._stop:
            at = self._held.find(stop)
            if at >= 0:
                self.stopped = True
                self._held = self._held[:at]
        keep = 0
        if not self.stopped:
            ends = (n for s in self._stop for n in range(1, len(s)) if self._held.endswith(s[:n]))
            keep = max(ends, default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        self.shown += out
        return out

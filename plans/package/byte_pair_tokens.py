"""A byte-pair encoding in little memory.

The `tokenizers` library keeps a vocabulary as strings, several times: 70 to 400 MB for the models of 2025. Here it
reads the same tokenizer.json with a vocabulary of single characters and without merges. So it finds added tokens,
normalizes, splits a text into words, and adds what frames it, and each word becomes its characters. The native library
has the whole vocabulary in tables and merges the characters.

The library also takes over 100 bytes for each character of a text, so long texts are split into blocks.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any, Self

from neuronpipe.native import ffi, lib
from neuronpipe.plans.package import text_blocks
from neuronpipe.plans.package.text_blocks import NoPlace, Symbols, splits_locally, steps_of, word_marks
from neuronpipe.plans.package.tokenizer import open_tokenizer, panics_are_errors
from neuronpipe.protocol.errors import UserError

# Memory that the library takes while it reads a tokenizer.json, of the bytes of the file: 11 to 16.8 measured.
LIBRARY_FACTOR = 17
# Memory besides the tables, at most, in bytes: of a character's name in Python and in the library; of an object and of
# a value of JSON in Python; of a byte of an added token in the library's automaton, whose tables are full up to 100 of
# them.
NAME_BYTES, OBJECT_BYTES, VALUE_BYTES, FULL_STATE_BYTES, STATE_BYTES = 280, 400, 64, 1024, 64
MAX_FULL_PATTERNS = 100
MAX_WHOLE_CHARACTERS = 1 << 14  # of a text that is not split into blocks, which takes up to 900 bytes a character
_UNSUPPORTED = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")


def tokenizer_bytes(file_bytes: int, *, compact: bool) -> int:
    """Return the bytes of memory that a process takes for a tokenizer.json of this size.

    compact: `BytePairTokens.open` reads it
    """
    return 2 * file_bytes + (3 << 20) if compact else LIBRARY_FACTOR * file_bytes


class TextNotSplit(UserError):
    """A long text that cannot be encoded in blocks."""


class BytePairTokens:
    """The tokens of a tokenizer.json whose model is a byte-pair encoding."""

    def __init__(
        self, tables: Any, splitter: Any, whole: dict[str, Any], *, dropped_bytes: frozenset[int] | None
    ) -> None:
        """tables: the native library's np_vocabulary
        splitter: the library's tokenizer with single characters
        whole: the tokenizer.json, without vocabulary and merges
        dropped_bytes: long texts without these bytes may be split into blocks; None: no text may
        """
        self._tables, self._splitter = tables, splitter
        self.decoder, self.added = splitter.decoder, splitter.get_added_tokens_decoder()
        # The library has the names of added tokens as it has normalized them.
        self._added_names: dict[int, str] = {token: splitter.id_to_token(token) for token in self.added}
        self._special = {token.content for token in self.added.values() if token.special}
        self._whole_words, self._dropped_bytes = bool(whole["model"].get("ignore_merges")), dropped_bytes
        self._word_marks = word_marks(whole)

    @classmethod
    def open(cls, content: bytes) -> Self | None:
        """Return the tokens of a tokenizer.json; None if the library has to read it as a whole, because it is another
        model or might take more than `tokenizer_bytes`."""
        tables, cut = ffi.new("np_vocabulary **"), ffi.new("uint64_t[4]")
        max_bytes = tokenizer_bytes(len(content), compact=True) - len(content)
        if lib.np_vocabulary_read(ffi.from_buffer(content), len(content), max_bytes, tables, cut) != lib.NP_OK:
            return None
        vocabulary = ffi.gc(tables[0], lib.np_vocabulary_free)
        remainder = _without(content, [(cut[0], cut[1], b"{}"), (cut[2], cut[3], b"[]")])
        max_bytes -= lib.np_vocabulary_bytes(vocabulary) + _json_bytes(remainder)
        max_bytes -= NAME_BYTES * lib.np_vocabulary_characters(vocabulary, ffi.NULL)
        if max_bytes < 0:
            return None
        try:
            whole = json.loads(remainder)
            small, dropped_bytes = _single_characters(whole, vocabulary)
            if _automaton_bytes(whole) > max_bytes:
                return None
            splitter = open_tokenizer(json.dumps(small).encode(), "tokenizer.json")
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError, UserError):
            return None  # the library has the last word about what a tokenizer.json is
        return cls(vocabulary, splitter, whole, dropped_bytes=dropped_bytes)

    @property
    def ids(self) -> int:
        """One more than the largest id."""
        after_added: int = max(self.added, default=-1) + 1
        return max(int(lib.np_vocabulary_ids(self._tables)), after_added)

    @property
    def longest_name_bytes(self) -> int:
        names = (len(name.encode()) for name in self._added_names.values())
        return max(int(lib.np_vocabulary_longest_bytes(self._tables)), *names, 0)

    def name(self, token: int) -> str | None:
        return self._added_names.get(token) or _name(self._tables, token)

    def decode(self, tokens: Sequence[int], *, special: bool) -> str:
        names = [name for name in map(self.name, tokens) if name and (special or name not in self._special)]
        return " ".join(names) if self.decoder is None else str(self.decoder.decode(names))

    def encode(self, text: str, *, frame: bool) -> list[int]:
        """Return the token ids of a text, as `Tokenizer.encode`. Raises TextNotSplit."""
        if len(text) > text_blocks.BLOCK_CHARACTERS and self._splits(text):
            try:
                return self._encoded_in_blocks(text, frame=frame)
            except NoPlace:
                pass
        if len(text) > MAX_WHOLE_CHARACTERS:
            raise TextNotSplit(
                "the text is long, and this tokenizer has no place to split it, or no token for a character of it; "
                "send less of it"
            )
        encoding = self._split(text, frame=frame)
        return list(self._merged(array("I", encoding.ids), _word_starts(encoding)))

    def _splits(self, text: str) -> bool:
        """Return True if a text may be split into blocks."""
        if not self._dropped_bytes:
            return self._dropped_bytes is not None
        return self._dropped_bytes.isdisjoint(text.encode(errors="replace"))

    def _encoded_in_blocks(self, text: str, *, frame: bool) -> list[int]:
        """Return the token ids of a text. Raises NoPlace."""
        before, after = self._frame(text[: text_blocks.BLOCK_CHARACTERS]) if frame else ([], [])
        tokens, ids, word_starts = array("I", before), array("I"), bytearray()

        def symbols_of(block: str, offset: int) -> Symbols:
            encoding = self._split(block, frame=False)
            offsets = [offset + start for start, _ in encoding.offsets]
            return Symbols(encoding.ids, _word_starts(encoding), offsets)

        for symbols in text_blocks.blocks(text, symbols_of, self._word_marks):
            ids.extend(symbols.ids)
            word_starts += symbols.word_starts
            whole = max(0, word_starts.rfind(1))  # the last word may go on in the next block
            tokens.extend(self._merged(ids[:whole], word_starts[:whole]))
            del ids[:whole], word_starts[:whole]
        tokens.extend(self._merged(ids, word_starts))
        return [*tokens, *after]

    def _split(self, text: str, *, frame: bool) -> Any:
        """Return the library's encoding of a text, whose tokens are symbols."""
        with panics_are_errors():
            return self._splitter.encode(text, add_special_tokens=frame)

    def _frame(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens that frame a text, before and after it. Raises NoPlace if nothing is between them."""
        encoding = self._split(text, frame=True)
        inside = [place for place, word in enumerate(encoding.word_ids) if word is not None]
        if not inside:
            raise NoPlace
        return encoding.ids[: inside[0]], encoding.ids[inside[-1] + 1 :]

    def _merged(self, symbols: array[int], word_starts: bytes | bytearray) -> array[int]:
        """Return the tokens of whole words. symbols: are overwritten"""
        with ffi.from_buffer("uint32_t[]", symbols, require_writable=True) as tokens:
            starts = ffi.from_buffer(word_starts)
            count = lib.np_vocabulary_merge(self._tables, tokens, starts, len(symbols), int(self._whole_words))
        if count < 0:
            raise MemoryError
        return symbols[:count]


def _word_starts(encoding: Any) -> bytes:
    """Return 1 for the first symbol of a word and for tokens that frame a text, else 0."""
    words = encoding.word_ids
    return bytes(word is None or word != before for word, before in zip(words, [None, *words], strict=False))


def _name(tables: Any, token: int) -> str | None:
    length = ffi.new("uint32_t *")
    name = lib.np_vocabulary_name(tables, token, length) if 0 <= token < 1 << 32 else ffi.NULL
    return None if name == ffi.NULL else bytes(ffi.buffer(name, length[0])).decode()


def _token(tables: Any, name: str) -> int | None:
    encoded = name.encode()
    token = lib.np_vocabulary_token(tables, encoded, len(encoded))
    return None if token == lib.NP_NO_TOKEN else int(token)


def _without(content: bytes, spans: Sequence[tuple[int, int, bytes]]) -> bytes:
    """Return the content with something else in the places of some spans."""
    parts, at = [], 0
    for start, stop, instead in sorted(spans):
        parts += [content[at:start], instead]
        at = stop
    return b"".join([*parts, content[at:]])


def _json_bytes(text: bytes) -> int:
    """Return the bytes that Python takes for JSON at most, and its text three times."""
    return OBJECT_BYTES * text.count(b"{") + VALUE_BYTES * (text.count(b"[") + text.count(b",")) + 3 * len(text)


def _automaton_bytes(whole: dict[str, Any]) -> int:
    """Return the bytes that the library takes to find added tokens."""
    contents = [len(token["content"].encode()) for token in whole.get("added_tokens") or []]
    return sum(contents) * (FULL_STATE_BYTES if len(contents) <= MAX_FULL_PATTERNS else STATE_BYTES)


def _single_characters(whole: dict[str, Any], tables: Any) -> tuple[dict[str, Any], frozenset[int] | None]:
    """Return the tokenizer.json with a vocabulary of characters, bytes, the unknown and added tokens, without merges,
    and what `splits_locally` returns. Raises ValueError if its symbols would not become the library's tokens.

    whole: the tokenizer.json, without vocabulary and merges
    """
    model, added = whole["model"], whole.get("added_tokens") or []
    if model.get("type") != "BPE" or any(model.get(option) for option in _UNSUPPORTED):
        raise ValueError("another model")
    if not isinstance(model.get("ignore_merges", False), bool):  # the library would not see it
        raise ValueError("ignore_merges")
    unknown = model.get("unk_token")
    bytes_names = [f"<0x{byte:02X}>" for byte in range(256)] if model.get("byte_fallback") else []
    if model.get("ignore_merges") and (not lib.np_vocabulary_is_spelled(tables) or len(unknown or "--") < 2):
        raise ValueError("the characters of a whole word do not tell it")
    for step in steps_of(whole.get("post_processor"), "processors"):
        pieces = [piece["Sequence"]["id"] for piece in step.get("single") or [] if "Sequence" in piece]
        if step["type"] == "TemplateProcessing" and pieces != ["A"]:
            raise ValueError("a text occurs more than once in its template")
    ids = ffi.new("uint32_t[]", max(1, lib.np_vocabulary_characters(tables, ffi.NULL)))
    characters = range(lib.np_vocabulary_characters(tables, ids))
    names: dict[str, int] = {str(_name(tables, ids[place])): ids[place] for place in characters}
    special = bytes_names + ([] if unknown is None else [unknown])
    names |= {name: token for name in special if (token := _token(tables, name)) is not None}
    dropped_bytes = splits_locally(whole, names)
    vocabulary, largest_added = lib.np_vocabulary_tokens(tables), -1
    if len({token["content"] for token in added}) < len(added):
        raise ValueError("two added tokens have one name")
    for token in added:
        content, declared = token["content"], token["id"]
        # The library ignores the declared id. A new token follows the vocabulary, or the largest added one so far.
        in_vocabulary, next_id = _token(tables, content), max(vocabulary, largest_added + 1)
        if declared != (next_id if in_vocabulary is None else in_vocabulary):
            raise ValueError(f"added token {declared} would get another id")
        if in_vocabulary is None and (len(content) < 2 or content in special):
            raise ValueError(f"the model would take added token {declared} for its own")
        names[content] = declared
        largest_added = max(largest_added, declared)
    return whole | {"model": model | {"vocab": names, "merges": [], "ignore_merges": False}}, dropped_bytes

"""A byte-pair encoding in little memory.

The `tokenizers` library keeps a vocabulary as strings, several times: 70 to 400 MB for the models of 2025. Here it
reads the same tokenizer.json with a vocabulary of single characters and without merges. So it finds added tokens,
normalizes, splits a text into words, and adds what frames it, and each word becomes its characters. The native library
has the whole vocabulary in tables and merges the characters.

The library also takes over 100 bytes for each character of a text, so long texts are split into blocks that overlap.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self

from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.tokenizer import open_tokenizer, panics_are_errors
from neuronpipe.protocol.errors import UserError

# Memory that the library takes while it reads a tokenizer.json, of the bytes of the file: 11 to 16.8 measured.
LIBRARY_FACTOR = 17
SPLITTER_FACTOR = 10  # the same without vocabulary and merges: 4 to 10 measured
BLOCK_CHARACTERS = 8_192
OVERLAP_CHARACTERS = 1_024
MAX_WHOLE_CHARACTERS = 16 * BLOCK_CHARACTERS  # of a text that may be encoded in one block
_UNSUPPORTED = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")


def tokenizer_bytes(file_bytes: int, *, compact: bool) -> int:
    """Return the bytes of memory that a process takes for a tokenizer.json of this size.

    compact: `BytePairTokens.open` reads it
    """
    return 2 * file_bytes + (3 << 20) if compact else LIBRARY_FACTOR * file_bytes


class TextNotSplit(ValueError):
    """A text that cannot be encoded in blocks."""


class Symbols(NamedTuple):
    """The symbols of a text: its characters, bytes and added tokens, before they are merged.

    ids: token id of each symbol
    word_starts: 1 for the first symbol of a word, else 0
    offsets: position of each symbol in the text, in characters
    """

    ids: list[int]
    word_starts: bytes
    offsets: list[int]

    def part(self, start: int, stop: int | None = None) -> Symbols:
        """Return the symbols from one place in the lists to another."""
        return Symbols(self.ids[start:stop], self.word_starts[start:stop], self.offsets[start:stop])


class BytePairTokens:
    """The tokens of a tokenizer.json whose model is a byte-pair encoding."""

    def __init__(self, tables: Any, splitter: Any, *, whole_words: bool) -> None:
        """tables: the native library's np_vocabulary
        splitter: the library's tokenizer with single characters
        whole_words: a word that is a token as a whole is not merged
        """
        self._tables, self._splitter, self._whole_words = tables, splitter, whole_words
        self.decoder = splitter.decoder
        self.added: Mapping[int, Any] = splitter.get_added_tokens_decoder()

    @classmethod
    def open(cls, content: bytes) -> Self | None:
        """Return the tokens of a tokenizer.json; None if the library has to read it as a whole, because it is another
        model or would take more than `tokenizer_bytes`."""
        tables, cut = ffi.new("np_vocabulary **"), ffi.new("uint64_t[4]")
        max_bytes = tokenizer_bytes(len(content), compact=True) - len(content)
        if lib.np_vocabulary_read(ffi.from_buffer(content), len(content), max_bytes, tables, cut) != lib.NP_OK:
            return None
        vocabulary = ffi.gc(tables[0], lib.np_vocabulary_free)
        try:
            whole = json.loads(_without(content, [(cut[0], cut[1], b"{}"), (cut[2], cut[3], b"[]")]))
            small = json.dumps(_single_characters(whole, vocabulary)).encode()
            if lib.np_vocabulary_bytes(vocabulary) + SPLITTER_FACTOR * len(small) > max_bytes:
                return None
            splitter = open_tokenizer(small, "tokenizer.json")
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError, UserError):
            return None  # the library has the last word about what a tokenizer.json is
        return cls(vocabulary, splitter, whole_words=bool(whole["model"].get("ignore_merges")))

    @property
    def ids(self) -> int:
        """One more than the largest id."""
        return max(int(lib.np_vocabulary_ids(self._tables)), *(token + 1 for token in self.added), 0)

    @property
    def longest_name_bytes(self) -> int:
        names = (len(token.content.encode()) for token in self.added.values())
        return max(int(lib.np_vocabulary_longest_bytes(self._tables)), *names, 0)

    def name(self, token: int) -> str | None:
        added = self.added.get(token)
        return _name(self._tables, token) if added is None else str(added.content)

    def decode(self, tokens: Sequence[int], *, special: bool) -> str:
        names = [name for token in tokens if (special or not self._is_special(token)) and (name := self.name(token))]
        return " ".join(names) if self.decoder is None else str(self.decoder.decode(names))

    def encode(self, text: str, *, frame: bool) -> list[int]:
        """Return the token ids of a text, as `Tokenizer.encode`. Raises TextNotSplit."""
        if len(text) <= BLOCK_CHARACTERS:
            symbols = self._symbols(text, frame=frame)
            return list(self._merged(array("I", symbols.ids), symbols.word_starts))
        before, after = self._frame if frame else ([], [])
        tokens, ids, word_starts = array("I", before), array("I"), bytearray()
        for symbols in self._parts(text):
            ids.extend(symbols.ids)
            word_starts += symbols.word_starts
            whole = max(0, word_starts.rfind(1))  # the last word may go on in the next block
            tokens.extend(self._merged(ids[:whole], word_starts[:whole]))
            del ids[:whole], word_starts[:whole]
        tokens.extend(self._merged(ids, word_starts))
        return [*tokens, *after]

    def _is_special(self, token: int) -> bool:
        return token in self.added and bool(self.added[token].special)

    def _symbols(self, text: str, *, frame: bool, offset: int = 0) -> Symbols:
        with panics_are_errors():
            encoding = self._splitter.encode(text, add_special_tokens=frame)
        words = encoding.word_ids
        starts = bytes(word is None or word != before for word, before in zip(words, [None, *words], strict=False))
        return Symbols(encoding.ids, starts, [offset + start for start, _ in encoding.offsets])

    def _parts(self, text: str) -> Iterable[Symbols]:
        """Return the symbols of a text that is longer than a block."""
        if len(text) > MAX_WHOLE_CHARACTERS:
            return self._blocks(text)
        try:
            return list(self._blocks(text))
        except TextNotSplit:
            return [self._symbols(text, frame=False)]

    def _blocks(self, text: str) -> Iterator[Symbols]:
        begin, end, open_block = 0, BLOCK_CHARACTERS, None
        while True:
            block = self._symbols(text[begin:end], frame=False, offset=begin)
            if open_block is not None:
                places = _agreement(open_block, block, begin)
                if places is None:
                    raise TextNotSplit("no two blocks of the text are split alike")
                yield open_block.part(0, places[0])
                block = block.part(places[1])
            if end >= len(text):
                yield block
                return
            open_block, begin = block, _last_word_start(block, end - OVERLAP_CHARACTERS)
            end = begin + BLOCK_CHARACTERS

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The tokens that frame a text, before and after it."""
        encoding = self._splitter.encode("a", add_special_tokens=True)
        words, ids = encoding.word_ids, encoding.ids
        inside = [place for place, word in enumerate(words) if word is not None] or [len(ids)]
        return ids[: inside[0]], ids[inside[-1] + 1 :]

    def _merged(self, symbols: array[int], word_starts: bytes | bytearray) -> array[int]:
        """Return the tokens of whole words. symbols: are overwritten"""
        with ffi.from_buffer("uint32_t[]", symbols, require_writable=True) as tokens:
            starts = ffi.from_buffer(word_starts)
            count = lib.np_vocabulary_merge(self._tables, tokens, starts, len(symbols), int(self._whole_words))
        if count < 0:
            raise MemoryError
        return symbols[:count]


def _agreement(first: Symbols, second: Symbols, begin: int) -> tuple[int, int] | None:
    """Return the places in two overlapping blocks from which their symbols are equal; None if they differ.

    begin: offset of the second block

    They are compared in the middle of the overlap: before it the second block lacks what precedes it, and after it the
    first block lacks what follows.
    """
    start, stop = begin + OVERLAP_CHARACTERS // 4, begin + OVERLAP_CHARACTERS * 3 // 4
    places = [tuple(bisect_left(block.offsets, at) for at in (start, stop)) for block in (first, second)]
    (first_start, first_stop), (second_start, second_stop) = places
    equal = first.part(first_start, first_stop) == second.part(second_start, second_stop)
    return (first_start, second_start) if equal and first_start < first_stop else None


def _last_word_start(block: Symbols, limit: int) -> int:
    """Return the offset of the last word that begins at most at `limit`, or `limit` if it is far away."""
    for place in range(len(block.ids) - 1, -1, -1):
        if block.offsets[place] <= limit - OVERLAP_CHARACTERS:
            break
        if block.word_starts[place] and block.offsets[place] <= limit:
            return block.offsets[place]
    return limit


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


def _single_characters(whole: dict[str, Any], tables: Any) -> dict[str, Any]:
    """Return the tokenizer.json with a vocabulary of single characters and no merges. Raises ValueError if the library
    would then number or split otherwise.

    whole: the tokenizer.json, without vocabulary and merges
    """
    model, added = whole["model"], whole.get("added_tokens") or []
    if model.get("type") != "BPE" or any(model.get(option) for option in _UNSUPPORTED):
        raise ValueError("another model")
    ids = ffi.new("uint32_t[]", max(1, lib.np_vocabulary_characters(tables, ffi.NULL)))
    names = {_name(tables, ids[place]): ids[place] for place in range(lib.np_vocabulary_characters(tables, ids))}
    if model.get("ignore_merges") and not lib.np_vocabulary_is_spelled(tables):
        raise ValueError("a whole word may have a character that is no token")
    special = [f"<0x{byte:02X}>" for byte in range(256)] if model.get("byte_fallback") else []
    special += [] if model.get("unk_token") is None else [model["unk_token"]]
    names |= {name: token for name in special if (token := _token(tables, name)) is not None}
    vocabulary, largest = lib.np_vocabulary_tokens(tables), -1
    for token in added:
        content, declared = token["content"], token["id"]
        # The library ignores the declared number. New tokens follow the vocabulary, or the largest one so far.
        in_vocabulary, next_id = _token(tables, content), max(vocabulary, largest + 1)
        if declared != (next_id if in_vocabulary is None else in_vocabulary) or (
            in_vocabulary is None and len(content) < 2
        ):
            raise ValueError(f"added token {declared} would get another number")
        names[content] = declared
        largest = max(largest, declared)
    return whole | {"model": model | {"vocab": names, "merges": [], "ignore_merges": False}}

"""Splits a long text into overlapping blocks, whose symbols together are those of the whole text.

A tokenizer finds added tokens, normalizes, and splits from left to right. Where two blocks begin a word at the same
place and agree on what surrounds it, the second one continues like the whole text, if nothing in the tokenizer looks
further than the overlap. `splits_locally` tells that from a tokenizer.json.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

BLOCK_CHARACTERS = 8_192
OVERLAP_CHARACTERS = 1_024
MIN_TRIES, TRIES = 8, 3  # of blocks, for a text and for each of its blocks: a hostile text takes bounded time
LOCAL_NORMALIZERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Replace", "StripAccents", "ByteLevel")
)
LOCAL_PRE_TOKENIZERS = frozenset(
    ("ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "Digits", "Punctuation", "BertPreTokenizer", "Split")
)
# Parts of a regular expression that look behind, far ahead, or at the ends of the text.
NOT_LOCAL = re.compile(r"\(\?[=<]|\(\?!(?!\\S\))|\\[bBAzZGK]|\$|\^")
CLASS_OR_ESCAPE = re.compile(r"(\\.)|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
# Bytes of control characters and of planes 4 to 16, which no normalization makes of other characters, and those that
# occur in no text. Vocabularies made from a corpus lack some of them: SmolLM2's lacks 21.
RARE_BYTES = frozenset((*range(0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100)))


class NoPlace(Exception):
    """Two blocks have no place from which the second continues the first."""


class Symbols(NamedTuple):
    """The symbols of a text: its characters, bytes and added tokens, before they are merged.

    ids: token id of each symbol
    word_starts: 1 for the first symbol of a word, else 0
    offsets: position in the text, in characters, as the library reports it
    """

    ids: list[int]
    word_starts: bytes
    offsets: list[int]

    def part(self, start: int, stop: int | None = None) -> Symbols:
        """Return the symbols from one place in the lists to another."""
        return Symbols(self.ids[start:stop], self.word_starts[start:stop], self.offsets[start:stop])


def steps_of(part: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part of a tokenizer.json, which is a step or a sequence of them.

    inner: field that has the steps of a sequence
    """
    if part is not None and part["type"] == "Sequence":
        for step in part[inner]:
            yield from steps_of(step, inner)
    elif part is not None:
        yield part


def word_marks(whole: dict[str, Any]) -> frozenset[str] | None:
    """Return the characters at which a tokenizer.json splits a text into words, if it splits nowhere else; else None.

    Other places may then lie in two blocks: what is between two of these characters is one word wherever it begins.
    """
    marks: set[str] = set()
    for step in steps_of(whole.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Metaspace":
            marks |= {" ", step["replacement"]}
        elif step["type"] == "Split" and "String" in step["pattern"]:
            marks |= set(step["pattern"]["String"])
        else:
            return None
    return frozenset(marks)


def bytes_by_character() -> dict[str, int]:
    """Return the byte of each character of the byte-level alphabet: a printable byte is its own character, the others
    follow from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(unprintable)}


def splits_locally(whole: dict[str, Any], names: dict[str, int]) -> frozenset[int] | None:
    """Return the bytes without which a tokenizer.json treats each place of a text by what is less than the overlap
    away: those that it has no token for. None if it treats no text like that.

    names: tokens of single characters and bytes
    """
    normalizers = list(steps_of(whole.get("normalizer"), "normalizers"))
    pre_tokenizers = list(steps_of(whole.get("pre_tokenizer"), "pretokenizers"))
    longest = max((len(token["content"]) for token in whole.get("added_tokens") or []), default=0)
    is_local = (
        all(_is_local_normalizer(step, at_marks=word_marks(whole) is not None) for step in normalizers)
        and all(_is_local_pre_tokenizer(step) for step in pre_tokenizers)
        and longest <= OVERLAP_CHARACTERS // 4
    )
    steps = [step["type"] for step in (*normalizers, *pre_tokenizers)]
    return _dropped_bytes(whole["model"], names, steps) if is_local else None


def blocks(text: str, symbols_of: Callable[[str, int], Symbols], marks: frozenset[str] | None) -> Iterator[Symbols]:
    """Yield the symbols of a text, some at a time. Raises NoPlace.

    symbols_of: returns the symbols of a block, given its text and its offset
    marks: `word_marks` of the tokenizer
    """
    tries = MIN_TRIES + TRIES * len(text) // (BLOCK_CHARACTERS - OVERLAP_CHARACTERS)

    def counted(part: str, offset: int) -> Symbols:
        nonlocal tries
        tries -= 1
        if tries < 0:
            raise NoPlace
        return symbols_of(part, offset)

    block, begin = counted(text[:BLOCK_CHARACTERS], 0), 0
    while begin + BLOCK_CHARACTERS < len(text):
        complete, block, begin = _continued(block, text, begin, counted, marks)
        yield complete
    yield block


def _continued(
    block: Symbols, text: str, begin: int, symbols_of: Callable[[str, int], Symbols], marks: frozenset[str] | None
) -> tuple[Symbols, Symbols, int]:
    """Return the part of a block that another one continues, the other from there on, and its offset. Raises NoPlace.

    begin: offset of the block

    The other block begins as late as possible. Where a long word has no place, it begins before the word.
    """
    for overlap in range(OVERLAP_CHARACTERS, BLOCK_CHARACTERS, OVERLAP_CHARACTERS):
        next_begin = _last_word_start(block, begin + BLOCK_CHARACTERS - overlap)
        if next_begin <= begin:
            break
        following = symbols_of(text[next_begin : next_begin + BLOCK_CHARACTERS], next_begin)
        try:
            stop, start = _common_place(block, following, text, next_begin, marks)
        except NoPlace:
            continue
        return block.part(0, stop), following.part(start), next_begin
    raise NoPlace


def _common_place(
    first: Symbols, second: Symbols, text: str, begin: int, marks: frozenset[str] | None
) -> tuple[int, int]:
    """Return the places in two overlapping blocks from which the second continues the first. Raises NoPlace.

    begin: offset of the second block

    They are compared in the middle of the overlap: before it the second block lacks what precedes it, and after it the
    first block lacks what follows.
    """
    start, stop = begin + OVERLAP_CHARACTERS // 4, begin + OVERLAP_CHARACTERS * 3 // 4
    first_start, first_stop = (bisect_left(first.offsets, at) for at in (start, stop))
    second_start, second_stop = (bisect_left(second.offsets, at) for at in (start, stop))
    if first.part(first_start, first_stop) != second.part(second_start, second_stop):
        raise NoPlace
    if marks is None and 1 not in first.word_starts[first_start:first_stop] and _is_run(text[begin:stop]):
        marks = frozenset()  # in the middle of a run, which goes on alike in both blocks
    for place in range(first_start + 1, first_stop):
        at, before = first.offsets[place], first.offsets[place - 1]
        begins = first.word_starts[place] if marks is None else at > before and marks.isdisjoint(text[at - 1 : at + 1])
        if begins and _stands_alone(text[at]):
            return place, place - first_start + second_start
    raise NoPlace


def _is_run(text: str) -> bool:
    """Return True if a text consists of one kind of letters, or of spaces."""
    kinds = set(map(unicodedata.category, text))
    return set(text) == {" "} or (len(kinds) == 1 and kinds <= {"Lu", "Ll", "Lo"})


def _stands_alone(character: str) -> bool:
    """Return True if no normalization joins a character with the one before it, or moves it."""
    return character.isascii() or (
        unicodedata.category(character)[0] in "LNPS"
        and not unicodedata.combining(character)
        and not unicodedata.decomposition(character)
        and not 0x1100 <= ord(character) < 0x1200  # parts of Korean syllables
    )


def _last_word_start(block: Symbols, limit: int) -> int:
    """Return the offset of the last word that begins at most at `limit`, or `limit` if it is far away."""
    for place in range(len(block.ids) - 1, -1, -1):
        if block.offsets[place] <= limit - OVERLAP_CHARACTERS:
            break
        if block.word_starts[place] and block.offsets[place] <= limit:
            return block.offsets[place]
    return limit


def _is_local_normalizer(step: dict[str, Any], *, at_marks: bool) -> bool:
    if step["type"] != "Replace":
        return step["type"] in LOCAL_NORMALIZERS
    replaced = step["pattern"].get("String", "")
    return len(replaced) == 1 or (len(replaced) > 1 and not at_marks)


def _is_local_pre_tokenizer(step: dict[str, Any]) -> bool:
    pattern = step["pattern"].get("Regex", "") if step["type"] == "Split" else ""
    return step["type"] in LOCAL_PRE_TOKENIZERS and not NOT_LOCAL.search(
        CLASS_OR_ESCAPE.sub(lambda match: match[1] or "", pattern)
    )


def _dropped_bytes(model: dict[str, Any], names: dict[str, int], steps: list[str]) -> frozenset[int] | None:
    """Return the bytes that become no symbol: the library's offsets are wrong behind one. None if it is not known which
    texts have them, once they are normalized."""
    if model.get("unk_token") is not None:
        return frozenset()
    if model.get("byte_fallback"):
        return frozenset() if all(f"<0x{byte:02X}>" in names for byte in range(256)) else None
    dropped = frozenset(byte for character, byte in bytes_by_character().items() if character not in names)
    is_known = "ByteLevel" in steps and (not dropped or (dropped <= RARE_BYTES and "Replace" not in steps))
    return dropped if is_known else None

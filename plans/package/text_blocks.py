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
LOCAL_NORMALIZERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Replace", "StripAccents", "ByteLevel")
)
LOCAL_PRE_TOKENIZERS = frozenset(
    ("ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "Digits", "Punctuation", "BertPreTokenizer", "Split")
)
# Parts of a regular expression that look behind, far ahead, or at the ends of the text.
NOT_LOCAL = re.compile(r"\(\?[=<]|\(\?!(?!\\S\))|\\[bBAzZGK]|\$|\^")
CLASS_OR_ESCAPE = re.compile(r"(\\.)|\[(?:\\.|[^\]\\])*\]", re.DOTALL)


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


def is_one_word(whole: dict[str, Any]) -> bool:
    """Return True if a tokenizer.json does not split a text into words."""
    steps = list(steps_of(whole.get("pre_tokenizer"), "pretokenizers"))
    return all(step["type"] == "Metaspace" and step.get("split") is False for step in steps)


def splits_locally(whole: dict[str, Any], names: dict[str, int]) -> bool:
    """Return True if a tokenizer.json treats each place of a text by what is less than the overlap away.

    names: tokens of single characters and bytes
    """
    normalizers = list(steps_of(whole.get("normalizer"), "normalizers"))
    pre_tokenizers = list(steps_of(whole.get("pre_tokenizer"), "pretokenizers"))
    longest = max((len(token["content"]) for token in whole.get("added_tokens") or []), default=0)
    return (
        all(_is_local_normalizer(step, one_word=is_one_word(whole)) for step in normalizers)
        and all(_is_local_pre_tokenizer(step) for step in pre_tokenizers)
        and longest <= OVERLAP_CHARACTERS // 4
        and _keeps_characters(whole["model"], names, [step["type"] for step in (*normalizers, *pre_tokenizers)])
    )


def blocks(text: str, symbols_of: Callable[[str, int], Symbols], *, one_word: bool) -> Iterator[Symbols]:
    """Yield the symbols of a text, some at a time. Raises NoPlace.

    symbols_of: returns the symbols of a block, given its text and its offset
    one_word: the tokenizer does not split a text into words
    """
    begin, end, before = 0, BLOCK_CHARACTERS, None
    while True:
        block = symbols_of(text[begin:end], begin)
        if before is not None:
            stop, start = _common_place(before, block, text, begin, one_word=one_word)
            yield before.part(0, stop)
            block = block.part(start)
        if end >= len(text):
            yield block
            return
        before, begin = block, _last_word_start(block, end - OVERLAP_CHARACTERS)
        end = begin + BLOCK_CHARACTERS


def _common_place(first: Symbols, second: Symbols, text: str, begin: int, *, one_word: bool) -> tuple[int, int]:
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
    if (
        not one_word
        and 1 not in first.word_starts[first_start:first_stop]
        and _is_run(text[begin : begin + OVERLAP_CHARACTERS])
    ):
        one_word = True  # in the middle of a word of one kind of letters, which goes on alike in both blocks
    for place in range(first_start + 1, first_stop):
        begins = first.offsets[place] != first.offsets[place - 1] if one_word else first.word_starts[place]
        if begins and _stands_alone(text[first.offsets[place]]):
            return place, place - first_start + second_start
    raise NoPlace


def _is_run(text: str) -> bool:
    """Return True if a text consists of one kind of letters."""
    kinds = set(map(unicodedata.category, text))
    return len(kinds) == 1 and kinds <= {"Lu", "Ll", "Lo"}


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


def _is_local_normalizer(step: dict[str, Any], *, one_word: bool) -> bool:
    if step["type"] != "Replace":
        return step["type"] in LOCAL_NORMALIZERS
    replaced = step["pattern"].get("String", "")
    return len(replaced) == 1 or (len(replaced) > 1 and not one_word)


def _is_local_pre_tokenizer(step: dict[str, Any]) -> bool:
    pattern = step["pattern"].get("Regex", "") if step["type"] == "Split" else ""
    return step["type"] in LOCAL_PRE_TOKENIZERS and not NOT_LOCAL.search(
        CLASS_OR_ESCAPE.sub(lambda match: match[1] or "", pattern)
    )


def _keeps_characters(model: dict[str, Any], names: dict[str, int], steps: list[str]) -> bool:
    """Return True if each character becomes a symbol: the library's offsets are wrong behind one that does not."""
    from tokenizers.pre_tokenizers import ByteLevel

    if model.get("unk_token") is not None:
        return True
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in names for byte in range(256))
    return "ByteLevel" in steps and all(character in names for character in ByteLevel.alphabet())

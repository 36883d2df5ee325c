"""Expresses sentencepiece's character map, `precompiled_charsmap`, as normalizers of a tokenizer.json.

Sentencepiece replaces the longest key of the map at each position by its value. Characters that begin no key remain,
and values are not replaced again. Keys of several characters are sequences that Unicode composes: a letter and its
marks, the parts of a Hangul syllable, each in all compatible variants.

The normalizer `Precompiled` of the tokenizers library works differently. It replaces a whole grapheme of at most five
bytes, with its marks and line ends, by the value of the shortest key that it begins with, and looks up only single
characters of longer graphemes. So this module passes single characters to it, and lets NFC compose the results:

    step                                                  Z in a square, acute accent, grave accent
    put a boundary after each longest key before a mark   [Z] acute | grave
    put a gap before each mark                            [Z] _ acute | _ grave
    replace single characters by the map                  Z _ acute | _ grave
    remove gaps, then compose (NFC) between boundaries    Z with acute | grave
    remove boundaries                                     Z with acute, grave

Boundary and gap are two characters that the map replaces. They are replaced first, so that the text does not contain
them. Maps whose keys do not get their values in this way are refused, such as those that fold case.
"""

from __future__ import annotations

import functools
import struct
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from tokenizers import Regex, normalizers

MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_NODES = 64, 128, 1 << 19  # nmt_nfkc has 262,842 nodes
MAX_EXCEPTIONS = 64  # keys that need a separate step; nmt_nfkc has 21
LEAF = 1 << 8  # bit of a unit: a key ends at the unit
# Characters, besides those in keys, that may continue a grapheme or be composed with the character before them: marks,
# characters unknown to this version of Unicode, joiners, Thai and Lao AM, Hangul vowels and final consonants, vowels of
# Kirat Rai, emoji modifiers, and tags.
CONTINUES = (
    r"\p{M}\p{Cn}\x{200C}\x{200D}\x{E33}\x{EB3}\x{1160}-\x{11FF}\x{D7B0}-\x{D7FF}"
    r"\x{16D63}-\x{16D6A}\x{1F3FB}-\x{1F3FF}\x{E0020}-\x{E007F}"
)


class CharacterMap(NamedTuple):
    """A character map.

    values: key -> value
    units: units of the double-array trie
    ends: key -> number of the unit at which it ends
    text: the values as stored
    """

    values: dict[str, str]
    units: list[int]
    ends: dict[str, int]
    text: bytes

    def without(self, keys: Iterable[str]) -> bytes:
        """Return the stored form of the map without `keys`."""
        units = self.units.copy()
        for key in keys:
            units[self.ends[key]] &= ~LEAF
        return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + self.text


def read_character_map(data: bytes) -> CharacterMap:
    """Return the map in `data`: size of a double-array trie (darts-clone), the trie, zero-terminated values. Raises
    ValueError if it is damaged."""
    if len(data) < 4:
        raise ValueError("truncated")
    (size,) = struct.unpack_from("<I", data)
    if size % 4 or not 4 <= size <= len(data) - 4:
        raise ValueError("truncated")
    units, text = list(struct.unpack_from(f"<{size // 4}I", data, 4)), data[4 + size :]
    values, ends = {}, {}
    for key, end, offset in _keys(units):
        value, zero, _ = text[offset : offset + MAX_VALUE_BYTES].partition(b"\0")
        if not zero:
            raise ValueError("a value has no end")
        name = key.decode()
        values[name], ends[name] = value.decode(), end
    return CharacterMap(values, units, ends, text)


def _keys(units: list[int]) -> Iterator[tuple[bytes, int, int]]:
    """Yield (key, number of the unit at which it ends, offset of its value). Raises ValueError if damaged."""
    children = defaultdict(list)  # by the base of their parent
    for number, unit in enumerate(units):
        if 0 < (label := unit & 0x800000FF) < 256:
            children[number ^ label].append((label, number))
    nodes, waiting = 0, [(b"", 0)]
    while waiting:
        prefix, number = waiting.pop()
        unit, nodes = units[number], nodes + 1
        base = number ^ ((unit >> 10) << ((unit & (1 << 9)) >> 6))
        if prefix and unit & LEAF:
            if base >= len(units):
                raise ValueError("a key has no value")
            yield prefix, number, units[base] & 0x7FFFFFFF
        if len(prefix) > MAX_KEY_BYTES or nodes > MAX_NODES:  # a trie with a circle has keys without end
            raise ValueError("its keys are too long or too many")
        waiting += [(prefix + bytes((label,)), child) for label, child in children[base]]


def as_normalizers(data: bytes) -> list[normalizers.Normalizer]:
    """Return normalizers that replace as sentencepiece does with the map in `data`. Raises ValueError if the map is
    damaged, or if no normalizers can do so."""
    characters = read_character_map(data)
    expected = dict(characters.values)
    sequences = [key for key in expected if len(key) > 1]
    composes = len(sequences) > MAX_EXCEPTIONS
    exceptions, affected, between = sequences, expected, _unused(expected)
    if composes:
        expected |= {character: character for character in _decomposable() if character not in expected}
        wrong = _wrong_values(_steps(characters, sequences, (), composes), expected, between)
        exceptions = [key for key in wrong if len(key) > 1][:MAX_EXCEPTIONS]  # in scripts that NFC does not know yet
        affected = {key: expected[key] for key in expected if key in wrong or key.endswith(tuple(exceptions))}
    steps = _steps(characters, sequences, exceptions, composes)
    for key, actual in _wrong_values(steps, affected, between).items():
        raise ValueError(f"{key!a} would become {actual!a}, not {expected[key]!a}")
    return steps


def _steps(
    characters: CharacterMap, sequences: Collection[str], exceptions: Iterable[str], composes: bool
) -> list[normalizers.Normalizer]:
    """Return the steps in the table above, and those of exceptions.

    sequences: the keys of several characters
    exceptions: sequences that get a separate step
    composes: NFC composes the values of the other sequences
    """
    values = characters.values
    boundary, gap = _separators(values, sequences)
    tails = {character for key in sequences for character in key[1:]}
    continues = f"[{CONTINUES}{_members(tails)}]"
    keys = _pattern(frozenset(sequences)) + "|" if sequences else ""
    longest_first = sorted(exceptions, key=lambda key: (-len(key), key))
    return [
        normalizers.Replace(boundary, values[boundary]),
        normalizers.Replace(gap, values[gap]),
        # \K makes each match empty, at its end, where the next match begins.
        normalizers.Replace(Regex(rf"(?m:(?=.{continues})(?>{keys}.)\K)"), boundary),
        *(normalizers.Replace(key + boundary, values[key] + boundary) for key in longest_first),
        # The library cannot insert at the beginning of a text.
        normalizers.Replace(Regex(rf"(?m:(?<=.)(?={continues})|(?<=\r)(?=\n))"), gap),
        normalizers.Precompiled(characters.without((boundary, gap))),
        normalizers.Replace(gap, ""),
        *([normalizers.NFC()] if composes else []),
        normalizers.Replace(boundary, ""),
    ]


def _separators(values: Mapping[str, str], sequences: Iterable[str]) -> tuple[str, str]:
    """Return two punctuation marks for boundary and gap. The map replaces them by ASCII characters that it does not
    replace, and no sequence contains them. Raises ValueError if there are none."""
    unusable = {*"".join(sequences), *_decomposable()}
    free = (
        key
        for key, value in values.items()
        if len(key) == 1 and unicodedata.category(key).startswith("P")
        if unusable.isdisjoint(key + value) and values.keys().isdisjoint(value) and value.isascii()
    )
    separators = sorted(free)[:2]
    if len(separators) < 2:
        raise ValueError("no characters are free to separate its keys")
    return separators[0], separators[1]


def _pattern(words: frozenset[str]) -> str:
    """Return a regular expression that matches the longest of `words`."""
    rests = defaultdict(set)
    for word in words:
        if word:
            rests[word[0]].add(word[1:])
    classes = defaultdict(set)
    for first, tails in rests.items():
        classes[frozenset(tails)].add(first)
    branches = sorted(
        f"[{_members(firsts)}]{'' if tails == {''} else _pattern(tails)}" for tails, firsts in classes.items()
    )
    return f"(?:{'|'.join(branches)}){'?' if '' in words else ''}"


def _members(characters: Iterable[str]) -> str:
    return "".join(
        rf"\x{{{ord(character):X}}}" if character.isascii() else character for character in sorted(characters)
    )


def _unused(values: Mapping[str, str]) -> str:
    used = {*"".join(values), *"".join(values.values())}
    return next((character for character in map(chr, range(0x4E00, 0x9FFF)) if character not in used), "\0")


def _wrong_values(steps: list[normalizers.Normalizer], expected: Mapping[str, str], between: str) -> dict[str, str]:
    """Return key -> result of `steps` for the keys whose result differs from the expected value. Raises ValueError if
    the results cannot be separated.

    between: a character that the steps do not change
    """
    if not expected:
        return {}
    actual = normalizers.Sequence(steps).normalize_str(between.join(expected)).split(between)
    if len(actual) != len(expected):
        raise ValueError("its values cannot be distinguished")
    pairs = zip(expected.items(), actual, strict=True)
    return {key: found for (key, value), found in pairs if found != value}


@functools.cache
def _decomposable() -> frozenset[str]:
    """Return the characters with a canonical decomposition."""
    decompositions = ((character, unicodedata.decomposition(character)) for character in map(chr, range(0x110000)))
    return frozenset(character for character, text in decompositions if text and not text.startswith("<"))

"""Sentencepiece's character maps: each text becomes what the library makes of it, or the map is refused."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st
from neuronpipe.plans.convert.character_map import as_normalizers, read_character_map
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import normalizers

RULES = ["nmt_nfkc", "nfkc"]
# Characters that the maps replace alone and with marks, marks, parts of syllables, line ends, and what separates keys.
AWKWARD = (
    "aeAZ\u00b8\u00bd\u017f\u0130\U0001f149\uff21\uff76\uff9e\u30ab\u3099\u309a\u3349\u2167"
    "\u0300\u0301\u0302\u0307\u0308\u030a\u0323\u0341\u0345\u0338=\u03b1\u0621\u0654\u0915\u093c\u0958"
    "\u1100\uffa1\u3131\u1161\uffc2\u314f\u11a8\uac00\r\n \u3000\u200d\ufe0f\u2024\u2025\u203c\u037e;."
    "\U0001f44d\U0001f3fd\U0001f1e9\U0001f1ea\U000113c2\U00016d67\U00016d63\U0001611e"
)


def library(**source: object) -> sentencepiece.SentencePieceNormalizer:
    """The library's normalizer of a map, with none of its rules for spaces."""
    return sentencepiece.SentencePieceNormalizer(
        **source, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
    )


def map_of(one: sentencepiece.SentencePieceNormalizer) -> bytes:
    """The file of its map."""
    model = ModelProto()
    model.ParseFromString(one.serialized_model_proto())
    return bytes(model.normalizer_spec.precompiled_charsmap)


def custom(directory: Path, values: dict[str, str]) -> sentencepiece.SentencePieceNormalizer:
    """The library's normalizer of a map with these values."""
    path = directory / "rules.tsv"
    lines = ["\t".join(" ".join(f"{ord(one):X}" for one in text) for text in pair) for pair in values.items()]
    path.write_text("".join(f"{line}\n" for line in lines))
    return library(rule_tsv=str(path))


@cache
def both(rule: str) -> tuple[sentencepiece.SentencePieceNormalizer, normalizers.Normalizer]:
    """The library's own reading of a map, and ours."""
    one = library(rule_name=rule)
    return one, normalizers.Sequence(as_normalizers(map_of(one)))


@pytest.mark.parametrize("rule", RULES)
def test_a_text_becomes_what_the_library_makes_of_it(rule: str) -> None:
    theirs, ours = both(rule)

    @given(st.text(AWKWARD) | st.text(st.characters(exclude_categories=["Cs"])))
    @example("\u00b8\u0300")  # a mark stays behind a character that is replaced
    @example("a\r\nb")  # two characters are replaced, and one grapheme
    @example("e\u0301\u0302\u0303")  # the longest key ends within a grapheme, which is long
    @example("\u1100\u1161\u11a8")
    @example("\uac00\u11a8")  # no key: it is not composed
    @example("a\u0301\u0323")  # the marks are not put into Unicode's order
    @example("\U0001f149\u0301\u0323")
    @example("\u2024\u0300\u2025\u0300")
    def same(text: str) -> None:
        assert ours.normalize_str(text) == theirs.Normalize(text)

    same()


def test_a_small_map_is_followed_and_nothing_else_is_composed(tmp_path: Path) -> None:
    values = {"\u2024": ".", "\u2025": "..", "\u00b8": " \u0327", "\r": " ", "\n": " "}
    one = custom(tmp_path, values | {"ab": "x", "abc": "y", "bc": "z"})
    ours = normalizers.Sequence(as_normalizers(map_of(one)))
    for text in ("\u00b8\u0300", "\r\n", "e\u0301\u2024", "\u212b", "abcbcab", "ab\u0300c", "aabbcc"):
        assert ours.normalize_str(text) == one.Normalize(text), text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ab": "c", "c": "d", "\u2024": ".", "\u2025": ".."}, "'ab' would become 'd', not 'c'"),
        ({"a": "b"}, "no characters are free to separate its keys"),
    ],
)
def test_a_map_that_cannot_be_followed_is_refused(values: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        as_normalizers(map_of(custom(tmp_path, values)))


def test_a_damaged_map_is_refused(tmp_path: Path) -> None:
    data = map_of(custom(tmp_path, {"a": "b", "ab": "c"}))
    circle = struct.pack("<I2I", 8, 0, 1 << 10 | 1) + b"\0"  # the second unit is its own child
    for damaged, message in (
        (b"", "truncated"),
        (data[:9], "truncated"),
        (struct.pack("<I", 7) + data[4:], "truncated"),
        (data.rstrip(b"\0"), "a value has no end"),
        (circle, "its keys are too long or too many"),
    ):
        with pytest.raises(ValueError, match=message):
            read_character_map(damaged)

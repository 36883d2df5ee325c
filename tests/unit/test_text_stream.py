"""What may be shown of a text that is still growing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.services.coordinator.text.tokenizer import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes: characters may take several tokens."""

    longest_token_bytes = 4

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return bytes(tokens).decode(errors="replace")


def stream(text: str, stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    """The pieces shown for a text, and whether a stop string ended it."""
    made = TextStream(Bytes(), list(b"prompt "), stop)
    pieces = []
    for token in text.encode():
        pieces.append(made.push(token))
        if made.stopped:
            break
    pieces.append(made.finish())
    return pieces, made.stopped


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=80))
def test_the_pieces_make_up_the_text_whatever_its_characters(text: str) -> None:
    assert "".join(stream(text)[0]) == text


def test_a_character_is_shown_when_its_last_byte_is_there() -> None:
    assert stream("é")[0] == ["", "é", ""]


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    assert stream("ab\nc", stop=["\n\n"]) == (["a", "b", "", "\nc", ""], False)


def test_the_stop_string_and_what_follows_are_never_shown() -> None:
    pieces, stopped = stream("ab\n\ncd", stop=["\n\n"])
    assert stopped
    assert "".join(pieces) == "ab"


def test_what_was_held_back_is_shown_at_the_end() -> None:
    assert "".join(stream("ab\n", stop=["\n\n"])[0]) == "ab\n"


@pytest.mark.parametrize(("text", "matched"), [("a b c", None), ("a b--", "--"), ("ab\n\ncd", "\n\n")])
def test_the_stop_string_that_ends_the_text_is_known(text: str, matched: str | None) -> None:
    pieces = TextStream(Bytes(), [], ["--", "\n\n"])
    for token in text.encode():
        pieces.push(token)
        if pieces.stopped:
            break
    assert pieces.matched_stop == matched


def test_of_two_stop_strings_in_one_token_the_earlier_ends_the_text() -> None:
    class Whole(Bytes):
        def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
            return "ab--cd\n\n" if tokens else ""

    pieces = TextStream(Whole(), [], ["\n\n", "--"])
    assert (pieces.push(1), pieces.matched_stop) == ("ab", "--")

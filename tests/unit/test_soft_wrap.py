"""Streamed text on a terminal: lines are broken at blanks, not in the middle of words; code and wide characters."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from neuronpipe.launch.generation.shown_answer import ShownAnswer
from neuronpipe.launch.generation.terminal import AnswerOutput
from neuronpipe.launch.generation.wrapping import SoftWrap, columns_of
from neuronpipe.services.gateway.answers.answer_format import AnswerFormat
from neuronpipe.services.gateway.answers.thinking_format import thinking_format

SEQUENCE = re.compile(r"\x1b\[(\d+)D|\x1b\[(K)|(\n)|(.)", re.DOTALL)


def on_screen(written: str, columns: int) -> list[str]:
    """The lines that a terminal shows, which breaks a line itself where a character does not fit."""
    lines: list[list[str]] = [[]]  # a wide character is followed by an empty cell
    column = 0
    for match in SEQUENCE.finditer(written):
        back, wipe, newline, character = match.groups()
        if back:
            column = min(column, columns - 1) - int(back)
            assert column >= 0, "back beyond the line"
        elif wipe:
            del lines[-1][column:]
        elif newline:
            lines.append([])
            column = 0
        else:
            width = columns_of(character)
            if not width:
                lines[-1][column - 1] += character
                continue
            if column + width > columns:
                lines.append([])
                column = 0
            lines[-1][column:] = [character, *[""] * (width - 1)]
            column += width
    return ["".join(line) for line in lines]


def streamed(text: str, columns: int, piece: int = 1) -> list[str]:
    wrap = SoftWrap(lambda: columns)
    return on_screen("".join(wrap.feed(text[at : at + piece]) for at in range(0, len(text), piece)), columns)


def test_a_word_that_passes_the_margin_begins_the_next_line() -> None:
    assert streamed("The quick brown fox jumps over the dog", 20) == ["The quick brown fox", "jumps over the dog"]
    assert streamed("The quick brown foxes jump", 20, piece=5) == ["The quick brown ", "foxes jump"]


def test_blanks_at_the_margin_are_dropped_and_a_text_ends_where_it_ends() -> None:
    assert streamed("aaaa bbbb cccc  dddd", 15) == ["aaaa bbbb cccc", "dddd"]
    assert streamed("aaaa bbbb cccc \ndddd", 15) == ["aaaa bbbb cccc", "dddd"]
    assert streamed("aaaa bbbb cccc   ", 15) == ["aaaa bbbb cccc"]


def test_a_word_longer_than_the_line_is_broken_by_the_terminal_alone() -> None:
    url = "https://example.org/" + "x" * 30
    assert SoftWrap(lambda: 20).feed(f"see {url}").count("\n") == 1  # before it: what is copied is whole
    assert "".join(streamed(f"see {url} here", 20)[1:]).startswith(url)
    assert streamed(f"{url} and then there", 20)[-2:] == [f"{'x' * 10} and then", "there"]


@pytest.mark.parametrize(
    "code",
    ["```\n{}\n```", "~~~ python\n{}\n~~~", "text\n\n    {}\n", "\t{}"],
)
def test_lines_of_code_are_left_whole(code: str) -> None:
    text = code.format("x = some_function(of, many, arguments)")
    assert SoftWrap(lambda: 20).feed(text) == text


def test_a_fence_ends_and_an_indented_list_is_no_code() -> None:
    assert streamed("```\na b\n```\nsome words that are wrapped", 20)[3:] == ["some words that are", "wrapped"]
    assert streamed("    - an item that is long", 20) == ["    - an item that ", "is long"]
    assert streamed("    10. an item that is long", 20) == ["    10. an item ", "that is long"]


def test_a_text_without_blanks_is_broken_between_wide_characters() -> None:
    assert streamed("中文没有空格的一句话也要断开", 12) == ["中文没有空", "格的一句话", "也要断开"]
    assert streamed("中文没有空。格的", 12) == ["中文没有", "空。格的"]  # a full stop begins no line
    assert streamed("中文「没有空」格", 12) == ["中文「没有", "空」格"]
    assert streamed("ab中文没有空", 12) == ["ab中文没有", "空"]


def test_combining_characters_take_no_column() -> None:
    text = "e\u0301" * 9 + " " + "e\u0301" * 9
    assert streamed(text, 20) == [text]
    assert columns_of("\N{WOMAN}") == 2


def test_a_terminal_that_is_made_wider_counts_from_the_next_line() -> None:
    width = [12]
    wrap = SoftWrap(lambda: width[0])
    before = wrap.feed("some words here\n")
    width[0] = 80
    assert on_screen(before, 12) == ["some words ", "here", ""]
    assert wrap.feed("some words here") == "some words here"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stdout", "term", "wrapped"), [(Terminal, "xterm", True), (Terminal, "dumb", False), (io.StringIO, "xterm", False)]
)
def test_only_a_terminal_that_can_wipe_gets_wrapped_text(
    stdout: type[io.StringIO], term: str, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = stdout()
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "20")
    text = "The quick brown foxes jump\tfar"
    AnswerOutput().write(text)
    assert (shown.getvalue() != text) == wrapped
    assert "\n" in shown.getvalue() or not wrapped


@pytest.mark.parametrize(
    ("stdout", "term", "hides", "expected"),
    [
        (Terminal, "xterm", False, "\x1b[2mhm\N{REPLACEMENT CHARACTER}[2J\x1b[22m\n\nYes"),
        (Terminal, "dumb", False, "hm\N{REPLACEMENT CHARACTER}[2J\n\nYes"),
        (Terminal, "xterm", True, "Yes"),
        (io.StringIO, "xterm", False, "Yes"),
    ],
)
def test_reasoning_is_dimmed_and_never_goes_into_a_pipe(
    stdout: type[io.StringIO], term: str, hides: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", screen := stdout())
    monkeypatch.setenv("TERM", term)
    thinking = thinking_format("<think></think>")
    shown = ShownAnswer(AnswerFormat(thinking=thinking), AnswerOutput(), hides_thinking=hides)
    shown.add("<think>\nhm\x1b[2J\n</think>\n\nYes")
    shown.finish()
    assert screen.getvalue() == expected
    assert (shown.reasoning, shown.text) == ("hm\x1b[2J", "Yes")


WORDS = st.text(st.sampled_from("ab,.-中文。é"), min_size=1, max_size=14)


@given(
    st.lists(st.tuples(WORDS, st.sampled_from([" ", "  ", "\n"])), max_size=30), st.integers(11, 40), st.integers(1, 7)
)
@example([("a", " ")] * 30, 11, 1)
def test_whatever_comes_no_word_is_broken_that_fits_and_nothing_is_lost(
    words: list[tuple[str, str]], columns: int, piece: int
) -> None:
    text = "".join(word + blank for word, blank in words)
    lines = streamed(text, columns, piece)
    assert "".join("".join(lines).split()) == "".join(text.split())
    narrow = [word for word, _ in words if all(columns_of(c) == 1 for c in word) and len(word) < columns - 1]
    shown = [word for line in lines for word in line.split()]
    for word in narrow:
        assert word in shown or not word.isascii()

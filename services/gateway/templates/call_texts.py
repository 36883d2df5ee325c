"""The text around the names and arguments of calls, found in what a template writes for one, two and three calls.

Some templates number calls: the text around them differs in digits then, and WILD stands for these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from neuronpipe.services.gateway.templates.call_format import WILD

_END = re.compile(r"<(?:\|[^<>|]+\|?|[^<>|]+\|)>\s*\Z")  # as <|x|>, <|x> and <x|>


class AroundCalls(NamedTuple):
    """The text before the first name, between a name and its arguments, between arguments and the next name, and after
    the last arguments; `next` is empty if the template writes one call only, or several in no regular form."""

    before: str
    between: str
    next: str
    after: str


def call_texts(plain: str, text: str, outputs: Sequence[str], empty_thought: str) -> list[str]:
    """Return the text of calls in a template's outputs, without the text around messages; empty where it is not found.

    plain: the output for a message that consists of `text`
    outputs: those for messages of calls; the first has one call
    empty_thought: a regular expression of reasoning without content, which a template may write before calls
    """
    first = outputs[0]
    if text not in plain:
        return [""] * len(outputs)
    end = _common_end(plain.partition(text)[2], first)
    begin = _common_length(plain, first)
    tag = plain.rfind("<", 0, begin)
    if tag > plain.rfind(">", 0, begin):  # two tags that begin alike
        begin = tag
    if thought := re.compile(empty_thought).match(first, begin):
        begin = thought.end()
    return [output[begin : len(output) - len(end)] if output.endswith(end) else "" for output in outputs]


def _common_end(end: str, output: str) -> str:
    """Return the text with which an output ends after a call.

    end: the text after a message of text, which may have tags of its own
    """
    if _END.fullmatch(end) and (call_end := _END.search(output)):
        return call_end[0]  # calls may end with another end token than text
    if output.endswith(end):
        return end
    tag = end.find("<", len(end) - _common_length(end[::-1], output[::-1]))
    return end if tag < 0 else end[tag:]


def _common_length(a: str, b: str) -> int:
    """Return how many characters two texts have in common at their beginnings."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def around_calls(texts: Sequence[str], names: Sequence[str], arguments: str) -> AroundCalls | None:
    """Return the text around calls; None if the first text does not contain the first name and then the arguments.

    texts: those of one, two and three calls of functions with these names
    arguments: the arguments of each call
    """
    alone, *several = (_gaps(text, names[:count], arguments) for count, text in enumerate(texts, start=1))
    if alone is None:
        return None
    before, between, after = alone
    single = AroundCalls(before.lstrip(), between, "", after)
    betweens, nexts = [between], list[str]()
    for gaps in several:
        if gaps is None or (gaps[0], gaps[-1]) != (before, after):
            return single
        betweens += gaps[1:-1:2]
        nexts += gaps[2:-1:2]
    between_any, next_any = _merged(betweens), _merged(nexts)
    if between_any is None or next_any is None:
        return single
    return AroundCalls(_numbered_like(next_any, before.lstrip()), between_any, next_any, after)


def _gaps(text: str, names: Sequence[str], arguments: str) -> list[str] | None:
    """Split a text at names, each followed by the arguments; None if it does not contain them in this order."""
    gaps, end = list[str](), 0
    for word in (word for name in names for word in (name, arguments)):
        at = text.find(word, end)
        if at < 0:
            return None
        gaps.append(text[end:at])
        end = at + len(word)
    return [*gaps, text[end:]]


def _merged(texts: Sequence[str]) -> str | None:
    """Return the text that these texts have in common, with WILD for digits that differ; None if more differs."""
    if len({len(text) for text in texts}) != 1:
        return None
    columns = [set(column) for column in zip(*texts, strict=True)]
    if any(len(column) > 1 and not all(character.isdigit() for character in column) for column in columns):
        return None
    return "".join(WILD if len(column) > 1 else min(column) for column in columns)


def _numbered_like(following: str, before: str) -> str:
    """Return the text before the first name with WILD for its number, where the text before later names has WILD.

    The first call of a message need not have the first number: templates go on counting in later messages.
    """
    numbered = list(before)
    for at in range(1, min(len(following), len(before)) + 1):
        if following[-at] == WILD and before[-at].isdigit():
            numbered[-at] = WILD
        elif following[-at] != before[-at]:
            break
    return "".join(numbered)

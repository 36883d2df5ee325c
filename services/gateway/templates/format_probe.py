"""How a chat template's model writes calls of functions: found by looking at what the template makes of one.

A template that knows tools is given a conversation in which a function with a strange name was called with strange
arguments; where these two stand in what it writes, and what stands round them, is the format. So no list of models is
needed, and what is asked of a model is what it was trained on. Templates differ as well in what they take: arguments
as an object or as text, the content of a message that only calls as nothing or as an empty text. What works is kept.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import NamedTuple

from neuronpipe.services.gateway.templates.call_format import DEFAULT, NAME_CHARACTERS, WILD, CallFormat, Message
from neuronpipe.services.gateway.templates.sandbox import Template
from neuronpipe.services.gateway.templates.template_jobs import Refused, TemplateError

MIN_MARKER_CHARACTERS = 4  # what is shorter occurs in text
NO_TOOLS = "it shows no functions"
UNKNOWN_FORM = "it writes calls in no form that is known here"

_END = re.compile(r"<\|[^<>|]+\|>\s*\Z")
_TAG = re.compile(r"<[^<>{}\s]+>|\[[A-Z_]+\]")
_NAMES = ("qzx_first", "qzx_second", "qzx_third")
_IDS = ("qzxid0001", "qzxid0002", "qzxid0003")
_TEXT = "qzx text"
_TOOL = "qzx_offered"
_ARGUMENTS = {"qzx": 7}
_WRITTEN = re.compile(r'\{\s*"qzx"\s*:\s*7\s*\}')


class Probe(NamedTuple):
    """How calls are written. why_not: the reason for DEFAULT, else None; fails: whether that reason is a failure of the
    template."""

    form: CallFormat
    why_not: str | None = None
    fails: bool = False


def probe_format(template: Template) -> Probe:
    """Find how this template's model writes calls."""
    try:
        if _TOOL not in _rendered(template, []):
            return Probe(DEFAULT, NO_TOOLS)
    except (Refused, TemplateError) as error:
        return _default_because(error)
    errors: list[Refused | TemplateError] = []
    ways = [(objects, empty) for objects in (True, False) for empty in ("", None)]
    for objects, empty in ways:
        try:
            form = _format_from(
                template, CallFormat("", "", "", "", "", by_template=True, objects=objects, empty=empty)
            )
        except (Refused, TemplateError) as error:
            errors.append(error)
            continue
        if form is not None:
            return Probe(form)
    return _default_because(errors[0]) if len(errors) == len(ways) else Probe(DEFAULT, UNKNOWN_FORM)


def _default_because(error: Refused | TemplateError) -> Probe:
    fails = isinstance(error, TemplateError)
    return Probe(DEFAULT, f"it {'fails' if fails else 'refuses'} with functions: {error}", fails)


def _format_from(template: Template, way: CallFormat) -> CallFormat | None:
    """What the template writes when it is given calls in this way; None when that is no format that is known here.
    Raises Refused, TemplateError where it takes no single call in this way."""
    said = _rendered(template, [{"role": "assistant", "content": _TEXT}])
    one = _rendered(template, [_calling(way, 1)])
    two, three = (_rendered_if_taken(template, _calling(way, count)) for count in (2, 3))
    end = said.partition(_TEXT)[2]
    if _END.fullmatch(end) and (own := _END.search(one)):
        end = own[0]  # calls may end with another end token than texts
    if _TEXT not in said or not one.endswith(end):
        return None
    begin = next((at for at, (a, b) in enumerate(zip(said, one, strict=False)) if a != b), min(len(said), len(one)))

    def body(text: str) -> str:
        return text[begin : len(text) - len(end)]

    name_at, arguments = one.find(_NAMES[0], begin), _WRITTEN.search(one, begin)
    if name_at < 0 or arguments is None or arguments.start() < name_at:
        return None
    before, between = one[begin:name_at].lstrip(), one[name_at + len(_NAMES[0]) : arguments.start()]
    after = body(one)[arguments.end() - begin :]
    if not before or not between or NAME_CHARACTERS.match(between).end() or "{" in between:  # type: ignore[union-attr]
        return None
    written = arguments[0]
    next_ = ""
    if two.endswith(end) and two.startswith(one[: arguments.end()]) and _NAMES[1] in two:
        next_ = two[arguments.end() : two.index(_NAMES[1])]
    texts = [_without_ids(text) for text in (before, between, next_, after)]
    tag = _TAG.match(before)
    marker = tag[0] if tag else "" if before[0] in "{[" else before
    if 0 < len(marker) < MIN_MARKER_CHARACTERS:
        return None
    made = dataclasses.replace(
        way, before=texts[0], between=texts[1], next=texts[2], after=texts[3], marker=marker, own_ids=_IDS[0] in one
    )
    for count, text in ((2, two), (3, three)):
        as_expected = made.written([(name, written) for name in _NAMES[:count]])
        if _without_ids(body(text)).lstrip() != as_expected:
            made = dataclasses.replace(made, next="")
    return made if _without_ids(body(one)).lstrip() == made.written([(_NAMES[0], written)]) else None


def _calling(way: CallFormat, count: int) -> Message:
    calls = list(zip(_IDS[:count], _NAMES[:count], [json.dumps(_ARGUMENTS)] * count, strict=True))
    return way.message("", calls)


def _rendered(template: Template, more: list[Message]) -> str:
    """Write a question and more, with a function. Raises Refused, TemplateError."""
    tool = {"name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": tool}]
    return template.render([{"role": "user", "content": "Hi"}, *more], tools=tools, answer=not more)


def _rendered_if_taken(template: Template, message: Message) -> str:
    """The same; nothing where the template does not take that."""
    try:
        return _rendered(template, [message])
    except (Refused, TemplateError):
        return ""


def _without_ids(text: str) -> str:
    for id_ in _IDS:
        text = text.replace(id_, WILD * len(id_))
    return text

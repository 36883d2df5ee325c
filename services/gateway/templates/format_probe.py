"""Detection of the call format of a chat template: by rendering a call and looking at the output.

A template that supports tools is given a conversation in which a function with an unusual name was called with unusual
arguments. The text around these two in the output is the format. This needs no list of models, and it asks of a model
what it was trained on. Templates also differ in what they accept: arguments as an object or as a string, and null or an
empty string as the content of a message that consists of calls. The first combination that works is used.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import NamedTuple

from neuronpipe.services.gateway.templates.call_format import DEFAULT, NAME_CHARACTERS, WILD, CallFormat, Message
from neuronpipe.services.gateway.templates.sandbox import Template
from neuronpipe.services.gateway.templates.template_jobs import Refused, TemplateError

MIN_MARKER_CHARACTERS = 4  # shorter markers occur in ordinary text
NO_TOOLS = "it does not write tools"
UNKNOWN_FORM = "its calls have no known format"

_END = re.compile(r"<\|[^<>|]+\|>\s*\Z")
_TAG = re.compile(r"<[^<>{}\s]+>|\[[A-Z_]+\]")
_NAMES = ("qzx_first", "qzx_second", "qzx_third")
_IDS = ("qzxid0001", "qzxid0002", "qzxid0003")
_TEXT = "qzx text"
_TOOL = "qzx_offered"
_ARGUMENTS = {"qzx": 7}
_WRITTEN = re.compile(r'\{\s*"qzx"\s*:\s*7\s*\}')


class Probe(NamedTuple):
    """The detected call format.

    why_not: the reason for DEFAULT; None if the template's own format is used
    fails: True if that reason is a failure of the template
    """

    form: CallFormat
    why_not: str | None = None
    fails: bool = False


def probe_format(template: Template) -> Probe:
    try:
        if _TOOL not in _rendered(template, []):
            return Probe(DEFAULT, NO_TOOLS)
    except (Refused, TemplateError) as error:
        return _default_because(error)
    errors: list[Refused | TemplateError] = []
    input_forms = [(objects, empty) for objects in (True, False) for empty in ("", None)]
    for objects, empty in input_forms:
        try:
            form = _format_from(
                template, CallFormat("", "", "", "", "", by_template=True, objects=objects, empty=empty)
            )
        except (Refused, TemplateError) as error:
            errors.append(error)
            continue
        if form is not None:
            return Probe(form)
    return _default_because(errors[0]) if len(errors) == len(input_forms) else Probe(DEFAULT, UNKNOWN_FORM)


def _default_because(error: Refused | TemplateError) -> Probe:
    fails = isinstance(error, TemplateError)
    return Probe(DEFAULT, f"it {'fails' if fails else 'refuses'} with functions: {error}", fails)


def _format_from(template: Template, input_form: CallFormat) -> CallFormat | None:
    """Return the call format of a template that is given calls in this form; None if its output has no known form.

    Raises Refused or TemplateError if it does not accept a single call in this form.
    """
    text_output = _rendered(template, [{"role": "assistant", "content": _TEXT}])
    one_call = _rendered(template, [_calling(input_form, 1)])
    two_calls, three_calls = (_rendered_if_taken(template, _calling(input_form, count)) for count in (2, 3))
    end = text_output.partition(_TEXT)[2]
    if _END.fullmatch(end) and (call_end := _END.search(one_call)):
        end = call_end[0]  # calls may end with another end token than text
    if _TEXT not in text_output or not one_call.endswith(end):
        return None
    begin = next(
        (at for at, (a, b) in enumerate(zip(text_output, one_call, strict=False)) if a != b),
        min(len(text_output), len(one_call)),
    )

    def body(text: str) -> str:
        return text[begin : len(text) - len(end)]

    name_at, arguments = one_call.find(_NAMES[0], begin), _WRITTEN.search(one_call, begin)
    if name_at < 0 or arguments is None or arguments.start() < name_at:
        return None
    before, between = one_call[begin:name_at].lstrip(), one_call[name_at + len(_NAMES[0]) : arguments.start()]
    after = body(one_call)[arguments.end() - begin :]
    if not before or not between or NAME_CHARACTERS.match(between).end() or "{" in between:  # type: ignore[union-attr]
        return None
    written = arguments[0]
    next_ = ""
    if two_calls.endswith(end) and two_calls.startswith(one_call[: arguments.end()]) and _NAMES[1] in two_calls:
        next_ = two_calls[arguments.end() : two_calls.index(_NAMES[1])]
    texts = [_without_ids(text) for text in (before, between, next_, after)]
    tag = _TAG.match(before)
    marker = tag[0] if tag else "" if before[0] in "{[" else before
    if 0 < len(marker) < MIN_MARKER_CHARACTERS:
        return None
    call_format = dataclasses.replace(
        input_form,
        before=texts[0],
        between=texts[1],
        next=texts[2],
        after=texts[3],
        marker=marker,
        own_ids=_IDS[0] in one_call,
    )
    for count, text in ((2, two_calls), (3, three_calls)):
        as_expected = call_format.written([(name, written) for name in _NAMES[:count]])
        if _without_ids(body(text)).lstrip() != as_expected:
            call_format = dataclasses.replace(call_format, next="")
    return call_format if _without_ids(body(one_call)).lstrip() == call_format.written([(_NAMES[0], written)]) else None


def _calling(input_form: CallFormat, count: int) -> Message:
    calls = list(zip(_IDS[:count], _NAMES[:count], [json.dumps(_ARGUMENTS)] * count, strict=True))
    return input_form.message("", calls)


def _rendered(template: Template, more: list[Message]) -> str:
    """Render a question, further messages and a tool. Raises Refused, TemplateError."""
    tool = {"name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": tool}]
    return template.render([{"role": "user", "content": "Hi"}, *more], tools=tools, answer=not more)


def _rendered_if_taken(template: Template, message: Message) -> str:
    """Render a question and a message; return an empty string if the template does not accept it."""
    try:
        return _rendered(template, [message])
    except (Refused, TemplateError):
        return ""


def _without_ids(text: str) -> str:
    for id_ in _IDS:
        text = text.replace(id_, WILD * len(id_))
    return text

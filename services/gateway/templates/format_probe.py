"""Detection of the call format of a chat template: by rendering a call and looking at the output.

A template that supports tools is given a conversation in which a function with an unusual name was called with unusual
arguments. The text around these two in the output is the format. This needs no list of models, and it asks of a model
what it was trained on; only models whose messages have headers are known (answers/thinking_format.py). Templates also
differ in what they accept: arguments as an object or as a string, and null or an empty string as the content of a
message that consists of calls. The first combination that works is used.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, NamedTuple

from neuronpipe.protocol.argument_syntax import ArgumentSyntax, Syntax
from neuronpipe.services.gateway.answers.thinking_format import thinking_format
from neuronpipe.services.gateway.templates.call_format import (
    DEFAULT,
    TEXT_FORMATS,
    WILD,
    CallFormat,
    Message,
    numbered_id,
)
from neuronpipe.services.gateway.templates.call_texts import around_calls, call_texts
from neuronpipe.services.gateway.templates.parameter_probe import ARGUMENTS as PARAMETERS
from neuronpipe.services.gateway.templates.parameter_probe import ParameterText
from neuronpipe.services.gateway.templates.sandbox import Template
from neuronpipe.services.gateway.templates.template_jobs import Refused, TemplateError

MIN_MARKER_CHARACTERS = 4  # shorter markers occur in ordinary text
NO_TOOLS = "it does not write tools"
UNKNOWN_FORM = "its calls have no known format"

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
    if len(errors) == len(input_forms):
        return _default_because(errors[0])
    form = _text_format(template)
    return Probe(DEFAULT, UNKNOWN_FORM) if form is None else Probe(form)


def _default_because(error: Refused | TemplateError) -> Probe:
    fails = isinstance(error, TemplateError)
    return Probe(DEFAULT, f"it {'fails' if fails else 'refuses'} with functions: {error}", fails)


def _format_from(template: Template, input_form: CallFormat) -> CallFormat | None:
    """Return the call format of a template that is given calls in this form; None if its output has no known form.

    Raises Refused or TemplateError if it does not accept a single call in this form.
    """
    thinking = thinking_format(template.source)
    if thinking is not None and thinking.calls is not None:
        text = _rendered(template, [_calling(input_form, 1)])
        fixed = dataclasses.replace(thinking.calls, objects=input_form.objects, empty=input_form.empty)
        return fixed if _NAMES[0] in text else None
    return (
        _json_format(template, input_form)
        or _parameter_format(template, input_form)
        or _keyword_format(template, input_form)
        or _json_format(template, dataclasses.replace(input_form, numbered_ids=True))
    )


def _json_format(template: Template, input_form: CallFormat) -> CallFormat | None:
    """Return the format of calls whose arguments are a JSON object; None if they are not."""
    texts = _call_texts(template, input_form, _ARGUMENTS)
    arguments = _WRITTEN.search(texts[0])
    form = None if arguments is None else _form(texts, input_form, arguments[0])
    return None if form is None or not form.between or "{" in form.between else form


def _parameter_format(template: Template, input_form: CallFormat) -> CallFormat | None:
    """Return the format of calls whose arguments are written one by one; None if they are not."""
    texts = _call_texts(template, input_form, PARAMETERS)
    parameters = ParameterText.of(texts[0].partition(_NAMES[0])[2])
    form = None if parameters is None else _form(texts, input_form, parameters.written())
    if parameters is None or form is None:
        return None
    return dataclasses.replace(
        form,
        parameter_before=parameters.parameter_before,
        parameter_between=parameters.parameter_between,
        parameter_after=parameters.parameter_after,
    )


def _keyword_format(template: Template, input_form: CallFormat) -> CallFormat | None:
    """Return the format of calls whose arguments are keywords, as in f(key=value); None if they are not."""
    texts = _call_texts(template, input_form, PARAMETERS)
    names: tuple[ArgumentSyntax, ...] = ("keywords", "gemma")
    for name in names:
        syntax = Syntax.of(name)
        form = _form(texts, input_form, syntax.written(json.dumps(PARAMETERS)))
        if form is not None and form.after.lstrip().startswith(syntax.end) and syntax.quote in template.source:
            true = _call_texts(template, input_form, {"qzx": True})[0]
            return dataclasses.replace(form, argument_syntax="python" if "qzx=True" in true else name)
    return None


def _form(texts: list[str], input_form: CallFormat, arguments: str) -> CallFormat | None:
    """Return the format of calls with these arguments; None if the texts of one, two and three calls have none."""
    around = around_calls([_without_ids(text) for text in texts], _NAMES, arguments)
    if around is None or not around.before:
        return None
    tag = _TAG.match(around.before)
    marker = tag[0] if tag else "" if around.before[0] in "{[" else around.before.partition(WILD)[0]
    if 0 < len(marker) < MIN_MARKER_CHARACTERS:
        return None
    return dataclasses.replace(input_form, **around._asdict(), marker=marker, own_ids=_IDS[0] in texts[0])


def _call_texts(template: Template, input_form: CallFormat, arguments: dict[str, Any]) -> list[str]:
    """Return what a template writes for one, two and three calls, without the text around messages."""
    thinking = thinking_format(template.source)
    return call_texts(
        _rendered(template, [{"role": "assistant", "content": _TEXT}]),
        _TEXT,
        [
            _rendered(template, [_calling(input_form, 1, arguments)]),
            *(_rendered_if_taken(template, [_calling(input_form, count, arguments)]) for count in (2, 3)),
        ],
        "" if thinking is None else thinking.empty_pattern,
    )


def _text_format(template: Template) -> CallFormat | None:
    """Return the format of calls that are part of a message's text, because the template writes only tools and results;
    None if it writes calls, or if the format that it asks for is not known."""
    tools = _rendered(template, [])
    form = next((form for marks, form in TEXT_FORMATS if all(mark in tools for mark in marks)), None)
    native_call = _calling(dataclasses.replace(DEFAULT, by_template=True), 1)
    if form is None or _NAMES[0] in _rendered_if_taken(template, [native_call]):
        return None
    result = {"role": "tool", "name": _NAMES[0], "tool_call_id": _IDS[0], "content": _TEXT}
    text = _rendered_if_taken(template, [_calling(form, 1), result])
    return form if _NAMES[0] in text and _TEXT in text else None


def _calling(input_form: CallFormat, count: int, arguments: dict[str, Any] | None = None) -> Message:
    written = json.dumps(_ARGUMENTS if arguments is None else arguments)
    ids = [numbered_id(name, number) for number, name in enumerate(_NAMES)] if input_form.numbered_ids else _IDS
    calls = list(zip(ids[:count], _NAMES[:count], [written] * count, strict=True))
    return input_form.message("", calls)


def _rendered(template: Template, more: list[Message]) -> str:
    """Render a question, further messages and a tool. Raises Refused, TemplateError."""
    tool = {"name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": tool}]
    return template.render([{"role": "user", "content": "Hi"}, *more], tools=tools, answer=not more)


def _rendered_if_taken(template: Template, more: list[Message]) -> str:
    """Render as `_rendered`; return an empty string if the template does not accept the messages."""
    try:
        return _rendered(template, more)
    except (Refused, TemplateError):
        return ""


def _without_ids(text: str) -> str:
    for id_ in _IDS:
        text = text.replace(id_, WILD * len(id_))
    return text

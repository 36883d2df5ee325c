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
from collections.abc import Callable
from typing import Any, NamedTuple

from neuronpipe.services.gateway.answers.thinking_format import thinking_format
from neuronpipe.services.gateway.templates.call_format import DEFAULT, NAME_CHARACTERS, WILD, CallFormat, Message
from neuronpipe.services.gateway.templates.parameter_probe import ARGUMENTS as PARAMETERS
from neuronpipe.services.gateway.templates.parameter_probe import ParameterText
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
    thinking = thinking_format(template.source)
    if thinking is not None and thinking.calls is not None:
        text = _rendered(template, [_calling(input_form, 1)])
        fixed = dataclasses.replace(thinking.calls, objects=input_form.objects, empty=input_form.empty)
        return fixed if _NAMES[0] in text else None
    return _json_format(template, input_form) or _parameter_format(template, input_form)


def _json_format(template: Template, input_form: CallFormat) -> CallFormat | None:
    """Return the format of calls whose arguments are a JSON object; None if they are not."""
    calls = _CallTexts(template, input_form, _ARGUMENTS)
    arguments = _WRITTEN.search(calls.one)
    name_at = calls.one.find(_NAMES[0])
    if name_at < 0 or arguments is None or arguments.start() < name_at:
        return None
    form = calls.form(calls.one[name_at + len(_NAMES[0]) : arguments.start()], calls.one[arguments.end() :])
    if form is None or "{" in form.between:
        return None
    form = dataclasses.replace(form, next=calls.next(arguments.end()))
    return calls.checked(form, lambda form, count: form.written([(name, arguments[0]) for name in _NAMES[:count]]))


def _parameter_format(template: Template, input_form: CallFormat) -> CallFormat | None:
    """Return the format of calls whose arguments are written one by one; None if they are not."""
    calls = _CallTexts(template, input_form, PARAMETERS)
    name_at = calls.one.find(_NAMES[0])
    parameters = None if name_at < 0 else ParameterText.of(calls.one[name_at + len(_NAMES[0]) :])
    form = None if parameters is None else calls.form(parameters.between, parameters.after)
    if parameters is None or form is None:
        return None
    form = dataclasses.replace(
        form,
        next=calls.next(len(calls.one) - len(parameters.after)),
        parameter_before=parameters.parameter_before,
        parameter_between=parameters.parameter_between,
        parameter_after=parameters.parameter_after,
    )
    written = parameters.written()
    return calls.checked(form, lambda form, count: form.written([(name, written) for name in _NAMES[:count]]))


class _CallTexts:
    """The text that a template writes for one, two and three calls, without the text around messages.

    one: the text of a single call; empty if it cannot be found in the output
    """

    def __init__(self, template: Template, input_form: CallFormat, arguments: dict[str, Any]) -> None:
        self._input_form = input_form
        text_output = _rendered(template, [{"role": "assistant", "content": _TEXT}])
        one_call = _rendered(template, [_calling(input_form, 1, arguments)])
        several = (_rendered_if_taken(template, _calling(input_form, count, arguments)) for count in (2, 3))
        end = text_output.partition(_TEXT)[2]
        if _END.fullmatch(end) and (call_end := _END.search(one_call)):
            end = call_end[0]  # calls may end with another end token than text
        begin = next(
            (at for at, (a, b) in enumerate(zip(text_output, one_call, strict=False)) if a != b),
            min(len(text_output), len(one_call)),
        )
        is_regular = _TEXT in text_output and one_call.endswith(end)
        self.one = one_call[begin : len(one_call) - len(end)] if is_regular else ""
        self._several = [text[begin : len(text) - len(end)] if text.endswith(end) else "" for text in several]

    def form(self, between: str, after: str) -> CallFormat | None:
        """Return the format with this text after a name and after the arguments; None if it is no format."""
        before = self.one[: self.one.index(_NAMES[0])].lstrip()
        if not before or not between or NAME_CHARACTERS.match(between).end():  # type: ignore[union-attr]
            return None
        tag = _TAG.match(before)
        marker = tag[0] if tag else "" if before[0] in "{[" else before
        if 0 < len(marker) < MIN_MARKER_CHARACTERS:
            return None
        return dataclasses.replace(
            self._input_form,
            before=_without_ids(before),
            between=_without_ids(between),
            after=_without_ids(after),
            marker=marker,
            own_ids=_IDS[0] in self.one,
        )

    def next(self, arguments_end: int) -> str:
        """Return the text between the arguments of a call and the next name; empty if there is no second call.

        arguments_end: where the arguments of a single call end
        """
        two = self._several[0]
        if not two.startswith(self.one[:arguments_end]) or _NAMES[1] not in two:
            return ""
        return _without_ids(two[arguments_end : two.index(_NAMES[1])])

    def checked(self, form: CallFormat, written: Callable[[CallFormat, int], str]) -> CallFormat | None:
        """Return the format if it writes what the template writes, for one call only if it does not for several.

        written: returns a number of calls as the format writes them
        """
        for count, text in zip((2, 3), self._several, strict=True):
            if _without_ids(text).lstrip() != written(form, count):
                form = dataclasses.replace(form, next="")
        return form if _without_ids(self.one).lstrip() == written(form, 1) else None


def _calling(input_form: CallFormat, count: int, arguments: dict[str, Any] | None = None) -> Message:
    written = json.dumps(_ARGUMENTS if arguments is None else arguments)
    calls = list(zip(_IDS[:count], _NAMES[:count], [written] * count, strict=True))
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

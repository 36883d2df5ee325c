"""The work of the helper process for chat templates: writing prompts, and reporting on templates."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from neuronpipe.services.gateway.answers.thinking_format import thinking_format
from neuronpipe.services.gateway.templates.call_format import DEFAULT, CallFormat, Message
from neuronpipe.services.gateway.templates.format_probe import probe_format
from neuronpipe.services.gateway.templates.messages import ChatTurn, as_messages, as_texts, shows_function
from neuronpipe.services.gateway.templates.sandbox import Template
from neuronpipe.services.gateway.templates.template_jobs import (
    PromptJob,
    Refused,
    TemplateError,
    TemplateReport,
    TemplateSource,
    WrittenPrompt,
    encode_error,
    encode_result,
)

MAX_COMPILED = 4  # templates of other packages are compiled again
_ANSWER = "qzx answer"
_CURSOR = "qzxContinuesHere "  # ends with a blank, so that its absence shows that the template removes white space


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the work of a new process; setup is empty."""
    return _Work()


class _Work:
    """The function that answers jobs. idle_s is None, so that a chat after a pause need not wait for a new process."""

    idle_s = None

    def __init__(self) -> None:
        self._compiled: OrderedDict[TemplateSource, Template] = OrderedDict()

    def __call__(self, request: bytes) -> bytes:
        try:
            job = json.loads(request.decode(errors="surrogatepass"))
            template = self._template(TemplateSource(*job["source"]))
            return encode_result(report(template) if job["do"] == "report" else write(template, _prompt_job(job)))
        except (Refused, TemplateError) as error:
            return encode_error(error)

    def _template(self, source: TemplateSource) -> Template:
        if source not in self._compiled:
            self._compiled[source] = Template(source)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return self._compiled[source]


def _prompt_job(fields: dict[str, Any]) -> PromptJob:
    return PromptJob(
        source=TemplateSource(*fields["source"]),
        turns=[ChatTurn(*turn) for turn in fields["turns"]],
        tools=fields["tools"],
        marked=fields["marked"],
        settings=fields["settings"],
        begins_answer=fields["begins_answer"],
        begun=None if fields["begun"] is None else ChatTurn(*fields["begun"]),
        form=None if fields["form"] is None else CallFormat(**fields["form"]),
    )


def write(template: Template, job: PromptJob) -> WrittenPrompt:
    """Write a conversation as a prompt. Raises Refused, TemplateError."""
    template_format, calls = job.form, DEFAULT
    if job.tools is not None or any(turn.calls or turn.role == "tool" for turn in job.turns):
        template_format = template_format or probe_format(template).form
        calls = DEFAULT if job.marked and not template_format.marker else template_format
    if job.begun is not None:
        text = _continued(template.with_settings(job.settings, begins_answer=False), calls, job, job.begun)
        if text is not None:
            return WrittenPrompt(text, calls, template_format, continues=True)
    text = _conversation(template.with_settings(job.settings, begins_answer=job.begins_answer), calls, job)
    return WrittenPrompt(text, calls, template_format)


def _continued(template: Template, form: CallFormat, job: PromptJob, begun: ChatTurn) -> str | None:
    """Write a conversation up to the end of an answer that has begun, as transformers does with
    `continue_final_message`; return None if the template does not write that answer.

    A template may write text before an answer that differs from the text that begins one, such as a blank, and may
    remove white space at its end. Therefore the prompt is what precedes a word that is appended to the answer.
    """
    thinking = thinking_format(template.source) if begun.reasoning and not begun.text else None
    field = "text" if thinking is None else "reasoning"
    marked = begun._replace(**{field: getattr(begun, field) + _CURSOR})
    try:
        text = _conversation(template, form, dataclasses.replace(job, turns=[*job.turns, marked]))
    except (Refused, TemplateError):
        return None
    before, cursor, after = text.rpartition(_CURSOR.strip())
    if not cursor or (thinking is not None and not thinking.has_begun(before, begun.reasoning)):
        return None
    return before if after.startswith(" ") else before.rstrip()


def _conversation(template: Template, form: CallFormat, job: PromptJob) -> str:
    try:
        return _text(template, form, job)
    except Refused:
        # gpt-oss's template refuses a call with both text and reasoning, though the model writes both.
        turns = [turn._replace(reasoning="") if turn.calls and turn.text else turn for turn in job.turns]
        if turns == job.turns:
            raise
        return _text(template, form, dataclasses.replace(job, turns=turns))


def _text(template: Template, form: CallFormat, job: PromptJob) -> str:
    if form.by_template and job.tools is not None:
        return template.render(as_messages(job.turns, form), tools=job.tools)
    if form.by_template or job.tools is None:
        messages = as_messages(job.turns, form) if form.by_template else as_texts(job.turns, None)
        return _without_tools(template, messages)
    try:
        text = _without_tools(template, as_texts(job.turns, job.tools))
        if shows_function(text, job.tools):
            return text
    except Refused:
        pass  # it may not support system messages
    return _without_tools(template, as_texts(job.turns, job.tools, by="user"))


def _without_tools(template: Template, messages: Sequence[Message], *, answer: bool = True) -> str:
    try:
        return template.render(messages, answer=answer)
    except TemplateError:
        return template.render(messages, tools=[], answer=answer)  # it may expect a list where there are no tools


def report(template: Template) -> TemplateReport:
    """Try a template with a small conversation, and with tools."""
    question = {"role": "user", "content": "Hi"}
    try:
        _without_tools(template, [question])
    except Refused:
        pass
    except TemplateError as error:
        return TemplateReport(error=str(error))
    probe = probe_format(template)
    return TemplateReport(
        closing=_closing(template, question),
        writes_calls=probe.form.by_template,
        why_not=probe.why_not,
        tools_fail=probe.fails,
    )


def _closing(template: Template, question: Message) -> str:
    """Return the text that a template writes after the last answer of a conversation; if none, after an earlier one."""
    answer = {"role": "assistant", "content": _ANSWER}
    for messages in ([question, answer], [question, answer, question]):
        try:
            closing = _without_tools(template, messages, answer=False).partition(_ANSWER)[2].strip()
        except (Refused, TemplateError):
            continue
        if closing:
            return closing
    return ""

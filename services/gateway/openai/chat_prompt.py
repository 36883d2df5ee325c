"""Writing the prompt of a conversation.

A package without a chat template contains a base model, which knows no roles: the messages are joined line by line, and
the model continues the last one.

A chat template is untrusted code and runs in a helper process. Tools, calls and their results are written by the
template if it supports them. Otherwise they become text: a description of the tools at the beginning, calls in the
assistant's messages, results in the user's (templates/messages.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
from functools import cached_property
from typing import NamedTuple

from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.request import Calls
from neuronpipe.services.gateway.answers.answer_format import AnswerFormat
from neuronpipe.services.gateway.answers.thinking_format import Begin, ThinkingFormat, thinking_format
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.openai.request_schema import ChatRequest
from neuronpipe.services.gateway.templates.call_format import ONE_CALL, CallFormat
from neuronpipe.services.gateway.templates.messages import ChatTurn, as_texts
from neuronpipe.services.gateway.templates.template_jobs import (
    PromptJob,
    Refused,
    TemplateError,
    TemplateReport,
    TemplateSource,
    WrittenPrompt,
    report_job,
)
from neuronpipe.services.gateway.templates.template_pool import TemplatePool

log = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """The prompt of a conversation.

    frame: True if the tokenizer must add its own begin and end tokens; a chat template has written them already
    answer: the format of the completion
    calls: the functions that it may call, for the message `Generate`; None if it is text only
    """

    text: str
    frame: bool
    answer: AnswerFormat
    calls: Calls | None


class PromptWriter:
    """Writes the prompts of conversations with one package.

    templates: the helper processes in which its chat template runs; set by `ServedModels`
    """

    templates: TemplatePool

    def __init__(self, package: Package) -> None:
        self._package = package
        self._call_format: CallFormat | None = None  # once a prompt has needed it
        self._report: asyncio.Task[TemplateReport] | None = None

    async def write_prompt(self, request: ChatRequest) -> Prompt:
        """Return the prompt of a request's conversation, which ends with a message that the completion continues.

        Raises ApiError if the template refuses the conversation or fails.
        """
        turns = [message.turn for message in request.prompt_messages]
        offer, begun = request.offer, request.begun_message
        tools = None if offer is None else offer.descriptions()
        if self._package.manifest.chat is None:
            texts = [message["content"] for message in as_texts(turns, tools, ONE_CALL)]
            text = "\n".join(texts) + ("" if begun is None else begun.text)
            return _prompt(text, True, request, ONE_CALL)
        try:
            thinking = self._thinking
            thinks = request.wants_thinking and not (thinking and request.constraint)
            job = PromptJob(
                source=self._source,
                turns=turns,
                tools=tools,
                marked=request.constraint is not None,
                settings=request.template_variables(may_think=thinks),
                begins_answer=request.continue_final_message or request.add_generation_prompt is not False,
                begun=None if begun is None else ChatTurn("assistant", begun.text, reasoning=begun.thought),
                form=self._call_format,
            )
            written = WrittenPrompt.decoded(await self.templates.run(self._package.manifest.name, job.encoded()))
        except Refused as refused:
            raise ApiError(
                400, "messages_refused", f"the model's chat template refuses this: {refused}", param="messages"
            ) from None
        except TemplateError as error:
            message = f"the model's chat template fails: {error}; correct it and convert the model again"
            raise ApiError(500, "chat_template_failed", message, kind="server_error") from None
        self._call_format = written.form or self._call_format
        begins: Begin = "start"
        text = "" if begun is None or written.continues else begun.text
        if begun is not None and written.continues:
            begins = "content" if begun.text or thinking is None or not begun.thought else "reasoning"
        elif thinking is not None and job.begins_answer:
            reasoning, content = ("", None) if begun is None else (begun.thought, begun.text)
            text, begins = thinking.beginning(
                written.text, reasoning=reasoning, content=content, thinks=thinks, calls=offer is not None
            )
        return _prompt(written.text + text, False, request, written.calls, thinking, begins)

    async def report(self) -> TemplateReport | None:
        """Return the report on the template, which is tried once per gateway; None without a template."""
        if self._package.manifest.chat is None:
            return None
        if self._report is None:
            self._report = asyncio.create_task(self._find_report())
        return await asyncio.shield(self._report)

    async def _find_report(self) -> TemplateReport:
        name = self._package.manifest.name
        try:
            report = TemplateReport.decoded(await self.templates.run(name, report_job(self._source), math.inf))
        except TemplateError as error:
            report = TemplateReport(error=str(error))
        if report.error is not None:
            log.warning("%s: the chat template fails: %s; chat requests fail with it", name, report.error)
        elif report.tools_fail:
            why = report.why_not
            log.warning("%s: the chat template: %s; tools use the default call format", name, why)
        return report

    @property
    def thinks(self) -> bool:
        """True if the model thinks before it answers; False also if its chat template cannot be read."""
        try:
            return self._package.manifest.chat is not None and self._thinking is not None
        except TemplateError:
            return False

    @cached_property
    def _thinking(self) -> ThinkingFormat | None:
        """Return how the model thinks; None if it does not. Raises TemplateError as `_source`."""
        return thinking_format(self._source.text)

    @cached_property
    def _source(self) -> TemplateSource:
        """Return the template's source. Raises TemplateError if its file is damaged."""
        chat = self._package.manifest.chat
        assert chat is not None
        try:
            return TemplateSource(self._package.chat_template(), chat.begin, chat.end)
        except UserError as error:
            raise TemplateError(str(error)) from None


def _prompt(
    text: str,
    frame: bool,
    request: ChatRequest,
    form: CallFormat,
    thinking: ThinkingFormat | None = None,
    begins: Begin = "start",
) -> Prompt:
    offer = request.offer
    if offer is None:
        return Prompt(text, frame, AnswerFormat(thinking=thinking, begins=begins), None)
    answer = AnswerFormat(
        calls=form, text=not offer.required, schemas=offer.schemas(), thinking=thinking, begins=begins
    )
    return Prompt(text, frame, answer, offer.calls(form, thinking, begins=begins))

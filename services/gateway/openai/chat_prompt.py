"""From a conversation to the text that the model continues.

A package without a chat template holds a base model, which knows no roles: the messages are written one below the
other, and the model goes on where the last one ends.

A chat template is a stranger's program and runs in a helper process. Functions that the answer may call, calls and
their results are written by a template that knows them. For all others they become texts of messages: what can be
called is said at the beginning, calls stand in the assistant's messages, results in the user's.
"""

from __future__ import annotations

import asyncio
import logging
import math
from functools import cached_property
from typing import NamedTuple

from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.openai.request_schema import ChatMessage, ChatRequest
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
    """A text, and whether the tokenizer is to put its own tokens round it: a template has written them already. calls:
    how the answer calls functions."""

    text: str
    frame: bool
    calls: CallFormat


class PromptWriter:
    """How conversations become prompts with one package. templates: where its template runs, once the gateway serves
    this model."""

    templates: TemplatePool

    def __init__(self, package: Package) -> None:
        self._package = package
        self._form: CallFormat | None = None
        self._report: asyncio.Task[TemplateReport] | None = None

    async def write_prompt(self, request: ChatRequest) -> Prompt:
        """Return what a request's conversation becomes, without what there is of the answer. Raises Problem when the
        template refuses it, or fails."""
        turns = [_turn(message) for message in request.prompt_messages]
        tools = None if request.offer is None else request.offer.descriptions()
        if self._package.manifest.chat is None:
            messages = as_texts(turns, tools, ONE_CALL)
            return Prompt("\n".join(message["content"] for message in messages), frame=True, calls=ONE_CALL)
        try:
            job = PromptJob(
                source=self._source,
                turns=turns,
                tools=tools,
                marked=request.constraint is not None,
                settings=request.chat_template_kwargs,
                begins_answer=request.continue_final_message or request.add_generation_prompt is not False,
                form=self._form,
            )
            written = WrittenPrompt.decoded(await self.templates.run(self._package.manifest.name, job.encoded()))
        except Refused as refused:
            raise ApiError(
                400, "messages_refused", f"the model's chat template refuses this: {refused}", param="messages"
            ) from None
        except TemplateError as error:
            message = f"the package's chat template fails: {error}; correct it and convert the model again"
            raise ApiError(500, "chat_template_failed", message, kind="server_error") from None
        self._form = written.form or self._form
        return Prompt(written.text, frame=False, calls=written.calls)

    async def report(self) -> TemplateReport | None:
        """Return what the template does, found by trying once; None: there is none."""
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
            log.warning("%s: the chat template fails: %s; requests for chats fail with it", name, report.error)
        elif report.tools_fail:
            why = report.why_not
            log.warning("%s: the chat template: %s; functions are told and called in the stated format", name, why)
        return report

    @cached_property
    def _source(self) -> TemplateSource:
        """The template. Raises TemplateError where its file is damaged."""
        chat = self._package.manifest.chat
        assert chat is not None
        try:
            return TemplateSource(self._package.chat_template(), chat.begin, chat.end)
        except UserError as error:
            raise TemplateError(str(error)) from None


def _turn(message: ChatMessage) -> ChatTurn:
    return ChatTurn(message.role, message.text, message.name, message.tool_call_id, message.calls)

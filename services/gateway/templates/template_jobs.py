"""The jobs of the helper process for chat templates, their results, limits and errors.

Both ends import this module: the gateway, which must not load Jinja, and the helper, which must not load the HTTP
server.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.gateway.templates.call_format import CallFormat
from neuronpipe.services.gateway.templates.messages import ChatTurn

WORK = "neuronpipe.services.gateway.templates.template_process:prepare"
JOB_S = 2.0  # to compile a template and to write one conversation; memory: `templates_bytes` of a plan
MAX_PROMPT_BYTES = 8 << 20


class TemplateError(Exception):
    """A template that cannot be compiled or rendered; the text says why in one line."""


class Refused(Exception):
    """The template itself refuses this conversation, with `raise_exception`."""


class TemplateSource(NamedTuple):
    """The text of a template, and its variables `bos_token` and `eos_token`."""

    text: str
    begin: str
    end: str


@frozen(kw_only=True)
class PromptJob:
    """A conversation to be written as a prompt.

    tools: functions that the completion may call, as in OpenAI's API; None if there are none
    marked: True if calls must be distinguishable from text that is JSON as well
    settings: variables of the template's own
    begins_answer: True if the prompt ends with the beginning of the assistant's turn
    begun: the beginning of an answer, after which the prompt ends; None if there is none
    form: the call format, once a result has returned it; None: detect it
    """

    source: TemplateSource
    turns: Sequence[ChatTurn]
    tools: list[dict[str, Any]] | None = None
    marked: bool = False
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    begins_answer: bool = True
    begun: ChatTurn | None = None
    form: CallFormat | None = None

    def encoded(self) -> bytes:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        form = None if self.form is None else dataclasses.asdict(self.form)
        return _json({"do": "prompt", **fields, "settings": dict(self.settings), "form": form})


class WrittenPrompt(NamedTuple):
    """The result of a `PromptJob`.

    calls: the call format of the completion
    form: the call format of the template, to be passed with later jobs; None if the job did not need it
    continues: True if the text ends with the beginning of an answer, as the template writes it; False also if the
        template does not write it
    """

    text: str
    calls: CallFormat
    form: CallFormat | None
    continues: bool = False

    @classmethod
    def decoded(cls, answer: bytes) -> WrittenPrompt:
        """Decode the helper's result. Raises Refused, TemplateError."""
        fields = _result(answer)
        form = None if fields["form"] is None else CallFormat(**fields["form"])
        return cls(fields["text"], CallFormat(**fields["calls"]), form, fields["continues"])


@frozen(kw_only=True)
class TemplateReport:
    """The abilities of a template, found by trying it.

    error: the reason why it cannot write any conversation; None if it can
    closing: what it writes after a completed answer
    writes_calls: True if it writes tools, calls and results; otherwise the default format is used
    why_not: the reason for the default format
    tools_fail: True if that reason is a failure of the template
    """

    error: str | None = None
    closing: str = ""
    writes_calls: bool = False
    why_not: str | None = None
    tools_fail: bool = False

    @classmethod
    def decoded(cls, answer: bytes) -> TemplateReport:
        """Decode the helper's result. Raises TemplateError."""
        return cls(**_result(answer))


def report_job(source: TemplateSource) -> bytes:
    """Return the job whose result is a TemplateReport, as bytes for the helper process."""
    return _json({"do": "report", "source": source})


def encode_result(result: WrittenPrompt | TemplateReport) -> bytes:
    """Return a result as bytes for the gateway; the helper process calls this."""
    if isinstance(result, TemplateReport):
        return _json({"result": dataclasses.asdict(result)})
    form = None if result.form is None else dataclasses.asdict(result.form)
    fields = {**result._asdict(), "calls": dataclasses.asdict(result.calls), "form": form}
    return _json({"result": fields})


def encode_error(error: Refused | TemplateError) -> bytes:
    """Return an error as bytes for the gateway; the helper process calls this."""
    return _json({"refused" if isinstance(error, Refused) else "failed": str(error)})


def _result(answer: bytes) -> dict[str, Any]:
    content = json.loads(answer.decode(errors="surrogatepass"))
    if "refused" in content:
        raise Refused(content["refused"])
    if "failed" in content:
        raise TemplateError(content["failed"])
    result: dict[str, Any] = content["result"]
    return result


def _json(content: dict[str, Any]) -> bytes:
    """Encode JSON as UTF-8; text of clients may contain lone surrogates, which JSON can express."""
    return json.dumps(content, ensure_ascii=False).encode(errors="surrogatepass")

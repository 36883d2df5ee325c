"""What the helper process for chat templates is asked, and what it answers; its limits, and how its failures read.

Both ends import this: the gateway, which must not load Jinja, and the helper, which must not load the HTTP server.
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
    """A template that cannot be compiled or rendered; says why in one line."""


class Refused(Exception):
    """The template itself says that it cannot write this conversation."""


class TemplateSource(NamedTuple):
    """The text of a template, and what it calls `bos_token` and `eos_token`."""

    text: str
    begin: str
    end: str


@frozen(kw_only=True)
class PromptJob:
    """A conversation to be written as a prompt.

    tools: functions that the answer may call, as in OpenAI's API; None: none
    marked: whether calls must be told from text that is JSON as well
    settings: the template's own variables
    begins_answer: whether the assistant's turn is begun
    form: how calls are written, once an answer has said so; None: to be found
    """

    source: TemplateSource
    turns: Sequence[ChatTurn]
    tools: list[dict[str, Any]] | None = None
    marked: bool = False
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    begins_answer: bool = True
    form: CallFormat | None = None

    def encoded(self) -> bytes:
        """Return the job as the helper reads it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        form = None if self.form is None else dataclasses.asdict(self.form)
        return _json({"do": "prompt", **fields, "settings": dict(self.settings), "form": form})


class WrittenPrompt(NamedTuple):
    """What became of a `PromptJob`. calls: the form of calls in the answer; form: the template's, to be remembered;
    None where nothing asked for it."""

    text: str
    calls: CallFormat
    form: CallFormat | None

    @classmethod
    def decoded(cls, answer: bytes) -> WrittenPrompt:
        """Read the helper's answer. Raises Refused, TemplateError."""
        fields = _result(answer)
        form = None if fields["form"] is None else CallFormat(**fields["form"])
        return cls(fields["text"], CallFormat(**fields["calls"]), form)


@frozen(kw_only=True)
class TemplateReport:
    """What a template does, found by trying.

    error: why it writes no conversation at all; None: it does
    closing: what it writes after an answer that is over
    writes_calls: whether it writes functions, calls and results; else they are told in the stated format
    why_not: the reason for the stated format
    tools_fail: whether that reason is a failure of the template
    """

    error: str | None = None
    closing: str = ""
    writes_calls: bool = False
    why_not: str | None = None
    tools_fail: bool = False

    @classmethod
    def decoded(cls, answer: bytes) -> TemplateReport:
        """Read the helper's answer. Raises TemplateError."""
        return cls(**_result(answer))


def report_job(source: TemplateSource) -> bytes:
    """Return the job that is answered by a TemplateReport, as the helper reads it."""
    return _json({"do": "report", "source": source})


def encode_result(result: WrittenPrompt | TemplateReport) -> bytes:
    """Return an answer of the helper's."""
    if isinstance(result, TemplateReport):
        return _json({"result": dataclasses.asdict(result)})
    form = None if result.form is None else dataclasses.asdict(result.form)
    return _json({"result": {"text": result.text, "calls": dataclasses.asdict(result.calls), "form": form}})


def encode_error(error: Refused | TemplateError) -> bytes:
    """Return an answer of the helper's that is an error."""
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
    """Texts of clients may hold halves of characters (surrogates), which JSON may name."""
    return json.dumps(content, ensure_ascii=False).encode(errors="surrogatepass")

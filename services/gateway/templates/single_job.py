"""Single jobs for a chat template, for commands: each in a helper process that ends with the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from neuronpipe.services.gateway.templates.messages import ChatTurn
from neuronpipe.services.gateway.templates.template_jobs import (
    JOB_S,
    WORK,
    PromptJob,
    TemplateError,
    TemplateReport,
    TemplateSource,
    WrittenPrompt,
    report_job,
)
from neuronpipe.services.untrusted.helper import Helper, UntrustedError

if TYPE_CHECKING:
    from neuronpipe.plans.convert.chat_template import ChatTemplate, TemplateFacts


def write_prompt(
    source: TemplateSource, messages: list[dict[str, str]], settings: Mapping[str, bool] | None = None
) -> str:
    """Write messages, objects with role and content, as a prompt.

    settings: variables of the template's own

    Raises Refused, and TemplateError, which names the limit that the template has reached.
    """
    turns = [ChatTurn(message["role"], message["content"]) for message in messages]
    return WrittenPrompt.decoded(_answer(PromptJob(source=source, turns=turns, settings=settings or {}).encoded())).text


def examine_template(template: ChatTemplate) -> TemplateFacts:
    """Return what a conversion needs to know about a template."""
    from neuronpipe.plans.convert.chat_template import TemplateFacts  # numpy: whoever converts has it

    source = TemplateSource(template.text, template.begin, template.end)
    try:
        report = TemplateReport.decoded(_answer(report_job(source)))
    except TemplateError as error:
        return TemplateFacts(error=str(error))
    return TemplateFacts(report.closing, report.error, report.why_not if report.tools_fail else None)


def _answer(job: bytes) -> bytes:
    from neuronpipe.plans.plan.memory_budget import MAX_HELPER_GROWTH_BYTES  # the planner: not before it is needed

    helper = Helper(WORK, memory_bytes=MAX_HELPER_GROWTH_BYTES)
    try:
        return helper.call(job, JOB_S)
    except (UntrustedError, ValueError) as error:  # ValueError: the conversation is too long
        raise TemplateError(str(error)) from None
    finally:
        helper.dispose()

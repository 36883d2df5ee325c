"""Chat templates: Jinja in a sandbox, with the filters, functions and tags that transformers gives them.

A template comes with a package, so it is a stranger's program. The sandbox keeps it from Python's objects and from
changing what it is given. It does not bound time or memory: templates run only in the helper process of
`template_process.py`, which is killed at its limits.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from neuronpipe.services.gateway.templates.template_jobs import MAX_PROMPT_BYTES, Refused, TemplateError, TemplateSource

COMPILED_NAME = "<template>"  # what Jinja calls the file of a template that is none


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says, for training; a prompt has just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements of the body."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class Template:
    """A compiled chat template. Raises TemplateError where it cannot be compiled."""

    def __init__(self, source: TemplateSource) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self._tokens = {"bos_token": source.begin, "eos_token": source.end}
        self._settings: Mapping[str, Any] = {}
        self._begins_answer = True
        try:
            self._template = environment.from_string(source.text)
        except MemoryError:
            raise
        except Exception as error:  # Jinja's own, and Python's for what it was compiled to
            raise TemplateError(_with_line(error)) from None

    def with_settings(self, settings: Mapping[str, Any], *, begins_answer: bool = True) -> Template:
        """Return a copy with variables of the template's own such as `enable_thinking`. begins_answer: whether it may
        write what comes before an answer."""
        other = copy.copy(self)
        other._settings, other._begins_answer = settings, begins_answer
        return other

    def render(
        self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None = None, answer: bool = True
    ) -> str:
        """Write the conversation as the model was trained to see it, up to where the assistant speaks.

        tools: functions that it may call, as in OpenAI's API; answer: whether the assistant speaks next. Raises
        Refused, TemplateError, and MemoryError at the process's limit.
        """
        variables = {"messages": messages, "tools": tools, "documents": None}
        answer = answer and self._begins_answer
        try:
            text = self._template.render(
                {**self._settings, **variables, "add_generation_prompt": answer, **self._tokens}
            )
        except (Refused, MemoryError):
            raise
        except Exception as error:  # a template may do anything wrong that a program can
            raise TemplateError(_with_line(error)) from None
        if len(text) > MAX_PROMPT_BYTES or len(text.encode(errors="surrogatepass")) > MAX_PROMPT_BYTES:
            raise TemplateError(f"it writes more than {MAX_PROMPT_BYTES >> 20} MiB of text")
        return text


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON with the parameters and defaults of transformers: unlike Jinja's own, `<` stays as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: object) -> NoReturn:
    raise Refused(_one_line(str(message)))


def _with_line(error: Exception) -> str:
    """Say what went wrong, and in which line of the template, in one line of text."""
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else _line_of(error.__traceback__)
    said = _one_line(str(error)) or type(error).__name__
    return said if line is None else f"line {line}: {said}"


def _line_of(traceback: TracebackType | None) -> int | None:
    """Return the innermost line of the template in a traceback, whose numbers Jinja has made the template's."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == COMPILED_NAME:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _one_line(text: str) -> str:
    """Make a text of the template's fit for a terminal, which would obey control characters."""
    line = " ".join(text[:4096].split())[:300]
    return "".join(character if character.isprintable() else "?" for character in line)

"""Chat templates: Jinja in a sandbox, with the filters, functions and tags that transformers provides.

A template comes with a package and is untrusted code. The sandbox prevents access to Python's objects and changes to
its variables. It does not bound time or memory: templates run only in the helper process of `template_process.py`,
which is killed at its limits.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from neuronpipe.services.gateway.templates.template_jobs import MAX_PROMPT_BYTES, Refused, TemplateError, TemplateSource

COMPILED_NAME = "<template>"  # Jinja's file name for a template that is not a file


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. A prompt contains just its body.

    As in transformers the body is a scope: variables that are set in it do not exist after it.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class Template:
    """A compiled chat template. Raises TemplateError if it cannot be compiled."""

    def __init__(self, source: TemplateSource) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self.source = source.text
        self._tokens = {"bos_token": source.begin, "eos_token": source.end}
        self._settings: Mapping[str, Any] = {}
        self._begins_answer = True
        try:
            self._template = environment.from_string(source.text)
        except MemoryError:
            raise
        except Exception as error:  # Jinja's errors, and Python's errors in the compiled code
            raise TemplateError(_with_line(error)) from None

    def with_settings(self, settings: Mapping[str, Any], *, begins_answer: bool = True) -> Template:
        """Return a copy with variables of the template's own, such as `enable_thinking`.

        begins_answer: False omits what the template writes before an answer
        """
        template = copy.copy(self)
        template._settings, template._begins_answer = settings, begins_answer
        return template

    def render(
        self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None = None, answer: bool = True
    ) -> str:
        """Render a conversation as the model was trained to see it, up to where the assistant's answer begins.

        tools: the functions that may be called, as in OpenAI's API
        answer: True if the assistant's answer comes next

        Raises Refused, TemplateError, and MemoryError at the process's limit.
        """
        variables = {"messages": messages, "tools": tools, "documents": None}
        answer = answer and self._begins_answer
        try:
            text = self._template.render(
                {**self._settings, **variables, "add_generation_prompt": answer, **self._tokens}
            )
        except (Refused, MemoryError):
            raise
        except Exception as error:  # a template may raise anything
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
    """Encode JSON with the parameters and defaults of transformers: unlike Jinja's filter it does not escape `<`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: object) -> NoReturn:
    raise Refused(_one_line(str(message)))


def _with_line(error: Exception) -> str:
    """Describe an error in one line of text, with the line of the template where it occurred."""
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else _line_of(error.__traceback__)
    message = _one_line(str(error)) or type(error).__name__
    return message if line is None else f"line {line}: {message}"


def _line_of(traceback: TracebackType | None) -> int | None:
    """Return the innermost line of the template in a traceback, which Jinja maps to the template's line numbers."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == COMPILED_NAME:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _one_line(text: str) -> str:
    """Make text of the template safe for a terminal, by removing control characters."""
    line = " ".join(text[:4096].split())[:300]
    return "".join(character if character.isprintable() else "?" for character in line)

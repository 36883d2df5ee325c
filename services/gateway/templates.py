"""Chat templates: Jinja in a sandbox. A template comes with a package, so it is a stranger's program.

It cannot reach Python's objects or change what it is given (jinja2's sandbox), and is stopped after MAX_STEPS lines of
what it compiles to. What it multiplies or joins is measured first; for whatever grows in other ways the process has a
limit (`bounded_growth`), and running into it is this template's failure and nothing else's.
"""

from __future__ import annotations

import contextlib
import copy
import json
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_GROWTH_BYTES = 512 << 20
MAX_STEPS = 200_000
MAX_CHARACTERS = 8 << 20
MAX_EXPONENT = 64
MAX_INDENT = 64
PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"})
UNWANTED_FILTERS = ("center", "filesizeformat", "format", "pprint", "random", "urlize", "wordwrap", "xmlattr")


class TemplateError(Exception):
    """A template that cannot be compiled or rendered; says why in one line."""


class Refused(Exception):
    """The template itself says that it cannot write this conversation."""


@contextlib.contextmanager
def bounded_growth() -> Iterator[None]:
    """Meanwhile this process's own memory grows by MAX_GROWTH_BYTES at most: beyond, an allocation fails. Address space
    does not count, since each thread reserves 72 MB of it, for a stack and a heap that stay almost empty."""
    statm = Path("/proc/self/statm").read_text().split()  # not psutil, which would cost every gateway a megabyte
    writable_bytes = int(statm[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = writable_bytes + MAX_GROWTH_BYTES
    if soft == resource.RLIM_INFINITY or soft > wanted:
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with measured growth."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what is known to stay small."""
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= MAX_EXPONENT):
            raise TemplateError(f"an exponent beyond {MAX_EXPONENT}")
        if operator == "%" and isinstance(left, str):
            raise TemplateError("formatting with %")
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if hasattr(many, "__len__") and isinstance(times, int) and len(many) * times > MAX_CHARACTERS:
                    raise TemplateError(f"more than {MAX_CHARACTERS} characters")
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _require_short(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, callable_: Any, /, *given: Any, **named: Any) -> Any:
        """Call what keeps its result about as long as what goes in, or say so."""
        method = getattr(callable_, "__wrapped__", callable_)  # the sandbox wraps a text's format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name in PADDING:
                raise TemplateError(f"the method {name} of a text")
            if name == "replace":
                return _replace(owner, *given, **named)
            if name == "join":
                return _join(given[0], owner)
        return super().call(context, callable_, *given, **named)


def _replace(text: object, old: object, new: object, count: int = -1) -> str:
    text, old, new = str(text), str(old), str(new)
    found = text.count(old) if count < 0 else min(count, text.count(old))
    if len(text) + found * len(new) > MAX_CHARACTERS:
        raise TemplateError(f"more than {MAX_CHARACTERS} characters")
    return text.replace(old, new, count)


def _join(items: Iterable[object], between: object = "", attribute: str | None = None) -> str:
    if attribute is not None:
        raise TemplateError("join by an attribute")
    texts = [str(item) for item in items]
    between = str(between)
    if len(between) * len(texts) > MAX_CHARACTERS:
        raise TemplateError(f"more than {MAX_CHARACTERS} characters")
    _require_short(*texts)
    return between.join(texts)


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not isinstance(width, int) or width > MAX_INDENT:
        raise TemplateError(f"an indent beyond {MAX_INDENT}")
    return str(do_indent(text, width, first, blank))


class Template:
    """One chat template, compiled. begin, end: what it calls `bos_token` and `eos_token`. Raises TemplateError."""

    def __init__(self, text: str, begin: str, end: str) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters |= {"tojson": _to_json, "replace": _replace, "join": _join, "indent": _indent}
        for name in UNWANTED_FILTERS:
            environment.filters.pop(name)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        for name in ("lipsum", "cycler", "joiner"):
            environment.globals.pop(name)
        self._tokens = {"bos_token": begin, "eos_token": end}
        self._settings: Mapping[str, Any] = {}
        self._answers = True
        try:
            self._template = environment.from_string(text)
        except Exception as error:  # Jinja's own, and Python's for what it was compiled to
            raise TemplateError(_one_line(error)) from None

    def with_settings(self, settings: Mapping[str, Any], *, answers: bool = True) -> Template:
        """The same, with variables of its own such as `enable_thinking`; answers: whether an answer may be begun."""
        other = copy.copy(self)
        other._settings, other._answers = settings, answers
        return other

    def render(
        self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None = None, answer: bool = True
    ) -> str:
        """The conversation as the model was trained to see it, up to where the assistant speaks. tools: functions that
        it may call, as in OpenAI's API; answer: whether the assistant speaks next. Raises Refused, TemplateError."""
        before = sys.gettrace()
        sys.settrace(_counter())
        try:
            said = {"messages": messages, "tools": tools, "documents": None}
            answer = answer and self._answers
            text = self._template.render({**self._settings, **said, "add_generation_prompt": answer, **self._tokens})
        except (Refused, TemplateError):
            raise
        except Exception as error:  # a template may do anything wrong that a program can
            raise TemplateError(_one_line(error)) from None
        finally:
            sys.settrace(before)
        _require_short(text)
        return text


def _counter() -> Any:
    """A trace function that counts lines, in whatever the template calls as well."""
    left = MAX_STEPS

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TemplateError(f"more than {MAX_STEPS} steps")
        return trace

    return trace


def _require_short(*texts: str) -> None:
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise TemplateError(f"more than {MAX_CHARACTERS} characters")


def _to_json(value: Any, indent: int | None = None) -> str:
    if indent is not None and indent > MAX_INDENT:
        raise TemplateError(f"an indent beyond {MAX_INDENT}")
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: object) -> NoReturn:
    raise Refused(_one_line(message))


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:300] or type(reason).__name__

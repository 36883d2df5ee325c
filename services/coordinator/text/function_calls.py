"""Grammars of answers that call functions: free text up to a marker, then only valid calls.

The grammar is in llguidance's dialect of Lark. If the text around a call contains the name of a special token, the
token itself is meant: free text never contains it, and no spelling of the name by other tokens counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from neuronpipe.protocol.argument_syntax import Syntax
from neuronpipe.protocol.messages.request import Calls, Function
from neuronpipe.services.coordinator.text.call_parameters import ParameterGrammar
from neuronpipe.services.coordinator.text.json_schemas import as_followed
from neuronpipe.services.coordinator.text.keyword_arguments import KeywordError, KeywordGrammar

MAX_CALLS_BYTES = 256 << 10
WILD = "\0"
# White space as chat templates write it in arguments. A call that returns as part of the conversation is then the same
# text, so that its keys and values can be reused.
AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANYTHING = r"(.|\n)*"


class CallsError(Exception):
    """Calls that no grammar can describe, with the reason in one line."""


class Atom(NamedTuple):
    """A piece of the text around calls: a special token by its id, or text that other tokens spell."""

    text: str
    token: int | None = None

    @property
    def lark(self) -> str:
        """The atom as part of a rule."""
        if self.token is not None:
            return f"<[{self.token}]>"
        if self.text[0] == WILD:
            return f"/[A-Za-z0-9]{{{len(self.text)}}}/"
        return _quoted(self.text)


def atoms(text: str, special: Mapping[str, int]) -> list[Atom]:
    """Split a text into atoms.

    special: ids of special tokens by their names
    """
    names = sorted(special, key=len, reverse=True)
    parts = re.split("|".join([*(f"({re.escape(name)})" for name in names), f"({WILD}+)"]), text)
    return [Atom(part, special.get(part)) for part in parts if part]


def marks(calls: Calls, special: Mapping[str, int]) -> dict[int, str]:
    """Return the text of each special token that counts as text in an answer with these calls.

    special: ids of special tokens by their names
    """
    texts = [calls.before, calls.between, calls.next, calls.after, calls.opening]
    texts += [calls.parameter_before, calls.parameter_between, calls.parameter_after]
    texts += [Syntax.of(calls.argument_syntax).quote] if calls.argument_syntax else []
    texts += [text for thought in calls.thoughts for text in (thought.before, thought.after)]
    return {atom.token: atom.text for text in texts for atom in atoms(text, special) if atom.token is not None}


def require_short_calls(calls: Calls) -> None:
    if sum(len(function.arguments.encode(errors="replace")) for function in calls.functions) > MAX_CALLS_BYTES:
        raise CallsError(f"the schemas of arguments are longer than {MAX_CALLS_BYTES} bytes together")


def as_lark(calls: Calls, answer: str | None, special: Mapping[str, int]) -> str:
    """Return the grammar. Raises CallsError.

    answer: JSON schema of an answer without calls; None: any text
    special: ids of special tokens by their names
    """
    require_short_calls(calls)
    return "%llguidance {}\n" + "".join(_CallGrammar(calls, answer, special).lines())


class _CallGrammar:
    """The lines of the grammar of one request. Arguments as in `as_lark`."""

    def __init__(self, calls: Calls, answer: str | None, special: Mapping[str, int]) -> None:
        self._calls, self._answer, self._special = calls, answer, special

    def lines(self) -> Iterator[str]:
        calls, functions = self._calls, range(len(self._calls.functions))
        more = f"({self._lark(calls.next)} call){{0,{calls.most - 1}}}" if calls.most > 1 else ""
        body = " | ".join(["calls", *self._alternatives()])
        thoughts = " | ".join(f"thought{number}" for number in range(len(calls.thoughts)))
        yield f"start: {body}\n" if not thoughts else f"start: {'rest0 ' * calls.in_thought}({thoughts})* body\n"
        if thoughts:
            yield f"body: {body}\n"
        yield f"calls: {self._beginning()} call {more} {self._lark(calls.after)}\n"
        yield f"call: {' | '.join(f'f{number}' for number in functions)}\n"
        for number, function in enumerate(calls.functions):
            yield from self._function(number, function)
        for number, thought in enumerate(calls.thoughts):
            yield f"thought{number}: {self._lark(thought.before)} rest{number}\n"
            yield from self._until(f"rest{number}", thought.after)
        yield from self._texts()

    def _lark(self, text: str) -> str:
        return " ".join(atom.lark for atom in atoms(text, self._special))

    def _function(self, number: int, function: Function) -> Iterator[str]:
        # A name and the text after it are one terminal, since a name may be a prefix of another.
        tail, name = atoms(self._calls.between, self._special), function.name
        if tail and tail[0].token is None and tail[0].text[0] != WILD:
            name += tail.pop(0).text
        begin = " ".join([_quoted(name), *(atom.lark for atom in tail)])
        schema = schema_of(function)
        subject = f"the arguments of {function.name!r}"
        if self._calls.argument_syntax:
            try:
                keywords = KeywordGrammar(self._calls, schema, f"f{number}", self._lark, self._until)
            except KeywordError as error:
                raise CallsError(f"{subject}: {error}") from None
            except RecursionError:
                raise CallsError(f"{subject}: the schema is nested too deeply") from None
            if function.strict and (keyword := keywords.unenforced()) is not None:
                raise CallsError(f"{subject}: {keyword} cannot be followed in this call format")
            yield f"f{number}: {begin} {keywords.expression}\n"
            yield from keywords.rules()
            return
        if not self._calls.parameter_before:
            yield f"f{number}: {begin} %json {json.dumps(schema)}\n"
            return
        parameters = ParameterGrammar(self._calls, schema, f"f{number}", self._lark, self._until)
        if function.strict and (keyword := parameters.unenforced()) is not None:
            raise CallsError(f"{subject}: {keyword} of a string cannot be followed in this call format")
        yield f"f{number}: {begin} {parameters.expression()}\n"
        yield from parameters.rules()

    def _alternatives(self) -> Iterator[str]:
        if not self._calls.text:
            return
        opening = self._lark(self._calls.opening)
        if self._answer is not None:
            yield f"{opening} %json {self._answer}"
        else:
            yield f"{opening} TEXT" if opening or self._calls.marker else "OTHER?"

    def _beginning(self) -> str:
        """Return what precedes the first name: the text around calls, and free text before the marker."""
        first, *tail = atoms(self._calls.before, self._special)
        marked = self._calls.text and self._calls.marker and not self._calls.opening and self._answer is None
        if not marked:
            return " ".join(atom.lark for atom in (first, *tail))
        if first.token is not None:
            return " ".join(["TEXT?", *(atom.lark for atom in (first, *tail))])
        marker = self._calls.marker
        unmarked = first.text.removeprefix(marker) if first.text.startswith(marker) else ""
        return " ".join(["marked", *([_quoted(unmarked)] if unmarked else []), *(atom.lark for atom in tail)])

    def _texts(self) -> Iterator[str]:
        calls = self._calls
        if not calls.text or self._answer is not None:
            return
        if not calls.marker and not calls.opening:
            begun = re.escape(calls.before[0]).replace("/", r"\/")
            yield f"OTHER: /[^{begun}]{ANYTHING}/\n"
            return
        yield f"TEXT: /{ANYTHING}/{''.join(self._no_thoughts())}\n"
        first = atoms(calls.before, self._special)[0]
        if first.token is None and calls.marker and not calls.opening:
            marker = calls.marker if first.text.startswith(calls.marker) else first.text
            yield f"marked[lazy]: TEXT {_quoted(marker)}\n"

    def _no_thoughts(self) -> Iterator[str]:
        """Yield what keeps text from beginning like a thought, which the lexer would take for text otherwise."""
        for thought in self._calls.thoughts:
            first = atoms(thought.before, self._special)[0]
            if first.token is None:
                yield f" & ~(/{re.escape(first.text).replace('/', chr(92) + '/')}{ANYTHING}/)"

    def _until(self, rule: str, text: str) -> Iterator[str]:
        """Yield a rule of any text up to and including the first occurrence of another text."""
        first, *tail = atoms(text, self._special)
        following = " ".join(atom.lark for atom in tail)
        if first.token is not None:
            yield f"{rule}: /{ANYTHING}/? {first.lark} {following}\n"
        else:
            yield f"{rule}: {rule}x {following}\n"
            yield f"{rule}x[lazy]: /{ANYTHING}/ {_quoted(first.text)}\n"


def schema_of(function: Function) -> dict[str, Any]:
    """Return the schema that a function's arguments follow, an object. Raises CallsError."""
    subject = f"the arguments of {function.name!r}"
    try:
        schema = json.loads(function.arguments)
    except (ValueError, RecursionError) as error:
        raise CallsError(f"{subject}: the schema is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise CallsError(f"{subject}: the schema is no JSON object")
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise CallsError(f"{subject}: the schema is not that of an object")
    try:
        followed = as_followed(schema | {"type": "object"})
    except RecursionError:
        raise CallsError(f"{subject}: the schema is nested too deeply") from None
    return followed | {"x-guidance": AS_WRITTEN | ({} if function.strict else {"lenient": True})}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

"""Answers that call functions, as a grammar: free text up to a marker, and from there on nothing but valid calls.

The grammar is in llguidance's dialect of Lark. Where the text round a call names a special token, that token is meant:
no spelling of its name by other tokens is taken for it, and free text never contains it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from neuronpipe.protocol.messages.request import Calls, Function
from neuronpipe.services.coordinator.text.json_schemas import as_followed

MAX_CALLS_BYTES = 256 << 10
WILD = "\0"
# As templates write arguments; the library reads it as options.
AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANYTHING = r"(.|\n)*"


class CallsError(Exception):
    """Calls that no grammar can describe; says why in one line."""


class Atom(NamedTuple):
    """A piece of the text round calls: special tokens by their ids, and text that other tokens spell."""

    text: str
    token: int | None = None

    @property
    def lark(self) -> str:
        """The atom in a rule."""
        if self.token is not None:
            return f"<[{self.token}]>"
        if self.text[0] == WILD:
            return f"/[A-Za-z0-9]{{{len(self.text)}}}/"
        return _quoted(self.text)


def atoms(text: str, special: Mapping[str, int]) -> list[Atom]:
    """A text in pieces. special: ids of special tokens by their names."""
    names = sorted(special, key=len, reverse=True)
    parts = re.split("|".join([*(f"({re.escape(name)})" for name in names), f"({WILD}+)"]), text)
    return [Atom(part, special.get(part)) for part in parts if part]


def marks(calls: Calls, special: Mapping[str, int]) -> dict[int, str]:
    """The special tokens that are text in an answer with these calls."""
    texts = (calls.before, calls.between, calls.next, calls.after)
    return {one.token: one.text for text in texts for one in atoms(text, special) if one.token is not None}


def require_short_calls(calls: Calls) -> None:
    """Raises CallsError."""
    if sum(len(one.arguments.encode(errors="replace")) for one in calls.functions) > MAX_CALLS_BYTES:
        raise CallsError(f"the schemas of arguments are longer than {MAX_CALLS_BYTES} bytes together")


def as_lark(calls: Calls, answer: str | None, special: Mapping[str, int]) -> str:
    """The grammar. answer: JSON schema of what is said in place of calls; None: any text. Raises CallsError."""
    require_short_calls(calls)

    def lark(text: str) -> str:
        return " ".join(atom.lark for atom in atoms(text, special))

    # The text after a name is one piece with it: a name may be the beginning of another.
    first, *others = atoms(calls.between, special)
    fused, rest = ("", [first, *others]) if first.token is not None or first.text[0] == WILD else (first.text, others)
    functions = [
        f"{_quoted(one.name + fused)} {' '.join(atom.lark for atom in rest)} %json {json.dumps(schema_of(one))}"
        for one in calls.functions
    ]
    more = f"({lark(calls.next)} call){{0,{calls.most - 1}}}" if calls.most > 1 else ""
    rules = {
        "start": " | ".join(["calls", *_others(calls, answer, special)]),
        "calls": f"{_beginning(calls, answer, special)} call {more} {lark(calls.after)}",
        "call": " | ".join(f"f{number}" for number in range(len(functions))),
        **{f"f{number}": one for number, one in enumerate(functions)},
    }
    text = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
    return f"%llguidance {{}}\n{text}{''.join(_texts(calls, answer, special))}"


def _others(calls: Calls, answer: str | None, special: Mapping[str, int]) -> Iterator[str]:
    """What the answer may be in place of calls."""
    if not calls.text:
        return
    if answer is not None:
        yield f"%json {answer}"
    else:
        yield "TEXT" if calls.marker else "OTHER?"


def _beginning(calls: Calls, answer: str | None, special: Mapping[str, int]) -> str:
    """What comes before the first name: the text round calls, and any text before its marker."""
    first, *rest = atoms(calls.before, special)
    if not (calls.text and calls.marker and answer is None):
        return " ".join(atom.lark for atom in (first, *rest))
    if first.token is not None:
        return " ".join(["TEXT?", *(atom.lark for atom in (first, *rest))])
    left = first.text.removeprefix(calls.marker) if first.text.startswith(calls.marker) else ""
    return " ".join(["marked", *([_quoted(left)] if left else []), *(atom.lark for atom in rest)])


def _texts(calls: Calls, answer: str | None, special: Mapping[str, int]) -> Iterator[str]:
    """The rules for free text that the others name."""
    if not calls.text or answer is not None:
        return
    if not calls.marker:
        begun = re.escape(calls.before[0]).replace("/", r"\/")
        yield f"OTHER: /[^{begun}]{ANYTHING}/\n"
        return
    yield f"TEXT: /{ANYTHING}/\n"
    first = atoms(calls.before, special)[0]
    if first.token is None:
        shown = calls.marker if first.text.startswith(calls.marker) else first.text
        yield f"marked[lazy]: TEXT {_quoted(shown)}\n"


def schema_of(function: Function) -> dict[str, Any]:
    """The schema that a function's arguments follow: an object. Raises CallsError."""
    said = f"the arguments of {function.name!r}"
    try:
        schema = json.loads(function.arguments)
    except (ValueError, RecursionError) as error:
        raise CallsError(f"{said}: the schema is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise CallsError(f"{said}: the schema is no JSON object")
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise CallsError(f"{said}: the schema is not that of an object")
    try:
        followed = as_followed(schema | {"type": "object"})
    except RecursionError:
        raise CallsError(f"{said}: the schema is nested too deeply") from None
    return followed | {"x-guidance": AS_WRITTEN | ({} if function.strict else {"lenient": True})}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

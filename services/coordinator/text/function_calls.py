"""Grammars of answers that call functions: free text up to a marker, then only valid calls.

The grammar is in llguidance's dialect of Lark. If the text around a call contains the name of a special token, the
token itself is meant: free text never contains it, and no spelling of the name by other tokens counts.
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
    texts = (calls.before, calls.between, calls.next, calls.after)
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

    def lark(text: str) -> str:
        return " ".join(atom.lark for atom in atoms(text, special))

    # A name and the text after it are one terminal, since a name may be a prefix of another.
    first, *following = atoms(calls.between, special)
    fused, tail = (
        ("", [first, *following]) if first.token is not None or first.text[0] == WILD else (first.text, following)
    )
    before_arguments = " ".join(atom.lark for atom in tail)
    functions = [
        f"{_quoted(function.name + fused)} {before_arguments} %json {json.dumps(schema_of(function))}"
        for function in calls.functions
    ]
    more = f"({lark(calls.next)} call){{0,{calls.most - 1}}}" if calls.most > 1 else ""
    rules = {
        "start": " | ".join(["calls", *_alternatives(calls, answer, special)]),
        "calls": f"{_beginning(calls, answer, special)} call {more} {lark(calls.after)}",
        "call": " | ".join(f"f{number}" for number in range(len(functions))),
        **{f"f{number}": rule for number, rule in enumerate(functions)},
    }
    text = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
    return f"%llguidance {{}}\n{text}{''.join(_texts(calls, answer, special))}"


def _alternatives(calls: Calls, answer: str | None, special: Mapping[str, int]) -> Iterator[str]:
    if not calls.text:
        return
    if answer is not None:
        yield f"%json {answer}"
    else:
        yield "TEXT" if calls.marker else "OTHER?"


def _beginning(calls: Calls, answer: str | None, special: Mapping[str, int]) -> str:
    """Return what precedes the first name: the text around calls, and free text before the marker."""
    first, *tail = atoms(calls.before, special)
    if not (calls.text and calls.marker and answer is None):
        return " ".join(atom.lark for atom in (first, *tail))
    if first.token is not None:
        return " ".join(["TEXT?", *(atom.lark for atom in (first, *tail))])
    unmarked = first.text.removeprefix(calls.marker) if first.text.startswith(calls.marker) else ""
    return " ".join(["marked", *([_quoted(unmarked)] if unmarked else []), *(atom.lark for atom in tail)])


def _texts(calls: Calls, answer: str | None, special: Mapping[str, int]) -> Iterator[str]:
    if not calls.text or answer is not None:
        return
    if not calls.marker:
        begun = re.escape(calls.before[0]).replace("/", r"\/")
        yield f"OTHER: /[^{begun}]{ANYTHING}/\n"
        return
    yield f"TEXT: /{ANYTHING}/\n"
    first = atoms(calls.before, special)[0]
    if first.token is None:
        marker = calls.marker if first.text.startswith(calls.marker) else first.text
        yield f"marked[lazy]: TEXT {_quoted(marker)}\n"


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

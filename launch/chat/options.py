"""The options of sampling in a chat: what `/set`, `/unset` and `/show` say and change. `Generate` declares them."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from neuronpipe.launch.arguments.sampling import SEEDS
from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.messages.request import MAX_TOKENS, RANGES, SAMPLING_OPTIONS, Generate
from neuronpipe.protocol.options import Option

OPTIONS = {
    option.name: option
    for option in (
        *SAMPLING_OPTIONS,
        Option("max_tokens", int, MAX_TOKENS, RANGES["max_tokens"], False, "most tokens of an answer"),
        Option("seed", int, 0, SEEDS, False, "the same seed gives the same answer"),
    )
}
SWITCH = {"on": True, "true": True, "1": True, "": True, "off": False, "false": False, "0": False}
INDENT, NARROW_COLUMNS = 30, 60


def with_option(ask: Generate, text: str) -> tuple[Generate, str]:
    """The request with an option set, and the option as it holds now. text: `NAME VALUE` or `NAME=VALUE`. Raises
    UserError that says what can be set, or to what."""
    name, _, value = text.replace("=", " ", 1).partition(" ")
    option = _named(name)
    values: dict[str, Any] = {option.name: _value(option, value.strip())}
    changed = dataclasses.replace(ask, **values)
    return changed, shown(changed, option.name)


def without_option(ask: Generate, begun: Generate, name: str) -> tuple[Generate, str]:
    """The request with an option as it was when the chat began, and how that is; without a name all options."""
    options = [_named(name)] if name else list(OPTIONS.values())
    restored = dataclasses.replace(ask, **{option.name: getattr(begun, option.name) for option in options})
    return restored, ", ".join(shown(restored, option.name) for option in options)


def shown(ask: Generate, name: str) -> str:
    """`temperature 0.7`."""
    value = getattr(ask, name)
    if isinstance(value, bool):
        return f"{name} {'on' if value else 'off'}"
    if (name, value) == ("max_tokens", MAX_TOKENS):
        return f"{name} as many as fit"
    return f"{name} {value}" if isinstance(value, int) else f"{name} {value:g}"


def list_options(ask: Generate, columns: int) -> str:
    """All options as they hold, and what they mean, for a terminal of this width."""
    narrow = columns < NARROW_COLUMNS
    lines = []
    for name, option in OPTIONS.items():
        first = shown(ask, name)
        indent = " " * (2 if narrow else INDENT)
        if narrow or len(first) >= INDENT:
            lines.append(first)
            first = ""
        meaning = option.meaning if option.range is None else f"{option.meaning} ({option.range})"
        initial = indent if narrow or not first else f"{first:<{INDENT}}"
        lines.append(textwrap.fill(meaning, max(20, columns - 1), initial_indent=initial, subsequent_indent=indent))
    return "\n".join(lines)


def _named(text: str) -> Option:
    name = text.strip().removeprefix("--").replace("-", "_").lower()
    if name in OPTIONS:
        return OPTIONS[name]
    begin_so = [known for known in OPTIONS if name and known.startswith(name)]
    if len(begin_so) == 1:
        return OPTIONS[begin_so[0]]
    import difflib  # only a mistake pays for it

    near = difflib.get_close_matches(name, OPTIONS, n=1)
    raise UserError(f"there is no option {quoted(text)}{f'; did you mean {near[0]}?' if near else ''}")


def _value(option: Option, text: str) -> float:
    if option.kind is bool:
        if text.lower() not in SWITCH:
            raise UserError(f"{option.name} {quoted(text)}: on or off")
        return SWITCH[text.lower()]
    kind = "a whole number" if option.kind is int else "a number"
    try:
        value: float = option.kind(text)
    except ValueError:
        given = f" {quoted(text)}" if text else ""
        raise UserError(f"{option.name}{given}: expected {kind} {option.range}") from None
    if option.range is not None and value not in option.range:
        raise UserError(f"{option.name} {text}: expected {kind} {option.range}")
    return value

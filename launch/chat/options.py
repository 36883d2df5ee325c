"""Sampling options in a chat, for `/set`, `/unset` and `/show`. `Generate` declares them."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from neuronpipe.launch.generation.options import SEEDS
from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.messages.request import MAX_TOKENS, RANGES, SAMPLING_OPTIONS, Generate
from neuronpipe.protocol.options import Option

OPTIONS = {
    option.name: option
    for option in (
        *SAMPLING_OPTIONS,
        Option("max_tokens", int, MAX_TOKENS, RANGES["max_tokens"], False, "maximum number of tokens of an answer"),
        Option("seed", int, 0, SEEDS, False, "random seed; the same seed gives the same answer"),
    )
}
SWITCH = {"on": True, "true": True, "1": True, "": True, "off": False, "false": False, "0": False}
INDENT, NARROW_COLUMNS = 30, 60


def set_option(request: Generate, text: str) -> tuple[Generate, str]:
    """Return the request with an option changed, and the option as text.

    text: `NAME VALUE` or `NAME=VALUE`

    Raises UserError for an unknown option or a value that it cannot have.
    """
    name, _, value = text.replace("=", " ", 1).partition(" ")
    option = _find_option(name)
    values: dict[str, Any] = {option.name: _parse_value(option, value.strip())}
    changed = dataclasses.replace(request, **values)
    return changed, show_option(changed, option.name)


def reset_option(request: Generate, initial: Generate, name: str) -> tuple[Generate, str]:
    """Return the request with an option reset to its initial value, and the option as text.

    name: an option; empty: all options

    Raises UserError for an unknown option.
    """
    options = [_find_option(name)] if name else list(OPTIONS.values())
    restored = dataclasses.replace(request, **{option.name: getattr(initial, option.name) for option in options})
    return restored, ", ".join(show_option(restored, option.name) for option in options)


def show_option(request: Generate, name: str) -> str:
    """Return an option and its value, e.g. `temperature 0.7`."""
    value = getattr(request, name)
    if isinstance(value, bool):
        return f"{name} {'on' if value else 'off'}"
    if (name, value) == ("max_tokens", MAX_TOKENS):
        return f"{name} as many as fit"
    return f"{name} {value}" if isinstance(value, int) else f"{name} {value:g}"


def list_options(request: Generate, columns: int) -> str:
    """Return all options with their values and meanings, for a terminal of this width."""
    narrow = columns < NARROW_COLUMNS
    lines = []
    for name, option in OPTIONS.items():
        first = show_option(request, name)
        indent = " " * (2 if narrow else INDENT)
        if narrow or len(first) >= INDENT:
            lines.append(first)
            first = ""
        meaning = option.meaning if option.range is None else f"{option.meaning} ({option.range})"
        initial = indent if narrow or not first else f"{first:<{INDENT}}"
        lines.append(textwrap.fill(meaning, max(20, columns - 1), initial_indent=initial, subsequent_indent=indent))
    return "\n".join(lines)


def _find_option(text: str) -> Option:
    name = text.strip().removeprefix("--").replace("-", "_").lower()
    if name in OPTIONS:
        return OPTIONS[name]
    matches = [option for option in OPTIONS if name and option.startswith(name)]
    if len(matches) == 1:
        return OPTIONS[matches[0]]
    import difflib  # imported here: only a mistake pays for it

    near = difflib.get_close_matches(name, OPTIONS, n=1)
    raise UserError(f"there is no option {quoted(text)}{f'; did you mean {near[0]}?' if near else ''}")


def _parse_value(option: Option, text: str) -> float:
    if option.kind is bool:
        if text.lower() not in SWITCH:
            raise UserError(f"{option.name} {quoted(text)}: on or off")
        return SWITCH[text.lower()]
    kind = "a whole number" if option.kind is int else "a number"
    try:
        value: float = option.kind(text)
    except ValueError:
        typed = f" {quoted(text)}" if text else ""
        raise UserError(f"{option.name}{typed}: expected {kind} {option.range}") from None
    if option.range is not None and value not in option.range:
        raise UserError(f"{option.name} {text}: expected {kind} {option.range}")
    return value

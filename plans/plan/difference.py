"""Where two plans differ, field by field."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from neuronpipe.plans.plan.plan import Plan


def difference(one: Plan, other: Plan) -> str:
    """A line for each field that differs: name, value in `one`, value in `other`; a number's change in percent."""
    if one == other:
        return f"the plans are the same: {one.id}\n"
    old, new = (dict(_fields(dataclasses.asdict(plan), "")) for plan in (one, other))
    rows = [
        (name, _shown(old.get(name)), _shown(new.get(name)), _change(old.get(name), new.get(name)))
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name) and not name.startswith("reasons.")
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = [f"plan {one.id} -> {other.id}"]
    lines += [
        f"  {name:<{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}  {change}".rstrip()
        for name, before, after, change in rows
    ]
    for mark, reasons, others in (("-", one.reasons, other.reasons), ("+", other.reasons, one.reasons)):
        lines += [f"  {mark} {reason}" for reason in reasons if reason not in others]
    return "\n".join(lines) + "\n"


def _fields(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _fields(part, f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _fields(part, f"{name}.{number}")
    else:
        yield name, value


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _change(old: Any, new: Any) -> str:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new))
    return f"{100 * (new / old - 1):+.1f} %" if numbers and old else ""

"""Plans as people read them: one in words, and where two differ, field by field."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.plan.document import ACCELERATOR, DEFAULT_BACKEND, Plan
from neuronpipe.plans.plan.offloaded_blocks import show_held, show_matrices
from neuronpipe.plans.plan.pinned_clusters import Pins
from neuronpipe.protocol.errors import safe_name

BAR_CHARACTERS = 40
MAX_SHOWN_CHARACTERS = 32  # of a value in a table; a package's id has 64, and its first tell it apart
ID_CHARACTERS = 12


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):9.1f} MiB"


def explain(plan: Plan) -> str:
    """Several lines: memory as a picture, processes, expectations, reasons."""
    m, c = plan.memory, plan.compute
    parts = [
        ("interpreters", m.interpreters_bytes),
        ("grammars and templates", m.grammars_bytes + m.templates_bytes),
        ("fixed tensors", m.fixed_bytes),
        ("KV cache", m.kv_bytes),
        ("exchange", m.exchange_bytes),
        ("prefill", m.prefill_stage_bytes),
        ("private scratch", m.private_bytes),
        ("residency", m.residency_bytes),
        ("bookkeeping", m.bookkeeping_bytes),
        ("board", m.board_bytes),
        ("trace", m.trace_bytes),
        ("staging", m.staging_bytes),
        *([("accelerator", m.device_bytes)] if m.device_bytes else []),
        ("neurons", m.slots_bytes),
    ]
    most = max(size for _, size in parts)
    lines = [f"plan {plan.id} for package {plan.package_id[:12]} on device {plan.device_id[:12]}", ""]
    lines.append(
        f"memory  {_size(m.total_bytes())} of a limit of {_size(m.limit_bytes).strip()}, "
        f"the least for these processes is {_size(m.least_bytes).strip()}"
    )
    lines += [f"  {name:<22}{_size(size)}  {'█' * round(BAR_CHARACTERS * size / most)}" for name, size in parts]
    lines.append(
        f"  neurons resident: {m.slots_bytes / m.ffn_bytes:.0%} of {_size(m.ffn_bytes).strip()}: "
        f"{m.trigger_slots} gate slots, {m.value_slots} up/down slots"
        + (" with their scales" if m.are_scales_moved else "")
    )
    if m.lends:
        lines.append(
            f"  and while KV cache and prefill do not need their memory: up to {m.lent_trigger_slots} gate slots, "
            f"{m.lent_value_slots} up/down slots more"
        )
    lines += [f"  {_pinned(entry)}" for entry in m.pins]
    if m.accelerator_bytes and not m.device_bytes:
        lines.append(f"  beside it, in the accelerator's own memory: {_size(m.accelerator_bytes).strip()}")
    lines += [
        "",
        f"compute  mode {c.mode}, "
        f"{c.sequences} sequence(s) of {c.context_tokens} tokens, prefill {c.prefill_chunk_tokens} tokens at a time",
    ]
    for process in c.processes:
        core = "any core" if process.core is None else f"core {process.core}"
        by = "" if process.backend == DEFAULT_BACKEND else f", {process.backend}"
        if process.role == ACCELERATOR:
            by += f": {safe_name(c.device_name)}, {show_held(c.held_blocks)} blocks of every feed-forward"
            by += show_matrices(c.held_matrices)
        lines.append(f"  {f'{process.role}.{process.index}':<16}{core}{by}")
    f = plan.flash
    lines += [
        "",
        f"flash  {f.engine}, {f.depth} reads at once, {f.prefetch_depth} of them ahead of need at most; "
        f"{'bundles whole' if f.bundle else 'gate and up/down apart'}",
        f"  reads up to {f.most_read_bytes >> 10} KiB, joined over gaps up to {f.merge_gap_bytes >> 10} KiB; "
        f"{f.reserved_triggers} gate and {f.reserved_values} up/down slots kept free",
        f"  warm-up by {f.warm_up_reads or 'ordinary'} reads"
        + (f" of {f.warm_up_read_bytes >> 10} KiB at once" if f.warm_up_reads else ""),
        "",
        *_expectation(plan),
    ]
    lines += ["", "because", *(f"  - {reason}" for reason in plan.reasons)]
    return "\n".join(lines) + "\n"


def _pinned(entry: Pins) -> str:
    """What stays with so many texts: of each feed-forward, a number or the least and the greatest."""
    from_texts = "" if entry.texts == 1 else f", from {entry.texts} texts on"
    return f"pinned of each feed-forward: {_range(entry.triggers)} gate, {_range(entry.values)} up/down{from_texts}"


def _range(counts: str) -> str:
    numbers = sorted({int(run.split("x")[0]) for run in counts.split()})
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def _expectation(plan: Plan) -> list[str]:
    e = plan.expected
    speed = "not measured" if e.tokens_per_s is None else f"{show_number(e.tokens_per_s)} tokens/s"
    terms: tuple[tuple[str, int | None, float | None, str], ...] = (
        ("memory, end to end", e.sequential_bytes_per_token, e.sequential_ms_per_token, ""),
        ("memory, in pieces", e.neuron_bytes_per_token, e.neuron_ms_per_token, f"of {e.piece_bytes:,} bytes"),
        ("reads, barriers", None, e.overhead_ms_per_token, "processor time"),
        ("flash", e.flash_bytes_per_token, e.flash_ms_per_token, f"{e.flash_reads_per_token:,} reads"),
        ("  exposed", None, e.exposed_flash_ms_per_token, "that computing does not hide"),
    )
    if e.accelerator_ms_per_token is not None:
        terms += (
            ("accelerator", None, e.accelerator_ms_per_token, "beside the workers"),
            ("  waited for", None, e.accelerator_wait_ms_per_token, "that these do not compute meanwhile"),
        )
    elif plan.compute.held_blocks:
        terms += (("accelerator", None, None, "not measured; the times above are as if the workers did its part"),)
    lines = [f"expects  {speed} at half of the context; misses {e.miss_rate:.1%} of what it looks up"]
    for name, size, time_ms, note in terms:
        shown = " " * 13 if size is None else _size(size)
        lines.append(f"  {name:<19}{shown}  {'-' if time_ms is None else f'{time_ms:.2f}':>9} ms  {note}".rstrip())
    if e.prefill_tokens_per_s is not None:
        lines.append(
            f"  a prompt of {plan.compute.prefill_chunk_tokens} tokens: {show_number(e.prefill_tokens_per_s)} tokens/s"
        )
    return lines


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
    if isinstance(value, int | float):
        return f"{value:,}"
    text = str(value)
    return f"{text[:ID_CHARACTERS]}..." if len(text) > MAX_SHOWN_CHARACTERS else text


def _change(old: Any, new: Any) -> str:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new))
    return f"{100 * (new / old - 1):+.1f} %" if numbers and old else ""

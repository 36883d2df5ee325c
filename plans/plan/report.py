"""Plans as text: one plan explained, and the differences of two plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from neuronpipe.plans.number_format import show_number, show_range
from neuronpipe.plans.plan.document import ACCELERATOR, DEFAULT_BACKEND, Compute, Plan, SpeedRange
from neuronpipe.plans.plan.offloaded_blocks import show_offloaded_blocks, show_offloaded_matrices
from neuronpipe.plans.plan.pinned_clusters import Pins, range_of_counts
from neuronpipe.protocol.errors import safe_name

BAR_CHARACTERS = 40
MAX_SHOWN_CHARACTERS = 32  # of a value in a table; a package's id has 64, and its first characters suffice
ID_CHARACTERS = 12


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):9.1f} MiB"


def _kv_name(compute: Compute) -> str:
    name = "KV cache" if compute.kv_type == "f16" else f"KV cache of {compute.kv_type}"
    return f"{name}, states" if compute.state_slots else name


def explain(plan: Plan) -> str:
    """Return a plan as lines of text: memory with bars, processes, reads, expectations, reasons."""
    return f"{_decisions(plan)}\n{expectations(plan)}"


def expectations(plan: Plan) -> str:
    """Return as lines of text what a plan expects, and the reasons for it."""
    lines = [*_expectation_lines(plan), "", "because", *(f"  - {reason}" for reason in plan.reasons)]
    return "\n".join(lines) + "\n"


def _decisions(plan: Plan) -> str:
    memory, compute = plan.memory, plan.compute
    parts = [
        ("interpreters", memory.interpreters_bytes),
        ("grammars and templates", memory.vocabulary_bytes + memory.grammars_bytes + memory.templates_bytes),
        ("fixed tensors", memory.fixed_bytes),
        (_kv_name(compute), memory.kv_bytes),
        ("exchange", memory.exchange_bytes),
        ("prefill", memory.prefill_stage_bytes),
        ("private scratch", memory.private_bytes),
        ("residency", memory.residency_bytes),
        ("bookkeeping", memory.bookkeeping_bytes),
        ("board", memory.board_bytes),
        ("trace", memory.trace_bytes),
        ("staging", memory.staging_bytes),
        *([("accelerator", memory.device_bytes)] if memory.device_bytes else []),
        ("neurons", memory.slots_bytes),
    ]
    max_bytes = max(size for _, size in parts)
    lines = [f"plan {plan.id} for package {plan.package_id[:12]} on device {plan.device_id[:12]}", ""]
    lines.append(
        f"memory  {_size(memory.total_bytes())} of a limit of {_size(memory.limit_bytes).strip()}, "
        f"the least for these processes is {-(-memory.least_bytes * 10 // (1 << 20)) / 10:.1f} MiB"  # rounded up
    )
    lines += [f"  {name:<22}{_size(size)}  {'█' * round(BAR_CHARACTERS * size / max_bytes)}" for name, size in parts]
    lines.append(
        f"  neurons resident: {memory.slots_bytes / memory.ffn_bytes:.0%} of {_size(memory.ffn_bytes).strip()}: "
        f"{memory.trigger_slots} gate slots, {memory.value_slots} up/down slots"
        + (" with their scales" if memory.are_scales_moved else "")
    )
    if memory.has_borrowed_slots:
        lines.append(
            "  and while KV cache, prefill and grammars do not need their memory: "
            f"up to {memory.lent_trigger_slots} gate slots, {memory.lent_value_slots} up/down slots more"
        )
    lines += [f"  {_pins_line(entry)}" for entry in memory.pins]
    if memory.accelerator_bytes and not memory.device_bytes:
        lines.append(f"  beside it, in the accelerator's own memory: {_size(memory.accelerator_bytes).strip()}")
    lines += [
        "",
        f"compute  mode {compute.mode}, "
        f"{compute.sequences} sequence(s) of {compute.context_tokens} tokens, "
        f"prefill {compute.prefill_chunk_tokens} tokens at a time",
    ]
    for process in compute.processes:
        core = "any core" if process.core is None else f"core {process.core}"
        by = "" if process.backend == DEFAULT_BACKEND else f", {process.backend}"
        if process.role == ACCELERATOR:
            blocks = show_offloaded_blocks(compute.held_blocks)
            by += f": {safe_name(compute.device_name)}, {blocks} blocks of every feed-forward"
            by += show_offloaded_matrices(compute.held_matrices)
        lines.append(f"  {f'{process.role}.{process.index}':<16}{core}{by}")
    flash = plan.flash
    lines += [
        "",
        f"flash  {flash.engine}, {flash.depth} reads at once, {flash.prefetch_depth} of them ahead of need at most; "
        f"{'bundles whole' if flash.bundle else 'gate and up/down apart'}",
        f"  reads up to {flash.most_read_bytes >> 10} KiB, joined over gaps up to {flash.merge_gap_bytes >> 10} KiB; "
        f"{flash.reserved_triggers} gate and {flash.reserved_values} up/down slots kept free",
        f"  warm-up by {flash.warm_up_reads or 'ordinary'} reads"
        + (f" of {flash.warm_up_read_bytes >> 10} KiB at once" if flash.warm_up_reads else ""),
        f"  prompt cache on disk: {_size(flash.prompt_cache_bytes).strip() if flash.prompt_cache_bytes else 'none'}",
    ]
    return "\n".join(lines) + "\n"


def _pins_line(entry: Pins) -> str:
    """Return a line on the pins of a feed-forward, as a number, or a range if they differ."""
    from_texts = "" if entry.texts == 1 else f", from {entry.texts} texts on"
    triggers, values = range_of_counts(entry.triggers), range_of_counts(entry.values)
    return f"pinned of each feed-forward: {triggers} gate, {values} up/down{from_texts}"


def _expectation_lines(plan: Plan) -> list[str]:
    expected = plan.expected
    speed = _show_speed(expected.tokens_per_s, expected.tokens_per_s_range)
    terms: tuple[tuple[str, int | None, float | None, str], ...] = (
        ("memory, end to end", expected.sequential_bytes_per_token, expected.sequential_ms_per_token, ""),
        (
            "memory, in pieces",
            expected.neuron_bytes_per_token,
            expected.neuron_ms_per_token,
            f"of {expected.piece_bytes:,} bytes",
        ),
        ("reads, barriers", None, expected.overhead_ms_per_token, "processor time"),
        (
            "flash",
            expected.flash_bytes_per_token,
            expected.flash_ms_per_token,
            f"{expected.flash_reads_per_token:,} reads",
        ),
        ("  exposed", None, expected.exposed_flash_ms_per_token, "that computing does not hide"),
    )
    if expected.accelerator_ms_per_token is not None:
        terms += (
            ("accelerator", None, expected.accelerator_ms_per_token, "beside the workers"),
            ("  waited for", None, expected.accelerator_wait_ms_per_token, "that these do not compute meanwhile"),
        )
    elif plan.compute.held_blocks:
        terms += (("accelerator", None, None, "not measured; the times above are as if the workers did its part"),)
    lines = [f"expects  {speed} at half of the context; misses {expected.miss_rate:.1%} of what it looks up"]
    for name, size, time_ms, note in terms:
        size_cell = " " * 13 if size is None else _size(size)
        lines.append(f"  {name:<19}{size_cell}  {'-' if time_ms is None else f'{time_ms:.2f}':>9} ms  {note}".rstrip())
    if expected.prefill_tokens_per_s is not None:
        speed = _show_speed(expected.prefill_tokens_per_s, expected.prefill_tokens_per_s_range)
        lines.append(f"  a prompt of {plan.compute.prefill_chunk_tokens} tokens: {speed.rstrip(',')}")
    return lines


def _show_speed(median: float | None, speeds: SpeedRange | None) -> str:
    if median is None:
        return "not measured"
    if speeds is None:
        return f"{show_number(median)} tokens/s"
    return f"{show_range(speeds.low, speeds.high)} tokens/s, most likely {show_number(median)},"


def difference(old_plan: Plan, new_plan: Plan) -> str:
    """Return a line for each field that differs, with the change of a number in percent, and for each reason that only
    one plan has."""
    if old_plan == new_plan:
        return f"the plans are the same: {old_plan.id}\n"
    old, new = (dict(_fields(dataclasses.asdict(plan), "")) for plan in (old_plan, new_plan))
    rows = [
        (name, _cell(old.get(name)), _cell(new.get(name)), _change(old.get(name), new.get(name)))
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name) and not name.startswith("reasons.")
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = [f"plan {old_plan.id} -> {new_plan.id}"]
    lines += [
        f"  {name:<{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}  {change}".rstrip()
        for name, before, after, change in rows
    ]
    for mark, reasons, other_reasons in (
        ("-", old_plan.reasons, new_plan.reasons),
        ("+", new_plan.reasons, old_plan.reasons),
    ):
        lines += [f"  {mark} {reason}" for reason in reasons if reason not in other_reasons]
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


def _cell(value: Any) -> str:
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

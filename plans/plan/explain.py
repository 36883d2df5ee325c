"""A plan in words, for a person."""

from __future__ import annotations

from neuronpipe.plans.plan.plan import Plan

BAR_CHARACTERS = 40


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):9.1f} MiB"


def explain(plan: Plan) -> str:
    """Several lines: memory as a picture, seats, expectations, reasons."""
    m, c = plan.memory, plan.compute
    parts = [
        ("interpreters", m.interpreters_bytes),
        ("fixed tensors", m.fixed_bytes),
        ("KV cache", m.kv_bytes),
        ("exchange", m.exchange_bytes),
        ("residency", m.residency_bytes),
        ("private scratch", m.private_bytes),
        ("neurons", m.slots_bytes),
    ]
    most = max(size for _, size in parts)
    lines = [f"plan {plan.id} for package {plan.package_id[:12]} on device {plan.device_id[:12]}", ""]
    lines.append(
        f"memory  {_size(m.total_bytes())} of a limit of {_size(m.limit_bytes).strip()}, "
        f"the least is {_size(m.least_bytes).strip()}"
    )
    lines += [f"  {name:<16}{_size(size)}  {'█' * round(BAR_CHARACTERS * size / most)}" for name, size in parts]
    lines.append(
        f"  neurons resident: {m.slots_bytes / m.ffn_bytes:.0%} of {_size(m.ffn_bytes).strip()}: "
        f"{m.gate_slots} gate slots, {m.rest_slots} up/down slots"
    )
    lines += [
        "",
        f"compute  mode {c.mode}, "
        f"{c.sequences} sequence(s) of {c.context_tokens} tokens, prefill {c.prefill_chunk_tokens} tokens at a time",
    ]
    for seat in c.seats:
        core = "any core" if seat.core is None else f"core {seat.core}"
        share = f", {seat.share_to - seat.share_from:.0%} of the rows" if seat.role == "decode" else ""
        lines.append(f"  {seat.role}.{seat.index:<4} {core}{share}")
    e = plan.expected
    lines += ["", f"flash  {plan.flash.engine}, depth {plan.flash.depth}"]
    lines.append(
        f"expects  {_size(e.dram_bytes_per_token).strip()} from memory and "
        f"{_size(e.flash_bytes_per_token).strip()} from flash per token "
        f"({e.flash_ms_per_token:.2f} ms), miss rate {e.miss_rate:.1%}"
    )
    lines += ["", "because", *(f"  - {reason}" for reason in plan.reasons)]
    return "\n".join(lines) + "\n"

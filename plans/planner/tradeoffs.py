"""What the search tried and what else could be had, as JSON values and as a page for a person.

All speeds are those expected of one text. `describe` makes some thousand plans; only `neuronpipe plan` asks for it.
"""

from __future__ import annotations

import math
from typing import Any

from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.plan.document import Expected
from neuronpipe.plans.plan.memory_budget import MIB
from neuronpipe.plans.planner.search import MIN_GAIN, USUAL, Candidate, Search, SearchResult
from neuronpipe.protocol.errors import UserError

GIB = 1 << 30
BAR_CHARACTERS = 40
SHOWN_CANDIDATES = 8


def binds(expected: Expected) -> str | None:
    """What a token waits for most: `DRAM`, `flash`, or `compute`, which is what neither explains. None where it was not
    measured."""
    e = expected
    if e.sequential_ms_per_token is None or e.neuron_ms_per_token is None or e.exposed_flash_ms_per_token is None:
        return None
    dram_ms = e.sequential_ms_per_token + e.neuron_ms_per_token
    token_ms = 1e3 / e.tokens_per_s if e.tokens_per_s else 0.0
    times_ms = {
        "DRAM": dram_ms,
        "flash": (e.flash_ms_per_token or 0.0) if e.exposed_flash_ms_per_token else 0.0,
        "compute": token_ms - dram_ms - e.exposed_flash_ms_per_token,
    }
    return max(times_ms, key=lambda name: times_ms[name])


def describe(search: Search, found: SearchResult) -> dict[str, Any]:
    """The candidates within the limit of what was found, fastest first; what a GiB or a core more would buy; speed over
    memory."""
    chosen = found.chosen
    candidates = sorted(found.candidates, key=lambda one: (search.ms(one), one.workers))
    return {
        "rules_kept": found.rules is chosen,
        "plans_compared": found.points,
        "candidates": [_row(one) | {"chosen": one is chosen, "by_rules": one is found.rules} for one in candidates],
        "one_more_gib": _row(search.with_memory(found, chosen.plan.memory.limit_bytes + GIB)),
        "one_more_core": None if (more := search.with_more_workers(found)) is None else _row(more),
        "speed_over_memory": _speed_over_memory(search, found),
    }


def _speed_over_memory(search: Search, found: SearchResult) -> list[dict[str, Any]]:
    rows = []
    for limit in search.limits_bytes()[::2]:
        try:
            rows.append(_row(search.with_memory(found, limit)))
        except UserError:  # an --ffn-resident that only some choices can obey
            continue
    return rows


def _row(one: Candidate) -> dict[str, Any]:
    made = one.plan
    return {
        "mode": made.compute.mode,
        "workers": one.workers,
        "reads": one.reads,
        "prefill_chunk_tokens": made.compute.prefill_chunk_tokens,
        "depth": made.flash.depth,
        "limit_bytes": made.memory.limit_bytes,
        "memory_bytes": made.memory.total_bytes(),
        "expected_tokens_per_s": one.tokens_per_s,
        "usual_request_s": None if math.isinf(request_ms := USUAL.ms(made.expected)) else round(request_ms / 1e3, 3),
        "binds": binds(made.expected),
    }


def render(described: dict[str, Any]) -> str:
    """Several lines."""
    rows = described["candidates"]
    chosen = next(row for row in rows if row["chosen"])
    lines = [
        f"tried, for one text: {described['plans_compared']} plans, of each way to compute and read the best; "
        f"a request is a prompt of {USUAL.prompt_tokens} tokens and an answer of {USUAL.answer_tokens}",
        f"  {'mode':<12}{'workers':>7}  {'reads':<14}{'prompt by':>9}{'at once':>9}{'memory':>12}  {'request':>9}"
        f"  {'tokens/s':>9}  binds",
    ]
    shown = [n for n, row in enumerate(rows) if n < SHOWN_CANDIDATES or row["chosen"] or row["by_rules"]]
    lines += [_candidate_line(rows[n]) for n in shown]
    if len(shown) < len(rows):
        lines.append(f"  and {len(rows) - len(shown)} slower ones")
    if chosen["expected_tokens_per_s"] is None:
        lines.append("  memory, flash or an accelerator was not measured, so nothing can be compared: the rules decide")
    elif described["rules_kept"]:
        lines.append(f"  what the rules choose stays unless another way is over {MIN_GAIN:.0%} faster")
    lines += ["", "what more would buy"]
    lines.append(f"  1 GiB more memory   {_gain(chosen, described['one_more_gib'])}")
    lines.append(f"  1 core more         {_gain(chosen, described['one_more_core'])}")
    return "\n".join([*lines, "", *_curve(described["speed_over_memory"], chosen)]) + "\n"


def _candidate_line(row: dict[str, Any]) -> str:
    mark = "  <- chosen" if row["chosen"] else "  by the rules" if row["by_rules"] else ""
    return (
        f"  {row['mode']:<12}{row['workers']:>7}  {row['reads']:<14}{row['prefill_chunk_tokens']:>9}{row['depth']:>9}"
        f"{_size(row['memory_bytes']):>12}  {_request(row):>9}  {_speed(row):>9}  {row['binds'] or '-'}{mark}"
    )


def _gain(now: dict[str, Any], more: dict[str, Any] | None) -> str:
    if more is None:
        return "there is none that computes as fast"
    before, after = now["expected_tokens_per_s"], more["expected_tokens_per_s"]
    if before is None or after is None:
        return "not measured"
    gained = f"{_speed(more)} tokens/s ({100 * (after / before - 1):+.1f} %)"
    before, after = now["usual_request_s"], more["usual_request_s"]
    if before is None or after is None:
        return gained
    if after > before:  # what another worker takes, a smaller chunk of prompts pays for
        return f"nothing: {gained}, but a request {after:.2f} instead of {before:.2f} s"
    return f"{gained}, a request {after:.2f} instead of {before:.2f} s"


def _curve(rows: list[dict[str, Any]], chosen: dict[str, Any]) -> list[str]:
    """Speed over memory; the plan's own point between the others. Bars are of requests, whose speed never falls."""
    others = [row for row in rows if row["limit_bytes"] != chosen["limit_bytes"]]
    points = sorted([*others, chosen], key=lambda row: int(row["limit_bytes"]))
    least_s = min((row["usual_request_s"] for row in points if row["usual_request_s"] is not None), default=None)
    lines = ["requests over memory, from the least limit to everything resident: how fast, tokens/s of the answer"]
    for row in points:
        bar = (
            "█" * round(BAR_CHARACTERS * least_s / row["usual_request_s"]) if least_s and row["usual_request_s"] else ""
        )
        mark = "  <- this plan" if row is chosen else ""
        lines.append(
            f"  {_size(row['limit_bytes']):>12}  {bar:<{BAR_CHARACTERS}}  {_speed(row):>7}  {row['binds'] or '-'}{mark}"
        )
    return lines


def _speed(row: dict[str, Any]) -> str:
    speed = row["expected_tokens_per_s"]
    return "-" if speed is None else show_number(speed)


def _request(row: dict[str, Any]) -> str:
    return "-" if row["usual_request_s"] is None else f"{row['usual_request_s']:.2f} s"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.0f} MiB"

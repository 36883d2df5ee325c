"""Trade-offs of a search: its candidates, and the speeds with other limits, as JSON values and as text.

All speeds are those expected of one sequence. `describe` makes thousands of plans, so only `neuronpipe plan` calls it.
"""

from __future__ import annotations

import math
from typing import Any

from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.plan.document import Expected
from neuronpipe.plans.plan.memory_budget import MIB
from neuronpipe.plans.planner.candidates import USUAL, Candidate, SearchResult
from neuronpipe.plans.planner.search import Search
from neuronpipe.protocol.errors import UserError

GIB = 1 << 30
BAR_CHARACTERS = 40
SHOWN_CANDIDATES = 8


def binds(expected: Expected) -> str | None:
    """Return the largest term of a token's time: `DRAM`, `flash` (if workers wait for it), or `compute`, which is the
    remaining time. None if something was not measured."""
    if (
        expected.sequential_ms_per_token is None
        or expected.neuron_ms_per_token is None
        or expected.exposed_flash_ms_per_token is None
    ):
        return None
    dram_ms = expected.sequential_ms_per_token + expected.neuron_ms_per_token
    token_ms = 1e3 / expected.tokens_per_s if expected.tokens_per_s else 0.0
    times_ms = {
        "DRAM": dram_ms,
        "flash": (expected.flash_ms_per_token or 0.0) if expected.exposed_flash_ms_per_token else 0.0,
        "compute": token_ms - dram_ms - expected.exposed_flash_ms_per_token,
    }
    return max(times_ms, key=lambda name: times_ms[name])


def describe(search: Search, result: SearchResult) -> dict[str, Any]:
    """Return the candidates, fastest first, the choice with one GiB or one core more, and those at other limits."""
    chosen = result.chosen
    candidates = sorted(result.candidates, key=lambda candidate: (search.ms(candidate), candidate.workers))
    return {
        "rules_kept": result.rules is chosen,
        "plans_compared": result.points,
        "candidates": [
            _row(candidate) | {"chosen": candidate is chosen, "by_rules": candidate is result.rules}
            for candidate in candidates
        ],
        "one_more_gib": _row(search.with_memory(result, chosen.plan.memory.limit_bytes + GIB)),
        "one_more_core": None if (more := search.with_more_workers(result)) is None else _row(more),
        "speed_over_memory": _speed_over_memory(search, result),
    }


def _speed_over_memory(search: Search, result: SearchResult) -> list[dict[str, Any]]:
    rows = []
    for limit in search.limits_bytes()[::2]:
        try:
            rows.append(_row(search.with_memory(result, limit)))
        except UserError:  # an --ffn-resident that is too small for the choice of the rules
            continue
    return rows


def _row(candidate: Candidate) -> dict[str, Any]:
    plan = candidate.plan
    return {
        "mode": plan.compute.mode,
        "workers": candidate.workers,
        "reads": candidate.reads,
        "prefill_chunk_tokens": plan.compute.prefill_chunk_tokens,
        "depth": plan.flash.depth,
        "limit_bytes": plan.memory.limit_bytes,
        "memory_bytes": plan.memory.total_bytes(),
        "expected_tokens_per_s": candidate.tokens_per_s,
        "usual_request_s": None if math.isinf(request_ms := USUAL.ms(plan.expected)) else round(request_ms / 1e3, 3),
        "binds": binds(plan.expected),
    }


def render(described: dict[str, Any]) -> str:
    """Return the result of `describe` as lines of text."""
    rows = described["candidates"]
    chosen = next(row for row in rows if row["chosen"])
    lines = [
        f"tried, for one text: {described['plans_compared']} plans, of each way to compute and read the best; "
        f"a request is a prompt of {USUAL.prompt_tokens} tokens and an answer of {USUAL.answer_tokens}",
        f"  {'mode':<12}{'workers':>7}  {'reads':<14}{'prompt by':>9}{'at once':>9}{'memory':>12}  {'request':>9}"
        f"  {'tokens/s':>9}  binds",
    ]
    shown_rows = [n for n, row in enumerate(rows) if n < SHOWN_CANDIDATES or row["chosen"] or row["by_rules"]]
    lines += [_candidate_line(rows[n]) for n in shown_rows]
    if len(shown_rows) < len(rows):
        lines.append(f"  and {len(rows) - len(shown_rows)} slower ones")
    if chosen["expected_tokens_per_s"] is None:
        lines.append("  memory, flash or an accelerator was not measured, so nothing can be compared: the rules decide")
    elif described["rules_kept"]:
        lines.append("  no other way is expected to be faster than that of the rules")
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
    if after > before:  # another worker takes memory, so the prefill chunk may be smaller
        return f"nothing: {gained}, but a request {after:.2f} instead of {before:.2f} s"
    return f"{gained}, a request {after:.2f} instead of {before:.2f} s"


def _curve(rows: list[dict[str, Any]], chosen: dict[str, Any]) -> list[str]:
    """Return lines of speed over memory, with the chosen plan among them.

    The bars show the speed of usual requests, which never falls with more memory.
    """
    other_rows = [row for row in rows if row["limit_bytes"] != chosen["limit_bytes"]]
    points = sorted([*other_rows, chosen], key=lambda row: int(row["limit_bytes"]))
    fastest_s = min((row["usual_request_s"] for row in points if row["usual_request_s"] is not None), default=None)
    lines = ["requests over memory, from the least limit to everything resident: how fast, tokens/s of the answer"]
    for row in points:
        bar = (
            "█" * round(BAR_CHARACTERS * fastest_s / row["usual_request_s"])
            if fastest_s and row["usual_request_s"]
            else ""
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

"""`python -m neuronpipe.plans.lab.paper.paper [FILE]`: write the figures of PowerInfer-2's paper and of the simulator.

The published figures are in published.json. Takes two minutes on a core.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from neuronpipe.plans.lab.devices.device_file import read_device
from neuronpipe.plans.lab.shapes.models import model_named, published_models
from neuronpipe.plans.lab.simulate.decode import Situation
from neuronpipe.plans.lab.simulate.npu_prefill import simulate_npu_prefill
from neuronpipe.plans.lab.simulate.prefill import prefill_s
from neuronpipe.plans.lab.simulate.simulate import (
    Result,
    SimulationOptions,
    resident_share,
    run_of_shape,
    sequences_of,
    simulate,
    simulate_plan,
)
from neuronpipe.plans.lab.simulate.systems import ABLATION, CPU_ONLY, OURS, SYSTEMS, System
from neuronpipe.plans.lab.simulate.task_times import FileCosts
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.search import UNLIMITED_BYTES
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.schema import from_json, json_object

DATA = Path(__file__).with_name("published.json")
DOCUMENT = Path(__file__).resolve().parents[3] / "tests/bench/results/simulated-paper.md"  # of a checkout
TOKENS = 192
Unit = Literal["decode", "prefill-128", "prefill-512", "over-cpu-only", "p99-ms"]


@frozen(kw_only=True)
class Case:
    """A simulated case. All is in memory if resident and memory_gb are None.

    step: a step of the ablation, instead of the system `policy`; "": none
    """

    device: str
    model: str
    policy: str
    resident: float | None = None
    memory_gb: float | None = None
    step: str = ""
    batch: int = 1


@frozen(kw_only=True)
class Row(Case):
    """A published figure.

    uncertain: it was read off a plot, or interpolated
    fitted: a value of the device was fitted to it
    """

    published: float
    uncertain: bool = False
    fitted: bool = False


@frozen(kw_only=True)
class Table:
    """A table of the paper.

    target: the largest relative error that is acceptable; None: no target
    """

    table: str
    unit: Unit
    rows: tuple[Row, ...]
    target: float | None = None


@frozen(kw_only=True)
class Open:
    """The assumption that cells off their target hang on.

    cases: part of the text of each of these cells
    """

    cases: str
    hangs_on: str


@frozen(kw_only=True)
class Published:
    """The published figures, our own cases, and why cells are off their target: of each, the first that fits counts."""

    source: str
    cells: tuple[Table, ...]
    ours: tuple[Case, ...]
    open: tuple[Open, ...]

    def reason(self, row: Row) -> Open:
        """Return the reason for which a cell is off its target. Raises StopIteration if none is known."""
        return next(each for each in self.open if each.cases in _case(row))


def published() -> Published:
    return from_json(Published, json_object(DATA.read_bytes(), str(DATA)), str(DATA))


def simulated(row: Case, unit: Unit) -> float:
    case = Case(**{field.name: getattr(row, field.name) for field in dataclasses.fields(Case)})
    system = ABLATION[case.step] if case.step else SYSTEMS[case.policy]
    if unit in ("prefill-128", "prefill-512"):
        return _prefill(case, system, int(unit.removeprefix("prefill-")))
    result = decoded(case, system)
    if unit == "over-cpu-only":
        return result.tokens_per_s / decoded(case, CPU_ONLY).tokens_per_s
    return result.p99_ms if unit == "p99-ms" else result.tokens_per_s


@functools.cache
def decoded(case: Case, system: System) -> Result:
    options = SimulationOptions(resident=case.resident, memory_bytes=_bytes(case), batch=case.batch, tokens=TOKENS)
    return simulate(read_device(case.device), model_named(case.model), system, options)[0]


SCALES_SHARE = 1 / 9  # of a row's bytes in q4; the paper's systems keep all scales in memory besides


@functools.cache
def our_decode(case: Case) -> Result:
    """Simulate our own system under a plan with the same share of the feed-forward in memory."""
    options = SimulationOptions(tokens=TOKENS)
    run = run_of_shape(
        read_device(case.device),
        model_named(case.model),
        PlanOptions(
            memory_bytes=UNLIMITED_BYTES,
            ffn_resident_share=SCALES_SHARE + (1 - SCALES_SHARE) * (case.resident or 1.0),
            context_tokens=2 * options.context_tokens,
            mode="predicted",
        ),
    )
    sequences, sampled = sequences_of(run.manifest, run.plan.compute.mode, options, None)
    result, _ = simulate_plan(
        run,
        sequences,
        1,
        sampled=sampled,
        context_tokens=options.context_tokens,
        prompt_tokens=options.prompt_tokens,
    )
    return result


def _prefill(case: Case, system: System, tokens: int) -> float:
    return tokens / prefill_s(_situation(case, system), tokens)


def _situation(case: Case, system: System) -> Situation:
    model, device = model_named(case.model), read_device(case.device)
    resident = resident_share(model, SimulationOptions(resident=case.resident, memory_bytes=_bytes(case)))
    return Situation(device, model, system, FileCosts(device, model, system), 0, resident)


def _bytes(case: Case) -> int | None:
    return None if case.memory_gb is None else round(case.memory_gb * 1e9)


def document() -> Iterator[str]:
    data = published()
    targets = [table for table in data.cells if table.target is not None]
    values = {row: simulated(row, table.unit) for table in data.cells for row in table.rows}
    off_count = sum(off(row, table, values[row]) for table in targets for row in table.rows)
    yield "# The paper's figures, simulated"
    yield ""
    yield f"Published: {data.source}. Written by `python -m neuronpipe.plans.lab.paper.paper`; a test compares it"
    yield f"with the simulator. {TOKENS} tokens of the default preset after 64, one seed. `?`: uncertain in the source."
    yield f"Bold: off the target, {off_count} of {sum(len(table.rows) for table in targets)}. Sources of the values:"
    yield "`plans/lab/devices` and `models.json`."
    for table in data.cells:
        yield ""
        yield f"## {table.table}"
        yield ""
        yield f"Target: within {table.target:.0%}." if table.target else "No target."
        yield ""
        yield "| case | published | simulated | error |"
        yield "|---|---|---|---|"
        yield from (row_line(row, table, values[row]) for row in table.rows)
    yield from open_cells(
        data, [(row, values[row]) for table in targets for row in table.rows if off(row, table, values[row])]
    )
    yield from _our_decode(data.ours)
    yield from our_prefill(data.cells)


def open_cells(data: Published, cells: Sequence[tuple[Row, float]]) -> Iterator[str]:
    """Yield the table of the cells off their target, and of the assumption that each hangs on."""
    yield ""
    yield "## What the other cells hang on"
    yield ""
    yield "Values with a source leave these off the target, and nothing was fitted to them."
    yield ""
    yield "| cells | errors | assumption |"
    yield "|---|---|---|"
    for each in data.open:
        errors = [_error(row, value) for row, value in cells if data.reason(row) is each]
        if errors:
            yield f"| {each.cases.strip(', ')} | {', '.join(errors)} | {each.hangs_on} |"


def row_line(row: Row, table: Table, value: float) -> str:
    error = _error(row, value)
    error_text = f"**{error}**" if off(row, table, value) else error
    marks = "?" * row.uncertain + " (fitted)" * row.fitted
    return f"| {_case(row)} | {row.published:g}{marks} | {_figure(value)} | {error_text} |"


def off(row: Row, table: Table, value: float) -> bool:
    return table.target is not None and abs(value / row.published - 1) > table.target


def _error(row: Row, value: float) -> str:
    return f"{100 * (value / row.published - 1):+.0f} %"


def _our_decode(cases: Sequence[Case]) -> Iterator[str]:
    yield ""
    yield "## Our policies on these phones"
    yield ""
    yield "Under the plan of a run, on the cores alone, with the scales' bytes besides the share, as in PowerInfer-2."
    yield "Limit: bytes over bandwidth of DRAM or flash, whichever is slower."
    yield ""
    yield "| case | tokens/s | PowerInfer-2, simulated | limit | misses | ms p50 / p90 / p99 | exposed I/O |"
    yield "|---|---|---|---|---|---|---|"
    for case in cases:
        result = our_decode(case)
        powerinfer2 = decoded(dataclasses.replace(case, policy="powerinfer2"), SYSTEMS["powerinfer2"])
        times = " / ".join(f"{ms:.0f}" for ms in (result.p50_ms, result.p90_ms, result.p99_ms))
        speeds = " | ".join(map(_figure, (result.tokens_per_s, powerinfer2.tokens_per_s, result.limit_tokens_per_s)))
        shares = f"{100 * result.miss_rate:.1f} % | {times} | {100 * result.exposed_io:.0f} %"
        yield f"| {_case(case)} | {speeds} | {shares} |"


def our_prefill(tables: Sequence[Table]) -> Iterator[str]:
    yield ""
    yield "## Our prefill by the NPU on these phones"
    yield ""
    yield "The worker of services/offload/npu with its own schedule (assumptions: npu_prefill.py), compared with the"
    yield "published prefill of PowerInfer-2; `off` if not within 20%. Shares of the time: the NPU computes; has inputs"
    yield "but no rows; has no inputs, because the cores do the work between products; flash reads."
    yield ""
    yield "| case | tokens | published | ours, NPU prefill | error | NPU | no rows | no inputs | flash |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for table in tables:
        for row in table.rows if table.unit in ("prefill-128", "prefill-512") else ():
            yield our_prefill_line(row, table)


def our_prefill_line(row: Row, table: Table) -> str:
    tokens = int(table.unit.removeprefix("prefill-"))
    prompt = simulate_npu_prefill(_situation(row, OURS), tokens)
    value, error = tokens / prompt.seconds, _error(row, tokens / prompt.seconds)
    shares = (prompt.npu, prompt.waits_for_rows, prompt.waits_for_cores, prompt.flash)
    case = _case(dataclasses.replace(row, policy=""))
    error_text = f"{error}, off" if off(row, table, value) else error
    times = " | ".join(f"{100 * share:.0f} %" for share in shares)
    return f"| {case} | {tokens} | {row.published:g} | {_figure(value)} | {error_text} | {times} |"


def _case(case: Case) -> str:
    model = published_models()[case.model].title if case.model in published_models() else case.model
    memory = (
        f"{case.memory_gb:g} GB"
        if case.memory_gb
        else f"{case.resident:.0%} resident"
        if case.resident
        else "in memory"
    )
    words = [case.device, model, case.policy, memory, case.step, f"batch {case.batch}" if case.batch > 1 else ""]
    return ", ".join(word for word in words if word)


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"


def main(words: Sequence[str]) -> int:
    with whole_file(Path(words[0]) if words else DOCUMENT) as place:
        place.write_text("\n".join(document()) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m neuronpipe.plans.lab.simulate.paper [FILE]`: PAPER.md, the paper's figures beside the simulator's.

published.json has the published ones; nothing here knows one. A few minutes of a core.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from neuronpipe.plans.lab.simulate.decode import Situation
from neuronpipe.plans.lab.simulate.device_file import FOLDER, read_device
from neuronpipe.plans.lab.simulate.models import model_named, published_models
from neuronpipe.plans.lab.simulate.npu_prefill import prefilled
from neuronpipe.plans.lab.simulate.prefill import prefill_s
from neuronpipe.plans.lab.simulate.simulate import Result, Wishes, resident_share, simulate
from neuronpipe.plans.lab.simulate.systems import ABLATION, CPU_ONLY, SYSTEMS, System
from neuronpipe.plans.lab.simulate.task_times import FileCosts
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.schema import from_json, json_object

DATA = Path(__file__).with_name("published.json")
DOCUMENT = Path(__file__).with_name("PAPER.md")
TOKENS = 192
Unit = Literal["decode", "prefill-128", "prefill-512", "over-cpu-only", "p99-ms"]


@frozen(kw_only=True)
class Case:
    """What is simulated. resident and memory_gb: neither where all is in memory."""

    device: str
    model: str
    policy: str
    resident: float | None = None
    memory_gb: float | None = None
    step: str = ""
    batch: int = 1


@frozen(kw_only=True)
class Row(Case):
    """A published figure. uncertain: read off a figure, or between points. fitted: a device's field is from it."""

    published: float
    uncertain: bool = False
    fitted: bool = False


@frozen(kw_only=True)
class Table:
    """target: largest error that is wanted."""

    table: str
    unit: Unit
    rows: tuple[Row, ...]
    target: float | None = None


@frozen(kw_only=True)
class Published:
    source: str
    cells: tuple[Table, ...]
    ours: tuple[Case, ...]


def published() -> Published:
    """What published.json holds."""
    return from_json(Published, json_object(DATA.read_bytes(), str(DATA)), str(DATA))


def simulated(row: Case, unit: Unit) -> float:
    """The simulator's figure for a published one."""
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
    """With the document's number of tokens."""
    wishes = Wishes(resident=case.resident, memory_bytes=_bytes(case), batch=case.batch, tokens=TOKENS)
    return simulate(read_device(case.device), model_named(case.model), system, wishes)[0]


def _prefill(case: Case, system: System, tokens: int) -> float:
    return tokens / prefill_s(_situation(case, system), tokens)


def _situation(case: Case, system: System) -> Situation:
    """Of a prompt."""
    model, device = model_named(case.model), read_device(case.device)
    resident = resident_share(model, Wishes(resident=case.resident, memory_bytes=_bytes(case)))
    return Situation(device, model, system, FileCosts(device, model, system), 0, resident)


def _bytes(case: Case) -> float | None:
    return None if case.memory_gb is None else case.memory_gb * 1e9


def document() -> Iterator[str]:
    """The lines of PAPER.md."""
    data = published()
    yield "# The paper's figures, simulated"
    yield ""
    yield f"Published: {data.source}. Made by `python -m neuronpipe.plans.lab.simulate.paper`; a test compares it with"
    yield f"the simulator. {TOKENS} tokens of the default preset after 64, one seed. `?`: uncertain in the source."
    yield "Bold: further off than wanted."
    missed: list[str] = []
    for table in data.cells:
        yield ""
        yield f"## {table.table}"
        yield ""
        yield f"Wanted: within {table.target:.0%}." if table.target else "No target."
        yield ""
        yield "| case | published | simulated | error |"
        yield "|---|---|---|---|"
        for row in table.rows:
            value = simulated(row, table.unit)
            yield row_line(row, table, value)
            if off(row, table, value):
                missed.append(f"{table.table.partition(',')[0]}: {_case(row)}: {_error(row, value)}")
    yield from _missed(missed, sum(len(table.rows) for table in data.cells if table.target))
    yield from _ours(data.ours)
    yield from our_prefill(data.cells)
    yield from _sources()


def row_line(row: Row, table: Table, value: float) -> str:
    """One line of a table."""
    error = _error(row, value)
    shown = f"**{error}**" if off(row, table, value) else error
    marks = "?" * row.uncertain + " (fitted)" * row.fitted
    return f"| {_case(row)} | {row.published:g}{marks} | {_figure(value)} | {shown} |"


def off(row: Row, table: Table, value: float) -> bool:
    """Whether the error is larger than wanted."""
    return table.target is not None and abs(value / row.published - 1) > table.target


def _error(row: Row, value: float) -> str:
    return f"{100 * (value / row.published - 1):+.0f} %"


def _missed(missed: Sequence[str], of: int) -> Iterator[str]:
    yield ""
    yield f"## Further off than wanted: {len(missed)} of {of}"
    yield ""
    yield from (f"- {one}" for one in missed)


def _ours(cases: Sequence[Case]) -> Iterator[str]:
    yield ""
    yield "## Our policies on these phones"
    yield ""
    yield "Our cache and our order of work, with the predictor of the published model. Limit: bytes over bandwidth, of"
    yield "DRAM or flash, whichever is slower."
    yield ""
    yield "| case | tokens/s | PowerInfer-2, simulated | limit | misses | ms p50 / p90 / p99 | exposed I/O |"
    yield "|---|---|---|---|---|---|---|"
    for case in cases:
        ours = decoded(case, SYSTEMS["ours"])
        theirs = decoded(dataclasses.replace(case, policy="powerinfer2"), SYSTEMS["powerinfer2"])
        times = " / ".join(f"{ms:.0f}" for ms in (ours.p50_ms, ours.p90_ms, ours.p99_ms))
        speeds = " | ".join(map(_figure, (ours.tokens_per_s, theirs.tokens_per_s, ours.limit_tokens_per_s)))
        shares = f"{100 * ours.miss_rate:.1f} % | {times} | {100 * ours.exposed_io:.0f} %"
        yield f"| {_case(case)} | {speeds} | {shares} |"


def our_prefill(tables: Sequence[Table]) -> Iterator[str]:
    """The lines on our worker beside the published prefill."""
    yield ""
    yield "## Our prefill by the NPU on these phones"
    yield ""
    yield "The worker of services/offload/npu with its own schedule (npu_prefill.py says what is assumed), beside what"
    yield "is published of PowerInfer-2; wanted: within 20%, else `off`. Of the time: the NPU computes; is free and has"
    yield "no rows of weights; has no inputs, because cores are at attention and what else lies between; flash reads."
    yield ""
    yield "| case | tokens | published | ours, NPU prefill | error | NPU | no rows | no inputs | flash |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for table in tables:
        for row in table.rows if table.unit in ("prefill-128", "prefill-512") else ():
            yield our_prefill_line(row, table)


def our_prefill_line(row: Row, table: Table) -> str:
    """One line of it."""
    tokens = int(table.unit.removeprefix("prefill-"))
    found = prefilled(_situation(row, SYSTEMS["ours"]), tokens)
    value, error = tokens / found.seconds, _error(row, tokens / found.seconds)
    shares = (found.npu, found.waits_for_rows, found.waits_for_cores, found.flash)
    case = _case(dataclasses.replace(row, policy=""))
    shown = f"{error}, off" if off(row, table, value) else error
    times = " | ".join(f"{100 * share:.0f} %" for share in shares)
    return f"| {case} | {tokens} | {row.published:g} | {_figure(value)} | {shown} | {times} |"


def _sources() -> Iterator[str]:
    yield ""
    yield "## Where the values come from"
    for file in sorted(FOLDER.glob("*.json")):
        yield ""
        yield f"`{file.stem}`"
        yield ""
        yield "| field | value | source |"
        yield "|---|---|---|"
        for field, value, source in read_device(file.stem).sources():
            yield f"| {field} | {value} | {source} |"
    yield ""
    yield "| model | field | value | source |"
    yield "|---|---|---|---|"
    for name, model in published_models().items():
        yield f"| {name} | shape | {model.layers} x {model.neurons} x {model.width} | {model.shape_source} |"
        for field in ("active", "predicted", "predictor_rank"):
            one = getattr(model, field)
            yield f"| {name} | {field} | {one.value:g} | {one.source} |"


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

"""A report as Markdown to paste, and as a line of the table of all reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from neuronpipe.launch.bench.report import PLANNED_HEADS, planned_lines
from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.report.document import FlashFigures, Report, ReportedDevice, ReportedPlan, ReportedTest
from neuronpipe.plans.number_format import show_number

SUMMARY_HEADS = ("device", "memory", "model", "plan", "prompt, tokens/s", "decode, tokens/s", "version", "date")


def render(report: Report) -> str:
    """Return the report as Markdown. Text from the report cannot become markup."""
    program = f"{report.version} ({report.commit})" if report.commit else report.version
    model = f"{report.model.name}, {show_bytes(report.model.bytes)} on flash, {report.model.quantization}"
    tests = report.tests
    facts = [*_device_facts(report.device), ("model", model), ("plan", _show_plan(report.plan))]
    figures = [(label, *map(show, tests)) for label, show in _FIGURES]
    figures = [line for line in figures if any(cell != "-" for cell in line[1:])]
    repetitions = f"Medians of {tests[0].repetitions} repetitions, after a warm-up, whose first token is the one shown."
    planned = [tuple(cell.strip() for cell in line) for line in planned_lines([test.row() for test in tests])]
    parts = [f"### {_escaped(f'neuronpipe {program}, {report.date}')}\n", _table(("device and run", ""), facts)]
    parts += [_table(("measured", *(test.name for test in tests)), figures), f"{repetitions}\n"]
    parts += [_table(PLANNED_HEADS, planned)] if planned else []
    return "\n".join(parts)


def render_summary(reports: Iterable[tuple[str, Report]]) -> str:
    """Return a table with a line for each report, which links its file. reports: (file name, report)"""
    return _table(SUMMARY_HEADS, [_summary(report) for _, report in reports], [file for file, _ in reports])


def _summary(report: Report) -> tuple[str, ...]:
    device = report.device
    names = (device.name, device.chip, device.processor or device.architecture, device.instruction_set)
    plan = f"{report.plan.mode}, {show_bytes(report.plan.limit_bytes)}, {report.plan.resident_share:.0%} resident"
    prompts = [test.measured.prefill_tokens_per_s for test in report.tests if test.name.startswith("pp")]
    decodes = [test.measured.tokens_per_s for test in report.tests if test.name.startswith("tg")]
    return (
        ", ".join(filter(None, names)),
        show_bytes(device.memory_total_bytes),
        f"{report.model.name}, {report.model.quantization}",
        plan,
        _show(next(iter(prompts), None), show_number),
        _show(next(iter(decodes), None), show_number),
        report.commit or report.version,
        report.date,
    )


def _device_facts(device: ReportedDevice) -> Iterator[tuple[str, str]]:
    if name := ", ".join(filter(None, (device.name, device.chip))):
        yield "device", name
    processor = device.processor or "not known"
    yield "processor", f"{processor}, {device.architecture}, kernels for {device.instruction_set}"
    kinds = (("big", device.big_cores), ("mid", device.mid_cores), ("little", device.little_cores))
    cores = ", ".join(f"{count} {kind}" for kind, count in kinds if count)
    quota = "" if device.cpu_quota_cores is None else f", quota {device.cpu_quota_cores:g} cores"
    yield "cores", f"{cores}; {device.allowed_cores} of {device.cores} allowed{quota}"
    available = show_bytes(device.memory_available_bytes)
    yield "memory", f"{show_bytes(device.memory_total_bytes)}, {available} available before the run"
    yield "kernel", f"Linux {device.kernel or 'of unknown release'}"
    yield "disk", "not measured: the package is too small" if device.flash is None else _show_flash(device.flash)


def _show_flash(flash: FlashFigures) -> str:
    speeds = ", ".join(
        f"{show_bytes(read.request_bytes)} x {read.depth}: {show_number(read.bytes_per_s / 1e6, 0)}"
        for read in flash.reads
    )
    source = "`profile device`" if flash.measured_by == "profile" else "a start of a run"
    cached = "" if flash.direct else ", through the page cache"
    return (
        f"random reads, MB/s by size and depth: {speeds}; {flash.engine}{cached}; measured by {source} on "
        f"{flash.measured_on}, other programs kept the machine {flash.busy:.0%} busy"
    )


def _show_plan(plan: ReportedPlan) -> str:
    workers = f"{plan.workers} worker{'' if plan.workers == 1 else 's'}"
    return (
        f"{plan.mode} mode, limit {show_bytes(plan.limit_bytes)}, {workers}, {plan.resident_share:.0%} of the "
        f"feed-forward weights resident, context {plan.context_tokens:,} tokens"
    )


def _show(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _ms(value: float | None) -> str:
    return _show(value, lambda ms: show_number(ms, 2))


_FIGURES: tuple[tuple[str, Callable[[ReportedTest], str]], ...] = (
    ("tokens/s", lambda test: _show(test.measured.tokens_per_s, show_number)),
    (
        "slowest .. fastest",
        lambda test: f"{show_number(test.min_tokens_per_s)} .. {show_number(test.max_tokens_per_s)}",
    ),
    ("time to first token, ms", lambda test: _ms(test.measured.first_token_ms)),
    ("time between tokens, ms, p50", lambda test: _ms(test.p50_ms)),
    ("p90", lambda test: _ms(test.p90_ms)),
    ("p99", lambda test: _ms(test.p99_ms)),
    ("longest", lambda test: _ms(test.longest_ms)),
    ("miss rate", lambda test: _show(test.measured.miss_rate, "{:.1%}".format)),
    ("flash read per token", lambda test: _show(test.measured.flash_bytes_per_token, show_bytes)),
    ("exposed I/O", lambda test: _show(test.measured.exposed_io_share, "{:.1%}".format)),
    ("peak memory", lambda test: _show(test.measured.peak_memory_bytes, show_bytes)),
)


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], links: Sequence[str] = ()) -> str:
    """Return a table. links: the files that the first cells of the lines link, if there are any"""
    rows = ["|" + "---|" * len(heads)]
    for number, line in enumerate(lines):
        cells = [_escaped(cell) for cell in line]
        if links:
            cells[0] = f"[{cells[0]}]({links[number]})"
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"| {' | '.join(map(_escaped, heads))} |", *rows]) + "\n"


def _escaped(text: str) -> str:
    """Return the text so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_\[\]<>|#~&@])", r"\\\1", text)

"""The document of a benchmark report: what `neuronpipe report --json` prints and tests/bench/results/community/ holds.

It says nothing about who made it or where: no user, host, address, path or serial number. Every field is declared here,
with its range, and `parse_report` accepts only these: a report may come from anybody.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from neuronpipe.launch.bench.planned import errors
from neuronpipe.plans.plan.document import Mode
from neuronpipe.plans.strict_json import read_file
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.marks import Range
from neuronpipe.protocol.schema import FieldError, from_json, json_object

FORM: Final = 1
"""The version of the document. It grows if a field changes its meaning or goes; a new field has a default."""

MAX_REPORT_BYTES = 64 << 10
MAX_ITEMS = 16
MAX_NAME_CHARACTERS, MAX_TEXT_CHARACTERS = 64, 128

Name = Annotated[str, Range(0, MAX_NAME_CHARACTERS)]
Text = Annotated[str, Range(0, MAX_TEXT_CHARACTERS)]
Count = Annotated[int, Range(0, 1 << 20)]
Bytes = Annotated[int, Range(0, 1 << 53)]
Amount = Annotated[float, Range(0, 1e15)]
Share = Annotated[float, Range(0, 1)]


@frozen(kw_only=True)
class FlashRead:
    """Speed of random reads of `request_bytes` each, with `depth` in flight."""

    request_bytes: Bytes
    depth: Count
    bytes_per_s: Amount


@frozen(kw_only=True)
class FlashFigures:
    """Measured speeds of the storage that the package lies on.

    direct: False if the page cache answered
    measured_by: the short measurement at a start of a run, or `neuronpipe profile device`
    measured_on: the day of that, UTC
    busy: share of the machine that other programs used meanwhile
    """

    engine: Literal["io_uring", "threads"]
    direct: bool
    measured_by: Literal["start", "profile"]
    measured_on: Name
    busy: Share
    reads: tuple[FlashRead, ...]

    def __post_init__(self) -> None:
        _require_date("measured_on", self.measured_on)
        _require_few("reads", self.reads)


@frozen(kw_only=True)
class ReportedDevice:
    """The machine.

    name: the name that the user or Android gives it; may be empty, like chip and processor
    cores, allowed_cores: all, and those that the run may use, of which there are big, mid and little ones
    cpu_quota_cores: processor time that the run may use; None: no quota
    memory_available_bytes: before the run
    kernel: the number of the operating system's kernel
    instruction_set: the one of the kernels that compute
    flash: None if it was not measured, because the package is very small
    """

    name: Name
    chip: Name
    processor: Text
    architecture: Name
    cores: Count
    allowed_cores: Count
    big_cores: Count
    mid_cores: Count
    little_cores: Count
    cpu_quota_cores: Amount | None
    memory_total_bytes: Bytes
    memory_available_bytes: Bytes
    kernel: Name
    instruction_set: Name
    flash: FlashFigures | None


@frozen(kw_only=True)
class ReportedModel:
    """The package: its name without a folder, its size on flash, and the types of its weights."""

    name: Text
    bytes: Bytes
    quantization: Text


@frozen(kw_only=True)
class ReportedPlan:
    """The plan in short. resident_share: of the feed-forward weights"""

    mode: Mode
    limit_bytes: Bytes
    workers: Count
    resident_share: Share
    context_tokens: Count


@frozen(kw_only=True)
class Figures:
    """Figures of a test that a plan has as well, under the names of the rows of `bench`. None: not known.

    first_token_ms: the time to the first token of the first request
    miss_rate: share of the needed cluster parts that were not in memory when they were first looked up
    exposed_io_share: share of the time in which workers waited for flash
    """

    tokens_per_s: Amount | None = None
    prefill_tokens_per_s: Amount | None = None
    first_token_ms: Amount | None = None
    miss_rate: Share | None = None
    flash_bytes_per_token: Amount | None = None
    flash_reads_per_token: Amount | None = None
    exposed_io_share: Share | None = None
    dram_bytes_per_token: Amount | None = None
    peak_memory_bytes: Amount | None = None


@frozen(kw_only=True)
class ReportedTest:
    """One test: medians, the slowest and the fastest repetition, and the times between tokens.

    name: the name that `bench` gives it, e.g. pp512
    p50_ms, p90_ms, p99_ms, longest_ms: between tokens; None for a test of a prompt alone
    """

    name: Name
    repetitions: Count
    min_tokens_per_s: Amount
    max_tokens_per_s: Amount
    p50_ms: Amount | None
    p90_ms: Amount | None
    p99_ms: Amount | None
    longest_ms: Amount | None
    measured: Figures
    planned: Figures

    def row(self) -> dict[str, Any]:
        """Return the test's name, its measured and planned figures, and the plan's errors, as in a row of `bench`."""
        measured = vars(self.measured)
        planned = {name: value for name, value in vars(self.planned).items() if value is not None}
        return {"test": self.name, **measured, "planned": planned, "error": errors(measured, planned)}


@frozen(kw_only=True)
class Report:
    """A report.

    date: the day of the measurement, UTC
    version, commit: those of neuronpipe; the commit is empty if it is not known, and ends with -dirty after changes
    """

    form: Literal[1]
    date: Name
    version: Name
    commit: Name
    device: ReportedDevice
    model: ReportedModel
    plan: ReportedPlan
    tests: tuple[ReportedTest, ...]

    def __post_init__(self) -> None:
        _require_date("date", self.date)
        _require_few("tests", self.tests)


def read_report(file: Path) -> Report:
    """Read a report's file. Raises UserError that names the file and the field."""
    return parse_report(read_file(file, MAX_REPORT_BYTES), str(file))


def parse_report(data: bytes, where: str) -> Report:
    """Return the report in the content of a file. Raises UserError that begins with `where` and names the field."""
    values = json_object(data, where)
    if (form := values.get("form")) != FORM:
        raise UserError(
            f"{where}: field 'form': expected {FORM}; write it with `neuronpipe report --json`, not {form!r:.20}"
        )
    return from_json(Report, values, where)


def _require_date(field: str, text: str) -> None:
    try:
        is_date = datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        is_date = False
    if not is_date:
        raise FieldError(field, "expected a day as YYYY-MM-DD")


def _require_few(field: str, items: tuple[object, ...]) -> None:
    if not 1 <= len(items) <= MAX_ITEMS:
        raise FieldError(field, f"expected 1 to {MAX_ITEMS} items, found {len(items)}")

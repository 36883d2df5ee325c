"""The simulator: what it takes from the laws of its units, what it refuses, and the paper's figures beside its own."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.launch.cli import main
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.device.cores import Core
from neuronpipe.plans.device.device import Device, FlashCurve, FlashPoint, MemorySpeed, PiecePoint
from neuronpipe.plans.lab.devices.device_file import FOLDER, DeviceModel, read_device, this_machine
from neuronpipe.plans.lab.paper.paper import DOCUMENT, off, our_prefill_line, published, row_line, simulated
from neuronpipe.plans.lab.shapes.models import model_named, model_of
from neuronpipe.plans.lab.simulate.decode import Situation
from neuronpipe.plans.lab.simulate.events import Simulation
from neuronpipe.plans.lab.simulate.npu_prefill import Graphs, NpuPrefill, simulate_npu_prefill
from neuronpipe.plans.lab.simulate.recording import Recording
from neuronpipe.plans.lab.simulate.simulate import Result, SimulationOptions, simulate
from neuronpipe.plans.lab.simulate.systems import OURS, SYSTEMS
from neuronpipe.plans.lab.simulate.task_times import FileCosts
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

from tests.conformance.specs import SPECS, write_package

PHONE = "oneplus-12"
SMALL = "turbosparse-100m"


@pytest.fixture(scope="module")
def phone() -> DeviceModel:
    return read_device(PHONE)


def small(phone: DeviceModel, policy: str = "powerinfer2", **options: Any) -> Result:
    """A run of a small model."""
    return simulate(phone, model_named(SMALL), SYSTEMS[policy], SimulationOptions(**({"tokens": 24} | options)))[0]


def test_what_flash_alone_takes_is_its_seconds(phone: DeviceModel) -> None:
    simulation = Simulation(phone, 5)
    last = None
    for _ in range(4):
        last = simulation.add("flash", "read", 0, seconds=0.25, bytes=1e9, after=[last] if last else [])
    simulation.run()
    assert simulation.now_s == pytest.approx(1.0)
    assert simulation.use.exposed_io_s == pytest.approx(1.0)
    assert simulation.use.dram_bytes == pytest.approx(4e9)


def test_what_memory_alone_takes_is_bytes_over_the_units_bandwidth(phone: DeviceModel) -> None:
    for units, speed in (
        (("cpu",) * 5, phone.dram_cpu_gb_per_s.value),
        (("npu",), phone.dram_npu_gb_per_s.value),
        (("cpu",), phone.fast_cores[-1].reads_gb_per_s),
    ):
        simulation = Simulation(phone, 5 if len(units) > 1 else 1)
        for unit in units:
            simulation.add(unit, "neurons", 0, bytes=1e9)
        simulation.run()
        assert simulation.now_s == pytest.approx(len(units) / speed)


def test_units_that_are_active_at_once_share_memory(phone: DeviceModel) -> None:
    simulation = Simulation(phone, 5)
    for _ in range(5):
        simulation.add("cpu", "neurons", 0, bytes=1e9)
    simulation.add("npu", "neurons", 0, bytes=1e9)
    simulation.run()
    assert simulation.use.max_dram_bytes_per_s == pytest.approx(phone.dram_total_gb_per_s.value * 1e9)


def test_a_core_takes_the_next_task_and_nothing_starts_before_what_it_waits_for(phone: DeviceModel) -> None:
    simulation = Simulation(phone, 2, keep_trace=True)
    first = [simulation.add("cpu", "predict", 0, seconds=1.0) for _ in range(3)]
    simulation.add("none", "", 0, seconds=0.5, after=first)
    simulation.add("cpu", "neurons", 0, seconds=1.0, after=first)
    simulation.run()
    assert simulation.now_s == pytest.approx(3.0)
    assert simulation.trace is not None
    assert [(done.kind, round(done.began_s)) for done in simulation.trace] == [
        ("predict", 0), ("predict", 0), ("predict", 1), ("neurons", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("policy", SYSTEMS)
def test_no_unit_does_more_than_it_can(phone: DeviceModel, policy: str) -> None:
    result, decoded = simulate(phone, model_named(SMALL), SYSTEMS[policy], SimulationOptions(resident=0.4, tokens=16))
    assert decoded.use.max_dram_bytes_per_s <= phone.dram_total_gb_per_s.value * 1e9 * 1.0001
    assert all(0 <= share <= 1.0001 for share in result.busy.values())
    assert result.tokens_per_s <= result.limit_tokens_per_s
    assert decoded.use.total_s == pytest.approx(sum(decoded.token_s))


@pytest.mark.slow
@pytest.mark.parametrize("policy", SYSTEMS)
def test_more_memory_is_not_slower(phone: DeviceModel, policy: str) -> None:
    speeds = [small(phone, policy, resident=share).tokens_per_s for share in (0.2, 0.4, 0.6, 0.8, 1.0)]
    assert all(more > 0.98 * less for less, more in itertools.pairwise(speeds))
    assert speeds[-1] > 1.2 * speeds[0]


def test_everything_in_memory_reads_no_flash_and_misses_nothing(phone: DeviceModel) -> None:
    result = small(phone)
    assert (result.flash_bytes_per_token, result.miss_rate, result.exposed_io) == (0, 0, 0)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures(phone: DeviceModel) -> None:
    assert small(phone, resident=0.5) == small(phone, resident=0.5)
    assert small(phone, resident=0.5) != small(phone, resident=0.5, seed=2)


@pytest.mark.parametrize(("quantization", "bits"), [("q4", 4.5), ("q4k", 4.5), ("q5k", 5.5), ("iq4", 4.5), ("q8", 8.5)])
def test_a_package_is_simulated_whatever_its_quantization(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quantization: Quantization, bits: float
) -> None:
    package = write_package(tmp_path / "package", dataclasses.replace(SPECS["many neurons"], width=256), quantization)
    assert model_of(package.manifest).bits_per_weight == bits
    assert main(["simulate", "oneplus-12", str(package.path), "--tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_s"] > 0


def test_a_recording_is_simulated_as_it_was(phone: DeviceModel) -> None:
    model = model_of(Package.open(DEMO).manifest)
    spec = model.spec
    wanted = np.full((8, spec.layers, 1), 0b1111, dtype=np.uint8)
    recording = Recording(wanted, np.ones((8, spec.layers, 1), dtype=bool), 8, True, "four of eight, always")
    flash = SYSTEMS["llm-in-a-flash"]
    result, _ = simulate(phone, model, flash, SimulationOptions(resident=0.5, tokens=16), recording=recording)
    assert result.miss_rate == 0.0  # the same four fit
    less, _ = simulate(phone, model, flash, SimulationOptions(resident=0.25, tokens=16), recording=recording)
    assert less.miss_rate > 0.4


def _recorded(**changed: Any) -> dict[str, Any]:
    """The arrays of a recording of the small model, and what is wrong with them."""
    layers = model_named(SMALL).spec.layers
    arrays = {
        "wanted": np.ones((3, layers, 1), np.uint8),
        "chosen": np.ones((3, layers, 1), bool),
        "clusters": np.array(8),
        "ordered": np.array(True),
        "package": np.array("p"),
    }
    return arrays | changed


def _one_array() -> bytes:
    written = io.BytesIO()
    np.save(written, np.ones(3))
    return written.getvalue()


WRONG_RECORDINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a cut archive": (lambda file: file.write_bytes(b"PK\x03\x04 and no more"), "is no recording"),
    "an empty file": (lambda file: file.write_bytes(b""), "is no recording"),
    "one array": (lambda file: file.write_bytes(_one_array()), "is no recording"),
    "no clusters": (lambda file: np.savez(file, **_recorded(clusters=np.array(0))), "clusters: 0"),
    "several clusters": (lambda file: np.savez(file, **_recorded(clusters=np.ones(3))), "is no recording"),
    "wide bits": (lambda file: np.savez(file, **_recorded(wanted=np.ones((3, 1, 2), np.uint8))), "disagree"),
    "other bits": (lambda file: np.savez(file, **_recorded(clusters=np.array(80))), "wanted: "),
    "floats": (lambda file: np.savez(file, **_recorded(wanted=_recorded()["wanted"] * 1.5)), "wanted: "),
    "numbers": (lambda file: np.savez(file, **_recorded(chosen=_recorded()["chosen"] * 2)), "chosen: "),
    "other layers": (
        lambda file: np.savez(file, **_recorded(wanted=np.ones((3, 1, 1), np.uint8), chosen=np.ones((3, 1, 1), bool))),
        "of 1 layers, but turbosparse-100m has",
    ),
}


@pytest.mark.parametrize("name", WRONG_RECORDINGS)
def test_a_recording_that_is_none_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.npz"
    make, said = WRONG_RECORDINGS[name]
    make(file)
    assert main(["simulate", PHONE, SMALL, "--ffn-resident", "50%", "--tokens", "4", "--recording", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line or "--recording" in line
    assert said in line


def test_a_recording_that_swells_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.plans.lab.simulate.recording.MAX_RECORDING_BYTES", 1000)
    np.savez_compressed(tmp_path / "r.npz", **_recorded(wanted=np.zeros((3, 1000, 1), np.uint8)))
    with pytest.raises(UserError, match=r"r\.npz: larger than the 1000 bytes"):
        Recording.load(tmp_path / "r.npz")


def test_this_machine_is_what_was_measured_of_it() -> None:
    flash = FlashCurve(
        engine="threads",
        direct=True,
        points=tuple(FlashPoint(request_bytes=s, depth=32, bytes_per_s=1e9 * g) for s, g in ((4096, 1), (65536, 2))),
    )
    memory = MemorySpeed(
        threads=2,
        one_thread_bytes_per_s=8e9,
        sequential_bytes_per_s=14e9,
        pieces=(PiecePoint(piece_bytes=4096, bytes_per_s=5e9),),
    )
    device = Device(
        architecture="x86_64",
        instruction_set="avx2",
        cores=tuple(Core(id=n, capacity=1024, kind="big") for n in range(2)),
        cpu_quota=None,
        memory_total_bytes=8 << 30,
        memory_available_bytes=6 << 30,
        page_bytes=4096,
        memlock_bytes=None,
        io_uring=True,
        flash=flash,
        memory_speed=memory,
    )
    made = this_machine(device)
    assert not made.has_npu
    assert made.random_bytes_per_s(4096, 1 << 40, "several") == pytest.approx(1e9)
    assert made.dram_total_gb_per_s.value == pytest.approx(14)
    result = small(made, "powerinfer2", resident=0.5)  # without its NPU
    assert result.busy["npu"] == 0
    with pytest.raises(UserError, match="flash and memory were not measured"):
        this_machine(dataclasses.replace(device, flash=None))


def _set(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for step in path[:-1]:
            values = values[step]
        values[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_set("copy_gb_per_s", "value", to=-1), "copy_gb_per_s"),
        (_set("lookup_ns", "value", to=1e12), "lookup_ns"),
        (_set("barrier_us", "source", to=" "), "barrier_us"),
        (_set("barrier_us", to=10), "barrier_us"),
        (_set("cores", to=[]), "cores"),
        (_set("cores", 0, "count", to=0), "cores[0].count"),
        (_set("cores", 0, "kind", to="huge"), "cores[0].kind"),
        (_set("flash_random", "points", to=[]), "flash_random"),
        (_set("flash_random", "points", 1, "block_kib", to=4), "flash_random"),
        (_set("flash_ranges", "points", 0, "share", to=1.5), "flash_ranges"),
        (_set("flash_issuers", "several", to=0), "flash_issuers.several"),
        (_set("dram_total_gb_per_s", "value", to=10), "dram_total_gb_per_s"),
        (_set("dram_npu_gb_per_s", "value", to=0), "dram_npu_gb_per_s"),
        (_set("npu_tops", to=1), "npu_tops"),
        (_set("name", to="two\nlines"), "name"),
        (_set("name", to=" "), "name"),
        (_set("memory_usable_gb", "value", to=0), "memory_usable_gb"),
        (lambda values: values.pop("message_us"), "message_us"),
        (lambda values: values["flash_ranges"].pop("points"), "flash_ranges.points"),
        (_set("dram_cpu_gb_per_s", "value", to=5e-324), "dram_cpu_gb_per_s"),
        (_set("npu_tflop_per_s", "value", to=1e-300), "npu_tflop_per_s"),
        (_set("flash_random", "points", 0, "gb_per_s", to=1e-300), "flash_random"),
        (_set("flash_ranges", "points", 0, "share", to=1e-300), "flash_ranges"),
        (_set("flash_issuers", "big", to=1e-300), "flash_issuers.big"),
        (_set("cores", 0, "reads_gb_per_s", to=1e-300), "cores[0].reads_gb_per_s"),
    ],
)
def test_a_device_file_with_an_absurd_value_names_file_and_field(
    tmp_path: Path, change: Callable[[Any], None], field: str
) -> None:
    values = json.loads((FOLDER / f"{PHONE}.json").read_text())
    change(values)
    file = tmp_path / "phone.json"
    file.write_text(json.dumps(values))
    with pytest.raises(UserError) as wrong:
        read_device(str(file))
    assert f"{file}: " in str(wrong.value)
    assert f"'{field}" in str(wrong.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("moon-phone", SMALL), "known are oneplus-12"),
        ((PHONE, "gpt-9"), "neither a package nor a known shape"),
        ((PHONE, SMALL, "--memory", "1GB", "--ffn-resident", "50%"), "one decides the other"),
        ((PHONE, "bamboo-7b", "--memory", "1GB"), "the least for this package"),
        ((PHONE, SMALL, "--batch", "0"), "--batch 0: between 1 and"),
        ((PHONE, SMALL, "--picture", "picture.png"), "ends in .svg"),
        ((PHONE,), "name a model: a shape, or a package"),
        ((SMALL,), f"{SMALL!r}: is no device; known are oneplus-12"),
        ((PHONE, SMALL, "--mode", "exact", "--policy", "powerinfer2"), "--mode exact: only with policy ours"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["simulate", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_trace_is_the_same_kind_of_file_as_a_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", PHONE, SMALL, "--policy", "powerinfer2", "--ffn-resident", "50%", "--tokens", "6"]
    events, picture = tmp_path / "trace.json", tmp_path / "trace.svg"
    assert main([*words, "--json", "-o", str(events), "--picture", str(picture)]) == 0
    result = json.loads(capsys.readouterr().out)
    spans = [event for event in json.loads(events.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {span["name"] for span in spans} >= {"attend", "predict", "neurons", "read", "logits", "await"}
    last = [span["dur"] / 1000 for span in spans if span["name"] == "await"]
    assert len(last) == 3
    assert max(last) <= result["p99_ms"] * 1.5
    assert "simulated" in picture.read_text()
    assert main(words) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_the_document_has_every_published_figure_and_counts_what_is_off_the_target() -> None:
    text = DOCUMENT.read_text()
    rows = [(table, row) for table in published().cells for row in table.rows]
    for _, row in rows:
        assert re.search(rf"\| {re.escape(f'{row.published:g}')}\??( \(fitted\))? \|", text)
    assert sum(row.fitted for _, row in rows) == 1
    bold = len(re.findall(r"\*\*[+-]\d+ %\*\*", text))
    assert f"Bold: off the target, {bold} of " in text
    reasons = text.partition("## What the other cells hang on")[2].partition("## Our policies")[0]
    assert (
        len(
            re.findall(
                r"[+-]\d+ %(?=[,| ])", "".join(line.split("|")[2] + "|" for line in reasons.splitlines()[6:] if line)
            )
        )
        == bold
    )


@pytest.mark.parametrize("unit", ["prefill-128", "prefill-512"])
def test_the_documents_prefill_is_the_simulators(unit: str) -> None:
    lines = DOCUMENT.read_text().splitlines()
    for table in (table for table in published().cells if table.unit == unit):
        for row in table.rows:
            assert row_line(row, table, simulated(row, table.unit)) in lines


def test_the_documents_prefill_by_our_worker_is_the_simulators() -> None:
    """Of the smaller models, and so much of it as is within what is wanted is no less than now."""
    lines = DOCUMENT.read_text().splitlines()
    tables = [table for table in published().cells if table.unit.startswith("prefill")]
    for table in tables:
        for row in table.rows:
            if row.model == "bamboo-7b":
                assert our_prefill_line(row, table) in lines
    ours = [line for line in lines if line.count("|") == 10 and line.startswith("| oneplus")]
    assert len(ours) == sum(len(table.rows) for table in tables)
    assert sum(", off |" in line for line in ours) <= 6


def test_rows_that_are_made_faster_or_sooner_make_our_prompt_shorter(phone: DeviceModel) -> None:
    model = dataclasses.replace(model_named(SMALL), active=0.1)

    def found(device: DeviceModel, resident: float = 1.0, tokens: int = 128) -> NpuPrefill:
        return simulate_npu_prefill(Situation(device, model, OURS, FileCosts(device, model, OURS), 0, resident), tokens)

    def times(factor: float, field: str) -> DeviceModel:
        value = getattr(phone, field)
        return dataclasses.replace(phone, **{field: dataclasses.replace(value, value=factor * value.value)})

    now = found(phone)
    assert now.npu + now.waits_for_rows + now.waits_for_cores == pytest.approx(1, abs=1e-6)
    assert now.flash == 0 < found(phone, 0.5).flash
    assert found(phone, 0.5).seconds >= now.seconds
    fast = tuple(dataclasses.replace(core, computes_gb_per_s=4 * core.computes_gb_per_s) for core in phone.cores)
    assert found(dataclasses.replace(phone, cores=fast)).waits_for_rows < now.waits_for_rows
    slow = found(times(0.01, "npu_tflop_per_s"))
    assert slow.waits_for_rows < 0.05  # two products in flight: only the first is waited for
    assert slow.npu > 0.9
    assert Graphs.expected(64, 1.0) == Graphs.of(64) == Graphs(1, 64)
    assert 64 < Graphs.expected(128, 0.5).tokens < 128
    assert Graphs.of(513) == Graphs(2, 512 + 64)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_documents_first_figure_is_the_simulators_and_near_what_was_published() -> None:
    table = published().cells[0]
    row = table.rows[0]
    value = simulated(row, table.unit)
    assert row_line(row, table, value) in DOCUMENT.read_text().splitlines()
    assert not off(row, table, value)


def test_where_a_token_wants_more_than_memory_holds_the_hottest_stay_and_are_read_in_order(phone: DeviceModel) -> None:
    model = dataclasses.replace(model_named(SMALL), active=0.3, predicted=0.3)
    little, _ = simulate(phone, model, SYSTEMS["powerinfer2"], SimulationOptions(resident=0.1, tokens=16))
    assert little.miss_rate < 0.6  # LRU alone would miss all
    assert little.flash_bytes_per_token / little.flash_reads_per_token > 4096  # some of it in long reads
    half, _ = simulate(phone, model, SYSTEMS["powerinfer2"], SimulationOptions(resident=0.6, tokens=16))
    assert half.flash_bytes_per_token / half.flash_reads_per_token <= 4096

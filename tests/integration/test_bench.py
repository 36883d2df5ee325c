"""`bench` and `trace` on the demo model: all figures are there and are those of this run. Counters, not speeds."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from neuronpipe.launch.client import attach
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.services.monitor.span_groups import NUMBER
from neuronpipe.services.monitor.span_rings import RunTrace

from tests.pipeline import Shell

FIELDS = {
    "test",
    "mode",
    "ffn_resident",
    "tokens_per_s",
    "tbt_ms",
    "dram_bytes_per_token",
    "dram_limit_fraction",
    "flash_bytes_per_token",
    "miss_rate",
    "exposed_io_share",
    "coordination_share",
    "peak_memory_bytes",
    "prefill_tokens_per_s",
    "planned",
    "error",
}
SPEEDS = {"tokens_per_s", "prefill_tokens_per_s", "first_token_ms", "exposed_io_share"}
PLANNED = {"tokens_per_s", "first_token_ms", "peak_memory_bytes"}
PLANNED_OF_DECODING = {
    "miss_rate",
    "flash_reads_per_token",
    "flash_bytes_per_token",
    "dram_bytes_per_token",
    "exposed_io_share",
}


def test_bench_measures_a_run_and_says_where_the_time_went(shell: Shell, tmp_path: Path) -> None:
    picture = tmp_path / "p.svg"
    asked = ("--tests", "pp32,tg16", "--ffn-resident", "50%", "--repetitions", "2", "--picture", picture)
    done = shell.call("bench", DEMO, *asked, "--json")
    assert done.code == 0, done.errors
    prefill, decode = json.loads(done.out)
    for row in (prefill, decode):
        assert row.keys() >= FIELDS
        assert row["tokens_per_s_least"] <= row["tokens_per_s"] <= row["tokens_per_s_most"]
        assert 0.3 < row["ffn_resident"] <= 0.5
        assert row["flash_bytes_per_token"] > 0
        assert 0 < row["miss_rate"] <= 1
        assert 0 <= row["coordination_share"] <= 1
        assert 0 <= row["exposed_io_share"] <= 1
        assert row["coordination_share"] + row["exposed_io_share"] <= 1.01
        assert row["error"].keys() == row["planned"].keys() <= row.keys()
        for name, error in row["error"].items():
            if row[name]:
                assert error == pytest.approx((row["planned"][name] - row[name]) / row[name], abs=1e-9), name
    device = probe(DEMO)  # speeds are planned where they were measured
    unknown = set() if device.flash and device.memory_speed else SPEEDS
    assert prefill["planned"].keys() == (PLANNED | {"prefill_tokens_per_s"}) - unknown
    assert decode["planned"].keys() == (PLANNED | PLANNED_OF_DECODING) - unknown
    assert prefill["prefill_tokens_per_s"] == prefill["tokens_per_s"]
    assert decode["prefill_tokens_per_s"] is None
    assert decode["planned"]["dram_bytes_per_token"] == pytest.approx(decode["dram_bytes_per_token"], rel=0.2)
    assert (prefill["test"], prefill["tokens"], prefill["tbt_ms"]["p50"]) == ("pp32", 64, None)
    assert (decode["test"], decode["tokens"]) == ("tg16", 32)
    assert 0 < decode["tbt_ms"]["p50"] <= decode["tbt_ms"]["p99"] <= decode["tbt_most_ms"]
    model = Package.open(DEMO).manifest.model
    gates_bytes = model.layers * model.neurons * model.width  # at q8, without scales: exact mode reads them all
    assert decode["dram_bytes_per_token"] > gates_bytes
    assert prefill["dram_bytes_per_token"] < decode["dram_bytes_per_token"]  # a step's weights serve many tokens
    ElementTree.parse(picture)

    old = tmp_path / "old.json"
    old.write_text(done.out)
    compared = shell.call("bench", DEMO, "--tests", "tg16", "--repetitions", "1", "--compare", old)
    assert compared.code == 0, compared.errors
    assert f"Against {old}, new / old:" in compared.out


@pytest.mark.nightly
@pytest.mark.alone
def test_bench_measures_several_texts_at_once(shell: Shell) -> None:
    words = ("bench", DEMO, "--tests", "tg32", "--repetitions", "1", "--ffn-resident", "100%", "--json")
    (alone,), (four,) = (json.loads(shell.call(*words, *more).out) for more in ((), ("--batch", "4")))
    assert (alone["batch"], alone["tokens"], four["batch"], four["tokens"]) == (1, 32, 4, 4 * 32)
    # A step's matrices serve all texts: per token much less is read. A little is read for fewer, while others begin.
    assert alone["dram_bytes_per_token"] / 4 < four["dram_bytes_per_token"] < 0.6 * alone["dram_bytes_per_token"]
    assert four["planned"]["dram_bytes_per_token"] == pytest.approx(four["dram_bytes_per_token"], rel=0.2)
    assert four["planned"]["dram_bytes_per_token"] < alone["planned"]["dram_bytes_per_token"]


@pytest.mark.nightly
def test_what_bench_needs_for_itself_does_not_count_in_the_runs_memory(shell: Shell) -> None:
    """Its prompts were made in the parent of all processes: 33 MiB more than the same run takes otherwise."""
    words = ("--workers", "2", "--sequences", "1", "--ffn-resident", "50%")
    (row,) = json.loads(shell.call("bench", DEMO, "--tests", "tg32", "--repetitions", "1", *words, "--json").out)
    assert row["peak_memory_bytes"] <= row["planned"]["peak_memory_bytes"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--tests", "tg100000"), "--tests tg100000: takes 100005 tokens, the context is"),
        (("--repetitions", "0"), "--repetitions 0: between"),
        (("--workload", "default"), "--workload default: "),
        (("--batch", "0"), "--batch 0: between"),
        (("--batch", "4", "--tests", "pp32"), "--batch 4 and --tests pp32: prompts are computed one after the other"),
        (("--batch", "4", "--tests", "tg7"), "--batch 4 and --tests tg7: too short; take tg8 or more"),
        (("--batch", "4", "--sequences", "2"), "--batch 4: the plan has 2 sequence(s)"),
        (("--compare", "nothing.json"), "nothing.json: cannot be read"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(shell: Shell, words: tuple[str, ...], told: str) -> None:
    assert told in shell.refused("bench", DEMO, *words)


def test_trace_writes_what_a_run_does(shell: Shell, tmp_path: Path) -> None:
    with shell.up(DEMO, "--ffn-resident", "50%") as run:
        nothing = shell.refused("trace", "--run", run.path, beside=True)
        assert "no step was computed yet; ask it" in nothing
        run.ask("def f(", max_tokens=8)
        events_file, picture = tmp_path / "t.json", tmp_path / "t.svg"
        done = shell.call("trace", "--run", run.path, "--output", events_file, "--picture", picture)
        assert done.code == 0, done.errors
        drawn, written = done.out.splitlines()
        assert drawn == f"{picture}: what each process did in the last steps; open it with a browser"
        assert re.fullmatch(rf"{events_file}: [\d,]+ spans over [\d.]+ s; open it at https://ui.perfetto.dev", written)
        with (
            attach(run.path) as client,
            RunTrace.open(RunDirectory(run.path).read(), client.status().processes) as trace,
        ):
            rows = trace.take()
            assert not any(row.spans for row in trace.take() if row.role == "coordinator")  # each is given once
    ElementTree.parse(picture)
    events = json.loads(events_file.read_text())["traceEvents"]
    assert {"send", "await", "sample", "tell"} <= {event["name"] for event in events}
    for row in rows:
        assert all(earlier.end_ns <= later.end_ns for earlier, later in pairwise(row.spans)), row.name
        assert all(span.start_ns <= span.end_ns for span in row.spans)
    (coordinator,) = (row for row in rows if row.role == "coordinator")
    answered = [span for span in coordinator.spans if span.kind == NUMBER["await"]]
    assert [span.step for span in answered] == sorted({span.step for span in answered})
    assert len(answered) == 8  # one prefill, whose token is the first, and seven decode steps


def test_trace_of_some_seconds_has_what_happened_in_them(shell: Shell, tmp_path: Path) -> None:
    with shell.up(DEMO) as run:
        run.ask("def f(", max_tokens=8)
        nothing = shell.refused("trace", "--run", run.path, "--seconds", "0.1", beside=True)
        assert "no step was computed in these 0.1 s; ask it something meanwhile" in nothing
        before = run.status().steps
        file = tmp_path / "t.json"
        watching = shell.start("trace", "--run", run.path, "--seconds", "1", "--output", file)
        while watching.poll() is None:
            run.ask("def f(", max_tokens=8)
        _, errors = watching.communicate()
        assert watching.returncode == 0, errors
    steps = {event["args"].get("step", 0) for event in json.loads(file.read_text())["traceEvents"]}
    assert steps - {0}
    assert min(steps - {0}) > before


@pytest.mark.nightly
def test_two_implementations_are_compared_in_one_run(shell: Shell) -> None:
    firing = "decode=neuronpipe.services.examples.firing:FiringLog"
    words = ("bench", "--tests", "tg8", "--repetitions", "2", "--workers", "1", "--versus", firing)
    rows = json.loads(shell.call(*words, "--json").out)
    assert [row["use"] for row in rows] == ["our own", firing]
    assert all(row["test"] == "tg8" and row["repetitions"] == 2 and row["tokens_per_s"] > 0 for row in rows)
    ratio = rows[0]["versus"]
    assert ratio["use"] == firing
    assert 0 < ratio["tokens_per_s_ratio_least"] <= ratio["tokens_per_s_ratio"] <= ratio["tokens_per_s_ratio_most"]
    assert "versus" not in rows[1]


def test_only_roles_that_can_be_replaced_are_compared(shell: Shell) -> None:
    said = shell.refused("bench", "--versus", "coordinator=a:B")
    assert "coordinator cannot be replaced" in said

"""`report`: its document and Markdown from a planted measurement, and the reports that users sent."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.report import facts
from neuronpipe.launch.report.document import MAX_REPORT_BYTES, Report, parse_report, read_report
from neuronpipe.launch.report.facts import kernel_number, report_of, reported_device
from neuronpipe.launch.report.markdown import render
from neuronpipe.plans.device.cores import Core
from neuronpipe.plans.device.device import Device, FlashCurve
from neuronpipe.plans.measure.cached_profile import CachedMeasurement
from neuronpipe.plans.measure.probe import CacheState
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.schema import to_json

from tests.unit.test_bench_planned import device, made
from tests.unit.test_held_plan import CURVE

BENCH = Path(__file__).parents[1] / "bench"
SPEC = importlib.util.spec_from_file_location("community", BENCH / "community.py")
assert SPEC is not None
assert SPEC.loader is not None
community = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(community)

NOW = 1_795_000_000.0  # 2026-11-18
DAY_S = 86_400
CORES = (Core(id=0, capacity=1024, kind="big"), Core(id=1, capacity=300, kind="little", allowed=False))
PROMPT: dict[str, Any] = {
    "test": "pp512", "mode": "exact", "ffn_resident": 0.5, "workers": 2, "repetitions": 3, "model": "bamboo",
    "model_bytes": 4 << 30, "quantization": "q4", "tokens_per_s": 50.0, "tokens_per_s_least": 48.0,
    "tokens_per_s_most": 52.5, "prefill_tokens_per_s": 50.0, "first_token_ms": 10_240.0,
    "tbt_ms": {"p50": None, "p90": None, "p99": None}, "tbt_most_ms": None, "miss_rate": 0.25,
    "flash_bytes_per_token": 3 << 20, "flash_reads_per_token": 12.5, "exposed_io_share": 0.125,
    "dram_bytes_per_token": 1 << 20, "peak_memory_bytes": 3 << 30,
    "planned": {"tokens_per_s": 55.0, "prefill_tokens_per_s": 55.0, "peak_memory_bytes": 3 << 30},
}  # fmt: skip
DECODE: dict[str, Any] = PROMPT | {
    "test": "tg128", "tokens_per_s": 11.07, "tokens_per_s_least": 10.5, "tokens_per_s_most": 11.5,
    "prefill_tokens_per_s": None, "tbt_ms": {"p50": 87.0, "p90": 120.0, "p99": 190.25}, "tbt_most_ms": 201.5,
    "first_token_ms": 95.5, "planned": {"tokens_per_s": 12.177, "miss_rate": 0.2, "flash_bytes_per_token": 2 << 20},
}  # fmt: skip


def android(name: str) -> str:
    return {"ro.product.model": "CPH2581", "ro.soc.model": "SM8650"}.get(name, "")


def cached(flash: FlashCurve | None, taken_at: float) -> CacheState:
    entry = None if flash is None else CachedMeasurement(measured=flash, taken_at=taken_at)
    return CacheState(profile=None, why_not=None, memory=None, flash=entry)


def planted(name: str = "", release: str = "6.1.57-android14", **changes: Any) -> Report:
    machine: Device = dataclasses.replace(device(), cores=CORES, processor="Kryo", cpu_quota=1.5)
    state = cached(CURVE, NOW - 3 * DAY_S)
    reported = reported_device(machine, state, name=name, release=release, android=android, now=NOW)
    rows = [row | changes for row in (PROMPT, DECODE)]
    return report_of(rows, made(), reported, program=("0.1.0", "fd9d04b6f7a2"), now=NOW)


def as_bytes(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode()


def test_the_document_has_the_device_the_plan_and_the_figures_and_reads_back() -> None:
    report = planted()
    values = to_json(report)
    assert parse_report(as_bytes(values), "r.json") == report
    assert (values["form"], values["date"], values["version"]) == (1, "2026-11-18", "0.1.0")
    assert values["device"]["name"] == "CPH2581"
    assert values["device"]["chip"] == "SM8650"
    assert (values["device"]["cores"], values["device"]["allowed_cores"], values["device"]["big_cores"]) == (2, 1, 1)
    assert values["model"] == {"name": "bamboo", "bytes": 4 << 30, "quantization": "q4"}
    assert values["plan"]["context_tokens"] == made().compute.context_tokens
    prompt, decode = values["tests"]
    assert (prompt["name"], prompt["measured"]["first_token_ms"], prompt["p50_ms"]) == ("pp512", 10_240.0, None)
    assert (decode["p50_ms"], decode["p90_ms"], decode["p99_ms"], decode["longest_ms"]) == (87.0, 120.0, 190.25, 201.5)
    assert decode["planned"] == DECODE["planned"]


def test_the_markdown_shows_measured_beside_planned() -> None:
    lines = render(planted(name="OnePlus 12")).splitlines()
    assert lines[0] == "### neuronpipe 0.1.0 (fd9d04b6f7a2), 2026-11-18"
    for line in (
        "| device | OnePlus 12, SM8650 |",
        "| processor | Kryo, x86\\_64, kernels for avx2 |",
        "| cores | 1 big; 1 of 2 allowed, quota 1.5 cores |",
        "| kernel | Linux 6.1.57 |",
        "| model | bamboo, 4.00 GiB on flash, q4 |",
        "| measured | pp512 | tg128 |",
        "| tokens/s | 50.0 | 11.1 |",
        "| slowest .. fastest | 48.0 .. 52.5 | 10.5 .. 11.5 |",
        "| time between tokens, ms, p50 | - | 87.00 |",
        "| p99 | - | 190.25 |",
        "| miss rate | 25.0% | 25.0% |",
        "| flash read per token | 3.0 MiB | 3.0 MiB |",
        "| tokens/s | tg128 | 11.1 | 12.2 | +10% |",
        "| miss rate | tg128 | 25.0% | 20.0% | -20% |",
    ):
        assert line in lines, line


def test_the_disks_speed_comes_with_who_measured_it_and_when() -> None:
    def flash(state: CacheState) -> Any:
        return reported_device(device(), state, name="", release="6", android=android, now=NOW).flash

    at_a_start = flash(cached(CURVE, NOW - 3 * DAY_S))
    assert (at_a_start.measured_by, at_a_start.measured_on) == ("start", "2026-11-15")
    assert [read.bytes_per_s for read in at_a_start.reads] == [
        round(CURVE.bytes_per_s(read.request_bytes, read.depth)) for read in at_a_start.reads
    ]
    now = flash(cached(dataclasses.replace(CURVE, busy=0.5), NOW - 3 * DAY_S))  # not the one that the device has
    assert (now.measured_by, now.measured_on) == ("start", "2026-11-18")
    nothing = reported_device(device(None), cached(None, 0.0), name="", release="6", android=android, now=NOW)
    assert nothing.flash is None


@pytest.mark.parametrize(
    ("release", "number"),
    [
        ("6.1.0-13-amd64", "6.1.0"),
        ("5.15.153.1-microsoft", "5.15.153"),
        ("5.10.149-android13-4-g05231a35ff43", "5.10.149"),
        ("alice-1.2", ""),
        ("", ""),
    ],
)
def test_of_a_kernels_release_only_its_number_is_reported(release: str, number: str) -> None:
    assert kernel_number(release) == number


def test_no_field_of_uname_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = ("Linux", "zebulon-laptop", "6.1.57-zebulon", "#1 SMP zebulon@zebulon-laptop", "x86_64")
    monkeypatch.setattr(facts.os, "uname", lambda: os.uname_result(fields))
    report = planted(release=facts.kernel_release(), model="/home/zebulon/private/bamboo")
    assert (report.device.kernel, report.model.name) == ("6.1.57", "bamboo")
    assert "zebulon" not in render(report) + json.dumps(to_json(report))


def test_text_of_a_machine_is_no_markup_and_has_a_bounded_length() -> None:
    report = planted(name="a|b [c](http://d)\n" + "x" * 500, model="/home/alice/secret/*m*")
    shown = render(report)
    assert "a\\|b \\[c\\](http://d)x" in shown
    assert "\\*m\\*" in shown
    assert "alice" not in shown
    parse_report(as_bytes(to_json(report)), "r.json")


def test_the_commit_is_that_of_the_checkout_and_says_when_files_were_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(facts, "CHECKOUT", tmp_path)
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert facts.this_program()[1] == commit[:12]
    (tmp_path / "file").write_text("2")
    assert facts.this_program()[1] == f"{commit[:12]}-dirty"


VALUES = to_json(planted())


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("form",), 2, "field 'form': expected 1"),
        (("host",), "x", "host"),
        (("date",), "18.11.2026", "field 'date': expected a day"),
        (("tests",), [], "field 'tests': expected 1 to 16 items"),
        (("device", "name"), "x" * 65, "field 'device.name': expected at most 64"),
        (("device", "kernel"), "6.1\x1b[2J", "field 'device.kernel'"),
        (("device", "flash", "engine"), "mmap", "field 'device.flash.engine'"),
        (("plan", "resident_share"), 1.5, "field 'plan.resident_share'"),
        (("plan", "workers"), True, "field 'plan.workers'"),
        (("model", "bytes"), -1, "field 'model.bytes'"),
    ],
)
def test_a_report_that_is_none_is_refused_with_its_field(path: tuple[str, ...], value: Any, complaint: str) -> None:
    values = copy.deepcopy(VALUES)
    inner = values
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(UserError, match=r"^r\.json: ") as refused:
        parse_report(as_bytes(values), "r.json")
    assert complaint in str(refused.value)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_bytes(as_bytes(VALUES) + b" " * MAX_REPORT_BYTES)
    with pytest.raises(UserError, match="larger than the"):
        read_report(file)


def test_every_report_that_was_sent_has_the_form_and_the_page_is_current() -> None:
    assert (BENCH / "results" / "community" / "README.md").read_text(encoding="utf-8") == community.page()


def test_the_page_has_a_line_for_each_report_or_says_that_there_is_none(tmp_path: Path) -> None:
    assert community.page(tmp_path).endswith("None has been sent yet.\n")
    (tmp_path / "oneplus-12-bamboo.json").write_bytes(as_bytes(VALUES))
    (line,) = (line for line in community.page(tmp_path).splitlines() if "oneplus-12-bamboo.json)" in line)
    assert line.startswith("| [CPH2581, SM8650, Kryo, avx2](oneplus-12-bamboo.json) | 16.00 GiB | bamboo, q4 | exact, ")
    assert "| 50.0 | 11.1 | fd9d04b6f7a2 | 2026-11-18 |" in line


@pytest.mark.parametrize("name", ["Phone.json", "a b.json", "phone.txt", "a](x).json"])
def test_a_file_with_another_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(as_bytes(VALUES))
    with pytest.raises(ValueError, match="name it as"):
        community.page(tmp_path)

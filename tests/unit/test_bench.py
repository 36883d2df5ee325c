"""The parts of `bench` that need no run: tests by name, prompts, bytes, energy, comparison."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.launch.bench.cases import LEAD_TOKENS, Case, Prompts, default_cases, parse_cases
from neuronpipe.launch.bench.energy import EnergyMeter
from neuronpipe.launch.bench.measure import miss_rate, model_name
from neuronpipe.launch.bench.repetition import Repetition, SequenceTimes, record
from neuronpipe.launch.bench.report import compare, read_rows
from neuronpipe.launch.bench.traffic import traffic
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Finished, Token

from tests.service_job import make_job


def test_tests_are_named_by_what_they_count() -> None:
    prefill, decode, both = parse_cases("pp512,tg128, pp64+tg16")
    assert (prefill.prompt_tokens, prefill.max_tokens, prefill.context_tokens) == (512, 1, 512)
    assert (decode.prompt_tokens, decode.max_tokens, decode.context_tokens) == (LEAD_TOKENS, 129, LEAD_TOKENS + 129)
    assert (both.prefill_tokens, both.decode_tokens, both.context_tokens) == (64, 16, 81)


def test_a_package_in_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_name(Path()) == model_name(tmp_path) == tmp_path.name
    assert model_name(Path("..")) == tmp_path.parent.name
    assert model_name(DEMO) == "demo"


@pytest.mark.parametrize("text", ["", "pp", "pp0", "tg-1", "pp8tg8", "+tg8", "pp8+", "tg8+pp8", "pp8,,tg8", "xx8"])
def test_a_test_without_meaning_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a test; write pp512, tg128 or"):
        parse_cases(text)


@pytest.mark.parametrize("context_tokens", [2, 5, 256, 512, 4096])
def test_the_default_tests_fit_any_context(context_tokens: int) -> None:
    for case in default_cases(context_tokens):
        assert case.context_tokens <= max(context_tokens, LEAD_TOKENS + 2)


def test_every_repetition_reads_another_stretch_of_the_text() -> None:
    prompts = Prompts(Package.open(DEMO), None)
    taken = [prompts.take(number, 16, 48) for number in range(4)]
    assert all(len(prompt) == 16 for prompt in taken)
    assert len(set(taken)) == 4
    assert prompts.take(1, 16, 48) == taken[1]


def test_no_more_of_a_corpus_is_kept_than_all_texts_take_and_they_are_the_same() -> None:
    everything, as_asked = Prompts(Package.open(DEMO), None), Prompts(Package.open(DEMO), None, 4 * 48)
    for number in range(4):
        assert as_asked.take(number, 16, 48) == everything.take(number, 16, 48)
    assert as_asked.take(4, 16, 48) == as_asked.take(0, 16, 48) != everything.take(4, 16, 48)


def test_a_preset_of_a_package_without_workload_is_refused() -> None:
    with pytest.raises(UserError, match=r"--workload default: .* has no workload"):
        Prompts(Package.open(DEMO), "default")


def test_bytes_of_a_step_are_its_matrices_and_the_rows_that_fired(
    converted: Callable[..., Package], tmp_path: Path
) -> None:
    package = converted("relu2", "q8")
    job, memory = make_job("coordinator", package, tmp_path)
    del memory
    model = package.manifest.model
    row_bytes = model.width + 2 * model.width // 32
    still = traffic(package, job.plan, {"steps": 2.0}, 0.0)
    assert 0 < still.sequential_bytes / 2 <= package.manifest.files["fixed.safetensors"].bytes
    assert still.pieces_bytes == still.flash_bytes == 0
    moved = traffic(
        package, job.plan, {"steps": 2.0, "gate_rows": 7.0, "up_rows": 3.0, "down_rows": 2.0, "read_bytes": 4096.0}, 5.0
    )
    kv_bytes = 5 * model.layers * model.key_heads * 2 * model.head_width * 2
    assert moved.sequential_bytes - still.sequential_bytes == 7 * row_bytes + kv_bytes
    assert moved.pieces_bytes == 5 * row_bytes
    assert moved.flash_bytes == 4096
    prefill = traffic(package, job.plan, {"steps": 1.0, "up_rows": 1e9}, 0.0)  # each token counts a row once
    assert prefill.pieces_bytes == model.layers * model.neurons * row_bytes


def test_energy_is_the_difference_of_the_packages_counters(tmp_path: Path) -> None:
    zones = {"intel-rapl:0": 10_000_000, "intel-rapl:0:0": 5_000_000, "intel-rapl:1": 900}
    for name, value in zones.items():
        (tmp_path / "cap" / name).mkdir(parents=True)
        (tmp_path / "cap" / name / "energy_uj").write_text(f"{value}\n")
        (tmp_path / "cap" / name / "max_energy_range_uj").write_text("1000\n")
    meter = EnergyMeter(tmp_path / "cap", tmp_path / "none")
    (tmp_path / "cap" / "intel-rapl:0" / "energy_uj").write_text("12500000")
    (tmp_path / "cap" / "intel-rapl:1" / "energy_uj").write_text("400")  # it began again at zero
    assert meter.joules() == pytest.approx(2.5 + 500e-6)


def test_energy_is_absent_where_nothing_tells_it(tmp_path: Path) -> None:
    (tmp_path / "BAT0").mkdir()
    (tmp_path / "BAT0" / "status").write_text("Full\n")
    (tmp_path / "BAT0" / "power_now").write_text("5000000\n")
    assert EnergyMeter(tmp_path / "none", tmp_path).joules() is None


ROW = {
    "test": "tg8",
    "mode": "exact",
    "tokens_per_s": 10.0,
    "flash_bytes_per_token": 100,
    "peak_memory_bytes": 1,
    "tbt_ms": {"p50": 1.0, "p99": 2.0},
}


def test_a_comparison_is_of_the_same_test_and_mode(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(json.dumps([ROW, {**ROW, "mode": "predicted", "tokens_per_s": 1.0}]))
    new = {**ROW, "batch": 1}  # which rows saved by an earlier version do not have
    shown = compare([{**new, "tokens_per_s": 25.0}], read_rows(file), file)
    assert shown.splitlines()[-1].split() == ["tg8", "exact", "2.50", "1.00", "1.00", "1.00", "1.00"]
    for other in ({"test": "tg9"}, {"batch": 4}):
        assert "has none of these tests" in compare([new | other], read_rows(file), file)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "not JSON"),
        ("{}", "expected a list of rows"),
        (json.dumps([{**ROW, "test": 5}]), "row 0: field 'test'"),
        (json.dumps([ROW, {**ROW, "tokens_per_s": "fast"}]), "row 1: field 'tokens_per_s'"),
        (json.dumps([{**ROW, "tbt_ms": None}]), "row 0: field 'tbt_ms'"),
    ],
)
def test_a_file_to_compare_with_that_is_none_is_named(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "old.json"
    file.write_text(content)
    with pytest.raises(UserError) as refused:
        read_rows(file)
    assert str(refused.value).startswith(f"{file}: ")
    assert told in str(refused.value)


def test_a_case_of_one_token_is_a_case() -> None:
    assert parse_cases("tg1") == (Case("tg1", 0, 1),)


def token(request: str, index: int, ms: float) -> Token:
    return Token(request=request, index=index, token=1, text="", ms=ms)


def finished(request: str) -> Finished:
    return Finished(
        request=request, reason="length", text="", tokens=3, prompt_tokens=4, ttft_ms=1.0, tokens_per_s=1.0,
        tbt_ms={}, memory={}, flash={}, prefill={}, decode={}, plan="p", mode="exact",
    )  # fmt: skip


def test_only_what_texts_decode_together_counts_as_their_speed() -> None:
    texts = {"a": SequenceTimes(), "b": SequenceTimes()}
    for message in (
        token("a", 0, 5.0), token("a", 1, 1.0), token("b", 0, 9.0), token("a", 2, 30.0),
        token("b", 1, 4.0), token("a", 3, 4.0), token("a", 3, 99.0), token("c", 0, 1.0),
        finished("a"), token("b", 2, 2.0), finished("b"),
    ):  # fmt: skip
        record(texts, message)
    # The third token of `a` came after a prompt of `b`, and the last of `b` was computed alone.
    assert (texts["a"].gaps_ms, texts["a"].counted_ms) == ([1.0, 30.0, 4.0], [4.0])
    assert (texts["b"].gaps_ms, texts["b"].counted_ms) == ([4.0, 2.0], [4.0])
    together = Repetition(tuple(texts.values()))
    assert together.tokens_per_s(Case("tg3", 0, 3)) == 2 * 1000 / 4.0
    assert (together.first_ms, together.decoded_tokens) == (5.0, 5)


def test_every_gap_of_a_single_text_counts() -> None:
    texts = {"a": SequenceTimes()}
    for message in (token("a", 0, 5.0), token("a", 1, 1.0), token("a", 2, 3.0), finished("a")):
        record(texts, message)
    alone = Repetition(tuple(texts.values()))
    assert alone.gaps_ms == [1.0, 3.0]
    assert alone.tokens_per_s(Case("tg2", 0, 2)) == 1000 * 2 / 4.0
    assert alone.tokens_per_s(Case("pp4+tg2", 4, 2)) == 1000 * 6 / 9.0


def test_a_miss_is_what_was_not_there_when_it_was_first_looked_for() -> None:
    cost = {"foreseen": 80.0, "foreseen_missed": 20.0, "trigger_clusters": 100.0, "trigger_missed": 3.0}
    cost |= {"value_clusters": 60.0, "value_missed": 15.0}
    assert miss_rate(cost, whole=True) == 0.25
    assert miss_rate(cost, whole=False) == (0.25 * 100 + 15) / 160
    unforeseen = {name: value for name, value in cost.items() if not name.startswith("foreseen")}
    assert miss_rate(unforeseen, whole=False) == (3 + 15) / 160
    assert miss_rate({}, whole=False) == 0.0

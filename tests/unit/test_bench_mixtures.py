"""tests/bench/mixtures.py: the bound, its table, going on after an interruption. No run is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from neuronpipe.plans.lab.shapes.models import SHAPES

from tests.bench import mixtures
from tests.bench.mixtures import Case, Speeds
from tests.bench.planned import read_lines

ROW: dict[str, Any] = {
    "tokens_per_s": 5.0, "bound_tokens_per_s": 10.0, "binding": "flash", "miss_rate": 0.25, "prompt_tokens_per_s": 40.0,
    "flash_bytes_per_token": 100e6, "dram_bytes_per_token": 1e9, "peak_memory_bytes": 7 << 30,
    "tbt_ms": {"p50": 100.0, "p99": 150.0},
}  # fmt: skip


def test_the_bound_is_the_slower_of_both_at_its_best_speed() -> None:
    slow, fast = Speeds(10e9, 1e9), Speeds(20e9, 0.5e9)
    assert mixtures.bound(ROW, (slow, fast)) == (pytest.approx(10), "flash")
    assert mixtures.bound(ROW | {"flash_bytes_per_token": 0.0}, (slow, fast)) == (pytest.approx(20), "DRAM")


def test_every_shape_of_the_table_can_be_synthesized() -> None:
    assert {case.shape for case in mixtures.CASES} <= set(SHAPES)


def test_it_goes_on_after_an_interruption_and_keeps_what_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, measured = Case("qwen3-30b-a3b", {8: 12, 4: 7}), []

    def ours(package: Path, case: Case, limit_bytes: int) -> list[dict[str, Any]]:
        measured.append(limit_bytes)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return [ROW]

    def made(shape: str, path: Path, *, gguf: bool = False) -> Path:
        path.mkdir(exist_ok=True)
        return path

    monkeypatch.setattr(mixtures, "measure_ours", ours)
    monkeypatch.setattr(mixtures, "synthesized", made)

    def measure() -> None:
        mixtures.measure([case], [], rounds=2, folder=tmp_path, program=None, clean=True)

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert (tmp_path / case.shape).exists()
    measure()
    assert measured == [8 * 10**9, 8 * 10**9, 4 * 10**9, 4 * 10**9, 4 * 10**9]
    assert (tmp_path / case.shape).exists(), "it was there before the second start"
    table = mixtures.markdown(read_lines(tmp_path / "mixtures.jsonl"))
    assert "| qwen3-30b-a3b, 8 GB | neuronpipe | 5 (5 to 5) | 12 | 10, flash | 50% |" in table
    assert table.index("8 GB") < table.index("4 GB")


def test_what_was_made_for_the_rows_is_removed_after_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(shape: str, path: Path, *, gguf: bool = False) -> Path:
        path.touch() if gguf else path.mkdir(exist_ok=True)
        return path

    monkeypatch.setattr(mixtures, "measure_ours", lambda *_: [ROW])
    monkeypatch.setattr(mixtures, "measure_llama", lambda *_: [ROW])
    monkeypatch.setattr(mixtures, "synthesized", made)
    case = Case("smallthinker-4b", {1: 0})
    mixtures.measure([case], [], rounds=1, folder=tmp_path, program=tmp_path / "llama-bench", clean=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mixtures.jsonl"]
    assert "| smallthinker-4b, 1 GB | llama.cpp |" in mixtures.markdown(read_lines(tmp_path / "mixtures.jsonl"))


def test_a_refused_row_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixtures, "measure_ours", lambda *_: "the least is 3 GB")
    monkeypatch.setattr(mixtures, "synthesized", lambda shape, path, gguf=False: path)
    mixtures.measure([Case("smallthinker-4b", {1: 0})], [1], rounds=1, folder=tmp_path, program=None, clean=False)
    table = mixtures.markdown(read_lines(tmp_path / "mixtures.jsonl"))
    assert "| smallthinker-4b, 1 GB | neuronpipe | refused |" in table

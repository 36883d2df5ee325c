"""tests/bench/catalog.py: every model has a shape; errors of the table; going on after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.plans.lab.synth.shapes import SHAPES
from neuronpipe.plans.pull.catalog import catalog
from neuronpipe.protocol.errors import UserError

from tests.bench import catalog as bench_catalog
from tests.bench.planned import read_lines

EXPECTED: dict[str, Any] = {
    "name": "qwen3-4b", "tokens_per_s": 12.0, "tokens_per_s_range": {"low": 10.0, "high": 14.0}, "first_token_s": 15.0,
    "package_bytes": 2_500_000_000,
}  # fmt: skip
DECODE: dict[str, Any] = {"tokens_per_s": 10.0, "model_bytes": 2_800_000_000}
PROMPT: dict[str, Any] = {"prefill_tokens_per_s": 25.6}


def test_every_model_of_the_catalog_has_a_shape() -> None:
    assert {bench_catalog.SYNTH_NAMES.get(name, name) for name in catalog()} <= set(SHAPES)


def test_errors_of_the_table_are_relative_to_what_was_measured() -> None:
    row = {**DECODE, "prompt": PROMPT, "expected": EXPECTED}
    table = bench_catalog.markdown([{"asked": {"model": "qwen3-4b"}, "row": row, "refused": None}])
    assert "| qwen3-4b | 2.5, is 2.8 | 12 (10 to 14) | 10 | +20% | 15 | 20 | -25% |" in table
    assert "2 of 2 within 25%." in table


def test_a_model_that_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"models": [EXPECTED], "memory_bytes": 8 << 30, "context_tokens": 4096, "mode": "exact"}
    (tmp_path / "models.json").write_text(json.dumps(document))
    measured: list[Path] = []

    def bench(package: Path, words: tuple[str, ...]) -> list[dict[str, Any]]:
        measured.append(package)
        return [PROMPT, DECODE]

    monkeypatch.setattr(bench_catalog, "bench", bench)
    monkeypatch.setattr(bench_catalog, "made_package", lambda model, folder: folder / model.name)
    models = bench_catalog.chosen_models("qwen3-4b,qwen3-8b")
    for _ in range(2):
        bench_catalog.measure(models, tmp_path)
    assert measured == [tmp_path / "qwen3-4b", tmp_path / "qwen3-8b"]
    assert [line["row"]["expected"] for line in read_lines(tmp_path / "catalog.jsonl")] == [EXPECTED, None]


def test_a_name_that_the_catalog_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="--models: gpt-5 is none of"):
        bench_catalog.chosen_models("gpt-5")

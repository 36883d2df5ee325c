"""The index of measured figures is generated and current, and shows the newest value of each figure."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
SPEC = importlib.util.spec_from_file_location("results_index", BENCH / "results_index.py")
assert SPEC is not None
assert SPEC.loader is not None
results_index = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(results_index)


def row(value: str, date: str, **changes: str) -> str:
    return json.dumps({"figure": "decode", "value": value, "unit": "tokens/s", "date": date, "file": "a.md"} | changes)


def test_the_index_is_current() -> None:
    assert (BENCH / "results" / "README.md").read_text(encoding="utf-8") == results_index.index()


def test_the_newest_date_counts_and_of_equal_dates_the_last(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A\n")
    (tmp_path / "b.md").write_text("# B, without a figure\n")
    lines = [row("1", "2026-11-20"), row("3", "2026-11-22"), row("2", "2026-11-21"), row("4", "2026-11-22")]
    (tmp_path / "figures.jsonl").write_text("\n".join(lines) + "\n")
    assert [figure["value"] for figure in results_index.figures(tmp_path)] == ["4"]
    assert "[4 tokens/s](a.md) | 2026-11-22" in results_index.index(tmp_path)
    assert "- [B, without a figure](b.md)" in results_index.index(tmp_path)


@pytest.mark.parametrize("line", [row("1", "2026-11-20", file="c.md"), row("1", "2026-11-20", machine="x")])
def test_a_row_without_its_file_or_with_other_fields_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.md").write_text("# A\n")
    (tmp_path / "figures.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"figures\.jsonl, line 1"):
        results_index.figures(tmp_path)

"""The grid of tests/bench/planned.py: its cells, going on after an interruption, its table. No run is started."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.protocol.errors import UserError

from tests.bench import planned

ASKED = {"tests": "tg8", "repetitions": 1, "context": None, "workload": None, "package": "p"}
ROW: dict[str, Any] = {
    "tokens_per_s": 10.0, "miss_rate": 0.0, "flash_bytes_per_token": 0.0, "peak_memory_bytes": 100 << 20,
    "planned": {
        "tokens_per_s": 10.5, "miss_rate": 0.0, "flash_bytes_per_token": 1 << 20, "peak_memory_bytes": 99 << 20,
    },
    "error": {"tokens_per_s": 0.05, "miss_rate": 0.0, "flash_bytes_per_token": None, "peak_memory_bytes": -0.01},
}  # fmt: skip


def wanted(subset: str = "workers=2,batch=1,mode=exact") -> list[planned.Asked]:
    return [cell | ASKED for cell in planned.cells(planned.parse_subset(subset), predictor=True)]


def test_the_grid_is_five_shares_two_modes_two_counts_of_workers_and_two_batches() -> None:
    assert len(planned.cells({}, predictor=True)) == 5 * 2 * 2 * 2
    exact = planned.cells({}, predictor=False)
    assert len(exact) == 5 * 2 * 2
    assert {cell["mode"] for cell in exact} == {"exact"}
    some = planned.cells(planned.parse_subset("resident=50%+75,mode=exact, workers=1"), predictor=True)
    assert {cell["resident"] for cell in some} == {50, 75}
    assert len(some) == 4


@pytest.mark.parametrize("text", ["", "resident", "resident=55", "cores=2", "mode=exact+fast", "batch=1,x"])
def test_a_subset_outside_the_grid_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        planned.parse_subset(text)


def test_an_interrupted_grid_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = tmp_path / "rows.jsonl", wanted()
    measured: list[tuple[str, ...]] = []

    def bench(package: Path, words: tuple[str, ...]) -> list[dict[str, Any]] | str:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(words)
        return "no memory" if len(measured) == 2 else [ROW]

    monkeypatch.setattr(planned, "bench", bench)
    with pytest.raises(KeyboardInterrupt):
        planned.measure(tmp_path, file, asked)
    kept = planned.read_lines(file)
    assert [line["refused"] for line in kept] == [None, "no memory"]
    with file.open("a") as lines:
        lines.write('{"asked": {"tests"')  # cut off in the middle
    assert planned.read_lines(file) == kept

    again: list[tuple[str, ...]] = []

    def bench_to_the_end(package: Path, words: tuple[str, ...]) -> list[dict[str, Any]]:
        again.append(words)
        return [ROW]

    monkeypatch.setattr(planned, "bench", bench_to_the_end)
    planned.measure(tmp_path, file, asked)
    assert len(again) == len(asked) - 1  # what was refused is asked once more
    assert measured[0] not in again
    assert len(planned.read_lines(file)) == len(asked) + 1
    planned.measure(tmp_path, file, [one | {"tests": "tg16"} for one in asked])
    assert len(again) == 2 * len(asked) - 1  # another test is another cell


def test_a_cell_that_reads_flash_says_how_fast_the_disk_was_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, asked = tmp_path / "rows.jsonl", wanted("workers=2,batch=1,mode=exact,resident=50+100+75")
    speeds = iter([100.0, 300.0, 200.0])
    monkeypatch.setattr(planned, "bench", lambda package, words: [dict(ROW)])
    monkeypatch.setattr(planned, "measured_flash_mb_per_s", lambda package: next(speeds))
    planned.measure(tmp_path, file, asked, refresh=True)
    lines = planned.read_lines(file)
    assert [line["row"].get("flash_mb_per_s") for line in lines] == [[100, 300], None, [300, 200]]
    assert "| 100, 300 |" in planned.markdown(lines)


def test_a_file_that_is_no_grid_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("[1]\n{}\n")
    with pytest.raises(UserError, match="line 1: not a line that this program wrote"):
        planned.read_lines(file)


def test_the_table_has_a_line_for_each_cell_and_the_last_answer_counts(tmp_path: Path) -> None:
    asked = wanted("workers=2,batch=1,mode=exact,resident=50+40+75")
    lines: list[dict[str, Any]] = [{"asked": asked[0], "row": None, "refused": "no"}]
    lines += [{"asked": one, "row": ROW, "refused": None} for one in asked[:2]]
    lines += [{"asked": asked[2], "row": None, "refused": "the least is 45 %"}]
    shown = planned.markdown(lines).splitlines()
    assert [line.split(" | ")[0] for line in shown[2:5]] == ["| 40 %", "| 50 %", "| 75 %"]
    assert shown[2].count("refused") == 4
    assert "10.5 / 10.0 | +5% | 0.0% / 0.0% | +0% | 1.0 MiB / 0 B | - | 99.0 MiB / 100.0 MiB | -1% |" in shown[3]
    assert shown[3].count("|") == shown[0].count("|") == shown[1].count("|")
    assert "- tokens/s: 2 of 2 within 10 %; error's size: median 5%, at most 5%" in shown
    assert "- flash a token: no errors to sum up" in shown
    assert any(line.startswith("- peak memory: 0 of 2 ") for line in shown)  # more was measured than planned
    assert shown[-1].endswith("the least is 45 %")

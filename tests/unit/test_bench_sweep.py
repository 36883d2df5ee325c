"""tests/bench/sweep.py: what is tried, going on after an interruption, who comes into the finals, both tables. No run
is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.plans.planner.candidates import ANSWER

from tests.bench import planned, sweep
from tests.unit.test_planner import MIB, predicted
from tests.unit.test_search import LARGE, search

SHARED = {"case": "memory=400MiB", "package": "p", "quality": None, "context": None, "tests": "tg8", "workload": None}


def knobs(**turned: Any) -> dict[str, Any]:
    return {"mode": "exact", "workers": 2, "bundle": True, "chunk": 512, "depth": 32, "chosen": False} | turned


def line(name: dict[str, Any], tokens_per_s: float, *, case: str = "memory=400MiB", **asked: Any) -> dict[str, Any]:
    of_cell = SHARED | {"case": case} | name | {"final": False, "round": 0} | asked
    return {"asked": of_cell, "row": {"tokens_per_s": tokens_per_s}, "refused": None}


def test_the_other_ways_are_tried_and_of_the_chosen_one_each_knob_alone() -> None:
    one = search(predicted(LARGE), modes=("exact", "predicted"))
    found = one.within(300 * MIB)
    tried = [name for name, _ in sweep.trials(one, found)]
    chosen = tried[0]
    assert chosen == sweep.knobs(found.chosen.plan) | {"chosen": True}
    assert [name["chosen"] for name in tried].count(True) == 1
    ways = {tuple(name[knob] for knob in sweep.WAY) for name in tried}
    assert len(ways) == len(found.candidates) == 8
    for name in tried[1:]:
        differ = {knob for knob in sweep.KNOBS if name[knob] != chosen[knob]}
        assert differ
        assert differ & set(sweep.WAY) or len(differ) == 1
    assert {name["chunk"] for name in tried if all(name[knob] == chosen[knob] for knob in sweep.WAY)} == {8, 16, 32, 64}
    only = [name for name, _ in sweep.trials(one, found, ["chunk", "workers"])]
    assert {name["mode"] for name in only} == {chosen["mode"]}
    assert {name["workers"] for name in only} == {1, 2}


def test_a_speed_is_swept_over_limits_around_that_of_its_plan() -> None:
    one = search(request=ANSWER)
    chosen = one.reaching(20.0).chosen
    tried = sweep.trials_of_limits(one, chosen)
    limits = [name["limit_bytes"] for name, _ in tried]
    assert tried[0] == ({"limit_bytes": chosen.plan.memory.limit_bytes, "chosen": True}, chosen.plan)
    assert min(limits) < limits[0] < max(limits)
    assert all(made.memory.limit_bytes == name["limit_bytes"] for name, made in tried)


def test_each_plan_is_measured_by_turns_from_a_file_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = search()
    tried = sweep.trials(one, one.within(300 * MIB), ["workers"])
    measured: list[Any] = []

    def bench(package: Path, words: tuple[str, ...]) -> list[dict[str, Any]]:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(sweep.knobs(read_plan(Path(words[words.index("--plan") + 1]))))
        return [{"tokens_per_s": 1.0}]

    monkeypatch.setattr(sweep, "bench", bench)
    file = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        sweep.measure_all(tmp_path, file, SHARED, tried, rounds=2, final=False)
    assert [one | {"chosen": False} for one in measured[:2]] == [name | {"chosen": False} for name, _ in tried[:2]]
    before = len(planned.read_lines(file))
    monkeypatch.setattr(sweep, "bench", lambda package, words: [{"tokens_per_s": 1.0}])
    sweep.measure_all(tmp_path, file, SHARED, tried, rounds=2, final=False)
    assert before == 3
    assert len(planned.read_lines(file)) == 2 * len(tried)


def test_the_chosen_plan_is_in_the_finals_with_the_fastest_others() -> None:
    names = [knobs(chosen=True), *(knobs(chunk=chunk) for chunk in (16, 32, 64, 128, 256))]
    speeds = (5.0, 1.0, 9.0, 8.0, 7.0, 2.0)
    lines = [line(name, speed) for name, speed in zip(names, speeds, strict=True)]
    made: Any = [(name, None) for name in names]
    last = [name["chunk"] for name, _ in sweep.finalists(lines, SHARED, made)]
    assert last == [512, 32, 64, 128]


def test_the_table_of_limits_counts_only_the_finals() -> None:
    chosen, other = knobs(chosen=True), knobs(workers=1)
    lucky = [line(chosen, 10.0), line(other, 100.0), line(knobs(chunk=8), 1.0)]
    finals = [line(chosen, speed, final=True, round=n) for n, speed in enumerate((9.0, 10.0, 11.0))]
    finals += [line(other, 10.4, final=True)]
    table = sweep.markdown(lucky + finals)
    assert "| memory=400MiB | tg8 | exact, 2 workers, clusters whole, prompt by 512, 32 reads at once |" in table
    assert "| 10.0 (9.0 to 11.0) |" in table
    assert "| 0.96 | 3 |" in table
    assert "1 of 1 within 5% of the best found" in table
    assert "0 of 1 within 5%" in sweep.markdown(lucky)


def test_the_table_of_speeds_names_the_smallest_limit_that_reaches_it() -> None:
    def of(limit: int, speed: float, chosen: bool = False) -> dict[str, Any]:
        return line({"limit_bytes": limit * MIB, "chosen": chosen}, speed, case="speed=10")

    reached = sweep.markdown([of(1000, 10.5, chosen=True), of(800, 9.6), of(700, 9.4), of(1200, 12.0)])
    assert "| 10.0 | 1000.0 MiB | 10.5 | 1.05 | 800.0 MiB | 1.25 |" in reached
    assert "1 of 1 reach the speed within 5%; 0 with at most 10% more" in reached
    missed = sweep.markdown([of(1000, 9.0, chosen=True), of(800, 8.0)])
    assert "| 0.90 | none | - |" in missed
    assert "0 of 1 reach the speed" in missed

"""What stays in memory follows the number of texts in a step, in a real run, and no text's tokens depend on it."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.plans.plan.pinned_clusters import Pins
from neuronpipe.protocol.layouts.weights import PIN_STATE
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.services.cache.residency import GROW_AFTER_S, SHRINK_AFTER_S, PinTrial
from neuronpipe.services.monitor.resident_regions import Regions

from tests.pipeline import PATIENCE_S, Run, Shell, eventually

PROMPTS = ("def f(x):", "import os", "class A:", "for i in")
FFNS = Package.open(DEMO).manifest.model.ffns
FEW, MANY = (2,) * FFNS, (6, 20, *(14,) * (FFNS - 2))
TOKENS = 80
TRIED = {PinTrial.LET_GO, PinTrial.PROVED}


@pytest.fixture
def run(shell: Shell, tmp_path: Path) -> Iterator[Run]:
    """The demo, half resident, with a table of two entries: for one text, and from three texts on."""
    file = tmp_path / "plan.json"
    words = ("--mode", "predicted", "--ffn-resident", "50%", "--sequences", "4", "-o", file)
    assert shell.call("plan", DEMO, *words).code == 0
    made = read_plan(file)
    few, many = (Pins(texts=n, triggers=text, values=text) for n, text in ((1, "2"), (3, f"6x1 20x1 14x{FFNS - 2}")))
    expected = dataclasses.replace(made.expected, miss_rate=1.0)  # else these pins might be let go
    table = dataclasses.replace(made, memory=dataclasses.replace(made.memory, pins=(few, many)), expected=expected)
    file.write_text(table.to_json())
    with shell.up(DEMO, "--plan", file) as live:
        yield live


def pinned(run: Run) -> tuple[int, int]:
    _, run_file = RunDirectory.find(run.path)
    assert run_file.summary is not None
    with Regions(run_file, run_file.summary) as regions:
        return regions.count().pinned


class Texts:
    """Texts that go on, one after the other, from as many clients; what each got."""

    def __init__(self, run: Run, prompts: tuple[str, ...]) -> None:
        self._run, self._over = run, threading.Event()
        self.answers: dict[str, list[Any]] = {prompt: [] for prompt in prompts}
        self._threads = [threading.Thread(target=self._ask, args=(prompt,)) for prompt in prompts]

    def __enter__(self) -> Texts:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _ask(self, prompt: str) -> None:
        while not self._over.is_set():
            self.answers[prompt].append(self._run.ask(prompt, TOKENS)["token_ids"])


@pytest.mark.nightly
def test_what_stays_follows_the_texts_and_the_tokens_do_not(run: Run) -> None:
    alone = {prompt: run.ask(prompt, TOKENS)["token_ids"] for prompt in PROMPTS}
    few, many = (sum(FEW),) * 2, (sum(MANY),) * 2
    assert eventually(lambda: pinned(run) == few)
    with Texts(run, PROMPTS) as texts:
        assert eventually(lambda: pinned(run) == many, GROW_AFTER_S + 10)
        os.kill(run.pid("cache"), signal.SIGKILL)
        assert eventually(lambda: all(len(answers) >= 2 for answers in texts.answers.values()), PATIENCE_S)
        assert eventually(lambda: pinned(run) == many)
    assert {prompt: token_ids for prompt, answers in texts.answers.items() for token_ids in answers} == alone
    assert all(one == alone[prompt] for prompt, answers in texts.answers.items() for one in answers)
    assert pinned(run) == many  # nothing changes while nobody asks
    with Texts(run, PROMPTS[:1]) as texts:
        assert eventually(lambda: pinned(run) == few, SHRINK_AFTER_S + 10)
    assert all(one == alone[PROMPTS[0]] for one in texts.answers[PROMPTS[0]])


def test_a_table_that_memory_does_not_hold_is_refused(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ("--mode", "predicted", "--ffn-resident", "50%", "--sequences", "2", "-o", file)
    assert shell.call("plan", DEMO, *words).code == 0
    made = read_plan(file)
    all_of_them = Pins(texts=2, triggers="86", values="86")
    memory = dataclasses.replace(made.memory, pins=(*made.memory.pins, all_of_them))
    file.write_text(dataclasses.replace(made, memory=memory).to_json())
    assert "memory.trigger_slots" in shell.refused("up", DEMO, "--plan", file)


def test_pins_are_tried_where_far_more_is_missed_than_planned_and_no_token_depends_on_it(
    shell: Shell, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    assert shell.call("plan", DEMO, "--mode", "predicted", "--ffn-resident", "50%", "-o", file).code == 0
    made = read_plan(file)
    pins = (Pins(texts=1, triggers="20", values="20"),)
    memory, expected = dataclasses.replace(made.memory, pins=pins), dataclasses.replace(made.expected, miss_rate=0.0)
    file.write_text(dataclasses.replace(made, memory=memory, expected=expected).to_json())
    with shell.up(DEMO, "--plan", file) as run:
        _, run_file = RunDirectory.find(run.path)
        states, answers = set(), []
        with run_file.open_segment("residency") as segment, segment.map() as residency:
            while len(answers) < 8:
                answers.append(run.ask(PROMPTS[0], TOKENS)["token_ids"])
                if states & TRIED:  # and this was a text after the trial
                    break
                states.add(residency.view("slots")[PIN_STATE])
        status = run.status()
    assert states & TRIED
    assert all(answer == answers[0] for answer in answers)
    assert status.miss_rate > 0
    assert status.planned_miss_rate == 0

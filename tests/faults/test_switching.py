"""Texts come and go, so that steps have one to four of them and an accelerator other blocks each time, while processes
are killed: every text is what it is alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.client import attach
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.plan.document import read_plan

from tests.faults.kills import MAX_KILLS, WITHIN_S
from tests.http_client import served
from tests.opencl import require_opencl
from tests.pipeline import PATIENCE_S, Run, Shell, eventually

require_opencl()

PROMPT = "def main(arguments):\n    for name in arguments"
MOST_TOKENS = 24
BLOCKS = 15  # of a layer of the demo
HELD = (BLOCKS, 3, 11, 0)
OPTIONS = ("--backend", "accelerator=opencl", "--gpu-memory", "1GiB", "--workers", "2", "--sequences", "4")
KILLED = [("accelerator", 0), ("decode", 0), ("decode", 1), ("loader", 0), ("cache", 0)]
CANDIDATES = {"max_tokens": 40, "temperature": 1.5, "seed": 11, "n": 1, "best_of": 4, "stop": ["\n", "e", "("]}


@pytest.fixture
def switching_plan(shell: Shell, request: pytest.FixtureRequest) -> Path:
    """A plan file in which every number of texts has another number of blocks, and a part of the others is not in
    memory; with a gateway where the test asks for one."""
    return plan_file(shell, *getattr(request, "param", ()))


def plan_file(shell: Shell, *more: str) -> Path:
    file = shell.folder / "plan.json"
    assert shell.call("plan", DEMO, *OPTIONS, "--ffn-resident", "50%", *more, "-o", file).code == 0
    made = read_plan(file)
    file.write_text(dataclasses.replace(made, compute=dataclasses.replace(made.compute, held_blocks=HELD)).to_json())
    return file


class Switches:
    """Counts how often the run has another number of texts than when it was last asked: there may be more."""

    def __init__(self, run: Run) -> None:
        self._run, self.count, self.seen, self._over = run, 0, set[int](), threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        before = 0
        with attach(self._run.path) as client:
            while not self._over.wait(0.002):
                now = client.status().sequences_active
                self.count += now != before
                self.seen.add(now)
                before = now

    def __enter__(self) -> Switches:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def killing(run: Run, seed: int, processes: list[tuple[str, int]]) -> Iterator[list[str]]:
    """Kills by turns at random moments, as many as a run survives, while the context lasts; who was killed."""
    over, draw = threading.Event(), random.Random(seed)
    killed: list[str] = []
    times: dict[tuple[str, int], list[float]] = {process: [] for process in processes}

    def kill() -> None:
        turns: list[tuple[str, int]] = []
        while not over.wait(draw.uniform(0.05, 0.8)):
            turns = turns or draw.sample(processes, len(processes))
            process = turns.pop()
            recent = times[process][-MAX_KILLS:]
            if len(recent) == MAX_KILLS and time.monotonic() - recent[0] < WITHIN_S:
                continue
            with contextlib.suppress(StopIteration, ProcessLookupError):
                os.kill(run.pid(*process), signal.SIGKILL)
                times[process].append(time.monotonic())
                killed.append(process[0])

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@pytest.mark.nightly
@pytest.mark.parametrize("switches", [24, pytest.param(1000, marks=pytest.mark.nightly)])
def test_switching_between_numbers_of_texts_under_kills_loses_nothing(
    shell: Shell, switching_plan: Path, switches: int
) -> None:
    with shell.up(DEMO) as run:
        alone = run.ask(PROMPT, MOST_TOKENS)["token_ids"]
    wrong: list[Any] = []
    answers = [0]

    deadline = time.monotonic() + PATIENCE_S

    def goes_on() -> bool:
        """Until there were enough switches and steps of every size; on a busy machine the latter can take longer."""
        is_enough = counted.count >= switches and counted.seen >= {1, 2, 3, 4}
        return not is_enough and not wrong and time.monotonic() < deadline

    def ask(number: int) -> None:
        draw = random.Random(number)
        while goes_on():
            tokens = draw.randint(1, MOST_TOKENS)
            try:
                found = run.ask(PROMPT, tokens)["token_ids"]
            except Exception as error:  # whatever it is, it is told in the test's thread
                wrong.append(error)
                return
            answers[0] += 1
            if found != alone[:tokens]:
                wrong.append((tokens, found))

    with shell.up(DEMO, "--plan", switching_plan) as run:
        with Switches(run) as counted, killing(run, 7, KILLED) as killed:
            threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong, wrong[0]
        assert counted.count >= switches
        assert {1, 2, 3, 4} <= counted.seen
        assert {"accelerator", "decode"} <= set(killed)
        assert eventually(lambda: run.status().ready, 60)
        last = run.ask(PROMPT, MOST_TOKENS)
        assert last["token_ids"] == alone
        assert last["accelerator_share"] == 1, "it is back, with what one text has"
    print(f"{counted.count} switches seen, {answers[0]} texts, killed: {killed}")


@pytest.mark.parametrize("switching_plan", [("--gateway",)], indirect=True)
def test_the_best_of_candidates_that_end_one_by_one_is_the_same(shell: Shell, switching_plan: Path) -> None:
    """The batch of four shrinks as candidates end, and with it the device's share grows; and it dies meanwhile."""
    with served(shell, DEMO, "--sequences", "4") as server:
        prompts = [f"{PROMPT}{end}" for end in (":", "", "[")]
        wanted = [server.post("/v1/completions", prompt=prompt, **CANDIDATES).json() for prompt in prompts]
    lengths = {one["usage"]["completion_tokens"] for one in wanted}
    assert max(lengths) < 4 * 40, "candidates end before their time"
    with (
        served(shell, DEMO, "--plan", switching_plan) as server,
        killing(server.run, 3, [("accelerator", 0)]) as killed,
    ):
        for turn in range(30):
            prompt, expected = prompts[turn % len(prompts)], wanted[turn % len(prompts)]
            found = server.post("/v1/completions", prompt=prompt, **CANDIDATES).json()
            assert found["choices"] == expected["choices"]
            assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
            if turn > 3 and killed:
                break
        assert killed

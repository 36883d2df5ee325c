"""Slots lie in memory that texts and prompts do not need yet, and go when they do; no text's tokens depend on it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.lending import Lendable
from neuronpipe.plans.plan.plan import Plan, read_plan
from neuronpipe.protocol.messages.client import Token
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.services.lending.reservation import RELEASE_AFTER_S
from neuronpipe.services.monitor.regions import Regions

from tests.pipeline import PATIENCE_S, Run, Shell, eventually

MIB = 1 << 20
PROMPTS = ("def f(x):", "import os", "class A:", "for i in")
TOKENS = 240


def tight(shell: Shell, folder: Path, mode: str) -> Path:
    """A plan with room for four texts and hardly any neurons beside them; nearly all that it lends is theirs."""
    words = ("--mode", mode, "--sequences", "4", "--workers", "2")
    least = shell.json("plan", DEMO, *words, "--memory", "1GiB")["memory"]["least_bytes"]
    file = folder / f"{mode}.json"
    assert shell.call("plan", DEMO, *words, "--memory", str(least + 3 * MIB), "-o", file).code == 0
    return file


@pytest.fixture
def plan_file(shell: Shell, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return tight(shell, tmp_path, getattr(request, "param", "predicted"))


@pytest.fixture
def plan(plan_file: Path) -> Plan:
    return read_plan(plan_file)


@pytest.fixture
def run(shell: Shell, plan_file: Path) -> Iterator[Run]:
    with shell.up(DEMO, "--plan", plan_file) as live:
        yield live


def on_board(run: Run, field: str, word: int = 0) -> int:
    _, run_file = RunDirectory.find(run.path)
    with run_file.open_segment("board") as segment, segment.map() as board:
        return int(board.view(field)[word])


def reserved_bytes(run: Run) -> int:
    return on_board(run, "reserved")


def peak_bytes(run: Run) -> int:
    return on_board(run, "memory", 1)


def present(run: Run) -> tuple[int, int]:
    """Clusters of either part in memory."""
    _, run_file = RunDirectory.find(run.path)
    assert run_file.summary is not None
    with Regions(run_file, run_file.summary) as regions:
        counted = regions.count()
        return counted.pinned[0] + counted.cold[0], counted.pinned[1] + counted.cold[1]


def slots_file_bytes(run: Run) -> int:
    """What the kernel holds for the slots' segment."""
    _, run_file = RunDirectory.find(run.path)
    with run_file.open_segment("slots") as segment:
        return 512 * os.fstat(segment.fd).st_blocks


def all_at_once(run: Run, tokens: int = TOKENS) -> list[list[int]]:
    answers: dict[str, list[int]] = {}

    def ask(prompt: str) -> None:
        answers[prompt] = run.ask(prompt, tokens, ignore_end=True)["token_ids"]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return [answers[prompt] for prompt in PROMPTS]


def in_all_memory(shell: Shell, mode: str, prompts: tuple[str, ...] = PROMPTS) -> list[list[int]]:
    """The same texts, one after the other, with room for everything."""
    with shell.up(DEMO, "--mode", mode) as live:
        return [live.ask(prompt, TOKENS, ignore_end=True)["token_ids"] for prompt in prompts]


@pytest.mark.parametrize("plan_file", ["exact", "predicted"], indirect=True)
def test_slots_use_what_texts_do_not_need_and_give_it_back(shell: Shell, run: Run, plan: Plan) -> None:
    memory, lendable = plan.memory, Lendable.of(Package.open(DEMO).manifest, plan.compute, plan.memory)
    assert memory.lent_value_slots > memory.value_slots / 4, "the test has to lend much"
    assert eventually(lambda: present(run)[1] > memory.value_slots), "lent slots are warmed up"
    before = present(run)
    expected = in_all_memory(shell, plan.compute.mode)
    assert all_at_once(run) == expected
    needed = lendable.reserved_bytes([TOKENS] * len(PROMPTS), 0)
    assert needed <= reserved_bytes(run) <= lendable.total_bytes
    assert present(run)[1] < before[1]
    assert peak_bytes(run) <= memory.limit_bytes
    assert eventually(lambda: reserved_bytes(run) == needed, RELEASE_AFTER_S + 5), "the prompts' stage is given back"
    assert all_at_once(run) == expected
    assert peak_bytes(run) <= memory.limit_bytes


def test_memory_of_slots_that_went_is_the_systems_again(run: Run, plan: Plan) -> None:
    slots = plan.memory.lent_trigger_slots, plan.memory.lent_value_slots
    manifest = Package.open(DEMO).manifest
    lent_bytes = slots[0] * manifest.trigger_slot_bytes + slots[1] * manifest.value_slot_bytes
    assert eventually(lambda: slots_file_bytes(run) > plan.memory.slots_bytes + lent_bytes / 2)
    all_at_once(run, 500)  # nearly all of the context
    assert slots_file_bytes(run) < plan.memory.slots_bytes + lent_bytes / 3


def test_processes_that_die_while_slots_go_change_no_text(shell: Shell, run: Run, plan: Plan) -> None:
    expected = in_all_memory(shell, plan.compute.mode, PROMPTS[:1])
    roles = ["cache", "loader", "coordinator", "prefill", "decode"]

    def kill(token: Token) -> None:
        if token.index % 40 == 30 and roles:
            os.kill(run.pid(roles.pop()), signal.SIGKILL)

    assert [run.ask(PROMPTS[0], TOKENS, kill, ignore_end=True)["token_ids"]] == expected
    assert not roles
    assert peak_bytes(run) <= plan.memory.limit_bytes


def test_a_shorter_text_in_the_place_of_a_long_one_gives_its_rest_back(run: Run, plan: Plan) -> None:
    all_at_once(run, 300)
    lendable = Lendable.of(Package.open(DEMO).manifest, plan.compute, plan.memory)
    long_bytes = lendable.reserved_bytes([300] * len(PROMPTS), 0)
    assert eventually(lambda: reserved_bytes(run) == long_bytes, RELEASE_AFTER_S + 5)
    all_at_once(run, 4)
    assert eventually(lambda: reserved_bytes(run) < long_bytes / 4, RELEASE_AFTER_S + 5)
    assert eventually(lambda: present(run)[1] > plan.memory.value_slots)

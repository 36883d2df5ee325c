"""Slots lie in memory that texts and prompts do not need yet, and go when they do; no text's tokens depend on it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.layout import PAGE_BYTES
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.borrowed_memory import BorrowableMemory, usable_borrowed_slots
from neuronpipe.plans.plan.document import Plan, read_plan
from neuronpipe.protocol.messages.client import Token
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.services.coordinator.scheduling.kv_reservation import RELEASE_AFTER_S
from neuronpipe.services.monitor.resident_regions import Regions

from tests.pipeline import PATIENCE_S, Run, Shell, eventually

MIB = 1 << 20
PROMPTS = ("def f(x):", "import os", "class A:", "for i in")
TOKENS = 150  # with a prompt within five grants of 32
Mode = Literal["exact", "predicted"]


@pytest.fixture(scope="module")
def tight(long_shell: Shell) -> Callable[[Mode], Path]:
    """Plans with room for four texts and hardly any neurons beside them; nearly all that they lend is theirs."""

    @cache
    def made(mode: Mode) -> Path:
        words = ("--mode", mode, "--sequences", "4", "--workers", "2")
        least = long_shell.json("plan", DEMO, *words, "--memory", "1GiB")["memory"]["least_bytes"]
        file = long_shell.folder / f"{mode}.json"
        assert long_shell.call("plan", DEMO, *words, "--memory", str(least + 3 * MIB), "-o", file).code == 0
        return file

    return made


@pytest.fixture(scope="module")
def in_all_memory(long_shell: Shell) -> Callable[[Mode], list[list[int]]]:
    """The same texts, one after the other, with room for everything."""

    @cache
    def said(mode: Mode) -> list[list[int]]:
        with long_shell.up(DEMO, "--mode", mode) as live:
            return [live.ask(prompt, TOKENS, ignore_end=True)["token_ids"] for prompt in PROMPTS]

    return said


class Lending:
    """A run that lends, and its plan."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self.run, self.memory = run, plan.memory
        self.lendable = BorrowableMemory.of(Package.open(DEMO).manifest, plan.compute, plan.memory)

    def on_board(self, field: str, word: int = 0) -> int:
        _, run_file = RunDirectory.find(self.run.path)
        with run_file.open_segment("board") as segment, segment.map() as board:
            return int(board.view(field)[word])

    def reserved_bytes(self) -> int:
        return self.on_board("reserved")

    def is_within_its_limit(self) -> bool:
        return self.on_board("memory", 1) <= self.memory.limit_bytes

    def present_values(self) -> int:
        """Value parts in memory."""
        _, run_file = RunDirectory.find(self.run.path)
        assert run_file.summary is not None
        with Regions(run_file, run_file.summary) as regions:
            counted = regions.count()
            return counted.pinned[1] + counted.cold[1]

    def slots_file_bytes(self) -> int:
        """What the kernel holds for the slots' segment."""
        _, run_file = RunDirectory.find(self.run.path)
        with run_file.open_segment("slots") as segment:
            return 512 * os.fstat(segment.fd).st_blocks

    def slots_bytes(self, reserved_bytes: int) -> int:
        """What slots may take while so much is reserved."""
        places = self.lendable.manifest.slots(moved=self.memory.are_scales_moved)
        triggers, values = usable_borrowed_slots(self.memory, self.lendable, reserved_bytes)
        lent_bytes = triggers * places.trigger_bytes + values * places.value_bytes
        return self.memory.slots_bytes + lent_bytes + 2 * PAGE_BYTES  # the last page of either part

    def all_at_once(self, tokens: int = TOKENS) -> list[list[int]]:
        answers: dict[str, list[int]] = {}

        def ask(prompt: str) -> None:
            answers[prompt] = self.run.ask(prompt, tokens, ignore_end=True)["token_ids"]

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        return [answers[prompt] for prompt in PROMPTS]


@pytest.fixture
def lending(shell: Shell, tight: Callable[[Mode], Path], request: pytest.FixtureRequest) -> Iterator[Lending]:
    file = tight(getattr(request, "param", "predicted"))
    with shell.up(DEMO, "--plan", file) as live:
        yield Lending(live, read_plan(file))


@pytest.mark.parametrize(
    ("lending", "mode"),
    [("exact", "exact"), pytest.param("predicted", "predicted", marks=pytest.mark.nightly)],
    indirect=["lending"],
    ids=lambda m: m,
)
def test_slots_use_what_texts_do_not_need_and_give_it_back(
    lending: Lending, in_all_memory: Callable[[Mode], list[list[int]]], mode: Mode
) -> None:
    own, lendable = lending.memory.value_slots, lending.lendable
    assert lending.memory.lent_value_slots > own / 4, "the test has to lend much"
    assert eventually(lambda: lending.present_values() > own), "lent slots are warmed up"
    assert eventually(lambda: lending.slots_file_bytes() > lending.slots_bytes(lendable.total_bytes // 2))
    before = lending.present_values()
    expected = in_all_memory(mode)
    assert lending.all_at_once() == expected
    needed = lendable.reserved_bytes([TOKENS] * len(PROMPTS), 0)
    assert needed <= lending.reserved_bytes() <= lendable.total_bytes
    assert lending.present_values() < before
    assert lending.slots_file_bytes() <= lending.slots_bytes(lending.reserved_bytes()), "the system has it again"
    assert lending.is_within_its_limit()
    assert eventually(lambda: lending.reserved_bytes() == needed, RELEASE_AFTER_S + 5), "the prompts' stage goes"
    # Shorter ones in the places of the long ones give the rest back.
    assert lending.all_at_once(4) == [tokens[:4] for tokens in expected]
    assert eventually(lambda: lending.reserved_bytes() < needed / 4, RELEASE_AFTER_S + 5)
    assert eventually(lambda: lending.present_values() > own)
    assert lending.is_within_its_limit()


def test_slots_give_memory_to_a_grammar_and_have_it_again_when_its_process_has_ended(
    lending: Lending, shell: Shell
) -> None:
    own, grammars_bytes = lending.memory.value_slots, lending.lendable.grammars_bytes
    assert eventually(lambda: lending.present_values() > own)
    expected = lending.run.ask("x = ", 12, grammar="[0-9]{40}", grammar_syntax="regex")
    assert expected["text"].isdigit()
    assert lending.reserved_bytes() >= grammars_bytes
    assert lending.slots_file_bytes() <= lending.slots_bytes(lending.reserved_bytes()), "the system has it again"
    assert lending.is_within_its_limit()
    (helper,) = (pid for pid in shell.processes() if Path(f"/proc/{pid}/comm").read_text() == "np-untrusted\n")
    os.kill(helper, signal.SIGKILL)
    assert eventually(lambda: lending.reserved_bytes() < grammars_bytes, RELEASE_AFTER_S + 5)
    assert lending.run.ask("x = ", 12, grammar="[0-9]{40}", grammar_syntax="regex")["text"] == expected["text"]
    assert lending.is_within_its_limit()


@pytest.mark.nightly
def test_processes_that_die_while_slots_go_change_no_text(
    lending: Lending, in_all_memory: Callable[[Mode], list[list[int]]]
) -> None:
    run, roles = lending.run, ["cache", "loader", "coordinator", "prefill", "decode"]

    def kill(token: Token) -> None:
        if token.index % 30 == 20 and roles:
            os.kill(run.pid(roles.pop()), signal.SIGKILL)

    assert run.ask(PROMPTS[0], TOKENS, kill, ignore_end=True)["token_ids"] == in_all_memory("predicted")[0]
    assert not roles
    assert lending.is_within_its_limit()

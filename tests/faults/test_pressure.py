"""The system takes memory back: a run gives slots back step by step, takes them again later, and no text changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.protocol.run_directory import RunDirectory

from tests.faults.memory_group import Group, swap_bytes, swapped_slots_bytes
from tests.pipeline import Run, Shell, eventually

GROUP_BYTES = 512 << 20
LEFT_BYTES = 4 << 20  # far below the margin, a 32nd
TOKENS = 300
HOG = """
import sys
kept = []
limit, left, used = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
while limit - int(open(used).read()) > left:
    kept.append(b"x" * (1 << 20))
print("full", flush=True)
sys.stdin.read()
"""


def slots_now(run: Run) -> tuple[int, int]:
    _, run_file = RunDirectory.find(run.path)
    with run_file.open_segment("residency") as segment, segment.map() as residency:
        shown = residency.view("slots")
        return shown[0], shown[1]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [pytest.param("exact", marks=pytest.mark.nightly), "predicted"])
def test_slots_go_while_another_program_needs_the_memory_and_come_back(shell: Shell, group: Group, mode: str) -> None:
    group.limit(GROUP_BYTES)
    with shell.up(DEMO, "--mode", mode, "--workers", "2", preexec_fn=group.join) as run:
        all_slots = slots_now(run)
        expected = run.ask("def f(x):", TOKENS, ignore_end=True)["token_ids"]
        words = (str(GROUP_BYTES), str(LEFT_BYTES), str(group.used_file()))
        with subprocess.Popen(
            [sys.executable, "-c", HOG, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=group.join
        ) as hog:  # which ends with its input
            assert hog.stdout is not None
            assert hog.stdout.readline() == b"full\n"
            assert eventually(lambda: max(slots_now(run)) < max(all_slots) / 2), slots_now(run)
            assert run.ask("def f(x):", TOKENS, ignore_end=True)["token_ids"] == expected
            fewest = slots_now(run)[1]
        assert eventually(lambda: slots_now(run)[1] > fewest + all_slots[1] / 8, 60.0), slots_now(run)
        assert run.ask("def f(x):", TOKENS, ignore_end=True)["token_ids"] == expected
    assert group.killed() == 0


@pytest.mark.nightly
def test_where_the_system_swaps_no_slot_is_swapped(shell: Shell, group: Group) -> None:
    """In a group that is too small for its run: what is not locked goes to swap."""
    if swap_bytes() < 64 << 20:
        pytest.skip("this system has no swap: as root, mkswap and swapon a file")
    with shell.up(DEMO, "--workers", "2", preexec_fn=group.join) as run:
        expected = run.ask("def f(x):", TOKENS, ignore_end=True)["token_ids"]
        group.limit(group.held_bytes() // 3)
        assert eventually(lambda: group.swapped_bytes() > 1 << 20), "the group has to be swapped for this test"
        assert run.ask("def f(x):", TOKENS, ignore_end=True)["token_ids"] == expected
        assert swapped_slots_bytes(run) == 0
    assert group.killed() == 0


def test_a_run_that_follows_plans_for_nine_tenths_and_takes_what_there_is(shell: Shell, tmp_path: Path) -> None:
    planned = shell.json("plan", DEMO, "--memory", "auto")["memory"]
    assert planned["follows"]
    assert planned["limit_bytes"] > 5 * planned["least_bytes"]
    with shell.up(DEMO, "--memory", "auto") as run:
        assert run.ask("import", 8)["tokens"] == 8

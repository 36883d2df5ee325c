"""A run at exactly its least limit inside a control group: everything that the kernel counts as its memory stays within
it while processes are killed. Sums came to 1.012 of it, and to 1.32 with the package's page cache."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO

from tests.faults.kills import PROCESSES
from tests.faults.memory_group import Group
from tests.integration.large_package import write_large_package
from tests.pipeline import Run, Shell, eventually
from tests.unit.test_page_cache import cached_bytes, written

SAMPLE_S = 0.02
OPTIONS = ("--workers", "2", "--sequences", "1", "--context", "64")
COMMAND_BYTES = 10 << 20  # of the command that starts a run, until it ends: 3 MB measured, 18 MB with Python's teardown
PROMPT = list(range(1, 59))
TOKENS = 64 - len(PROMPT)  # the context is full in the end; few, since nearly every neuron is read for each


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo for these runs alone: the page cache of what other tests read does not count."""
    path = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("group") / "demo"))
    for file in path.iterdir():
        written(file)
    return path


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """86 MB of fixed tensors, and few neurons."""
    path = write_large_package(tmp_path_factory.mktemp("group") / "package", neurons=344).path
    for file in path.iterdir():
        written(file)
    return path


def library_bytes(shell: Shell) -> int:
    """Of programs and libraries, what the processes have mapped and used, as if nobody else had it open: of each file
    what the process has that used most of it."""
    files: dict[str, int] = {}
    for pid in shell.processes():
        with contextlib.suppress(OSError):
            own: dict[str, int] = {}
            for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.M):
                name = part.partition("\n")[0][73:]
                sizes = dict(re.findall(r"^(Rss|Anonymous): +(\d+) kB", part, re.M))
                if name.startswith("/") and not name.startswith(("/memfd:", "/dev/")) and sizes:
                    own[name] = own.get(name, 0) + 1024 * (int(sizes["Rss"]) - int(sizes["Anonymous"]))
            files |= {name: max(size, files.get(name, 0)) for name, size in own.items()}
    return sum(files.values())


class Watched:
    """The most that was seen of a group's memory, and of the package in the page cache, while the context lasts."""

    def __init__(self, group: Group, package: Path) -> None:
        self._group, self._files, self._over = group, list(package.iterdir()), threading.Event()
        self.bytes = 0
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.bytes = max(self.bytes, self._group.held_bytes() + sum(map(cached_bytes, self._files)))


def up(shell: Shell, group: Group, package: Path) -> tuple[Run, int]:
    """A run with the least limit, started inside the group, and that limit."""
    least = int(shell.json("plan", package, *OPTIONS)["memory"]["least_bytes"])
    said = shell.json("up", package, "--memory", str(least), *OPTIONS, preexec_fn=group.join)
    return Run(shell, Path(said["run"])), least


def killed_in_turns(run: Run) -> None:
    """Each process once, while the same text is generated again and again: the same tokens every time."""
    expected = run.ask(PROMPT, TOKENS)["token_ids"]
    for process in PROCESSES:
        assert eventually(lambda process=process: run.status().ready and run.has(*process), 30)  # type: ignore[misc]
        os.kill(run.pid(*process), signal.SIGKILL)
        assert run.ask(PROMPT, TOKENS)["token_ids"] == expected


@pytest.mark.nightly
def test_everything_a_run_holds_stays_within_its_least_limit_while_processes_are_killed(
    shell: Shell, group: Group, demo: Path
) -> None:
    """With the libraries that it has mapped, as if nothing else on the machine had them open."""
    with Watched(group, demo) as watched:
        run, least = up(shell, group, demo)
        at_start = watched.bytes
        killed_in_turns(run)
        assert at_start < group.held_bytes() + COMMAND_BYTES, "the command copied the run's memory while it ended"
        libraries = library_bytes(shell)
        run.down()
    print(f"least {least >> 10} KiB; held {watched.bytes >> 10}, libraries {libraries >> 10} KiB")
    assert libraries > 4 << 20
    assert watched.bytes + libraries <= least


@pytest.mark.nightly
def test_a_run_with_a_gateway_stays_within_its_least_limit(shell: Shell, group: Group, demo: Path) -> None:
    least = int(shell.json("plan", "--gateway", demo, *OPTIONS)["memory"]["least_bytes"])
    words = ("serve", demo, "--port", "0", "--json", "--memory", str(least), *OPTIONS)
    with Watched(group, demo) as watched:
        process = shell.start(*words, preexec_fn=group.join)
        assert process.stdout is not None
        run = Run(shell, Path(json.loads(process.stdout.readline())["run"]))
        run.ask(PROMPT, TOKENS)
        libraries = library_bytes(shell)
        process.send_signal(signal.SIGINT)
        process.communicate()
    print(f"least {least >> 10} KiB; held {watched.bytes >> 10}, libraries {libraries >> 10} KiB")
    assert watched.bytes + libraries <= least


@pytest.mark.nightly
def test_the_page_cache_of_a_package_is_within_the_least_limit_too(shell: Shell, group: Group, package: Path) -> None:
    with Watched(group, package) as watched:
        run, least = up(shell, group, package)
        run.ask(PROMPT, 2)
        time.sleep(10 * SAMPLE_S)
        left = sum(map(cached_bytes, package.iterdir()))
        libraries = library_bytes(shell)
        run.down()
    print(f"least {least >> 10} KiB; held {watched.bytes >> 10}, libraries {libraries >> 10} KiB")
    assert left == 0
    assert watched.bytes + libraries <= least


def test_a_group_of_exactly_the_least_limit_kills_nothing(shell: Shell, group: Group, demo: Path) -> None:
    least = int(shell.json("plan", demo, *OPTIONS)["memory"]["least_bytes"])
    group.limit(least)
    run, found = up(shell, group, demo)
    assert found == least
    killed_in_turns(run)
    restarts = sum(process.restarts for process in run.status().processes)
    run.down()
    assert (group.killed(), restarts) == (0, len(PROCESSES))

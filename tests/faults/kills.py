"""Kills at random moments of generations, and the count of what a run has open: for the tests, here and by night."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.pipeline import PATIENCE_S, Run, Shell, eventually

ProcessSpec = tuple[str, int]
PROCESSES: list[ProcessSpec] = [
    ("coordinator", 0),
    ("loader", 0),
    ("cache", 0),
    ("decode", 0),
    ("decode", 1),
    ("prefill", 0),
]
MAX_KILLS, WITHIN_S = 4, 31.0  # of one process: a run ends for more than 5 within 30 s
MAX_DELAY_S = 0.4


class Kill(NamedTuple):
    """A kill, how many clients waited for their first token, and the seconds until all had their next token."""

    role: str
    early: int
    took_s: float


class Generations:
    """Asks the same in a thread, over and over until closed; every answer must be the same.

    ask: gets one answer, and calls what it is given with every token of it.
    """

    def __init__(self, ask: Callable[[Callable[[], None]], Any], expected: Any) -> None:
        self._ask_once, self._expected = ask, expected
        self._over = threading.Event()
        self.token_times: list[float] = []
        self._asked_at = 0.0
        self.answers = 0
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Generations:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self.failure = "no answer within a minute of the last kill"

    def _ask(self) -> None:
        while not self._over.is_set() and self.failure is None:
            self._asked_at = time.monotonic()
            try:
                answer = self._ask_once(lambda: self.token_times.append(time.monotonic()))
            except Exception as error:  # whatever it is, it is told in the test's thread
                self.failure = f"generation {self.answers}: {error!r}"
                return
            if answer != self._expected:
                self.failure = f"generation {self.answers}: {answer}, not {self._expected}"
            self.answers += 1

    @property
    def is_early(self) -> bool:
        """True if the answer under way has no token yet: its prompt is restored or computed."""
        return not self.token_times or self.token_times[-1] < self._asked_at

    def next_token_after(self, moment: float, within_s: float = 30.0) -> float:
        """Seconds from a moment to the token after it. Raises AssertionError when none comes."""
        came = eventually(lambda: self.failure or (self.token_times and self.token_times[-1] > moment), within_s)
        assert came, "no token came after the kill"
        assert self.failure is None, self.failure
        return next(at for at in self.token_times if at > moment) - moment


def asking(run: Run, prompt: list[int], tokens: int) -> Callable[[Callable[[], None]], list[int]]:
    """What gets the tokens of one answer from a run."""

    def ask(seen: Callable[[], None]) -> list[int]:
        return list(run.ask(prompt, tokens, seen=lambda token: seen())["token_ids"])

    return ask


def kill(run: Run, role: str, index: int) -> float:
    """Kill a process, once there is one; when."""
    assert eventually(lambda: run.status().ready and run.has(role, index), 30)
    pid = run.pid(role, index)
    moment = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return moment


def kill_in_a_step(run: Run, role: str, index: int = 0) -> None:
    """Kill a process while it has a step to compute: it is stopped, and goes on as long as it has none."""

    def stopped_in_one() -> bool:
        if not computes(run, role, index):
            return False
        pid = run.pid(role, index)
        os.kill(pid, signal.SIGSTOP)
        if computes(run, role, index):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    assert eventually(stopped_in_one, 30)
    os.kill(run.pid(role, index), signal.SIGKILL)


def computes(run: Run, role: str, index: int) -> bool:
    """Whether a process owes an answer to a step."""
    return any((one.role, one.index) == (role, index) and one.outstanding for one in run.status().processes)


def kill_at_random(
    run: Run,
    clients: Sequence[Generations],
    kills: int,
    seed: int,
    processes: Sequence[ProcessSpec] = PROCESSES,
    max_delay_s: float = MAX_DELAY_S,
) -> list[Kill]:
    """Kill processes in random turns at random moments; what came of each kill.

    max_delay_s: so long at most all is well before the next kill
    """
    draw = random.Random(seed)
    done: list[Kill] = []
    times: dict[ProcessSpec, list[float]] = {process: [] for process in processes}
    turns: list[ProcessSpec] = []
    for _ in range(kills):
        turns = turns or draw.sample(processes, len(processes))
        process = turns.pop()
        if len(times[process]) >= MAX_KILLS:
            time.sleep(max(0.0, times[process][-MAX_KILLS] + WITHIN_S - time.monotonic()))
        time.sleep(draw.uniform(0.0, max_delay_s))
        moment = kill(run, *process)
        early = sum(one.is_early for one in clients)
        times[process].append(moment)
        done.append(Kill(process[0], early, max(one.next_token_after(moment) for one in clients)))
    return done


def open_things(shell: Shell, run: Run) -> Counter[str]:
    """Everything there is of a run, counted: what each process has open, its threads, files of the run directory."""
    found = Counter(f"file {path.name}" for path in run.path.iterdir())
    for pid in shell.processes():
        with contextlib.suppress(OSError):  # it ends just now
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            found[f"process {name}"] += 1
            found[f"{name}: thread"] += len(list(Path(f"/proc/{pid}/task").iterdir()))
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found[f"{name}: {str(link.readlink()).split(':[')[0]}"] += 1
    return found


def grown(before: Counter[str], after: Counter[str]) -> list[str]:
    """What there is more of, one line each."""
    return [f"{kind}: {count} more" for kind, count in sorted((after - before).items())]

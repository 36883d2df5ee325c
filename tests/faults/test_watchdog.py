"""Processes that are alive and do not answer: they are killed and replaced, and texts go on as if nothing were."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.messages.client import Status

from tests.conformance.checkpoints import RECIPES, tokens
from tests.http_client import served
from tests.pipeline import PATIENCE_S, Run, Shell, eventually

Converted = Callable[..., Package]
STOPPED = ("coordinator", "loader", "cache", "decode", "prefill")


def pids(status: Status) -> dict[str, int]:
    return {f"{process.role}.{process.index}": process.pid for process in status.processes if process.pid}


def gone_on(run: Run, prompt: list[int], count: int, then: Callable[[], None]) -> list[int]:
    """The tokens of a text; `then` is called once its first token is there."""
    seen, answer = threading.Event(), list[int]()
    asking = threading.Thread(
        target=lambda: answer.extend(run.ask(prompt, count, seen=lambda token: seen.set())["token_ids"])
    )
    asking.start()
    assert seen.wait(PATIENCE_S)
    then()
    asking.join(PATIENCE_S)
    return answer


@pytest.mark.parametrize(
    "roles",
    [pytest.param(("coordinator",), marks=pytest.mark.nightly), ("loader", "cache", "decode", "prefill", "gateway")],
    ids="+".join,
)
def test_processes_that_a_signal_has_stopped_are_replaced_and_the_text_goes_on(
    shell: Shell, converted: Converted, roles: tuple[str, ...]
) -> None:
    package, prompt = converted("awkward", "q8"), tokens(RECIPES["awkward"], 40)
    with served(shell, package.path, "--ffn-resident", "30%", "--workers", "2") as server:
        undisturbed = server.run.ask(prompt, 24)["token_ids"]
        before = pids(server.run.status())
        stopped = {name: pid for name, pid in before.items() if name.partition(".")[0] in roles}

        def stop() -> None:
            for pid in stopped.values():
                os.kill(pid, signal.SIGSTOP)

        assert gone_on(server.run, prompt, 24, stop) == undisturbed
        assert eventually(lambda: pids(server.run.status()).keys() == before.keys())
        after = server.run.status()
        assert {name for name, pid in pids(after).items() if pid != before[name]} == set(stopped)
        assert server.post("/v1/completions", prompt=prompt, max_tokens=1).status == 200
        log = server.run.path / f"{next(iter(stopped))}.log"
        assert "ended by the watchdog: a signal stopped it for" in log.read_text()


HANGS = "ended by the watchdog: it did not get on with its work for"
HANGING = """
import pathlib, time
from neuronpipe.services.coordinator.coordinator_service import CoordinatorService
from neuronpipe.services.cache.cache_service import CacheService

class SpinningCoordinator(CoordinatorService):
    def _sample(self, action):
        if self._job.incarnation == 0 and self._tokens == 5:
            while True:
                pass
        return super()._sample(action)

class SleepingCache(CacheService):
    def _take(self, message):
        if pathlib.Path("sleep").exists():
            pathlib.Path("sleep").unlink()
            time.sleep(1000)
        super()._take(message)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("role", "name", "reason"),
    [
        ("coordinator", "SpinningCoordinator", HANGS),
        # Two watch the cache: the watchdog its pulse, the coordinator what it owes to others.
        ("cache", "SleepingCache", f"{HANGS}|ended by the supervisor: it has granted loader.0 no slots"),
    ],
    ids=["coordinator", "cache"],
)
def test_a_process_that_hangs_at_its_work_is_replaced_and_the_text_goes_on(
    shell: Shell, role: str, name: str, reason: str
) -> None:
    (shell.folder / "hanging.py").write_text(HANGING)
    with shell.up(DEMO) as run:
        undisturbed = run.ask([1, 2, 3], 24)["token_ids"]
    use = f"{role}=hanging:{name}"
    with shell.up(DEMO, "--use", use, "--ffn-resident", "30%", cwd=shell.folder) as run:
        (shell.folder / "sleep").touch()
        assert run.ask([1, 2, 3], 24, logprobs=1)["token_ids"] == undisturbed
        (process,) = (one for one in run.status().processes if one.role == role)
        assert process.restarts == 1
        log = (run.path / f"{role}.0.log").read_text()
        assert re.search(reason, log)

"""Work whose cost a stranger chooses: whatever it does, only its own job fails, and nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from neuronpipe.native import lib
from neuronpipe.services.untrusted import helper_process, process
from neuronpipe.services.untrusted.async_helper import AsyncHelper
from neuronpipe.services.untrusted.frames import FrameReader, Kind, frame
from neuronpipe.services.untrusted.helper import Helper, UntrustedError

from tests.untrusted_work import prepare

ROOT = Path(__file__).parents[2]
WORK = "tests.untrusted_work:prepare"
MIB = 1 << 20
SHORT_S, LONG_S = 0.3, 20.0


@pytest.fixture(autouse=True)
def _tests_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(params=[WORK, prepare], ids=["program", "fork"])
def helper(request: pytest.FixtureRequest) -> Iterator[Helper]:
    one = Helper(request.param, memory_bytes=32 * MIB, setup=b"hello ")
    gc.collect()  # of earlier tests, whose descriptors would be closed meanwhile
    descriptors = len(os.listdir("/proc/self/fd"))
    yield one
    one.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors, "a descriptor was left open"
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    one.dispose()


def reason(helper: Helper, request: bytes, timeout_s: float = LONG_S) -> str:
    with pytest.raises(UntrustedError) as caught:
        helper.call(request, timeout_s)
    assert "\n" not in str(caught.value)
    return caught.value.reason


def test_a_job_is_answered_by_one_process_that_starts_on_demand(helper: Helper) -> None:
    assert helper.pid is None
    assert helper.due_s is None
    assert helper.call(b"echo there", LONG_S) == b"hello there"
    assert helper.call(b"pid", LONG_S) == str(helper.pid).encode()
    assert helper.starts == 1


@pytest.mark.parametrize(
    ("request_", "timeout_s", "expected"),
    [
        (b"loop", SHORT_S, "time"),
        (b"sleep 60", SHORT_S, "time"),
        (b"stop", SHORT_S, "time"),
        (b"allocate", SHORT_S, "memory"),
        (b"eat", LONG_S, "memory"),
        (b"grow 160", LONG_S, "memory"),  # a fork may use what its parent has freed
        (b"exit 0", LONG_S, "died"),
        (b"exit 75", LONG_S, "died"),
        (b"abort", LONG_S, "died"),
        (b"raise no", LONG_S, "failed"),
    ],
)
def test_a_job_fails_alone_and_the_next_one_is_answered(
    helper: Helper, request_: bytes, timeout_s: float, expected: str
) -> None:
    helper.call(b"echo first", LONG_S)
    began = time.monotonic()
    assert reason(helper, request_, timeout_s) == expected
    assert time.monotonic() - began < timeout_s + 5
    assert helper.call(b"echo there", LONG_S) == b"hello there"


def test_a_recursion_without_end_fails_alone(helper: Helper) -> None:
    assert reason(helper, b"recurse") in ("died", "memory", "failed")
    assert helper.call(b"echo there", LONG_S) == b"hello there"


def test_a_stopped_process_is_replaced_at_the_deadline(helper: Helper) -> None:
    helper.call(b"echo", LONG_S)
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGSTOP)
    assert reason(helper, b"echo " + b"x" * 8 * MIB, SHORT_S) == "time"  # more than fits into the socket's buffer
    assert helper.call(b"echo there", LONG_S) == b"hello there"


def test_memory_within_the_limit_is_given_to_threads_too(helper: Helper) -> None:
    for request in (b"grow 8", b"threads", b"long 1000000"):
        helper.call(request, LONG_S)
    assert helper.starts == 1


@pytest.mark.parametrize("work", [WORK, prepare], ids=["program", "fork"])
def test_what_preparing_takes_is_no_memory_of_jobs(work: str | process.Prepare) -> None:
    gc.collect()
    lib.np_memory_give_back()  # a fork could grow within memory that earlier tests have freed
    helper = Helper(work, memory_bytes=16 * MIB, setup=b"grow 24", setup_bytes=32 * MIB)
    helper.call(b"grow 8", LONG_S)
    assert reason(helper, b"grow 128") == "memory"
    helper.dispose()
    greedy = Helper(work, memory_bytes=16 * MIB, setup=b"grow 192", setup_bytes=32 * MIB)
    assert reason(greedy, b"pid") == "unavailable"
    greedy.dispose()


def test_jobs_behind_one_that_fails_run_in_the_next_process(helper: Helper) -> None:
    jobs = [
        helper.submit(request, timeout_s)
        for request, timeout_s in ((b"echo a", LONG_S), (b"loop", SHORT_S), (b"echo b", LONG_S), (b"exit 1", LONG_S))
    ]
    last = helper.submit(b"echo c", LONG_S)
    outcomes = {}
    while len(outcomes) < 5:
        outcomes |= {one.job: one for one in helper.wait(LONG_S)}
    assert [outcomes[job].answer for job in (*jobs, last)] == [b"hello a", b"", b"hello b", b"", b"hello c"]
    assert helper.starts == 3


def test_the_descriptor_can_be_read_when_there_is_an_outcome(helper: Helper) -> None:
    job = helper.submit(b"echo x", LONG_S)
    poll = select.poll()
    poll.register(helper.descriptor, select.POLLIN)
    outcomes = []
    while not outcomes:
        assert poll.poll(1000 * LONG_S)
        outcomes = helper.receive()
    assert [one.job for one in outcomes] == [job]
    assert not poll.poll(0)
    assert helper.wait() == []


def test_a_job_that_comes_as_an_idle_process_ends_runs_in_the_next(helper: Helper) -> None:
    helper.call(b"idle", LONG_S)  # it ends after that answer, as a process does that has had nothing to do
    while (pid := helper.pid) is not None and _runs(pid):
        time.sleep(0.001)
    assert helper.call(b"echo there", LONG_S) == b"hello there"
    assert helper.starts == 2


@pytest.mark.parametrize("work", [WORK, prepare], ids=["program", "fork"])
def test_a_process_that_cannot_be_prepared_fails_the_jobs_that_wait_for_it(work: str | process.Prepare) -> None:
    broken = Helper(work, memory_bytes=MIB, setup=b"broken")
    with pytest.raises(UntrustedError, match="nothing to work with"):
        broken.call(b"echo", LONG_S)
    broken.dispose()


@pytest.mark.parametrize("work", [WORK, prepare], ids=["program", "fork"])
def test_a_process_that_cannot_be_started_is_the_error_of_the_job(
    work: str | process.Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more_processes() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(helper_process.sys, "executable", "/nonexistent/python")
    monkeypatch.setattr(helper_process.os, "fork", no_more_processes)
    helper = Helper(work, memory_bytes=MIB)
    with pytest.raises(UntrustedError, match="does not start"):
        helper.call(b"echo", LONG_S)
    helper.dispose()


def test_the_process_has_no_descriptors_of_the_service(helper: Helper) -> None:
    held = os.dup(0)
    os.set_inheritable(held, True)
    assert int(helper.call(b"descriptors", LONG_S)) == 4  # the three standard ones, and its link
    os.close(held)


def test_a_program_has_no_secrets_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_SECRET", "sesame")
    helper = Helper(WORK, memory_bytes=MIB)
    assert helper.call(b"secret", LONG_S) == b"none"
    helper.dispose()


@pytest.mark.parametrize("work", [repr(WORK), "prepare"], ids=["program", "fork"])
def test_the_process_dies_with_its_parent(work: str) -> None:
    code = f"""
import os, sys
from neuronpipe.services.untrusted.helper import Helper
from tests.untrusted_work import prepare
helper = Helper({work}, memory_bytes=1 << 25)
print(helper.call(b"pid", 20).decode(), flush=True)
helper.submit(b"loop", 60)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid, until = int(done.stdout), time.monotonic() + 10
    while time.monotonic() < until and _runs(pid):
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_jobs_are_awaited_in_a_loop_that_goes_on_meanwhile() -> None:
    async def serve() -> None:
        helper = AsyncHelper(WORK, memory_bytes=32 * MIB)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.ensure_future(tick())
        stopped = asyncio.ensure_future(helper.call(b"stop", SHORT_S))
        after = asyncio.ensure_future(helper.call(b"echo after", LONG_S))
        with pytest.raises(UntrustedError) as caught:
            await stopped
        assert caught.value.reason == "time"
        assert await after == b"after"
        assert ticks > 10
        assert helper.jobs == 0
        waiting = asyncio.ensure_future(helper.call(b"loop", LONG_S))
        await asyncio.sleep(0.01)
        helper.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        ticking.cancel()

    asyncio.run(serve())


def test_frames_that_are_too_long_or_of_no_kind_are_refused() -> None:
    whole = frame(Kind.ANSWER, b"abc")
    reader = FrameReader(8)
    assert [found for byte in whole for found in reader.push(bytes([byte]))] == [(Kind.ANSWER, b"abc")]
    with pytest.raises(ValueError, match="more than 8"):
        FrameReader(8).push(frame(Kind.ANSWER, b"123456789"))
    with pytest.raises(ValueError, match="9"):
        FrameReader(8).push(b"\x09" + whole[1:])

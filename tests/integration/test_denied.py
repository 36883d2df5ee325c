"""Runs that are denied what phones deny: io_uring, locked memory, /dev/shm, cores. They say the same."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.plans.package.reader import Package
from neuronpipe.services.runtime.core_pinning import pin

from tests.pipeline import Shell

Converted = Callable[..., Package]
ASK = ("-p", "the rain in there", "-n", "8", "--ffn-resident", "40%", "--workers", "2")
IO_URING = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}  # on every architecture
SCHED_SETAFFINITY = {"x86_64": 203, "aarch64": 122}
TRAP, ERROR = 0x00030000, 0x00050000
NO_SUCH_CORE = 1000


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def refuse(first: int, last: int, answer: int) -> bool:
    """System calls with these numbers get this answer from now on, in this process and its children. False: that cannot
    be arranged, under an emulator for one."""
    load_number, at_least, above, give, allow = 0x20, 0x35, 0x25, 0x06, 0x7FFF0000
    code = [
        (load_number, 0, 0, 0),
        (at_least, 0, 2, first),
        (above, 1, 0, last),
        (give, 0, 0, answer),
        (give, 0, 0, allow),
    ]
    program = _Program(len(code), (_Instruction * len(code))(*code))
    no_new_privileges, set_seccomp, filtered = 38, 22, 2
    prctl = ctypes.CDLL(None).prctl
    prctl(no_new_privileges, 1, 0, 0, 0)
    return bool(prctl(set_seccomp, filtered, ctypes.byref(program)) == 0)


def as_an_app() -> None:
    """In a child, before the command: io_uring is answered with SIGSYS, as Android does, and 64 KiB may be locked."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    refuse(min(IO_URING.values()), max(IO_URING.values()), TRAP)  # where it cannot be, there is no io_uring either


def without_a_core_of_its_own() -> None:
    """In a child: nobody can choose a core, as if all that the plan names had been taken away since."""
    number = SCHED_SETAFFINITY[os.uname().machine]
    if not refuse(number, number, ERROR | errno.EINVAL):
        raise OSError(errno.ENOSYS, "no filter for system calls here")


def test_an_apps_sandbox_changes_no_token(shell: Shell, converted: Converted) -> None:
    package = converted("awkward", "q8").path
    plan = shell.json("plan", package, preexec_fn=as_an_app)
    assert plan["flash"]["engine"] == "threads"
    sandboxed = shell.json("run", package, *ASK, preexec_fn=as_an_app)
    assert sandboxed["token_ids"] == shell.json("run", package, *ASK)["token_ids"]
    assert sandboxed["flash"]["reads"] > 0


@pytest.mark.nightly
def test_an_apps_sandbox_is_what_the_doctor_describes(shell: Shell, converted: Converted) -> None:
    found = shell.json("doctor", converted("awkward", "q8").path, preexec_fn=as_an_app)
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["io_uring"]["state"] == "warn"
    assert checks["locked memory"]["found"] == "at most 64.0 KiB"
    assert not [check for check in found["checks"] if check["state"] == "fail"]


def test_nothing_lies_in_dev_shm(shell: Shell, converted: Converted) -> None:
    with shell.up(converted("awkward", "q8").path) as run:
        run.ask("the rain", max_tokens=4)
        pids = shell.processes()
        assert len(pids) >= 6
        for pid in pids:
            assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    assert "/dev/shm" not in str(descriptor.readlink())


def test_one_core_of_several_changes_no_token(shell: Shell, converted: Converted) -> None:
    package = converted("awkward", "q8").path
    core = min(os.sched_getaffinity(0))
    alone = shell.json("run", package, *ASK, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    assert alone["token_ids"] == shell.json("run", package, *ASK)["token_ids"]


@pytest.mark.nightly
def test_cores_that_are_gone_since_the_plan_was_made_do_not_end_the_run(shell: Shell, converted: Converted) -> None:
    package = converted("awkward", "q8").path
    try:
        anywhere = shell.json("run", package, *ASK, preexec_fn=without_a_core_of_its_own)
    except subprocess.SubprocessError:
        pytest.skip("no filter for system calls here")
    assert anywhere["token_ids"] == shell.json("run", package, *ASK)["token_ids"]


def test_a_thread_stays_on_its_core_or_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    try:
        assert pin(None)
        assert not pin(NO_SUCH_CORE)
        assert os.sched_getaffinity(0) == before
        core = max(before)
        assert pin(core)
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("name", IO_URING)
def test_the_filter_of_these_tests_covers_the_system_calls(name: str) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        as_an_app()
        ctypes.CDLL(None).syscall(IO_URING[name], 0, 0, 0, 0, 0, 0)
        os.write(writer, b"no signal")
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    said = os.read(reader, 64)
    os.close(reader)
    if said:
        pytest.skip("no filter for system calls here")
    assert os.WTERMSIG(status) == signal.SIGSYS

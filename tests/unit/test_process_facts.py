"""What is read of processes in /proc: by the fields that the kernel documents, beside psutil where it has the same."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest
from neuronpipe.protocol import process_facts


@pytest.fixture
def child() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def test_state_and_parent_of_a_process(child: int) -> None:
    assert process_facts.parent(child) == os.getpid() == psutil.Process(child).ppid()
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED)
    assert process_facts.state(child) == "T"


def test_start_times_order_processes(child: int) -> None:
    assert process_facts.start_ticks() == process_facts.start_ticks(os.getpid()) <= process_facts.start_ticks(child)


def test_private_memory_is_what_psutil_calls_data() -> None:
    assert process_facts.private_writable_bytes() == pytest.approx(psutil.Process().memory_info().data, abs=1 << 20)


def test_a_name_with_blanks_and_brackets_hides_no_field() -> None:
    process = subprocess.Popen(["bash", "-c", "printf 'a) R 1 (b' > /proc/self/comm; read"], stdin=subprocess.PIPE)
    try:
        assert process_facts.parent(process.pid) == os.getpid()
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(OSError, match=r"No such|No such process"):
        process_facts.state(2**22 + 1)

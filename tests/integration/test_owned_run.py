"""A server that belongs to another process: it answers, and ends with its owner however that ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
from neuronpipe.launch.planning import DEMO

from tests.pipeline import Shell, eventually

OWNER = """if True:
    import sys
    from neuronpipe.services.examples.owned_run import OwnedRun
    run = OwnedRun([sys.argv[1]], "400MiB", ["--workers", "1", "--no-idle-profile"])
    reply = run.post("/v1/completions", {"prompt": "import os", "max_tokens": 4, "temperature": 0})
    assert reply["usage"]["completion_tokens"] == 4
    assert run.alive
    print("serving", flush=True)
    sys.stdin.read()
    run.end()
    assert not run.alive
    run.end()
"""


@pytest.mark.parametrize("ending", ["in order", "killed"])
def test_a_server_ends_with_its_owner(shell: Shell, ending: str) -> None:
    if ending == "killed" and shutil.which("setpriv") is None:
        pytest.skip("no setpriv")
    owner = shell.start("-c", OWNER, DEMO, program=(sys.executable,), stdin=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "serving\n"
    assert len(shell.processes()) > 1
    if ending == "killed":
        os.kill(owner.pid, signal.SIGKILL)
    owner.communicate("" if ending == "in order" else None)
    assert owner.returncode == (0 if ending == "in order" else -signal.SIGKILL)
    assert eventually(lambda: not shell.leftovers())


def test_a_server_that_does_not_start_is_an_error(shell: Shell) -> None:
    code = "import sys; from neuronpipe.services.examples.owned_run import OwnedRun; OwnedRun(['no-such'], '400MiB')"
    done = shell.call("-c", code, program=(sys.executable,))
    assert "RuntimeError: neuronpipe serve has ended with status 2" in done.errors

"""A `neuronpipe serve` that belongs to one process: it starts with its own memory limit, and ends with its owner."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

READY_S = 600.0  # until the first run of a large model answers
END_S = 30.0


class OwnedRun:
    """A server at a free port of loopback, without a key.

    packages: names or paths; several packages share the limit, and the server decides which of them have runs
    memory: the limit of the server and all its runs, such as 8GiB
    options: further options of `neuronpipe serve`
    address: http://127.0.0.1:PORT

    Raises RuntimeError if the server does not start.
    """

    def __init__(self, packages: Sequence[str], memory: str, options: Sequence[str] = ()) -> None:
        serve = ["serve", *packages, "--memory", memory, "--port", "0", "--json", *options]
        environment = {name: value for name, value in os.environ.items() if name != "NEURONPIPE_KEY"}
        self._process = subprocess.Popen(
            [*_ended_with_owner(), sys.executable, "-m", "neuronpipe", *serve],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # when requests are served
        if not line:
            raise RuntimeError(f"neuronpipe serve has ended with status {self._process.wait()}")
        self.address: str = json.loads(line)["address"]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON of the answer to a request. Raises OSError if there is none, or an error status."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=READY_S) as reply:
            return json.load(reply)

    def end(self) -> None:
        """End the server with its runs. A second call does nothing."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _ended_with_owner() -> list[str]:
    """Return the words before a command that end it when the process that started it dies, by whatever signal."""
    setpriv = shutil.which("setpriv")
    return [] if setpriv is None else [setpriv, "--pdeathsig", "TERM", "--"]

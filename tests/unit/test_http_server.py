"""The HTTP server: signals that came before it had started, and what is called when it is told to end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SERVER = """if True:
    import asyncio, os, signal, socket
    import uvicorn
    from neuronpipe.services.gateway.http.http_server import SleepingServer

    async def application(scope, receive, send):
        raise AssertionError

    async def main():
        config = uvicorn.Config(application, lifespan="off", log_config=None)
        listening = socket.create_server(("127.0.0.1", 0))
        await SleepingServer(config, SIGNALS, lambda: print("ending")).serve(sockets=[listening])
        print("ended")

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    signal.signal(signal.NUMBER, lambda *_: print("told as before"))
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.kill(os.getpid(), signal.NUMBER)
    asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_came_before_the_server_had_started_ends_it_in_order(number: signal.Signals) -> None:
    script = SERVER.replace("NUMBER", number.name)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["ending", "told as before", "ended"]

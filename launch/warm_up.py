"""Warm-up as people see it: how much of what is loaded ahead of need is there, of a run that serves meanwhile."""

from __future__ import annotations

import time

from neuronpipe.launch.client import Client
from neuronpipe.launch.progress import Progress
from neuronpipe.launch.sizes import show_bytes
from neuronpipe.protocol.messages.client import WarmUp

POLL_S = 0.1
UNKNOWN_S = 1.0  # a run that has not begun within this time has nothing to warm up, or a loader that does not tell


def show_warm_up(warm_up: WarmUp | None) -> str:
    """`43 %, 1.8 GiB of 4.2 GiB`."""
    if warm_up is None:
        return "not begun"
    share = 100 * warm_up.loaded_bytes // max(1, warm_up.total_bytes)
    return f"{share} %, {show_bytes(warm_up.loaded_bytes)} of {show_bytes(warm_up.total_bytes)}"


def follow_warm_up(client: Client, *, plain: bool) -> None:
    """Show progress until all of it is there. Raises UserError when the run ends first. plain: lines, not a bar."""
    unknown_until = time.monotonic() + UNKNOWN_S
    with Progress("warming up", "bytes", plain=plain) as progress:
        while True:
            warm_up = client.status().warm_up
            if warm_up.done if warm_up is not None else time.monotonic() > unknown_until:
                return
            if warm_up is not None:
                progress(warm_up.loaded_bytes, warm_up.total_bytes)
            time.sleep(POLL_S)

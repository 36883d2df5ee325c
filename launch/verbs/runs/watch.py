"""`neuronpipe watch [RUN ...] [--json] [--once]`: follow live runs; `--invite` lets others watch one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import time
from pathlib import Path

from neuronpipe.launch.watch.sources import Source, WaitReport, open_source
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.snapshot import Snapshot
from neuronpipe.protocol.run_directory import RunDirectory

POLL_S = 0.05
EVERY_S = 0.25
MIN_S, MAX_S = 0.05, 3600.0
FIRST_S = 0.5  # until a first snapshot has its rates and the coordinator's report
LOOPBACK = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run directory, or tcp://... invitation (default: every live run)"
    )
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        dest="more",
        metavar="DIR",
        help="run directory, like RUN; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print events and snapshots as lines of JSON")
    parser.add_argument("--once", action="store_true", help="show each run once (the default without a terminal)")
    parser.add_argument(
        "--every", type=float, default=EVERY_S, metavar="S", help="seconds between snapshots (default: %(default)s)"
    )
    parser.add_argument("--invite", action="store_true", help="let others watch over TCP, with the printed invitation")
    parser.add_argument(
        "--host", default=LOOPBACK, help="--invite: address to listen on; 0.0.0.0: all addresses (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=0, help="--invite: port to listen on (default: any free one)")


def main(arguments: argparse.Namespace) -> int:
    if not MIN_S <= arguments.every <= MAX_S:
        raise UserError(f"--every {arguments.every:g}: between {MIN_S:g} and {MAX_S:g}")
    if not 0 <= arguments.port < 1 << 16:
        raise UserError(f"--port {arguments.port}: between 0 and 65535")
    addresses = [*arguments.runs, *arguments.more]
    if arguments.invite:
        return _invite(addresses, arguments.host, arguments.port)
    if arguments.host != LOOPBACK or arguments.port:
        raise UserError("--host and --port are for --invite; an invitation names its own")
    if not addresses:
        addresses = [str(directory.path) for directory, _ in RunDirectory.live()]
    with contextlib.ExitStack() as stack:
        sources = []
        for address in addresses:
            sources.append(open_source(address))
            stack.callback(sources[-1].close)
        with contextlib.suppress(KeyboardInterrupt):
            if arguments.once or not (arguments.json or sys.stdout.isatty()):
                _once(sources, arguments.json)
            elif arguments.json:
                _stream(sources, arguments.every)
            else:
                _screen(sources, arguments.every)
    return 0


def _once(sources: list[Source], as_json: bool) -> None:
    """Show one snapshot of each run, as soon as there is one."""
    began = time.monotonic()
    waiting, waits = list(sources), WaitReport()
    while waiting:
        ripe = time.monotonic() - began > FIRST_S
        for source in list(waiting):
            source.poll(True)
            if source.ended and source.latest is None:
                raise UserError(f"{source.name}: {source.ended}")
            if source.ended or (ripe and source.has_answer):
                waiting.remove(source)
        waits.say(waiting)
        time.sleep(POLL_S)
    if as_json:
        for source in sources:
            _print(source, source.latest)
        return
    from neuronpipe.launch.watch.screen import View, render
    from rich.console import Console

    console = Console()
    console.print(render([View(source.name, source.latest, source.ended) for source in sources], console.width))


def _stream(sources: list[Source], every_s: float) -> None:
    """Print a first snapshot of each run, then events as they come, with snapshots in between."""
    due_at = 0.0
    live, waits = list(sources), WaitReport()
    while live:
        due = time.monotonic() >= due_at
        due_at = time.monotonic() + every_s if due else due_at
        for source in list(live):
            begun, before = source.has_answer, source.latest
            for event in source.poll(due or not begun):
                if begun:
                    _print(source, event)
            if source.has_answer and source.latest is not before:
                _print(source, source.latest)
            if source.ended:
                print(json.dumps({"type": "Ended", "source": source.name, "reason": source.ended}), flush=True)
                live.remove(source)
        sys.stdout.flush()
        waits.say(live)
        time.sleep(POLL_S)


def _print(source: Source, message: Message | None) -> None:
    if message is not None:
        fields = dataclasses.asdict(message)  # type: ignore[call-overload]
        if isinstance(message, Snapshot):
            fields = {"id": fields.pop("run"), **fields}  # the field's name in other verbs
        print(json.dumps({"type": type(message).__name__, "source": source.name, **fields}))


def _screen(sources: list[Source], every_s: float) -> None:
    """Use the whole screen of the terminal, until q is pressed or every run has ended."""
    from neuronpipe.launch.watch.pager import Keyboard, Pager
    from neuronpipe.launch.watch.screen import View, render
    from rich.console import Console
    from rich.live import Live

    console = Console()
    views = [View(source.name) for source in sources]
    pager = Pager()
    due_at = 0.0

    def draw() -> None:
        page = console.render_lines(render(views, console.width), pad=False)
        live.update(pager.visible(page, console.height), refresh=True)

    with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while not all(source.ended for source in sources):
            fresh = time.monotonic() >= due_at
            for source in sources:
                if not source.ended:
                    source.poll(fresh)
            if fresh:
                due_at = time.monotonic() + every_s
                for view, source in zip(views, sources, strict=True):
                    if source.latest is not None and source.latest is not view.snapshot:
                        view.show(source.latest)
                    view.ended, view.awaits = source.ended, source.awaits
                draw()
            pressed = keyboard.pressed(POLL_S)
            if pressed in ("q", "Q", "\x1b"):
                return
            if pager.move(pressed):
                draw()
    for source in sources:
        print(f"{source.name}: {source.ended}")


def _invite(addresses: list[str], host: str, port: int) -> int:
    """Let others watch one run, until it ends or Ctrl-C."""
    from neuronpipe.services.monitor.observer import Observer
    from neuronpipe.services.monitor.watch_server import WatchServer
    from neuronpipe.services.runtime.reachable_addresses import reached_at

    if len(addresses) > 1:
        raise UserError("--invite lets others watch one run; name one")
    closing = False

    def close(*_: object) -> None:
        nonlocal closing
        closing = True

    with Observer(Path(addresses[0]) if addresses else None) as observer:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, close)
        server = WatchServer(observer, host, port)
        try:
            print(f"neuronpipe watch '{server.address}'", flush=True)
            reached = reached_at(host)[0]
            reach = "this machine alone; see --host" if reached == LOOPBACK else f"any machine that reaches {reached}"
            print(f"anyone with this line can watch, from {reach}; Ctrl-C ends it", file=sys.stderr)
            server.serve(lambda: closing)
        finally:
            server.close()
    return 0

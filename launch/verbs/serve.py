"""`neuronpipe serve [PACKAGE ...]`: a run with a gateway, until Ctrl-C; or a gateway onto a run that is live; or
several packages, whose runs come and go. A run of its own whose processes died too often is followed by another one."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from neuronpipe.launch.client import STARTING, Client, described, follow_warm_up, run_ended
from neuronpipe.launch.formats import as_typed, line_to_paste, parse_time, show_bytes, show_time
from neuronpipe.launch.planning import (
    DEMO,
    add_packages_argument,
    add_plan_arguments,
    add_use_argument,
    asked_of_plan,
    implementations,
    open_package,
    package_and_plan,
    what_the_demo_is,
)
from neuronpipe.launch.progress import Elapsed, heard
from neuronpipe.launch.serving.host import Host, offered, shared_limit_bytes, whole_limit_bytes
from neuronpipe.launch.serving.restarting import Backoff, refuse_for
from neuronpipe.launch.supervisor.start import LiveRun, started_run
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.plan.memory_budget import templates_bytes
from neuronpipe.plans.pull.package_library import package_names, packages_folder
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.run_directory import RunDirectory, RunFile
from neuronpipe.services.gateway.gateway_service import HostedPackages, serve
from neuronpipe.services.runtime.implementations import Implementations
from neuronpipe.services.runtime.listener import KEY_VARIABLE, Listener, bind, checked_origins, chosen_key

HOST, PORT = "127.0.0.1", 8080
KEEP_ALIVE_S = 300.0
POLL_S = 0.02
WATCH_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_packages_argument(parser)
    parser.add_argument("--all", action="store_true", help="serve every package that `neuronpipe list` shows")
    parser.add_argument(
        "--keep-alive",
        type=parse_time,
        metavar="TIME",
        help="end a run that nobody has used for so long, and start it again for the next request: 30s, 5m, 2h or "
        f"forever (default: {show_time(KEEP_ALIVE_S)} with several packages, forever with one)",
    )
    parser.add_argument(
        "--host",
        default=HOST,
        help="address to listen on; any but loopback needs a key (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=PORT, help="0 takes any free port (default: %(default)s)")
    parser.add_argument(
        "--key", metavar="KEY", help=f"key that clients must send (default: {KEY_VARIABLE} of the environment)"
    )
    parser.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin use the server, like https://chat.example.org; localhost is any port of "
        "this machine, * is any page; may be repeated (default: none)",
    )
    add_plan_arguments(parser)
    add_use_argument(parser)
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="directory of a live run to serve, or of a new run (default: a new run)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object when it is ready")


def main(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C, which is how it is meant to end."""
    with contextlib.suppress(KeyboardInterrupt):
        _serve(arguments)
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    key = chosen_key(arguments.key)
    paths = _all_packages() if arguments.all else arguments.package
    if len(paths) > 1 or arguments.keep_alive is not None:
        _serve_several(arguments, paths, key)
        return
    arguments.package = paths[0]
    if (found := _live(arguments.run)) is not None:
        _attach(arguments, *found, key)
        return
    measured: list[str] = []
    package, plan = package_and_plan(arguments, several=True, gateway=True, measured=measured.append)
    uses = implementations(arguments.use, plan)
    listener = bind(arguments.host, arguments.port, key, checked_origins(arguments.cors))
    backoff = Backoff()
    while True:
        began = time.monotonic()
        reason = _serve_run(arguments, package, plan, uses, listener, measured, again=backoff.runs_ended > 0)
        wait_s = backoff.after(time.monotonic() - began)
        _warn(f"the run has ended: {reason}; another one is started in {wait_s:.0f} s")
        refuse_for(listener, wait_s, reason)


def _all_packages() -> list[Path]:
    names = package_names()
    if not names:
        raise UserError("--all: there is no package with a name; get one with `neuronpipe pull ORG/NAME`")
    return [packages_folder() / name for name in names]


def _serve_several(arguments: argparse.Namespace, paths: list[Path], key: str | None) -> None:
    """Serve packages whose runs come and go, within one limit."""
    for option, given in (("--run", arguments.run), ("--plan", arguments.plan)):
        if given is not None:
            raise UserError(f"{option} {given}: is of one run, and runs come and go here; leave it out")
    keep_alive_s = KEEP_ALIVE_S if arguments.keep_alive is None else arguments.keep_alive
    measured: list[str] = []
    offers = offered(arguments, paths, measured.append)
    whole_bytes = whole_limit_bytes(arguments, paths[0])
    hosted = HostedPackages(
        packages=[(one.package, one.plan) for one in offers.values()],
        limit_bytes=shared_limit_bytes(arguments, whole_bytes, offers.values()),
        keep_alive_s=keep_alive_s,
        templates_bytes=templates_bytes(whole_bytes),
    )
    listener = bind(arguments.host, arguments.port, key, checked_origins(arguments.cors))

    def tell() -> None:
        _say_several(arguments, listener, hosted)
        for line in measured:
            _warn(line)

    Host(offers, hosted, listener, _warn).serve(tell)


def _serve_run(
    arguments: argparse.Namespace,
    package: Package,
    plan: Plan,
    uses: Implementations,
    listener: Listener,
    measured: Sequence[str],
    *,
    again: bool,
) -> str:
    """Serve with one run. measured: lines for a person, below the address. again: others were served before. Returns
    why it ended where the next one may fare better. Raises UserError where it would not, and when the first one never
    served anything."""
    with (
        contextlib.ExitStack() as after,
        started_run(package, plan, arguments.run, stays=False, uses=uses, listener=listener) as live,
    ):
        try:
            reason = _wait_until_ready(live, listener, plain=arguments.json)
            served = reason is None
            if served and again:
                _warn(f"serving again, by the run {live.directory.path}")
            elif served:
                _say(arguments, listener, live.directory, live.directory.read(), joined=False)
                for line in measured:
                    _warn(line)
            if served:
                # Closed when the run has ended: a request without an answer must not delay the end.
                client = after.enter_context(Client(live.directory.endpoint(CONTROL), live.failed))
                reason = _warm_up(client, plain=arguments.json)
            while reason is None:
                reason = live.failed(None)
        except KeyboardInterrupt:
            os.close(listener.descriptor)  # the gateway's alone: no client must wait at a socket that nobody serves
            raise
    if not live.overcome or not (served or again):
        raise UserError(reason)
    return reason


def _warm_up(client: Client, *, plain: bool) -> str | None:
    """Show how far memory is until it is warm: None; or why the run ended before."""
    try:
        follow_warm_up(client, plain=plain)
    except UserError as ended:
        return str(ended)
    return None


def _warn(line: str) -> None:
    print(f"neuronpipe: {line}", file=sys.stderr, flush=True)
    heard()


def _live(path: Path | None) -> tuple[RunDirectory, RunFile] | None:
    if path is None:
        return None
    try:
        return RunDirectory.find(path)
    except NotRunning:
        return None


def _attach(arguments: argparse.Namespace, directory: RunDirectory, run_file: RunFile, key: str | None) -> None:
    """Be the gateway of a run that another command started. Raises UserError when it ends first."""
    package = Package.open(Path(run_file.package))
    meant = package if arguments.package is DEMO else open_package(arguments.package, plain=arguments.json)
    if meant.path.resolve() != package.path.resolve():
        raise UserError(f"{arguments.package}: the run at {directory.path} has another package, {package.path}")
    _require_no_plan(arguments, directory)
    listener = bind(arguments.host, arguments.port, key, checked_origins(arguments.cors))
    _say(arguments, listener, directory, run_file, joined=True)
    ended = run_ended(directory)
    serve(package, directory, listener, ended)
    if (reason := ended()) is not None:
        raise UserError(reason)


def _require_no_plan(arguments: argparse.Namespace, directory: RunDirectory) -> None:
    """Refuse options that ask for a plan: a live run has its plan and its processes already."""
    for option in [*asked_of_plan(arguments), *(["--use"] if arguments.use else [])]:
        raise UserError(f"{option}: the run at {directory.path} is live and keeps its plan; leave {option} out")


def _say_several(arguments: argparse.Namespace, listener: Listener, hosted: HostedPackages) -> None:
    models = {package.manifest.name: plan.memory.total_bytes() for package, plan in hosted.packages}
    if arguments.json:
        said = {
            "address": listener.address,
            "addresses": listener.addresses,
            "memory_bytes": hosted.limit_bytes,
            "keep_alive_s": hosted.keep_alive_s if math.isfinite(hosted.keep_alive_s) else None,
            "models": [{"model": name, "bytes": size} for name, size in models.items()],
        }
        print(json.dumps(said), flush=True)
        return
    until = "for good" if math.isinf(hosted.keep_alive_s) else f"until unused for {show_time(hosted.keep_alive_s)}"
    facts = [("model", f"{name}, {show_bytes(size)} when it has a run") for name, size in models.items()]
    facts += [("runs", f"from the first request that names the model, {until}")]
    facts += [("memory", f"{show_bytes(hosted.limit_bytes)} for all runs together")]
    _print(listener, f"{len(models)} {'model' if len(models) == 1 else 'models'}", facts, line_to_paste("ps"))


def _print(listener: Listener, what: str, facts: Sequence[tuple[str, str]], look: str) -> None:
    """What is served where, for a person. look: the command that shows the inside."""
    address, *others = listener.addresses
    print(f"serving {what} at {address}")
    lines = [
        *([("also at", ", ".join(others))] if others else []),
        *facts,
        ("OpenAI clients", f"base URL {address}/v1, {'the key' if listener.key else 'any key'}"),
        ("look inside", f"{address} in a browser, or {look}"),
        ("end", "Ctrl-C"),
    ]
    for name, text in lines:
        print(f"  {name + ':':<16} {text}")
    sys.stdout.flush()
    heard()


def _wait_until_ready(live: LiveRun, listener: Listener, *, plain: bool) -> str | None:
    """Until the gateway says that requests are served: None; or why the run ended before. plain: lines on stderr, not
    one that changes."""
    place, waits = listener.address.removeprefix("http://"), ""
    with Elapsed(plain=plain) as elapsed:
        while (reason := live.failed()) is None:
            elapsed.say(f"{STARTING}: {waits}" if waits else STARTING)
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
                connection = http.client.HTTPConnection(place, timeout=WATCH_S)
                connection.request("GET", "/health")
                response = connection.getresponse()
                if response.status == 200:
                    return None
                waits = json.load(response)["error"]["message"]
            time.sleep(POLL_S)
    return reason


def _say(
    arguments: argparse.Namespace, listener: Listener, directory: RunDirectory, run_file: RunFile, *, joined: bool
) -> None:
    facts, place = described(directory, run_file), str(directory.path)
    if arguments.json:
        said = {"address": listener.address, "addresses": listener.addresses, **facts, "joined": joined}
        print(json.dumps(said), flush=True)
        heard()
        return
    lines = [("run", f"{'one that was live already' if joined else 'a new one'}, {place}")]
    if not joined and arguments.package is DEMO:
        lines.append(("model", as_typed(what_the_demo_is())))
    _print(listener, str(facts["model"]), lines, line_to_paste("watch", place))

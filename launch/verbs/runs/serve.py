"""`neuronpipe serve [PACKAGE ...]`: serve models over HTTP until Ctrl-C.

With one package, the command has a run with a gateway; a run whose processes die too often is followed by a new one.
With --run of a live run, the command is a gateway to that run. With several packages, runs come and go
(launch/serving/host.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from neuronpipe.launch.arguments import plan_arguments as planning
from neuronpipe.launch.arguments.values import parse_time
from neuronpipe.launch.catalog.offer import demo_notice, package_or_offer
from neuronpipe.launch.client import STARTING, Client, follow_warm_up, run_ended, run_facts
from neuronpipe.launch.formats import as_typed, line_to_paste, show_bytes, show_time
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.implementations import add_use_argument, implementations
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.package_argument import add_packages_argument, open_package
from neuronpipe.launch.planning.plan import package_and_plan
from neuronpipe.launch.progress import Elapsed, note_output
from neuronpipe.launch.serving.host import Host
from neuronpipe.launch.serving.installation import install, uninstall
from neuronpipe.launch.serving.offers import make_offers, shared_limit_bytes, total_limit_bytes
from neuronpipe.launch.serving.restarting import Backoff, refuse_for
from neuronpipe.launch.supervisor.start import LiveRun, started_run
from neuronpipe.plans.measure.probe import has_device_profile
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.plan.memory_budget import templates_bytes
from neuronpipe.plans.pull.package_library import package_names, packages_folder
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.run_directory import RunDirectory, RunFile
from neuronpipe.services.gateway.gateway_service import HostedPackages, serve
from neuronpipe.services.runtime.implementations import Implementations
from neuronpipe.services.runtime.listener import KEY_VARIABLE, Listener, bind, checked_origins, chosen_key

HOST, PORT = "127.0.0.1", 8080
KEEP_ALIVE_S = 300.0
POLL_S = 0.02
HEALTH_TIMEOUT_S = 1.0

COMMON_OPTIONS = ("package", "all", "keep_alive", "host", "port", "key", *planning.COMMON, "sequences", "run", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_packages_argument(parser)
    parser.add_argument("--all", action="store_true", help="serve every package that `neuronpipe list` shows")
    parser.add_argument(
        "--keep-alive",
        type=parse_time,
        metavar="TIME",
        help="end a run that was not used for this time, and start it again for the next request: 30s, 5m, 2h or "
        f"forever (default: {show_time(KEEP_ALIVE_S)} with several packages, forever with one)",
    )
    parser.add_argument(
        "--host",
        default=HOST,
        help="address to listen on; any but loopback needs a key (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=PORT, help="port; 0 takes any free one (default: %(default)s)")
    parser.add_argument(
        "--key", metavar="KEY", help=f"key that clients must send (default: ${KEY_VARIABLE}, else none)"
    )
    parser.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin use the server, e.g. https://chat.example.org; localhost allows any port of "
        "this machine, * any page; may be repeated (default: none)",
    )
    planning.add_plan_arguments(parser)
    add_use_argument(parser)
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="directory of a live run to serve, or of a new run (default: a new run)",
    )
    planning.add_idle_profile_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object when requests are served")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--install",
        action="store_true",
        help="start this server at every login, and now: writes a unit for systemd, or on a phone a script for "
        "Termux:Boot. Runs end after five minutes without requests unless --keep-alive says otherwise",
    )
    begin.add_argument("--uninstall", action="store_true", help="end the installed server and remove its file")


@frozen(kw_only=True)
class ServeOptions:
    """The options of the server, and those of its runs.

    run: --run
    is_demo: whether no package was named
    measures_idle: whether the device may be measured while a run is idle
    """

    host: str
    port: int
    key: str | None
    origins: tuple[str, ...]
    as_json: bool
    run: Path | None
    uses: tuple[str, ...]
    plan: PlanOptions
    is_demo: bool
    measures_idle: bool = True

    def listen(self) -> Listener:
        return bind(self.host, self.port, self.key, checked_origins(self.origins))


def main(arguments: argparse.Namespace) -> int:
    key = chosen_key(arguments.key)
    if arguments.uninstall:
        uninstall(as_json=arguments.json)
        return 0
    paths = _all_packages() if arguments.all else arguments.package
    options = ServeOptions(
        host=arguments.host,
        port=arguments.port,
        key=key,
        origins=tuple(arguments.cors),
        as_json=arguments.json,
        run=arguments.run,
        uses=tuple(arguments.use),
        plan=planning.plan_options(arguments),
        is_demo=paths[0] is DEMO,
        measures_idle=not arguments.no_idle_profile,
    )
    if arguments.install:
        if options.is_demo:
            raise UserError("--install: name the packages to serve, or give --all")
        for path in paths:
            if not path.exists():
                raise UserError(f"--install: {path} does not exist; `neuronpipe list` shows the packages with names")
        # Refuses a host without a key and wrong origins now. The port may still be that of the server to replace.
        os.close(dataclasses.replace(options, port=0).listen().descriptor)
        install(arguments.words, key, as_json=arguments.json)
        return 0
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the way to end it
        if len(paths) > 1 or arguments.keep_alive is not None:
            keep_alive_s = KEEP_ALIVE_S if arguments.keep_alive is None else arguments.keep_alive
            _serve_several(options, paths, keep_alive_s)
        elif (live := _find_live(options.run)) is not None:
            _serve_live(options, paths[0], *live)
        else:
            path = package_or_offer(paths[0], options.plan, may_ask=not options.as_json)
            _serve_one(dataclasses.replace(options, is_demo=path is DEMO), path)
    return 0


def _all_packages() -> list[Path]:
    names = package_names()
    if not names:
        raise UserError("--all: there is no package with a name; get one with `neuronpipe pull ORG/NAME`")
    return [packages_folder() / name for name in names]


# ---- one package -----------------------------------------------------------------------------------------------------
def _serve_one(options: ServeOptions, path: Path) -> None:
    """Serve one package. A run that ends by itself after it has served is followed by a new one."""
    measurements: list[str] = []
    package, plan = package_and_plan(
        path, options.plan, plain=options.as_json, several=True, gateway=True, report=measurements.append
    )
    uses = implementations(options.uses, plan)
    listener = options.listen()
    backoff = Backoff()
    while True:
        began = time.monotonic()
        is_first = backoff.runs_ended == 0
        reason = _serve_run(options, package, plan, uses, listener, measurements, is_first=is_first)
        wait_s = backoff.after(time.monotonic() - began)
        _warn(f"the run has ended: {reason}; another one is started in {wait_s:.0f} s")
        refuse_for(listener, wait_s, reason)


def _serve_run(
    options: ServeOptions,
    package: Package,
    plan: Plan,
    uses: Implementations,
    listener: Listener,
    measurements: Sequence[str],
    *,
    is_first: bool,
) -> str:
    """Serve with one run, and return the reason why it ended.

    measurements: lines for the user, printed after the address

    Raises UserError if another run would end in the same way, and if the first one never served.
    """
    measures = options.measures_idle and not has_device_profile(package.path)
    with (
        contextlib.ExitStack() as after_run,
        started_run(
            package,
            plan,
            options.run,
            stays=False,
            uses=uses,
            listener=listener,
            keeps_history=options.plan.keeps_history and not options.uses,
            measures_idle=measures,
        ) as live,
    ):
        try:
            reason = _wait_until_ready(live, listener, plain=options.as_json)
            has_served = reason is None
            if has_served and not is_first:
                _warn(f"serving again, by the run {live.directory.path}")
            elif has_served:
                _print_run(options, listener, live.directory, live.directory.read(), is_joined=False)
                for line in measurements:
                    _warn(line)
            if has_served:
                # The client is closed after the run has ended: an open request must not delay the end.
                client = after_run.enter_context(Client(live.directory.endpoint(CONTROL), live.failed))
                reason = _warm_up(client, plain=options.as_json)
            while reason is None:
                reason = live.failed(None)
        except KeyboardInterrupt:
            os.close(listener.descriptor)  # only the gateway has it now: no client may wait at a port nobody serves
            raise
    if not live.is_exhausted or (is_first and not has_served):
        raise UserError(reason)
    return reason


def _warm_up(client: Client, *, plain: bool) -> str | None:
    """Show progress until memory is warm; return the reason if the run ends before."""
    try:
        follow_warm_up(client, plain=plain)
    except UserError as ended:
        return str(ended)
    return None


def _wait_until_ready(live: LiveRun, listener: Listener, *, plain: bool) -> str | None:
    """Poll the gateway until requests are served; return the reason if the run ends before."""
    address, waiting_for = listener.address.removeprefix("http://"), ""
    with Elapsed(plain=plain) as elapsed:
        while (reason := live.failed()) is None:
            elapsed.say(f"{STARTING}: {waiting_for}" if waiting_for else STARTING)
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
                connection = http.client.HTTPConnection(address, timeout=HEALTH_TIMEOUT_S)
                connection.request("GET", "/health")
                response = connection.getresponse()
                if response.status == 200:
                    return None
                waiting_for = json.load(response)["error"]["message"]
            time.sleep(POLL_S)
    return reason


# ---- a live run ------------------------------------------------------------------------------------------------------
def _find_live(path: Path | None) -> tuple[RunDirectory, RunFile] | None:
    if path is None:
        return None
    try:
        return RunDirectory.find(path)
    except NotRunning:
        return None


def _serve_live(options: ServeOptions, path: Path, directory: RunDirectory, run_file: RunFile) -> None:
    """Be the gateway of a run that another command started. Raises UserError when the run ends."""
    package = Package.open(Path(run_file.package))
    requested = package if options.is_demo else open_package(path, plain=options.as_json)
    if requested.path.resolve() != package.path.resolve():
        raise UserError(f"{path}: the run at {directory.path} has another package, {package.path}")
    for option in [*options.plan.typed, *(["--use"] if options.uses else [])]:
        raise UserError(f"{option}: the run at {directory.path} is live and keeps its plan; leave {option} out")
    listener = options.listen()
    _print_run(options, listener, directory, run_file, is_joined=True)
    ended = run_ended(directory)
    serve(package, directory, listener, ended)
    if (reason := ended()) is not None:
        raise UserError(reason)


# ---- several packages ------------------------------------------------------------------------------------------------
def _serve_several(options: ServeOptions, paths: list[Path], keep_alive_s: float) -> None:
    """Serve packages whose runs come and go, within one memory limit."""
    for option, value in (("--run", options.run), ("--plan", options.plan.plan_file)):
        if value is not None:
            raise UserError(f"{option} {value}: applies to one run, and here runs come and go; leave it out")
    measurements: list[str] = []
    offers = make_offers(paths, options.plan, options.uses, plain=options.as_json, report=measurements.append)
    total_bytes = total_limit_bytes(options.plan, paths[0])
    hosted = HostedPackages(
        packages=[(offer.package, offer.plan) for offer in offers.values()],
        limit_bytes=shared_limit_bytes(options.plan, total_bytes, offers.values()),
        keep_alive_s=keep_alive_s,
        templates_bytes=templates_bytes(total_bytes),
    )
    listener = options.listen()

    def announce() -> None:
        _print_several(options, listener, hosted)
        for line in measurements:
            _warn(line)

    Host(offers, hosted, listener, _warn).serve(announce)


# ---- output ----------------------------------------------------------------------------------------------------------
def _warn(line: str) -> None:
    print(f"neuronpipe: {line}", file=sys.stderr, flush=True)
    note_output()


def _print_run(
    options: ServeOptions, listener: Listener, directory: RunDirectory, run_file: RunFile, *, is_joined: bool
) -> None:
    facts, path = run_facts(directory, run_file), str(directory.path)
    if options.as_json:
        fields = {"address": listener.address, "addresses": listener.addresses, **facts, "joined": is_joined}
        print(json.dumps(fields), flush=True)
        note_output()
        return
    lines = [("run", f"{'a live one' if is_joined else 'a new one'}, {path}")]
    if not is_joined and options.is_demo:
        lines.append(("model", as_typed(demo_notice(options.plan))))
    _print_address(listener, str(facts["model"]), lines, line_to_paste("watch", path))


def _print_several(options: ServeOptions, listener: Listener, hosted: HostedPackages) -> None:
    sizes = {package.manifest.name: plan.memory.total_bytes() for package, plan in hosted.packages}
    if options.as_json:
        fields = {
            "address": listener.address,
            "addresses": listener.addresses,
            "memory_bytes": hosted.limit_bytes,
            "keep_alive_s": hosted.keep_alive_s if math.isfinite(hosted.keep_alive_s) else None,
            "models": [{"model": name, "bytes": size_bytes} for name, size_bytes in sizes.items()],
        }
        print(json.dumps(fields), flush=True)
        return
    until = "for good" if math.isinf(hosted.keep_alive_s) else f"until unused for {show_time(hosted.keep_alive_s)}"
    lines = [("model", f"{name}, {show_bytes(size_bytes)} while it has a run") for name, size_bytes in sizes.items()]
    lines += [("runs", f"from the first request that names the model, {until}")]
    lines += [("memory", f"{show_bytes(hosted.limit_bytes)} for all runs together")]
    title = f"{len(sizes)} {'model' if len(sizes) == 1 else 'models'}"
    _print_address(listener, title, lines, line_to_paste("ps"))


def _print_address(listener: Listener, title: str, facts: Sequence[tuple[str, str]], inspection: str) -> None:
    """Print what is served where.

    inspection: the command that shows the state of the runs
    """
    address, *more_addresses = listener.addresses
    print(f"serving {title} at {address}")
    lines = [
        *([("also at", ", ".join(more_addresses))] if more_addresses else []),
        *facts,
        ("OpenAI clients", f"base URL {address}/v1, {'the key' if listener.key else 'any key'}"),
        ("look inside", f"{address} in a browser, or {inspection}"),
        ("end", "Ctrl-C"),
    ]
    for name, text in lines:
        print(f"  {name + ':':<16} {text}")
    sys.stdout.flush()
    note_output()

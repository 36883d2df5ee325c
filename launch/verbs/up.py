"""`neuronpipe up [PACKAGE] [--run DIR]`: start a run that stays, and return when it is ready."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from neuronpipe.launch.client import Client, await_ready, described, follow_warm_up, show_warm_up
from neuronpipe.launch.formats import as_typed, line_to_paste
from neuronpipe.launch.planning import (
    DEMO,
    add_package_argument,
    add_plan_arguments,
    add_use_argument,
    implementations,
    package_and_plan,
    what_the_demo_is,
)
from neuronpipe.launch.supervisor.start import started_run
from neuronpipe.protocol.links import CONTROL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    add_plan_arguments(parser)
    add_use_argument(parser)
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: a new one)")
    parser.add_argument("--warm", action="store_true", help="return when memory is warm, not when requests are served")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    measured: list[str] = []
    package, plan = package_and_plan(arguments, several=True, measured=measured.append)
    uses = implementations(arguments.use, plan)
    with (
        started_run(package, plan, arguments.run, stays=True, uses=uses) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
    ):
        await_ready(client, plain=arguments.json)
        if arguments.warm:
            follow_warm_up(client, plain=arguments.json)
        warm_up = client.status().warm_up
        facts = described(live.directory, live.directory.read())
    if arguments.json:
        print(json.dumps(facts))
    else:
        place = live.directory.path
        print(f"up: {place}")
        if warm_up is not None and not warm_up.done:
            print(f"  it is warming up and serves meanwhile: {show_warm_up(warm_up)}; `up --warm` waits for it")
        if arguments.package is DEMO:
            print(f"  {as_typed(what_the_demo_is())}")
        for purpose, verb in (("ask it", "ask"), ("talk to it", "chat"), ("watch it", "watch"), ("end it", "down")):
            prompt = ("TEXT",) if verb == "ask" else ()
            print(f"  {purpose + ':':<12}{line_to_paste(verb, '--run', place, *prompt)}", flush=True)
    for line in measured:
        print(f"neuronpipe: {line}", file=sys.stderr)
    return 0

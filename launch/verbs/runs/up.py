"""`neuronpipe up [PACKAGE] [--run DIR]`: start a run that stays, and return when it is ready."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from neuronpipe.launch.arguments import plan_arguments as planning
from neuronpipe.launch.catalog.offer import demo_notice
from neuronpipe.launch.client import Client, await_ready, follow_warm_up, run_facts, show_warm_up
from neuronpipe.launch.formats import as_typed, line_to_paste
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.implementations import add_use_argument, implementations
from neuronpipe.launch.planning.package_argument import add_package_argument
from neuronpipe.launch.planning.plan import package_and_plan
from neuronpipe.launch.supervisor.start import started_run
from neuronpipe.plans.measure.probe import has_device_profile
from neuronpipe.protocol.links import CONTROL

COMMON_OPTIONS = ("package", *planning.COMMON, "sequences", "run", "warm", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    planning.add_plan_arguments(parser)
    add_use_argument(parser)
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: a new one)")
    parser.add_argument("--warm", action="store_true", help="return when memory is warm, not when requests are served")
    planning.add_idle_profile_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    options = planning.plan_options(arguments)
    measurements: list[str] = []
    package, plan = package_and_plan(
        arguments.package, options, plain=arguments.json, several=True, report=measurements.append
    )
    uses = implementations(arguments.use, plan)
    measures = not arguments.no_idle_profile and not has_device_profile(package.path)
    with (
        started_run(
            package,
            plan,
            arguments.run,
            stays=True,
            uses=uses,
            measures_idle=measures,
            keeps_history=options.keeps_history and not arguments.use,
        ) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
    ):
        await_ready(client, plain=arguments.json)
        if arguments.warm:
            follow_warm_up(client, plain=arguments.json)
        warm_up = client.status().warm_up
        facts = run_facts(live.directory, live.directory.read())
    if arguments.json:
        print(json.dumps(facts))
    else:
        directory = live.directory.path
        print(f"up: {directory}")
        if warm_up is not None and not warm_up.done:
            print(f"  it is warming up and serves meanwhile: {show_warm_up(warm_up)}; `up --warm` waits for it")
        if arguments.package is DEMO:
            print(f"  {as_typed(demo_notice(options))}")
        for purpose, verb in (("ask it", "ask"), ("talk to it", "chat"), ("watch it", "watch"), ("end it", "down")):
            prompt = ("TEXT",) if verb == "ask" else ()
            print(f"  {purpose + ':':<12}{line_to_paste(verb, '--run', directory, *prompt)}", flush=True)
    for line in measurements:
        print(f"neuronpipe: {line}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Python's teardown would write to memory that the run has inherited: each page would be copied, within its limit.
    os._exit(0)

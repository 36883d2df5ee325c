"""`neuronpipe plan [PACKAGE] [--device DEVICE] [-o FILE] [--diff FILE] [--json]`: show the plan and what else could be
had, compare it or write it."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from neuronpipe.launch.planning import add_package_argument, add_plan_arguments, planned
from neuronpipe.plans.package.whole import whole_file
from neuronpipe.plans.plan import tradeoffs
from neuronpipe.plans.plan.explain import difference, explain
from neuronpipe.plans.plan.plan import read_plan
from neuronpipe.plans.simulate.device_file import THIS_MACHINE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    add_plan_arguments(parser)
    parser.add_argument("--gateway", action="store_true", help="a plan for `serve`: with a gateway")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="plan for a device that need not be here: a name that `neuronpipe simulate` knows, e.g. oneplus-12, or a "
        "device file (default: this machine)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan, for --plan FILE")
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--diff", type=Path, metavar="FILE", help="show where the plan differs from this one")
    show.add_argument("--json", action="store_true", help="print the plan as JSON")


def main(arguments: argparse.Namespace) -> int:
    elsewhere = None if arguments.device == THIS_MACHINE else arguments.device
    found = planned(arguments, several=arguments.gateway, gateway=arguments.gateway, device_file=elsewhere)
    made = found.plan
    if arguments.output is not None:
        with whole_file(arguments.output) as place:
            place.write_text(made.to_json(), encoding="utf-8")
    if arguments.diff is not None:
        print(difference(read_plan(arguments.diff), made), end="")
        return 0
    others = None if found.search is None else tradeoffs.describe(*found.search)
    if arguments.json:
        print(json.dumps(json.loads(made.to_json()) | {"search": others}, indent=2))
    else:
        print(explain(made), end="" if others is None else f"\n{tradeoffs.render(others)}")
        if elsewhere is not None:
            share = made.memory.slots_bytes / made.memory.ffn_bytes
            words = ["neuronpipe", "simulate", elsewhere, str(arguments.package), "--ffn-resident", f"{share:.0%}"]
            print(f"\nthe same in the simulator: {shlex.join(words)}")
    return 0

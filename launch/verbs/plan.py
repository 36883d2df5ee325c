"""`neuronpipe plan [PACKAGE] [-o FILE] [--diff FILE] [--json]`: show, compare or write the plan."""

from __future__ import annotations

import argparse
from pathlib import Path

from neuronpipe.launch.planning import add_package_argument, add_plan_arguments, package_and_plan
from neuronpipe.plans.package.whole import whole_file
from neuronpipe.plans.plan.explain import difference, explain
from neuronpipe.plans.plan.plan import read_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    add_plan_arguments(parser)
    parser.add_argument("--gateway", action="store_true", help="a plan for `serve`: with a gateway")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan, for --plan FILE")
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--diff", type=Path, metavar="FILE", help="show where the plan differs from this one")
    show.add_argument("--json", action="store_true", help="print the plan as JSON")


def main(arguments: argparse.Namespace) -> int:
    _, made = package_and_plan(arguments, several=arguments.gateway, gateway=arguments.gateway)
    if arguments.output is not None:
        with whole_file(arguments.output) as place:
            place.write_text(made.to_json(), encoding="utf-8")
    if arguments.diff is not None:
        print(difference(read_plan(arguments.diff), made), end="")
    else:
        print(made.to_json() if arguments.json else explain(made), end="")
    return 0

"""From a command line to a package and a plan for it: the arguments that `run`, `up`, `plan` and `perplexity` share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from neuronpipe.launch.demo import DEMO
from neuronpipe.launch.room import room_warning
from neuronpipe.launch.sizes import parse_bytes, parse_share
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.device.probe import probe
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.facts import device_facts
from neuronpipe.plans.plan.plan import GATEWAY, Plan, read_plan
from neuronpipe.plans.plan.planner import BASELINES, TECHNIQUES, Technique, Wanted, plan
from neuronpipe.plans.plan.sequences import MAX_LOSS, MAX_SEQUENCES, plan_for_several
from neuronpipe.plans.plan.validate import validate
from neuronpipe.protocol.errors import UserError


def add_package_argument(parser: argparse.ArgumentParser) -> None:
    """PACKAGE, the demo by default."""
    parser.add_argument(
        "package",
        nargs="?",
        type=Path,
        default=DEMO,
        metavar="PACKAGE",
        help="package directory (default: the demo model)",
    )


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """What a plan can be asked for."""
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--memory",
        type=parse_bytes,
        metavar="BYTES",
        help="limit for the whole run, e.g. 512MiB, interpreters included",
    )
    group.add_argument(
        "--ffn-resident",
        type=parse_share,
        metavar="SHARE",
        help="share of feed-forward bytes that may be resident, e.g. 50%%",
    )
    group.add_argument("--context", type=int, metavar="TOKENS", help="context length (default: the package's)")
    group.add_argument(
        "--sequences",
        type=int,
        default=None,
        metavar="N",
        help=f"most texts generated at once (default: 1; up and serve: up to {MAX_SEQUENCES}, as long as one text "
        f"keeps {1 - MAX_LOSS:.0%}% of its expected speed)",
    )
    group.add_argument("--workers", type=int, metavar="N", help="decode workers (default: one per fast core)")
    group.add_argument(
        "--mode",
        choices=("exact", "predicted"),
        help="exact: the output of the dense model (default); predicted: a predictor chooses the gates to compute",
    )
    group.add_argument(
        "--without",
        type=_parse_techniques,
        default=frozenset(),
        metavar="LIST",
        help=f"for experiments, leave out some of: {', '.join(TECHNIQUES)}",
    )
    group.add_argument("--baseline", choices=BASELINES, help="for experiments, plan as another system would")
    group.add_argument("--plan", type=Path, metavar="FILE", help="obey this plan instead of making one")


def _parse_techniques(text: str) -> frozenset[Technique]:
    words = {word.strip() for word in text.split(",")}
    known = frozenset(technique for technique in TECHNIQUES if technique in words)
    if unknown := words - known:
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(TECHNIQUES)}")
    return known


def asked_of_plan(arguments: argparse.Namespace) -> list[str]:
    """The options by which a plan was asked for."""
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    defaults = vars(parser.parse_args([]))
    return [f"--{name.replace('_', '-')}" for name, default in defaults.items() if getattr(arguments, name) != default]


def package_and_plan(
    arguments: argparse.Namespace, *, several: bool = False, gateway: bool = False
) -> tuple[Package, Plan]:
    """Open the package and make its plan, or read and check the one that was given; with a gateway or without.

    several: unless the arguments say how many texts there is room for, as many as cost one text hardly any speed.
    Says on stderr what of the device was measured again, and when the plan takes more memory than is available now.
    """
    if arguments.plan is not None and len(asked := asked_of_plan(arguments)) > 1:
        raise UserError(f"{asked[0]} and --plan {arguments.plan}: the plan decides that; leave one of the two out")
    package = Package.open(arguments.package)
    said: list[str] = []
    device = probe(package.path, say=said.append)
    if arguments.plan is None:
        made = _made_plan(arguments, package, device, several, gateway)
    else:
        made = _given_plan(arguments.plan, package, device, gateway)
    if (warning := room_warning(made, device)) is not None:
        said.append(warning)
    for line in said:  # not before now: a refusal is one line
        print(f"neuronpipe: {line}", file=sys.stderr)
    return package, made


def _given_plan(file: Path, package: Package, device: Device, gateway: bool) -> Plan:
    given = read_plan(file)
    given.check(package_id=package.manifest.id, device_id=device.id, where=str(file))
    validate(given, package.manifest, str(file))
    if gateway != any(seat.role == GATEWAY for seat in given.compute.seats):
        raise UserError(
            f"{file}: field 'compute.seats': "
            + ("has no gateway; `neuronpipe plan --gateway` makes" if gateway else "has a gateway; `serve` obeys")
            + " such a plan"
        )
    return given


def _made_plan(arguments: argparse.Namespace, package: Package, device: Device, several: bool, gateway: bool) -> Plan:
    if arguments.workers is not None and not 1 <= arguments.workers <= 64:
        raise UserError(f"--workers {arguments.workers}: between 1 and 64")
    wanted = Wanted(
        memory_bytes=arguments.memory,
        ffn_resident_share=arguments.ffn_resident,
        context_tokens=arguments.context,
        sequences=1 if arguments.sequences is None else arguments.sequences,
        mode=arguments.mode,
        without=arguments.without,
        baseline=arguments.baseline,
    )
    if not 1 <= wanted.sequences <= 64:
        raise UserError(f"--sequences {wanted.sequences}: between 1 and 64")
    facts = device_facts(device, arguments.workers, gateway=gateway)
    if several and arguments.sequences is None:
        return plan_for_several(package.manifest, facts, wanted)
    return plan(package.manifest, facts, wanted)

"""From a command line to a package, a plan for it, and implementations of its roles: the arguments shared by the verbs
that start a run or plan one."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.launch.formats import (
    parse_bytes,
    parse_cores,
    parse_count,
    parse_share,
    parse_speed,
    show_bytes,
    show_cores,
)
from neuronpipe.plans.device.cores import default_decode_workers, most_decode_workers, restricted
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.device.probe import probe
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.budget import MIB
from neuronpipe.plans.plan.heat import Heat
from neuronpipe.plans.plan.plan import BACKEND_ROLES, DEFAULT_BACKEND, GATEWAY, MODES, Mode, Plan, read_plan
from neuronpipe.plans.plan.planner import BASELINES, TECHNIQUES, DeviceFacts, Technique, Wanted, device_facts
from neuronpipe.plans.plan.quality import Quality, allowed_modes, show_quality
from neuronpipe.plans.plan.search import ANSWER, PRECISION, PROMPT_ALLOWANCE, USUAL, Found, Search, Space
from neuronpipe.plans.plan.sequences import MAX_LOSS, MAX_SEQUENCES, plan_for_several
from neuronpipe.plans.plan.validate import validate
from neuronpipe.plans.pull.packages import package_path, refuse_unknown
from neuronpipe.protocol.errors import UserError

if TYPE_CHECKING:
    from neuronpipe.services.implementations import Implementations, Use
    from neuronpipe.services.worker.backend import Phase

DEMO = Path(__file__).resolve().parent.parent / "plans" / "demo" / "package"
"""The demo model's package, in a checkout and in an installed package alike."""


def add_package_argument(parser: argparse.ArgumentParser) -> None:
    """PACKAGE, the demo by default."""
    parser.add_argument(
        "package",
        nargs="?",
        type=package_path,
        default=DEMO,
        metavar="PACKAGE",
        help="package directory, or a name that `neuronpipe list` shows (default: the demo model)",
    )


def open_package(path: Path) -> Package:
    """The package that was named. Raises UserError: where there is none it says which there are."""
    refuse_unknown(path)
    return Package.open(path)


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
        "--target-speed",
        type=parse_speed,
        metavar="TOKENS_PER_S",
        help="the smallest limit, up to --memory, with which one text is expected to reach this speed",
    )
    group.add_argument(
        "--quality",
        type=_parse_quality,
        metavar="exact|predicted|LOSS",
        help="which modes may be chosen: exact (default); predicted where there is a predictor; or what the package "
        "measured to raise perplexity by no more than LOSS, e.g. 1%%",
    )
    group.add_argument(
        "--ffn-resident",
        type=parse_share,
        metavar="SHARE",
        help="share of feed-forward bytes that may be resident, e.g. 50%%",
    )
    group.add_argument("--context", type=parse_count, metavar="TOKENS", help="context length (default: the package's)")
    group.add_argument(
        "--sequences",
        type=parse_count,
        default=None,
        metavar="N",
        help=f"most texts generated at once (default: 1; up and serve: up to {MAX_SEQUENCES}, as long as one text "
        f"keeps {1 - MAX_LOSS:.0%}% of its expected speed)",
    )
    group.add_argument(
        "--workers",
        type=parse_count,
        metavar="N",
        help="decode workers (default: one per fast core, or fewer if that is faster)",
    )
    group.add_argument(
        "--cores", type=parse_cores, metavar="LIST", help="cores that processes may be pinned to, e.g. 0,2-3"
    )
    group.add_argument(
        "--mode",
        choices=MODES,
        help="exact: the output of the dense model (default); predicted: a predictor chooses the gates to compute; "
        "thresholded: SiLU neurons below the thresholds of `profile --silent` are left out",
    )
    group.add_argument(
        "--backend",
        action="append",
        type=_parse_backend,
        default=[],
        metavar="ROLE=NAME[:OPTIONS]",
        help="who computes in the decode or prefill workers, e.g. prefill=cpu:avx2 (default: cpu, with the best "
        "instructions there are); may be given again",
    )
    group.add_argument(
        "--without",
        type=_parse_techniques,
        default=frozenset(),
        metavar="LIST",
        help=f"for experiments, leave out some of: {', '.join(TECHNIQUES)}",
    )
    group.add_argument(
        "--hints",
        action="store_true",
        help="for experiments, in exact mode: read ahead what the package's predictor names, and the experts that its "
        "routers will probably choose; changes no result",
    )
    group.add_argument("--baseline", choices=BASELINES, help="for experiments, plan as another system would")
    group.add_argument("--plan", type=Path, metavar="FILE", help="use this plan instead of making one")


def _parse_backend(text: str) -> tuple[str, str]:
    role, equals, backend = text.partition("=")
    if not equals or role not in BACKEND_ROLES:
        raise argparse.ArgumentTypeError(f"{text!r}: write decode=NAME or prefill=NAME")
    return role, backend


def _parse_techniques(text: str) -> frozenset[Technique]:
    words = {word.strip() for word in text.split(",")}
    known = frozenset(technique for technique in TECHNIQUES if technique in words)
    if unknown := words - known:
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(TECHNIQUES)}")
    return known


def _parse_quality(text: str) -> Quality:
    words: dict[str, Quality] = {"exact": "exact", "predicted": "predicted"}
    if text in words:
        return words[text]
    try:
        return parse_share(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write exact, predicted, or by how much perplexity may grow, e.g. 1%"
        ) from None


def asked_of_plan(arguments: argparse.Namespace) -> list[str]:
    """The options by which a plan was asked for."""
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    defaults = vars(parser.parse_args([]))
    return [f"--{name.replace('_', '-')}" for name, default in defaults.items() if getattr(arguments, name) != default]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, and the search that it came out of; None where a file was given."""

    package: Package
    plan: Plan
    search: tuple[Search, Found] | None = None


def package_and_plan(
    arguments: argparse.Namespace, *, several: bool = False, gateway: bool = False
) -> tuple[Package, Plan]:
    """The package and its plan, as `planned` makes it."""
    made = planned(arguments, several=several, gateway=gateway)
    return made.package, made.plan


def planned(
    arguments: argparse.Namespace, *, several: bool = False, gateway: bool = False, device_file: str | None = None
) -> Planned:
    """Open the package and make its plan, or read and check the one that was given; with a gateway or without.

    several: unless the arguments say how many texts there is room for, as many as cost one text hardly any speed.
    device_file: the device that the plan is for, instead of this one: a known one's name, or its file.
    Says on stderr what of the device was measured again, and when the plan takes more memory than is available now.
    """
    if arguments.plan is not None and len(asked := asked_of_plan(arguments)) > 1:
        raise UserError(f"{asked[0]} and --plan {arguments.plan}: the plan decides that; leave one of the two out")
    _refuse_contradictions(arguments)
    package = open_package(arguments.package)
    said: list[str] = []
    caveats: tuple[str, ...] = ()
    if device_file is None:
        device = probe(package.path, say=said.append)
    else:
        device, caveats = _described(device_file, package)
    if arguments.plan is None:
        made = _made_plan(arguments, package, device, several, gateway)
        made = dataclasses.replace(made, plan=dataclasses.replace(made.plan, reasons=(*caveats, *made.plan.reasons)))
    else:
        made = Planned(package=package, plan=_given_plan(arguments.plan, package, device, gateway))
    _check_backends(made.plan, package)
    if device_file is not None:
        _refuse_larger(made.plan, device, device_file)
    elif (warning := memory_warning(made.plan, device)) is not None:
        said.append(warning)
    for line in said:  # not before now: a refusal is one line
        print(f"neuronpipe: {line}", file=sys.stderr)
    return made


def _described(name: str, package: Package) -> tuple[Device, tuple[str, ...]]:
    """A device that is not here, and what a plan for it must say."""
    from neuronpipe.plans.simulate.described import caveats, described  # only `plan --device` pays for it
    from neuronpipe.plans.simulate.device_file import read_device

    model = read_device(name)
    return described(model, package.manifest), caveats(model)


def _refuse_larger(plan: Plan, device: Device, name: str) -> None:
    takes, usable = plan.memory.total_bytes(), device.memory_total_bytes
    if takes > usable:
        raise UserError(f"the plan takes {show_bytes(takes)}, and one program may use {show_bytes(usable)} of {name}")


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Raises UserError for wishes of which one decides what the other asks for."""
    if arguments.baseline is not None:
        _refuse_beside_baseline(arguments)
    if arguments.quality is None:
        return
    others = {
        f"--mode {arguments.mode}": arguments.mode,
        f"--baseline {arguments.baseline}": arguments.baseline,
        "--hints": arguments.hints and arguments.quality != "exact",
        "--without predictor": "predictor" in arguments.without and arguments.quality != "exact",
    }
    for other, given in others.items():
        if given:
            raise UserError(
                f"{other} and --quality {show_quality(arguments.quality)}: the former decides the mode; "
                "leave one of the two out"
            )


def _refuse_beside_baseline(arguments: argparse.Namespace) -> None:
    others = {
        f"--target-speed {arguments.target_speed}": (arguments.target_speed, "a baseline is planned for a limit"),
        f"--mode {arguments.mode}": (
            arguments.mode not in (None, "predicted"),
            "a baseline computes in mode predicted",
        ),
        "--hints": (arguments.hints, "a baseline reads nothing ahead"),
    }
    for other, (given, why) in others.items():
        if given:
            raise UserError(f"--baseline {arguments.baseline} and {other}: {why}; leave one of the two out")


def _check_backends(plan: Plan, package: Package) -> None:
    """Raises UserError for a backend that there is not, or that cannot compute this model."""
    wanted = {(spec.role, spec.backend) for spec in plan.compute.processes if spec.backend != DEFAULT_BACKEND}
    if wanted:
        from neuronpipe.services.worker.backend import create_backend, require

        for role, text in sorted(wanted):
            phase: Phase = "prefill" if role == "prefill" else "decode"
            require(create_backend(text), package.manifest.model, phase, f"--backend {role}={text}")


def _given_plan(file: Path, package: Package, device: Device, gateway: bool) -> Plan:
    given = read_plan(file)
    given.check(package_id=package.manifest.id, device_id=device.id, where=str(file))
    validate(given, package.manifest, str(file), {core.id for core in device.cores if core.allowed})
    if gateway != any(spec.role == GATEWAY for spec in given.compute.processes):
        raise UserError(
            f"{file}: field 'compute.processes': "
            + ("has no gateway; `neuronpipe plan --gateway` makes" if gateway else "has a gateway; `serve` uses")
            + " such a plan"
        )
    return given


def _made_plan(
    arguments: argparse.Namespace, package: Package, device: Device, several: bool, gateway: bool
) -> Planned:
    """What the search finds. Room for further texts is only made where no speed is asked for: each takes memory."""
    wanted = Wanted(
        ffn_resident_share=arguments.ffn_resident,
        context_tokens=arguments.context,
        sequences=1 if arguments.sequences is None else arguments.sequences,
        without=arguments.without,
        baseline=arguments.baseline,
        hints=arguments.hints,
    )
    if not 1 <= wanted.sequences <= 64:
        raise UserError(f"--sequences {wanted.sequences}: between 1 and 64")
    heat = Heat.of(package.manifest, package.read_activity)
    target = arguments.target_speed
    space = _space(arguments, package, device, gateway)
    search = Search(package.manifest, space, wanted, USUAL if target is None else ANSWER, heat)
    if target is None:
        found = search.within(arguments.memory)
    else:
        most_bytes = search.space.place(search.space.workers[0]).memory_bytes
        found = search.reaching(target, most_bytes if arguments.memory is None else arguments.memory)
    chosen, made = found.chosen, found.chosen.plan
    if several and arguments.sequences is None and target is None:
        made = plan_for_several(package.manifest, chosen.device, chosen.wanted, heat)
    said = [*found.reasons()]
    if target is not None:
        said.append(
            f"the limit is the smallest that is expected to reach {target:g} tokens/s, to within {PRECISION:.0%}, and "
            f"{PROMPT_ALLOWANCE:.0%} for prompts"
        )
    made = dataclasses.replace(made, reasons=(*made.reasons, *said))
    return Planned(package=package, plan=made, search=(search, found))


def _space(arguments: argparse.Namespace, package: Package, device: Device, gateway: bool) -> Space:
    """What may be chosen: all that the arguments leave open."""
    if arguments.workers is not None and not 1 <= arguments.workers <= 64:
        raise UserError(f"--workers {arguments.workers}: between 1 and 64")
    cores = device.cores if arguments.cores is None else restricted(device.cores, _allowed(arguments.cores, device))
    backends, quota = dict(arguments.backend), device.cpu_quota
    if arguments.baseline is not None:
        modes: tuple[Mode, ...] = ("predicted",)
    elif arguments.mode is not None:
        modes = (arguments.mode,)
    else:
        modes = allowed_modes(package.manifest, arguments.quality or "exact")
    if arguments.workers is not None:
        workers: tuple[int, ...] = (arguments.workers,)
    else:
        usual = default_decode_workers(cores, quota)
        others = range(1, most_decode_workers(cores, quota) + 1) if arguments.baseline is None else ()
        workers = tuple(dict.fromkeys((usual, *others)))

    def more(count: int) -> DeviceFacts | None:
        if count > most_decode_workers(device.cores, quota):
            return None
        return device_facts(device, count, gateway=gateway, backends=backends)

    return Space(
        modes=modes,
        workers=workers,
        place=lambda count: device_facts(device, count, gateway=gateway, backends=backends, cores=cores),
        more=more,
    )


def _allowed(cores: tuple[int, ...], device: Device) -> tuple[int, ...]:
    """The cores that were asked for. Raises UserError for one that is not there, or not for this process."""
    allowed = [core.id for core in device.cores if core.allowed]
    if (missing := next((core for core in cores if core not in allowed), None)) is not None:
        raise UserError(f"--cores: core {missing} is none that this process may use; these are {show_cores(allowed)}")
    return cores


def memory_warning(plan: Plan, device: Device) -> str | None:
    """What a person should know before the run begins: that other programs have memory that it wants.

    Raises UserError for a plan that takes more than there is at all: the kernel would end the run in the middle of a
    text. A limit may be beyond that; what counts is what the plan makes of it.
    """
    takes, there_is, available = plan.memory.total_bytes(), device.memory_total_bytes, device.memory_available_bytes
    if there_is == 0:
        return None  # not known here
    if takes > there_is:
        raise UserError(
            f"the plan takes {show_bytes(takes)}, and all memory of this machine, or of the control group, is "
            f"{show_bytes(there_is)}: {_advice(plan, device)}"
        )
    if takes > available:
        return (
            f"the plan takes {show_bytes(takes)}, and {show_bytes(available)} of {show_bytes(there_is)} are available "
            f"now: close other programs, or {_advice(plan, device)}"
        )
    return None


def _advice(plan: Plan, device: Device) -> str:
    least, fits_mib = plan.memory.least_bytes, device.memory_available_bytes // MIB
    if least > fits_mib * MIB:
        return f"take a smaller --context or another package; this one needs {show_bytes(least)} at least"
    return f"ask for less, or make the plan for less: --memory {fits_mib}MiB is what fits now"


def add_use_argument(parser: argparse.ArgumentParser) -> None:
    """`--use ROLE=IMPLEMENTATION`, any number of times."""
    parser.add_argument(
        "--use",
        action="append",
        default=[],
        metavar="ROLE=IMPLEMENTATION",
        help="who does a role's work (decode) or one process's (decode.1): package.module:Class, or argv:COMMAND in "
        "any language; may be given again",
    )


def implementations(texts: Iterable[str], plan: Plan) -> Implementations:
    """What was asked for, checked against the plan's processes. Raises UserError."""
    from neuronpipe.services.implementations import Implementations  # only verbs that start a run pay for it

    return Implementations(checked_uses(texts, plan))


def checked_uses(texts: Iterable[str], plan: Plan) -> list[Use]:
    """The same one by one."""
    from neuronpipe.services.implementations import Implementations, Use

    uses = [Use.parse(text, Path.cwd()) for text in texts]
    Implementations(uses).check((spec.role, spec.index) for spec in plan.compute.processes)
    return uses

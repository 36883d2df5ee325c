"""From a command line to a package, a plan for it, and implementations of its roles: the arguments shared by the verbs
that start a run or plan one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.launch.arguments.making import package_of
from neuronpipe.launch.formats import (
    parse_cores,
    parse_count,
    parse_limit,
    parse_share,
    parse_speed,
    show_bytes,
)
from neuronpipe.launch.neural import CORES, Prompts, prompts_here
from neuronpipe.launch.progress import Elapsed
from neuronpipe.launch.searching import add_gpu_memory_argument, searched
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.package.activity_profile import Activity
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import (
    BACKEND_ROLES,
    DEFAULT_BACKEND,
    GATEWAY,
    MODES,
    Plan,
    read_plan,
)
from neuronpipe.plans.plan.memory_budget import MIB
from neuronpipe.plans.planner.candidates import SearchResult
from neuronpipe.plans.planner.mode_choice import Quality, show_quality
from neuronpipe.plans.planner.plan_options import BASELINES, TECHNIQUES, Technique
from neuronpipe.plans.planner.search import Search
from neuronpipe.plans.planner.sequence_count import MAX_LOSS, MAX_SEQUENCES
from neuronpipe.plans.planner.validation import validate
from neuronpipe.plans.pull.package_library import FIRST_MODEL, package_path, refuse_unknown
from neuronpipe.plans.pull.source_models import is_source
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

if TYPE_CHECKING:
    from neuronpipe.services.runtime.implementations import Implementations, Use

PLANNING = "planning"
DEMO = Path(__file__).resolve().parent.parent / "plans" / "demo" / "package"
"""The demo model's package, in a checkout and in an installed package alike."""


def add_package_argument(
    parser: argparse.ArgumentParser,
    *,
    shapes: str = "",
    more: str = "",
    type: Callable[[str], Path | str] = package_path,
    action: type[argparse.Action] | str = "store",
) -> None:
    """PACKAGE, the demo by default. shapes: what is said of names of shapes, where these are taken as well. more: what
    else the help says. type, action: as argparse has them."""
    parser.add_argument(
        "package",
        nargs="?",
        type=type,
        action=action,
        default=DEMO,
        metavar="PACKAGE|SHAPE" if shapes else "PACKAGE",
        help="package directory, a name that `neuronpipe list` shows, a GGUF file or a Hugging Face folder (a package "
        f"is made of it once; default: the demo model){shapes}{more}",
    )


def add_packages_argument(parser: argparse.ArgumentParser) -> None:
    """PACKAGE, any number of times; the demo by default."""
    parser.add_argument(
        "package",
        nargs="*",
        type=package_path,
        default=[DEMO],
        metavar="PACKAGE",
        help="package directory, or a name that `neuronpipe list` shows (default: the demo model); with several, each "
        "has a run while requests name it",
    )


def open_package(path: Path, *, plain: bool = False) -> Package:
    """The package that was named, or is made now of the model that was; plain: say so in lines. Raises UserError: where
    there is none it says which there are."""
    refuse_missing(path)
    return Package.open(package_of(path, plain=plain) if is_source(path) else path)


def refuse_missing(path: Path) -> None:
    """Raises UserError for what is no path, no name of a package, or that of a shape; a word with blanks passes."""
    if os.path.exists(path):
        return
    from neuronpipe.plans.lab.simulate.models import refuse_shape  # only a mistake pays for it

    refuse_shape(str(path))
    refuse_unknown(path)


def what_the_demo_is() -> str:
    """For whoever names no package: what they get, and how to get something else."""
    return (
        "no model was named: this is the demo, 11 million parameters, which continue Python code; "
        f"`neuronpipe pull {FIRST_MODEL}` gets a small one that answers (270 MB)"
    )


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """What a plan can be asked for."""
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--memory",
        type=parse_limit,
        metavar="BYTES",
        help="limit for the whole run, e.g. 512MiB, interpreters included; auto: what is available, up to nine tenths "
        "of all memory, and always so much that a tenth is left to others",
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
        type=parse_backend,
        default=[],
        metavar="ROLE=NAME[:OPTIONS]",
        help="who computes in the decode or prefill workers, e.g. prefill=cpu:avx2 (default: cpu, with the best "
        "instructions there are), or the hottest neurons of decode steps: accelerator=opencl, accelerator=onnx:cpu; "
        "may be given again",
    )
    add_gpu_memory_argument(group)
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


def parse_backend(text: str) -> tuple[str, str]:
    """The role and the backend of ROLE=BACKEND."""
    role, equals, backend = text.partition("=")
    if not equals or role not in BACKEND_ROLES:
        raise argparse.ArgumentTypeError(f"{text!r}: write decode=NAME, prefill=NAME or accelerator=NAME")
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
    """The options by which a plan was asked for. What the settings file says is no wish for this very run, but for a
    plan that is there already."""
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    defaults = vars(parser.parse_args([]))
    settings: set[str] = getattr(arguments, "from_file", set()) - {"plan"}
    return [
        f"--{name.replace('_', '-')}"
        for name, default in defaults.items()
        if getattr(arguments, name) != default and name not in settings
    ]


@frozen(kw_only=True)
class Subject:
    """What a plan is made for. read_activity: of the package, where its manifest has a profile. prompts: who computes
    them where the arguments name nobody."""

    manifest: Manifest
    read_activity: Callable[[], Activity]
    device: Device
    prompts: Prompts = CORES


@frozen(kw_only=True)
class Planned:
    """A plan, and the search that it came out of; None where a file was given."""

    manifest: Manifest
    plan: Plan
    search: tuple[Search, SearchResult] | None = None

    @property
    def least_bytes(self) -> int:
        """The smallest limit that is accepted: fewer workers may need less than those of the plan."""
        return self.plan.memory.least_bytes if self.search is None else self.search[0].limits_bytes()[0]


def package_and_plan(
    arguments: argparse.Namespace,
    *,
    several: bool = False,
    gateway: bool = False,
    measured: Callable[[str], None] | None = None,
) -> tuple[Package, Plan]:
    """The package and its plan, as `planned_here` makes it."""
    refuse_contradictions(arguments)
    package = open_package(arguments.package, plain=_plain(arguments))
    return package, planned_here(arguments, package, several=several, gateway=gateway, measured=measured).plan


def planned(arguments: argparse.Namespace, *, several: bool = False, gateway: bool = False) -> Planned:
    """Open the package and make its plan for this device, or read and check the one that was given; with a gateway or
    without.

    several: unless the arguments say how many texts there is room for, as many as cost one text hardly any speed.
    Says on stderr what of the device was measured again, and when the plan takes more memory than is available now.
    """
    refuse_contradictions(arguments)
    package = open_package(arguments.package, plain=_plain(arguments))
    return planned_here(arguments, package, several=several, gateway=gateway)


def _plain(arguments: argparse.Namespace) -> bool:
    return bool(getattr(arguments, "json", False))


def planned_here(
    arguments: argparse.Namespace,
    package: Package,
    *,
    several: bool,
    gateway: bool,
    measured: Callable[[str], None] | None = None,
) -> Planned:
    """The same of a package that is open, after `refuse_contradictions`. measured: gets the lines on what was measured
    again, for a command that has something to show first; None: they are printed."""
    said: list[str] = []
    with Elapsed(plain=_plain(arguments)) as elapsed:
        elapsed.say(PLANNING)  # on a busy machine to get here has taken seconds
        device = probe(package.path, say=measured or said.append)
        elapsed.say(PLANNING)
        prompts = CORES if "prefill" in dict(arguments.backend) else prompts_here(package, arguments.quality)
        subject = Subject(
            manifest=package.manifest, read_activity=package.read_activity, device=device, prompts=prompts
        )
        made = planned_for(arguments, subject, several=several, gateway=gateway)
    if (warning := memory_warning(made.plan, device, made.least_bytes)) is not None:
        said.append(warning)
    for line in said:  # not before now: a refusal is one line
        print(f"neuronpipe: {line}", file=sys.stderr)
    return made


def planned_for(arguments: argparse.Namespace, subject: Subject, *, several: bool, gateway: bool) -> Planned:
    """The plan for what is described, or the one that was given. Prints nothing; does not ask what memory there is."""
    if arguments.plan is None:
        search, found, plan = searched(arguments, subject, several=several, gateway=gateway)
        made = Planned(manifest=subject.manifest, plan=plan, search=(search, found))
    else:
        made = Planned(manifest=subject.manifest, plan=_given_plan(arguments.plan, subject, gateway))
    _check_backends(made.plan, subject.manifest)
    return made


def refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Raises UserError for wishes of which one decides what the other asks for."""
    if arguments.plan is not None and len(asked := asked_of_plan(arguments)) > 1:
        raise UserError(f"{asked[0]} and --plan {arguments.plan}: the plan decides that; leave one of the two out")
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


def _check_backends(plan: Plan, manifest: Manifest) -> None:
    """Raises UserError for a backend that there is not, or that cannot compute this model."""
    wanted = {(spec.role, spec.backend) for spec in plan.compute.processes if spec.backend != DEFAULT_BACKEND}
    if wanted:
        from neuronpipe.services.steps.backend import create_backend, phase_of, require

        for role, text in sorted(wanted):
            phase = phase_of(role)
            require(create_backend(text, phase), manifest, phase, f"--backend {role}={text}")


def _given_plan(file: Path, subject: Subject, gateway: bool) -> Plan:
    given, manifest, device = read_plan(file), subject.manifest, subject.device
    given.check(package_id=manifest.id, device_id=device.id, where=str(file))
    validate(given, manifest, str(file), {core.id for core in device.cores if core.allowed})
    if gateway != any(spec.role == GATEWAY for spec in given.compute.processes):
        raise UserError(
            f"{file}: field 'compute.processes': "
            + ("has no gateway; `neuronpipe plan --gateway` makes" if gateway else "has a gateway; `serve` uses")
            + " such a plan"
        )
    return given


def memory_warning(plan: Plan, device: Device, least_bytes: int) -> str | None:
    """What a person should know before the run begins: that other programs have memory that it wants. least_bytes: the
    smallest limit for which there is a plan.

    Raises UserError for a plan that takes more than there is at all: the kernel would end the run in the middle of a
    text. A limit may be beyond that; what counts is what the plan makes of it.
    """
    takes, there_is, available = plan.memory.total_bytes(), device.memory_total_bytes, device.memory_available_bytes
    if there_is == 0:
        return None  # not known here
    if takes > there_is:
        raise UserError(
            f"the plan takes {show_bytes(takes)}, and all memory of this machine, or of the control group, is "
            f"{show_bytes(there_is)}: {_advice(device, least_bytes)}"
        )
    if takes > available and not plan.memory.follows:
        return (
            f"the plan takes {show_bytes(takes)}, and {show_bytes(available)} of {show_bytes(there_is)} are available "
            f"now: close other programs, or {_advice(device, least_bytes)}"
        )
    return None


def _advice(device: Device, least_bytes: int) -> str:
    fits_mib = device.memory_available_bytes // MIB
    if least_bytes > fits_mib * MIB:
        return f"take a smaller --context or another package; this one needs {show_bytes(least_bytes)} at least"
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
    from neuronpipe.services.runtime.implementations import Implementations  # only verbs that start a run pay for it

    return Implementations(checked_uses(texts, plan))


def checked_uses(texts: Iterable[str], plan: Plan) -> list[Use]:
    """The same one by one."""
    from neuronpipe.services.runtime.implementations import Implementations, Use

    uses = [Use.parse(text, Path.cwd()) for text in texts]
    Implementations(uses).check((spec.role, spec.index) for spec in plan.compute.processes)
    return uses

"""Make the plan for a package on this machine, or read and check the plan that --plan names."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from neuronpipe.launch.planning.memory_check import memory_warning
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.package_argument import open_package
from neuronpipe.launch.planning.prompt_backend import ON_CPU, choose_prompt_backend
from neuronpipe.launch.planning.search import Subject, search_plan
from neuronpipe.launch.progress import Elapsed
from neuronpipe.plans.history.history import History
from neuronpipe.plans.history.history_file import read_history
from neuronpipe.plans.history.planning_facts import corrected_device, counted_manifest, history_reasons
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import DEFAULT_BACKEND, GATEWAY, Plan, read_plan
from neuronpipe.plans.planner.candidates import SearchResult
from neuronpipe.plans.planner.search import Search
from neuronpipe.plans.planner.validation import validate
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

PLANNING = "planning"
"""The activity that a user sees while the device is probed and plans are compared."""


@frozen(kw_only=True)
class PlanResult:
    """A plan for a model.

    search: the search that found it, and its result; None for the plan of a file
    """

    manifest: Manifest
    plan: Plan
    search: tuple[Search, SearchResult] | None = None

    @property
    def min_limit_bytes(self) -> int:
        """The smallest memory limit for which there is a plan, possibly with fewer workers than this one has."""
        return self.plan.memory.least_bytes if self.search is None else self.search[0].limits_bytes()[0]

    def with_reasons(self, *reasons: str) -> PlanResult:
        """Return the result with further reasons before those of the plan."""
        plan = dataclasses.replace(self.plan, reasons=(*reasons, *self.plan.reasons))
        return dataclasses.replace(self, plan=plan)

    def with_history(self, history: History) -> PlanResult:
        """Return the result of planning with a history: the plan states its corrections, and reasons for them."""
        plan = dataclasses.replace(self.plan, corrections=history.corrections)
        return dataclasses.replace(self, plan=plan).with_reasons(*history_reasons(history, self.manifest))


def package_and_plan(
    path: Path,
    options: PlanOptions,
    *,
    plain: bool,
    several: bool = False,
    gateway: bool = False,
    report: Callable[[str], None] | None = None,
) -> tuple[Package, Plan]:
    """Open a package and make its plan; parameters as in `plan_here`."""
    package = open_package(path, plain=plain)
    return package, plan_here(package, options, plain=plain, several=several, gateway=gateway, report=report).plan


def plan_here(
    package: Package,
    options: PlanOptions,
    *,
    plain: bool,
    several: bool = False,
    gateway: bool = False,
    report: Callable[[str], None] | None = None,
) -> PlanResult:
    """Probe this machine and make the plan for an open package.

    plain: show progress as lines on stderr, not as one line that changes
    several: plan for several sequences, as in `search_plan`; otherwise for one
    gateway: the run has a gateway process, whose memory counts
    report: called with a line for each repeated measurement, while the machine is probed; None: these lines are printed
        to stderr after planning

    A warning that the plan takes more memory than is available now is printed to stderr after planning. If planning
    fails, none of these lines is printed.

    Raises UserError if no plan fits the options, the plan file does not fit, or the machine has too little memory.
    """
    lines: list[str] = []
    with Elapsed(plain=plain) as elapsed:
        elapsed.say(PLANNING)  # on a busy machine the imports alone have taken seconds
        device = probe(package.path, say=report or lines.append)
        elapsed.say(PLANNING)
        has_prompt_backend = options.backend("prefill") is not None
        history = read_history(package.manifest.id, device.id) if options.uses_history else None
        subject = Subject(
            manifest=package.manifest if history is None else counted_manifest(package.manifest, history),
            read_activity=package.read_activity,
            device=device if history is None else corrected_device(device, history.corrections),
            prompts=ON_CPU if has_prompt_backend else choose_prompt_backend(package, options.quality),
        )
        result = plan_for(subject, options, several=several, gateway=gateway)
        if history is not None:
            result = result.with_history(history)
    if (warning := memory_warning(result.plan, device, result.min_limit_bytes)) is not None:
        lines.append(warning)
    for line in lines:  # printed only now: after a refusal there must be nothing but the error line
        print(f"neuronpipe: {line}", file=sys.stderr)
    return result


def plan_for(subject: Subject, options: PlanOptions, *, several: bool, gateway: bool) -> PlanResult:
    """Make the plan for a described model and device, or check the plan file of the options against them.

    Prints nothing, and does not compare the plan with the memory that is available. Raises UserError if no plan fits,
    or if the plan file does not.
    """
    if options.plan_file is None:
        search, outcome, plan = search_plan(subject, options, several=several, gateway=gateway)
        result = PlanResult(manifest=subject.manifest, plan=plan, search=(search, outcome))
    else:
        plan = _read_checked_plan(options.plan_file, subject, gateway=gateway)
        result = PlanResult(manifest=subject.manifest, plan=plan)
    _check_backends(result.plan, subject.manifest)
    return result


def _check_backends(plan: Plan, manifest: Manifest) -> None:
    """Raise UserError for a backend that does not exist or that cannot compute this model."""
    backends = {(spec.role, spec.backend) for spec in plan.compute.processes if spec.backend != DEFAULT_BACKEND}
    if not backends:
        return
    from neuronpipe.services.steps.backend import create_backend, phase_of, require

    for role, name in sorted(backends):
        phase = phase_of(role)
        require(create_backend(name, phase), manifest, phase, f"--backend {role}={name}")


def _read_checked_plan(file: Path, subject: Subject, *, gateway: bool) -> Plan:
    plan, manifest, device = read_plan(file), subject.manifest, subject.device
    plan.check(package_id=manifest.id, device_id=device.id, where=str(file))
    validate(plan, manifest, str(file), {core.id for core in device.cores if core.allowed})
    if gateway != any(spec.role == GATEWAY for spec in plan.compute.processes):
        raise UserError(
            f"{file}: field 'compute.processes': "
            + ("has no gateway; `neuronpipe plan --gateway` makes" if gateway else "has a gateway; `serve` uses")
            + " such a plan"
        )
    return plan

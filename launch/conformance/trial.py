"""The trial run of an implementation before it replaces another: a small run of the same package, next to the live run.

It shares only the sealed fixed tensors with the live run, so that no failure can reach the live run. The current
implementations answer first. Then the processes are replaced as they will be in the live run, and the same questions
are asked again: the answers must agree (agreement.py), to the bit if the numerics are the same.

A candidate cannot be tested within the live run: that has only one loader, and a read window, a request ring and a
routing id have one owner. The disadvantages are that the tested process is not the one that does the work later, and
that the trial takes memory beyond the run's limit while it lasts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from neuronpipe.launch.conformance.agreement import Agreement, compare
from neuronpipe.launch.conformance.probe import ANSWERED_TOKENS, Probe
from neuronpipe.launch.supervisor import control
from neuronpipe.launch.supervisor.start import started_run
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import GATEWAY, Plan
from neuronpipe.plans.plan.memory_budget import Budgets
from neuronpipe.plans.plan.offloaded_blocks import Accelerator
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.run_directory import RunDirectory, RunFile
from neuronpipe.services.runtime.implementations import Implementations

CONTEXT_TOKENS = 64
SLOTS_BYTES = 128 << 20  # at most, and at most half of the neurons, so that some are always missing
MAX_SLOWDOWN = 4  # compared with the current implementation; the candidate's patience is added
FOLDER = "trial"


@frozen
class Candidate:
    """An implementation, and the processes that it is to replace.

    processes: their names, e.g. decode.0
    use: the implementation as typed; None starts the current ones anew
    folder: where its modules and programs are looked up
    patience_s: time limit of each phase of the replacement, in seconds
    """

    processes: tuple[str, ...]
    use: str | None
    folder: str
    patience_s: float

    def request(self) -> dict[str, Any]:
        return {
            "ask": "swap",
            "processes": list(self.processes),
            "use": self.use,
            "folder": self.folder,
            "patience_s": self.patience_s,
        }

    def replace_processes(self, directory: RunDirectory) -> dict[str, int]:
        """Replace the processes, and return the new process ids. Raises UserError with the supervisor's reason."""
        return dict(control.ask(directory.path, self.request(), 2 * self.patience_s + 10)["pids"])


def small_plan(package: Package, plan: Plan) -> Plan:
    """Return a plan with the same processes for one short sequence, with little memory and without core pinning."""
    manifest, workers = package.manifest, len(plan.compute.decode_workers())
    specs = tuple(replace(spec, core=None) for spec in plan.compute.processes if spec.role != GATEWAY)
    facts = DeviceFacts(
        id=plan.device_id,
        memory_bytes=plan.memory.limit_bytes,
        flash_engine=plan.flash.engine,
        processes=specs,
        accelerator=_accelerator(plan),
    )
    slots_bytes = max(2 * Budgets(manifest).min_slots_bytes(workers), min(SLOTS_BYTES, plan.memory.ffn_bytes // 2))
    options = PlanOptions(
        ffn_resident_share=min(1.0, slots_bytes / plan.memory.ffn_bytes),
        context_tokens=min(CONTEXT_TOKENS, manifest.model.context_tokens),
        mode=plan.compute.mode,
        offloaded_blocks=(plan.compute.max_offloaded_blocks(),) if plan.compute.held_blocks else None,
    )
    small = make_plan(manifest, facts, options)
    return replace(small, compute=replace(small.compute, spin_us=0))


def _accelerator(plan: Plan) -> Accelerator | None:
    if not plan.compute.held_blocks:
        return None
    accelerator_bytes = plan.memory.accelerator_bytes
    return Accelerator(
        name=plan.compute.device_name,
        memory_bytes=2 * accelerator_bytes,
        max_buffer_bytes=2 * accelerator_bytes,
        shares_memory=plan.compute.device_shares_memory,
        limit_bytes=accelerator_bytes,
    )


def run_trial(
    live: RunDirectory,
    run_file: RunFile,
    package: Package,
    plan: Plan,
    candidate: Candidate,
    progress: Callable[[int, int], None],
) -> Agreement | None:
    """Run the trial; return the distance of the candidate's answers in other numerics, None if all bits are equal.

    progress: called with the computed tokens and their total

    Raises UserError that says what the candidate did wrong.
    """
    computed_tokens = 0

    def computed(tokens: int) -> None:
        nonlocal computed_tokens
        computed_tokens += tokens
        progress(computed_tokens, 2 * ANSWERED_TOKENS)

    computed(0)
    small = small_plan(package, plan)
    current = Implementations.from_facts(control.ask(live.path, {"ask": "implementations"}, candidate.patience_s))
    with (
        run_file.open_segment("fixed") as fixed,
        started_run(package, small, live.path / FOLDER, stays=False, uses=current, fixed=fixed) as run,
    ):
        probe = Probe(run, package, small)
        began = time.monotonic()
        expected = probe.answers(math.inf, computed)
        limit_s = candidate.patience_s + MAX_SLOWDOWN * (time.monotonic() - began)
        candidate.replace_processes(run.directory)
        return compare(expected, probe.answers(limit_s, computed))

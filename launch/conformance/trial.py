"""The trial of an implementation before it replaces another: a small run of the same package beside the live one.

It shares nothing with the live run but the sealed fixed tensors, so that whatever goes wrong there goes wrong there.
The present implementations answer first. Then the processes are replaced as they will be on the live run, and the same
questions are asked again: the answers must agree (agreement.py), to the bit where the numerics are the same.
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
SLOTS_BYTES = 128 << 20  # at most, where that is enough; and half of the neurons, so that some are always missing
SLOWER = 4  # than the present implementation, and the patience besides: later than that is too late
FOLDER = "trial"


@frozen
class Candidate:
    """What is to replace which processes. use None: fresh processes of the same implementations."""

    processes: tuple[str, ...]
    use: str | None
    folder: str
    patience_s: float

    def request(self) -> dict[str, Any]:
        """What the supervisor is asked for."""
        return {
            "ask": "swap",
            "processes": list(self.processes),
            "use": self.use,
            "folder": self.folder,
            "patience_s": self.patience_s,
        }

    def replace_processes(self, directory: RunDirectory) -> dict[str, int]:
        """Have them replaced; returns the new process ids. Raises UserError with the supervisor's reason."""
        return dict(control.ask(directory.path, self.request(), 2 * self.patience_s + 10)["pids"])


def small_plan(package: Package, plan: Plan) -> Plan:
    """A plan with the same processes for one short text, in as little memory as will do and without pinning."""
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
    wanted = PlanOptions(
        ffn_resident_share=min(1.0, slots_bytes / plan.memory.ffn_bytes),
        context_tokens=min(CONTEXT_TOKENS, manifest.model.context_tokens),
        mode=plan.compute.mode,
        offloaded_blocks=(plan.compute.max_offloaded_blocks(),) if plan.compute.held_blocks else None,
    )
    made = make_plan(manifest, facts, wanted)
    return replace(made, compute=replace(made.compute, spin_us=0))


def _accelerator(plan: Plan) -> Accelerator | None:
    """The plan's, with the room that it has there."""
    if not plan.compute.held_blocks:
        return None
    has_bytes = plan.memory.accelerator_bytes
    return Accelerator(
        name=plan.compute.device_name,
        memory_bytes=2 * has_bytes,
        max_buffer_bytes=2 * has_bytes,
        shares_memory=plan.compute.device_shares_memory,
        limit_bytes=has_bytes,
    )


def run_trial(
    live: RunDirectory,
    run_file: RunFile,
    package: Package,
    plan: Plan,
    candidate: Candidate,
    progress: Callable[[int, int], None],
) -> Agreement | None:
    """How near the candidate's answers are, if it computes in other numerics. Raises UserError saying what it did
    wrong. progress: tokens computed, of how many."""
    done = 0

    def computed(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, 2 * ANSWERED_TOKENS)

    computed(0)
    small = small_plan(package, plan)
    present = Implementations.from_facts(control.ask(live.path, {"ask": "implementations"}, candidate.patience_s))
    with (
        run_file.open_segment("fixed") as fixed,
        started_run(package, small, live.path / FOLDER, stays=False, uses=present, fixed=fixed) as run,
    ):
        probe = Probe(run, package, small)
        began = time.monotonic()
        expected = probe.answers(math.inf, computed)
        limit_s = candidate.patience_s + SLOWER * (time.monotonic() - began)
        candidate.replace_processes(run.directory)
        return compare(expected, probe.answers(limit_s, computed))

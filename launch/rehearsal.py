"""The dry run of an implementation before it takes a seat: a small run of the same package beside the live one.

It shares nothing with the live run but the sealed fixed tensors, so that whatever goes wrong there goes wrong there.
The present implementations answer first; then the seats change hands as they will on the live run, and the same is
asked again: every logit must have the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from neuronpipe.launch import door
from neuronpipe.launch.live import started_run
from neuronpipe.launch.stage import ANSWERED_TOKENS, Stage
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.account import least_slots_bytes
from neuronpipe.plans.plan.plan import GATEWAY, Plan
from neuronpipe.plans.plan.planner import DeviceFacts, Wanted
from neuronpipe.plans.plan.planner import plan as make_plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.run_directory import RunDirectory, RunFile
from neuronpipe.services.implementations import Implementations

CONTEXT_TOKENS = 64
SLOTS_BYTES = 128 << 20  # at most, where that is enough; and half of the neurons, so that some are always missing
SLOWER = 4  # than the present implementation, and the patience besides: later than that is too late
FOLDER = "rehearsal"


@dataclass(frozen=True)
class Candidate:
    """Who is to take which seats. use None: fresh processes of the same implementations."""

    seats: tuple[str, ...]
    use: str | None
    folder: str
    patience_s: float

    def request(self) -> dict[str, Any]:
        """What the supervisor is asked at its door."""
        return {
            "ask": "swap",
            "seats": list(self.seats),
            "use": self.use,
            "folder": self.folder,
            "patience_s": self.patience_s,
        }

    def take_seats(self, directory: RunDirectory) -> dict[str, int]:
        """Have the seats change hands; returns the new process ids. Raises UserError with the supervisor's reason."""
        return dict(door.ask(directory.path, self.request(), 2 * self.patience_s + 10)["pids"])


def small_plan(package: Package, plan: Plan) -> Plan:
    """A plan with the same seats for one short text, in as little memory as will do; no core is taken for itself."""
    manifest, workers = package.manifest, len(plan.compute.decode_workers())
    seats = tuple(replace(seat, core=None) for seat in plan.compute.seats if seat.role != GATEWAY)
    facts = DeviceFacts(
        id=plan.device_id, memory_bytes=plan.memory.limit_bytes, flash_engine=plan.flash.engine, seats=seats
    )
    slots_bytes = max(2 * least_slots_bytes(manifest, workers), min(SLOTS_BYTES, plan.memory.ffn_bytes // 2))
    wanted = Wanted(
        ffn_resident_share=min(1.0, slots_bytes / plan.memory.ffn_bytes),
        context_tokens=min(CONTEXT_TOKENS, manifest.model.context_tokens),
        mode=plan.compute.mode,
    )
    made = make_plan(manifest, facts, wanted)
    return replace(made, compute=replace(made.compute, spin_us=0))


def rehearse(
    live: RunDirectory,
    run_file: RunFile,
    package: Package,
    plan: Plan,
    candidate: Candidate,
    progress: Callable[[int, int], None],
) -> None:
    """Raises UserError saying what the candidate did wrong. progress: tokens computed, of how many."""
    done = 0

    def computed(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, 2 * ANSWERED_TOKENS)

    small = small_plan(package, plan)
    present = Implementations.from_facts(door.ask(live.path, {"ask": "implementations"}, candidate.patience_s))
    with (
        run_file.open_segment("fixed") as fixed,
        started_run(package, small, live.path / FOLDER, stays=False, uses=present, fixed=fixed) as run,
    ):
        stage = Stage(run, package, small)
        began = time.monotonic()
        expected = stage.answers(math.inf, computed)
        limit_s = candidate.patience_s + SLOWER * (time.monotonic() - began)
        candidate.take_seats(run.directory)
        for what, bits in stage.answers(limit_s, computed).items():
            if bits != expected[what]:
                raise UserError(f"computes other bits than the present implementation: {what}")

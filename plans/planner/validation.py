"""Validation of a plan from a file against its package. The services follow every plan that passes.

The id of a plan only shows that the file is complete, not that a planner wrote it. So every figure that sizes memory or
assigns work is checked against limits, or computed again and compared. The reader has checked the ranges of fields.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Collection
from typing import NoReturn

from neuronpipe.plans.cost.activation_rates import has_hints
from neuronpipe.plans.package.layout import PAGE_BYTES
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import (
    ACCELERATOR,
    DEFAULT_BACKEND,
    GATEWAY,
    MAX_READ_BYTES,
    MAX_READS,
    MAX_WORKERS,
    Plan,
    backend_of,
)
from neuronpipe.plans.plan.memory_budget import (
    Budgets,
    accelerator_bytes,
    largest_read_bytes,
    memory_budget,
    untrusted_bytes,
)
from neuronpipe.plans.plan.offloaded_blocks import MATRICES
from neuronpipe.plans.plan.pinned_clusters import read_counts
from neuronpipe.plans.plan.runtime_memory import runtime_of
from neuronpipe.plans.plan.segment_sizes import (
    PARTIAL_TOKENS,
    STATES_PER_SEQUENCE,
    RunShape,
    embedding_flash_bytes,
    kv_type_fault,
    open_clusters,
    slots_layout,
)
from neuronpipe.protocol.errors import UserError, quoted

SINGLE_ROLES = ("coordinator", "loader", "cache", "prefill")


def validate(plan: Plan, manifest: Manifest, where: str, cores: Collection[int] | None = None) -> None:
    """Raise UserError, naming the field, for a plan with which this package cannot be run.

    where: name of the plan's file in errors
    cores: ids of the available cores (default: those of this process)
    """
    _Check(plan, manifest, where, os.sched_getaffinity(0) if cores is None else cores).run()


class _Check:
    def __init__(self, plan: Plan, manifest: Manifest, where: str, cores: Collection[int]) -> None:
        self._plan, self._manifest, self._where, self._cores = plan, manifest, where, cores

    def run(self) -> None:
        """Check the processes first, since other figures depend on their number."""
        self._processes()
        self._counts()
        self._flash()
        self._pins()
        self._slots()
        self._bytes()

    def _fail(self, field: str, problem: str) -> NoReturn:
        raise UserError(f"{self._where}: field '{field}': {problem}; make a new plan with `neuronpipe plan`")

    def _within(self, field: str, value: int, minimum: int, maximum: int) -> None:
        if not minimum <= value <= maximum:
            self._fail(field, f"{value} is outside {minimum}..{maximum}")

    def _at_most(self, field: str, value: int, maximum: int) -> None:
        if value > maximum:
            self._fail(field, f"{value} is above {maximum}")

    def _processes(self) -> None:
        processes = self._plan.compute.processes
        workers = len(self._plan.compute.decode_workers())
        self._within("compute.processes", workers, 1, MAX_WORKERS)
        expected = [(role, 0) for role in SINGLE_ROLES] + [("decode", n) for n in range(workers)]
        roles = {process.role for process in processes}
        expected += [(role, 0) for role in (GATEWAY, ACCELERATOR) if role in roles]
        decode = [process.index for process in processes if process.role == "decode"]
        if sorted((process.role, process.index) for process in processes) != sorted(expected) or decode != sorted(
            decode
        ):
            self._fail(
                "compute.processes",
                f"expected one each of {', '.join(SINGLE_ROLES)}, decode 0 to {workers - 1} in order, "
                "and at most one gateway and one accelerator",
            )
        if len(backends := {process.backend for process in self._plan.compute.decode_workers()}) > 1:
            self._fail(
                "compute.processes",
                f"decode workers with one backend, not {' and '.join(map(quoted, sorted(backends)[:2]))}",
            )
        if (ACCELERATOR in roles) != bool(self._plan.compute.held_blocks):
            self._fail("compute.held_blocks", "are an accelerator's, and it has some")
        for number, process in enumerate(processes):
            if process.role == ACCELERATOR and process.backend == DEFAULT_BACKEND:
                self._fail(f"compute.processes.{number}.backend", f"{DEFAULT_BACKEND} is not an accelerator's")
            if process.core is not None and process.core not in self._cores:
                self._fail(f"compute.processes.{number}.core", f"core {process.core} is not this process's to use")

    def _counts(self) -> None:
        compute, blocks = self._plan.compute, self._manifest.layout.blocks
        of_layer = blocks * self._manifest.model.most_experts
        for name, maximum in (
            ("context_tokens", self._manifest.model.context_tokens),
            ("prefill_chunk_tokens", compute.context_tokens),
            ("decode_window_blocks", of_layer),
            ("prefill_window_blocks", of_layer),
        ):
            self._at_most(f"compute.{name}", getattr(compute, name), maximum)
            if maximum == of_layer and blocks < getattr(compute, name) < of_layer:
                self._fail(
                    f"compute.{name}", f"up to {blocks}, of one expert, or {of_layer}, of all experts of a layer"
                )
        self._at_most("compute.held_blocks", len(compute.held_blocks), compute.sequences)
        for blocks_of_batch in compute.held_blocks:
            self._within("compute.held_blocks", blocks_of_batch, 0, blocks)
        if compute.held_blocks and not compute.max_offloaded_blocks():
            self._fail("compute.held_blocks", "none at all; leave the accelerator out")
        if len(compute.held_blocks) > 1 and runtime_of(compute.accelerator_backend()):
            self._fail("compute.held_blocks", "as many for any number of texts: else its numerics would depend on that")
        if compute.held_matrices and (not compute.held_blocks or runtime_of(compute.accelerator_backend())):
            self._fail(
                "compute.held_matrices", "are those of an accelerator with the decode workers' bits, beside its blocks"
            )
        if compute.held_matrices != tuple(name for name in MATRICES if name in compute.held_matrices):
            self._fail("compute.held_matrices", f"some of {', '.join(MATRICES)} in this order, each once")
        if compute.held_blocks and not compute.pipeline:
            self._fail("compute.pipeline", "is what an accelerator needs")
        summed_blocks = self._manifest.layout.summed_blocks
        if compute.prefill_window_blocks < summed_blocks and not runtime_of(backend_of("prefill", compute.processes)):
            for name in ("prefill_chunk_tokens", "logit_rows"):
                tokens = getattr(compute, name)
                if tokens > PARTIAL_TOKENS:
                    self._fail(
                        f"compute.{name}",
                        f"{tokens}, but where a block window is less than a layer, {PARTIAL_TOKENS} at most",
                    )
        if compute.mode == "predicted" and self._manifest.predictor is None:
            self._fail("compute.mode", "'predicted', but the package has no predictor")
        if compute.mode == "thresholded" and self._manifest.silent is None:
            self._fail("compute.mode", "'thresholded', but the package has no thresholds of `profile --silent`")
        if compute.hints and (compute.mode == "predicted" or not has_hints(self._manifest)):
            self._fail("compute.hints", "are of a predictor or of routers, in exact mode")
        if (reason := kv_type_fault(self._manifest.model, compute.kv_type)) is not None:
            self._fail("compute.kv_type", f"{compute.kv_type!r}, but {reason}")
        step_tokens = RunShape.of(compute).step_tokens
        if compute.logit_rows < step_tokens:
            self._fail("compute.logit_rows", f"{compute.logit_rows} are too few for steps of {step_tokens} tokens")
        min_slots = STATES_PER_SEQUENCE * compute.sequences + compute.draft_tokens
        if self._manifest.model.all_state_elements and compute.state_slots < min_slots:
            self._fail(
                "compute.state_slots",
                f"{compute.state_slots} are too few: a sequence needs two, and a drafted token one",
            )
        if compute.embedding_on_flash and not embedding_flash_bytes(self._manifest):
            self._fail("compute.embedding_on_flash", "must be false: the embedding of this package stays in memory")
        if compute.draft_tokens and compute.held_blocks:
            self._fail("compute.draft_tokens", "must be 0: an accelerator computes a token of each sequence")

    def _flash(self) -> None:
        flash = self._plan.flash
        self._at_most("flash.prefetch_depth", flash.prefetch_depth, flash.depth)
        moved = self._plan.memory.are_scales_moved  # if so, a value part is read together with its trigger part
        min_read_bytes = largest_read_bytes(self._manifest.layout, bundle=flash.bundle or moved)
        self._within("flash.most_read_bytes", flash.most_read_bytes, min_read_bytes, MAX_READ_BYTES)
        if flash.most_read_bytes % PAGE_BYTES:
            self._fail("flash.most_read_bytes", f"{flash.most_read_bytes} is not a number of whole pages")
        self._at_most("flash.merge_gap_bytes", flash.merge_gap_bytes, flash.most_read_bytes)
        self._at_most("flash.warm_up_reads", flash.warm_up_reads, MAX_READS - flash.depth)
        min_warm_up_bytes = flash.most_read_bytes if flash.warm_up_reads else 0
        self._within("flash.warm_up_read_bytes", flash.warm_up_read_bytes, min_warm_up_bytes, MAX_READ_BYTES)
        if flash.warm_up_read_bytes % PAGE_BYTES:
            self._fail("flash.warm_up_read_bytes", f"{flash.warm_up_read_bytes} is not a number of whole pages")

    def _slots(self) -> None:
        """Check that each part has slots for all clusters, or for open, pinned and reserved ones together."""
        memory, compute, flash = self._plan.memory, self._plan.compute, self._plan.flash
        clusters = self._manifest.clusters
        may_open = open_clusters(self._manifest, compute)
        for part, slots, pinned, reserved in (
            ("trigger", memory.trigger_slots, self._max_pinned("triggers"), flash.reserved_triggers),
            ("value", memory.value_slots, self._max_pinned("values"), flash.reserved_values),
        ):
            self._at_most(f"memory.{part}_slots", slots, clusters)
            self._at_most(f"flash.reserved_{part}s", reserved, slots)
            borrowed = memory.lent_trigger_slots if part == "trigger" else memory.lent_value_slots
            needed_slots = may_open + reserved
            fits = slots >= min(clusters, needed_slots) and slots + borrowed >= min(clusters, needed_slots + pinned)
            if not fits or (slots == clusters and reserved):
                self._fail(
                    f"memory.{part}_slots",
                    f"{slots}, but {may_open} clusters may be open, {pinned} are pinned and {reserved} are kept free",
                )
        if min(memory.trigger_slots, memory.value_slots) < clusters:
            self._within("memory.moving_slots", memory.moving_slots, min(may_open, clusters), clusters)
        self._borrowed_slots()

    def _borrowed_slots(self) -> None:
        """Check that slots with borrowed ones are no more than the clusters, and that borrowable memory suffices."""
        memory, manifest = self._plan.memory, self._manifest
        for part, slots, borrowed in (
            ("trigger", memory.trigger_slots, memory.lent_trigger_slots),
            ("value", memory.value_slots, memory.lent_value_slots),
        ):
            self._at_most(f"memory.lent_{part}_slots", borrowed, manifest.clusters - slots)
        places = manifest.slots(moved=memory.are_scales_moved)
        borrowed_bytes = memory.lent_trigger_slots * places.trigger_bytes
        borrowed_bytes += memory.lent_value_slots * places.value_bytes
        borrowable_bytes = memory.max_borrowed_bytes
        if borrowed_bytes > borrowable_bytes:
            self._fail(
                "memory.lent_value_slots", f"{borrowed_bytes} bytes are lent, but {borrowable_bytes} are there to lend"
            )

    def _pins(self) -> None:
        """Check that the first entry of the pins is for one sequence, and the others for ever more sequences."""
        batches = [entry.texts for entry in self._plan.memory.pins]
        max_batch = self._plan.compute.sequences
        if batches[:1] != [1] or any(a >= b for a, b in itertools.pairwise(batches)) or batches[-1] > max_batch:
            self._fail("memory.pins", f"expected entries from 1 text on, with ever more of them, up to {max_batch}")

    def _max_pinned(self, name: str) -> int:
        """Check the pins of one part. Return the maximum, over all entries, of its pinned clusters."""
        maximum = 0
        for number, entry in enumerate(self._plan.memory.pins):
            field = f"memory.pins.{number}.{name}"
            try:
                counts = read_counts(getattr(entry, name), self._manifest.model.ffns)
            except ValueError as error:
                self._fail(field, str(error))
            self._at_most(field, max(counts), self._manifest.layout.clusters)
            maximum = max(maximum, sum(counts))
        return maximum

    def _bytes(self) -> None:
        memory, compute, flash = self._plan.memory, self._plan.compute, self._plan.flash
        shape = RunShape.of(compute)
        budget = memory_budget(
            self._manifest,
            shape,
            prefill_chunk_tokens=compute.prefill_chunk_tokens,
            staging_bytes=flash.staging_bytes,
        )
        slots, clusters = (memory.trigger_slots, memory.value_slots), self._manifest.clusters
        places = self._manifest.slots(moved=memory.are_scales_moved)
        expected = dataclasses.asdict(budget) | {
            "moved_scales_from": places.moved_from,
            "moved_scales_bytes": places.moved_bytes,
            "slots_bytes": slots_layout(self._manifest, *slots, moved=memory.are_scales_moved).total_bytes,
            "ffn_bytes": slots_layout(self._manifest, clusters, clusters).total_bytes,
            "least_bytes": Budgets(self._manifest).min_limit_bytes(shape),
            **untrusted_bytes(self._manifest, shape, memory.limit_bytes),
            "accelerator_bytes": accelerator_bytes(self._manifest, shape),
        }
        if memory.limit_bytes < (min_bytes := expected["least_bytes"]):
            self._fail("memory.limit_bytes", f"{memory.limit_bytes}, but these processes need {min_bytes}")
        for name, value in expected.items():
            if getattr(memory, name) != value:
                problem = f"{getattr(memory, name)}, but this package, these processes and this limit make {value}"
                self._fail(f"memory.{name}", problem)
        if memory.total_bytes() > memory.limit_bytes:
            self._fail("memory.limit_bytes", f"{memory.limit_bytes}, but the plan takes {memory.total_bytes()}")

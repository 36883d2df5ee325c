"""Expected times of a decoded token and of a prompt, from bytes, rows and reads.

    step = fixed matrices, keys and values + neurons + reads and synchronization + exposed flash time
           + time that workers wait for an accelerator

`work_cost.py` has the costs of a device, `accelerator_cost.py` those of an accelerator, `expected_misses.py` the misses
of the cache. With an unmeasured accelerator there is no expected time of steps, and with a runtime for prompts none of
prompts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from neuronpipe.plans.cost.accelerator_cost import AcceleratorCost, OffloadedWork
from neuronpipe.plans.cost.activation_rates import ActivationRates
from neuronpipe.plans.cost.cluster_ranking import occupied_slots
from neuronpipe.plans.cost.expected_misses import PartAccesses, ResidentSlots, joined_reads, part_accesses
from neuronpipe.plans.cost.io_wait import IoWait, IssueTime, Reads, embedding_ms, known_before_attention
from neuronpipe.plans.cost.prompt_time import between_products_ms, products_ms
from neuronpipe.plans.cost.step_bytes import StepBytes
from neuronpipe.plans.cost.work_cost import WorkCost, summed
from neuronpipe.plans.device.device import FlashCurve, MemorySpeed
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.traffic import neuron_row_bytes, trigger_row_bytes
from neuronpipe.plans.plan.borrowed_memory import with_borrowed_slots
from neuronpipe.plans.plan.document import Compute, Expected, Flash, Memory, backend_of, reads_whole
from neuronpipe.plans.plan.offloaded_blocks import MATRICES, matrix_bytes, offloaded_clusters
from neuronpipe.plans.plan.pinned_clusters import pins_within
from neuronpipe.plans.plan.runtime_memory import runtime_of
from neuronpipe.protocol.frozen import frozen

# Value parts that are read alone, for each missed bundle: both parts are read together but evicted separately, the
# value part sooner if the neuron was predicted and not active. Measured: 0.15 to 0.29 (1B and 7B, 40 to 75 % resident).
VALUES_ALONE = 0.2
# From this many tokens on, a step requests all value parts together with the trigger parts (native/engine).
DENSE_TOKENS = 16

Measurements = tuple[FlashCurve | None, MemorySpeed | None, DeviceProfile | None]
"""Flash curve, memory speed and profile of a device; None for what was not measured."""


def expected(
    manifest: Manifest,
    rates: ActivationRates,
    compute: Compute,
    memory: Memory,
    flash: Flash,
    curve: FlashCurve | None,
    speed: MemorySpeed | None,
    profile: DeviceProfile | None = None,
    *,
    batch: int = 1,
    position_tokens: int | None = None,
    prompt_tokens: int | None = None,
) -> Expected:
    """Return the expectation for a decoded token and for a prompt.

    batch: sequences of a step; figures per token are those of a step divided by it, tokens/s are of all together
    position_tokens: tokens of each sequence before the decoded token (default: half of the context)
    prompt_tokens: length of the prompt (default: one prefill chunk)
    """
    run_cost = _run_cost(manifest, rates, compute, memory, flash, curve, speed, profile)
    step = run_cost.decode_step(batch, compute.context_tokens // 2 if position_tokens is None else position_tokens)
    prompt = compute.prefill_chunk_tokens if prompt_tokens is None else prompt_tokens
    prompt_ms = run_cost.prompt_ms(prompt)
    sequential, in_pieces = step.sequential_bytes // batch, step.pieces_bytes // batch
    return Expected(
        sequential_bytes_per_token=sequential,
        neuron_bytes_per_token=in_pieces,
        piece_bytes=step.piece_bytes,
        dram_bytes_per_token=sequential + in_pieces,
        flash_reads_per_token=-(-step.reads // batch),
        flash_bytes_per_token=step.read_bytes // batch,
        sequential_ms_per_token=_rounded(step.sequential_ms, 1 / batch),
        neuron_ms_per_token=_rounded(step.pieces_ms, 1 / batch),
        overhead_ms_per_token=round(step.overhead_ms / batch, 3),
        flash_ms_per_token=_rounded(step.flash_ms, 1 / batch),
        exposed_flash_ms_per_token=_rounded(step.exposed_ms, 1 / batch),
        accelerator_ms_per_token=_rounded(None if run_cost.device is None else step.device_ms, 1 / batch),
        accelerator_wait_ms_per_token=_rounded(None if run_cost.device is None else step.waited_ms, 1 / batch),
        tokens_per_s=_per_second(batch, step.ms),
        miss_rate=round(step.miss_rate, 4),
        first_token_ms=_rounded(prompt_ms),
        prefill_tokens_per_s=_per_second(prompt, prompt_ms),
    )


def step_ms(
    manifest: Manifest,
    rates: ActivationRates,
    compute: Compute,
    memory: Memory,
    flash: Flash,
    measured: Measurements,
    *,
    batch: int,
) -> float | None:
    """Return the time of a decode step of `batch` sequences at half of the context; None if something was not
    measured."""
    return (
        _run_cost(manifest, rates, compute, memory, flash, *measured).decode_step(batch, compute.context_tokens // 2).ms
    )


def matrices_saved_ms(
    manifest: Manifest, rates: ActivationRates, compute: Compute, memory: Memory, flash: Flash, measured: Measurements
) -> dict[str, float]:
    """Return the time of a one-sequence step that is saved by offloading a matrix, for each of MATRICES, by name.
    Negative if the accelerator is slower. Empty if it was not measured or computes on the workers' own cores."""
    run_cost = _run_cost(manifest, rates, compute, memory, flash, *measured)
    if run_cost.device is None or run_cost.device.accelerator.is_processor:
        return {}
    saved: dict[str, float] = {}
    for name in MATRICES:
        calls = 1 if name == "output" else manifest.model.layers
        time_ms = _times(
            run_cost.cost.step_factor(), run_cost.cost.fixed_ms(calls * matrix_bytes(manifest, name), name)
        )
        if time_ms is not None:
            saved[name] = time_ms - run_cost.device.matrices_ms((name,), 1)
    return saved


def decode_reads(
    manifest: Manifest,
    rates: ActivationRates,
    compute: Compute,
    memory: Memory,
    flash: Flash,
    *measured: Any,
    tokens: int,
) -> tuple[IoWait, Reads]:
    """Return the model of waiting, and the last reads of a one-sequence step: in exact mode with parts, the values.

    measured: curve, speed and profile, as `expected` takes them
    tokens: tokens of the sequence before the step
    """
    run_cost = _run_cost(manifest, rates, compute, memory, flash, *measured)
    return run_cost.io_wait, run_cost.decode_step(1, tokens).flash_reads[-1]


def _run_cost(
    manifest: Manifest, rates: ActivationRates, compute: Compute, memory: Memory, flash: Flash, *measured: Any
) -> _RunCost:
    curve, speed, profile = measured
    workers = len(compute.decode_workers())
    cost = WorkCost(manifest, compute.mode, workers, shares_core(compute), curve, speed, profile)
    return _RunCost(manifest, rates, compute, memory, flash, cost, AcceleratorCost.of(manifest, compute, profile))


@frozen(kw_only=True)
class _Step:
    """Bytes and reads of one step, and its times; a time is None if something that it needs was not measured."""

    sequential_bytes: int = 0
    pieces_bytes: int = 0
    piece_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    miss_rate: float = 0.0
    sequential_ms: float | None
    pieces_ms: float | None
    read_overhead_ms: float = 0.0  # processor time of reads that delays the workers
    synchronization_ms: float = 0.0  # barriers, messages
    flash_ms: float | None
    exposed_ms: float | None  # flash time that no work overlaps
    device_ms: float = 0.0  # time of a measured accelerator, in parallel with the workers
    waited_ms: float | None = 0.0  # the part of device_ms that the workers wait for
    flash_reads: tuple[Reads, ...] = ()

    @property
    def work_ms(self) -> float | None:
        return summed(self.sequential_ms, self.pieces_ms)

    @property
    def overhead_ms(self) -> float:
        """Time of synchronization and of reads' processor time that delays the workers. Processor time counts by the
        share of the step in which workers do not wait for flash."""
        if not self.exposed_ms or not self.work_ms:
            return self.synchronization_ms + self.read_overhead_ms
        return self.synchronization_ms + self.read_overhead_ms * self.work_ms / (self.work_ms + self.exposed_ms)

    @property
    def ms(self) -> float | None:
        return summed(self.work_ms, self.overhead_ms, self.exposed_ms, self.waited_ms)


@frozen
class _RunCost:
    """The cost model of a run with one plan."""

    manifest: Manifest
    rates: ActivationRates
    compute: Compute
    memory: Memory
    flash: Flash
    cost: WorkCost
    device: AcceleratorCost | None

    # ---- steps -----------------------------------------------------------------------------------------------
    def decode_step(self, batch: int, position_tokens: int) -> _Step:
        """Return a decode step of `batch` sequences with `position_tokens` tokens each. A row counts for each sequence
        that reads it, up to all rows, as in the participants' counters."""
        if self.memory.has_borrowed_slots:
            memory = with_borrowed_slots(self.manifest, self.compute, self.memory, tokens=position_tokens + 1)
            return dataclasses.replace(self, memory=memory).decode_step(batch, position_tokens)
        rates, flash = self.rates, self.flash
        in_order = rates.trigger_read == 1.0  # all triggers are computed, in order
        blocks = self.compute.offloaded_blocks(batch)
        triggers, values = self._triggers(batch, blocks), self._values(batch, rates.value_read, blocks)
        trigger_bytes, value_bytes, device_ms = self._divide_rows(batch, blocks)
        fixed_bytes, kv_bytes = (
            self._bytes.fixed(batch) - (0 if self.device is None else self._bytes.offloaded()),
            batch * self._bytes.kv(position_tokens),
        )
        # Contiguous bytes are computed for one sequence: further ones read the same rows, or rows of the same size.
        one_sequence = (triggers, values) if batch == 1 else (self._triggers(1), self._values(1, rates.value_read))
        one_sequence_bytes = self._bytes.value_rows(1) + (0.0 if in_order else self._bytes.trigger_rows(1))
        one_sequence_pieces = one_sequence[1].accesses + (0.0 if in_order else one_sequence[0].accesses)
        looked_up = [triggers] if reads_whole(self.compute, flash) else [triggers, values]
        misses, accesses = sum(part.misses for part in looked_up), sum(part.accesses for part in looked_up)
        factor = self.cost.step_factor()
        piece_bytes = (
            max(1, int(one_sequence_bytes / one_sequence_pieces))
            if one_sequence_pieces
            else neuron_row_bytes(self.manifest)
        )
        fixed_ms = _times(factor, self.cost.fixed_ms(fixed_bytes))
        kv_ms = _times(factor, self.cost.sequential_read_ms(kv_bytes))
        if in_order:
            triggers_ms = _times(factor, self.cost.triggers_ms(trigger_bytes))
            pieces_ms = _times(factor, self.cost.values_ms(value_bytes, rates.value_read, piece_bytes))
        else:
            triggers_ms = 0.0
            neurons_ms = self.cost.predicted_ms(trigger_bytes, value_bytes, rates.trigger_read, piece_bytes)
            pieces_ms = _times(factor, neurons_ms)
        sequential_ms = summed(fixed_ms, kv_ms, triggers_ms)
        neurons_total_ms = summed(triggers_ms, pieces_ms)
        waited_ms: float | None = 0.0
        if self.device is not None:  # the workers wait while it computes a matrix
            matrices_ms = self.device.matrices_ms(self.compute.held_matrices, batch)
            waited_ms = summed(matrices_ms, self.device.waited_ms(device_ms, neurons_total_ms))
            device_ms += matrices_ms
        elif blocks or self.compute.held_matrices:
            waited_ms = None  # an unmeasured device may be as fast as the workers, or a hundred times slower
        flash_reads = self._step_reads(triggers, values, summed(fixed_ms, kv_ms), summed(neurons_total_ms, waited_ms))
        reads, read_bytes = sum(group.reads for group in flash_reads), sum(group.read_bytes for group in flash_reads)
        return _Step(
            sequential_bytes=int(fixed_bytes + kv_bytes + (trigger_bytes if in_order else 0)),
            pieces_bytes=int(value_bytes + (0 if in_order else trigger_bytes)),
            piece_bytes=piece_bytes,
            reads=reads,
            read_bytes=read_bytes,
            miss_rate=misses / max(1.0, accesses),
            sequential_ms=sequential_ms,
            pieces_ms=pieces_ms,
            read_overhead_ms=sum(
                self.cost.read_overhead_ms(group.reads, group.read_bytes, self.io_wait.at_once(group))
                for group in flash_reads
            ),
            synchronization_ms=self.cost.synchronization_ms(),
            flash_ms=summed(
                *map(self.io_wait.flash_ms, flash_reads), embedding_ms(self.manifest, self.compute, self.cost, batch)
            ),
            exposed_ms=summed(
                *map(self.io_wait.exposed_ms, flash_reads), embedding_ms(self.manifest, self.compute, self.cost, batch)
            ),
            device_ms=device_ms,
            waited_ms=waited_ms,
            flash_reads=tuple(flash_reads),
        )

    @functools.cached_property
    def io_wait(self) -> IoWait:
        return IoWait(self.cost, self.manifest.model.layers, self.flash.depth)

    @functools.cached_property
    def _bytes(self) -> StepBytes:
        return StepBytes(self.manifest, self.rates, self.compute, self.memory)

    def _divide_rows(self, batch: int, blocks: int) -> tuple[float, float, float]:
        """Return the trigger bytes and value bytes of the workers' rows, and the time of the device for other rows. If
        the device was not measured, all rows count as the workers'."""
        rates = self.rates
        trigger_bytes, value_bytes = self._bytes.trigger_rows(batch), self._bytes.value_rows(batch)
        if self.device is None or not blocks:
            return trigger_bytes, value_bytes, 0.0
        share = offloaded_clusters(self.manifest.layout, blocks) / self.manifest.layout.clusters
        activation_share = rates.activations_within(share)
        work = OffloadedWork(
            blocks=blocks,
            batch=batch,
            trigger_bytes=trigger_bytes * (activation_share if self.compute.mode == "predicted" else share),
            value_bytes=value_bytes * activation_share,
            share=(rates.trigger_read if self.compute.mode == "predicted" else rates.value_read)
            * activation_share
            / share,
        )
        return trigger_bytes - work.trigger_bytes, value_bytes - work.value_bytes, self.device.step_ms(work)

    def _step_reads(
        self, triggers: PartAccesses, values: PartAccesses, attention_ms: float | None, neurons_ms: float | None
    ) -> list[Reads]:
        """Return the reads of a decode step, by when they are issued.

        attention_ms: time outside feed-forwards; it overlaps with reads that do not depend on the layer's attention
        neurons_ms: time of the feed-forwards
        """
        layout, flash = self.manifest.layout, self.flash
        all_triggers = self.compute.mode != "predicted"
        before_attention = self.compute.prefetch and known_before_attention(self.manifest, self.compute)
        if all_triggers and self.manifest.model.experts == 1:
            issue_time, hidden_ms = IssueTime.AHEAD, summed(attention_ms, neurons_ms)
        else:
            issue_time, hidden_ms = (
                IssueTime.TOGETHER,
                summed(attention_ms, neurons_ms) if before_attention else neurons_ms,
            )
        if not self.compute.pipeline:
            hidden_ms = neurons_ms = 0.0
        if flash.bundle:
            reads, read_bytes = self._reads(triggers.misses, layout.cluster_stride_bytes, in_order=all_triggers)
            if not all_triggers:
                values_alone = int(triggers.misses * VALUES_ALONE)
                reads, read_bytes = reads + values_alone, read_bytes + values_alone * layout.value_part_bytes
            return [Reads(issue_time, reads, read_bytes, hidden_ms)]
        trigger_reads, trigger_bytes = self._reads(triggers.misses, layout.trigger_part_bytes, in_order=all_triggers)
        moved = self.memory.are_scales_moved
        value_reads, value_bytes = self._reads(values.misses, layout.value_read_bytes(moved=moved))
        if not all_triggers:
            return [Reads(issue_time, trigger_reads + value_reads, trigger_bytes + value_bytes, hidden_ms)]
        return [
            Reads(issue_time, trigger_reads, trigger_bytes, hidden_ms),
            Reads(IssueTime.ONE_BY_ONE, value_reads, value_bytes, neurons_ms),
        ]

    def prompt_ms(self, tokens: int) -> float | None:
        """Return the time of a prompt of `tokens` tokens, chunk by chunk. None if something was not measured, or if a
        runtime computes the products, which no profile measures."""
        if runtime_of(backend_of("prefill", self.compute.processes)) is not None:
            return None
        chunk = self.compute.prefill_chunk_tokens
        total_ms = 0.0
        for before in range(0, tokens, chunk):
            step_ms = self._prefill_step(min(chunk, tokens - before), before).ms
            if step_ms is None:
                return None
            total_ms += step_ms
        return total_ms

    def _prefill_step(self, tokens: int, before: int) -> _Step:
        """Return the step of a prompt that computes `tokens` tokens after `before` tokens. It reads every part once
        that one of the tokens uses; a layer's parts while the layer before is computed."""
        rates, layout, model = self.rates, self.manifest.layout, self.manifest.model
        value_rate = rates.trigger_read if tokens >= DENSE_TOKENS else rates.value_read
        triggers, values = self._triggers(tokens), self._values(tokens, value_rate)
        matrices = 2 if model.gated else 1  # of the value part
        accessed_bytes = triggers.accesses * trigger_row_bytes(
            self.manifest
        ) + values.accesses * matrices * neuron_row_bytes(self.manifest)
        neuron_bytes = int(accessed_bytes * layout.cluster_neurons)
        read_bytes = triggers.misses * layout.trigger_part_bytes + values.misses * layout.value_part_bytes
        reads = -(-read_bytes // self.flash.most_read_bytes)
        moved_ms = self.cost.sequential_read_ms(
            self._bytes.fixed(tokens) + self._bytes.kv(before + tokens) + neuron_bytes
        )
        computed_ms = products_ms(self.manifest, rates, self.cost, tokens)
        between_ms = between_products_ms(self.manifest, rates, self.cost, tokens, before)
        work_ms = None if moved_ms is None else max(moved_ms, computed_ms) + between_ms
        flash_ms = self.cost.flash_ms(reads, read_bytes, reads, self.flash.depth)
        exposed_ms = None if flash_ms is None or work_ms is None else max(0.0, flash_ms - work_ms)
        return _Step(
            sequential_ms=work_ms,
            pieces_ms=0.0,
            read_overhead_ms=self.cost.read_overhead_ms(reads, read_bytes, reads),
            flash_ms=summed(flash_ms, embedding_ms(self.manifest, self.compute, self.cost, tokens)),
            exposed_ms=summed(exposed_ms, embedding_ms(self.manifest, self.compute, self.cost, tokens)),
        )

    # ---- reads -----------------------------------------------------------------------------------------------
    def _reads(self, misses: int, part_bytes: int, *, in_order: bool = False) -> tuple[int, int]:
        """Return the number of reads for these misses, and their bytes including gaps.

        part_bytes: bytes to read of each cluster
        in_order: the misses of each feed-forward are contiguous, behind its pinned clusters
        """
        clusters = misses if in_order else self.rates.chosen * self.manifest.clusters
        return joined_reads(misses, clusters, part_bytes, self.manifest.layout.cluster_stride_bytes, self.flash)

    # ---- parts -----------------------------------------------------------------------------------------------
    def _triggers(self, tokens: int, blocks: int = 0) -> PartAccesses:
        """Return the accesses of triggers.

        blocks: offloaded blocks of every feed-forward
        """
        slots = occupied_slots(self.memory.trigger_slots, self.flash.reserved_triggers), self._pinned(tokens, 0)
        return self._parts(self.rates.trigger_read, slots, tokens, blocks, self.compute.mode != "predicted")

    def _values(self, tokens: int, share: float, blocks: int = 0) -> PartAccesses:
        slots = occupied_slots(self.memory.value_slots, self.flash.reserved_values), self._pinned(tokens, 1)
        return self._parts(share, slots, tokens, blocks, share == 1.0)

    def _parts(
        self, share: float, slots: tuple[int, int], tokens: int, blocks: int, all_accessed: bool
    ) -> PartAccesses:
        """Return the accesses of triggers or of values.

        slots: numbers of occupied and of pinned slots
        """
        offloaded = self.manifest.model.ffns * offloaded_clusters(self.manifest.layout, blocks)
        resident = ResidentSlots(occupied=slots[0], pinned=slots[1], offloaded=offloaded)
        return part_accesses(
            self.manifest, self.rates, self.compute.mode, share, resident, tokens, all_accessed=all_accessed
        )

    def _pinned(self, tokens: int, part: int) -> int:
        """Return the number of pinned triggers (part 0) or values (part 1) in a step of `tokens` tokens. A step with
        more tokens than the plan has sequences is a prompt's, and has the pins for one sequence."""
        memory, batch = self.memory, tokens if tokens <= self.compute.sequences else 1
        counts = memory.pins_for(batch).counts(self.manifest.model.ffns)[part]
        slots = (memory.trigger_slots, memory.value_slots)[part]
        return sum(pins_within(counts, slots, memory.moving_slots, self.manifest.clusters))


def shares_core(compute: Compute) -> bool:
    """Return True if the loader runs on a decode worker's core, or is not pinned to a core."""
    loader_core = next(process.core for process in compute.processes if process.role == "loader")
    return loader_core is None or loader_core in {worker.core for worker in compute.decode_workers()}


def _times(factor: float, time_ms: float | None) -> float | None:
    return None if time_ms is None else factor * time_ms


def _per_second(tokens: int, time_ms: float | None) -> float | None:
    return None if not time_ms else round(1e3 * tokens / time_ms, 3)


def _rounded(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else round(factor * value, 3)

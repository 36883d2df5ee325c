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
import math
from typing import Any

from neuronpipe.plans.cost.accelerator_cost import AcceleratorCost
from neuronpipe.plans.cost.activation_rates import ActivationRates
from neuronpipe.plans.cost.cluster_ranking import occupied_slots
from neuronpipe.plans.cost.expected_misses import PartAccesses, ResidentSlots, accessed_by_any, part_accesses
from neuronpipe.plans.cost.io_wait import IoWait, IssueTime, Reads, embedding_ms
from neuronpipe.plans.cost.prompt_time import between_products_ms, products_ms
from neuronpipe.plans.cost.step_bytes import StepBytes
from neuronpipe.plans.cost.step_reads import ReadOrder
from neuronpipe.plans.cost.step_work import StepWork
from neuronpipe.plans.cost.work_cost import WorkCost, summed
from neuronpipe.plans.device.device import FlashCurve, MemorySpeed
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.traffic import neuron_row_bytes, trigger_row_bytes
from neuronpipe.plans.plan.borrowed_memory import with_borrowed_slots
from neuronpipe.plans.plan.document import Compute, Expected, Flash, Memory, backend_of, reads_whole
from neuronpipe.plans.plan.offloaded_blocks import MATRICES, matrix_bytes, offloaded_clusters
from neuronpipe.plans.plan.pinned_clusters import pinned_slots
from neuronpipe.plans.plan.runtime_memory import runtime_of
from neuronpipe.protocol.frozen import frozen

# From this many tokens on, a step requests all value parts together with the trigger parts (native/engine).
DENSE_TOKENS = 16
USUAL_PROMPT_TOKENS = 512  # as in llama-bench's test pp512

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
    prompt_tokens: length of the prompt (default: one prefill chunk; its speed is then that of a chunk in the middle of
        USUAL_PROMPT_TOKENS, so that plans with different chunks can be compared)
    """
    run_cost = _run_cost(manifest, rates, compute, memory, flash, curve, speed, profile)
    step = run_cost.decode_step(batch, compute.context_tokens // 2 if position_tokens is None else position_tokens)
    prompt = compute.prefill_chunk_tokens if prompt_tokens is None else prompt_tokens
    prompt_ms = chunk_ms = run_cost.prompt_ms(prompt)
    before = (min(USUAL_PROMPT_TOKENS, compute.context_tokens) - prompt) // 2
    if prompt_tokens is None and before > 0:
        chunk_ms = run_cost.prompt_ms(prompt, before)
    sequential, in_pieces = step.sequential_bytes // batch, step.pieces_bytes // batch
    return Expected(
        sequential_bytes_per_token=sequential,
        neuron_bytes_per_token=in_pieces,
        piece_bytes=step.piece_bytes,
        dram_bytes_per_token=sequential + in_pieces,
        flash_reads_per_token=math.ceil(step.reads / batch),
        flash_bytes_per_token=int(step.read_bytes / batch),
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
        prefill_tokens_per_s=_per_second(prompt, chunk_ms),
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


def step_work(
    manifest: Manifest,
    rates: ActivationRates,
    compute: Compute,
    memory: Memory,
    flash: Flash,
    measured: Measurements,
    *,
    batch: int,
    position_tokens: int,
) -> StepWork:
    """Return the workers' computing in a decode step, as `expected` takes it into account."""
    return _run_cost(manifest, rates, compute, memory, flash, *measured).step_work(batch, position_tokens)


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
    cost = WorkCost(manifest, compute.mode, workers, shares_core(compute), curve, speed, profile, compute.kv_type)
    return _RunCost(manifest, rates, compute, memory, flash, cost, AcceleratorCost.of(manifest, compute, profile))


@frozen(kw_only=True)
class _Step:
    """Bytes and reads of one step, and its times; a time is None if something that it needs was not measured."""

    sequential_bytes: int = 0
    pieces_bytes: int = 0
    piece_bytes: int = 0
    reads: float = 0.0
    read_bytes: float = 0.0
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
        blocks = self.compute.offloaded_blocks(batch)
        work = self.step_work(batch, position_tokens)
        triggers, values = self._triggers(batch, blocks), self._values(batch, self.rates.value_read, blocks)
        looked_up = [triggers] if reads_whole(self.compute, self.flash) else [triggers, values]
        misses, accesses = sum(part.misses for part in looked_up), sum(part.accesses for part in looked_up)
        flash_reads = self._step_reads(
            batch, triggers, values, work.attention_ms, summed(work.neurons_ms, work.waited_ms)
        )
        reads, read_bytes = sum(group.reads for group in flash_reads), sum(group.read_bytes for group in flash_reads)
        return _Step(
            sequential_bytes=work.sequential_bytes,
            pieces_bytes=work.pieces_bytes,
            piece_bytes=self._piece_bytes,
            reads=reads,
            read_bytes=read_bytes,
            miss_rate=misses / max(1.0, accesses),
            sequential_ms=work.sequential_ms,
            pieces_ms=work.pieces_ms,
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
            device_ms=work.device_ms,
            waited_ms=work.waited_ms,
            flash_reads=tuple(flash_reads),
        )

    def step_work(self, batch: int, position_tokens: int) -> StepWork:
        sizes = StepBytes(self.manifest, self.rates, self.compute, self.memory)
        return StepWork.of(
            sizes,
            self.cost,
            self.device,
            batch=batch,
            position_tokens=position_tokens,
            piece_bytes=self._piece_bytes,
        )

    @functools.cached_property
    def _piece_bytes(self) -> int:
        """Contiguous bytes of neurons. They are those of one sequence: further ones read the same rows, or rows of the
        same size."""
        in_order = self.rates.trigger_read == 1.0
        triggers, values = self._triggers(1), self._values(1, self.rates.value_read)
        size_bytes = self._bytes.value_rows(1) + (0.0 if in_order else self._bytes.trigger_rows(1))
        pieces = values.accesses + (0.0 if in_order else triggers.accesses)
        return max(1, int(size_bytes / pieces)) if pieces else neuron_row_bytes(self.manifest)

    @functools.cached_property
    def io_wait(self) -> IoWait:
        return IoWait(self.cost, sum(self.manifest.model.ffn_layers), self.flash.depth)

    @functools.cached_property
    def _bytes(self) -> StepBytes:
        return StepBytes(self.manifest, self.rates, self.compute, self.memory)

    def _step_reads(
        self,
        batch: int,
        triggers: PartAccesses,
        values: PartAccesses,
        attention_ms: float | None,
        neurons_ms: float | None,
    ) -> list[Reads]:
        """Return the reads of a decode step, by when they are issued.

        batch: sequences of the step
        attention_ms: time outside feed-forwards; it overlaps with reads that do not depend on the layer's attention
        neurons_ms: time of the feed-forwards
        """
        order, among = self._read_order, self.manifest.clusters * accessed_by_any(self.manifest, self.rates, 1.0, batch)
        issue_time, hidden_ms = order.first_issued, neurons_ms
        if issue_time == IssueTime.AHEAD or order.before_attention:
            hidden_ms = summed(attention_ms, neurons_ms)
        if not self.compute.pipeline:
            hidden_ms = neurons_ms = 0.0
        first = Reads(issue_time, *order.first(triggers.misses, among), hidden_ms)
        if order.in_order and self.manifest.model.experts > 1:
            clusters = self.manifest.layout.clusters
            accessed_experts = triggers.accesses / clusters / self.io_wait.layers
            first = dataclasses.replace(
                first, group_reads=order.first(clusters, clusters)[0], layer_groups=accessed_experts
            )
        if self.flash.bundle:
            return [first]
        later = Reads(IssueTime.ONE_BY_ONE, *order.values(values.misses, among), neurons_ms)
        if order.in_order:
            return [first, later]
        return [Reads(issue_time, first.reads + later.reads, first.read_bytes + later.read_bytes, hidden_ms)]

    @functools.cached_property
    def _read_order(self) -> ReadOrder:
        return ReadOrder(self.manifest, self.compute, self.memory, self.flash)

    def prompt_ms(self, tokens: int, before: int = 0) -> float | None:
        """Return the time of `tokens` tokens of a prompt after `before` tokens, chunk by chunk. None if something was
        not measured, or if a runtime computes the products, which no profile measures."""
        if runtime_of(backend_of("prefill", self.compute.processes)) is not None:
            return None
        chunk = self.compute.prefill_chunk_tokens
        total_ms = 0.0
        for computed in range(0, tokens, chunk):
            step_ms = self._prefill_step(min(chunk, tokens - computed), before + computed).ms
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
        reads = read_bytes / self.flash.most_read_bytes
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
        pins, ffns = memory.pins_for(batch), self.manifest.model.ffns
        text, slots = ((pins.triggers, memory.trigger_slots), (pins.values, memory.value_slots))[part]
        return pinned_slots(text, ffns, slots, memory.moving_slots, self.manifest.clusters)


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

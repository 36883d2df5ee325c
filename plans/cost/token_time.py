"""What tokens should cost, from bytes, rows and reads. An expectation to compare a measurement with.

    step = fixed matrices, keys and values + neurons + reading and meetings + flash time that nothing hides
           + what an accelerator computes longer than the workers

`work_cost.py` says what each takes on a device, `accelerator_cost.py` what an accelerator takes, `expected_misses.py`
what a cache misses.
Of what an accelerator computes that was not measured, or prompts by a runtime, no time is expected.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from neuronpipe.plans.cost.accelerator_cost import AcceleratorCost, OffloadedWork
from neuronpipe.plans.cost.activation_rates import ActivationRates
from neuronpipe.plans.cost.cluster_ranking import occupied_slots
from neuronpipe.plans.cost.expected_misses import PartAccesses, ResidentSlots, joined_reads, part_accesses, union
from neuronpipe.plans.cost.io_wait import IoWait, IssueTime, Reads
from neuronpipe.plans.cost.prompt_time import between_products_ms, products_ms
from neuronpipe.plans.cost.work_cost import WorkCost
from neuronpipe.plans.device.device import FlashCurve, MemorySpeed
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.package.manifest import PREDICTOR, Manifest
from neuronpipe.plans.package.traffic import neuron_row_bytes, trigger_row_bytes
from neuronpipe.plans.plan.borrowed_memory import with_borrowed_slots
from neuronpipe.plans.plan.document import Compute, Expected, Flash, Memory, backend_of, reads_whole
from neuronpipe.plans.plan.offloaded_blocks import MATRICES, matrix_bytes, offloaded_clusters
from neuronpipe.plans.plan.pinned_clusters import pins_within
from neuronpipe.plans.plan.runtime_memory import runtime_of
from neuronpipe.protocol.frozen import frozen

# Value parts that are read alone, for each bundle that is: both parts come together, but are evicted apart, the value
# part sooner of a neuron that was named and did not fire. 1B and 7B, 40 to 75 % resident: 0.15 to 0.29.
VALUES_ALONE = 0.2
DENSE_TOKENS = 16  # steps of so many tokens compute every neuron of a block that one of them wants (native/engine)

Measurements = tuple[FlashCurve | None, MemorySpeed | None, DeviceProfile | None]
"""Of a device: how fast flash and memory are, and its profile; None where that was not measured."""


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
    """A decoded token and a prompt.

    batch: texts that a step computes at once
    position_tokens: tokens of each text before the one that is decoded (default: half of the context)
    prompt_tokens: length of the prompt (default: one prefill chunk)
    """
    run = _run(manifest, rates, compute, memory, flash, curve, speed, profile)
    step = run.decode_step(batch, compute.context_tokens // 2 if position_tokens is None else position_tokens)
    prompt = compute.prefill_chunk_tokens if prompt_tokens is None else prompt_tokens
    prompt_ms = run.prompt_ms(prompt)
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
        accelerator_ms_per_token=_rounded(None if run.device is None else step.device_ms, 1 / batch),
        accelerator_wait_ms_per_token=_rounded(None if run.device is None else step.waited_ms, 1 / batch),
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
    """A decode step of so many texts at half of the context; None where something was not measured."""
    return _run(manifest, rates, compute, memory, flash, *measured).decode_step(batch, compute.context_tokens // 2).ms


def matrices_saved_ms(
    manifest: Manifest, rates: ActivationRates, compute: Compute, memory: Memory, flash: Flash, measured: Measurements
) -> dict[str, float]:
    """What a text's decode step takes less for each matrix that a device holds, by its name; none where it is not
    known, or the device computes on the workers' own cores."""
    run = _run(manifest, rates, compute, memory, flash, *measured)
    if run.device is None or run.device.measured.is_processor:
        return {}
    saved: dict[str, float] = {}
    for name in MATRICES:
        calls = 1 if name == "output" else manifest.model.layers
        time_ms = _times(run.cost.step_factor(), run.cost.fixed_ms(calls * matrix_bytes(manifest, name)))
        if time_ms is not None:
            saved[name] = time_ms - run.device.matrices_ms((name,), 1)
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
    """The reads of one text's decode step that are waited for, after so many tokens, and what waiting for them costs.
    measured: of the device, as for `expected`."""
    run = _run(manifest, rates, compute, memory, flash, *measured)
    return run.waiting, run.decode_step(1, tokens).named[-1]


def _run(
    manifest: Manifest, rates: ActivationRates, compute: Compute, memory: Memory, flash: Flash, *measured: Any
) -> _Run:
    curve, speed, profile = measured
    workers = len(compute.decode_workers())
    cost = WorkCost(manifest, compute.mode, workers, shares_core(compute), curve, speed, profile)
    return _Run(manifest, rates, compute, memory, flash, cost, AcceleratorCost.of(manifest, compute, profile))


@frozen(kw_only=True)
class _Step:
    """What one step moves, and its times; None where the device was not measured."""

    sequential_bytes: int = 0
    pieces_bytes: int = 0
    piece_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    miss_rate: float = 0.0
    sequential_ms: float | None
    pieces_ms: float | None
    read_overhead_ms: float = 0.0  # processor time of reads
    synchronization_ms: float = 0.0  # barriers, messages
    flash_ms: float | None
    exposed_ms: float | None  # of flash time, what no work hides
    device_ms: float = 0.0  # of an accelerator that was measured, beside the workers
    waited_ms: float | None = 0.0  # of it, what these do not compute meanwhile
    named: tuple[Reads, ...] = ()

    @property
    def work_ms(self) -> float | None:
        return _sum(self.sequential_ms, self.pieces_ms)

    @property
    def overhead_ms(self) -> float:
        """While workers wait, reading takes nothing from them."""
        if not self.exposed_ms or not self.work_ms:
            return self.synchronization_ms + self.read_overhead_ms
        return self.synchronization_ms + self.read_overhead_ms * self.work_ms / (self.work_ms + self.exposed_ms)

    @property
    def ms(self) -> float | None:
        """The whole step."""
        return _sum(self.work_ms, self.overhead_ms, self.exposed_ms, self.waited_ms)


@frozen
class _Run:
    manifest: Manifest
    rates: ActivationRates
    compute: Compute
    memory: Memory
    flash: Flash
    cost: WorkCost
    device: AcceleratorCost | None

    # ---- steps -----------------------------------------------------------------------------------------------
    def decode_step(self, batch: int, position_tokens: int) -> _Step:
        """Of so many texts, each with so many tokens before. A neuron's row is counted once for each text that reads
        it, up to all rows: so do the participants' counters."""
        if self.memory.has_borrowed_slots:
            memory = with_borrowed_slots(self.manifest, self.compute, self.memory, tokens=position_tokens + 1)
            return dataclasses.replace(self, memory=memory).decode_step(batch, position_tokens)
        rates, flash = self.rates, self.flash
        in_order = rates.trigger_read == 1.0  # all triggers, one after the other
        blocks = self.compute.offloaded_blocks(batch)
        triggers, values = self._triggers(batch, blocks), self._values(batch, rates.value_read, blocks)
        trigger_bytes, value_bytes, device_ms = self._shared_out(batch, blocks)
        fixed_bytes, kv_bytes = (
            self._fixed_bytes(batch) - self._held_fixed_bytes(),
            batch * self._kv_bytes(position_tokens),
        )
        # The size of a piece is that of one text: others read the same ones, or others of the same size.
        of_one = (triggers, values) if batch == 1 else (self._triggers(1), self._values(1, rates.value_read))
        one_bytes = self._value_rows(1) + (0.0 if in_order else self._trigger_rows(1))
        one_pieces = of_one[1].wanted + (0.0 if in_order else of_one[0].wanted)
        looked_up = [triggers] if reads_whole(self.compute, flash) else [triggers, values]
        missed, wanted = sum(part.missed for part in looked_up), sum(part.wanted for part in looked_up)
        factor = self.cost.step_factor()
        piece_bytes = max(1, int(one_bytes / one_pieces)) if one_pieces else neuron_row_bytes(self.manifest)
        fixed_ms = _times(factor, self.cost.fixed_ms(fixed_bytes))
        kv_ms = _times(factor, self.cost.sequential_read_ms(kv_bytes))
        if in_order:
            triggers_ms = _times(factor, self.cost.triggers_ms(trigger_bytes))
            pieces_ms = _times(factor, self.cost.values_ms(value_bytes, rates.value_read, piece_bytes))
        else:
            triggers_ms = 0.0
            neurons_ms = self.cost.predicted_ms(trigger_bytes, value_bytes, rates.trigger_read, piece_bytes)
            pieces_ms = _times(factor, neurons_ms)
        sequential_ms = _sum(fixed_ms, kv_ms, triggers_ms)
        others_ms = _sum(triggers_ms, pieces_ms)
        waited_ms: float | None = 0.0
        if self.device is not None:  # nobody has other work while it computes a matrix
            rows_ms = self.device.matrices_ms(self.compute.held_matrices, batch)
            waited_ms = _sum(rows_ms, self.device.waited_ms(device_ms, others_ms))
            device_ms += rows_ms
        elif blocks or self.compute.held_matrices:
            waited_ms = None  # as fast as the workers, or a hundred times slower: nobody knows
        found = self._step_reads(triggers, values, _sum(fixed_ms, kv_ms), _sum(others_ms, waited_ms))
        reads, read_bytes = sum(one.reads for one in found), sum(one.read_bytes for one in found)
        return _Step(
            sequential_bytes=int(fixed_bytes + kv_bytes + (trigger_bytes if in_order else 0)),
            pieces_bytes=int(value_bytes + (0 if in_order else trigger_bytes)),
            piece_bytes=piece_bytes,
            reads=reads,
            read_bytes=read_bytes,
            miss_rate=missed / max(1.0, wanted),
            sequential_ms=sequential_ms,
            pieces_ms=pieces_ms,
            read_overhead_ms=sum(
                self.cost.read_overhead_ms(one.reads, one.read_bytes, self.waiting.at_once(one)) for one in found
            ),
            synchronization_ms=self.cost.synchronization_ms(),
            flash_ms=_sum(*map(self.waiting.flash_ms, found)),
            exposed_ms=_sum(*map(self.waiting.exposed_ms, found)),
            device_ms=device_ms,
            waited_ms=waited_ms,
            named=tuple(found),
        )

    @functools.cached_property
    def waiting(self) -> IoWait:
        """For the reads of its decode steps."""
        return IoWait(self.cost, self.manifest.model.layers, self.flash.depth)

    def _shared_out(self, batch: int, blocks: int) -> tuple[float, float, float]:
        """Bytes of the rows that workers compute, of triggers and of values, and what a device takes for the others.
        Of one that was not measured, they are all counted as the workers'."""
        rates = self.rates
        trigger_bytes, value_bytes = self._trigger_rows(batch), self._value_rows(batch)
        if self.device is None or not blocks:
            return trigger_bytes, value_bytes, 0.0
        share = offloaded_clusters(self.manifest.layout, blocks) / self.manifest.layout.clusters
        of_activations = rates.activations_within(share)
        held = OffloadedWork(
            blocks=blocks,
            texts=batch,
            trigger_bytes=trigger_bytes * (of_activations if self.compute.mode == "predicted" else share),
            value_bytes=value_bytes * of_activations,
            share=(rates.trigger_read if self.compute.mode == "predicted" else rates.value_read)
            * of_activations
            / share,
        )
        return trigger_bytes - held.trigger_bytes, value_bytes - held.value_bytes, self.device.step_ms(held)

    def _step_reads(
        self, triggers: PartAccesses, values: PartAccesses, attention_ms: float | None, neurons_ms: float | None
    ) -> list[Reads]:
        """The reads of a decode step, by when they are named; the layer's attention goes on meanwhile where it does not
        decide which neurons are wanted."""
        layout, flash = self.manifest.layout, self.flash
        all_triggers = self.compute.mode != "predicted"
        before_attention = self.compute.prefetch and known_before_attention(self.manifest, self.compute)
        if all_triggers and self.manifest.model.experts == 1:
            first, hidden_ms = IssueTime.AHEAD, _sum(attention_ms, neurons_ms)
        else:
            first, hidden_ms = IssueTime.TOGETHER, _sum(attention_ms, neurons_ms) if before_attention else neurons_ms
        if not self.compute.pipeline:
            hidden_ms = neurons_ms = 0.0
        if flash.bundle:
            reads, read_bytes = self._reads(triggers.missed, layout.cluster_stride_bytes, in_order=all_triggers)
            if not all_triggers:
                alone = int(triggers.missed * VALUES_ALONE)
                reads, read_bytes = reads + alone, read_bytes + alone * layout.value_part_bytes
            return [Reads(first, reads, read_bytes, hidden_ms)]
        trigger_reads, trigger_bytes = self._reads(triggers.missed, layout.trigger_part_bytes, in_order=all_triggers)
        moved = self.memory.are_scales_moved
        value_reads, value_bytes = self._reads(values.missed, layout.value_read_bytes(moved=moved))
        if not all_triggers:
            return [Reads(first, trigger_reads + value_reads, trigger_bytes + value_bytes, hidden_ms)]
        return [
            Reads(first, trigger_reads, trigger_bytes, hidden_ms),
            Reads(IssueTime.ONE_BY_ONE, value_reads, value_bytes, neurons_ms),
        ]

    def prompt_ms(self, tokens: int) -> float | None:
        """A prompt, a chunk at a time: every weight that one of a chunk's tokens wants is read once. None where its
        products are a runtime's, which no profile measures."""
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
        """A layer's weights stream in while the one before is computed. A prompt is computed without a predictor."""
        rates, layout, model = self.rates, self.manifest.layout, self.manifest.model
        value_rate = rates.trigger_read if tokens >= DENSE_TOKENS else rates.value_read
        triggers, values = self._triggers(tokens), self._values(tokens, value_rate)
        matrices = 2 if model.gated else 1  # of the value part
        wanted_bytes = triggers.wanted * trigger_row_bytes(self.manifest) + values.wanted * matrices * neuron_row_bytes(
            self.manifest
        )
        neuron_bytes = int(wanted_bytes * layout.cluster_neurons)
        read_bytes = triggers.missed * layout.trigger_part_bytes + values.missed * layout.value_part_bytes
        reads = -(-read_bytes // self.flash.most_read_bytes)
        moved_ms = self.cost.sequential_read_ms(
            self._fixed_bytes(tokens) + self._kv_bytes(before + tokens) + neuron_bytes
        )
        computed_ms = products_ms(self.manifest, rates, self.cost, tokens)
        besides_ms = between_products_ms(self.manifest, rates, self.cost, tokens, before)
        work_ms = None if moved_ms is None else max(moved_ms, computed_ms) + besides_ms
        return _Step(
            sequential_ms=work_ms,
            pieces_ms=0.0,
            read_overhead_ms=self.cost.read_overhead_ms(reads, read_bytes, reads),
            flash_ms=(flash_ms := self.cost.flash_ms(reads, read_bytes, reads, self.flash.depth)),
            exposed_ms=None if flash_ms is None or work_ms is None else max(0.0, flash_ms - work_ms),
        )

    # ---- bytes -----------------------------------------------------------------------------------------------
    def _fixed_bytes(self, tokens: int) -> int:
        """What a step reads of the fixed tensors. Of a mixture's predictors, those of chosen experts."""
        manifest, total = self.manifest, self.memory.fixed_bytes
        if not manifest.model.tied_embeddings:
            total -= matrix_bytes(manifest, "output")  # the embedding is as large, and one row of it is read
        if self.compute.mode == "predicted" and PREDICTOR in manifest.files:
            total -= int(manifest.files[PREDICTOR].bytes * (1 - union(self.rates.chosen, tokens)))
        return total

    def _held_fixed_bytes(self) -> int:
        """Of the fixed tensors, those that a device reads instead; the workers', where it was not measured."""
        if self.device is None:
            return 0
        return sum(
            matrix_bytes(self.manifest, name) * (1 if name == "output" else self.manifest.model.layers)
            for name in self.compute.held_matrices
        )

    def _kv_bytes(self, tokens: int) -> int:
        """Keys and values of so many tokens, of all layers: each has its attention window."""
        model = self.manifest.model
        return (
            model.key_heads
            * 2
            * model.head_width
            * 2
            * sum(kind.layers * min(tokens, kind.window_tokens or tokens) for kind in model.layer_kinds)
        )

    def _rows(self, tokens: int, share: float) -> float:
        """Rows of one matrix that so many tokens read, each this share of its chosen experts' neurons."""
        model = self.manifest.model
        read = union(self.rates.chosen, tokens) if share == 1.0 else min(1.0, tokens * self.rates.chosen * share)
        return read * model.ffns * model.neurons

    def _trigger_rows(self, tokens: int) -> float:
        """Bytes of those that so many tokens read."""
        return self._rows(tokens, self.rates.trigger_read) * trigger_row_bytes(self.manifest)

    def _value_rows(self, tokens: int) -> float:
        up = self._rows(tokens, self.rates.value_read) if self.manifest.model.gated else 0.0
        return (up + self._rows(tokens, self.rates.down_read)) * neuron_row_bytes(self.manifest)

    # ---- reads -----------------------------------------------------------------------------------------------
    def _reads(self, missed: int, part_bytes: int, *, in_order: bool = False) -> tuple[int, int]:
        """in_order: of each feed-forward, all that miss lie together: those behind its pinned ones, or all."""
        clusters = missed if in_order else self.rates.chosen * self.manifest.clusters
        return joined_reads(missed, clusters, part_bytes, self.manifest.layout.cluster_stride_bytes, self.flash)

    # ---- parts -----------------------------------------------------------------------------------------------
    def _triggers(self, tokens: int, blocks: int = 0) -> PartAccesses:
        """blocks: of every feed-forward, those that a device computes."""
        slots = occupied_slots(self.memory.trigger_slots, self.flash.reserved_triggers), self._pinned(tokens, 0)
        return self._parts(self.rates.trigger_read, slots, tokens, blocks, self.compute.mode != "predicted")

    def _values(self, tokens: int, share: float, blocks: int = 0) -> PartAccesses:
        slots = occupied_slots(self.memory.value_slots, self.flash.reserved_values), self._pinned(tokens, 1)
        return self._parts(share, slots, tokens, blocks, share == 1.0)

    def _parts(
        self, share: float, slots: tuple[int, int], tokens: int, blocks: int, all_accessed: bool
    ) -> PartAccesses:
        """slots: those that hold something, and of them those whose clusters stay."""
        on_device = self.manifest.model.ffns * offloaded_clusters(self.manifest.layout, blocks)
        there = ResidentSlots(held=slots[0], pinned=slots[1], on_device=on_device)
        return part_accesses(
            self.manifest, self.rates, self.compute.mode, share, there, tokens, all_accessed=all_accessed
        )

    def _pinned(self, tokens: int, part: int) -> int:
        """How many of all triggers (0) or values (1) stay in a step of so many tokens; of a prompt's, what stays for
        one text."""
        memory, texts = self.memory, tokens if tokens <= self.compute.sequences else 1
        counts = memory.pins_for(texts).counts(self.manifest.model.ffns)[part]
        slots = (memory.trigger_slots, memory.value_slots)[part]
        return sum(pins_within(counts, slots, memory.moving_slots, self.manifest.clusters))


def known_before_attention(manifest: Manifest, compute: Compute) -> bool:
    """Whether what a layer wants is known before its attention, by a predictor or by its router."""
    if compute.mode == "predicted" and manifest.predictor is not None:
        return manifest.predictor.reads == "attention"
    return manifest.model.router_reads == "layer"


def shares_core(compute: Compute) -> bool:
    """Whether the loader has no core that no worker has."""
    loader_core = next(process.core for process in compute.processes if process.role == "loader")
    return loader_core is None or loader_core in {worker.core for worker in compute.decode_workers()}


def _sum(*times_ms: float | None) -> float | None:
    """None where one of them is not known."""
    return None if any(time_ms is None for time_ms in times_ms) else sum(time_ms or 0.0 for time_ms in times_ms)


def _times(factor: float, time_ms: float | None) -> float | None:
    return None if time_ms is None else factor * time_ms


def _per_second(tokens: int, time_ms: float | None) -> float | None:
    return None if not time_ms else round(1e3 * tokens / time_ms, 3)


def _rounded(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else round(factor * value, 3)

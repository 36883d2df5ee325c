"""What tokens should cost, from bytes, rows and reads. An expectation to compare a measurement with.

    step = fixed matrices, keys and values + neurons + reading and meetings + flash time that nothing hides

`cost.py` says what each takes on a device, `firing.py` what a cache misses. What one to four texts want together is in
an activity profile; without one, and for the tokens of a prompt, they are taken to choose their neurons independently.
"""

from __future__ import annotations

import dataclasses
import math

from neuronpipe.plans.device.device import FlashCurve, MemorySpeed
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.package.activity import BATCHES
from neuronpipe.plans.package.layout import quant_bytes, scale_bytes
from neuronpipe.plans.package.manifest import PREDICTOR, Manifest
from neuronpipe.plans.plan.cost import Cost
from neuronpipe.plans.plan.firing import Rates, miss_rate, ranking, touched
from neuronpipe.plans.plan.plan import Compute, Expected, Flash, Memory
from neuronpipe.plans.plan.ranking import holding

DENSE_TOKENS = 16  # steps of so many tokens compute every neuron of a block that one of them wants (native/engine)


def expected(
    manifest: Manifest,
    rates: Rates,
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
    workers = compute.decode_workers()
    cost = Cost(manifest, compute.mode, len(workers), shares_core(compute), curve, speed, profile)
    run = _Run(manifest, rates, compute, memory, flash, cost)
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
        tokens_per_s=_per_second(batch, step.ms),
        miss_rate=round(step.miss_rate, 4),
        first_token_ms=_rounded(prompt_ms),
        prefill_tokens_per_s=_per_second(prompt, prompt_ms),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    overhead_ms: float = 0.0  # processor time of reads, barriers, messages
    flash_ms: float | None
    hidden_ms: float | None  # of flash time, what work goes on meanwhile
    in_bursts: bool  # reads are known layer by layer, and each layer has others

    @property
    def exposed_ms(self) -> float | None:
        """Of the flash time, what nothing hides. Reads that come in bursts are now many, now few: with a time spread as
        widely as its mean (exponentially), what exceeds the time to hide it is the mean times exp(-hidden / mean)."""
        if self.flash_ms is None or self.hidden_ms is None:
            return None
        if not self.in_bursts or not self.flash_ms:
            return max(0.0, self.flash_ms - self.hidden_ms)
        return self.flash_ms * math.exp(-self.hidden_ms / self.flash_ms)

    @property
    def ms(self) -> float | None:
        """The whole step."""
        if self.sequential_ms is None or self.pieces_ms is None or self.exposed_ms is None:
            return None
        return self.sequential_ms + self.pieces_ms + self.overhead_ms + self.exposed_ms


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Cluster parts of one kind in a step: those wanted, and of them those to be read from flash."""

    wanted: float
    missed: int


@dataclasses.dataclass(frozen=True)
class _Run:
    manifest: Manifest
    rates: Rates
    compute: Compute
    memory: Memory
    flash: Flash
    cost: Cost

    # ---- steps -----------------------------------------------------------------------------------------------
    def decode_step(self, batch: int, position_tokens: int) -> _Step:
        """Of so many texts, each with so many tokens before. A neuron's row is counted once for each text that reads
        it, up to all rows: so do the participants' counters."""
        rates, layout, flash = self.rates, self.manifest.layout, self.flash
        in_order = rates.trigger_read == 1.0  # all triggers, one after the other
        triggers, values = self._triggers(batch), self._values(batch, rates.value_read)
        trigger_bytes, value_bytes = self._rows(batch, rates.trigger_read), self._value_rows(batch)
        fixed_bytes, kv_bytes = self._fixed_bytes(batch), batch * self._kv_bytes(position_tokens)
        # The size of a piece is that of one text: others read the same ones, or others of the same size.
        one_bytes = self._value_rows(1) + (0.0 if in_order else self._rows(1, rates.trigger_read))
        one_pieces = self._values(1, rates.value_read).wanted + (0.0 if in_order else self._triggers(1).wanted)
        if flash.bundle:
            reads, read_bytes = self._reads(triggers.missed, layout.cluster_stride_bytes)
            if in_order:
                reads = -(-read_bytes // flash.most_read_bytes)
        else:
            trigger_reads, trigger_read_bytes = self._reads(triggers.missed, layout.trigger_part_bytes)
            value_reads, value_read_bytes = self._reads(values.missed, layout.value_part_bytes)
            reads, read_bytes = trigger_reads + value_reads, trigger_read_bytes + value_read_bytes
        looked_up = [triggers] if reads_whole(self.compute, flash) else [triggers, values]
        missed, wanted = sum(part.missed for part in looked_up), sum(part.wanted for part in looked_up)
        factor = self.cost.step_factor()
        piece_bytes = max(1, int(one_bytes / one_pieces)) if one_pieces else self._row_bytes
        fixed_ms = _times(factor, self.cost.fixed_ms(fixed_bytes))
        kv_ms = _times(factor, self.cost.read_from_end_to_end_ms(kv_bytes))
        if in_order:
            triggers_ms = _times(factor, self.cost.triggers_ms(trigger_bytes))
            pieces_ms = _times(factor, self.cost.values_ms(value_bytes, rates.value_read, piece_bytes))
        else:
            triggers_ms = 0.0
            neurons_ms = self.cost.predicted_ms(trigger_bytes, value_bytes, rates.trigger_read, piece_bytes)
            pieces_ms = _times(factor, neurons_ms)
        ffns = self.manifest.model.layers
        ahead = in_order and self.manifest.model.experts == 1  # the same for every token, and asked for in time
        sequential_ms = _sum(fixed_ms, kv_ms, triggers_ms)
        return _Step(
            sequential_bytes=int(fixed_bytes + kv_bytes + (trigger_bytes if in_order else 0)),
            pieces_bytes=int(value_bytes + (0 if in_order else trigger_bytes)),
            piece_bytes=piece_bytes,
            reads=reads,
            read_bytes=read_bytes,
            miss_rate=missed / max(1.0, wanted),
            sequential_ms=sequential_ms,
            pieces_ms=pieces_ms,
            overhead_ms=self.cost.reading_ms(reads, read_bytes) + self.cost.meetings_ms(),
            flash_ms=self.cost.flash_ms(reads, read_bytes, reads if ahead else reads / ffns, flash.depth),
            hidden_ms=self._hidden_ms(_sum(fixed_ms, kv_ms), _sum(triggers_ms, pieces_ms), ahead),
            in_bursts=not ahead,
        )

    def _hidden_ms(self, attention_ms: float | None, neurons_ms: float | None, ahead: bool) -> float | None:
        """What goes on while a layer's reads do. Without prefetch, or where attention decides which neurons are wanted,
        only neurons are computed meanwhile."""
        if attention_ms is None or neurons_ms is None:
            return None
        if not self.compute.pipeline:
            return 0.0
        return neurons_ms + attention_ms * (self.compute.prefetch and (ahead or self._known_before_attention()))

    def _known_before_attention(self) -> bool:
        if self.compute.mode == "predicted" and self.manifest.predictor is not None:
            return self.manifest.predictor.reads == "attention"
        return self.manifest.model.router_reads == "layer"

    def prompt_ms(self, tokens: int) -> float | None:
        """A prompt, a chunk at a time: every weight that one of a chunk's tokens wants is read once."""
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
        cluster_bytes = layout.cluster_neurons * self._row_bytes
        matrices = 2 if model.gated else 1  # of the value part
        neuron_bytes = int((triggers.wanted + values.wanted * matrices) * cluster_bytes)
        read_bytes = triggers.missed * layout.trigger_part_bytes + values.missed * layout.value_part_bytes
        reads = -(-read_bytes // self.flash.most_read_bytes)
        moved_ms = self.cost.read_from_end_to_end_ms(
            self._fixed_bytes(tokens) + self._kv_bytes(before + tokens) + neuron_bytes
        )
        computed_ms = self._prefill_compute_ms(tokens)
        work_ms = moved_ms if computed_ms is None or moved_ms is None else max(moved_ms, computed_ms)
        return _Step(
            sequential_ms=work_ms,
            pieces_ms=0.0,
            overhead_ms=self.cost.reading_ms(reads, read_bytes),
            flash_ms=self.cost.flash_ms(reads, read_bytes, reads, self.flash.depth),
            hidden_ms=work_ms,
            in_bursts=False,
        )

    def _prefill_compute_ms(self, tokens: int) -> float | None:
        """Of the kernels; None where they were not measured."""
        model, rates = self.manifest.model, self.rates
        attention = model.layers * model.width * 2 * (model.query_width + model.key_width)
        each = max(1, round(tokens * rates.chosen))  # tokens of an expert
        gates = _union(rates.chosen, tokens) * model.ffns * model.neurons * model.width
        values = tokens * rates.chosen * rates.value_read * model.ffns * model.neurons * model.width
        return _sum(
            self.cost.panel_ms(tokens, attention),
            self.cost.panel_ms(each, gates),
            self.cost.reused_values_ms(values * (2 if model.gated else 1), rates.value_read),
        )

    # ---- bytes -----------------------------------------------------------------------------------------------
    @property
    def _row_bytes(self) -> int:
        quantization, width = self.manifest.quantization, self.manifest.model.width
        return quant_bytes(quantization, width) + scale_bytes(quantization, width)

    def _fixed_bytes(self, tokens: int) -> int:
        """What a step reads of the fixed tensors. Of a mixture's predictors, those of chosen experts."""
        manifest, total = self.manifest, self.memory.fixed_bytes
        if not manifest.model.tied_embeddings:
            total -= manifest.model.vocabulary * self._row_bytes  # of the embedding one row is read
        if self.compute.mode == "predicted" and PREDICTOR in manifest.files:
            total -= int(manifest.files[PREDICTOR].bytes * (1 - _union(self.rates.chosen, tokens)))
        return total

    def _kv_bytes(self, tokens: int) -> int:
        """Keys and values of so many tokens, of all layers: each has its attention window."""
        model = self.manifest.model
        return model.key_heads * 2 * model.head_width * 2 * sum(min(tokens, w or tokens) for w in model.windows_tokens)

    def _rows(self, tokens: int, share: float) -> float:
        """Bytes of one matrix's rows that so many tokens read, each this share of its chosen experts' neurons."""
        model = self.manifest.model
        read = _union(self.rates.chosen, tokens) if share == 1.0 else min(1.0, tokens * self.rates.chosen * share)
        return read * model.ffns * model.neurons * self._row_bytes

    def _value_rows(self, tokens: int) -> float:
        up = self._rows(tokens, self.rates.value_read) if self.manifest.model.gated else 0.0
        return up + self._rows(tokens, self.rates.down_read)

    # ---- reads -----------------------------------------------------------------------------------------------
    def _reads(self, missed: int, part_bytes: int) -> tuple[int, int]:
        clusters = self.rates.chosen * self.manifest.clusters
        return joined_reads(missed, clusters, part_bytes, self.manifest.layout.cluster_stride_bytes, self.flash)

    # ---- parts -----------------------------------------------------------------------------------------------
    def _triggers(self, tokens: int) -> _Parts:
        slots, pinned = holding(self.memory.trigger_slots, self.flash.reserved_triggers), sum(self._pins(tokens)[0])
        return self._parts(self.rates.trigger_read, slots, pinned, tokens, self.compute.mode != "predicted")

    def _values(self, tokens: int, share: float) -> _Parts:
        slots, pinned = holding(self.memory.value_slots, self.flash.reserved_values), sum(self._pins(tokens)[1])
        return self._parts(share, slots, pinned, tokens, share == 1.0)

    def _pins(self, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of each feed-forward, what stays of either part in a step of so many tokens; of a prompt's, what stays for
        one text."""
        texts = tokens if tokens <= self.compute.sequences else 1
        return self.memory.pins_for(texts).counts(self.manifest.model.ffns)

    def _parts(self, share: float, slots: int, pinned: int, tokens: int, all_wanted: bool) -> _Parts:
        """Of a token that wants this share of the neurons of chosen experts. slots: those that hold something, not kept
        free. all_wanted: all of theirs."""
        clusters, mixture = self.manifest.clusters, self.manifest.model.experts > 1
        resident = slots / clusters
        wanted = touched(share, self.manifest.layout.cluster_neurons) * self.rates.chosen * clusters
        together = clusters * _union(min(1.0, wanted / clusters), tokens)
        if resident >= 1.0:
            return _Parts(together, 0)
        if all_wanted and not mixture:
            return _Parts(together, int(together * (1 - resident)))
        if tokens <= max(BATCHES):
            ranked = ranking(self.manifest, self.compute.mode, self.rates.heat, tokens, whole_experts=all_wanted)
            if ranked is not None:  # texts want more of the same than independent ones, and neighbours fire together
                return _Parts(ranked.wanted, int(ranked.wanted * ranked.miss_rate(slots, pinned)))
        if together >= slots:  # what a step brings is gone before the next one, but for what is pinned
            neurons = self.manifest.layout.cluster_neurons
            stays = self.rates.clusters_within(pinned / clusters, share, neurons)
            return _Parts(together, int(together * (1 - stays)))
        missed = wanted * miss_rate(self.manifest, self.compute.mode, resident, whole_experts=all_wanted)
        if tokens > 1:  # wanted by one of them; those with a slot and those without are each taken to be alike
            hit = slots * _union(min(1.0, (wanted - missed) / max(1, slots)), tokens)
            missed = (clusters - slots) * _union(min(1.0, missed / max(1, clusters - slots)), tokens)
            wanted = hit + missed
        return _Parts(wanted, int(missed))


def joined_reads(missed: int, of: float, part_bytes: int, stride_bytes: int, flash: Flash) -> tuple[int, int]:
    """Reads of so many parts that miss, and their bytes, gaps included: neighbours no further apart than the merge gap
    are read together. They are taken to lie anywhere among `of` clusters, independently of each other."""
    density = min(1.0, missed / max(1.0, of))
    reach = (flash.merge_gap_bytes + part_bytes) // stride_bytes  # clusters to a neighbour that is read with it
    gap_bytes = sum(
        density * (1 - density) ** (apart - 1) * (apart * stride_bytes - part_bytes) for apart in range(1, reach + 1)
    )
    read_bytes = int(missed * (part_bytes + gap_bytes))
    return max(math.ceil(missed * (1 - density) ** reach), -(-read_bytes // flash.most_read_bytes)), read_bytes


def shares_core(compute: Compute) -> bool:
    """Whether the loader has no core that no worker has."""
    loader_core = next(process.core for process in compute.processes if process.role == "loader")
    return loader_core is None or loader_core in {worker.core for worker in compute.decode_workers()}


def reads_whole(compute: Compute, flash: Flash) -> bool:
    """Whether a value part comes with its trigger part, so that only triggers are looked up ahead of computing."""
    return compute.mode == "predicted" or flash.bundle


def _union(share: float, tokens: int) -> float:
    """What so many tokens want in all, each this share, independently."""
    return 1 - (1 - share) ** tokens


def _sum(*times_ms: float | None) -> float | None:
    """None where one of them is not known."""
    return None if any(time_ms is None for time_ms in times_ms) else sum(time_ms or 0.0 for time_ms in times_ms)


def _times(factor: float, time_ms: float | None) -> float | None:
    return None if time_ms is None else factor * time_ms


def _per_second(tokens: int, time_ms: float | None) -> float | None:
    return None if not time_ms else round(1e3 * tokens / time_ms, 3)


def _rounded(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else round(factor * value, 3)

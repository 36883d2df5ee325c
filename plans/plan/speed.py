"""What tokens should cost: bytes over measured speeds. An expectation to compare a measurement with.

    step = sequential bytes / sequential speed + neuron bytes / speed of pieces + flash time that nothing hides

Computing is taken to keep up with memory. Misses are those of a cache that always holds the hottest neurons and nothing
else: a policy that follows the text misses less. The texts of a batch and the tokens of a prompt are taken to choose
their neurons independently of each other.
"""

from __future__ import annotations

import dataclasses

from neuronpipe.plans.device.device import FlashCurve, MemorySpeed
from neuronpipe.plans.package.layout import quant_bytes, scale_bytes
from neuronpipe.plans.package.manifest import PREDICTOR, Manifest
from neuronpipe.plans.plan.firing import Rates, touched
from neuronpipe.plans.plan.plan import Compute, Expected, Flash, Memory

DENSE_TOKENS = 16  # steps of so many tokens compute every neuron of a block that one of them wants (native/engine)


def expected(
    manifest: Manifest,
    rates: Rates,
    compute: Compute,
    memory: Memory,
    flash: Flash,
    curve: FlashCurve | None,
    speed: MemorySpeed | None,
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
    run = _Run(manifest, rates, compute, memory, flash, curve, speed)
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
        flash_ms_per_token=_rounded(step.flash_ms, 1 / batch),
        exposed_flash_ms_per_token=_rounded(step.exposed_ms, 1 / batch),
        tokens_per_s=_per_second(batch, step.ms),
        miss_rate=round(step.miss_rate, 4),
        first_token_ms=_rounded(prompt_ms),
        prefill_tokens_per_s=_per_second(prompt, prompt_ms),
    )


@dataclasses.dataclass(frozen=True)
class _Step:
    """What one step moves, and its times; None where the device was not measured."""

    sequential_bytes: int
    pieces_bytes: int
    piece_bytes: int
    reads: int
    read_bytes: int
    miss_rate: float
    sequential_ms: float | None
    pieces_ms: float | None
    flash_ms: float | None
    hides_behind: tuple[bool, bool]  # whether reads do: behind what is read from end to end, behind pieces

    @property
    def exposed_ms(self) -> float | None:
        """Of the flash time, what nothing hides."""
        if self.sequential_ms is None or self.pieces_ms is None or self.flash_ms is None:
            return None
        behind_sequential, behind_pieces = self.hides_behind
        return max(0.0, self.flash_ms - self.sequential_ms * behind_sequential - self.pieces_ms * behind_pieces)

    @property
    def ms(self) -> float | None:
        """The whole step."""
        if self.sequential_ms is None or self.pieces_ms is None or self.exposed_ms is None:
            return None
        return self.sequential_ms + self.pieces_ms + self.exposed_ms


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
    curve: FlashCurve | None
    speed: MemorySpeed | None

    # ---- steps -----------------------------------------------------------------------------------------------
    def decode_step(self, batch: int, position_tokens: int) -> _Step:
        """Of so many texts, each with so many tokens before. A neuron's row is counted once for each text that reads
        it, up to all rows: so do the participants' counters."""
        rates, layout, flash = self.rates, self.manifest.layout, self.flash
        in_order = rates.trigger_read == 1.0  # all triggers, one after the other
        triggers, values = self._triggers(batch), self._values(batch, rates.value_read)
        rows = self._rows(batch, rates.trigger_read), self._value_rows(batch)
        sequential = self._fixed_bytes(batch) + batch * self._kv_bytes(position_tokens)
        sequential += int(rows[0]) if in_order else 0
        pieces = int(rows[1]) if in_order else int(rows[0] + rows[1])
        # The size of a piece is that of one text: others read the same ones, or others of the same size.
        one_bytes = self._value_rows(1) + (0.0 if in_order else self._rows(1, rates.trigger_read))
        one_pieces = self._values(1, rates.value_read).wanted + (0.0 if in_order else self._triggers(1).wanted)
        if flash.bundle:
            reads, read_bytes = triggers.missed, triggers.missed * layout.cluster_stride_bytes
            if in_order:
                reads = -(-read_bytes // flash.most_read_bytes)
        else:
            reads = triggers.missed + values.missed
            read_bytes = triggers.missed * layout.trigger_part_bytes + values.missed * layout.value_part_bytes
        looked_up = [triggers] if reads_whole(self.compute, flash) else [triggers, values]
        missed, wanted = sum(part.missed for part in looked_up), sum(part.wanted for part in looked_up)
        piece_bytes = max(1, int(one_bytes / one_pieces)) if one_pieces else self._row_bytes
        return self._step(sequential, pieces, piece_bytes, reads, read_bytes, missed / max(1.0, wanted))

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
        rates, layout = self.rates, self.manifest.layout
        in_order = rates.trigger_read == 1.0
        value_rate = rates.trigger_read if tokens >= DENSE_TOKENS else rates.value_read
        triggers, values = self._triggers(tokens), self._values(tokens, value_rate)
        cluster_bytes = layout.cluster_neurons * self._row_bytes
        matrices = 2 if self.manifest.model.gated else 1  # of the value part
        neuron_bytes = int((triggers.wanted + values.wanted * matrices) * cluster_bytes)
        read_bytes = triggers.missed * layout.trigger_part_bytes + values.missed * layout.value_part_bytes
        reads = -(-read_bytes // self.flash.most_read_bytes) if in_order else max(triggers.missed, values.missed)
        sequential = self._fixed_bytes(tokens) + self._kv_bytes(before + tokens) + neuron_bytes
        missed = triggers.missed / max(1.0, triggers.wanted)
        return self._step(sequential, 0, self._row_bytes, reads, read_bytes, missed)

    def _step(
        self, sequential_bytes: int, pieces_bytes: int, piece_bytes: int, reads: int, read_bytes: int, miss_rate: float
    ) -> _Step:
        speed, curve = self.speed, self.curve
        sequential_ms, pieces_ms, flash_ms = None, None, None
        if speed is not None:
            share = _share_of_speed(speed, len(self.compute.decode_workers()))
            sequential_ms = 1e3 * sequential_bytes / (share * speed.sequential_bytes_per_s)
            pieces_ms = 1e3 * pieces_bytes / (share * speed.piece_bytes_per_s(piece_bytes))
        if reads == 0:
            flash_ms = 0.0
        elif curve is not None:
            flash_ms = 1e3 * read_bytes / curve.bytes_per_s(read_bytes // reads, self.flash.depth)
        # Without prefetch a layer's reads hide behind its own resident neurons only; with it, behind everything.
        behind = self.compute.pipeline and self.compute.prefetch, self.compute.pipeline
        return _Step(
            sequential_bytes,
            pieces_bytes,
            piece_bytes,
            reads,
            read_bytes,
            miss_rate,
            sequential_ms,
            pieces_ms,
            flash_ms,
            behind,
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

    # ---- parts -----------------------------------------------------------------------------------------------
    def _triggers(self, tokens: int) -> _Parts:
        return self._parts(self.rates.trigger_read, self.memory.trigger_slots, tokens, self.compute.mode != "predicted")

    def _values(self, tokens: int, share: float) -> _Parts:
        return self._parts(share, self.memory.value_slots, tokens, share == 1.0)

    def _parts(self, share: float, slots: int, tokens: int, all_wanted: bool) -> _Parts:
        """Of a token that wants this share of the neurons of chosen experts. all_wanted: hot ones or not."""
        clusters = self.manifest.clusters
        resident = slots / clusters
        wanted = touched(share, self.manifest.layout.cluster_neurons) * self.rates.chosen * clusters
        missed = wanted * (1 - (resident if all_wanted else self.rates.activations_within(resident)))
        if tokens > 1:  # wanted by one of them; those with a slot and those without are each taken to be alike
            hit = slots * _union(min(1.0, (wanted - missed) / max(1, slots)), tokens)
            missed = (clusters - slots) * _union(min(1.0, missed / max(1, clusters - slots)), tokens)
            wanted = hit + missed
        return _Parts(wanted, int(missed))


def reads_whole(compute: Compute, flash: Flash) -> bool:
    """Whether a value part comes with its trigger part, so that only triggers are looked up ahead of computing."""
    return compute.mode == "predicted" or flash.bundle


def _union(share: float, tokens: int) -> float:
    """What so many tokens want in all, each this share, independently."""
    return 1 - (1 - share) ** tokens


def _share_of_speed(speed: MemorySpeed, workers: int) -> float:
    """What so many workers reach of the speed that was measured with `speed.threads`."""
    if workers >= speed.threads:
        return 1.0
    return min(1.0, workers * speed.one_thread_bytes_per_s / speed.sequential_bytes_per_s)


def _per_second(tokens: int, time_ms: float | None) -> float | None:
    return None if not time_ms else round(1e3 * tokens / time_ms, 3)


def _rounded(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else round(factor * value, 3)

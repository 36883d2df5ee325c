"""What one decoded token should cost: bytes over measured speeds. An expectation to compare a measurement with.

    token = sequential bytes / sequential speed + neuron bytes / speed of pieces + flash time that nothing hides

Computing is taken to keep up with memory. Misses are those of a cache that always holds the hottest neurons and nothing
else: a policy that follows the text misses less.
"""

from __future__ import annotations

from neuronpipe.plans.device.device import FlashCurve, MemorySpeed
from neuronpipe.plans.package.layout import quant_bytes, scale_bytes
from neuronpipe.plans.package.manifest import PREDICTOR, Manifest
from neuronpipe.plans.plan.firing import Rates, touched
from neuronpipe.plans.plan.plan import Compute, Expected, Flash, Memory


def expected(
    manifest: Manifest,
    rates: Rates,
    compute: Compute,
    memory: Memory,
    flash: Flash,
    curve: FlashCurve | None,
    speed: MemorySpeed | None,
) -> Expected:
    """One token at half of the context."""
    model, layout = manifest.model, manifest.layout
    row_bytes = quant_bytes(manifest.quantization, model.width) + scale_bytes(manifest.quantization, model.width)
    computed = rates.chosen * model.ffns
    neurons, clusters = computed * model.neurons, computed * layout.clusters
    sequential = memory.fixed_bytes
    if not manifest.model.tied_embeddings:
        sequential -= model.vocabulary * row_bytes  # of the embedding one row is read
    if compute.mode == "predicted" and PREDICTOR in manifest.files:  # of a mixture, those of chosen experts
        sequential -= int(manifest.files[PREDICTOR].bytes * (1 - rates.chosen))
    half = compute.context_tokens // 2
    seen_tokens = sum(min(half, window or half) for window in model.windows_tokens)  # attention windows of all layers
    sequential += seen_tokens * model.key_heads * 2 * model.head_width * 2
    value_rows = rates.down_read + (rates.value_read if model.gated else 0)
    trigger_bytes, value_bytes = rates.trigger_read * neurons * row_bytes, value_rows * neurons * row_bytes
    triggers_wanted = touched(rates.trigger_read, layout.cluster_neurons) * clusters
    values_wanted = touched(rates.value_read, layout.cluster_neurons) * clusters
    if rates.trigger_read == 1.0:  # all of them, one after the other
        sequential, in_pieces, pieces = sequential + int(trigger_bytes), int(value_bytes), values_wanted
    else:
        in_pieces, pieces = int(trigger_bytes + value_bytes), triggers_wanted + values_wanted
    piece_bytes = max(1, int(in_pieces / pieces)) if pieces else row_bytes

    all_wanted = compute.mode != "predicted"
    trigger_misses = int(triggers_wanted * _missed(rates, memory.trigger_slots, manifest.clusters, all_wanted))
    value_misses = int(values_wanted * _missed(rates, memory.value_slots, manifest.clusters, False))
    if flash.bundle:
        reads, read_bytes = trigger_misses, trigger_misses * layout.cluster_stride_bytes
        if rates.trigger_read == 1.0:  # one after the other
            reads = -(-read_bytes // flash.most_read_bytes)
        value_misses = min(value_misses, trigger_misses)
    else:
        reads = trigger_misses + value_misses
        read_bytes = trigger_misses * layout.trigger_part_bytes + value_misses * layout.value_part_bytes

    sequential_ms = 1e3 * sequential / speed.sequential_bytes_per_s if speed else None
    neuron_ms = 1e3 * in_pieces / speed.piece_bytes_per_s(piece_bytes) if speed else None
    flash_ms = None
    if reads == 0:
        flash_ms = 0.0
    elif curve is not None:
        flash_ms = 1e3 * read_bytes / curve.bytes_per_s(read_bytes // reads, flash.depth)
    exposed_ms, tokens_per_s = None, None
    if sequential_ms is not None and neuron_ms is not None and flash_ms is not None:
        # Without prefetch a layer's reads hide behind its own resident neurons only; with it, behind everything.
        hidden_ms = (sequential_ms * compute.prefetch + neuron_ms) * compute.pipeline
        exposed_ms = max(0.0, flash_ms - hidden_ms)
        tokens_per_s = 1e3 / (sequential_ms + neuron_ms + exposed_ms)
    return Expected(
        sequential_bytes_per_token=sequential,
        neuron_bytes_per_token=in_pieces,
        piece_bytes=piece_bytes,
        dram_bytes_per_token=sequential + in_pieces,
        flash_reads_per_token=reads,
        flash_bytes_per_token=read_bytes,
        sequential_ms_per_token=_rounded(sequential_ms),
        neuron_ms_per_token=_rounded(neuron_ms),
        flash_ms_per_token=_rounded(flash_ms),
        exposed_flash_ms_per_token=_rounded(exposed_ms),
        tokens_per_s=_rounded(tokens_per_s),
        miss_rate=round((trigger_misses + value_misses) / max(1.0, triggers_wanted + values_wanted), 4),
    )


def _missed(rates: Rates, slots: int, clusters: int, all_wanted: bool) -> float:
    """Of the parts that a token wants, the share without a slot. all_wanted: every one, hot or not, as gates are where
    no predictor chooses among them."""
    resident = slots / clusters
    return 1 - (resident if all_wanted else rates.activations_within(resident))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)

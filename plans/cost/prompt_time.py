"""Computing time of a prompt: products of weights and tokens, and work that depends on tokens alone.

| term | meaning |
|---|---|
| panels | attention's matrices times the tokens of a chunk; gates, or whole experts, times the tokens that chose them |
| values | otherwise Up and Down rows of the active neurons, for each token by itself, from the processor's cache |
| attention | each token's heads times the keys and values before it, from the processor's cache |
| gates | for each token's product with each gate: deciding whether it is active, listing active gates, the function |
| block sums | a token's output of each block: zeroed, added to, read again |

Where all neurons fire, Ups are panels too, and Downs are added for several tokens at once.

In a 1B (width 2048) the last three take two fifths of the time, and more in narrower models.
"""

from __future__ import annotations

from neuronpipe.plans.cost.activation_rates import ActivationRates
from neuronpipe.plans.cost.expected_misses import accessed_by_any
from neuronpipe.plans.cost.work_cost import WorkCost
from neuronpipe.plans.package.manifest import Manifest

# Passes over a block's sums in memory: they are zeroed, added to (mostly in the cache), and read.
SUM_PASSES = 3
PANEL_TOKENS = 16  # NP_PANEL_TOKENS of native/engine/engine.h


def products_ms(manifest: Manifest, rates: ActivationRates, cost: WorkCost, tokens: int) -> float:
    """Return the time of all workers together for the panels and values of a chunk (see the table above).

    Reading the weights from memory and flash overlaps with it and is not included.
    """
    model = manifest.model
    mixers = model.attention_weights + model.recurrent_weights
    pairs, expert_weights = _pairs(manifest, rates, tokens), model.neurons * model.width
    expert_tokens = max(
        1, round(pairs / (accessed_by_any(manifest, rates, 1.0, tokens) * model.ffns))
    )  # of an expert that is chosen
    gates = pairs / expert_tokens * expert_weights
    rows_ms = cost.panel_ms(tokens, mixers, "mixers") + cost.panel_ms(expert_tokens, gates, "gates")
    if manifest.layout.down_by_output:
        return rows_ms + cost.panel_ms(expert_tokens, 2 * gates, "values")
    values = pairs * rates.value_read * expert_weights
    if model.gated and rates.value_read == 1.0 and expert_tokens >= PANEL_TOKENS:
        return rows_ms + cost.panel_ms(expert_tokens, gates, "ups") + cost.reused_downs_ms(values)
    return rows_ms + cost.reused_values_ms(values * (2 if model.gated else 1), rates.value_read)


def between_products_ms(manifest: Manifest, rates: ActivationRates, cost: WorkCost, tokens: int, before: int) -> float:
    """Return the time of all workers together for attention, gates and block sums of a chunk.

    Block sums count as 0 if memory was not measured.

    before: tokens of the prompt before the chunk
    """
    model, pairs = manifest.model, _pairs(manifest, rates, tokens)
    sums_bytes = pairs * SUM_PASSES * 4 * manifest.layout.blocks * model.width
    return (
        cost.attention_ms(2 * model.query_heads * _attended_elements(manifest, tokens, before))
        + cost.gates_ms(pairs * model.neurons)
        + (cost.sequential_read_ms(sums_bytes) or 0.0)
    )


def _pairs(manifest: Manifest, rates: ActivationRates, tokens: int) -> float:
    """Return the number of pairs of a token and an expert that it chose, in all layers."""
    return tokens * rates.chosen * manifest.model.ffns


def _attended_elements(manifest: Manifest, tokens: int, before: int) -> int:
    """Return the sum, over the tokens of a chunk and all layers, of the elements of the keys of one head, or of the
    latents, that a token attends to."""
    total, model = 0, manifest.model
    for (vectors, window_tokens), layers in model.cached_vectors_in_windows.items():
        window = window_tokens or before + tokens
        in_growing_window = max(0, min(tokens, window - before))  # tokens that attend to all positions up to their own
        positions = (
            in_growing_window * before
            + in_growing_window * (in_growing_window + 1) // 2
            + (tokens - in_growing_window) * window
        )
        total += layers * vectors.width * positions if vectors.vectors else 0
    return total

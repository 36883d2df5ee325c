"""Computing time of a prompt: products of weights with many tokens, and the terms that grow with tokens alone.

| term | meaning |
|---|---|
| panels | attention's matrices, and all gates of the experts that a chunk uses, times its tokens |
| values | Up and Down rows of the active neurons, for each token by itself, from the processor's cache |
| attention | each token's heads times the keys and values before it, from the processor's cache |
| gates | each token's product with each gate: whether it is active, and the lists of active gates |
| block sums | a token's output of each block: zeroed, added to, read again |

In a 1B (width 2048) the last three are two fifths of the time, and more in narrower models.
"""

from __future__ import annotations

from neuronpipe.plans.cost.activation_rates import ActivationRates
from neuronpipe.plans.cost.expected_misses import union
from neuronpipe.plans.cost.work_cost import WorkCost
from neuronpipe.plans.package.manifest import Manifest

SUM_PASSES = 3  # over a block's sums: written as zeros, read and written by Down's rows (mostly in the cache), read


def products_ms(manifest: Manifest, rates: ActivationRates, cost: WorkCost, tokens: int) -> float:
    """Return how long the workers multiply weights for a chunk. Weights are read at the same time."""
    model = manifest.model
    attention = model.layers * model.width * 2 * (model.query_width + model.key_width)
    each = max(1, round(tokens * rates.chosen))  # tokens of an expert
    gates = union(rates.chosen, tokens) * model.ffns * model.neurons * model.width
    values = _pairs(manifest, rates, tokens) * rates.value_read * model.neurons * model.width
    return (
        cost.panel_ms(tokens, attention)
        + cost.panel_ms(each, gates, gates=True)
        + cost.reused_values_ms(values * (2 if model.gated else 1), rates.value_read)
    )


def between_products_ms(manifest: Manifest, rates: ActivationRates, cost: WorkCost, tokens: int, before: int) -> float:
    """Return the time of the workers for attention, gates and sums of a chunk.

    before: tokens before the chunk
    """
    model, pairs = manifest.model, _pairs(manifest, rates, tokens)
    sums_bytes = pairs * SUM_PASSES * 4 * manifest.layout.blocks * model.width
    return (
        cost.attention_ms(2 * model.query_width * _attended(manifest, tokens, before))
        + cost.gates_ms(pairs * model.neurons)
        + (cost.sequential_read_ms(sums_bytes) or 0.0)
    )


def _pairs(manifest: Manifest, rates: ActivationRates, tokens: int) -> float:
    """Return the number of (token, expert that computes it), in all layers."""
    return tokens * rates.chosen * manifest.model.ffns


def _attended(manifest: Manifest, tokens: int, before: int) -> int:
    """Return how many positions the tokens of a chunk attend to, in all layers together."""
    total = 0
    for kind in manifest.model.layer_kinds:
        window = kind.window_tokens or before + tokens
        in_growing_window = max(0, min(tokens, window - before))  # tokens that attend to all before them
        positions = (
            in_growing_window * before
            + in_growing_window * (in_growing_window + 1) // 2
            + (tokens - in_growing_window) * window
        )
        total += kind.layers * positions
    return total

"""What computing a prompt takes of the workers: weights times many tokens, and what grows with tokens by itself.

| term | what it is |
|---|---|
| panels | attention's matrices, and all gates of the experts that a chunk wants, times its tokens |
| values | Up and Down rows of the neurons that fired, for each token by itself, from the processor's cache |
| attention | each token's heads times the keys and values before it, from the processor's cache |
| gates | each token's product with each gate: whether it fires, and the lists of those that do |
| block sums | a token's output of each block: zeroed, added to, read again |

In a 1B (width 2048) the last three are two fifths of the time; the narrower the model, the more.
"""

from __future__ import annotations

from neuronpipe.plans.cost.activation_rates import ActivationRates
from neuronpipe.plans.cost.expected_misses import union
from neuronpipe.plans.cost.work_cost import WorkCost
from neuronpipe.plans.package.manifest import Manifest

SUM_PASSES = 3  # over a block's sums: written as zeros, read and written by Down's rows (often in the cache), read


def products_ms(manifest: Manifest, rates: ActivationRates, cost: WorkCost, tokens: int) -> float:
    """Return how long the workers multiply weights for a chunk of so many tokens. Reading the weights goes on
    meanwhile."""
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
    """Return what the workers take besides, for the chunk with so many tokens before it: attention, gates, sums."""
    model, pairs = manifest.model, _pairs(manifest, rates, tokens)
    sums_bytes = pairs * SUM_PASSES * 4 * manifest.layout.blocks * model.width
    return (
        cost.attention_ms(2 * model.query_width * _attended(manifest, tokens, before))
        + cost.gates_ms(pairs * model.neurons)
        + (cost.sequential_read_ms(sums_bytes) or 0.0)
    )


def _pairs(manifest: Manifest, rates: ActivationRates, tokens: int) -> float:
    """Of a token and an expert that computes it, in all layers."""
    return tokens * rates.chosen * manifest.model.ffns


def _attended(manifest: Manifest, tokens: int, before: int) -> int:
    """How many positions the tokens of a chunk look at, in all layers together: each has its attention window."""
    total = 0
    for kind in manifest.model.layer_kinds:
        most = kind.window_tokens or before + tokens
        growing = max(0, min(tokens, most - before))  # tokens that see all before them
        seen = growing * before + growing * (growing + 1) // 2 + (tokens - growing) * most
        total += kind.layers * seen
    return total

"""Requested and measured activation statistics of a synthetic package.

The reference engine computes the first tokens of a preset. In every layer it measures which neurons are active, how
many stay active, the predictor's recall and precision, and how well the layer's gates predict firing neurons from the
inputs of earlier layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from neuronpipe.plans.lab.synth.activation_rates import active_shares, overlap, requested_by_layer
from neuronpipe.plans.lab.synth.measured_mixture import measure_mixture, render_mixture
from neuronpipe.plans.lab.synth.trajectory import PRESETS
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.predictions import StoredPredictor, judge
from neuronpipe.plans.reference.engine import LayerRun, ReferenceEngine
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

WARM_UP_TOKENS = 16  # first tokens, which do not count, since they have little context
ALWAYS_ON = 0.9
DISTANCES = (1, 10)
EARLIER_LAYERS = 4
Shares = NDArray[np.float64]
Progress = Callable[[int, int], None]


def measure(package: Package, preset: str, tokens: int, progress: Progress | None = None) -> dict[str, Any]:
    """Return the statistics of a preset as JSON values: `layers`, a list, and `mean` over it. Raises UserError if the
    package is not synthetic, has no such preset, or for too few or too many tokens."""
    manifest, model = package.manifest, package.manifest.model
    work = manifest.workload
    if work is None:
        raise UserError(f"{package.path}: workload: this is no synthetic package, so nothing was requested of it")
    if preset not in work.presets:
        raise UserError(f"--preset {preset}: this package has {', '.join(work.presets)}")
    first, max_tokens = work.presets[preset]
    max_tokens = min(max_tokens, model.context_tokens)
    if not 2 * WARM_UP_TOKENS <= tokens <= max_tokens:
        raise UserError(f"--tokens {tokens}: takes {2 * WARM_UP_TOKENS} to {max_tokens}")
    if model.experts > 1:
        return measure_mixture(package, preset, first, tokens, WARM_UP_TOKENS, progress)
    requested_activity = requested_by_layer(model, work.seed)
    predictor = StoredPredictor(package) if manifest.predictor is not None else None
    earlier: deque[NDArray[np.float32]] = deque(maxlen=EARLIER_LAYERS)
    layers: list[dict[str, Any]] = []

    def observe(run: LayerRun) -> None:
        counted = slice(WARM_UP_TOKENS, None)
        active = (run.inner != 0)[counted]
        requested_shares = active_shares(run.layer, model.layers, model.neurons, float(requested_activity[run.layer]))
        shares = active.mean(axis=0)
        statistics = {
            "layer": run.layer,
            "activity": {"requested": float(requested_shares.mean()), "measured": float(shares.mean())},
            "neurons_for_80_percent": {"requested": _neurons_for(requested_shares), "measured": _neurons_for(shares)},
            "always_on": {
                "requested": float((requested_shares > ALWAYS_ON).mean()),
                "measured": float((shares > ALWAYS_ON).mean()),
            },
            **{
                f"overlap_{d}": {
                    "requested": overlap(requested_shares, PRESETS[preset], d),
                    "measured": _overlap(active, d),
                }
                for d in DISTANCES
            },
            "gate_fired": float((run.values["gate"][counted] > 0).mean()),
            "up_given_gate": float(active.sum() / max(1, (run.values["gate"][counted] > 0).sum())),
            "input_cosine": _cosine(run.feed_forward_input, earlier[-1]) if earlier else None,
            "earlier_input_precision": [_gate_precision(run, inputs, counted) for inputs in reversed(earlier)],
            "predictor": None,
        }
        if predictor is not None:
            quality = judge(predictor.mask(run)[counted], active)
            statistics["predictor"] = {"recall": quality.recall, "precision": quality.precision}
        layers.append(statistics)
        earlier.append(run.feed_forward_input)
        if progress is not None:
            progress(len(layers) * tokens, model.layers * tokens)

    ReferenceEngine(package, observe=observe).hidden([range(first, first + tokens)])
    return {"preset": preset, "tokens": tokens, "layers": layers, "mean": _means(layers)}


def _neurons_for(shares: Shares) -> float:
    mass = np.cumsum(np.sort(shares)[::-1])
    return float((np.searchsorted(mass, 0.8 * mass[-1]) + 1) / len(shares))


def _overlap(active: NDArray[np.bool_], distance: int) -> float:
    still_active = active[distance:] & active[:-distance]
    return float(still_active.sum() / max(1, active[distance:].sum()))


def _cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    products = (a * b).sum(axis=1) / np.sqrt(np.square(a).sum(axis=1) * np.square(b).sum(axis=1))
    return float(products.mean())


def _gate_precision(run: LayerRun, inputs: NDArray[np.float32], tokens: slice) -> float:
    """Return, of the gates that fire on `inputs` of an earlier layer, the share that fires on the layer's inputs."""
    guessed = (inputs @ run.weights["gate"].T)[tokens] > 0
    return float((guessed & (run.values["gate"][tokens] > 0)).sum() / max(1, guessed.sum()))


PAIRS = ("activity", "neurons_for_80_percent", "always_on", "overlap_1", "overlap_10")


def _means(layers: list[dict[str, Any]]) -> dict[str, Any]:
    means: dict[str, Any] = {
        name: {side: float(np.mean([layer[name][side] for layer in layers])) for side in ("requested", "measured")}
        for name in PAIRS
    }
    means |= {name: float(np.mean([layer[name] for layer in layers])) for name in ("gate_fired", "up_given_gate")}
    if all(layer["predictor"] for layer in layers):
        active = sum(layer["activity"]["measured"] for layer in layers)
        predicted_active = sum(layer["activity"]["measured"] * layer["predictor"]["recall"] for layer in layers)
        predicted = sum(
            layer["activity"]["measured"] * layer["predictor"]["recall"] / layer["predictor"]["precision"]
            for layer in layers
        )
        means |= {"recall": predicted_active / active, "predicted_per_active": predicted / active}
    return means


def render(statistics: dict[str, Any]) -> str:
    """Return the statistics as text; `a/b` is requested/measured, shares in percent."""
    if "experts" in statistics:
        return render_mixture(statistics)
    lines = [
        f"Activations of preset {statistics['preset']}, {statistics['tokens']} tokens; requested/measured, in percent",
        "",
        f"{'layer':>5} {'active':>10} {'80 % from':>10} {'always on':>10} {'overlap 1':>10} {'overlap 10':>10} "
        f"{'cosine':>7} {'recall':>7} {'precision':>9}  from earlier inputs",
    ]
    for layer in statistics["layers"]:
        cosine = f"{layer['input_cosine']:.3f}" if layer["input_cosine"] is not None else "-"
        predictor = layer["predictor"] or {"recall": 0.0, "precision": 0.0}
        earlier = " ".join(f"{100 * precision:.0f}" for precision in layer["earlier_input_precision"])
        lines.append(
            f"{layer['layer']:>5} {_pairs(layer)} {cosine:>7} {100 * predictor['recall']:>7.1f} "
            f"{100 * predictor['precision']:>9.1f}  {earlier}"
        )
    means = statistics["mean"]
    lines.append(f" mean {_pairs(means)}")
    lines.append(f"up fires with {means['up_given_gate']:.1%} of gates that fire")
    if "recall" in means:
        lines.append(
            f"predictor: recall {means['recall']:.3f}, {means['predicted_per_active']:.2f} predicted per active"
        )
    return "\n".join(lines)


def _pairs(figures: dict[str, Any]) -> str:
    texts = (f"{100 * figures[name]['requested']:.1f}/{100 * figures[name]['measured']:.1f}" for name in PAIRS)
    return " ".join(f"{text:>10}" for text in texts)

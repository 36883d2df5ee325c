"""Measured statistics of a synthetic mixture: chosen experts, repeated choices and active neurons.

The reference engine computes the first tokens of a preset. The experts that a router chooses from the input of the
layer before show how well an engine can predict; a router that reads its layer's input needs no prediction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from neuronpipe.plans.lab.synth.activation_rates import requested_by_layer
from neuronpipe.plans.lab.synth.routing import frequencies, routing_of
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.predictions import StoredPredictor
from neuronpipe.plans.reference.engine import LayerRun, ReferenceEngine
from neuronpipe.plans.reference.expert_shares import expert_shares
from neuronpipe.plans.reference.weights import PackageWeights
from numpy.typing import NDArray

DISTANCES = (1, 10)
HOTTEST = 0.2  # of the experts
COLUMNS = ("repeated_1", "repeated_10", "by_hottest", "named_before", "recall", "predicted_per_active")


class MixtureStatistics:
    """Collects the statistics of each layer while the reference engine computes a sequence.

    tokens: length of the sequence, of which the first `skipped` do not count
    """

    def __init__(self, package: Package, tokens: int, skipped: int) -> None:
        model = package.manifest.model
        self._model, self._tokens, self._skipped = model, tokens, skipped
        self._weights = PackageWeights(package)
        self._predictor = StoredPredictor(package) if package.manifest.predictor is not None else None
        self._layer = -1
        self._before: NDArray[np.float32] | None = None
        self._layers: list[dict[str, Any]] = []
        assert package.manifest.workload is not None
        self._requested = requested_by_layer(model, package.manifest.workload.seed)

    def observe(self, run: LayerRun) -> None:
        """Count an expert's run. Experts come in order, layer by layer."""
        if run.layer != self._layer:
            self._close()
            self._layer = run.layer
            self._chosen = np.zeros((self._tokens, self._model.most_experts), dtype=np.bool_)
            self._inputs = np.zeros((self._tokens, self._model.width), dtype=np.float32)
            self._counts = np.zeros(4)  # neurons, active ones, predicted ones, both
        self._chosen[run.tokens, self._model.place_of(run.ffn)[1]] = True
        # Norms of synthetic packages have weights of 1, so that a router ranks experts alike before and after the norm.
        early = self._model.router_reads == "layer"
        self._inputs[run.tokens] = run.attention_input if early else run.feed_forward_input
        active = (run.inner != 0)[run.tokens >= self._skipped]
        self._counts[:2] += active.size, active.sum()
        if self._predictor is not None:
            predicted = self._predictor.mask(run)[run.tokens >= self._skipped]
            self._counts[2:] += predicted.sum(), (predicted & active).sum()

    def layers(self) -> list[dict[str, Any]]:
        """Return the statistics of all layers, after the last run."""
        self._close()
        return self._layers

    def _close(self) -> None:
        if self._layer < 0:
            return
        experts = self._model.routed_experts(self._layer) or self._model.expert_counts[self._layer]
        chosen, (neurons, active, predicted, hits) = self._chosen[self._skipped :, :experts], self._counts
        statistics: dict[str, Any] = {
            "layer": self._layer,
            "activity": {"requested": float(self._requested[self._layer]), "measured": float(active / neurons)},
            **{f"repeated_{d}": _share(chosen[d:] & chosen[:-d], chosen[d:]) for d in DISTANCES},
            "by_hottest": _by_hottest(chosen.mean(axis=0)),
            "named_before": self._named_before(),
            "recall": float(hits / active) if self._predictor is not None else None,
            "predicted_per_active": float(predicted / active) if self._predictor is not None else None,
        }
        self._layers.append(statistics)
        self._before = self._inputs

    def _named_before(self) -> float | None:
        model = self._model
        if self._before is None or not model.routed_experts(self._layer):
            return None
        router = self._weights.vector(f"layers.{self._layer}.router").reshape(model.experts, model.width)
        predicted = expert_shares(model, self._before @ router.T) > 0
        return _share((predicted & self._chosen[:, : model.experts])[self._skipped :], predicted[self._skipped :])


def measure_mixture(
    package: Package, preset: str, first: int, tokens: int, skipped: int, progress: Any = None
) -> dict[str, Any]:
    """Return the statistics of a preset as JSON values: `layers`, a list, and `mean` over it.

    skipped: number of first tokens that do not count
    """
    model = package.manifest.model
    statistics = MixtureStatistics(package, tokens, skipped)

    def observe(run: LayerRun) -> None:
        statistics.observe(run)
        if progress is not None:
            progress((run.ffn + 1) * tokens // model.most_experts, model.layers * tokens)

    ReferenceEngine(package, observe=observe).hidden([range(first, first + tokens)])
    layers = statistics.layers()
    means: dict[str, Any] = {
        "activity": {side: _mean([layer["activity"][side] for layer in layers]) for side in ("requested", "measured")},
        "by_hottest_requested": _by_hottest(frequencies(model, routing_of(model))),
    } | {name: _mean([layer[name] for layer in layers if layer[name] is not None]) for name in COLUMNS}
    return {"preset": preset, "tokens": tokens, "experts": _experts(model), "layers": layers, "mean": means}


def _experts(model: ModelSpec) -> str:
    return f"{model.experts_per_token} of {model.experts}"


def _share(part: NDArray[np.bool_], whole: NDArray[np.bool_]) -> float:
    return float(part.sum() / max(1, whole.sum()))


def _by_hottest(shares: NDArray[np.float64]) -> float:
    count = max(1, round(HOTTEST * len(shares)))
    return float(np.sort(shares)[-count:].sum() / shares.sum())


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def render_mixture(statistics: dict[str, Any]) -> str:
    """Return the statistics as text, shares in percent."""
    heads = ("active", "again 1", "again 10", "by hottest", "named", "recall", "predicted")
    lines = [
        f"Experts and activations of preset {statistics['preset']}, {statistics['tokens']} tokens, "
        f"{statistics['experts']} experts a token; in percent",
        "active: requested/measured, of a chosen expert's neurons. again: of a token's experts, those of the token one",
        f"or ten before. by hottest: choices of the most used {HOTTEST:.0%} of a layer's experts. named: by the",
        "router, given the input of the layer before, and chosen.",
        "",
        f"{'layer':>5} " + " ".join(f"{head:>11}" for head in heads),
        *(_line(str(layer["layer"]), layer) for layer in statistics["layers"]),
        _line("mean", statistics["mean"]),
    ]
    return "\n".join(lines)


def _line(name: str, figures: dict[str, Any]) -> str:
    activity = figures["activity"]
    texts = [f"{100 * activity['requested']:.1f}/{100 * activity['measured']:.1f}"]
    texts += ["-" if figures[column] is None else f"{100 * figures[column]:.1f}" for column in COLUMNS]
    return f"{name:>5} " + " ".join(f"{text:>11}" for text in texts)

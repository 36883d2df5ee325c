"""Thresholds of a SiLU model (CATS, arXiv 2404.08763): a neuron counts as silent for a token where |silu(gate)| is less
than a threshold of its layer, the quantile of these values on calibration text.

The exact model sets the thresholds. The share of silent neurons and the perplexity are those of the thresholded model,
on held-out text.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import numpy as np
from neuronpipe.plans.activity.stored_profile import remove_profile
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.package.manifest import MANIFEST, Manifest, Silent, SilentLayer
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.calibration_texts import Texts
from neuronpipe.plans.predictor.profiling import Progress, perplexity
from neuronpipe.plans.reference.engine import GATED, LayerRun, Mask, ReferenceEngine
from neuronpipe.plans.reference.weights import Array
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

ATTENTION_SHARE = 0.6  # of the time of a layer; measured with the demo's shape


def set_thresholds(
    package: Package, texts: Texts, *, share: float, text: str, progress: Progress | None = None
) -> Package:
    """Choose thresholds below which `share` of the neurons lie, measure what they cost, and write both into the
    manifest, in the place of older ones. text: what the texts are called. Raises UserError."""
    require_silu(package)
    package.verify_fixed()
    layers, experts = package.manifest.model.layers, package.manifest.model.experts
    cut = texts.calibration_tokens
    held_out_tokens = sum(map(len, texts.held_out))
    both = cut + held_out_tokens

    def tell(tokens: int) -> None:
        """So many tokens of all layers: of both texts by the exact model, then of the one held out, whose logits are
        computed twice."""
        if progress is not None:
            progress(tokens, layers * (both + held_out_tokens) + 2 * held_out_tokens)

    def attended(layer: int, tokens: int) -> None:
        tell(layer * both + int(ATTENTION_SHARE * tokens))

    rated = 0

    def rate(tokens: int) -> None:
        nonlocal rated
        rated += tokens
        tell(layers * (both + held_out_tokens) + rated)

    values: list[list[Array]] = [[] for _ in range(layers)]  # by layer, of each expert
    thresholds = [0.0] * layers

    def collect(run: LayerRun) -> None:
        values[run.layer].append(_strength(run)[run.tokens < cut].ravel())
        for done in range(run.layer):
            if values[done]:  # all of its experts have been seen
                thresholds[done] = _quantile(values[done], share)
                values[done] = []
        layer, expert = divmod(run.ffn, experts)
        passed = ATTENTION_SHARE + (1 - ATTENTION_SHARE) * (expert + 1) / experts
        tell(int((layer + passed) * both))

    tell(0)
    exact = ReferenceEngine(package, observe=collect, attended=attended)
    hidden, _ = exact.hidden([*texts.calibration, *texts.held_out])
    thresholds[-1] = _quantile(values[-1], share)

    counts = np.zeros((layers, 2))  # silent, all

    def mask(run: LayerRun) -> NDArray[np.bool_]:
        tell(layers * both + run.layer * held_out_tokens)
        speaks = _speaks(run, thresholds[run.layer])
        counts[run.layer] += (speaks.size - np.count_nonzero(speaks), speaks.size)
        return speaks

    thresholded_hidden, _ = ReferenceEngine(package, mask=mask).hidden(texts.held_out)
    shares = (counts[:, 0] / counts[:, 1]).round(6).tolist()
    return _written(
        package,
        Silent(
            share=share,
            by_layer=tuple(map(SilentLayer, thresholds, shares)),
            text=text,
            calibration_tokens=cut,
            held_out_tokens=held_out_tokens,
            exact_perplexity=_finite(perplexity(exact, hidden[cut:], texts.held_out, rate), text),
            thresholded_perplexity=_finite(perplexity(exact, thresholded_hidden, texts.held_out, rate), text),
        ),
    )


def remove_thresholds(package: Package) -> Package:
    """The package without thresholds. Raises UserError."""
    require_silu(package)
    return package if package.manifest.silent is None else _written(package, None)


def require_silu(package: Package) -> None:
    """Raises UserError where neurons are silent by themselves."""
    activation = package.manifest.model.activation
    if activation != "silu":
        raise UserError(
            f"{package.path}: activation: neurons of {activation} are silent by themselves, --silent is for silu; "
            "take --mode exact or predicted"
        )


def threshold_mask(manifest: Manifest) -> Mask:
    """Which neurons of a layer take part in mode thresholded, for the reference engine."""
    silent = manifest.silent
    if silent is None:
        raise ValueError("the package has no thresholds")
    return lambda run: _speaks(run, silent.by_layer[run.layer].threshold)


def _speaks(run: LayerRun, threshold: float) -> NDArray[np.bool_]:
    return np.asarray(~(_strength(run) < np.float32(threshold)))


def _strength(run: LayerRun) -> Array:
    return np.abs(GATED["silu"](run.values["gate"], np.ones(1, np.float32)))


def _quantile(pieces: list[Array], share: float) -> float:
    """What no more than `share` of the values are less than."""
    values = np.concatenate(pieces)
    rank = min(len(values) - 1, int(share * len(values)))
    return float(np.partition(values, rank).item(rank))


def _finite(measured: float, text: str) -> float:
    if not math.isfinite(measured):
        raise UserError(f"{text}: the perplexity of its held-out part is no finite number: no text for this model")
    return round(measured, 6)


def _written(package: Package, silent: Silent | None) -> Package:
    """The manifest is replaced as a whole; its id changes."""
    with whole_file(package.path / MANIFEST) as place, place.open("wb") as file:
        file.write(replace(package.manifest, silent=silent).sealed().to_bytes())
        file.flush()
        os.fsync(file.fileno())
    return remove_profile(Package.open(package.path), "thresholded")

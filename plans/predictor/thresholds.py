"""Thresholds of a SiLU model (CATS, arXiv 2404.08763).

A neuron is below the threshold for a token if |silu(gate)| is less than the threshold of its layer, a quantile of these
values in the exact model on calibration text. The share of neurons below the threshold and the perplexity are measured
with the thresholded model on held-out text.
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

ATTENTION_SHARE = 0.6  # of a layer's time; measured with the demo's shape


def set_thresholds(
    package: Package, texts: Texts, *, share: float, text: str, progress: Progress | None = None
) -> Package:
    """Choose thresholds that `share` of the neurons lie below, measure the loss, and write both into the manifest.
    Return the package with its new id.

    Older thresholds are replaced, and the activity profile of thresholded mode is removed. Raises UserError if the
    package is damaged or has no SiLU, or if a perplexity is not finite.
    """
    require_silu(package)
    package.verify_fixed()
    model, layers = package.manifest.model, package.manifest.model.text_layers
    calibration_tokens = texts.calibration_tokens
    held_out_tokens = sum(map(len, texts.held_out))
    total_tokens = calibration_tokens + held_out_tokens

    def report(tokens: int) -> None:
        """Report progress in tokens times layers: both texts in the exact model, the held-out text in the thresholded
        model, then the logits of both."""
        if progress is not None:
            progress(tokens, layers * (total_tokens + held_out_tokens) + 2 * held_out_tokens)

    def attended(layer: int, tokens: int) -> None:
        report(layer * total_tokens + int(ATTENTION_SHARE * tokens))

    logit_tokens = 0

    def count_logits(tokens: int) -> None:
        nonlocal logit_tokens
        logit_tokens += tokens
        report(layers * (total_tokens + held_out_tokens) + logit_tokens)

    values: list[list[Array]] = [[] for _ in range(layers)]  # by layer, of each expert
    thresholds = [0.0] * layers

    def collect(run: LayerRun) -> None:
        values[run.layer].append(_magnitude(run)[run.tokens < calibration_tokens].ravel())
        for done in range(run.layer):
            if values[done]:  # all of its experts are complete
                thresholds[done] = _quantile(values[done], share)
                values[done] = []
        layer, expert = model.place_of(run.ffn)
        passed = ATTENTION_SHARE + (1 - ATTENTION_SHARE) * (expert + 1) / model.expert_counts[layer]
        report(int((layer + passed) * total_tokens))

    report(0)
    exact = ReferenceEngine(package, observe=collect, attended=attended)
    hidden, _ = exact.hidden([*texts.calibration, *texts.held_out])
    thresholds[-1] = _quantile(values[-1], share)

    counts = np.zeros((layers, 2))  # below the threshold, all

    def mask(run: LayerRun) -> NDArray[np.bool_]:
        report(layers * total_tokens + run.layer * held_out_tokens)
        takes_part = _reaches_threshold(run, thresholds[run.layer])
        counts[run.layer] += (takes_part.size - np.count_nonzero(takes_part), takes_part.size)
        return takes_part

    thresholded_hidden, _ = ReferenceEngine(package, mask=mask).hidden(texts.held_out)
    shares = (counts[:, 0] / counts[:, 1]).round(6).tolist()
    return _write_thresholds(
        package,
        Silent(
            share=share,
            by_layer=(*map(SilentLayer, thresholds, shares), *[SilentLayer(0.0, 0.0)] * model.draft_layers),
            text=text,
            calibration_tokens=calibration_tokens,
            held_out_tokens=held_out_tokens,
            exact_perplexity=_finite(
                perplexity(exact, hidden[calibration_tokens:], texts.held_out, count_logits), text
            ),
            thresholded_perplexity=_finite(perplexity(exact, thresholded_hidden, texts.held_out, count_logits), text),
        ),
    )


def remove_thresholds(package: Package) -> Package:
    """Remove the thresholds, and return the package. Raises UserError as `require_silu`."""
    require_silu(package)
    return package if package.manifest.silent is None else _write_thresholds(package, None)


def require_silu(package: Package) -> None:
    """Raise UserError if the activation function is not silu, since other models need no thresholds, or if neurons
    cannot be left out."""
    activation = package.manifest.model.activation
    if activation != "silu":
        raise UserError(
            f"{package.path}: activation: --silent is for silu, and this model computes {activation}; "
            "take --mode exact or predicted"
        )
    package.require_neurons("thresholded mode")


def threshold_mask(manifest: Manifest) -> Mask:
    """Return the mask of the neurons that are not below the threshold, for the reference engine. Raises ValueError if
    the package has no thresholds."""
    silent = manifest.silent
    if silent is None:
        raise ValueError("the package has no thresholds")
    return lambda run: _reaches_threshold(run, silent.by_layer[run.layer].threshold)


def _reaches_threshold(run: LayerRun, threshold: float) -> NDArray[np.bool_]:
    return np.asarray(~(_magnitude(run) < np.float32(threshold)))


def _magnitude(run: LayerRun) -> Array:
    return np.abs(GATED["silu"](run.values["gate"], np.ones(1, np.float32)))


def _quantile(pieces: list[Array], share: float) -> float:
    """Return the largest value such that at most `share` of all values are less."""
    values = np.concatenate(pieces)
    rank = min(len(values) - 1, int(share * len(values)))
    return float(np.partition(values, rank).item(rank))


def _finite(measured: float, text: str) -> float:
    if not math.isfinite(measured):
        raise UserError(f"{text}: the perplexity of its held-out part is no finite number: no text for this model")
    return round(measured, 6)


def _write_thresholds(package: Package, silent: Silent | None) -> Package:
    """Write a manifest with other thresholds, or without (None), and remove the activity profile of thresholded mode.
    Return the package with its new id."""
    with whole_file(package.path / MANIFEST) as place, place.open("wb") as file:
        file.write(replace(package.manifest, silent=silent).sealed().to_bytes())
        file.flush()
        os.fsync(file.fileno())
    return remove_profile(Package.open(package.path), "thresholded")

"""The reference engine on converted packages against logits that transformers computed (golden/make.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.engine import ReferenceEngine

from tests.conformance.checkpoints import RECIPES, tokens

GOLDEN = np.load(Path(__file__).parent / "golden" / "logits.npz")


@pytest.mark.parametrize("name", RECIPES)
def test_logits_at_f16_agree_with_transformers(name: str, converted: Callable[[str, str], Package]) -> None:
    logits = ReferenceEngine(converted(name, "f16")).run(tokens(RECIPES[name])).logits
    assert np.abs(GOLDEN[name]).max() > 10
    assert np.abs(logits - GOLDEN[name]).max() < 1e-3  # the weights survive f16: only the order of sums differs


# Rounding to a grid of absmax/127 (absmax/8) per 32 weights leaves a relative error of 0.5 % (8 %) in every matrix of
# these random models. A layer adds the errors of its two sub-layers, each through two or three matrices, in quadrature;
# nothing is redundant in random weights, so they stay: two layers came to 1.1 % (18 %) of the logits' rms, eleven to
# 1.8 % (28 %). In a mixture a token whose experts were nearly as likely as others may go to those, and is computed by
# other weights: what is bounded there is the median token. Recurrent layers multiply three products with each other
# (query, key and value, or two factors and a gate), whose errors add up, and carry them on: 3.3 % (48 %) at most.
@pytest.mark.parametrize(("quantization", "bound"), [("q8", 0.025), ("q4", 0.35)])
@pytest.mark.parametrize("name", RECIPES)
def test_quantized_logits_stay_within_the_error_of_their_weights(
    name: str, quantization: str, bound: float, converted: Callable[[str, str], Package]
) -> None:
    package = converted(name, quantization)
    logits = ReferenceEngine(package).run(tokens(RECIPES[name])).logits
    errors = np.sqrt(np.square(logits - GOLDEN[name]).mean(axis=1) / np.square(GOLDEN[name]).mean())
    error = np.median(errors) if RECIPES[name].experts else np.sqrt(np.mean(np.square(errors)))
    print(f"{name} {quantization}: {error:.4f}, worst token {errors.max():.3f}")
    assert error < bound * (1.4 if package.manifest.model.is_recurrent else 1)


def test_firing_counts_are_those_of_the_tokens(converted: Callable[[str, str], Package]) -> None:
    engine, text = ReferenceEngine(converted("bamboo", "f16")), tokens(RECIPES["bamboo"], 8)
    result = engine.run(text)
    shorter = engine.run(text[:-1])
    assert result.fired.shape == (3, 270)
    assert (result.fired >= shorter.fired).all()
    assert (result.fired <= shorter.fired + 1).all()
    assert 0.15 < result.fired.mean() / len(text) < 0.35  # two independent signs: a quarter fires

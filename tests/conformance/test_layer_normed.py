"""Dense families with LayerNorm: each of their mechanisms counts, and norms of heads are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.models.spec import LayerKind
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, tokens
from tests.conformance.gguf_files import write_gguf

GOLDEN = np.load(Path(__file__).parent / "golden" / "logits.npz")
ABLATIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("stablelm", "biases of queries, keys and values"): {"qkv_bias": False},
    ("stablelm", "the mean that norms take away"): {"norm": "rms"},
    ("cohere", "one input of attention and feed-forward"): {"parallel": False},
    ("cohere", "the mean that norms take away"): {"norm": "rms"},
    ("cohere2", "biases of attention"): {"output_bias": False},
    ("cohere2", "windows"): {"layer_kinds": (LayerKind(3), LayerKind(1, rotary=False), LayerKind(1))},
    ("cohere2", "a layer without rotation"): {"layer_kinds": (LayerKind(3, 9), LayerKind(1), LayerKind(1, 9))},
    ("gpt neox", "one input of attention and feed-forward"): {"parallel": False},
    ("gpt neox", "biases of the feed-forward"): {"ffn_bias": False},
    ("gpt neox in turn", "attention before the feed-forward"): {"parallel": True},
    ("gpt neox in turn", "gelu"): {"activation": "relu"},
    ("starcoder2", "windows"): {"layer_kinds": (LayerKind(3),)},
    ("starcoder2", "gelu"): {"activation": "relu"},
    ("olmo", "a limit of queries, keys and values"): {"qkv_limit": 0.0},
    ("olmo", "the mean that norms take away"): {"norm": "rms"},
    ("olmoe clipped", "a limit of queries, keys and values"): {"qkv_limit": 0.0},
    ("stablelm parallel", "one input of attention and feed-forward"): {"parallel": False},
}


@pytest.mark.parametrize(("name", "mechanism"), ABLATIONS)
def test_logits_without_a_mechanism_are_others(
    name: str, mechanism: str, converted: Callable[[str, str], Package]
) -> None:
    engine = ReferenceEngine(converted(name, "f16"))
    engine._model = dataclasses.replace(engine._model, **ABLATIONS[name, mechanism])
    logits = engine.run(tokens(RECIPES[name])).logits
    assert np.abs(logits - GOLDEN[name]).max() > 0.05 * GOLDEN[name].std()


@pytest.mark.parametrize("name", ["cohere", "cohere2"])
def test_the_factor_of_logits_multiplies(name: str, converted: Callable[[str, str], Package]) -> None:
    assert converted(name, "f16").manifest.model.logit_scale == RECIPES[name].config["logit_scale"]


@pytest.mark.parametrize("name", ["stablelm", "cohere"])
def test_norms_of_heads_in_a_gguf_file_are_refused(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    norms = np.ones((recipe.query_heads, recipe.head_width), np.float32)
    source = write_gguf(tmp_path / "m.gguf", recipe, extra={"blk.0.attn_q_norm.weight": norms})
    with pytest.raises(UserError, match=r"blk\.0\.attn_q_norm\.weight: norms of queries and keys are not supported"):
        convert(source, tmp_path / "package")

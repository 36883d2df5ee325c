"""Two unrelated families whose class has the same name, SparseLlamaForCausalLM: like Llama except for the activation.

ProSparse (model_type sparsellama) has ReLU with a threshold. SakanaAI's SparseLM (llama_sparse_relu) uses ReLU whatever
`hidden_act` says, which is silu in its files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    GATED_HARMLESS,
    GATED_NAMES,
    gated_activation,
    gated_model,
    refuse_biases,
)
from neuronpipe.plans.models.family import SAY_WHICH, Architecture, Choices, Family
from neuronpipe.plans.models.llama import LLAMA_DEFAULTS
from neuronpipe.plans.models.spec import MAX, Activation, ModelSpec
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

NAME = "sparse_llama"
PROSPARSE, SPARSE_LM = "sparsellama", "llama_sparse_relu"

# The configuration classes come with the models' repositories and derive from LlamaConfig; SparseLM's adds two keys.
DEFAULTS = {**LLAMA_DEFAULTS, "sparsity_gated_mlp": True, "sparsity_new_intermediate_size": None}


def _is_sparse_lm(config: Record) -> bool:
    return config.has("model_type") and config.text("model_type") == SPARSE_LM


def _activation(config: Record, has: Callable[[str], bool], choices: Choices) -> Activation:
    if choices.activation is not None:
        return choices.activation
    if _is_sparse_lm(config):
        return "relu"
    if (kind := config.text("model_type")) == PROSPARSE:
        return gated_activation(config, has, None)
    config.fail(
        "model_type",
        f"is {quoted(kind)}; this class is ProSparse's with {PROSPARSE}, and SakanaAI's SparseLM's with {SPARSE_LM}; "
        f"correct it, or {SAY_WHICH}",
    )


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    refuse_biases(config, has)
    if config.has("sparsity_new_intermediate_size"):
        config.fail("sparsity_new_intermediate_size", "is not supported; only null is")
    activation = _activation(config, has, choices)
    # SparseLM ignores hidden_act, and so has no threshold either.
    effective = Choices(activation, choices.context_tokens) if _is_sparse_lm(config) else choices
    model = gated_model(
        config,
        effective,
        family=NAME,
        activation=activation,
        windows=[0] * config.integer("num_hidden_layers", 1, MAX.layers),
        qkv_bias=False,
    )
    return replace(model, gated=config.boolean("sparsity_gated_mlp"))


FAMILY = Family(
    name=NAME,
    architectures={
        "SparseLlamaForCausalLM": Architecture(
            config_class="SparseLlamaConfig", defaults=DEFAULTS, read=_read, names=GATED_NAMES, harmless=GATED_HARMLESS
        ),
    },
)

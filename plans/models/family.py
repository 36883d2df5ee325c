"""The contents of a family file: how configurations and tensor names of its checkpoints become one description. Also
which activation a source means, since ReLU models are often read wrongly without an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, NamedTuple

from neuronpipe.plans.models.spec import ACTIVATIONS, Activation, ModelSpec, NormKind, Router, RouterInput
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted
from neuronpipe.protocol.frozen import frozen


class Choices(NamedTuple):
    """Choices of the user that override the source. None leaves the choice to the source."""

    activation: Activation | None = None
    context_tokens: int | None = None


@frozen(kw_only=True)
class TensorNames:
    """The names of a model's tensors in a source, without `.weight` and `.bias`; None: its models have no such tensor.

    Names of a layer follow `layer`, in which {} is the layer's number. In a mixture gate, up and down also follow
    `expert`, in which {} is the expert's number.

    stacked: all experts of a layer lie in one tensor, one after the other
    query_key_value: the three in one tensor, instead of one each
    first_position: rows of `positions` before the row of position 0
    predictor: fc1 and fc2, {} is 1 or 2; they follow `layer`, or in a mixture `expert`
    """

    embedding: str
    output: str
    output_norm: str
    layer: str
    attention_norm: str
    ffn_norm: str
    attention_output: str
    up: str
    down: str
    query: str | None = None
    key: str | None = None
    value: str | None = None
    query_key_value: str | None = None
    gate: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    positions: str | None = None
    first_position: int = 0
    router: str | None = None
    expert: str = ""
    stacked: bool = False
    predictor: str | None = None


@frozen(kw_only=True)
class Architecture:
    """One class of transformers, as config.json names it under `architectures`.

    config_class: the class whose defaults apply to missing keys
    defaults: its defaults, for every key that is read; `null` in a file is not missing
    read: (configuration, function that tells whether a tensor exists, choices) -> the model; raises UserError naming
        the field
    names: names of its tensors, or a function if they depend on the configuration
    joined_rows: the rows of queries, keys and values in a tensor that holds all three, if there is one
    harmless: a regular expression of tensors that change nothing and may be present
    norm_offset: added to the stored weight of every norm
    partial_rotary: `partial_rotary_factor` applies: that share of a head, from its first element on, is rotated
    """

    config_class: str
    defaults: Mapping[str, Any]
    read: Callable[[Record, Callable[[str], bool], Choices], ModelSpec]
    names: TensorNames | Callable[[Record], TensorNames]
    joined_rows: Callable[[Record, ModelSpec], list[int]] | None = None
    harmless: str = r"(?!)"
    norm_offset: float = 0.0
    partial_rotary: bool = False

    def tensor_names(self, config: Record) -> TensorNames:
        """Return the names of the tensors of a checkpoint with this configuration."""
        return self.names(config) if callable(self.names) else self.names


@frozen(kw_only=True)
class GgufArchitecture:
    """One `general.architecture` of GGUF files, whose keys and tensor names follow one scheme.

    interleaved: rows of queries and keys pair neighbouring elements for rotary positions
    qkv_bias: queries, keys and values always have biases; otherwise only if the tensors exist
    head_norm: queries and keys are normed, each head by itself
    relu_may_mean_drelu: the user has to confirm `relu`, since known models say it and mean drelu
    activation: used if a file names none; None: GELU, which is not supported
    router, router_reads: properties of its mixtures; `router` applies if a file names none
    harmless: a regular expression of tensors that change nothing and may be present
    norm: norm of its layers; the weights of LayerNorm are stored whole
    gated: the feed-forward has Gate beside Up and Down
    parallel: attention and feed-forward are computed from the same input, after one norm or one norm each; queries,
        keys and values lie in one tensor, in that order
    partial_rotary: `rope.dimension_count` may be less than the width of a head
    """

    interleaved: bool
    qkv_bias: bool = False
    head_norm: bool = False
    relu_may_mean_drelu: bool = False
    activation: Activation | None = "silu"
    router: Router = "softmax"
    router_reads: RouterInput = "feed_forward"
    harmless: str = r"(?!)"
    norm: NormKind = "rms"
    gated: bool = True
    parallel: bool = False
    partial_rotary: bool = False


@frozen(kw_only=True)
class Family:
    """Models that are read in the same way. The keys of `architectures` and `gguf` are the names in their files."""

    name: str
    architectures: Mapping[str, Architecture]
    gguf: Mapping[str, GgufArchitecture] = field(default_factory=dict)


ACTIVATION_NAMES: dict[str, Activation] = {
    "relu": "relu",
    "drelu": "drelu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
SAY_WHICH = (
    f"say which it is with --activation {'|'.join(ACTIVATIONS)} "
    "(drelu: SparseQwen2, TurboSparse, Bamboo; relu: ReluLLaMA and others with relu(gate) * up)"
)
_RELU_MODELS = re.compile(r"relu|sparse|bamboo|powerinfer|minicpm-s", re.IGNORECASE)


def sounds_like_relu(*names: str) -> str | None:
    """Return the first of the names that a ReLU model might have; None if there is none."""
    return next((name for name in names if _RELU_MODELS.search(name)), None)


def named_activation(record: Record, field: str, *, relu_may_mean_drelu: bool) -> Activation:
    """Return the activation that a field names.

    relu_may_mean_drelu: SparseQwen2 is a Qwen2 that says relu, and its files differ in nothing else from those of a
        model that means relu
    """
    if (name := record.text(field)) not in ACTIVATION_NAMES:
        record.fail(field, f"{quoted(name)} is not supported; {', '.join(ACTIVATION_NAMES)} are (or pass --activation)")
    if name == "relu" and relu_may_mean_drelu:
        record.fail(field, f"is 'relu', but SparseQwen2 says so and means drelu; {SAY_WHICH}")
    return ACTIVATION_NAMES[name]

"""A model in its source files, in one form for every source format: the input of a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from neuronpipe.plans.convert.chat_template import ChatTemplate, ExamineTemplate
from neuronpipe.plans.convert.end_tokens import EndToken
from neuronpipe.plans.convert.joined_experts import take_fused_experts, take_joined_experts
from neuronpipe.plans.convert.recurrent_layers import take_recurrent_layer
from neuronpipe.plans.convert.source_predictors import SourcePredictors
from neuronpipe.plans.convert.stored_tensors import Inventory, RowNumbers, StoredMatrix
from neuronpipe.plans.models.family import TensorNames
from neuronpipe.plans.models.recurrent_sizes import RECURRENT
from neuronpipe.plans.models.spec import Activation, ModelSpec
from neuronpipe.plans.package.manifest import Source
from neuronpipe.plans.package.tensors import DRAFT_INPUT, layer_norms, norm_widths
from neuronpipe.protocol.errors import UserError, safe_name
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

Stack = Mapping[str, tuple[StoredMatrix, ...]]
"""Name -> the stored tensors of which it consists, one below the other."""


class Options(NamedTuple):
    """Choices of the user that override the source. None leaves the choice to the source.

    predictor: convert the source's predictors
    examine_template: tries the chat template; None: the template is not tried
    """

    activation: Activation | None = None
    tokenizer: Path | None = None
    context_tokens: int | None = None
    chat_template: Path | None = None
    predictor: bool = True
    examine_template: ExamineTemplate | None = None


@frozen
class Checkpoint:
    """Everything about a model that a conversion needs. A context manager that closes the files.

    tokenizer: content of tokenizer.json
    notes: what the user should know about the resulting package
    inverse_frequency: table of rotary positions [head_width / 2]; None with other positions
    local_inverse_frequency: the same for layers with local positions; None: there are none
    matrices, vectors: tensors by names of fixed.safetensors; matrices of feed-forwards by `ffn_name`. Query, key and
        value matrices are three tensors of one name
    down_by_neuron: Down is stored as [neurons, width], otherwise as [width, neurons]
    """

    source: Source
    model: ModelSpec
    ends: tuple[EndToken, ...]
    tokenizer: bytes
    chat_template: ChatTemplate | None
    notes: tuple[str, ...]
    inverse_frequency: NDArray[np.float32] | None
    matrices: Stack
    vectors: Stack
    down_by_neuron: bool = False
    predictors: SourcePredictors | None = None
    local_inverse_frequency: NDArray[np.float32] | None = None
    files: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()


def ffn_name(model: ModelSpec, layer: str, expert: int, matrix: str) -> str:
    """Return the name of a feed-forward's matrix in a Checkpoint.

    layer: the prefix of the layer's names
    matrix: gate, up or down
    """
    return f"{layer}.{matrix}" if model.experts == 1 else f"{layer}.experts.{expert}.{matrix}"


def take_tensors(
    inventory: Inventory,
    model: ModelSpec,
    names: TensorNames,
    orders: Mapping[str, RowNumbers] | None = None,
    *,
    norm_offset: float = 0.0,
    down_by_neuron: bool = False,
) -> tuple[Stack, Stack]:
    """Return (matrices, vectors) of a Checkpoint. Raises UserError as `Inventory.take`.

    names: names in the source
    orders: order of the rows of `query`, `key`, `query_key_value` or `latent_down`, where the source has them in
        another order than packages
    norm_offset: added to the stored weights of norms
    down_by_neuron: the field of Checkpoint
    """
    tensors = _Tensors(inventory, model, names, orders or {}, norm_offset, down_by_neuron)
    tensors.take_around_layers()
    for number in range(model.layers):
        tensors.take_layer(number)
    return tensors.matrices, tensors.vectors


class _Tensors:
    """The tensors that `take_tensors` collects, by their names in a Checkpoint."""

    def __init__(
        self,
        inventory: Inventory,
        model: ModelSpec,
        names: TensorNames,
        orders: Mapping[str, RowNumbers],
        norm_offset: float,
        down_by_neuron: bool,
    ) -> None:
        self.matrices: dict[str, tuple[StoredMatrix, ...]] = {}
        self.vectors: dict[str, tuple[StoredMatrix, ...]] = {}
        self._inventory, self._model, self._names, self._orders = inventory, model, names, orders
        self._norm_offset = norm_offset
        self._down_by_neuron = down_by_neuron

    def take_around_layers(self) -> None:
        model, names = self._model, self._names
        self.matrices["embedding"] = (self._weight(names.embedding, model.vocabulary, model.width),)
        if not model.tied_embeddings:
            self.matrices["output"] = (self._weight(names.output, model.vocabulary, model.width),)
        if model.positions == "learned":
            table = self._inventory.take_rows(f"{self._name('positions')}.weight", model.width)
            self.vectors["position_embedding"] = (table.rows_from(names.first_position, model.context_tokens),)
        self._take_norm("output_norm", names.output_norm)
        if model.logit_bias:
            self.vectors["output.bias"] = (self._bias(names.output, model.vocabulary),)

    def take_layer(self, number: int) -> None:
        prefix, (layer, ffn_layer) = f"layers.{number}", self._places(number)
        for norm in layer_norms(self._model, number):
            place = ffn_layer if norm.startswith("ffn") else layer
            self._take_norm(f"{prefix}.{norm}", f"{place}{self._name(norm)}")
        if self._model.mixers[number] == "attention":
            self._take_attention(number, prefix, layer)
        elif self._model.mixers[number] in RECURRENT:
            assert self._names.recurrent is not None
            tensors = self._names.recurrent(self._model, number)
            matrices, vectors = take_recurrent_layer(self._inventory, self._model, number, layer, tensors)
            self.matrices |= {f"{prefix}.{name}": parts for name, parts in matrices.items()}
            self.vectors |= {f"{prefix}.{name}": parts for name, parts in vectors.items()}
        if self._model.layer_scales:
            self.vectors[f"{prefix}.scale"] = (self._row(layer, "scale", 1),)
        if self._model.routed_experts(number) or (self._model.experts == 1 and self._model.ffn_layers[number]):
            self._take_ffn(prefix, ffn_layer)
        if self._model.experts > 1 and self._model.experts_differ:
            self._take_always_active(number, prefix, ffn_layer)
        if number >= self._model.text_layers:
            joined = self._weight(f"{layer}{self._name(DRAFT_INPUT)}", self._model.width, 2 * self._model.width)
            self.matrices[f"{prefix}.{DRAFT_INPUT}"] = (joined,)

    def _places(self, number: int) -> tuple[str, str]:
        """Return the prefixes of the names of a layer's mixer and feed-forward."""
        names, blocks, draft = self._names, self._names.blocks, number - self._model.text_layers
        if draft >= 0 and names.draft_layer is not None:
            return (names.draft_layer.format(draft),) * 2
        mixer, feed_forward = (number, number) if blocks is None else blocks[number]
        return names.layer.format(mixer), names.layer.format(feed_forward)

    def _take_attention(self, number: int, prefix: str, layer: str) -> None:
        if self._model.latent_width:
            self._take_latent_projections(prefix, layer)
        elif self._model.gated_attention:
            self._take_gated_projections(prefix, layer)
        else:
            self._take_projections(number, prefix, layer)
        self._take_attention_output(number, prefix, layer)
        if self._model.head_norm or self._model.joint_norm:
            self._take_head_norms(number, prefix, layer)
        if self._model.attention_sinks:
            sinks = self._inventory.take(f"{layer}{self._name('sinks')}", self._model.query_heads)
            self.vectors[f"{prefix}.sinks"] = (sinks,)

    def _take_gated_projections(self, prefix: str, layer: str) -> None:
        """Take the projections of attention with a gate. The source has a head's gate behind its query."""
        model, orders = self._model, self._orders
        stored = self._weight(f"{layer}{self._name('query')}", 2 * model.query_width, model.width)
        of_heads = np.arange(2 * model.query_width, dtype=np.int64).reshape(model.query_heads, 2, model.head_width)
        queries, gates = of_heads[:, 0].reshape(-1), of_heads[:, 1].reshape(-1)
        order = orders.get("query")
        keys, values = (
            self._weight(f"{layer}{self._name(part)}", model.key_width, model.width) for part in ("key", "value")
        )
        self.matrices[f"{prefix}.qkv"] = (
            stored.selected(queries if order is None else queries[order]),
            keys.reordered(orders.get("key")),
            values,
            stored.selected(gates),
        )

    def _take_projections(self, number: int, prefix: str, layer: str) -> None:
        model, orders, heads = self._model, self._orders, self._model.layer_heads[number]
        rows = {"query": heads.query_width, "key": heads.key_width}
        rows |= {} if heads.value_from_key else {"value": heads.key_width}
        joined = self._names.query_key_value
        if joined is not None and (self._names.query is None or self._inventory.has(f"{layer}{joined}.weight")):
            rows = {"query_key_value": heads.qkv_rows}
        stored = {part: f"{layer}{getattr(self._names, part)}" for part in rows}
        self.matrices[f"{prefix}.qkv"] = tuple(
            self._weight(stored[part], rows[part], model.width).reordered(orders.get(part)) for part in rows
        )
        if model.qkv_bias:
            self.vectors[f"{prefix}.qkv.bias"] = tuple(
                self._bias(stored[part], rows[part]).as_column().reordered(orders.get(part)) for part in rows
            )

    def _take_latent_projections(self, prefix: str, layer: str) -> None:
        model, orders, heads = self._model, self._orders, self._model.query_heads
        down = self._weight(f"{layer}{self._name('latent_down')}", model.cached_width, model.width)
        self.matrices[f"{prefix}.latent_down"] = (down.reordered(orders.get("latent_down")),)
        norms = {"latent_norm": model.latent_width}
        if model.query_rank:
            query_down = self._weight(f"{layer}{self._name('query_down')}", model.query_rank, model.width)
            self.matrices[f"{prefix}.query_down"] = (query_down,)
            norms["query_down_norm"] = model.query_rank
        for name, length in norms.items():
            self.vectors[f"{prefix}.{name}"] = (self._weight(f"{layer}{self._name(name)}", length),)
        query = self._weight(f"{layer}{self._name('query')}", heads * model.head_width, model.query_rank or model.width)
        self.matrices[f"{prefix}.query"] = (query.reordered(orders.get("query")),)
        if self._names.latent_up is None:
            stack = self._stack(layer, "turned_key_up", model.latent_width, model.unrotated_width)
            self.matrices[f"{prefix}.key_up"] = tuple(matrix.turned() for matrix in stack)
            self.matrices[f"{prefix}.value_up"] = self._stack(layer, "value_up", model.value_width, model.latent_width)
            return
        rows = model.unrotated_width + model.value_width  # of one head: its keys, then its values
        joint = self._weight(f"{layer}{self._name('latent_up')}", heads * rows, model.latent_width)
        of_heads = np.arange(heads * rows, dtype=np.int64).reshape(heads, rows)
        keys, values = np.split(of_heads, [model.unrotated_width], axis=1)
        self.matrices[f"{prefix}.key_up"] = (joint.selected(keys.reshape(-1)),)
        self.matrices[f"{prefix}.value_up"] = (joint.selected(values.reshape(-1)),)

    def _stack(self, layer: str, field: str, rows: int, columns: int) -> tuple[StoredMatrix, ...]:
        return self._inventory.take_stack(f"{layer}{self._name(field)}.weight", self._model.query_heads, rows, columns)

    def _take_attention_output(self, number: int, prefix: str, layer: str) -> None:
        model, stored = self._model, f"{layer}{self._names.attention_output}"
        columns = model.layer_heads[number].query_width
        self.matrices[f"{prefix}.attention_output"] = (self._weight(stored, model.width, columns),)
        if model.output_bias:
            self.vectors[f"{prefix}.attention_output.bias"] = (self._bias(stored, model.width),)

    def _take_head_norms(self, number: int, prefix: str, layer: str) -> None:
        widths = norm_widths(self._model, self._model.layer_heads[number])
        for part, width in zip(("query", "key"), widths, strict=True):
            weights = self._weight(f"{layer}{self._name(f'{part}_norm')}", width).as_column()
            order = self._orders[part][:width] if part in self._orders else None
            self.vectors[f"{prefix}.{part}_norm"] = (weights.reordered(order).plus(self._norm_offset),)

    def _take_ffn(self, prefix: str, layer: str) -> None:
        neurons, width = self._model.neurons, self._model.width
        if self._model.experts > 1:
            self._take_router(prefix, layer)
        if self._names.joined_gate_up is not None:
            self._take_joined(prefix, layer, self._names.joined_gate_up)
            return
        if self._names.fused_experts is not None and self._inventory.has(f"{layer}{self._names.fused_experts[0]}"):
            self._take_fused(prefix, *(f"{layer}{name}" for name in self._names.fused_experts))
            return
        down = (neurons, width) if self._down_by_neuron else (width, neurons)
        shapes = {"gate": (neurons, width), "up": (neurons, width), "down": down}
        stored: dict[str, Sequence[StoredMatrix]] = {}
        if self._names.gate_up is not None:
            joined = self._take_experts(layer, self._names.gate_up, 2 * neurons, width)
            stored = {"gate": [rows.rows_from(0, neurons) for rows in joined]}
            stored["up"] = [rows.rows_from(neurons, neurons) for rows in joined]
        for matrix in self._model.ffn_matrices:
            tensors = stored.get(matrix) or self._take_experts(layer, self._name(matrix), *shapes[matrix])
            for expert, tensor in enumerate(tensors):
                self.matrices[ffn_name(self._model, prefix, expert, matrix)] = (tensor,)
        for matrix in self._model.ffn_matrices if self._model.ffn_bias else ():
            length = width if matrix == "down" else neurons
            self.vectors[f"{prefix}.{matrix}.bias"] = self._take_ffn_bias(layer, self._name(matrix), length)

    def _take_router(self, prefix: str, layer: str) -> None:
        model, router = self._model, f"{layer}{self._name('router')}"
        self.vectors[f"{prefix}.router"] = (self._weight(router, model.experts, model.width),)
        if model.router_bias:
            self.vectors[f"{prefix}.router.bias"] = (self._bias(router, model.experts),)
        if model.choosing_bias:
            self.vectors[f"{prefix}.router.choosing_bias"] = (self._row(layer, "choosing_bias", model.experts),)
        if model.router_norm:
            norm = self._row(layer, "router_norm", model.width)
            self.vectors[f"{prefix}.router_norm"] = (norm.times(model.width**-0.5),)
        if model.expert_scales:
            self.vectors[f"{prefix}.expert_scales"] = (self._row(layer, "expert_scales", model.experts),)
        if model.shared_gate:
            self.vectors[f"{prefix}.shared_gate"] = (self._row(layer, "shared_gate", model.width, ".weight"),)

    def _take_always_active(self, number: int, prefix: str, layer: str) -> None:
        """Take the experts of a layer that compute every token: parts of equal width of one feed-forward."""
        model, first = self._model, self._model.routed_experts(number)
        parts = model.expert_counts[number] - first
        if not parts:
            return
        pattern, key = (self._names.shared, "") if first else (self._names.dense, "intermediate_size of the ")
        assert pattern is not None
        stems = {
            matrix: pattern.format(matrix) if isinstance(pattern, str) else pattern[matrix]
            for matrix in model.ffn_matrices
        }
        names = {matrix: f"{layer}{stem}.weight" for matrix, stem in stems.items()}
        is_joined = model.gated and names["gate"] == names["up"]
        shape = self._inventory.shape(names["up"])
        neurons = shape[0] // (2 if is_joined else 1) if len(shape) == 2 else 0
        if -(-neurons // model.neurons) != parts:
            raise UserError(
                f"{self._inventory.file(names['up'])}: {safe_name(names['up'])}: has {neurons} neurons, but the "
                f"{key}configuration needs {(parts - 1) * model.neurons + 1} to {parts * model.neurons}"
            )
        for matrix, name in names.items():
            rows = 2 * neurons if is_joined else neurons
            whole = self._inventory.take(name, *((model.width, neurons) if matrix == "down" else (rows, model.width)))
            if is_joined and matrix != "down":
                whole = whole.rows_from(neurons if matrix == "up" else 0, neurons)
            for part in range(parts):
                cut = whole.column_part if matrix == "down" else whole.row_part
                stored = cut(part * model.neurons, model.neurons)
                self.matrices[ffn_name(model, prefix, first + part, matrix)] = (stored,)

    def _take_joined(self, prefix: str, layer: str, gate_up: str) -> None:
        joined = take_joined_experts(self._inventory, self._model, layer, gate_up, self._names.down)
        for matrix, experts in joined.matrices.items():
            for number, tensor in enumerate(experts):
                self.matrices[ffn_name(self._model, prefix, number, matrix)] = (tensor,)
        self.vectors |= {f"{prefix}.{matrix}.bias": parts for matrix, parts in joined.biases.items()}

    def _take_fused(self, prefix: str, gate_up: str, down: str) -> None:
        experts = take_fused_experts(self._inventory, self._model, gate_up, down, turned=self._names.turns_experts)
        for matrix, of_experts in experts.items():
            for number, rows in enumerate(of_experts):
                self.matrices[ffn_name(self._model, prefix, number, matrix)] = (rows,)

    def _take_norm(self, name: str, stored: str) -> None:
        width, names, (embedding, *_) = self._model.width, self._names, self.matrices["embedding"]
        weight = self._weight(stored, width).plus(self._norm_offset) if names.norm_weight else None
        self.vectors[name] = (weight or embedding.instead(width, 1),)
        if self._model.norm == "layer":
            bias = self._bias(stored, width) if names.norm_weight and names.norm_bias else None
            self.vectors[f"{name}.bias"] = (bias or embedding.instead(width, 0),)

    def _take_experts(self, layer: str, name: str, rows: int, columns: int) -> Sequence[StoredMatrix]:
        """Return the matrix [rows, columns] with this name of each expert of a layer."""
        experts = self._model.experts
        if self._names.stacked:
            return self._inventory.take_stack(f"{layer}{name}.weight", experts, rows, columns)
        parents = [self._names.expert.format(number) for number in range(experts)] if experts > 1 else [""]
        return [self._weight(f"{layer}{parent}{name}", rows, columns) for parent in parents]

    def _take_ffn_bias(self, layer: str, name: str, length: int) -> tuple[StoredMatrix, ...]:
        """Return the biases with this name of a layer's experts, one after the other."""
        experts = self._model.experts
        if self._names.stacked:
            return (self._inventory.take(f"{layer}{name}.bias", experts, length),)
        parents = [self._names.expert.format(number) for number in range(experts)] if experts > 1 else [""]
        return tuple(self._bias(f"{layer}{parent}{name}", length) for parent in parents)

    def _row(self, layer: str, field: str, length: int, ending: str = "") -> StoredMatrix:
        """Return a vector that may be stored as a matrix of one row."""
        name = f"{layer}{self._name(field)}{ending}"
        shape = (1, length) if len(self._inventory.shape(name)) == 2 else (length,)
        return self._inventory.take(name, *shape)

    def _weight(self, stored: str, *shape: int) -> StoredMatrix:
        return self._inventory.take(f"{stored}.weight", *shape)

    def _bias(self, stored: str, length: int) -> StoredMatrix:
        return self._inventory.take(f"{stored}.bias", length)

    def _name(self, field: str) -> str:
        """Return the source's name of a tensor that only some models have. field: its field of TensorNames."""
        name = getattr(self._names, field)
        assert name is not None, f"a family whose models have {field} names it"
        return str(name)

"""The sizes of attention's matrices and of the KV cache, which follow from the fields of a ModelSpec."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, NamedTuple

from neuronpipe.plans.models.recurrent_sizes import RecurrentSizes


class CachedVectors(NamedTuple):
    """The vectors that the KV cache has of a position in one layer: a key and a value of each key head, or a latent."""

    vectors: int
    width: int

    @property
    def elements(self) -> int:
        return self.vectors * self.width


class Heads(NamedTuple):
    """The heads of one layer.

    key_heads: heads of keys and values
    width: width of a query or key of one head
    value_width: width of a value of one head
    value_from_key: the field of LayerKind
    is_gated: the field `gated_attention` of ModelSpec
    """

    query_heads: int
    key_heads: int
    width: int
    value_width: int
    value_from_key: bool
    is_gated: bool

    @property
    def query_width(self) -> int:
        """Number of columns of attention_output."""
        return self.query_heads * self.value_width

    @property
    def key_width(self) -> int:
        """Number of rows of the key matrix; the value matrix, if any, has as many."""
        return self.key_heads * self.width

    @property
    def qkv_rows(self) -> int:
        """Number of rows of the query, key and value matrices together, and of the gate of attention's output."""
        return self.query_width * (2 if self.is_gated else 1) + (1 if self.value_from_key else 2) * self.key_width


class AttentionSizes(RecurrentSizes):
    """The part of ModelSpec that computes the sizes of attention. ModelSpec has the fields."""

    width: int
    query_heads: int
    key_heads: int
    head_width: int
    latent_width: int
    rotary_width: int
    value_width: int
    query_rank: int
    positions: Literal["rotary", "learned"]
    gated_attention: bool
    draft_layers: int
    layer_kinds: tuple[Any, ...]

    @cached_property
    def layer_heads(self) -> tuple[Heads, ...]:
        """The heads of each layer; those of the model in layers without attention."""
        return tuple(heads for kind in self.layer_kinds for heads in (self._heads(kind),) * kind.layers)

    def _heads(self, kind: Any) -> Heads:
        width = kind.head_width or self.head_width
        key_heads = kind.key_heads or self.key_heads
        value_width = self.value_width or width
        return Heads(self.query_heads, key_heads, width, value_width, kind.value_from_key, self.gated_attention)

    @property
    def do_heads_differ(self) -> bool:
        """True if a layer has other heads than the model's fields say."""
        fields = ("key_heads", "head_width", "value_from_key")
        return any(getattr(kind, field) for kind in self.layer_kinds for field in fields)

    @cached_property
    def query_width(self) -> int:
        """Number of columns of attention_output, at most in any layer."""
        return max(heads.query_width for heads in self.layer_heads)

    @cached_property
    def key_width(self) -> int:
        """Number of rows of the key matrix, at most in any layer."""
        return max(heads.key_width for heads in self.layer_heads)

    @cached_property
    def qkv_rows(self) -> int:
        """Number of rows of the query, key and value matrices together, and of the gate of attention's output, at most
        in any layer."""
        return max(heads.qkv_rows for heads in self.layer_heads)

    @cached_property
    def max_head_width(self) -> int:
        """The greatest width of a query, key or value of one head."""
        return max(max(heads.width, heads.value_width) for heads in self.layer_heads)

    @cached_property
    def attention_weights(self) -> int:
        """Number of weights of attention's matrices in all layers."""
        layers = zip(self.layer_heads, self.mixers, strict=True)
        attending = [heads for heads, mixer in layers if mixer == "attention"]
        if not self.latent_width:
            return self.width * sum(heads.qkv_rows + heads.query_width for heads in attending)
        of_latents = self.query_heads * (self.unrotated_width + self.value_width) * self.latent_width
        queries = self.query_heads * self.head_width * (self.query_rank or self.width)
        others = self.width * (self.cached_width + self.query_rank + self.query_width)
        return len(attending) * (of_latents + queries + others)

    @property
    def unrotated_width(self) -> int:
        """Number of a head's first elements, which are not rotated, in a model with latents."""
        return self.head_width - self.rotary_width

    @property
    def cached_width(self) -> int:
        """Width of a vector of the KV cache: of latent and rotated key together, or of a head as the model has it."""
        return self.latent_width + self.rotary_width if self.latent_width else self.head_width

    @cached_property
    def cached_vectors(self) -> tuple[CachedVectors, ...]:
        """The vectors of a position in the KV cache, for each layer."""
        if self.latent_width:
            return tuple(CachedVectors(int(mixer == "attention"), self.cached_width) for mixer in self.mixers)
        return tuple(
            CachedVectors(2 * heads.key_heads if mixer == "attention" else 0, heads.width)
            for heads, mixer in zip(self.layer_heads, self.mixers, strict=True)
        )

    @property
    def position_elements(self) -> int:
        """Number of elements of a position in the KV cache, in all layers."""
        return sum(vectors.elements for vectors in self.cached_vectors)

    def cached_before(self, layer: int) -> int:
        """Return the number of elements of a position in the KV cache of the layers before this one."""
        return sum(vectors.elements for vectors in self.cached_vectors[:layer])

    @property
    def heads_width(self) -> int:
        """Number of values of a token that the stages of a mixer exchange at most."""
        if self.latent_width:
            heads = self.query_heads * max(self.cached_width, self.value_width)
            return max(heads, self.cached_width + self.query_rank, self.recurrent_width)
        input_width = 2 * self.width if self.draft_layers else 0
        return max(self.query_width * (2 if self.gated_attention else 1), self.recurrent_width, input_width)

    def table_width(self, *, is_local: bool) -> int:
        """Return the width of the heads that one table of rotary positions rotates, or of their rotated part.

        is_local: the table is that of layers with local positions
        """
        kinds = [
            kind
            for kind in self.layer_kinds
            if kind.mixer == "attention" and kind.rotary and kind.local_positions == is_local
        ]
        return self.rotary_width or (self._heads(kinds[0]).width if kinds else self.head_width)

    def heads_fault(self) -> tuple[str, str] | None:
        """Return the field that contradicts the heads of a layer, and how; None if none does."""
        for heads in self.layer_heads:
            if self.positions == "rotary" and heads.width % 2 and not self.latent_width:
                return "head_width", f"{heads.width} is odd; rotary positions need pairs"
            if self.query_heads % heads.key_heads:
                return "query_heads", f"{self.query_heads} is no multiple of key_heads, {heads.key_heads}"
        for kind in self.layer_kinds:
            width = self.rotary_width or self._heads(kind).width
            if kind.mixer == "attention" and kind.rotary and width != self.table_width(is_local=kind.local_positions):
                return "layer_kinds", "layers with the same table of rotary positions have heads of one width"
        return None

    def latent_fault(self) -> tuple[str, str] | None:
        """Return the field that contradicts `latent_width`, and how; None if none does."""
        fields = ("rotary_width", "value_width", "query_rank")
        if not self.latent_width:
            return next(((field, "there are no latents") for field in fields if getattr(self, field)), None)
        if not 0 < self.rotary_width < self.head_width or self.rotary_width % 2:
            return "rotary_width", f"{self.rotary_width} of a head of {self.head_width}"
        if not self.value_width:
            return "value_width", "values have no width"
        if self.key_heads != 1 or self.positions != "rotary":
            return "latent_width", "latents need rotary positions and 1 key head"
        if self.do_heads_differ:
            return "layer_kinds", "layers with latents have the same heads"
        unsupported = ("head_norm", "joint_norm", "value_norm", "qkv_bias", "attention_sinks", "parallel")
        return next(((field, "not supported with latents") for field in unsupported if getattr(self, field)), None)

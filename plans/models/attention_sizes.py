"""The sizes of attention's matrices and of the KV cache, which follow from the fields of a ModelSpec."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NamedTuple


class CachedVectors(NamedTuple):
    """The vectors that the KV cache has of a position in one layer: a key and a value of each key head, or a latent."""

    count: int
    width: int

    @property
    def elements(self) -> int:
        return self.count * self.width


class AttentionSizes:
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
    layers: int
    mixers: tuple[str, ...]
    gated_attention: bool
    recurrent_width: int

    @property
    def query_width(self) -> int:
        """Number of columns of attention_output."""
        return self.query_heads * (self.value_width or self.head_width)

    @property
    def key_width(self) -> int:
        """Number of rows of the key matrix; the value matrix has as many."""
        return self.key_heads * self.head_width

    @property
    def qkv_rows(self) -> int:
        """Number of rows of the query, key and value matrices together, and of the gate of attention's output."""
        return self.query_width * (2 if self.gated_attention else 1) + 2 * self.key_width

    @property
    def attention_weights(self) -> int:
        """Number of weights of attention's matrices in one layer."""
        if not self.latent_width:
            return self.width * 2 * (self.query_width + self.key_width)
        of_latents = self.query_heads * (self.unrotated_width + self.value_width) * self.latent_width
        queries = self.query_heads * self.head_width * (self.query_rank or self.width)
        return of_latents + queries + self.width * (self.cached_width + self.query_rank + self.query_width)

    @property
    def unrotated_width(self) -> int:
        """Number of a head's first elements, which are not rotated, in a model with latents."""
        return self.head_width - self.rotary_width

    @property
    def cached_width(self) -> int:
        """Width of a vector of the KV cache: of a head's key or value, or of latent and rotated key together."""
        return self.latent_width + self.rotary_width if self.latent_width else self.head_width

    @cached_property
    def cached_vectors(self) -> tuple[CachedVectors, ...]:
        """The vectors of a position in the KV cache, for each layer."""
        count = 1 if self.latent_width else 2 * self.key_heads
        counts = (count if mixer == "attention" else 0 for mixer in self.mixers)
        return tuple(CachedVectors(count, self.cached_width) for count in counts)

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
            return max(heads, self.cached_width + self.query_rank)
        return max(self.query_width * (2 if self.gated_attention else 1), self.recurrent_width)

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
        unsupported = ("head_norm", "joint_norm", "qkv_bias", "attention_sinks", "parallel")
        return next(((field, "not supported with latents") for field in unsupported if getattr(self, field)), None)

"""The shapes that can be made, and how the coordinates of their residual stream are divided."""

from __future__ import annotations

from dataclasses import dataclass

from neuronpipe.plans.models.spec import LayerKind, ModelSpec

GROUP = 32


def _shape(
    width: int,
    neurons: int,
    layers: int,
    heads: tuple[int, int, int],
    vocabulary: int,
    context: int,
    experts: tuple[int, int] = (1, 1),
) -> ModelSpec:
    """experts: of a layer, and how many compute a token."""
    query_heads, key_heads, head_width = heads
    return ModelSpec(
        family="llama",
        width=width,
        neurons=neurons,
        experts=experts[0],
        experts_per_token=experts[1],
        layer_kinds=(LayerKind(layers),),
        query_heads=query_heads,
        key_heads=key_heads,
        head_width=head_width,
        vocabulary=vocabulary,
        context_tokens=context,
        norm_epsilon=1e-5,
        activation="drelu",
    )


SHAPES = {
    "turbosparse-mistral-7b": _shape(4096, 14336, 32, (32, 8, 128), 32000, 4096),
    "turbosparse-1b": _shape(2048, 7168, 20, (16, 4, 128), 32000, 4096),
    "turbosparse-mixtral-47b": _shape(4096, 14336, 32, (32, 8, 128), 57024, 4096, (8, 2)),
    "turbosparse-mixtral-2b": _shape(1024, 3584, 20, (16, 4, 64), 32000, 4096, (8, 2)),
    "turbosparse-100m": _shape(768, 2688, 12, (12, 3, 64), 8000, 4096),
}


@dataclass(frozen=True)
class Coordinates:
    """Ranges of the residual stream's coordinates, whole quantization groups each.

    steady: the same value in every token, which the rows of neurons use as their bias. identity: the token's own code,
    read by the output only. attention, feed_forward: written by the layers. state: where the trajectory moves.
    """

    steady: slice
    identity: slice
    attention: slice
    feed_forward: slice
    state: slice

    @property
    def state_width(self) -> int:
        """Coordinates of the state."""
        return int(self.state.stop - self.state.start)


def coordinates(width: int) -> Coordinates:
    """How a stream of this width is divided."""
    # Codes of n coordinates for v tokens overlap by at most about sqrt(2 ln v / n): a third is far from the next id.
    identity = 256 if width >= 2048 else 192
    written = max(GROUP, rank_of(width) // 8 // GROUP * GROUP)
    bounds = [0, GROUP]
    for size in (identity, written, 2 * written):
        bounds.append(bounds[-1] + size)
    return Coordinates(*(slice(a, b) for a, b in zip(bounds, [*bounds[1:], width], strict=True)))


def rank_of(width: int) -> int:
    """Rank of the shape's predictor: 352 for the published width, in proportion for its siblings."""
    return max(2, int(width * 352 / 4096 / GROUP + 0.5)) * GROUP

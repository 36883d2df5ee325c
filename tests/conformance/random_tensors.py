"""Random tensors that are the same everywhere.

The numbers come from PCG64's raw stream, which numpy promises never to change, by exact integer arithmetic. The scales
make logits of order 10 and attention that looks around.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tests.conformance.recipes import Recipe

Array = NDArray[np.float32]


def random_tensor(generator: np.random.PCG64, shape: tuple[int, ...], deviation: float) -> Array:
    """Nearly normal: the sum of the four 16-bit quarters of a raw 64-bit number, centred."""
    raw = generator.random_raw(int(np.prod(shape)))
    quarters = raw.astype("<u8").view("<u2").reshape(-1, 4)
    # Several times as fast as numpy's sum along so short an axis.
    sums = quarters[:, 0].astype(np.int64) + quarters[:, 1] + quarters[:, 2] + quarters[:, 3]
    unit = (sums - 2 * 65535) / 37837.2  # the deviation of such a sum
    return (unit * deviation).astype(np.float32).reshape(shape)


def rounded(values: Array, dtype: str) -> Array:
    """The values as the dtype stores them, ties to even. All survive f16: there only the arithmetic can differ."""
    if dtype in ("F32", "F16"):
        return values.astype(np.float16).astype(np.float32)
    return (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)


def bfloat16_bits(values: Array) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Maker:
    """Random tensors of a recipe, one after the other."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._generator = recipe, np.random.PCG64(recipe.seed)

    def made(self, name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        values = random_tensor(self._generator, shape, deviation) + np.float32(centre)
        return name, rounded(values, self._recipe.dtype)

    def linear(self, name: str, rows: int, columns: int, gain: float) -> tuple[str, Array]:
        return self.made(f"{name}.weight", (rows, columns), gain * columns**-0.5)

    def norm(self, name: str, length: int = 0) -> tuple[str, Array]:
        return self.made(f"{name}.weight", (length or self._recipe.width,), 0.1, 1.0)

    def mamba(
        self, name: str, heads: int, head: int, state: int, groups: int, tokens: int
    ) -> Iterator[tuple[str, Array]]:
        """Memories decay so slowly that tokens far away count."""
        inner, channels, width = heads * head, heads * head + 2 * groups * state, self._recipe.width
        yield self.linear(f"{name}.in_proj", inner + channels + heads, width, 1.3)
        yield self.made(f"{name}.conv1d.weight", (channels, 1, tokens), 0.5)
        yield self.made(f"{name}.conv1d.bias", (channels,), 0.3)
        yield self.made(f"{name}.A_log", (heads,), 1.0, -2.0)
        yield self.made(f"{name}.D", (heads,), 0.5, 0.5)
        yield self.made(f"{name}.dt_bias", (heads,), 0.7, -1.5)
        yield self.norm(f"{name}.norm", inner)
        yield self.linear(f"{name}.out_proj", width, inner, 0.7)

    def attention(self, name: str, output: str = "o_proj") -> Iterator[tuple[str, Array]]:
        recipe = self._recipe
        for part, heads in (("q", recipe.query_heads), ("k", recipe.key_heads), ("v", recipe.key_heads)):
            yield self.linear(f"{name}.{part}_proj", heads * recipe.head_width, recipe.width, 1.3)
        yield self.linear(f"{name}.{output}", recipe.width, recipe.query_heads * recipe.head_width, 0.7)

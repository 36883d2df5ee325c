"""The predictors in a model's source files."""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.convert.stored_tensors import Inventory, StoredMatrix
from neuronpipe.plans.models.family import TensorNames
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.manifest import MAX_RANK
from neuronpipe.protocol.errors import UserError, quoted, safe_name
from neuronpipe.protocol.frozen import frozen


@frozen
class SourcePredictors:
    """Predictors in a source. Scores are second . relu(first . x), with x the residual stream before the feed-forward's
    norm.

    first: for each feed-forward, in the order of `ModelSpec.places`, the matrix fc1 [rank, width]
    second: likewise fc2 [neurons, rank]
    threshold: a neuron is predicted if its score is at least this; None: if its score is above 0
    """

    first: tuple[StoredMatrix, ...]
    second: tuple[StoredMatrix, ...]
    threshold: float | None

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(matrix.rows for matrix in self.first)

    @property
    def bias(self) -> np.float32:
        """Number to add to scores, so that exactly the predicted neurons have positive scores."""
        if self.threshold is None:
            return np.float32(0)
        return max(np.nextafter(np.float32(-self.threshold), np.float32(np.inf)), np.finfo(np.float32).tiny, key=abs)


def take_predictors(
    inventory: Inventory, model: ModelSpec, names: TensorNames, *, enabled: bool, threshold: float | None = None
) -> SourcePredictors | None:
    """Return the predictors of a source; None if it has none, if they are not `enabled`, or if every neuron fires.

    Raises UserError, which names file and tensor, if one is missing or does not fit the model.

    threshold: the field of SourcePredictors
    """
    if names.predictor is None:
        return None
    within = [
        f"{names.layer.format(layer)}{names.expert.format(expert) if model.experts > 1 else ''}"
        for layer, expert in model.places
    ]
    stored = [tuple(f"{place}{names.predictor.format(matrix)}.weight" for matrix in (1, 2)) for place in within]
    present = [name for pair in stored for name in pair if inventory.has(name)]
    if not present:
        return None
    if not enabled or model.all_neurons_fire:
        for name in present:
            inventory.leave(name)
        return None
    pairs = [_take_predictor(inventory, model, first, second) for first, second in stored]
    return SourcePredictors(tuple(first for first, _ in pairs), tuple(second for _, second in pairs), threshold)


def _take_predictor(
    inventory: Inventory, model: ModelSpec, first: str, second: str
) -> tuple[StoredMatrix, StoredMatrix]:
    shapes = [inventory.shape(name) for name in (first, second)]
    rank = shapes[0][0] if len(shapes[0]) == 2 else 0
    for name, actual, expected in (
        (first, shapes[0], (rank, model.width)),
        (second, shapes[1], (model.neurons, rank)),
    ):
        if not 0 < rank <= MAX_RANK or actual != expected:
            raise UserError(
                f"{inventory.file(name)}: {safe_name(name)}: has shape {quoted(list(actual))}; a predictor's fc1 is "
                f"[rank, {model.width}] and its fc2 [{model.neurons}, rank], and fc1 has rank {rank}; "
                "`--no-predictor` converts without predictors"
            )
    return inventory.take(first, rank, model.width), inventory.take(second, model.neurons, rank)

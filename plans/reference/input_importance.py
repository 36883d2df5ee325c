"""Measures the importance of the columns of a checkpoint's matrices on a calibration text, before its conversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from neuronpipe.plans.convert.checkpoint import Checkpoint
from neuronpipe.plans.convert.importance import ByColumn, Importance
from neuronpipe.plans.package.tokenizer import open_tokenizer
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.plans.reference.weights import Array, CheckpointWeights
from neuronpipe.protocol.errors import UserError

CALIBRATION_TOKENS = 4096
MIN_CALIBRATION_TOKENS = 64
WINDOW_TOKENS = 512

Progress = Callable[[int, int], None]
"""Is called with the number of computed tokens and of all tokens. A layer's token is a fraction of a token."""


def measure_importance(checkpoint: Checkpoint, text: str, origin: str, progress: Progress) -> Importance:
    """Return the importance of columns, measured on the first CALIBRATION_TOKENS tokens of a text. Raises UserError if
    the text is too short, or for errors of the checkpoint.

    origin: name of the text
    """
    windows = calibration_windows(checkpoint, text, origin)
    tokens, layers = sum(map(len, windows)), checkpoint.model.layers
    squares: dict[str, ByColumn] = {}

    def add(matrix: str, inputs: Array) -> None:
        squares[matrix] = np.square(inputs, dtype=np.float64).mean(axis=0).astype(np.float32)

    def attended(layer: int, count: int) -> None:
        progress((layer * tokens + count) // layers, tokens)

    engine = ReferenceEngine(CheckpointWeights(checkpoint), observe_inputs=add, attended=attended)
    hidden, _ = engine.hidden(windows)
    if not checkpoint.model.tied_embeddings:
        add("output", engine.output_inputs(hidden))
    return Importance.of(squares, origin)


def calibration_windows(checkpoint: Checkpoint, text: str, origin: str) -> Sequence[Sequence[int]]:
    """Return context windows of the first CALIBRATION_TOKENS tokens of a text. Raises UserError, which starts with
    `origin`, if the text is too short."""
    tokenizer = open_tokenizer(checkpoint.tokenizer, f"{checkpoint.source.name}: tokenizer")
    ids = tokenizer.encode(text).ids[:CALIBRATION_TOKENS]
    if len(ids) < MIN_CALIBRATION_TOKENS:
        raise UserError(f"{origin}: {len(ids)} tokens; calibration needs {MIN_CALIBRATION_TOKENS} or more")
    length = min(WINDOW_TOKENS, checkpoint.model.context_tokens)
    return [ids[first : first + length] for first in range(0, len(ids), length)]

"""A package of about 400 MB with random weights, written in seconds: no checkpoint is converted, bytes are drawn."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from neuronpipe.plans.models.spec import LayerKind, ModelSpec
from neuronpipe.plans.package.layout import Quantization, compute_layout, quant_bytes, scale_bytes
from neuronpipe.plans.package.manifest import Manifest, Source
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.tensors import fixed_matrices, fixed_vectors
from neuronpipe.plans.package.writer import PackageWriter, Rows

from tests.conformance.checkpoints import tokenizer

QUANTIZATION: Quantization = "q4"
SHAPE = ModelSpec(
    family="llama", width=2048, neurons=5504, layer_kinds=(LayerKind(16),), query_heads=16, key_heads=2, head_width=128,
    vocabulary=509, context_tokens=256, norm_epsilon=1e-5, activation="relu",
)  # fmt: skip
NIBBLES = np.arange(1, 16, dtype=np.uint8)  # -7 to 7: no mean that would grow from layer to layer
PAIRS = (NIBBLES | NIBBLES[:, None] << 4).reshape(-1)
DEVIATION = 4.32
FILE_BLOCK_ROWS = 1376


def write_large_package(target: Path, *, neurons: int = SHAPE.neurons) -> Package:
    """Write it: about 330 MB of neurons, unless a layer has fewer, and 86 MB of everything else."""
    model = dataclasses.replace(SHAPE, neurons=neurons)
    block_rows = min(neurons, FILE_BLOCK_ROWS)
    draw = np.random.default_rng(5)
    manifest = Manifest(
        name="large", source=Source("huggingface", "random", "LlamaForCausalLM"), model=model,
        quantization=QUANTIZATION, end_tokens=(), files={}, quantization_error={}, fired_by_layer=None,
        layout=compute_layout(QUANTIZATION, model.width, model.neurons, model.ffn_matrices, "source"),
    )  # fmt: skip

    def rows(count: int, columns: int, gain: float = 1.0) -> Rows:
        scale = np.float16(gain * columns**-0.5 / DEVIATION)
        quants = PAIRS[draw.integers(0, len(PAIRS), (count, quant_bytes(QUANTIZATION, columns)), dtype=np.uint8)]
        scales = np.full((count, scale_bytes(QUANTIZATION, columns) // 2), scale).view(np.uint8)
        return Rows(quants, scales)

    with PackageWriter(target, manifest, overwrite=False) as writer:
        for name, length in fixed_vectors(model):
            turns = 10_000.0 ** -np.linspace(0, 1, length, endpoint=False)
            writer.vector(name, (turns if name.startswith("rope") else np.ones(length)).astype(np.float32))
        for name, count, columns in fixed_matrices(model):
            gain = {"embedding": columns**0.5, "output": 5.0}.get(name, 1.0)
            writer.matrix(name, rows(count, columns, gain))
        for _ in range(model.layers):
            for _ in range(model.neurons // block_rows):
                gate, up, down = (rows(block_rows, model.width) for _ in range(3))
                writer.neurons(gate, up, down)
        writer.complete(tokenizer(model.vocabulary).to_str().encode(), {})
        return writer.publish()

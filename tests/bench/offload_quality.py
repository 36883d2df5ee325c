"""The loss of decode steps whose offloaded blocks a runtime's graphs compute (backend onnx), on the demo.

    python -m tests.bench.offload_quality cpu|qnn-emulated q8|q4 TEXTS TOKENS 1,2,3,4

Prints a JSON line for each number of tokens in a step: the change of loss in nats per token against the engine's own
kernels in exact mode, the share of positions with the same likeliest token, the number of recomputed products, and the
processor time of a step. It runs on the held-out texts of plans.demo.corpus with all blocks offloaded, so that
predicted mode has the same bits.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.convert.quantize import encode
from neuronpipe.plans.demo.corpus import documents
from neuronpipe.plans.package.layout import compute_layout
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.tensors import fixed_matrices, fixed_vectors
from neuronpipe.plans.package.writer import PackageWriter
from neuronpipe.plans.reference.weights import PackageWeights
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer
from neuronpipe.services.offload.block_weights import offloaded_weights
from neuronpipe.services.offload.npu.offloaded_blocks import OffloadedProducts
from neuronpipe.services.offload.npu.providers import Provider, provider_of
from neuronpipe.services.offload.npu.sessions import Runtime
from numpy.typing import NDArray

from tests.conformance.participants import Participants


def losses(logits: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float64]:
    """Return the nats of each token but the first."""
    rows = logits[:-1].astype(np.float64)
    spread = np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)) + rows.max(axis=1)
    nats: NDArray[np.float64] = spread - rows[np.arange(len(rows)), tokens[1:]]
    return nats


def in_q4(package: Package, target: Path) -> Package:
    """Write the package's weights again in q4, without a predictor."""
    source, weights = package.manifest, PackageWeights(package)
    model = source.model
    layout = compute_layout("q4", model.width, model.neurons, model.ffn_matrices, "source", read_whole=model.read_whole)
    manifest = Manifest(
        name="demo-q4", source=source.source, model=model, quantization="q4", end_tokens=source.end_tokens,
        layout=layout, files={}, quantization_error={}, fired_by_layer=None,
    )  # fmt: skip
    with PackageWriter(target, manifest, overwrite=False) as writer:
        for name, _ in fixed_vectors(model):
            writer.vector(name, weights.vector(name))
        for name, *_ in fixed_matrices(model):
            writer.matrix(name, encode("q4", weights.matrix(name)))
        for layer in range(model.layers):
            writer.neurons(*(encode("q4", rows) for rows in weights.neurons(layer, 0)))
        writer.complete(package.tokenizer(), {})
        return writer.publish()


def main(provider: str, quantization: str, count: int, length: int, chunks: list[int]) -> None:
    """Measure the demo, in its own quantization or in q4, and print the report."""
    with tempfile.TemporaryDirectory() as folder:
        package = Package.open(DEMO)
        package = in_q4(package, Path(folder) / "q4") if quantization == "q4" else package
        _measure(package, provider_of(provider), count, length, chunks)


def _measure(package: Package, chosen: Provider, count: int, length: int, chunks: list[int]) -> None:
    layout, tokenizer = package.manifest.layout, FileTokenizer(package.tokenizer())
    encoded = (tokenizer.encode(sequence)[:length] for sequence in documents(held_out=True))
    sequences = list(itertools.islice((sequence for sequence in encoded if len(sequence) == length), count))
    offloaded = OffloadedProducts(
        package.manifest, Runtime(chosen).session, blocks=layout.blocks, lengths=chosen.offload_graph_tokens
    )
    for weights in offloaded_weights(package, layout.blocks):
        offloaded.load(weights)
    alone = Participants(package, count=1, max_tokens=1)
    exact = [alone.run(sequence, 1) for sequence in sequences]
    loss = np.concatenate([losses(rows, sequence) for rows, sequence in zip(exact, sequences, strict=True)])
    for chunk in chunks:
        participants = Participants(package, count=2, max_tokens=chunk, holder=offloaded)
        offloaded.clear_counters()
        began = time.process_time()
        outputs = [
            participants.run(sequence, chunk, lambda _: [(layout.blocks,) * 2, (0, layout.blocks)])
            for sequence in sequences
        ]
        took_ms = 1e3 * (time.process_time() - began) / (len(sequences) * -(-length // chunk))
        change = (
            np.concatenate([losses(rows, sequence) for rows, sequence in zip(outputs, sequences, strict=True)]) - loss
        )
        is_same = np.mean([a.argmax(1) == b.argmax(1) for a, b in zip(outputs, exact, strict=True)])
        report = {
            "tokens_of_step": chunk,
            "loss": round(float(loss.mean()), 4),
            "change": round(float(change.mean()), 5),
            "error": round(float(change.std() / np.sqrt(len(change))), 5),
            "same_likeliest": round(float(is_same), 4),
            "recomputed": offloaded.counters()["recomputed_tokens"],
            "products": len(sequences) * length * package.manifest.model.layers,
            "step_cpu_ms": round(took_ms, 1),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), [int(n) for n in sys.argv[5].split(",")])

"""What decode steps lose whose blocks a runtime's graphs compute (backend onnx of an accelerator), on the demo.

    python -m tests.bench.held_quality cpu|qnn-emulated q8|q4 TEXTS TOKENS 1,2,3,4

One JSON line for each number of tokens in a step: change of loss in nats a token against the engine's own kernels in
mode exact, share of positions with the same likeliest token, products computed again, processor time of a step. The
held-out texts of plans.demo.corpus, all blocks held: so in mode predicted the bits are the same.
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
from neuronpipe.services.offload.block_weights import held_weights
from neuronpipe.services.offload.npu.offloaded_blocks import HeldProducts
from neuronpipe.services.offload.npu.providers import Provider, provider_of
from neuronpipe.services.offload.npu.sessions import Runtime
from numpy.typing import NDArray

from tests.conformance.participants import Participants


def losses(logits: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float64]:
    """Nats of each token but the first."""
    rows = logits[:-1].astype(np.float64)
    spread = np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)) + rows.max(axis=1)
    found: NDArray[np.float64] = spread - rows[np.arange(len(rows)), tokens[1:]]
    return found


def in_q4(package: Package, target: Path) -> Package:
    """The same weights, rounded again. Without a predictor."""
    given, weights = package.manifest, PackageWeights(package)
    model = given.model
    layout = compute_layout("q4", model.width, model.neurons, model.ffn_matrices, "source", read_whole=model.read_whole)
    manifest = Manifest(
        name="demo-q4", source=given.source, model=model, quantization="q4", end_tokens=given.end_tokens,
        layout=layout, files={}, quantization_error={}, fired_by_layer=None,
    )  # fmt: skip
    with PackageWriter(target, manifest, overwrite=False) as writer:
        for name, _ in fixed_vectors(model):
            writer.vector(name, weights.vector(name))
        for name, *_ in fixed_matrices(model):
            writer.matrix(name, encode("q4", weights.matrix(name)))
        for layer in range(model.layers):
            writer.neurons(*(encode("q4", rows) for rows in weights.neurons(layer, 0)))
        writer.complete(package.tokenizer().encode(), {})
        return writer.publish()


def main(provider: str, quantization: str, texts: int, length: int, chunks: list[int]) -> None:
    """Print the report."""
    with tempfile.TemporaryDirectory() as folder:
        package = Package.open(DEMO)
        package = in_q4(package, Path(folder) / "q4") if quantization == "q4" else package
        _measure(package, provider_of(provider), texts, length, chunks)


def _measure(package: Package, chosen: Provider, texts: int, length: int, chunks: list[int]) -> None:
    layout, tokenizer = package.manifest.layout, FileTokenizer(package.tokenizer())
    encoded = (tokenizer.encode(text)[:length] for text in documents(held_out=True))
    wanted = list(itertools.islice((text for text in encoded if len(text) == length), texts))
    holder = HeldProducts(package.manifest, Runtime(chosen).session, blocks=layout.blocks, lengths=chosen.held_tokens)
    for weights in held_weights(package, layout.blocks):
        holder.load(weights)
    alone = Participants(package, count=1, max_tokens=1)
    exact = [alone.run(text, 1) for text in wanted]
    loss = np.concatenate([losses(rows, text) for rows, text in zip(exact, wanted, strict=True)])
    for chunk in chunks:
        both = Participants(package, count=2, max_tokens=chunk, holder=holder)
        holder.clear_counters()
        began = time.process_time()
        found = [both.run(text, chunk, lambda _: [(layout.blocks,) * 2, (0, layout.blocks)]) for text in wanted]
        took_ms = 1e3 * (time.process_time() - began) / (len(wanted) * -(-length // chunk))
        change = np.concatenate([losses(rows, text) for rows, text in zip(found, wanted, strict=True)]) - loss
        same = np.mean([a.argmax(1) == b.argmax(1) for a, b in zip(found, exact, strict=True)])
        report = {
            "tokens_of_step": chunk,
            "loss": round(float(loss.mean()), 4),
            "change": round(float(change.mean()), 5),
            "error": round(float(change.std() / np.sqrt(len(change))), 5),
            "same_likeliest": round(float(same), 4),
            "recomputed": holder.counters()["recomputed_tokens"],
            "products": len(wanted) * length * package.manifest.model.layers,
            "step_cpu_ms": round(took_ms, 1),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), [int(n) for n in sys.argv[5].split(",")])

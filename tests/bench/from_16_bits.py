"""Compare packages of a model in 16 bits with its package in f16, and with llama.cpp's Q4_K_M and an imatrix.

    python tests/bench/from_16_bits.py FILE.gguf --llama FOLDER --work FOLDER [--tokens N]

FILE.gguf is a quantized model of Llama's or Qwen's kind; its counterpart in 16 bits is written first
(plain_counterpart.py). Texts are prose and code of Python's own; the calibration text is other prose and code, the same
for both programs. The work folder needs eight times the file's size.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from pydoc_data import topics

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.conversion import open_checkpoint
from neuronpipe.plans.convert.imatrix_file import LAYER_MATRICES
from neuronpipe.plans.reference.engine import LayerRun, ReferenceEngine
from neuronpipe.plans.reference.input_importance import calibration_windows
from neuronpipe.plans.reference.weights import CheckpointWeights

from tests.bench.llama_library import LlamaLibrary
from tests.bench.plain_counterpart import write_plain_counterpart
from tests.bench.quantizations import answer, own_texts

CONTEXT_TOKENS = 512
CALIBRATION_CHARACTERS = 9000  # of each source


def write_calibration_text(path: Path) -> None:
    """Write prose and code that the measured texts do not contain."""
    prose = "\n".join(topics.topics.values())
    middle = len(prose) // 2
    code = Path(difflib.__file__).read_text("utf-8")[:CALIBRATION_CHARACTERS]
    path.write_text(prose[middle : middle + CALIBRATION_CHARACTERS] + code, "utf-8")


def imatrix(source: Path, text: str) -> dict[str, NDArray[np.float32]]:
    """Return the mean squares of the inputs of all matrices of the layers, those of Down included, by GGUF's names."""
    squares: dict[str, NDArray[np.float32]] = {}

    def add(name: str, inputs: NDArray[np.float32]) -> None:
        _, layer, matrix = name.split(".")
        mean = np.square(inputs, dtype=np.float64).mean(axis=0).astype(np.float32)
        for stored, own in (*LAYER_MATRICES.items(), ("ffn_down", "down")):
            if own == matrix:
                squares[f"blk.{layer}.{stored}.weight"] = mean

    def add_down(run: LayerRun) -> None:
        add(f"layers.{run.layer}.down", run.inner)

    with open_checkpoint(source, Options()) as checkpoint:
        windows = calibration_windows(checkpoint, text, "calibration")
        engine = ReferenceEngine(CheckpointWeights(checkpoint), observe=add_down, observe_inputs=add)
        engine.hidden(windows)
    return squares


def divergences(exact: Path, other: Path) -> NDArray[np.float64]:
    """Return the Kullback-Leibler divergence of each prediction, in nats, from two files of logits."""
    result = []
    for expected, actual in zip(np.load(exact, mmap_mode="r"), np.load(other, mmap_mode="r"), strict=True):
        p, q = _log_probabilities(expected), _log_probabilities(actual)
        result.append(float((np.exp(p) * (p - q)).sum()))
    return np.array(result)


def _log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def main() -> None:
    """Print a line for each package and file, and text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    work, tokens = arguments.work, arguments.tokens
    plain, calibration, texts = work / "plain.gguf", work / "calibration", own_texts(work)
    write_calibration_text(calibration)
    if not plain.exists():
        write_plain_counterpart(arguments.file, plain)
    llama = LlamaLibrary(arguments.llama)
    for name, squares in (("Q4_K_M", None), ("Q4_K_M with imatrix", imatrix(plain, calibration.read_text("utf-8")))):
        llama.requantize(plain, quantized := work / "llama.gguf", "Q4_K_M", squares)
        for text in texts:
            perplexity, _ = llama.perplexity(
                quantized, text.read_text("utf-8"), context_tokens=CONTEXT_TOKENS, max_tokens=tokens
            )
            print(f"llama.cpp {name}, {quantized.stat().st_size} bytes, {text.name}: {perplexity:.4f}", flush=True)
    packages: dict[str, tuple[str | Path, ...]] = {
        "f16": ("--quantization", "f16"),
        "default": (),
        "calibrated": ("--calibrate", calibration),
    }
    limits = ("--tokens", str(tokens), "--context", str(CONTEXT_TOKENS), "--path", "prefill")
    for name, options in packages.items():
        package = answer("convert", plain, "-o", work / name, *options, "--overwrite")
        for text in texts:
            logits = work / f"{name}-{text.name}.npy"
            scored = answer("perplexity", work / name, "--text", text, *limits, "--output", logits)
            line = f"package {name}, {package['bytes']} bytes, {text.name}: {float(str(scored['perplexity'])):.4f}"
            if name != "f16":
                loss = divergences(work / f"f16-{text.name}.npy", logits)
                line += f", divergence {loss.mean():.4f} in the mean, {np.median(loss):.5f} in the median"
            print(line, flush=True)


if __name__ == "__main__":
    main()

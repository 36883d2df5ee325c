"""What `neuronpipe models` expects, beside `bench`, for each model of the catalog.

    python -m tests.bench.catalog [--models A,B] [--folder DIR] [--table]

`models` is asked first, for this machine and all of its memory. Then each package is made as `pull` would make it, from
a synthetic GGUF of the published encodings, or, where the catalog has a checkpoint in 16 bits, as a synthetic package.
A `bench` under the same limit and context follows, and the package is removed. The rows are in FOLDER/catalog.jsonl.
Started again, the command measures what is missing. Nothing else may run during a `bench`.

Synthetic packages never share the embedding and the output matrix, so small ones are larger than the published models.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from neuronpipe.launch.verbs.packages.synth import GGUF_PRESETS
from neuronpipe.plans.pull.catalog import CatalogModel, catalog
from neuronpipe.protocol.errors import UserError

from tests.bench.ablations import bench
from tests.bench.mixtures import remove
from tests.bench.planned import Row, add_line, done_cell, read_lines, table_line

SYNTH_NAMES = {"turbosparse-7b": "turbosparse-mistral-7b", "turbosparse-47b": "turbosparse-mixtral-47b"}
"""Shapes that `synth` calls otherwise than the catalog."""
PROMPT_TOKENS = 512  # as `models` expects
TARGET = 0.25  # error of a speed
COMMAND = (sys.executable, "-m", "neuronpipe.launch")
HEADS = (
    *("model", "planned, GB", "tokens/s expected (range)", "measured", "error"),
    *("first token of 512, s, expected", "measured", "error"),
)


def run(*words: str) -> str:
    """Return what a command prints. Raises UserError with the last line of its errors."""
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True)
    if done.returncode:
        raise UserError((done.stderr.strip().splitlines() or [f"{words[0]} failed"])[-1])
    return done.stdout


def expectations(folder: Path) -> dict[str, Any]:
    """Return the document of `models`, which is asked once."""
    file = folder / "models.json"
    if not file.exists():
        file.write_text(run("models", "--json"), encoding="utf-8")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def made_package(model: CatalogModel, folder: Path) -> Path:
    """Make the package of a model, and return it. Raises UserError."""
    shape, package, gguf = SYNTH_NAMES.get(model.name, model.name), folder / model.name, folder / f"{model.name}.gguf"
    if package.exists():
        return package
    if model.file_type in GGUF_PRESETS:
        run("synth", shape, "--gguf", str(gguf), "--quantization", model.file_type)
        run("convert", str(gguf), "-o", str(package))
        remove(gguf)
    else:
        run("synth", shape, "-o", str(package))
    os.sync()  # else the bench would run while these files are being written
    return package


def measure(models: Iterable[CatalogModel], folder: Path) -> None:
    """Measure what FOLDER/catalog.jsonl lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    document, rows = expectations(folder), folder / "catalog.jsonl"
    expected = {entry["name"]: entry for entry in document["models"]}
    for model in models:
        key = {"model": model.name}
        if done_cell(read_lines(rows), key) is not None:
            continue
        print(f"{model.name} ...", file=sys.stderr, flush=True)
        limits = ("--memory", str(document["memory_bytes"]), "--context", str(document["context_tokens"]))
        tests = ("--tests", f"pp{PROMPT_TOKENS},tg96", "--repetitions", "1", "--mode", document["mode"])
        package = made_package(model, folder)
        result = bench(package, (*limits, *tests))
        if not isinstance(result, str):
            prompt, decode = result
            result = [{**decode, "prompt": prompt, "expected": expected.get(model.name)}]
        line = add_line(rows, key, result)
        remove(package)
        if line["refused"]:
            print(f"refused: {line['refused']}", file=sys.stderr)


def markdown(lines: Iterable[Row]) -> str:
    """Return the table, and how many speeds are within the target."""
    text, errors = [table_line(HEADS), "|---" * len(HEADS) + "|"], []
    for line in lines:
        row = line["row"]
        if row is None or row["expected"] is None:
            text.append(table_line((line["asked"]["model"], "refused" if row is None else "not offered", *["-"] * 6)))
            continue
        expected, range_ = row["expected"], row["expected"]["tokens_per_s_range"]
        pairs = (
            (expected["tokens_per_s"], row["tokens_per_s"]),
            (expected["first_token_s"], PROMPT_TOKENS / row["prompt"]["prefill_tokens_per_s"]),
        )
        (speed, first) = [planned / measured - 1 for planned, measured in pairs]
        errors += [speed, first]
        cells = [
            line["asked"]["model"],
            f"{expected['package_bytes'] / 1e9:.1f}, is {row['model_bytes'] / 1e9:.1f}",
            f"{pairs[0][0]:.3g} ({range_['low']:.3g} to {range_['high']:.3g})",
            f"{pairs[0][1]:.3g}",
            f"{speed:+.0%}",
            *(f"{seconds:.3g}" for seconds in pairs[1]),
            f"{first:+.0%}",
        ]
        text.append(table_line(cells))
    within = sum(abs(error) <= TARGET for error in errors)
    return "\n".join([*text, "", f"{within} of {len(errors)} within {TARGET:.0%}.", ""])


def chosen_models(text: str | None) -> Sequence[CatalogModel]:
    """Return the models of a list of names, all by default, the smallest first. Raises UserError."""
    known = catalog()
    names = text.split(",") if text else sorted(known, key=lambda name: known[name].download_bytes)
    if unknown := set(names) - set(known):
        raise UserError(f"--models: {min(unknown)} is none of {', '.join(known)}")
    return [known[name] for name in names]


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", metavar="LIST", help="names of the catalog (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("catalog"), help="packages and rows (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="print what the folder has and measure nothing")
    arguments = parser.parse_args()
    try:
        models = chosen_models(arguments.models)
        if not arguments.table:
            measure(models, arguments.folder)
    except UserError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
    print(markdown(read_lines(arguments.folder / "catalog.jsonl")), end="")


if __name__ == "__main__":
    main()

"""`neuronpipe convert SOURCE TARGET`: make a package from a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neuronpipe.launch.formats import line_to_paste, show_bytes
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.convert import Encoded, convert
from neuronpipe.plans.inspect import warnings
from neuronpipe.plans.models.spec import ACTIVATIONS
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import GATE_QUANTIZATIONS, QUANTIZATIONS, Manifest
from neuronpipe.plans.package.reader import Package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="directory with config.json and safetensors, or a .gguf file"
    )
    parser.add_argument("target", type=Path, metavar="TARGET", help="package directory to make")
    add_conversion_arguments(parser)
    parser.add_argument(
        "--frequencies",
        type=Path,
        metavar="FILE.npy",
        help="how often each neuron fires, float [layers, experts, neurons]; hot neurons are stored first",
    )
    parser.add_argument("--name", help="name of the model in the package")
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it is a package")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """What a package is to be like, and what a source may leave open."""
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="quantization of the weights in the package (default: q4; q8 for a GGUF of 5 to 8 bits)",
    )
    parser.add_argument(
        "--gates",
        choices=GATE_QUANTIZATIONS,
        help="quantization of the gates, where they are to take less memory than the rest, which is then q4",
    )
    parser.add_argument(
        "--activation",
        choices=ACTIVATIONS,
        help="activation of the feed-forward layers, if the source states none or a wrong one",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer.json or .model, if the source has none"
    )
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="how messages are written, in Jinja (default: the source's)"
    )
    parser.add_argument("--context", type=int, metavar="TOKENS", help="context length (default: the source's)")
    parser.add_argument(
        "--no-predictor",
        dest="predictor",
        action="store_false",
        help="leave the source's predictors, if any; exact mode needs none",
    )


def main(arguments: argparse.Namespace) -> int:
    reports: list[Encoded] = []
    with Progress("converting", "bytes", plain=arguments.json, steady=True) as progress:
        package = convert(
            arguments.source,
            arguments.target,
            quantization=arguments.quantization,
            gates=arguments.gates,
            activation=arguments.activation,
            frequencies=arguments.frequencies,
            tokenizer=arguments.tokenizer,
            context_tokens=arguments.context,
            chat_template=arguments.chat_template,
            name=arguments.name,
            predictor=arguments.predictor,
            overwrite=arguments.overwrite,
            progress=progress,
            report=reports.append,
        )
    (encoded,) = reports
    print(json.dumps(made(package, encoded)) if arguments.json else render(package.path, package.manifest, encoded))
    return 0


def made(package: Package, encoded: Encoded) -> dict[str, Any]:
    """What was made, for a script."""
    manifest = package.manifest
    return {
        "package": str(package.path),
        "id": manifest.id,
        "quantization": manifest.quantization,
        "gates": manifest.trigger_quantization if manifest.model.gated else None,
        "activation": manifest.model.activation,
        "bytes": size_bytes(manifest),
        "quantization_error": dict(manifest.quantization_error),
        "worst_tensor": {"name": encoded.worst_tensor, "error": encoded.worst_error},
        "source_weights": dict(encoded.source_weights),
        "predictor": None if manifest.predictor is None else asdict(manifest.predictor),
        "warnings": warnings(manifest),
    }


def size_bytes(manifest: Manifest) -> int:
    """What a package's files take."""
    return sum(entry.bytes for entry in manifest.files.values())


def _lost_before(encoded: Encoded, quantization: Quantization) -> str:
    total = sum(encoded.source_weights.values())
    nearer = "; `--quantization q8` adds far less, for nearly twice the space" if quantization == "q4" else ""
    shares = ", ".join(f"{name} {count / total:.0%}" for name, count in encoded.source_weights.items())
    return (
        f"note: the source is quantized itself ({shares}). The errors above are against its values, and come on top of "
        f"what it had lost{nearer}; a checkpoint of 16 bits, converted here, loses less"
    )


def render(path: Path, manifest: Manifest, encoded: Encoded, called: str | None = None) -> str:
    """What was made, and what quantization cost, for a person. called: the package's name, where it is known by one."""
    model, size = manifest.model, show_bytes(size_bytes(manifest))
    lines = [f"{path}: {manifest.name}, {manifest.precision}, {model.activation}, {size}", ""]
    lines += [f"{'tensors':<12}{'relative error (rms)':>22}"]
    lines += [f"{kind:<12}{error:>22.4%}" for kind, error in manifest.quantization_error.items()]
    lines += [f"{'worst':<12}{encoded.worst_error:>22.4%}  {encoded.worst_tensor}"]
    if encoded.source_was_quantized:
        lines += ["", _lost_before(encoded, manifest.quantization)]
    for warning in warnings(manifest):
        lines += ["", f"note: {warning}"]
    lines += ["", f"run it: {line_to_paste('run', called or path, '-p', 'TEXT')}"]
    return "\n".join(lines)

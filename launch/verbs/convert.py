"""`neuronpipe convert SOURCE [-o DIR]`: make a package from a Hugging Face directory or a GGUF file.

Without -o it lies with the packages that have names, as the one that `run SOURCE` takes from then on.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neuronpipe.launch.arguments.making import choice_line, package_as_asked
from neuronpipe.launch.formats import line_to_paste, show_bytes
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.convert import Encoded, convert
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.conversion import Report
from neuronpipe.plans.convert.refusals import refuse_no_source
from neuronpipe.plans.inspect import warnings
from neuronpipe.plans.models.spec import ACTIVATIONS
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import GATE_QUANTIZATIONS, QUANTIZATIONS, Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.pull.package_library import checked_name
from neuronpipe.plans.pull.source_models import PackageRequest
from neuronpipe.plans.quantization_choice import why
from neuronpipe.plans.strict_json import one_line
from neuronpipe.protocol.errors import escaped
from neuronpipe.services.gateway.templates.single_job import examine_template


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="directory with config.json and safetensors, or a .gguf file (of several parts any)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="package directory to make (default: a package that is called by its name, and that `neuronpipe run "
        "SOURCE` takes)",
    )
    add_conversion_arguments(parser)
    parser.add_argument(
        "--frequencies",
        type=Path,
        metavar="FILE.npy",
        help="how often each neuron fires, float [layers, experts, neurons]; hot neurons are stored first",
    )
    parser.add_argument(
        "--name",
        help="name of the model in the package; without -o also what the package is called (default: SOURCE's)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the package that is there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """What a package is to be like, and what a source may leave open."""
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="quantization of the weights in the package, embedding and output at least q8 (default: q4; q8 for a GGUF "
        "that is not F16 or Q4_0)",
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


def conversion_options(arguments: argparse.Namespace) -> Options:
    """What is said of a source."""
    return Options(
        arguments.activation,
        arguments.tokenizer,
        arguments.context,
        arguments.chat_template,
        predictor=arguments.predictor,
        examine_template=examine_template,
    )


def conversion_words(arguments: argparse.Namespace) -> list[str]:
    """The words that ask for the same conversion from anywhere."""
    words = []
    for name in ("quantization", "gates", "activation", "tokenizer", "chat_template", "context"):
        if (value := getattr(arguments, name)) is not None:
            said = str(value.absolute() if isinstance(value, Path) else value)
            words += [f"--{name.replace('_', '-')}", said]
    return words if arguments.predictor else [*words, "--no-predictor"]


def main(arguments: argparse.Namespace) -> int:
    reports: list[Encoded] = []
    convert_it = _by_name if arguments.output is None else _to_folder
    package = convert_it(arguments, reports.append)
    (encoded,) = reports
    called = package.path.name if arguments.output is None else None
    if arguments.json:
        print(json.dumps(({} if called is None else {"name": called}) | made(package, encoded)))
    else:
        print(render(package.path, package.manifest, encoded, called))
    return 0


def _by_name(arguments: argparse.Namespace, report: Report) -> Package:
    """The package that `run SOURCE` takes from now on."""
    refuse_no_source(arguments.source)
    words = conversion_words(arguments)
    if arguments.frequencies is not None:
        words += ["--frequencies", str(arguments.frequencies.absolute())]
    if arguments.name is not None:
        words += ["--name", checked_name(arguments.name)]
    asked = PackageRequest(
        name=arguments.name,
        quantization=arguments.quantization,
        gates=arguments.gates,
        frequencies=arguments.frequencies,
        options=conversion_options(arguments),
        overwrite=arguments.overwrite,
        command=("convert", str(arguments.source.absolute()), *words) if words else (),
    )
    return package_as_asked(arguments.source, asked, plain=arguments.json, report=report)


def _to_folder(arguments: argparse.Namespace, report: Report) -> Package:
    with Progress("converting", "bytes", plain=arguments.json, steady=True) as progress:
        return convert(
            arguments.source,
            arguments.output,
            quantization=arguments.quantization,
            gates=arguments.gates,
            activation=arguments.activation,
            frequencies=arguments.frequencies,
            tokenizer=arguments.tokenizer,
            context_tokens=arguments.context,
            chat_template=arguments.chat_template,
            name=arguments.name,
            predictor=arguments.predictor,
            examine_template=examine_template,
            overwrite=arguments.overwrite,
            chosen=lambda choice: progress.note(choice_line(choice, f"--quantization {choice.alternative}")),
            progress=progress,
            report=report,
        )


def made(package: Package, encoded: Encoded) -> dict[str, Any]:
    """What was made, for a script."""
    manifest = package.manifest
    return {
        "package": str(package.path),
        "id": manifest.id,
        "quantization": manifest.quantization,
        "quantization_reason": why(encoded.source_weights, manifest.quantization),
        "embedding_quantization": manifest.quantization_of("embedding"),
        "gates": manifest.trigger_quantization if manifest.model.gated else None,
        "activation": manifest.model.activation,
        "bytes": manifest.size_bytes,
        "quantization_error": dict(manifest.quantization_error),
        "worst_tensor": {"name": encoded.worst_tensor, "error": encoded.worst_error},
        "source_weights": dict(encoded.source_weights),
        "predictor": None if manifest.predictor is None else asdict(manifest.predictor),
        "end_tokens": [end._asdict() for end in encoded.ends],
        "warnings": [*encoded.notes, *warnings(manifest)],
    }


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
    model, size = manifest.model, show_bytes(manifest.size_bytes)
    lines = [f"{escaped(str(path))}: {manifest.name}, {manifest.precision}, {model.activation}, {size}", ""]
    lines += [f"{'tensors':<12}{'relative error (rms)':>22}"]
    lines += [f"{kind:<12}{error:>22.4%}" for kind, error in manifest.quantization_error.items()]
    lines += [f"{'worst':<12}{encoded.worst_error:>22.4%}  {encoded.worst_tensor}"]
    if encoded.source_was_quantized:
        lines += ["", _lost_before(encoded, manifest.quantization)]
    if encoded.ends:
        lines += ["", "texts end with", *(f"  {one_line(end.text) or end.token}  ({end.why})" for end in encoded.ends)]
    for warning in (*encoded.notes, *warnings(manifest)):
        lines += ["", f"note: {warning}"]
    lines += ["", f"run it: {line_to_paste('run', called or path, '-p', 'TEXT')}"]
    return "\n".join(lines)

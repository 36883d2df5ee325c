"""`neuronpipe convert SOURCE [-o DIR]`: convert a Hugging Face directory or a GGUF file to a package.

Without -o the package gets a name, and `run SOURCE` uses it from then on. --measure TEXT also compares its perplexity
with that of the model in f16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neuronpipe.launch.formats import line_to_paste, show_bytes
from neuronpipe.launch.perplexity import TextLoss, measure_loss
from neuronpipe.launch.planning.source_package import choice_line, convert_with_options
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.convert import Encoded, convert
from neuronpipe.plans.convert.checkpoint import Checkpoint, Options
from neuronpipe.plans.convert.conversion import MeasureImportance, Report
from neuronpipe.plans.convert.imatrix_file import read_imatrix
from neuronpipe.plans.convert.importance import Importance
from neuronpipe.plans.convert.refusals import refuse_no_source
from neuronpipe.plans.inspect import warnings
from neuronpipe.plans.models.spec import SELECTABLE_ACTIVATIONS
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import GATE_QUANTIZATIONS, QUANTIZATIONS, Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.calibration_texts import read_text
from neuronpipe.plans.pull.package_library import checked_name
from neuronpipe.plans.pull.source_models import PackageRequest
from neuronpipe.plans.quantization_choice import RequestedQuantization, why
from neuronpipe.plans.reference.input_importance import CALIBRATION_TOKENS, measure_importance
from neuronpipe.plans.strict_json import one_line
from neuronpipe.protocol.errors import escaped, quoted
from neuronpipe.services.gateway.templates.single_job import examine_template


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="directory with config.json and safetensors files, or a .gguf file (any part of a split one)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="package directory to make (default: a package with a name, which `neuronpipe run SOURCE` uses as well)",
    )
    add_conversion_arguments(parser)
    parser.add_argument(
        "--frequencies",
        type=Path,
        metavar="FILE.npy",
        help="access frequency of each neuron, float [layers, experts, neurons]; hot neurons are stored first",
    )
    parser.add_argument(
        "--name",
        help="name of the model; without -o also of the package (default: SOURCE's)",
    )
    importance = parser.add_mutually_exclusive_group()
    importance.add_argument(
        "--calibrate",
        type=Path,
        metavar="TEXT",
        help="encode most exactly what a text uses: a file of a thousand words or more, as the model will meet them "
        f"(computes {CALIBRATION_TOKENS} tokens first)",
    )
    importance.add_argument(
        "--imatrix", type=Path, metavar="FILE", help="the same, by a file of llama.cpp's llama-imatrix for this model"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing package")
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="TEXT",
        help="score this text file with the package, and with one in f16 that is made and removed again",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def bits_per_weight(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1 <= (bits := float(text)) <= 16:
            return bits
    raise argparse.ArgumentTypeError(f"{quoted(text)} is no number of bits from 1 to 16")


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `conversion_options` and `conversion_words` read."""
    quantization = parser.add_mutually_exclusive_group()
    quantization.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="quantization of most weights; embedding, output and down matrices get more bits (default: q4k; what "
        "keeps the values of a quantized GGUF)",
    )
    quantization.add_argument(
        "--bits",
        type=bits_per_weight,
        dest="quantization",
        metavar="N",
        help="the quantization whose package is nearest to N bits a weight, e.g. 4.5",
    )
    parser.add_argument(
        "--gates",
        choices=GATE_QUANTIZATIONS,
        help="smaller quantization for the gate matrices; the others are q4 then",
    )
    parser.add_argument(
        "--by-neuron",
        action="store_true",
        help="store feed-forwards neuron by neuron, as thresholded mode needs them, also if all neurons fire",
    )
    parser.add_argument(
        "--activation",
        choices=SELECTABLE_ACTIVATIONS,
        help="activation of the feed-forward layers, if the source states none or a wrong one",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer.json or .model, if the source has none"
    )
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="chat template, in Jinja (default: the source's)"
    )
    parser.add_argument("--context", type=int, metavar="TOKENS", help="context length (default: the source's)")
    parser.add_argument(
        "--no-predictor",
        dest="predictor",
        action="store_false",
        help="leave the source's predictors out; exact mode needs none",
    )


def conversion_options(arguments: argparse.Namespace) -> Options:
    return Options(
        arguments.activation,
        arguments.tokenizer,
        arguments.context,
        arguments.chat_template,
        predictor=arguments.predictor,
        examine_template=examine_template,
    )


def conversion_words(arguments: argparse.Namespace) -> list[str]:
    words = []
    for name in ("quantization", "gates", "activation", "tokenizer", "chat_template", "context"):
        if (value := getattr(arguments, name)) is not None:
            name = "bits" if isinstance(value, float) else name
            words += [f"--{name.replace('_', '-')}", str(value.absolute() if isinstance(value, Path) else value)]
    for flag, is_given in (("--by-neuron", arguments.by_neuron), ("--no-predictor", not arguments.predictor)):
        words += [flag] if is_given else []
    return words


def main(arguments: argparse.Namespace) -> int:
    if arguments.measure is not None:
        read_text(arguments.measure)  # a text that cannot be read is refused before the source is converted
    if arguments.calibrate is not None:
        read_text(arguments.calibrate)
    reports: list[Encoded] = []
    if arguments.output is None:
        package = _convert_by_name(arguments, reports.append)
    else:
        package = _convert_to_folder(arguments, reports.append, arguments.output, arguments.quantization)
    (encoded,) = reports
    name = package.path.name if arguments.output is None else None
    if arguments.json:
        facts = ({} if name is None else {"name": name}) | package_facts(package, encoded)
        if arguments.measure is not None:
            loss = _measure_loss(arguments, package)
            facts["measured"] = asdict(loss) | {"text": str(arguments.measure)}
        print(json.dumps(facts))
        return 0
    print(render(package.path, package.manifest, encoded, name))
    if arguments.measure is not None:
        sys.stdout.flush()  # scoring takes a while
        loss = _measure_loss(arguments, package)
        print(
            f"{arguments.measure}: perplexity {loss.perplexity:.4f}, in f16 {loss.perplexity_f16:.4f} "
            f"({loss.increase:+.2%}; {loss.tokens} tokens)"
        )
    return 0


def _measure_loss(arguments: argparse.Namespace, package: Package) -> TextLoss:
    def convert_to_f16(path: Path) -> Package:
        return _convert_to_folder(arguments, lambda encoded: None, path, "f16")

    return measure_loss(package, arguments.measure, convert_to_f16, plain=arguments.json)


def _convert_by_name(arguments: argparse.Namespace, report: Report) -> Package:
    """Make the package that `run SOURCE` uses from then on."""
    refuse_no_source(arguments.source)
    words = conversion_words(arguments)
    if arguments.frequencies is not None:
        words += ["--frequencies", str(arguments.frequencies.absolute())]
    for name in ("calibrate", "imatrix"):
        if (file := getattr(arguments, name)) is not None:
            words += [f"--{name}", str(file.absolute())]
    if arguments.name is not None:
        words += ["--name", checked_name(arguments.name)]
    options = PackageRequest(
        name=arguments.name,
        quantization=arguments.quantization,
        gates=arguments.gates,
        by_neuron=arguments.by_neuron,
        frequencies=arguments.frequencies,
        options=conversion_options(arguments),
        importance=_importance(arguments),
        overwrite=arguments.overwrite,
        command=("convert", str(arguments.source.absolute()), *words) if words else (),
    )
    return convert_with_options(arguments.source, options, plain=arguments.json, report=report)


def _convert_to_folder(
    arguments: argparse.Namespace, report: Report, folder: Path, quantization: RequestedQuantization | None
) -> Package:
    with Progress("converting", "bytes", plain=arguments.json, steady=True) as progress:
        return convert(
            arguments.source,
            folder,
            quantization=quantization,
            gates=None if quantization == "f16" else arguments.gates,
            by_neuron=arguments.by_neuron,
            activation=arguments.activation,
            frequencies=arguments.frequencies,
            tokenizer=arguments.tokenizer,
            context_tokens=arguments.context,
            chat_template=arguments.chat_template,
            name=arguments.name,
            predictor=arguments.predictor,
            examine_template=examine_template,
            overwrite=arguments.overwrite,
            importance=None if quantization == "f16" else _importance(arguments),
            chosen=lambda choice: progress.note(choice_line(choice, f"--quantization {choice.alternative}")),
            progress=progress,
            report=report,
        )


def _importance(arguments: argparse.Namespace) -> MeasureImportance | None:
    """Return what measures or reads the importance of columns; None without --calibrate and --imatrix."""
    if (imatrix := arguments.imatrix) is not None:
        return lambda checkpoint: read_imatrix(imatrix, checkpoint.model)
    if (text := arguments.calibrate) is None:
        return None

    def measure(checkpoint: Checkpoint) -> Importance:
        with Progress("calibrating", "tokens", plain=arguments.json) as progress:
            return measure_importance(checkpoint, read_text(text), text.name, progress)

    return measure


def package_facts(package: Package, encoded: Encoded) -> dict[str, Any]:
    manifest = package.manifest
    return {
        "package": str(package.path),
        "id": manifest.id,
        "quantization": manifest.quantization,
        "quantization_reason": why(encoded.source_weights, manifest.quantization),
        "quantizations": manifest.all_quantizations,
        "gates": manifest.trigger_quantization if manifest.model.gated else None,
        "activation": manifest.model.activation,
        "bytes": manifest.size_bytes,
        "quantization_error": dict(manifest.quantization_error),
        "worst_tensor": {"name": encoded.worst_tensor, "error": encoded.worst_error},
        "source_weights": dict(encoded.source_weights),
        "importance": manifest.source.importance or None,
        "predictor": None if manifest.predictor is None else asdict(manifest.predictor),
        "end_tokens": [end._asdict() for end in encoded.ends],
        "warnings": [*encoded.notes, *warnings(manifest)],
    }


def _source_note(encoded: Encoded, quantization: Quantization) -> str:
    total = sum(encoded.source_weights.values())
    larger = "; `--quantization q8` adds far less, for nearly twice the space" if quantization in ("q4", "q4k") else ""
    shares = ", ".join(f"{name} {count / total:.0%}" for name, count in encoded.source_weights.items())
    return (
        f"note: the source is quantized itself ({shares}). The errors above are relative to its values, and add to "
        f"its own loss{larger}; converting a checkpoint of 16 bits loses less"
    )


def render(path: Path, manifest: Manifest, encoded: Encoded, name: str | None = None) -> str:
    """Return the new package and its quantization errors as text.

    name: the package's name, if it has one
    """
    model, size = manifest.model, show_bytes(manifest.size_bytes)
    lines = [f"{escaped(str(path))}: {manifest.name}, {manifest.precision}, {model.activation}, {size}", ""]
    lines += [f"{'tensors':<12}{'relative error (rms)':>22}"]
    lines += [f"{kind:<12}{error:>22.4%}" for kind, error in manifest.quantization_error.items()]
    lines += [f"{'worst':<12}{encoded.worst_error:>22.4%}  {encoded.worst_tensor}"]
    if encoded.source_was_quantized:
        lines += ["", _source_note(encoded, manifest.quantization)]
    if encoded.ends:
        lines += [
            "",
            "answers end with",
            *(f"  {one_line(end.text) or end.token}  ({end.why})" for end in encoded.ends),
        ]
    for warning in (*encoded.notes, *warnings(manifest)):
        lines += ["", f"note: {warning}"]
    lines += ["", f"run it: {line_to_paste('run', name or path, '-p', 'TEXT')}"]
    return "\n".join(lines)

"""How each way of `neuronpipe profile` begins: with arguments that mean something together, and with a text."""

from __future__ import annotations

import argparse
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.layout import GROUP_WEIGHTS
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError, safe_name

if TYPE_CHECKING:
    from neuronpipe.plans.predictor.calibration_texts import Texts

MAX_DEFAULT_TOKENS = 16384
DEFAULT_VALUES = 1 << 25  # gate values of one layer kept at a time: 128 MiB, a few times over while fitting


def refuse_beside(way: str, given: Set[str], known: Set[str], why: str = "have nothing to do with each other") -> None:
    """Raises UserError for an argument that means nothing beside another. way: what was asked for, as in `--npu`.
    given: the arguments that are not what they are by default. known: those that mean something."""
    if others := given - known:
        other = min(others).replace("imported", "import").replace("_", "-")
        raise UserError(f"{way} and --{other}: {why}; leave one of the two out")


def is_demo(package: Package) -> bool:
    """Whether the demo's corpus is this package's own text."""
    return bool(package.manifest.name == Package.open(DEMO).manifest.name)


def text_name(package: Package, file: Path | None) -> str:
    """What a package calls the text that it was measured on. file: of `--text`."""
    own = "the demo's corpus" if is_demo(package) else "the package's own workload"
    return own if file is None else safe_name(file.name)


def texts_of(arguments: argparse.Namespace, package: Package) -> Texts:
    """To calibrate and to judge on: of `--text`, or the package's own. Raises UserError."""
    from neuronpipe.plans.predictor import calibration_texts as texts

    model, tokens = package.manifest.model, arguments.tokens
    if tokens is None:
        tokens = min(MAX_DEFAULT_TOKENS, DEFAULT_VALUES // (model.neurons * model.experts_per_token))
    if tokens < GROUP_WEIGHTS:
        raise UserError(f"--tokens {tokens}: expected {GROUP_WEIGHTS} or more")
    if arguments.text is not None:
        return texts.from_file(package, arguments.text, tokens)
    return texts.from_demo(package, tokens) if is_demo(package) else texts.from_workload(package.manifest, tokens)

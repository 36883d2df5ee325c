"""Arguments and texts that the variants of `neuronpipe profile` share."""

from __future__ import annotations

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
DEFAULT_VALUES = 1 << 25  # gate values of one layer in memory: 128 MiB, several times that while fitting


def refuse_combination(
    variant: str, changed: Set[str], accepted: Set[str], reason: str = "have nothing to do with each other"
) -> None:
    """Raise UserError for an argument that has no effect with a variant of `profile`.

    variant: the variant as typed, e.g. `--npu`
    changed: names of the arguments with values other than their defaults
    accepted: those that the variant accepts
    """
    if refused := changed - accepted:
        name = min(refused).replace("imported", "import").replace("_", "-")
        raise UserError(f"{variant} and --{name}: {reason}; leave one of the two out")


def is_demo(package: Package) -> bool:
    """Return True if the package is of the demo's model, whose own text is the demo's corpus."""
    return bool(package.manifest.name == Package.open(DEMO).manifest.name)


def text_name(package: Package, file: Path | None) -> str:
    """Return the name under which a package records the text that it was measured on.

    file: the value of `--text`
    """
    name = "the demo's corpus" if is_demo(package) else "the package's own workload"
    return name if file is None else safe_name(file.name)


def read_calibration_texts(package: Package, file: Path | None, tokens: int | None) -> Texts:
    """Return the calibration and held-out texts of a file, or the package's own.

    file, tokens: the values of `--text` and `--tokens`

    Raises UserError if there are too few tokens, or no text.
    """
    from neuronpipe.plans.predictor import calibration_texts as texts

    model = package.manifest.model
    if tokens is None:
        tokens = min(MAX_DEFAULT_TOKENS, DEFAULT_VALUES // (model.neurons * model.experts_per_token))
    if tokens < GROUP_WEIGHTS:
        raise UserError(f"--tokens {tokens}: expected {GROUP_WEIGHTS} or more")
    if file is not None:
        return texts.from_file(package, file, tokens)
    return texts.from_demo(package, tokens) if is_demo(package) else texts.from_workload(package.manifest, tokens)

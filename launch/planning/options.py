"""The options that describe a plan: their declaration on a parser, and `PlanOptions`, which holds their values.

A verb turns its parsed arguments into `PlanOptions` once. No module below the verbs sees an `argparse.Namespace`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import cast

from neuronpipe.launch.arguments.values import (
    AUTO,
    parse_bytes,
    parse_cores,
    parse_count,
    parse_limit,
    parse_share,
    parse_speed,
)
from neuronpipe.plans.plan.document import BACKEND_ROLES, MODES, Mode
from neuronpipe.plans.planner.mode_choice import Quality, show_quality
from neuronpipe.plans.planner.plan_options import BASELINES, TECHNIQUES, Baseline, Technique
from neuronpipe.plans.planner.sequence_count import MAX_LOSS, MAX_SEQUENCES
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

COMMON = ("memory", "context", "quality")
"""The plan options that the short help of a verb shows."""


@frozen(kw_only=True)
class PlanOptions:
    """The values of the plan options; None leaves the choice to the planner.

    memory_bytes: the limit of the whole run; AUTO follows the memory that is available
    backends: pairs of role and backend, in the order typed; a later one of the same role wins
    plan_file: an existing plan to use; then no other option may ask for anything
    typed: the names of the options that were typed for this command, in the order of the help. An option from the
        settings file is not among them: it gives way to a live run and to --plan. The exception is --plan itself.
    """

    memory_bytes: int | None = None
    target_tokens_per_s: float | None = None
    quality: Quality | None = None
    ffn_resident_share: float | None = None
    context_tokens: int | None = None
    sequences: int | None = None
    workers: int | None = None
    cores: tuple[int, ...] | None = None
    mode: Mode | None = None
    backends: tuple[tuple[str, str], ...] = ()
    accelerator_memory_bytes: int | None = None
    without: frozenset[Technique] = frozenset()
    hints: bool = False
    baseline: Baseline | None = None
    plan_file: Path | None = None
    typed: tuple[str, ...] = ()

    @property
    def follows_available_memory(self) -> bool:
        return self.memory_bytes == AUTO

    @property
    def has_fixed_limit(self) -> bool:
        """True if --memory names a number of bytes."""
        return self.memory_bytes not in (None, AUTO)

    def backend(self, role: str) -> str | None:
        """Return the backend that was typed for a role."""
        return dict(self.backends).get(role)

    def check_consistent(self) -> None:
        """Raise UserError if one option decides what another one asks for."""
        if self.plan_file is not None and len(self.typed) > 1:
            raise UserError(
                f"{self.typed[0]} and --plan {self.plan_file}: the plan decides that; leave one of the two out"
            )
        if self.baseline is not None:
            self._check_baseline()
        if self.quality is None:
            return
        allows_loss = self.quality != "exact"
        deciding = {
            f"--mode {self.mode}": self.mode is not None,
            f"--baseline {self.baseline}": self.baseline is not None,
            "--hints": self.hints and allows_loss,
            "--without predictor": "predictor" in self.without and allows_loss,
        }
        for option, is_typed in deciding.items():
            if is_typed:
                raise UserError(
                    f"{option} and --quality {show_quality(self.quality)}: the former decides the mode; "
                    "leave one of the two out"
                )

    def _check_baseline(self) -> None:
        conflicts = (
            (
                f"--target-speed {self.target_tokens_per_s}",
                self.target_tokens_per_s is not None,
                "a baseline is planned for a memory limit",
            ),
            (f"--mode {self.mode}", self.mode not in (None, "predicted"), "a baseline computes in mode predicted"),
            ("--hints", self.hints, "a baseline does not prefetch"),
        )
        for option, is_typed, reason in conflicts:
            if is_typed:
                raise UserError(f"--baseline {self.baseline} and {option}: {reason}; leave one of the two out")


def plan_options(arguments: argparse.Namespace) -> PlanOptions:
    """Return the plan options of parsed arguments. Raises UserError if they contradict each other."""
    options = PlanOptions(
        memory_bytes=arguments.memory,
        target_tokens_per_s=arguments.target_speed,
        quality=arguments.quality,
        ffn_resident_share=arguments.ffn_resident,
        context_tokens=arguments.context,
        sequences=arguments.sequences,
        workers=arguments.workers,
        cores=arguments.cores,
        mode=arguments.mode,
        backends=tuple(arguments.backend),
        accelerator_memory_bytes=arguments.gpu_memory,
        without=arguments.without,
        hints=arguments.hints,
        baseline=arguments.baseline,
        plan_file=arguments.plan,
        typed=_typed_options(arguments),
    )
    options.check_consistent()
    return options


def _typed_options(arguments: argparse.Namespace) -> tuple[str, ...]:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    defaults = vars(parser.parse_args([]))
    from_file: set[str] = getattr(arguments, "from_file", set()) - {"plan"}
    return tuple(
        f"--{name.replace('_', '-')}"
        for name, default in defaults.items()
        if getattr(arguments, name) != default and name not in from_file
    )


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `plan_options` reads."""
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--memory",
        type=parse_limit,
        metavar="BYTES",
        help="memory limit of the whole run, e.g. 4GiB; auto: follow what is available, up to 90%% of all memory "
        "(default: most of what is available at the start)",
    )
    group.add_argument(
        "--target-speed",
        type=parse_speed,
        metavar="TOKENS_PER_S",
        help="use the smallest limit, up to --memory, with which a single request is expected to reach this speed",
    )
    group.add_argument(
        "--quality",
        type=_parse_quality,
        metavar="exact|predicted|LOSS",
        help="exact output (default), predicted, or the fastest mode whose measured rise in perplexity is within LOSS, "
        "e.g. 1%%",
    )
    group.add_argument(
        "--ffn-resident",
        type=parse_share,
        metavar="SHARE",
        help="largest share of the feed-forward weights to keep in memory, e.g. 50%%",
    )
    group.add_argument("--context", type=parse_count, metavar="TOKENS", help="context length (default: the package's)")
    group.add_argument(
        "--sequences",
        type=parse_count,
        default=None,
        metavar="N",
        help=f"sequences that can be generated at once (default: 1; up and serve: up to {MAX_SEQUENCES}, as long as "
        f"a single one keeps {1 - MAX_LOSS:.0%}% of its expected speed)",
    )
    group.add_argument(
        "--workers",
        type=parse_count,
        metavar="N",
        help="decode worker processes (default: one per fast core, or fewer if that is faster)",
    )
    group.add_argument(
        "--cores", type=parse_cores, metavar="LIST", help="CPU cores to pin the processes to, e.g. 0,2-3"
    )
    group.add_argument(
        "--mode",
        choices=MODES,
        help="exact: the output of the dense model (default); predicted: compute the neurons that the predictor "
        "chooses; thresholded: skip SiLU neurons below the thresholds of `profile --silent`",
    )
    group.add_argument(
        "--backend",
        action="append",
        type=parse_backend,
        default=[],
        metavar="ROLE=NAME[:OPTIONS]",
        help="backend of the decode or prefill workers, e.g. prefill=cpu:avx2 (default: cpu with the best instruction "
        "set), or of an accelerator that computes the hottest neurons: accelerator=opencl, accelerator=onnx:cpu; may "
        "be repeated",
    )
    group.add_argument(
        "--gpu-memory",
        type=parse_bytes,
        metavar="BYTES",
        help="device memory that the accelerator may use (default: nearly all of it; a quarter of --memory if the "
        "device shares the machine's memory)",
    )
    group.add_argument(
        "--without",
        type=_parse_techniques,
        default=frozenset(),
        metavar="LIST",
        help=f"experiment: leave out techniques, any of {', '.join(TECHNIQUES)}",
    )
    group.add_argument(
        "--hints",
        action="store_true",
        help="experiment, in exact mode: prefetch what the predictor or the routers name; does not change the output",
    )
    group.add_argument("--baseline", choices=BASELINES, help="experiment: plan as another system would")
    group.add_argument("--plan", type=Path, metavar="FILE", help="use this plan instead of searching for one")


def parse_backend(text: str) -> tuple[str, str]:
    """Parse ROLE=BACKEND. For argparse: raises ArgumentTypeError."""
    role, equals, backend = text.partition("=")
    if not equals or role not in BACKEND_ROLES:
        raise argparse.ArgumentTypeError(f"{text!r}: write decode=NAME, prefill=NAME or accelerator=NAME")
    return role, backend


def _parse_techniques(text: str) -> frozenset[Technique]:
    names = {name.strip() for name in text.split(",")}
    techniques = frozenset(technique for technique in TECHNIQUES if technique in names)
    if unknown := names - techniques:
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(TECHNIQUES)}")
    return techniques


def _parse_quality(text: str) -> Quality:
    if text in ("exact", "predicted"):
        return cast(Quality, text)
    try:
        return parse_share(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write exact, predicted, or the allowed rise in perplexity, e.g. 1%"
        ) from None

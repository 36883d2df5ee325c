"""The options that describe a plan, declared on a parser. A verb turns its parsed arguments into `PlanOptions` once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import cast

from neuronpipe.launch.arguments.values import (
    parse_bytes,
    parse_bytes_or_none,
    parse_cores,
    parse_count,
    parse_limit,
    parse_share,
    parse_speed,
)
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.plans.plan.document import BACKEND_ROLES, KV_TYPES, MODES
from neuronpipe.plans.planner.default_sizes import MAX_LOSS, MAX_SEQUENCES
from neuronpipe.plans.planner.mode_choice import Quality
from neuronpipe.plans.planner.plan_options import BASELINES, TECHNIQUES, Technique

PROMPT_CACHE_BYTES = 4 << 30

COMMON = ("memory", "context", "quality")
"""The plan options that the short help of a verb shows."""


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
        kv_type=arguments.kv_type or "f16",
        baseline=arguments.baseline,
        prompt_cache_bytes=0 if arguments.baseline else arguments.prompt_cache,
        history=not arguments.no_history,
        plan_file=arguments.plan,
        typed=_typed_options(arguments),
    )
    options.check_consistent()
    return options


def _typed_options(arguments: argparse.Namespace) -> tuple[str, ...]:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    defaults = vars(parser.parse_args([]))
    from_file: set[str] = getattr(arguments, "from_file", set()) - {"plan"} | {"no_history"}  # no choice of a plan
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
    group.add_argument(
        "--context",
        type=parse_count,
        metavar="TOKENS",
        help="context length (default: what memory allows)",
    )
    group.add_argument(
        "--kv-type",
        choices=KV_TYPES,
        help="type of keys and values: f16 (default); q8: 17/32 of the memory, and results that differ a little",
    )
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
        "--prompt-cache",
        type=parse_bytes_or_none,
        default=PROMPT_CACHE_BYTES,
        metavar="BYTES",
        help="disk space for the keys and values of prompts, which later requests with the same beginning read instead "
        "of computing them, also after a restart; 0: none (default: 4GiB)",
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
    group.add_argument(
        "--no-history",
        action="store_true",
        help="do not plan with what earlier runs of the package counted and measured, and keep nothing of this run",
    )
    group.add_argument("--plan", type=Path, metavar="FILE", help="use this plan instead of searching for one")


def add_idle_profile_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --no-idle-profile, for verbs whose run stays."""
    parser.add_argument(
        "--no-idle-profile",
        action="store_true",
        help="never measure this device while no request has come for a minute (default: once, for the next plan, if 2 "
        "GiB of memory are available; it takes up to 1 GiB beyond --memory, and a request stops it at once)",
    )


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

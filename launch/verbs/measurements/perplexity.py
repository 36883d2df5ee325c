"""`neuronpipe perplexity [PACKAGE] --text FILE`: measure how well a package predicts a text, with a run of it.

The text is cut into context windows; the first token of each is not scored. With --output, the logits after every token
are written as float32 [tokens, vocabulary]; they are read from shared memory while the run waits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from pathlib import Path

from neuronpipe.launch.client import Client
from neuronpipe.launch.generation.stream import describe_wait
from neuronpipe.launch.planning import options as planning
from neuronpipe.launch.planning.package_argument import add_package_argument
from neuronpipe.launch.planning.plan import package_and_plan
from neuronpipe.launch.progress import Elapsed, Progress
from neuronpipe.launch.scoring import score, stored_logits
from neuronpipe.launch.supervisor.start import started_run
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.calibration_texts import read_text
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer

COMMON_OPTIONS = ("package", "text", "path", "output", "tokens", *planning.COMMON, "mode", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="the text to score, UTF-8")
    parser.add_argument(
        "--path", choices=("decode", "prefill"), default="decode", help="processes that compute (default: %(default)s)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.npy", help="write the logits, float32 [tokens, vocabulary]"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="score the first N tokens only")
    planning.add_plan_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    package, plan = package_and_plan(arguments.package, planning.plan_options(arguments), plain=arguments.json)
    tokens = _read_tokens(arguments, package)
    with (
        started_run(package, plan, None, stays=False) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
        Elapsed(plain=arguments.json) as elapsed,
    ):
        file, window_tokens = arguments.output, plan.compute.context_tokens
        output = stored_logits(file, live.directory, package, len(tokens)) if file else contextlib.nullcontext()
        with output as keep, Progress("scoring", "tokens", plain=arguments.json) as progress:

            def report(done: int, total: int) -> None:
                elapsed.end()
                progress(done, total)

            nll = score(
                client,
                tokens,
                window_tokens=window_tokens,
                path=arguments.path,
                keep=keep,
                progress=report,
                on_wait=lambda status: elapsed.say(describe_wait(status, "scoring")),
            )
    mean = math.fsum(nll) / len(nll)
    result = {
        "nll": mean,
        "perplexity": math.exp(mean),
        "tokens": len(tokens),
        "rated_tokens": len(nll),
        "path": arguments.path,
        "context_tokens": plan.compute.context_tokens,
        "mode": plan.compute.mode,
        "plan": plan.id,
        "nll_by_token": nll,
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"perplexity {math.exp(mean):.4f}  ({mean:.4f} nats per token, {len(nll)} tokens, {arguments.path} path)")
    return 0


def _read_tokens(arguments: argparse.Namespace, package: Package) -> list[int]:
    tokens = FileTokenizer(package.tokenizer()).encode(read_text(arguments.text))[: arguments.tokens]
    if len(tokens) < 2:
        raise UserError(f"{arguments.text}: {len(tokens)} token(s): a text needs at least two tokens")
    return tokens

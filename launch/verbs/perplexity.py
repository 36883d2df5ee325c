"""`neuronpipe perplexity [PACKAGE] --text FILE`: how well a package predicts a text, through the pipeline itself.

The text is cut into windows of the context length; the first token of a window is not rated. With --logits-out the
logits after every token are written as float32 [tokens, vocabulary], read from shared memory while the run waits.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuronpipe.launch.client import Client
from neuronpipe.launch.live import LiveRun, started_run
from neuronpipe.launch.planning import add_package_argument, add_plan_arguments, package_and_plan
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.plan import Plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.client import Scored
from neuronpipe.protocol.messages.request import Next, Score
from neuronpipe.protocol.segments import Segment
from neuronpipe.services.coordinator.text import FileTokenizer
from neuronpipe.services.memory import run_layouts

Keep = Callable[[int, Scored], None]
"""(index of the window's first token, message): called while the logit rows are ours to read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `perplexity`."""
    add_package_argument(parser)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="the text to rate, UTF-8")
    parser.add_argument(
        "--path", choices=("decode", "prefill"), default="decode", help="who computes (default: %(default)s)"
    )
    parser.add_argument(
        "--logits-out", type=Path, metavar="FILE.npy", help="write the logits, float32 [tokens, vocabulary]"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="rate the first N tokens only")
    add_plan_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """Rate the text."""
    package, plan = package_and_plan(arguments)
    tokens = _read_tokens(arguments, package)
    with (
        started_run(package, plan, None, stays=False) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
    ):
        keep = _logits_writer(arguments.logits_out, live, package, plan, len(tokens)) if arguments.logits_out else None
        nll = _rate(client, tokens, plan.compute.context_tokens, arguments, keep)
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
    try:
        text = arguments.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{arguments.text}: cannot be read as text: {error}") from None
    tokens = FileTokenizer(package.tokenizer_path).encode(text)[: arguments.tokens]
    if len(tokens) < 2:
        raise UserError(f"{arguments.text}: {len(tokens)} token(s): a text needs two or more to be rated")
    return tokens


def _rate(
    client: Client, tokens: list[int], window_tokens: int, arguments: argparse.Namespace, keep: Keep | None
) -> list[float]:
    """Nats per rated token."""
    nll: list[float] = []
    with Progress("rating", "tokens", plain=arguments.json) as progress:
        for first in range(0, len(tokens), window_tokens):
            window = tokens[first : first + window_tokens]
            ask = Score(request=f"window-{first}", tokens=tuple(window), path=arguments.path, logits=keep is not None)
            for message in client.request(ask):
                if isinstance(message, Scored):
                    nll += message.nll
                    progress(first + message.position + message.rows, len(tokens))
                    if keep is not None:
                        keep(first, message)
                        client.send(Next(request=ask.request))
    return nll


def _logits_writer(path: Path, live: LiveRun, package: Package, plan: Plan, tokens: int) -> Keep:
    """Copies logit rows from the exchange segment into a .npy file as they come."""
    import numpy as np

    vocabulary = package.manifest.shape.vocabulary
    try:
        out: Any = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(tokens, vocabulary))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    logits: Any = None

    def keep(first: int, scored: Scored) -> None:
        nonlocal logits
        if logits is None:  # the run is live: its segments are there
            run_file = live.directory.read()
            layout = run_layouts(package.manifest, plan)["exchange"]
            segment = Segment.open(layout, run_file.supervisor_pid, run_file.segments["exchange"].fd)
            logits = np.frombuffer(segment.map().view("logits"), dtype=np.float32).reshape(-1, vocabulary)
        start = first + scored.position
        out[start : start + scored.rows] = logits[scored.row : scored.row + scored.rows]
        if start + scored.rows == tokens:
            out.flush()

    return keep

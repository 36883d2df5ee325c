"""`neuronpipe perplexity [PACKAGE] --text FILE`: measure how well a package predicts a text, with a run of it.

The text is cut into context windows; the first token of each is not scored. With --output, the logits after every token
are written as float32 [tokens, vocabulary]; they are read from shared memory while the run waits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

from neuronpipe.launch.arguments import plan_arguments as planning
from neuronpipe.launch.perplexity import read_tokens, score_with_run
from neuronpipe.launch.planning.package_argument import add_package_argument, open_package
from neuronpipe.launch.planning.plan import plan_here

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
    package = open_package(arguments.package, plain=arguments.json)
    options = planning.plan_options(arguments)
    tokens = read_tokens(arguments.text, package, arguments.tokens)
    if options.context_tokens is None and options.plan_file is None:
        # The text's perplexity must not depend on memory, as the default context does.
        whole_tokens = min(len(tokens), package.manifest.model.context_tokens)
        options = dataclasses.replace(options, context_tokens=whole_tokens)
    plan = plan_here(package, options, plain=arguments.json).plan
    nll = score_with_run(package, plan, tokens, path=arguments.path, plain=arguments.json, output=arguments.output)
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

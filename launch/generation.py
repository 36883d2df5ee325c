"""Asking for text: the arguments that `run` and `ask` share, the stream a person reads, and the JSON a script reads."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from neuronpipe.launch.client import Client
from neuronpipe.launch.sizes import show_bytes
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Finished, Token
from neuronpipe.protocol.messages.request import Generate

DEFAULT_TEMPERATURE = 0.8
DEFAULT_TOP_P = 0.95


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompt and sampling."""
    parser.add_argument("-p", "--prompt", help="the text to continue (default: standard input)")
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=200, metavar="N", help="most tokens to generate (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0: always the likeliest token (default: {DEFAULT_TEMPERATURE}; 0 with --json)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens (default: all)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=None,
        metavar="P",
        help=f"draw from the likeliest tokens that make up P (default: {DEFAULT_TOP_P})",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the draws; the same seed gives the same text (default: %(default)s)"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the text before TEXT; may be given again"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def generate_request(arguments: argparse.Namespace) -> Generate:
    """The request the arguments describe. Raises UserError when a value is out of range."""
    temperature = (
        arguments.temperature if arguments.temperature is not None else (0.0 if arguments.json else DEFAULT_TEMPERATURE)
    )
    top_p = DEFAULT_TOP_P if arguments.top_p is None else arguments.top_p
    for name, value, good in (
        ("--max-tokens", arguments.max_tokens, arguments.max_tokens >= 1),
        ("--temperature", temperature, 0 <= temperature <= 100),
        ("--top-k", arguments.top_k, arguments.top_k >= 0),
        ("--top-p", top_p, 0 < top_p <= 1),
        ("--seed", arguments.seed, 0 <= arguments.seed < 1 << 63),
    ):
        if not good:
            raise UserError(f"{name} {value}: out of range; see --help")
    prompt = arguments.prompt if arguments.prompt is not None else _standard_input()
    return Generate(
        request="1",
        prompt=prompt,
        max_tokens=arguments.max_tokens,
        temperature=temperature,
        top_k=arguments.top_k,
        top_p=top_p,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
    )


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise UserError("no prompt: give -p TEXT, or pipe a text into standard input")
    return sys.stdin.read()


def generate(client: Client, arguments: argparse.Namespace, ask: Generate) -> None:
    """Stream the text to a person, or print the JSON object."""
    if not arguments.json:
        sys.stdout.write(ask.prompt or "")
        sys.stdout.flush()
    tokens: list[int] = []
    for message in client.request(ask):
        if isinstance(message, Token):
            if message.index < len(tokens):
                continue  # asked for again after the coordinator was restarted
            tokens.append(message.token)
            if not arguments.json:
                sys.stdout.write(message.text)
                sys.stdout.flush()
        elif isinstance(message, Finished):
            _finish(arguments.json, message, tokens)


def _finish(as_json: bool, finished: Finished, tokens: list[int]) -> None:
    if as_json:
        print(json.dumps(to_json(finished, tokens)))
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    memory, flash = finished.memory, finished.flash
    print(
        f"[{finished.tokens} tokens, {finished.tokens_per_s:.0f} tokens/s, first after {finished.ttft_ms:.0f} ms; "
        f"memory {show_bytes(memory['peak_bytes'])} of {show_bytes(memory['limit_bytes'])}; "
        f"flash {show_bytes(flash['bytes'])}, miss rate {flash['miss_rate']:.1%}]",
        file=sys.stderr,
    )


def to_json(finished: Finished, tokens: list[int]) -> dict[str, Any]:
    """The JSON object of `run --json` and `ask --json`."""
    return {
        "text": finished.text,
        "tokens": finished.tokens,
        "token_ids": tokens,
        "prompt_tokens": finished.prompt_tokens,
        "cached_tokens": finished.cached_tokens,
        "reason": finished.reason,
        "ttft_ms": finished.ttft_ms,
        "tokens_per_s": finished.tokens_per_s,
        "tbt_ms": finished.tbt_ms,
        "memory": finished.memory,
        "flash": {**finished.flash, "bytes": int(finished.flash["bytes"]), "reads": int(finished.flash["reads"])},
        "plan": finished.plan,
        "mode": finished.mode,
    }

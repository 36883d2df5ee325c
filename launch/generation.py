"""Asking for text: the arguments that `run` and `ask` share, the stream a person reads, and the JSON a script reads."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from neuronpipe.launch.client import Client
from neuronpipe.launch.sampling import add_sampling_arguments, sampling_options
from neuronpipe.launch.sizes import show_bytes
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Finished, Token
from neuronpipe.protocol.messages.request import Generate

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and new line


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompt and sampling."""
    parser.add_argument("-p", "--prompt", help="the text to continue (default: standard input)")
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=200, metavar="N", help="most tokens to generate (default: %(default)s)"
    )
    add_sampling_arguments(parser)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the text before TEXT; may be given again"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def generate_request(arguments: argparse.Namespace) -> Generate:
    """The request the arguments describe. Raises UserError when a value is out of range."""
    if arguments.max_tokens < 1:
        raise UserError(f"--max-tokens {arguments.max_tokens}: out of range; see --help")
    if arguments.logprobs is not None and not arguments.json:
        raise UserError("--logprobs: only with --json, which has a place for them")
    options = sampling_options(arguments)
    prompt = arguments.prompt if arguments.prompt is not None else _standard_input()
    if not prompt:
        raise UserError("the prompt is empty: give -p TEXT, or pipe a text into standard input")
    return Generate(request="1", prompt=prompt, max_tokens=arguments.max_tokens, stop=tuple(arguments.stop), **options)


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise UserError("no prompt: give -p TEXT, or pipe a text into standard input")
    return sys.stdin.read()


def generate(client: Client, arguments: argparse.Namespace, ask: Generate) -> None:
    """Stream the text to a person, or print the JSON object."""
    if not arguments.json:
        sys.stdout.write(ask.prompt or "")
        sys.stdout.flush()
    with _line_ended(arguments.json):
        _stream(client, arguments, ask)


@contextlib.contextmanager
def _line_ended(as_json: bool) -> Iterator[None]:
    """What goes wrong is said on a line of its own, not behind the text."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        if not as_json:
            sys.stdout.write("\n")
            sys.stdout.flush()
        raise


def _stream(client: Client, arguments: argparse.Namespace, ask: Generate) -> None:
    tokens: list[Token] = []
    terminal = sys.stdout.isatty()
    for message in client.request(ask):
        if isinstance(message, Token):
            if message.index < len(tokens):
                continue  # asked for again after the coordinator was restarted
            tokens.append(message)
            if not arguments.json:
                sys.stdout.write(for_terminal(message.text) if terminal else message.text)
                sys.stdout.flush()
        elif isinstance(message, Finished):
            _finish(arguments.json, message, tokens)


def for_terminal(text: str) -> str:
    """What a model wrote, less what a terminal would obey: a package may be anybody's."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def _finish(as_json: bool, finished: Finished, tokens: list[Token]) -> None:
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


def to_json(finished: Finished, tokens: list[Token]) -> dict[str, Any]:
    """The JSON object of `run --json` and `ask --json`."""
    rated = [token for token in tokens if token.logprob is not None]
    return {
        "text": finished.text,
        "tokens": finished.tokens,
        "token_ids": [token.token for token in tokens],
        **({"logprobs": [_rating(token) for token in rated]} if rated else {}),
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


def _rating(token: Token) -> dict[str, Any]:
    """How likely one token was; bytes that are no whole character show as U+FFFD in its text."""
    top = [{"token": t.token, "text": t.piece.decode(errors="replace"), "logprob": t.logprob} for t in token.top]
    return {"token": token.token, "text": token.piece.decode(errors="replace"), "logprob": token.logprob, "top": top}

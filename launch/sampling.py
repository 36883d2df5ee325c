"""The arguments of `run` and `ask` that say how tokens are drawn."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.request import Bias

DEFAULT_TEMPERATURE = 0.8
DEFAULT_TOP_P = 0.95


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Temperature, cuts, penalties, biases, the form of the answer."""
    add = parser.add_argument
    add(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0: always the likeliest token (default: {DEFAULT_TEMPERATURE}; 0 with --json)",
    )
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens (default: all)")
    add(
        "--top-p",
        type=float,
        default=DEFAULT_TOP_P,
        metavar="P",
        help="draw from the likeliest tokens that make up P (default: %(default)s)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="draw from tokens at least P times as likely as the likeliest (default: all)",
    )
    add(
        "--repeat-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="make tokens of the text less likely: positive logits are divided by X (default: 1, off)",
    )
    add(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="take X off a token's logit for each time it was generated (default: 0, off)",
    )
    add(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="take X off the logit of a token that was generated (default: 0, off)",
    )
    add(
        "--logit-bias",
        action="append",
        default=[],
        metavar="TOKEN=BIAS",
        help="add BIAS to the logit of a token id; -100 bans it; may be given again",
    )
    add(
        "--json-schema",
        metavar="FILE|TEXT",
        help="the answer is JSON of this schema; 'json' for any object",
    )
    add("--ignore-end", action="store_true", help="never draw an end token")
    add("--logprobs", type=int, metavar="N", help="with --json: log probabilities, and the N likeliest of each place")
    add("--seed", type=int, default=0, help="of the draws; the same seed gives the same text (default: %(default)s)")


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of `Generate`. Raises UserError when a value is out of range."""
    temperature = arguments.temperature
    if temperature is None:
        temperature = 0.0 if arguments.json else DEFAULT_TEMPERATURE
    for name, value, good in (
        ("--temperature", temperature, 0 <= temperature <= 100),
        ("--top-k", arguments.top_k, arguments.top_k >= 0),
        ("--top-p", arguments.top_p, 0 < arguments.top_p <= 1),
        ("--min-p", arguments.min_p, 0 <= arguments.min_p <= 1),
        ("--repeat-penalty", arguments.repeat_penalty, 0.01 <= arguments.repeat_penalty <= 100),
        ("--frequency-penalty", arguments.frequency_penalty, abs(arguments.frequency_penalty) <= 100),
        ("--presence-penalty", arguments.presence_penalty, abs(arguments.presence_penalty) <= 100),
        ("--logprobs", arguments.logprobs, arguments.logprobs is None or 0 <= arguments.logprobs <= 20),
        ("--seed", arguments.seed, 0 <= arguments.seed < 1 << 63),
    ):
        if not good:
            raise UserError(f"{name} {value}: out of range; see --help")
    return {
        "temperature": temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "min_p": arguments.min_p,
        "repetition_penalty": arguments.repeat_penalty,
        "frequency_penalty": arguments.frequency_penalty,
        "presence_penalty": arguments.presence_penalty,
        "logit_bias": tuple(map(_bias, arguments.logit_bias)),
        "grammar": None if arguments.json_schema is None else _schema(arguments.json_schema),
        "ignore_end": arguments.ignore_end,
        "logprobs": arguments.logprobs,
        "seed": arguments.seed,
    }


def _bias(text: str) -> Bias:
    token, _, bias = text.partition("=")
    try:
        return Bias(token=int(token), bias=float(bias))
    except ValueError:
        raise UserError(f"--logit-bias {text}: expected TOKEN=BIAS, a token id and a number") from None


def _schema(argument: str) -> str:
    """The text itself, or that of a file."""
    if argument == "json" or argument.lstrip().startswith("{"):
        return argument
    try:
        return Path(argument).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise UserError(f"--json-schema {argument}: {reason}; give a file, or a schema as text") from None

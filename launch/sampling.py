"""The arguments of `run` and `ask` that say how tokens are drawn."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from neuronpipe.launch.formats import parse_text
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.request import Bias

DEFAULT_TEMPERATURE = 0.8
DEFAULT_TOP_P = 0.95
MAX_TOP_K = (1 << 31) - 1
MAX_SEED = (1 << 63) - 1
MAX_BIAS = 100
MAX_SCHEMA_CHARACTERS = 1 << 20


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
        type=parse_text,
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
    for name, value, least, most in (
        ("--temperature", temperature, 0, 100),
        ("--top-k", arguments.top_k, 0, MAX_TOP_K),
        ("--top-p", arguments.top_p, 0, 1),
        ("--min-p", arguments.min_p, 0, 1),
        ("--repeat-penalty", arguments.repeat_penalty, 0.01, 100),
        ("--frequency-penalty", arguments.frequency_penalty, -100, 100),
        ("--presence-penalty", arguments.presence_penalty, -100, 100),
        ("--logprobs", arguments.logprobs or 0, 0, 20),
        ("--seed", arguments.seed, 0, MAX_SEED),
    ):
        if not least <= value <= most:
            raise UserError(f"{name} {value}: between {least} and {most}")
    if arguments.top_p == 0:
        raise UserError("--top-p 0: above 0, up to 1")
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
        made = Bias(token=int(token), bias=float(bias))
    except ValueError:
        raise UserError(f"--logit-bias {text}: expected TOKEN=BIAS, a token id and a number") from None
    if not (0 <= made.token < 1 << 31 and -MAX_BIAS <= made.bias <= MAX_BIAS):
        raise UserError(f"--logit-bias {text}: a token id from 0, and a bias between -{MAX_BIAS} and {MAX_BIAS}")
    return made


def _schema(argument: str) -> str:
    """The text itself, or that of a file."""
    if argument == "json" or argument.lstrip().startswith("{"):
        return argument
    try:
        with Path(argument).open(encoding="utf-8") as stream:
            schema = stream.read(MAX_SCHEMA_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise UserError(f"--json-schema {argument}: {reason}; give a file, or a schema as text") from None
    if len(schema) > MAX_SCHEMA_CHARACTERS:
        raise UserError(f"--json-schema {argument}: more than {MAX_SCHEMA_CHARACTERS:,} characters")
    return schema

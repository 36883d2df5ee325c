"""`--use ROLE=IMPLEMENTATION`: the argument of every verb that starts a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from neuronpipe.plans.plan.plan import Plan
from neuronpipe.services.implementations import Implementations, Use


def add_use_argument(parser: argparse.ArgumentParser) -> None:
    """--use, any number of times."""
    parser.add_argument(
        "--use",
        action="append",
        default=[],
        metavar="ROLE=IMPLEMENTATION",
        help="who does a role's work (decode) or one process's (decode.1): package.module:Class, or argv:COMMAND in "
        "any language; may be given again",
    )


def implementations(texts: Iterable[str], plan: Plan) -> Implementations:
    """What was asked for, checked against the plan's seats. Raises UserError."""
    return Implementations(checked_uses(texts, plan))


def checked_uses(texts: Iterable[str], plan: Plan) -> list[Use]:
    """The same one by one."""
    uses = [Use.parse(text, Path.cwd()) for text in texts]
    Implementations(uses).check((seat.role, seat.index) for seat in plan.compute.seats)
    return uses

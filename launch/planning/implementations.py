"""`--use ROLE=IMPLEMENTATION`: other implementations in place of the built-in ones.

--use decode=package.module:Class     a class in the decode workers
--use decode.1=argv:./decoder         a program in any language as one of them
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.plans.plan.document import Plan

if TYPE_CHECKING:
    from neuronpipe.services.runtime.implementations import Implementations, Use


def add_use_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --use, which may be repeated."""
    parser.add_argument(
        "--use",
        action="append",
        default=[],
        metavar="ROLE=IMPLEMENTATION",
        help="replace the implementation of a role (decode) or of one process (decode.1) by package.module:Class, or "
        "by argv:COMMAND in any language; may be repeated",
    )


def implementations(uses: Iterable[str], plan: Plan) -> Implementations:
    """Return the implementations of a run. Raises UserError for a role or process that the plan does not have."""
    # Imported here: only verbs that start a run pay for it.
    from neuronpipe.services.runtime.implementations import Implementations

    return Implementations(checked_uses(uses, plan))


def checked_uses(uses: Iterable[str], plan: Plan) -> list[Use]:
    """Parse values of --use and check them against the plan's processes. Raises UserError."""
    from neuronpipe.services.runtime.implementations import Implementations, Use

    parsed = [Use.parse(use, Path.cwd()) for use in uses]
    Implementations(parsed).check((spec.role, spec.index) for spec in plan.compute.processes)
    return parsed

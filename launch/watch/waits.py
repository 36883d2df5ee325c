"""What sources wait for, said once each on standard error, where no screen shows it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from neuronpipe.launch.watch.sources import Source


class Waits:
    """What was said so far."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def say(self, sources: Iterable[Source]) -> None:
        """Say what is new."""
        for source in sources:
            awaits = source.awaits
            if awaits and (source.name, awaits) not in self._said:
                self._said.add((source.name, awaits))
                print(f"neuronpipe: {source.name}: {awaits}", file=sys.stderr, flush=True)

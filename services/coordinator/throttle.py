"""Throttling: pauses between steps, for a device that is too hot. Pure: the clock is given.

A pause is as long as the step before it times share / (1 - share), so that fast and slow models pause alike. What was
asked for ends by itself: whoever watches the temperature asks again in time, and one that died slows nobody for long.
"""

from __future__ import annotations


class Throttle:
    """The pauses of one run."""

    def __init__(self) -> None:
        self._share = 0.0
        self._until = 0.0
        self._began_at = 0.0
        self.resume_at = 0.0

    def share(self, now: float) -> float:
        """The share of the time that is spent in pauses, 0..1."""
        return self._share if now < self._until else 0.0

    def set(self, share: float, until: float) -> None:
        """From now on, and until then, pause for that share of the time."""
        self._share, self._until = share, until
        if share == 0:
            self.resume_at = 0.0

    def step_begins(self, now: float) -> None:
        """A step is sent."""
        self._began_at = now

    def step_ends(self, now: float) -> None:
        """It is done: the pause begins."""
        share = self.share(now)
        self.resume_at = now + (now - self._began_at) * share / (1 - share) if share else 0.0

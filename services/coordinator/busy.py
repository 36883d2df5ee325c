"""When a client that found the run busy may come again. Pure.

A place among those that wait becomes free when a text ends, and a text ends after its remaining tokens at the latest,
at the pace of its last ones: pauses, other texts and prompts between its steps are in that pace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from neuronpipe.services.coordinator.sequences import Generation, Work

RECENT_TOKENS = 16
MIN_S, MAX_S = 1, 60


def retry_after_s(works: Iterable[Work]) -> int:
    """Seconds until the first of these texts must have ended, as far as one can tell."""
    ends = [end for work in works if isinstance(work, Generation) and (end := _ends_in_s(work)) is not None]
    return max(MIN_S, min(MAX_S, math.ceil(min(ends, default=MIN_S))))


def _ends_in_s(work: Generation) -> float | None:
    """None for a text that has no pace yet."""
    times = work.token_times[-RECENT_TOKENS:]
    if len(times) < 2:
        return None
    pace_s = (times[-1] - times[0]) / (len(times) - 1)
    return (work.most_tokens - len(work.tokens)) * pace_s

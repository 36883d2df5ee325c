"""A cache policy that evicts random clusters: the smallest example of another policy, and a baseline for CLOCK.

neuronpipe bench --ffn-resident 50% --use cache=neuronpipe.services.examples.random_eviction:RandomEviction
"""

from __future__ import annotations

import random
from array import array

from neuronpipe.services.cache.cache_service import CacheService
from neuronpipe.services.runtime.job import Job

CANDIDATES_PER_SLOT = 8


class RandomEviction(CacheService):
    """A cache manager that does not consider how often clusters are used."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._random = random.Random(job.run)

    def evict(self, part: int, count: int) -> array[int]:
        """Evict random clusters and return `count` slots. CLOCK evicts the rest if too few candidates are resident."""
        clusters = len(self.entries(part))
        candidates = array("I", self._random.choices(range(clusters), k=CANDIDATES_PER_SLOT * count))
        slots = self.evict_clusters(part, candidates, count)
        return slots + super().evict(part, count - len(slots)) if len(slots) < count else slots

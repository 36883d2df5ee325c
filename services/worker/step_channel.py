"""A decode worker's lane: the coordinator gives it steps through words of shared memory while it listens there.

A worker listens for a moment after every step that it answered; what comes by its lane is computed and answered in
native code. A step that is abandoned or fails is answered by a message, as is everything that came by one.
"""

from __future__ import annotations

from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.services.runtime.run_memory import Lanes, RunMemory

SPIN_FACTOR = 4  # of the spinning within a step: a step comes within a tenth of a millisecond, or after other things
IDLE_MS = 20  # after that messages are waited for
SERVE_MS = 1000  # then messages are taken, however many steps come


class Lane:
    """One worker's. listens: whether steps may come this way; step, epoch: of the last one that did. spin_us: how long
    participants of a step spin for each other; between steps it is a little more, and others come first."""

    def __init__(self, memory: RunMemory, index: int, spin_us: int) -> None:
        self._lanes = Lanes(memory)
        self._index, self._spin_us = index, SPIN_FACTOR * spin_us
        self._served = ffi.new("np_lane_served *")
        self.listens = False
        self.step = self.epoch = 0

    def serve(self, engine: Any) -> int:
        """As np_lane_serve, for a moment."""
        done = int(
            lib.np_lane_serve(engine, self._lanes.native, self._index, self._spin_us, IDLE_MS, SERVE_MS, self._served)
        )
        self.listens = done == lib.NP_OK
        if self._served.step:
            self.step, self.epoch = int(self._served.step), int(self._served.epoch)
        return done

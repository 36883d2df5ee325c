"""The worker's end of its step channel, words of shared memory through which the coordinator sends steps.

A worker listens on the channel for IDLE_MS after every step. Steps that arrive there are computed and answered in
native code. Steps that are abandoned or fail are answered by a message, as are steps that arrived as messages.
"""

from __future__ import annotations

from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.services.runtime.run_memory import Lanes, RunMemory

SPIN_FACTOR = 4  # spin longer than at a barrier: the next step comes within a tenth of a millisecond, or much later
IDLE_MS = 20  # after this time without a step, the worker waits for messages
SERVE_MS = 1000  # messages are read at least this often, however many steps come


class Lane:
    """The step channel of one worker.

    spin_us: how long the participants of a step spin at a barrier; the wait for a step spins longer
    listens: True while steps may arrive here
    step, epoch: number and epoch of the last step that arrived here
    """

    def __init__(self, memory: RunMemory, index: int, spin_us: int) -> None:
        self._lanes = Lanes(memory)
        self._index, self._spin_us = index, SPIN_FACTOR * spin_us
        self._served = ffi.new("np_channel_progress *")
        self.listens = False
        self.step = self.epoch = 0

    def serve(self, engine: Any) -> int:
        """Serve the channel until no step comes for IDLE_MS, or for SERVE_MS. Return the result of np_channel_serve."""
        done = int(
            lib.np_channel_serve(
                engine, self._lanes.native, self._index, self._spin_us, IDLE_MS, SERVE_MS, self._served
            )
        )
        self.listens = done == lib.NP_OK
        if self._served.step:
            self.step, self.epoch = int(self._served.step), int(self._served.epoch)
        return done

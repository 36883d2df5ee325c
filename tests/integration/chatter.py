"""A prefill worker that says after every prompt, thousands of times, how it is: more events than any queue holds."""

from __future__ import annotations

from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.lifecycle import Beat
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.worker.prefill import PrefillService

BEATS = 20_000


class Chatter(PrefillService):
    """The steps of its beats are counted on from prompt to prompt."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._said = 0

    def _handle(self, message: Message) -> None:
        super()._handle(message)
        for _ in range(BEATS):
            self._said += 1
            beat = Beat(role="prefill", index=0, state="ready", step=self._said, counters={"x" * 1000: 1.0})
            self._service.answer(beat)

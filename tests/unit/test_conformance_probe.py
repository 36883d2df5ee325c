"""What conformance says of a worker that does not answer in time."""

from __future__ import annotations

from neuronpipe.launch.conformance.probe import PendingQuestion
from neuronpipe.protocol.messages.client import ProcessStatus, Status


def test_it_says_what_was_asked_what_came_and_who_is_waited_for() -> None:
    late = ProcessStatus(role="decode", index=0, pid=9, state="busy", note="has not answered step 7 for 6 s")
    prompt = ProcessStatus(role="prefill", index=0, pid=8, state="ready")
    figures = dict.fromkeys(("memory_bytes", "memory_peak_bytes", "memory_limit_bytes"), 0)
    counts = dict.fromkeys(("sequences_active", "max_sequences", "sequences_waiting", "steps", "tokens"), 0)
    status = Status(
        run="r", ready=True, plan="p", mode="exact", processes=(late, prompt), uptime_s=1.0, **figures, **counts
    )
    pending = PendingQuestion()
    assert pending.describe_timeout(3) == "asked for whether the run is ready, it answered no within 3 s"
    pending.begin("a text of 5 tokens after a prompt of 12")
    pending.answer = "2 of them"
    pending.update(status)
    said = "asked for a text of 5 tokens after a prompt of 12, it answered 2 of them within 30 s"
    assert pending.describe_timeout(30) == f"{said}; decode.0 has not answered step 7 for 6 s"
    pending.update(None)
    assert pending.describe_timeout(30) == said

"""The tokens of a request as they come, and on stderr what the first one waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from neuronpipe.launch.client import Client, show_warm_up, starting
from neuronpipe.launch.progress import Elapsed
from neuronpipe.protocol.messages.client import Accepted, Finished, Status, Token
from neuronpipe.protocol.messages.request import Generate


def stream(
    client: Client,
    request: Generate,
    first_status: Callable[[Status], None] = lambda status: None,
    *,
    plain: bool = False,
) -> Iterator[Token | Finished]:
    """Send a request and yield each of its tokens once, then `Finished`. Meanwhile stderr shows the wait.

    first_status: called once with the run's status before the request
    plain: show the wait as lines, not as one line that changes

    Raises Declined if the run refuses the request, UserError if the run ends.
    """
    prompt_tokens = tokens = 0

    def show_wait(status: Status | None) -> None:
        elapsed.say(_describe_wait(status, prompt_tokens))

    with Elapsed(plain=plain) as elapsed:
        for message in client.request(request, show_wait, first_status):
            if isinstance(message, Accepted):
                prompt_tokens = message.prompt_tokens
            elif isinstance(message, Token):
                elapsed.end()
                if message.index == tokens:  # else it is repeated, after the coordinator was restarted
                    tokens += 1
                    yield message
            elif isinstance(message, Finished):
                elapsed.end()
                yield message


def _describe_wait(status: Status | None, prompt_tokens: int) -> str:
    prompt = f"the prompt, {prompt_tokens:,} token{'s' if prompt_tokens > 1 else ''}"
    if not prompt_tokens:
        return describe_wait(None, prompt)
    if status is not None and status.ready and status.sequences_waiting:
        waiting = f"{status.sequences_waiting} sequences are waiting"
        return f"waiting for a KV slot, or reading {prompt}; {waiting}"
    return describe_wait(status, f"reading {prompt}")


def describe_wait(status: Status | None, activity: str) -> str:
    """Return what a run that has a request is doing.

    status: None before the run has answered
    activity: what it does once it is ready
    """
    if status is None or not status.ready:
        return starting(status)
    if notes := status.notes():
        return f"{activity}: {notes}"
    if status.warm_up is not None and not status.warm_up.done:
        return f"{activity}, while memory warms up: {show_warm_up(status.warm_up)}"
    return activity

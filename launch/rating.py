"""Rating a text with a run, window by window, and keeping the logits on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from neuronpipe.launch.client import Client
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.plan import Plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Scored
from neuronpipe.protocol.messages.request import Next, Score
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.protocol.segments import Segment
from neuronpipe.services.memory import run_layouts

Keep = Callable[[int, Scored], None]
"""(index of the window's first token, message): called while the logit rows are ours to read."""


def rate(
    client: Client,
    tokens: Sequence[int],
    *,
    window_tokens: int,
    path: Literal["decode", "prefill"],
    keep: Keep | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[float]:
    """Nats of every token but the first of each window."""
    nll: list[float] = []
    for first in range(0, len(tokens), window_tokens):
        window = tuple(tokens[first : first + window_tokens])
        ask = Score(request=f"window-{first}", tokens=window, path=path, logits=keep is not None)
        for message in client.request(ask):
            if isinstance(message, Scored):
                nll += message.nll
                progress(first + message.position + message.rows, len(tokens))
                if keep is not None:
                    keep(first, message)
                    client.send(Next(request=ask.request))
    return nll


def keep_logits(file: Path, directory: RunDirectory, package: Package, plan: Plan, tokens: int) -> Keep:
    """Copies logit rows from the run's exchange segment into a .npy file, float32 [tokens, vocabulary], as they come.
    Raises UserError when the file cannot be written."""
    import numpy as np

    vocabulary = package.manifest.shape.vocabulary
    try:
        out: Any = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(tokens, vocabulary))
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}") from None
    logits: Any = None

    def keep(first: int, scored: Scored) -> None:
        nonlocal logits
        if logits is None:  # the run is live: its segments are there
            run_file = directory.read()
            layout = run_layouts(package.manifest, plan)["exchange"]
            segment = Segment.open(layout, run_file.supervisor_pid, run_file.segments["exchange"].fd)
            logits = np.frombuffer(segment.map().view("logits"), dtype=np.float32).reshape(-1, vocabulary)
        start = first + scored.position
        out[start : start + scored.rows] = logits[scored.row : scored.row + scored.rows]
        if start + scored.rows == tokens:
            out.flush()

    return keep

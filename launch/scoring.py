"""Scoring a text with a run, one context window after the other, and storing the logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from neuronpipe.launch.client import Client
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.messages.client import Scored, Status
from neuronpipe.protocol.messages.request import Next, Score
from neuronpipe.protocol.run_directory import RunDirectory

Keep = Callable[[int, Scored], None]
"""Called with the index of a window's first token and a `Scored`, whose logit rows may be read during the call only."""


def score(
    client: Client,
    tokens: Sequence[int],
    *,
    window_tokens: int,
    path: Literal["decode", "prefill"],
    keep: Keep | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    on_wait: Callable[[Status | None], None] = lambda status: None,
) -> list[float]:
    """Return the negative log-likelihood, in nats, of every token but the first of each context window.

    path: the role that computes
    keep: called with each batch of logit rows
    progress: called with the number of scored tokens and of all tokens
    on_wait: as in `Client.request`

    Raises what `Client.request` raises.
    """
    nll: list[float] = []
    for first in range(0, len(tokens), window_tokens):
        window = tuple(tokens[first : first + window_tokens])
        request = Score(request=f"window-{first}", tokens=window, path=path, logits=keep is not None)
        for message in client.request(request, on_wait):
            if isinstance(message, Scored):
                nll += message.nll
                progress(first + message.position + message.rows, len(tokens))
                if keep is not None:
                    keep(first, message)
                    client.send(Next(request=request.request))
    return nll


@contextlib.contextmanager
def stored_logits(file: Path, directory: RunDirectory, package: Package, tokens: int) -> Iterator[Keep]:
    """Copy logit rows from the run's exchange segment into a .npy file as they come: float32 [tokens, vocabulary].

    Raises UserError if the file cannot be written; then there is no file.
    """
    import numpy as np

    vocabulary = package.manifest.model.vocabulary
    logits: Any = None
    # Written, not mapped: on a full disk a write fails, while a mapped page kills the process.
    with whole_file(file) as place, place.open("wb") as out:
        header = {"descr": "<f4", "fortran_order": False, "shape": (tokens, vocabulary)}
        np.lib.format.write_array_header_1_0(out, header)
        begin = out.tell()

        def keep(first: int, scored: Scored) -> None:
            nonlocal logits
            if logits is None:  # not before: the segments exist once the run is live
                run_file = directory.read()
                segment = run_file.open_segment("exchange")
                logits = np.frombuffer(segment.map().view("logits"), dtype=np.float32).reshape(-1, vocabulary)
            out.seek(begin + 4 * vocabulary * (first + scored.position))
            out.write(logits[scored.row : scored.row + scored.rows].data)

        yield keep

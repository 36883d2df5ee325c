"""The perplexity of a text, measured with a run of a package, and compared with the same model in f16."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from neuronpipe.launch.client import Client
from neuronpipe.launch.generation.stream import describe_wait
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.plan import plan_here
from neuronpipe.launch.progress import Elapsed, Progress
from neuronpipe.launch.scoring import score, stored_logits
from neuronpipe.launch.supervisor.start import started_run
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.predictor.calibration_texts import read_text
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.links import CONTROL
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer


@frozen
class TextLoss:
    """The perplexities of a text by a package and by the same model in f16.

    tokens: length of the text
    """

    perplexity: float
    perplexity_f16: float
    tokens: int

    @property
    def increase(self) -> float:
        """The relative increase over f16, e.g. 0.01 for 1 %."""
        return self.perplexity / self.perplexity_f16 - 1


def read_tokens(file: Path, package: Package, max_tokens: int | None = None) -> list[int]:
    """Return the tokens of a text file, at most `max_tokens`. Raises UserError if they are fewer than two."""
    tokens = FileTokenizer(package.tokenizer()).encode(read_text(file))[:max_tokens]
    if len(tokens) < 2:
        raise UserError(f"{file}: {len(tokens)} token(s): a text needs at least two tokens")
    return tokens


def score_with_run(
    package: Package,
    plan: Plan,
    tokens: list[int],
    *,
    path: Literal["decode", "prefill"],
    plain: bool,
    output: Path | None = None,
) -> list[float]:
    """Start a run and return the negative log-likelihood, in nats, of every token but the first of each context window.

    path: the role that computes
    plain: show progress as lines on stderr, not as one line that changes
    output: a .npy file for the logits
    """
    with (
        started_run(package, plan, None, stays=False) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
        Elapsed(plain=plain) as elapsed,
    ):
        stored = stored_logits(output, live.directory, package, len(tokens)) if output else contextlib.nullcontext()
        with stored as keep, Progress("scoring", "tokens", plain=plain) as progress:

            def report(done: int, total: int) -> None:
                elapsed.end()
                progress(done, total)

            return score(
                client,
                tokens,
                window_tokens=plan.compute.context_tokens,
                path=path,
                keep=keep,
                progress=report,
                on_wait=lambda status: elapsed.say(describe_wait(status, "scoring")),
            )


def measure_loss(package: Package, text: Path, convert_to_f16: Callable[[Path], Package], *, plain: bool) -> TextLoss:
    """Return the perplexities of the text by a new package and by the same model in f16.

    convert_to_f16: converts the model to f16 at the given path; this package is removed afterwards

    Raises UserError if the text has fewer than two tokens, or a run fails.
    """
    tokens = read_tokens(text, package)
    perplexity = _perplexity(package, tokens, plain=plain)
    with tempfile.TemporaryDirectory(dir=package.path.parent, prefix=f".{package.path.name}-f16-") as folder:
        perplexity_f16 = _perplexity(convert_to_f16(Path(folder) / "package"), tokens, plain=plain)
    return TextLoss(perplexity, perplexity_f16, len(tokens))


def _perplexity(package: Package, tokens: list[int], *, plain: bool) -> float:
    plan = plan_here(package, PlanOptions(), plain=plain).plan
    nll = score_with_run(package, plan, tokens, path="prefill", plain=plain)
    return math.exp(math.fsum(nll) / len(nll))

"""What a client is told when its work is done."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from neuronpipe.protocol.messages.client import Finished, FinishReason, ScoreFinished
from neuronpipe.services.coordinator.admission import Limits
from neuronpipe.services.coordinator.sequences import Generation, Scoring


def finished(work: Generation, reason: FinishReason, limits: Limits) -> Finished:
    """The account of a text; what only the shell knows of memory and flash is added there."""
    times = work.token_times
    span_s = times[-1] - times[0] if len(times) > 1 else 0.0
    return Finished(
        request=work.request,
        reason=reason,
        text=work.stream.shown,
        tokens=work.generated_tokens,
        prompt_tokens=work.prompt_tokens,
        cached_tokens=work.cached_tokens,
        ttft_ms=round(1000 * (times[0] - work.arrived_at), 3) if times else 0.0,
        tokens_per_s=round((len(times) - 1) / span_s, 2) if span_s > 0 else 0.0,
        tbt_ms=quantiles_ms(times),
        memory={},
        flash={},
        prefill=dict(work.prefill_cost),
        decode=dict(work.decode_cost),
        plan=limits.plan_id,
        mode=limits.mode,
    )


def score_finished(work: Scoring, now: float) -> ScoreFinished:
    """The account of a score."""
    targets = len(work.tokens) - 1
    mean = work.total_nll / targets if targets else 0.0
    return ScoreFinished(request=work.request, tokens=targets, nll_mean=mean, seconds=round(now - work.arrived_at, 3))


def quantiles_ms(times: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 of the gaps between consecutive times (seconds), in milliseconds; zeros without a gap."""
    gaps = sorted(1000 * (b - a) for a, b in itertools.pairwise(times))
    if not gaps:
        return {"p50": 0.0, "p90": 0.0, "p99": 0.0}

    def quantile(share: float) -> float:
        return round(gaps[min(len(gaps) - 1, int(share * len(gaps)))], 3)

    return {"p50": quantile(0.50), "p90": quantile(0.90), "p99": quantile(0.99)}

"""The search: it makes a plan of every allowed choice and returns the one that is expected to be fastest.

    minimize    the time of a request: of a usual one, or of its answer alone if a target speed is set
    over        variants (mode x decode workers x bundles or parts), and for each variant
                prefill chunk x reads at once
    subject to  the plan takes no more than the memory limit

`make_plan` makes a whole plan of each choice and decides everything else by rules. The search also finds the smallest
limit with which a given speed is expected. It reads no files and measures nothing.

With more memory, faster cores, memory or flash, or fewer bytes, the chosen plan is never expected to be slower. So the
fastest candidate is chosen, without a preference for a variant: with one, a part that becomes faster could bring the
preferred variant back, which is slower. And what is tried at a limit includes what is tried at a smaller one. The cost
model has small steps; so if the plan of a smaller limit is faster, the search keeps that plan, which fits as well. Only
a device that was measured briefly keeps the rules' number of workers unless another is faster by `min_gain`.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.read_sizes import depths
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.memory_budget import MIB, min_chunk_tokens, untrusted_bytes, usable_bytes
from neuronpipe.plans.plan.segment_sizes import PARTIAL_TOKENS, RunShape, embedding_flash_bytes
from neuronpipe.plans.planner.candidates import (
    ANSWER,
    USUAL,
    Candidate,
    Request,
    SearchResult,
    Space,
    chunk_and_depth,
    show_speed,
)
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import LimitTooSmall, PlanOptions
from neuronpipe.plans.planner.planner import CHUNK_TOKENS, make_plan
from neuronpipe.plans.planner.shared_results import SharedResults
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

MODEL_STEP = 0.98  # a chunk may be faster than the bounds say by a step of the cost model
PRECISION = 0.01  # relative, of the smallest limit that reaches a target speed
PROMPT_ALLOWANCE = 0.05  # memory for faster prompts, relative to the smallest limit that reaches a target speed
POINTS = 23  # number of limits whose plans may be kept with more memory
UNLIMITED_BYTES = 1 << 60


class Search:
    """The search for one package, with the choices of `space`.

    options: options of all plans; their `memory_bytes` and `mode` are ignored
    request: the request whose expected time is minimized
    """

    def __init__(
        self,
        manifest: Manifest,
        space: Space,
        options: PlanOptions,
        request: Request = USUAL,
        frequencies: AccessFrequencies | None = None,
    ) -> None:
        self.manifest, self.space, self.options, self.request = manifest, space, options, request
        self._shared, self._frequencies = SharedResults(manifest), frequencies
        self._trials: dict[int | None, _Trial] = {}
        self._limits: tuple[int, ...] | None = None

    def within(self, limit_bytes: int | None) -> SearchResult:
        """Return the candidates within this limit and the chosen one.

        limit_bytes: None: the device's share of the available memory

        Raises LimitTooSmall if no choice fits, and what `make_plan` raises for the rules' mode and workers.
        """
        trial = self._try(limit_bytes, every_variant=True)
        if limit_bytes is None:
            limit_bytes = self.space.place(self.space.workers[0]).memory_bytes
            self._trials.setdefault(limit_bytes, trial)
        result = SearchResult(
            candidates=trial.candidates,
            points=trial.points,
            rules=trial.rules,
            by_rules=trial.by_rules,
            chosen=trial.chosen,
        )
        smaller = self._faster_with_less(limit_bytes, trial.chosen)
        return result if smaller is None else self._keeping(smaller, limit_bytes, result)

    def best(self, limit_bytes: int) -> Candidate:
        """Return what `within` chooses, without finding the fastest plan of each slower variant. Raises what `within`
        raises."""
        chosen = self._try(limit_bytes).chosen
        smaller = self._faster_with_less(limit_bytes, chosen)
        return chosen if smaller is None else self._with_limit(smaller, limit_bytes)

    def ms(self, candidate: Candidate) -> float:
        """Return the time by which candidates are compared: that of the request or, if the speed of prompts is not
        known, that of one token of an answer. Infinite if the speed of decoding is not known."""
        expected = candidate.plan.expected
        return (self.request if expected.prefill_tokens_per_s else ANSWER).ms(expected)

    def limits_bytes(self) -> tuple[int, ...]:
        """Return POINTS limits at equal ratios, ascending: from the smallest that any choice fits to one with which
        everything is resident with every choice."""
        if self._limits is None:
            plans = [candidate.plan for candidate in self._unlimited]
            max_total_bytes = max(start.memory.total_bytes() for start in plans) + MIB
            min_limit, max_limit = min(start.memory.least_bytes for start in plans), max_total_bytes
            while usable_bytes(max_limit) < max_total_bytes:
                max_limit += max(MIB, max_limit // 100)
            steps = [math.ceil(min_limit * (max_limit / min_limit) ** (n / (POINTS - 1))) for n in range(POINTS - 1)]
            self._limits = *(min(step, max_limit) for step in steps), max_limit
        return self._limits

    def reaching(self, tokens_per_s: float, max_bytes: int | None = None) -> SearchResult:
        """Return the choice within the smallest limit that reaches this expected speed, plus PROMPT_ALLOWANCE.

        The smallest limit is found up to PRECISION. Of the choices of the best variant that reach the speed, the one
        with the fastest usual request is chosen. The request of the search must be ANSWER, whose speed grows with
        memory.

        max_bytes: maximum of the limit

        Raises UserError with the fastest possible speed if no limit reaches this one.
        """
        min_limit, *_, everything = self.limits_bytes()
        max_limit = everything if max_bytes is None else min(max_bytes, everything)
        if max_limit < min_limit or not self._reaches(max_limit, tokens_per_s):
            raise self._out_of_reach(tokens_per_s, self.best(max_limit))
        limits = [limit for limit in self.limits_bytes() if limit < max_limit]
        first = bisect.bisect_left(limits, True, key=lambda limit: self._reaches(limit, tokens_per_s))
        high = limits[first] if first < len(limits) else max_limit
        low = limits[first - 1] if first else high
        while high > low * (1 + PRECISION):
            middle = math.isqrt(low * high)
            if self._reaches(middle, tokens_per_s):
                high = middle
            else:
                low = middle
        return self._reached_with_prompts(min(max_limit, int(high * (1 + PROMPT_ALLOWANCE))), tokens_per_s)

    def with_memory(self, result: SearchResult, limit_bytes: int) -> Candidate:
        """Return the choice within another limit, with the target speed of `result`. Raises what `within` raises."""
        return self._with_fast_prompts(self.best(limit_bytes), result.target)

    def with_more_workers(self, result: SearchResult) -> Candidate | None:
        """Return the best choice with the chosen options and one more decode worker. Cores that the user excluded may
        be used. None if there is no core or no memory for the worker."""
        chosen = result.chosen
        device = self.space.more(chosen.workers + 1)
        if device is None:
            return None
        try:
            start = self._candidate(
                device, dataclasses.replace(chosen.options, offloaded_blocks=None, offloaded_matrices=None)
            )
        except UserError:
            return None
        return self._with_fast_prompts(min(self.refinements(start, self.ms(start)), key=self.ms), result.target)

    # ---- smaller limits --------------------------------------------------------------------------------------
    def _faster_with_less(self, limit_bytes: int, chosen: Candidate) -> Candidate | None:
        """Return the fastest choice within a smaller limit if it is faster than `chosen`, else None. Compared are the
        limits of `limits_bytes` with which the options of `chosen` are faster, and all limits that this search has
        tried before. With --ffn-resident the result is None: the residency is given, and a smaller limit would only
        shrink staging."""
        if chosen.tokens_per_s is None or self.options.ffn_resident_share is not None:
            return None
        for limit in self.limits_bytes():
            if limit < limit_bytes and self._may_be_faster(limit, chosen):
                self._try(limit)
        smaller = [trial.chosen for limit, trial in self._trials.items() if limit is not None and limit < limit_bytes]
        fastest = min(smaller, key=self.ms, default=None)
        return fastest if fastest is not None and self.ms(fastest) < self.ms(chosen) else None

    def _may_be_faster(self, limit_bytes: int, chosen: Candidate) -> bool:
        """Return True if the options of `chosen` are expected to be faster with a smaller limit, which was not
        tried yet. This takes one plan, while a trial takes hundreds."""
        if limit_bytes in self._trials:
            return False  # the caller compares all that was tried
        try:
            smaller = self._candidate(chosen.device, dataclasses.replace(chosen.options, memory_bytes=limit_bytes))
        except UserError:
            return False
        return self.ms(smaller) < self.ms(chosen)

    @functools.cached_property
    def _unlimited(self) -> list[Candidate]:
        """A candidate of every variant, with memory for everything. That of the rules is first."""
        return self._starts(UNLIMITED_BYTES)

    def _with_limit(self, candidate: Candidate, limit_bytes: int) -> Candidate:
        """Return the candidate with a larger limit than the one that it was made for. Its plan still fits, since
        `trusted_bytes` never shrinks while the limit grows."""
        plan = candidate.plan
        untrusted = untrusted_bytes(self.manifest, RunShape.of(plan.compute), limit_bytes)
        memory = dataclasses.replace(plan.memory, limit_bytes=limit_bytes, **untrusted)
        return dataclasses.replace(
            candidate,
            options=dataclasses.replace(candidate.options, memory_bytes=limit_bytes),
            plan=dataclasses.replace(plan, memory=memory),
        )

    def _keeping(self, smaller: Candidate, limit_bytes: int, result: SearchResult) -> SearchResult:
        """Return this result with the choice of a smaller limit as the chosen one. It replaces the candidate of the
        same variant."""
        chosen = self._with_limit(smaller, limit_bytes)
        other_candidates = (candidate for candidate in result.candidates if candidate.variant != chosen.variant)
        rules = result.rules
        return dataclasses.replace(
            result,
            candidates=(chosen, *other_candidates),
            rules=chosen if rules is not None and rules.variant == chosen.variant else rules,
            chosen=chosen,
            smaller_limit_bytes=smaller.plan.memory.limit_bytes,
        )

    # ---- a speed ---------------------------------------------------------------------------------------------
    def _reaches(self, limit_bytes: int, tokens_per_s: float) -> bool:
        expected = self.best(limit_bytes).tokens_per_s
        return expected is not None and expected >= tokens_per_s

    def _reached_with_prompts(self, limit_bytes: int, tokens_per_s: float) -> SearchResult:
        result = self.within(limit_bytes)
        best, chosen = result.chosen, self._with_fast_prompts(result.chosen, tokens_per_s)
        candidates = tuple(chosen if candidate is best else candidate for candidate in result.candidates)
        rules = chosen if result.rules is best else result.rules
        return dataclasses.replace(result, candidates=candidates, rules=rules, chosen=chosen, target=tokens_per_s)

    def _with_fast_prompts(self, best: Candidate, tokens_per_s: float | None) -> Candidate:
        """Return the choice of the same variant with the fastest usual request among those that reach the speed.

        tokens_per_s: None: return `best` itself
        """
        if tokens_per_s is None:
            return best
        fast_enough = [
            candidate for candidate in self.refinements(best) if (candidate.tokens_per_s or 0.0) >= tokens_per_s
        ]
        return min([best, *fast_enough], key=lambda candidate: USUAL.ms(candidate.plan.expected))

    def _out_of_reach(self, tokens_per_s: float, best: Candidate) -> UserError:
        option = f"--target-speed {tokens_per_s:.10g}"
        if best.tokens_per_s is None:
            return UserError(f"{option}: no speed can be expected, not all was measured; take --memory")
        limit = best.plan.memory.limit_bytes
        more = "" if limit >= self.limits_bytes()[-1] else "; a larger --memory may reach more"
        return UserError(
            f"{option}: the most that is expected up to {limit / MIB:,.0f} MiB is {show_speed(best.tokens_per_s)}, "
            f"{best.description()}{more}"
        )

    # ---- choices ---------------------------------------------------------------------------------------------
    def _try(self, limit_bytes: int | None, *, every_variant: bool = False) -> _Trial:
        """Return the fastest candidate within this limit.

        every_variant: also find the fastest of each slower variant
        """
        trial = self._trials.get(limit_bytes)
        if trial is None or (every_variant and not trial.has_every_variant):
            trial = self._trials[limit_bytes] = self._trial(limit_bytes, every_variant)
        return trial

    def _trial(self, limit_bytes: int | None, every_variant: bool) -> _Trial:
        starts, points, below_ms = self._starts(limit_bytes), 0, math.inf
        is_of_rules = (starts[0].options.mode, starts[0].workers) == (self.space.modes[0], self.space.workers[0])

        def slowdown(candidate: Candidate) -> float:
            return 1.0 if not is_of_rules or candidate.workers == starts[0].workers else 1 + candidate.device.min_gain

        best = list(starts)
        for n in sorted(range(len(starts)), key=lambda n: self.ms(starts[n])):  # the fastest leave out most of others
            factor = slowdown(starts[n])
            refined = self.refinements(starts[n], self.ms(starts[n]) if every_variant else below_ms / factor)
            best[n], points = min(refined, key=self.ms), points + len(refined)
            below_ms = min(below_ms, self.ms(best[n]) * factor)

        def rank(candidate: Candidate) -> tuple[float, int, int]:
            judged_ms = self.ms(candidate) * slowdown(candidate)
            return judged_ms, candidate.workers, candidate.plan.memory.total_bytes()

        fastest = min(best, key=rank)
        return _Trial(
            candidates=tuple(best),
            points=points,
            rules=best[0] if is_of_rules else None,
            by_rules=starts[0] if is_of_rules else None,
            chosen=best[0] if fastest.tokens_per_s is None else fastest,
            has_every_variant=every_variant,
        )

    def _starts(self, limit_bytes: int | None) -> list[Candidate]:
        """Return a candidate of every variant that fits, with the rules' chunk and depth. The rules' variant is first.
        Raises LimitTooSmall if none fits."""
        candidates: list[Candidate] = []
        refused: list[LimitTooSmall] = []
        for mode in self.space.modes:
            for workers in self.space.workers:
                options = dataclasses.replace(self.options, mode=mode, memory_bytes=limit_bytes)
                try:
                    candidate = self._candidate(self.space.place(workers), options)
                except LimitTooSmall as error:
                    refused.append(error)
                    continue
                except UserError:
                    if (mode, workers) == (self.space.modes[0], self.space.workers[0]):
                        raise
                    continue  # too many workers for the requested feed-forward bytes
                candidates.append(candidate)
                if self._may_change_reads(candidate):
                    other_options = dataclasses.replace(options, bundle=not candidate.plan.flash.bundle)
                    candidates.append(self._candidate(candidate.device, other_options))
        if not candidates:
            raise min(refused, key=lambda error: error.min_bytes)
        return candidates

    def refinements(self, start: Candidate, below_ms: float | None = None) -> list[Candidate]:
        """Return `start` and the candidates of the same variant with other chunks and depths, and with a small
        embedding on flash instead of in memory: of those with equal chunks and depths the fastest. Only `start` if
        options disable techniques, or a speed is not known.

        below_ms: leave out chunks that cannot be faster than this or than another candidate; None: try all
        """
        expected = start.plan.expected
        is_known = expected.tokens_per_s is not None and expected.prefill_tokens_per_s is not None
        if not is_known or self.options.baseline is not None or self.options.without:
            return [start]
        compute, blocks = start.plan.compute, start.plan.compute.held_blocks or None
        matrices = compute.held_matrices if blocks else None
        options = dataclasses.replace(
            start.options, bundle=start.plan.flash.bundle, offloaded_blocks=blocks, offloaded_matrices=matrices
        )
        candidates = {chunk_and_depth(start.plan): start}
        min_tokens = min_chunk_tokens(RunShape.of(compute))
        chunks = min_tokens, *sorted(tokens for tokens in CHUNK_TOKENS if tokens > min_tokens)
        may_read = self._may_read(start)
        for embedding_on_flash, depth, staging_first in itertools.product(
            self._embeddings(start, may_read), self._depths(start, may_read), (False, True) if may_read else (False,)
        ):
            tried = dataclasses.replace(
                options, depth=depth, embedding_on_flash=embedding_on_flash, staging_first=staging_first
            )
            for candidate in self._with_chunks(start.device, tried, chunks, below_ms):
                # Staging depends on the chunk that was asked for, so plans of the same chunk and depth may differ.
                key = chunk_and_depth(candidate.plan)
                candidates[key] = min(candidates.get(key, candidate), candidate, key=self.ms)
            if below_ms is not None:
                below_ms = min(below_ms, *map(self.ms, candidates.values()))
        return list(candidates.values())

    def _with_chunks(
        self, device: DeviceFacts, options: PlanOptions, chunks: Sequence[int], below_ms: float | None
    ) -> Iterator[Candidate]:
        """Yield candidates with the smallest and the largest chunk, and with those between that may be faster."""

        def with_chunk(tokens: int) -> Candidate:
            return self._candidate(device, dataclasses.replace(options, prefill_chunk_tokens=tokens))

        smallest = with_chunk(chunks[0])
        yield smallest
        if len(chunks) == 1 or not self._may_be_below(below_ms, smallest, None):
            return
        largest = with_chunk(chunks[-1])
        yield largest
        below_ms = None if below_ms is None else min(below_ms, self.ms(smallest), self.ms(largest))
        intervals = [(chunks, smallest, largest)]
        while intervals:
            tokens, smaller, larger = intervals.pop()
            fitted = larger.plan.compute.prefill_chunk_tokens
            # The plan would be that of the larger chunk, reduced by memory; one reduced by partial sums may not.
            between = [each for each in tokens[1:-1] if each < fitted or fitted == PARTIAL_TOKENS]
            if not between or not self._may_be_below(below_ms, smaller, larger):
                continue
            half = len(between) // 2
            middle = with_chunk(between[half])
            yield middle
            below_ms = None if below_ms is None else min(below_ms, self.ms(middle))
            intervals.append(((tokens[0], *between[: half + 1]), smaller, middle))
            intervals.append(((*between[half:], tokens[-1]), middle, larger))

    def _may_be_below(self, below_ms: float | None, smaller: Candidate, larger: Candidate | None) -> bool:
        """Return True if a chunk between these may take less than `below_ms`.

        Its answers are no faster than with the smaller chunk. Its prompts are no faster than with the larger one: half
        a chunk reads all that is missing twice, so at least as much unless less than half as much is missing.
        """
        prompt_tokens_per_s: float | None = math.inf
        if larger is not None and 2 * self._missing_slots(smaller) >= self._missing_slots(larger):
            prompt_tokens_per_s = larger.plan.expected.prefill_tokens_per_s
        bound = dataclasses.replace(smaller.plan.expected, prefill_tokens_per_s=prompt_tokens_per_s)
        return below_ms is None or MODEL_STEP * self.request.ms(bound) < below_ms

    def _missing_slots(self, candidate: Candidate) -> int:
        memory = candidate.plan.memory
        return 2 * self.manifest.clusters - memory.trigger_slots - memory.value_slots

    def _embeddings(self, start: Candidate, may_read: bool) -> tuple[bool, ...]:
        """Return whether an embedding that may be on flash is tried there. A small one that the rules keep in memory is
        tried in both places if slots may lack memory."""
        if start.options.embedding_on_flash:
            return (True,)
        may_move = not start.plan.compute.embedding_on_flash and embedding_flash_bytes(self.manifest) > 0
        return (False, True) if may_move and may_read else (False,)

    def _depths(self, start: Candidate, may_read: bool) -> Iterable[int]:
        """Return the measured depths, or only that of the rules if flash was not measured or nothing is read."""
        if start.device.flash is None or not may_read:
            return (start.plan.flash.depth,)
        return depths(start.device.flash)

    def _may_read(self, start: Candidate) -> bool:
        """Return True if steps with the options of `start`, or with these and the largest chunk, read from flash."""
        if start.plan.expected.flash_reads_per_token:
            return True
        larger = dataclasses.replace(start.options, prefill_chunk_tokens=CHUNK_TOKENS[0])
        return self._candidate(start.device, larger).plan.expected.flash_reads_per_token > 0

    def _candidate(self, device: DeviceFacts, options: PlanOptions) -> Candidate:
        plan = make_plan(self.manifest, device, options, self._shared, self._frequencies)
        return Candidate(device=device, options=options, plan=plan)

    def _may_change_reads(self, start: Candidate) -> bool:
        """Return True if bundles and parts can be compared: speeds are known, steps read, and no option decides."""
        options = self.options
        fixed = options.baseline is not None or "bundle" in options.without or options.bundle is not None
        return not fixed and start.tokens_per_s is not None and self._may_read(start)


@frozen(kw_only=True)
class _Trial:
    """The candidates within a limit, one of each variant, that of the rules first. Fields are as in SearchResult, but
    no smaller limit counts. If nothing was measured, the rules choose.

    has_every_variant: each candidate is the fastest of its variant; else only the chosen one is
    """

    candidates: tuple[Candidate, ...]
    points: int
    rules: Candidate | None
    by_rules: Candidate | None
    chosen: Candidate
    has_every_variant: bool

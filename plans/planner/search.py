"""The search: it makes a plan of every allowed choice and returns the one that is expected to be fastest.

    minimize    the time of a request: of a usual one, or of its answer alone if a target speed is set
    over        variants (mode x decode workers x bundles or parts), and for each variant
                prefill chunk x reads at once
    subject to  the plan takes no more than the memory limit

`make_plan` makes a whole plan of each choice and decides everything else by rules. The search also finds the smallest
limit with which a given speed is expected. It reads no files and measures nothing.

With more memory, the chosen plan is never expected to be slower. Each choice by itself gains from memory. But a variant
other than the rules' is only chosen if it is clearly faster, and returning to the rules where it is no longer clearly
faster would lose speed. So variants are chosen at fixed limits, from the smallest upwards, and the search returns to
the rules only where they are as fast. Between two of these limits the variant does not change. The cost model has small
steps; so if the plan of a smaller limit is faster, the search keeps that plan, which fits as well. There is one
exception: from the smallest limit on that the rules' variant fits, plans of limits below it are not kept. Otherwise a
small error of the model would leave most of the memory unused.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterable

from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.read_sizes import depths
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.plan.memory_budget import MIB, min_chunk_tokens, untrusted_bytes, usable_bytes
from neuronpipe.plans.plan.segment_sizes import PARTIAL_TOKENS, RunShape
from neuronpipe.plans.planner.candidates import (
    ANSWER,
    USUAL,
    Candidate,
    Request,
    SearchResult,
    Space,
    Variant,
    chunk_and_depth,
    show_speed,
    with_variant,
)
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import LimitTooSmall, PlanOptions
from neuronpipe.plans.planner.planner import CHUNK_TOKENS, make_plan
from neuronpipe.plans.planner.shared_results import SharedResults
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

# How much faster a variant must be than the rules'. With weights in memory, expectations are wrong by up to a third
# (tests/bench/README.md): a smaller gain may be an error of the model, and the choice would change from start to start.
# Chunks and depths need no margin: all of them use the same kernels, so the model's errors are the same for all.
MIN_GAIN = 0.3
MIN_CHUNK_GAIN = 0.002  # relative
PRECISION = 0.01  # relative, of the smallest limit that reaches a target speed
PROMPT_ALLOWANCE = 0.05  # memory for faster prompts, relative to the smallest limit that reaches a target speed
POINTS = 23  # number of limits at which variants are chosen
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
        self._chosen: dict[int, Candidate] = {}  # by limit, before a smaller limit's plan may be kept
        self._variants: dict[int, Variant | None] = {}
        self._limits: tuple[int, ...] | None = None

    def within(self, limit_bytes: int | None) -> SearchResult:
        """Return the candidates within this limit and the chosen one.

        limit_bytes: None: the device's share of the available memory

        Raises LimitTooSmall if no choice fits, and what `make_plan` raises for the rules' mode and workers.
        """
        trial = self._try(limit_bytes)
        if limit_bytes is None:
            limit_bytes = self.space.place(self.space.workers[0]).memory_bytes
        variant = self._variant_within(limit_bytes)
        chosen = with_variant(variant, trial.candidates) or trial.rules or trial.candidates[0]
        self._chosen.setdefault(limit_bytes, chosen)
        result = SearchResult(
            candidates=trial.candidates,
            points=trial.points,
            rules=trial.rules,
            by_rules=trial.by_rules,
            chosen=chosen,
        )
        smaller = self._faster_with_less(limit_bytes, chosen)
        return result if smaller is None else self._keeping(smaller, limit_bytes, result)

    def quick(self, limit_bytes: int) -> Candidate:
        """Return the rules' variant within this limit, or the fastest if it is clearly faster.

        This takes a tenth of the plans: no smaller limit counts, so `within` may choose otherwise. The choice is at
        most MIN_GAIN slower than the fastest plan of this limit. Raises what `within` raises.
        """
        trial = self._try(limit_bytes)
        is_clear = trial.rules is None or (1 + MIN_GAIN) * self.ms(trial.fastest) < self.ms(trial.rules)
        return trial.fastest if trial.rules is None or is_clear else trial.rules

    def best(self, limit_bytes: int) -> Candidate:
        """Return what `within` chooses, but make plans of the chosen variant only. Raises what `within` raises."""
        chosen = self._choose(limit_bytes)
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
        return self._with_fast_prompts(self._fastest(self.refinements(start)), result.target)

    def _choose(self, limit_bytes: int) -> Candidate:
        """Return the choice within this limit, without comparing it with those of smaller limits."""
        if limit_bytes not in self._chosen:
            variant = self._variant_within(limit_bytes)
            start = None
            if variant is not None and limit_bytes not in self._trials:
                start = with_variant(variant, self._starts(limit_bytes, variant))
            if start is None:
                trial = self._try(limit_bytes)
                chosen = with_variant(variant, trial.candidates) or trial.rules or trial.candidates[0]
            else:
                chosen = self._fastest(self.refinements(start))
            self._chosen[limit_bytes] = chosen
        return self._chosen[limit_bytes]

    # ---- smaller limits --------------------------------------------------------------------------------------
    def _faster_with_less(self, limit_bytes: int, chosen: Candidate) -> Candidate | None:
        """Return the fastest choice within a smaller limit if it is faster than `chosen`, else None. Compared are the
        limits of `limits_bytes` with which the options of `chosen` are faster, and all limits that this search has
        chosen for before. If the rules' variant fits this limit, limits that it does not fit are left out. With
        --ffn-resident the result is None: the residency is given, and a smaller limit would only shrink staging."""
        if chosen.tokens_per_s is None or self.options.ffn_resident_share is not None:
            return None
        min_rules_bytes = self._unlimited[0].plan.memory.least_bytes
        lowest_bytes = min_rules_bytes if limit_bytes >= min_rules_bytes else 0
        for limit in self.limits_bytes():
            if lowest_bytes <= limit < limit_bytes and self._may_be_faster(limit, chosen):
                self._choose(limit)
        smaller = [candidate for limit, candidate in self._chosen.items() if lowest_bytes <= limit < limit_bytes]
        fastest = min(smaller, key=self.ms, default=None)
        return fastest if fastest is not None and self.ms(fastest) < self.ms(chosen) else None

    def _may_be_faster(self, limit_bytes: int, chosen: Candidate) -> bool:
        """Return True if the options of `chosen` are expected to be faster with a smaller limit, for which nothing was
        chosen yet. This takes one plan, while choosing takes hundreds."""
        if limit_bytes in self._chosen:
            return False  # the caller compares all that was chosen
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

    # ---- variants --------------------------------------------------------------------------------------------
    def _variant_within(self, limit_bytes: int) -> Variant | None:
        return self._variant_at(max(0, bisect.bisect_right(self.limits_bytes(), limit_bytes) - 1))

    def _variant_at(self, step: int) -> Variant | None:
        """Return the variant chosen at limit number `step`; None if nothing can be compared, and the rules decide."""
        if step not in self._variants:
            self._variants[step] = self._choose_variant(step)
        return self._variants[step]

    def _choose_variant(self, step: int) -> Variant | None:
        try:
            trial = self._try(self.limits_bytes()[step])
        except UserError:  # an --ffn-resident that is too small for the rules' choice
            return None
        if not trial.measured:
            return None
        fastest, rules = trial.fastest, trial.rules
        if rules is None or (1 + MIN_GAIN) * self.ms(fastest) < self.ms(rules):
            return fastest.variant
        if self.ms(rules) <= self.ms(fastest):
            return rules.variant
        previous = self._previous_variant(step)
        previous_candidate = with_variant(previous, trial.candidates) if previous is not None else None
        return (
            rules.variant
            if previous_candidate is None or self.ms(rules) <= self.ms(previous_candidate)
            else previous_candidate.variant
        )

    def _previous_variant(self, step: int) -> Variant | None:
        """Return the variant chosen at the next smaller limit. None if the rules' variant did not fit there, since the
        two were then not compared."""
        if step == 0 or self._try(self.limits_bytes()[step - 1]).rules is None:
            return None
        return self._variant_at(step - 1)

    # ---- choices ---------------------------------------------------------------------------------------------
    def _fastest(self, candidates: list[Candidate]) -> Candidate:
        return min(candidates, key=self.ms)

    def _try(self, limit_bytes: int | None) -> _Trial:
        if limit_bytes not in self._trials:
            starts = self._starts(limit_bytes)
            refined = [self.refinements(start) for start in starts]
            best = tuple(map(self._fastest, refined))
            is_of_rules = (starts[0].options.mode, starts[0].workers) == (self.space.modes[0], self.space.workers[0])
            self._trials[limit_bytes] = _Trial(
                candidates=best,
                points=sum(map(len, refined)),
                rules=best[0] if is_of_rules else None,
                by_rules=starts[0] if is_of_rules else None,
                fastest=min(
                    best,
                    key=lambda candidate: (self.ms(candidate), candidate.workers, candidate.plan.memory.total_bytes()),
                ),
            )
        return self._trials[limit_bytes]

    def _starts(self, limit_bytes: int | None, variant: Variant | None = None) -> list[Candidate]:
        """Return a candidate of every variant that fits, with the rules' chunk and depth. The rules' variant is first.
        Raises LimitTooSmall if none fits.

        variant: restricts mode and workers to those of this variant
        """
        candidates: list[Candidate] = []
        refused: list[LimitTooSmall] = []
        for mode in self.space.modes if variant is None else (variant.mode,):
            for workers in self.space.workers if variant is None else (variant.workers,):
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
                if self._may_change_reads(candidate.plan):
                    other_options = dataclasses.replace(options, bundle=not candidate.plan.flash.bundle)
                    candidates.append(self._candidate(candidate.device, other_options))
        if not candidates:
            raise min(refused, key=lambda error: error.min_bytes)
        return candidates

    def refinements(self, start: Candidate, min_chunk_gain: float = MIN_CHUNK_GAIN) -> list[Candidate]:
        """Return `start` and the candidates of the same variant with other chunks and depths. Only `start` if options
        disable techniques, or a speed is not known. Chunks are tried from the largest that fits. Half a chunk gives
        slots half of the memory that the halving before gave, and reads twice as much for a prompt. So no smaller
        chunk is tried after one that gained less than `min_chunk_gain`; -inf: all chunks are tried."""
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
        for depth in self._depths(start):
            fitted_tokens, fitted_ms = CHUNK_TOKENS[0] + 1, math.inf
            for chunk in (*(tokens for tokens in CHUNK_TOKENS if tokens > min_tokens), min_tokens):
                # The plan would be that of the chunk before, reduced by memory; one reduced by partial sums may not.
                if chunk == fitted_tokens or chunk > fitted_tokens != PARTIAL_TOKENS:
                    continue
                tried = dataclasses.replace(options, prefill_chunk_tokens=chunk, depth=depth)
                candidate = self._candidate(start.device, tried)
                candidates.setdefault(chunk_and_depth(candidate.plan), candidate)
                before_tokens, before_ms = fitted_tokens, fitted_ms
                fitted_tokens, fitted_ms = candidate.plan.compute.prefill_chunk_tokens, self.ms(candidate)
                if fitted_tokens != before_tokens and fitted_ms > (1 - min_chunk_gain) * before_ms:
                    break
        return list(candidates.values())

    def _depths(self, start: Candidate) -> Iterable[int]:
        """Return the measured depths, or only that of the rules if flash was not measured or nothing is read."""
        if start.device.flash is None or not start.plan.expected.flash_reads_per_token:
            return (start.plan.flash.depth,)
        return depths(start.device.flash)

    def _candidate(self, device: DeviceFacts, options: PlanOptions) -> Candidate:
        plan = make_plan(self.manifest, device, options, self._shared, self._frequencies)
        return Candidate(device=device, options=options, plan=plan)

    def _may_change_reads(self, plan: Plan) -> bool:
        """Return True if bundles and parts can be compared: speeds are known, the plan reads, and no option decides."""
        options = self.options
        fixed = options.baseline is not None or "bundle" in options.without or options.bundle is not None
        return not fixed and plan.expected.tokens_per_s is not None and plan.expected.flash_reads_per_token > 0


@frozen(kw_only=True)
class _Trial:
    """The fastest candidate of each variant within a limit, that of the rules first. Fields are as in SearchResult."""

    candidates: tuple[Candidate, ...]
    points: int
    rules: Candidate | None
    by_rules: Candidate | None
    fastest: Candidate

    @property
    def measured(self) -> bool:
        return self.fastest.tokens_per_s is not None

"""The search: of all choices that are allowed, the one whose plan is expected to be fastest.

    minimize    the time of a request: of a usual one, or of its answer alone where a speed is asked for
    over        ways (mode x decode workers x whether clusters are read whole), and of each way
                tokens of a prompt at once x reads at once
    subject to  the plan takes no more than the limit

`plan` makes a whole plan of each choice and decides the rest by rules. Or the other way round: the smallest limit with
which a speed is expected. Pure, as the planner is.

More memory is never expected to be slower. Each choice by itself gains from memory, so the best of them does; but a way
that is not that of the rules must be clearly faster, and where it ceases to be, going back to the rules would lose
speed. So ways are decided at fixed limits, from the least that holds what the rules choose, upwards, and the rules are
gone back to only where they are as fast. Between two of these limits the way stays.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.read_sizes import depths
from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Expected, Mode, Plan
from neuronpipe.plans.plan.memory_budget import MIB, Budgets, min_chunk_tokens, usable_bytes
from neuronpipe.plans.plan.segment_sizes import RunShape
from neuronpipe.plans.planner.planner import CHUNK_TOKENS, DeviceFacts, LimitTooSmall, PlanOptions, plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

# What is expected is off by up to a third in memory (tests/bench/README.md): with less to gain, plans would leave
# proven rules for an error of the model, and change from start to start. It is of ways. What a chunk or depth is worth
# is memory for neurons, whose errors the choices have in common.
MIN_GAIN = 0.3
PRECISION = 0.01  # of the smallest limit
PROMPT_ALLOWANCE = 0.05  # of the smallest limit that reaches a speed: what prompts may have besides
POINTS = 23  # limits from the least to that with which everything is resident, at which ways are decided
UNLIMITED_BYTES = 1 << 60


@frozen(kw_only=True)
class Request:
    """What is to be fast: a prompt of so many tokens, and an answer."""

    prompt_tokens: int
    answer_tokens: int

    def ms(self, expected: Expected) -> float:
        """Its time, of one text; infinite where that was not measured. A prompt's chunks take alike."""
        if not expected.tokens_per_s or (self.prompt_tokens and not expected.prefill_tokens_per_s):
            return math.inf
        prompt_s = self.prompt_tokens / expected.prefill_tokens_per_s if expected.prefill_tokens_per_s else 0.0
        return 1e3 * (prompt_s + self.answer_tokens / expected.tokens_per_s)


USUAL = Request(prompt_tokens=512, answer_tokens=128)  # llama-bench's pp512 and tg128, one after the other
ANSWER = Request(prompt_tokens=0, answer_tokens=1)


@frozen(kw_only=True)
class Space:
    """What may be chosen. The first mode and the first number of workers are those of the rules.

    place: the device with so many decode workers on its cores
    more: the same with cores that were left out by request; None where there is no core for so many
    """

    modes: tuple[Mode, ...]
    workers: tuple[int, ...]
    place: Callable[[int], DeviceFacts]
    more: Callable[[int], DeviceFacts | None] = lambda workers: None


@frozen(kw_only=True)
class Way:
    """What must be clearly faster than what the rules choose."""

    mode: Mode
    workers: int
    bundle: bool


@frozen(kw_only=True)
class Candidate:
    """A choice: the device and the wish that name it, and the plan that it makes."""

    device: DeviceFacts
    wanted: PlanOptions
    plan: Plan

    @property
    def tokens_per_s(self) -> float | None:
        """What is expected; None where something was not measured."""
        return self.plan.expected.tokens_per_s

    @property
    def workers(self) -> int:
        """Decode workers."""
        return len(self.plan.compute.decode_workers())

    @property
    def way(self) -> Way:
        """How it computes and reads."""
        return Way(mode=self.plan.compute.mode, workers=self.workers, bundle=self.plan.flash.bundle)

    @property
    def reads(self) -> str:
        """What is read together."""
        return "clusters whole" if self.plan.flash.bundle else "parts apart"

    def named(self) -> str:
        """For a person."""
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"mode {self.plan.compute.mode}, {workers}, {self.reads}"


@frozen(kw_only=True)
class SearchResult:
    """What was tried within a limit, and what is best.

    candidates: of each way the best
    points: plans that were compared
    rules: the best of the way of the rules; None where none of it fits
    by_rules: with chunk and depth of the rules, too
    target: the tokens/s that were to be reached; None where the request was to be fast
    """

    candidates: tuple[Candidate, ...]
    points: int
    rules: Candidate | None
    by_rules: Candidate | None
    chosen: Candidate
    target: float | None = None

    def reasons(self) -> tuple[str, ...]:
        """Why it is not the choice of the rules; none where it is."""
        chosen, rules = self.chosen, self.rules
        if rules is None:
            return (f"{chosen.named()}: the limit is too small for what is chosen otherwise",)
        said = []
        if rules.way != chosen.way:
            said.append(
                f"{chosen.named()}: {_speed(chosen.tokens_per_s)} expected, by the rules alone ({rules.named()}) "
                f"{_speed(rules.tokens_per_s)}"
            )
        if self.by_rules is not None and chosen.way == self.by_rules.way and chosen.plan != self.by_rules.plan:
            said.append(_shares_reason(chosen.plan, self.by_rules.plan))
        return tuple(said)


class Search:
    """Of one package, one space and one wish, in which `memory_bytes` does not count. request: what is to be fast;
    heat: of the package."""

    def __init__(
        self,
        manifest: Manifest,
        space: Space,
        wanted: PlanOptions,
        request: Request = USUAL,
        heat: AccessFrequencies | None = None,
    ) -> None:
        self.manifest, self.space, self.wanted, self.request = manifest, space, wanted, request
        self._budgets, self._heat = Budgets(manifest), heat
        self._tried: dict[int | None, _Tried] = {}
        self._best: dict[int, Candidate] = {}
        self._ways: dict[int, Way | None] = {}
        self._limits: tuple[int, ...] | None = None

    def within(self, limit_bytes: int | None) -> SearchResult:
        """The best choice within this limit (None: the device's share of what is available). Raises LimitTooSmall,
        and what `plan` raises for what the rules choose."""
        tried = self._try(limit_bytes)
        own_bytes = self.space.place(self.space.workers[0]).memory_bytes
        way = self._way_within(own_bytes if limit_bytes is None else limit_bytes)
        return SearchResult(
            candidates=tried.candidates,
            points=tried.points,
            rules=tried.rules,
            by_rules=tried.by_rules,
            chosen=_of_way(way, tried.candidates) or tried.rules or tried.candidates[0],
        )

    def best(self, limit_bytes: int) -> Candidate:
        """What `within` chooses, without trying again what is decided already. Raises as it does."""
        if limit_bytes not in self._best:
            self._best[limit_bytes] = self._decided_best(limit_bytes)
        return self._best[limit_bytes]

    def ms(self, one: Candidate) -> float:
        """What is compared: the time of the request; of its answer alone where nothing is known of prompts."""
        expected = one.plan.expected
        return (self.request if expected.prefill_tokens_per_s else ANSWER).ms(expected)

    def limits_bytes(self) -> tuple[int, ...]:
        """Limits at equal ratios, from the least of any choice to one that holds everything with every choice."""
        if self._limits is None:
            plans = [one.plan for one in self._starts(UNLIMITED_BYTES)]
            takes = max(one.memory.total_bytes() for one in plans) + MIB
            least, most = min(one.memory.least_bytes for one in plans), takes
            while usable_bytes(most) < takes:
                most += max(MIB, most // 100)
            steps = [math.ceil(least * (most / least) ** (n / (POINTS - 1))) for n in range(POINTS - 1)]
            self._limits = *(min(step, most) for step in steps), most
        return self._limits

    def reaching(self, tokens_per_s: float, most_bytes: int | None = None) -> SearchResult:
        """The smallest limit, up to most_bytes, within which this speed is expected, to within PRECISION of it; and
        of the choices that reach it within PROMPT_ALLOWANCE more, the one with the fastest usual request. Of a search
        whose request is ANSWER: its best speed grows with memory.

        Raises UserError, with the most that can be had.
        """
        least, *_, everything = self.limits_bytes()
        most = everything if most_bytes is None else min(most_bytes, everything)
        if most < least or not self._reaches(most, tokens_per_s):
            raise self._out_of_reach(tokens_per_s, self.best(most))
        limits = [limit for limit in self.limits_bytes() if limit < most]
        first = bisect.bisect_left(limits, True, key=lambda limit: self._reaches(limit, tokens_per_s))
        high = limits[first] if first < len(limits) else most
        low = limits[first - 1] if first else high
        while high > low * (1 + PRECISION):
            middle = math.isqrt(low * high)
            if self._reaches(middle, tokens_per_s):
                high = middle
            else:
                low = middle
        return self._with_prompts(min(most, int(high * (1 + PROMPT_ALLOWANCE))), tokens_per_s)

    def with_memory(self, found: SearchResult, limit_bytes: int) -> Candidate:
        """What would be chosen within another limit, for the same target. Raises as `within`."""
        return self._of_target(self.best(limit_bytes), found.target)

    def with_more_workers(self, found: SearchResult) -> Candidate | None:
        """The best with the way that was chosen and another worker on a core that no worker has; None where there is no
        such core, or no memory for it."""
        chosen = found.chosen
        device = self.space.more(chosen.workers + 1)
        if device is None:
            return None
        try:
            start = self._candidate(device, dataclasses.replace(chosen.wanted, held_blocks=None, held_matrices=None))
        except UserError:
            return None
        return self._of_target(self._fastest(self.variants(start)), found.target)

    def _decided_best(self, limit_bytes: int) -> Candidate:
        way = self._way_within(limit_bytes)
        if way is None or limit_bytes in self._tried:
            return self.within(limit_bytes).chosen
        start = _of_way(way, self._starts(limit_bytes, way))
        return self.within(limit_bytes).chosen if start is None else self._fastest(self.variants(start))

    # ---- a speed ---------------------------------------------------------------------------------------------
    def _reaches(self, limit_bytes: int, tokens_per_s: float) -> bool:
        expected = self.best(limit_bytes).tokens_per_s
        return expected is not None and expected >= tokens_per_s

    def _with_prompts(self, limit_bytes: int, tokens_per_s: float) -> SearchResult:
        found = self.within(limit_bytes)
        way, chosen = found.chosen, self._of_target(found.chosen, tokens_per_s)
        candidates = tuple(chosen if one is way else one for one in found.candidates)
        rules = chosen if found.rules is way else found.rules
        return dataclasses.replace(found, candidates=candidates, rules=rules, chosen=chosen, target=tokens_per_s)

    def _of_target(self, best: Candidate, tokens_per_s: float | None) -> Candidate:
        """Of the choices of its way that reach this speed, if any is asked for, the one with the fastest usual
        request."""
        if tokens_per_s is None:
            return best
        reach = [one for one in self.variants(best) if (one.tokens_per_s or 0.0) >= tokens_per_s]
        return min([best, *reach], key=lambda one: USUAL.ms(one.plan.expected))

    def _out_of_reach(self, tokens_per_s: float, best: Candidate) -> UserError:
        wish = f"--target-speed {tokens_per_s:.10g}"
        if best.tokens_per_s is None:
            return UserError(f"{wish}: no speed can be expected, not all was measured; take --memory")
        limit = best.plan.memory.limit_bytes
        more = "" if limit >= self.limits_bytes()[-1] else "; a larger --memory may reach more"
        return UserError(
            f"{wish}: the most that is expected up to {limit / MIB:,.0f} MiB is {_speed(best.tokens_per_s)}, "
            f"{best.named()}{more}"
        )

    # ---- ways ------------------------------------------------------------------------------------------------
    def _way_within(self, limit_bytes: int) -> Way | None:
        return self._way(max(0, bisect.bisect_right(self.limits_bytes(), limit_bytes) - 1))

    def _way(self, step: int) -> Way | None:
        """What is decided at one of the limits; None: the rules, where nothing can be compared."""
        if step not in self._ways:
            self._ways[step] = self._decided(step)
        return self._ways[step]

    def _decided(self, step: int) -> Way | None:
        try:
            tried = self._try(self.limits_bytes()[step])
        except UserError:  # an --ffn-resident that only some choices can obey
            return None
        if not tried.measured:
            return None
        fastest, rules = tried.fastest, tried.rules
        if rules is None or (1 + MIN_GAIN) * self.ms(fastest) < self.ms(rules):
            return fastest.way
        if self.ms(rules) <= self.ms(fastest):
            return rules.way
        before = self._left_before(step)
        left = _of_way(before, tried.candidates) if before is not None else None
        return rules.way if left is None or self.ms(rules) <= self.ms(left) else left.way

    def _left_before(self, step: int) -> Way | None:
        """The way of the limit below, where the rules had their chance: that they did not fit proves nothing."""
        if step == 0 or self._try(self.limits_bytes()[step - 1]).rules is None:
            return None
        return self._way(step - 1)

    # ---- choices ---------------------------------------------------------------------------------------------
    def _try(self, limit_bytes: int | None) -> _Tried:
        if limit_bytes not in self._tried:
            starts = self._starts(limit_bytes)
            variants = [self.variants(start) for start in starts]
            best = tuple(map(self._fastest, variants))
            own = (starts[0].wanted.mode, starts[0].workers) == (self.space.modes[0], self.space.workers[0])
            self._tried[limit_bytes] = _Tried(
                candidates=best,
                points=sum(map(len, variants)),
                rules=best[0] if own else None,
                by_rules=starts[0] if own else None,
                fastest=min(best, key=lambda one: (self.ms(one), one.workers, one.plan.memory.total_bytes())),
            )
        return self._tried[limit_bytes]

    def _fastest(self, variants: list[Candidate]) -> Candidate:
        """The first of the fastest."""
        return min(variants, key=self.ms)

    def _starts(self, limit_bytes: int | None, way: Way | None = None) -> list[Candidate]:
        """Of every way that fits a plan with chunk and depth by the rules; those of the rules first. Or only of those
        with the mode and the workers of this way."""
        found: list[Candidate] = []
        refused: list[LimitTooSmall] = []
        for mode in self.space.modes if way is None else (way.mode,):
            for workers in self.space.workers if way is None else (way.workers,):
                wanted = dataclasses.replace(self.wanted, mode=mode, memory_bytes=limit_bytes)
                try:
                    one = self._candidate(self.space.place(workers), wanted)
                except LimitTooSmall as error:
                    refused.append(error)
                    continue
                except UserError:
                    if (mode, workers) == (self.space.modes[0], self.space.workers[0]):
                        raise
                    continue  # with more workers than the feed-forward bytes that were asked for hold
                found.append(one)
                if self._may_read_otherwise(one.plan):
                    other = dataclasses.replace(wanted, bundle=not one.plan.flash.bundle)
                    found.append(self._candidate(one.device, other))
        if not found:
            raise min(refused, key=lambda error: error.least_bytes)
        return found

    def variants(self, start: Candidate) -> list[Candidate]:
        """The same way with every chunk and depth, itself first; where techniques are compared, or the speed of prompts
        is not known, only itself."""
        expected = start.plan.expected
        is_known = expected.tokens_per_s is not None and expected.prefill_tokens_per_s is not None
        if not is_known or self.wanted.baseline is not None or self.wanted.without:
            return [start]
        bundle, held = start.plan.flash.bundle, start.plan.compute.held_blocks or None
        matrices = start.plan.compute.held_matrices if held else None
        made = {_shares(start.plan): start}
        for depth in self._depths(start):
            least = min_chunk_tokens(RunShape.of(start.plan.compute))
            for chunk in (*(tokens for tokens in CHUNK_TOKENS if tokens > least), least):
                wanted = dataclasses.replace(
                    start.wanted,
                    bundle=bundle,
                    prefill_chunk_tokens=chunk,
                    depth=depth,
                    held_blocks=held,
                    held_matrices=matrices,
                )
                one = self._candidate(start.device, wanted)
                made.setdefault(_shares(one.plan), one)
        return list(made.values())

    def _depths(self, start: Candidate) -> Iterable[int]:
        """Those that were measured; where nothing is read, only that of the rules."""
        if start.device.flash is None or not start.plan.expected.flash_reads_per_token:
            return (start.plan.flash.depth,)
        return depths(start.device.flash)

    def _candidate(self, device: DeviceFacts, wanted: PlanOptions) -> Candidate:
        made = plan(self.manifest, device, wanted, self._budgets, self._heat)
        return Candidate(device=device, wanted=wanted, plan=made)

    def _may_read_otherwise(self, made: Plan) -> bool:
        """Whether reading is measured, wanted at all, and nobody has said how."""
        wanted = self.wanted
        fixed = wanted.baseline is not None or "bundle" in wanted.without or wanted.bundle is not None
        return not fixed and made.expected.tokens_per_s is not None and made.expected.flash_reads_per_token > 0


@frozen(kw_only=True)
class _Tried:
    """The best of each way within a limit, the rules' first."""

    candidates: tuple[Candidate, ...]
    points: int
    rules: Candidate | None
    by_rules: Candidate | None
    fastest: Candidate

    @property
    def measured(self) -> bool:
        return self.fastest.tokens_per_s is not None


def _of_way(way: Way | None, candidates: Sequence[Candidate]) -> Candidate | None:
    """Of this way; where nothing is read, how does not matter."""
    exactly = (one for one in candidates if one.way == way)
    nearly = (one for one in candidates if way is not None and (one.way.mode, one.workers) == (way.mode, way.workers))
    return next(exactly, None) or next(nearly, None)


def _shares(made: Plan) -> tuple[int, int]:
    """Of memory, those that are chosen with a way."""
    return made.compute.prefill_chunk_tokens, made.flash.depth


def _shares_reason(made: Plan, other: Plan) -> str:
    (chunk, depth), (chunk_by_rules, depth_by_rules) = _shares(made), _shares(other)
    return (
        f"{chunk} tokens of a prompt and {depth} reads at once: {USUAL.ms(made.expected) / 1e3:.2f} s for a prompt of "
        f"{USUAL.prompt_tokens} tokens and an answer of {USUAL.answer_tokens}; by the rules {chunk_by_rules} and "
        f"{depth_by_rules}, {USUAL.ms(other.expected) / 1e3:.2f} s"
    )


def _speed(tokens_per_s: float | None) -> str:
    return "no speed" if tokens_per_s is None else f"{show_number(tokens_per_s)} tokens/s"

"""Data of the search: the request to be fast, the allowed choices, a choice with its plan, and the result."""

from __future__ import annotations

import math
from collections.abc import Callable

from neuronpipe.plans.cost.token_time import USUAL_PROMPT_TOKENS
from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.plan.document import Expected, Mode, Plan
from neuronpipe.plans.plan.memory_budget import MIB
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.protocol.frozen import frozen


@frozen(kw_only=True)
class Request:
    """A request whose expected time the search minimizes."""

    prompt_tokens: int
    answer_tokens: int

    def ms(self, expected: Expected) -> float:
        """Return the expected time of the request alone on the device; infinite if a speed that it needs is unknown.

        All chunks of the prompt are assumed to take equally long.
        """
        if not expected.tokens_per_s or (self.prompt_tokens and not expected.prefill_tokens_per_s):
            return math.inf
        prompt_s = self.prompt_tokens / expected.prefill_tokens_per_s if expected.prefill_tokens_per_s else 0.0
        return 1e3 * (prompt_s + self.answer_tokens / expected.tokens_per_s)


# The request for which plans are chosen by default: llama-bench's tests pp512 and tg128, one after the other.
USUAL = Request(prompt_tokens=USUAL_PROMPT_TOKENS, answer_tokens=128)
# Compares the speed of decoding alone: for a target speed, and where the speed of prompts is unknown.
ANSWER = Request(prompt_tokens=0, answer_tokens=1)


@frozen(kw_only=True)
class Space:
    """The modes and numbers of decode workers that the search may choose. The rules take the first of each.

    place: assigns this number of decode workers and the other processes to the allowed cores
    more: the same with cores that the user excluded; None if the device has too few fast cores for these workers
    """

    modes: tuple[Mode, ...]
    workers: tuple[int, ...]
    place: Callable[[int], DeviceFacts]
    more: Callable[[int], DeviceFacts | None] = lambda workers: None


@frozen(kw_only=True)
class Variant:
    """A way to compute and to read, of which each has its own best chunk and depth.

    bundle: both parts of a cluster are read together
    """

    mode: Mode
    workers: int
    bundle: bool


@frozen(kw_only=True)
class Candidate:
    """A plan, with the device facts and the options it was made from."""

    device: DeviceFacts
    options: PlanOptions
    plan: Plan

    @property
    def tokens_per_s(self) -> float | None:
        """Expected speed of decoding one sequence; None if something was not measured."""
        return self.plan.expected.tokens_per_s

    @property
    def workers(self) -> int:
        return len(self.plan.compute.decode_workers())

    @property
    def variant(self) -> Variant:
        return Variant(mode=self.plan.compute.mode, workers=self.workers, bundle=self.plan.flash.bundle)

    @property
    def reads(self) -> str:
        """Words that tell whether both parts of a cluster are read together."""
        return "clusters whole" if self.plan.flash.bundle else "parts apart"

    def description(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"mode {self.plan.compute.mode}, {workers}, {self.reads}"


@frozen(kw_only=True)
class SearchResult:
    """The candidates within a limit, and the chosen one.

    candidates: the fastest candidate of each variant
    points: number of plans compared
    rules: the fastest candidate of the rules' variant; None if that variant does not fit
    by_rules: the candidate with the variant, the chunk and the depth of the rules; None if it does not fit
    target: requested tokens/s; None if the time of the request is minimized
    smaller_limit_bytes: the limit for which the chosen plan was made, if it is faster than all plans of a larger one
    """

    candidates: tuple[Candidate, ...]
    points: int
    rules: Candidate | None
    by_rules: Candidate | None
    chosen: Candidate
    target: float | None = None
    smaller_limit_bytes: int | None = None

    def reasons(self) -> tuple[str, ...]:
        """Return why the chosen plan is not that of the rules; empty if it is."""
        chosen, rules = self.chosen, self.rules
        if rules is None:
            return (f"{chosen.description()}: the limit is too small for what is chosen otherwise",)
        reasons = []
        if rules.variant != chosen.variant:
            reasons.append(
                f"{chosen.description()}: {show_speed(chosen.tokens_per_s)} expected, "
                f"by the rules alone ({rules.description()}) {show_speed(rules.tokens_per_s)}"
            )
        if self.smaller_limit_bytes is not None:
            reasons.append(
                f"the plan of {self.smaller_limit_bytes / MIB:,.1f} MiB is kept: none with more memory is expected "
                "to be faster"
            )
        elif (
            self.by_rules is not None and chosen.variant == self.by_rules.variant and chosen.plan != self.by_rules.plan
        ):
            reasons.append(_chunk_and_depth_reason(chosen.plan, self.by_rules.plan))
        return tuple(reasons)


def chunk_and_depth(plan: Plan) -> tuple[int, int]:
    return plan.compute.prefill_chunk_tokens, plan.flash.depth


def _chunk_and_depth_reason(plan: Plan, plan_by_rules: Plan) -> str:
    (chunk, depth), (chunk_by_rules, depth_by_rules) = chunk_and_depth(plan), chunk_and_depth(plan_by_rules)
    return (
        f"{chunk} tokens of a prompt and {depth} reads at once: {USUAL.ms(plan.expected) / 1e3:.2f} s for a prompt of "
        f"{USUAL.prompt_tokens} tokens and an answer of {USUAL.answer_tokens}; by the rules {chunk_by_rules} and "
        f"{depth_by_rules}, {USUAL.ms(plan_by_rules.expected) / 1e3:.2f} s"
    )


def show_speed(tokens_per_s: float | None) -> str:
    return "no speed" if tokens_per_s is None else f"{show_number(tokens_per_s)} tokens/s"

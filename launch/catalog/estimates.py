"""Estimates of the models of the catalog on a device: the planner's plan for each, and which of them comes first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Sequence

from neuronpipe.launch.formats import show_bytes, show_min_bytes
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.search import Subject, quick_plan
from neuronpipe.launch.planning.shapes import no_activity
from neuronpipe.plans.cost.speed_range import speed_ranges
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.inspect import parameters
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Expected, Mode, Plan, SpeedRange
from neuronpipe.plans.planner.candidates import USUAL
from neuronpipe.plans.planner.default_sizes import MIN_CONTEXT_TOKENS
from neuronpipe.plans.planner.plan_options import LimitTooSmall
from neuronpipe.plans.planner.planned_range import are_plan_misses_assumed, expectation_of
from neuronpipe.plans.pull.catalog import CatalogModel
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

PROMPT_TOKENS, ANSWER_TOKENS = USUAL.prompt_tokens, USUAL.answer_tokens
MIN_USABLE_TOKENS_PER_S = 4.0
"""About the pace of reading: 200 words a minute, of 1.2 tokens each."""
MAX_USABLE_FIRST_TOKEN_S = 30.0
"""The longest usable wait for the first token after a prompt of PROMPT_TOKENS."""
DEFAULT_CONTEXT_TOKENS = MIN_CONTEXT_TOKENS
"""The context of the estimates. The whole context of a model can take more memory than its weights."""


@frozen(kw_only=True)
class Estimate:
    """The planner's figures of a model on a device, or the reason why the model does not run there.

    active_parameters: number of weights that compute a token
    context_tokens: context length of the plan
    package_bytes: size of the package that `pull` makes
    limit_bytes: the memory limit of the estimate
    min_memory_bytes: the smallest limit for which there is a plan; None: not known, as the options exclude the model
    resident_share: share of the feed-forward weights that stay in memory within the limit
    tokens_per_s: expected speed in the middle of an answer of ANSWER_TOKENS to a prompt of PROMPT_TOKENS; None: not
        known
    first_token_s: expected time to the first token after that prompt; None: not known
    tokens_per_s_range: the range of that speed
    problem: why the model does not run; None if it does
    """

    model: CatalogModel
    parameters: int
    active_parameters: int
    context_tokens: int
    package_bytes: int
    limit_bytes: int
    min_memory_bytes: int | None = None
    resident_share: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_range: SpeedRange | None = None
    first_token_s: float | None = None
    problem: str | None = None

    @property
    def runs(self) -> bool:
        return self.problem is None

    @property
    def disk_bytes(self) -> int:
        """The least disk space that `pull` needs: a GGUF file stays until its package is complete, while shards of
        safetensors are removed one by one."""
        return self.package_bytes + (self.model.download_bytes if self.model.file else 0)

    @property
    def is_usable(self) -> bool:
        """True if the model answers at the pace of reading, after a bearable wait."""
        if self.tokens_per_s is None or self.first_token_s is None:
            return False
        return self.tokens_per_s >= MIN_USABLE_TOKENS_PER_S and self.first_token_s <= MAX_USABLE_FIRST_TOKEN_S


RULE = (
    f"first the models that answer with {MIN_USABLE_TOKENS_PER_S:g} tokens/s or more and begin within "
    f"{MAX_USABLE_FIRST_TOKEN_S:g} s, the most capable first; then the slower ones, the fastest first"
)
"""The order of `sorted_by_use`, for people."""


def sorted_by_use(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Return the estimates as RULE says, and those of models that do not run last.

    estimates: in the order of the catalog, the most capable model first
    """

    def key(estimate: Estimate) -> tuple[int, float]:
        if not estimate.runs:
            return 2, 0.0
        return (0, 0.0) if estimate.is_usable else (1, -(estimate.tokens_per_s or 0.0))

    return sorted(estimates, key=key)


def best(estimates: Sequence[Estimate], free_bytes: int | None = None, pulled: Container[str] = ()) -> Estimate | None:
    """Return the first usable model of sorted estimates that is or fits on the disk; None if there is none.

    free_bytes: free space for packages; None: not known
    pulled: names of the models that are on this disk
    """

    def fits(estimate: Estimate) -> bool:
        return free_bytes is None or estimate.model.name in pulled or estimate.disk_bytes <= free_bytes

    return next((estimate for estimate in estimates if estimate.is_usable and fits(estimate)), None)


def estimate(
    model: CatalogModel,
    device_for: Callable[[Manifest], Device],
    *,
    limit_bytes: int,
    context_tokens: int = DEFAULT_CONTEXT_TOKENS,
    mode: Mode = "exact",
) -> Estimate:
    """Plan a model on a device, for one sequence.

    device_for: (manifest) -> the device; some descriptions depend on the sizes of a package's reads
    context_tokens: context length of the plan; a model with a shorter context is planned with that
    """
    from neuronpipe.plans.lab.shapes.pulled_manifest import manifest_of_pulled  # a run must work without the lab

    manifest = manifest_of_pulled(model)
    device, spec = device_for(manifest), manifest.model
    silent_weights = (spec.ffns - spec.active_ffns) * spec.neurons * spec.width * len(spec.ffn_matrices)
    looked_up_weights = 0 if spec.tied_embeddings else spec.vocabulary * spec.width
    facts = Estimate(
        model=model,
        parameters=parameters(manifest),
        active_parameters=parameters(manifest) - silent_weights - looked_up_weights,
        context_tokens=min(context_tokens, spec.context_tokens),
        package_bytes=manifest.size_bytes,
        limit_bytes=limit_bytes,
    )
    if (problem := _mode_problem(manifest, mode)) is not None:
        return dataclasses.replace(facts, problem=problem)
    options = PlanOptions(context_tokens=facts.context_tokens, mode=mode)
    subject = Subject(manifest=manifest, read_activity=no_activity, device=device)
    try:
        plan, min_memory_bytes = quick_plan(subject, options, limit_bytes)
    except LimitTooSmall as error:
        problem = f"needs {show_min_bytes(error.min_bytes)} of memory"
        return dataclasses.replace(facts, min_memory_bytes=error.min_bytes, problem=problem)
    except UserError as error:
        return dataclasses.replace(facts, problem=str(error))
    facts = dataclasses.replace(facts, min_memory_bytes=min_memory_bytes)
    if plan.memory.total_bytes() > device.memory_total_bytes > 0:
        problem = f"takes {show_bytes(plan.memory.total_bytes())}, more than the device has"
        return dataclasses.replace(facts, problem=problem)
    expectation, speed_range = _usual_request(plan, manifest, device)
    return dataclasses.replace(
        facts,
        resident_share=min(1.0, plan.memory.slots_bytes / plan.memory.ffn_bytes),
        tokens_per_s=expectation.tokens_per_s,
        tokens_per_s_range=speed_range,
        first_token_s=None if expectation.first_token_ms is None else expectation.first_token_ms / 1e3,
    )


def _usual_request(plan: Plan, manifest: Manifest, device: Device) -> tuple[Expected, SpeedRange | None]:
    """Return what a plan expects of the usual request, and the range of its tokens/s; None if that is not known."""
    request = expectation_of(
        plan, manifest, None, position_tokens=PROMPT_TOKENS + ANSWER_TOKENS // 2, prompt_tokens=PROMPT_TOKENS
    )
    measured = device.flash, device.memory_speed, device.profile
    ranges = speed_ranges(
        lambda facts: {"tokens_per_s": request(facts).tokens_per_s},
        measured,
        are_misses_assumed=are_plan_misses_assumed(plan, manifest),
    )
    return request(measured), ranges["tokens_per_s"][0] if "tokens_per_s" in ranges else None


def _mode_problem(manifest: Manifest, mode: Mode) -> str | None:
    """Return what a mode needs and a new package of this model does not have; None if it has all."""
    if mode == "predicted" and manifest.predictor is None:
        return "has no predictor, as mode predicted needs"
    if mode == "thresholded":
        return "has no thresholds before `profile --silent`"
    return None

"""Estimates of the models of the catalog on a device: the planner's plan for each, and which of them comes first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from neuronpipe.launch.planning.memory_check import memory_warning
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.plan import plan_for
from neuronpipe.launch.planning.search import Subject
from neuronpipe.launch.planning.shapes import no_activity
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.inspect import parameters
from neuronpipe.plans.lab.shapes.pulled_manifest import manifest_of_pulled
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.planner.candidates import USUAL
from neuronpipe.plans.planner.plan_options import LimitTooSmall
from neuronpipe.plans.pull.catalog import CatalogModel
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

PROMPT_TOKENS = USUAL.prompt_tokens
MIN_USABLE_TOKENS_PER_S = 5.0
"""About the pace of reading: 240 words a minute, of 1.3 tokens each."""
MAX_USABLE_FIRST_TOKEN_S = 30.0
"""The longest usable wait for the first token after a prompt of PROMPT_TOKENS."""
DEFAULT_CONTEXT_TOKENS = 4096
"""The context of the estimates. The whole context of a model can take more memory than its weights."""


@frozen(kw_only=True)
class Estimate:
    """What the planner expects of a model on a device, or why the model does not run there.

    active_parameters: number of weights that compute a token
    package_bytes: size of the package that `pull` makes
    min_memory_bytes: the smallest limit for which there is a plan; None: not known, as the options exclude the model
    limit_bytes: the memory limit of the estimate
    resident_share: share of the feed-forward weights that stay in memory within the limit
    tokens_per_s, first_token_s: expected speed at half of the context, and time to the first token after a prompt of
        PROMPT_TOKENS; None: not known
    problem: why the model does not run; None if it does
    """

    model: CatalogModel
    parameters: int
    active_parameters: int
    package_bytes: int
    limit_bytes: int
    min_memory_bytes: int | None = None
    resident_share: float | None = None
    tokens_per_s: float | None = None
    first_token_s: float | None = None
    problem: str | None = None

    @property
    def runs(self) -> bool:
        return self.problem is None

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


def best(estimates: Sequence[Estimate]) -> Estimate | None:
    """Return the first of sorted estimates if its model is usable; None if no model is."""
    return next((estimate for estimate in estimates[:1] if estimate.is_usable), None)


def estimate(model: CatalogModel, device_for: Callable[[Manifest], Device], options: PlanOptions) -> Estimate:
    """Plan a model on a device.

    device_for: (manifest) -> the device; some descriptions depend on the sizes of a package's reads
    options: options of the plan; a model with a shorter context is planned with its own
    """
    manifest = manifest_of_pulled(model)
    device, spec = device_for(manifest), manifest.model
    silent_weights = (spec.ffns - spec.active_ffns) * spec.neurons * spec.width * len(spec.ffn_matrices)
    looked_up_weights = 0 if spec.tied_embeddings else spec.vocabulary * spec.width
    facts = Estimate(
        model=model,
        parameters=parameters(manifest),
        active_parameters=parameters(manifest) - silent_weights - looked_up_weights,
        package_bytes=manifest.size_bytes,
        limit_bytes=options.memory_bytes or 0,
    )
    if options.context_tokens is not None:
        options = dataclasses.replace(options, context_tokens=min(options.context_tokens, spec.context_tokens))
    subject = Subject(manifest=manifest, read_activity=no_activity, device=device)
    try:
        result = plan_for(subject, options, several=False, gateway=False)
        facts = dataclasses.replace(facts, min_memory_bytes=result.min_limit_bytes)
        memory_warning(result.plan, device, result.min_limit_bytes)  # raises if the machine has too little memory
    except LimitTooSmall as error:
        return dataclasses.replace(facts, min_memory_bytes=error.min_bytes, problem="needs more memory")
    except UserError as error:
        return dataclasses.replace(facts, problem=str(error))
    memory, expected = result.plan.memory, result.plan.expected
    first_token_ms = expected.first_token_ms
    return dataclasses.replace(
        facts,
        limit_bytes=options.memory_bytes or memory.limit_bytes,
        resident_share=min(1.0, memory.slots_bytes / memory.ffn_bytes),
        tokens_per_s=expected.tokens_per_s,
        first_token_s=None if first_token_ms is None else first_token_ms / 1e3,
    )

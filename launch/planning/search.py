"""From plan options to the best plan: the search, with an accelerator or without.

An accelerator that the options name is used. Otherwise one that a device profile has measured is used if the plan with
it is expected to be clearly faster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from neuronpipe.launch.formats import show_cores
from neuronpipe.launch.planning import accelerator as accelerators
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.prompt_backend import ON_CPU, PromptBackend
from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.device.cores import default_decode_workers, max_decode_workers, restrict_cores
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.package.activity_profile import Activity
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import ACCELERATOR, MAX_SEQUENCES, MAX_WORKERS, Mode, Plan
from neuronpipe.plans.plan.offloaded_blocks import Accelerator
from neuronpipe.plans.planner.candidates import ANSWER, USUAL, SearchResult, Space
from neuronpipe.plans.planner.default_sizes import context_reason, default_context, plan_for_sequences
from neuronpipe.plans.planner.device_facts import DeviceFacts, device_facts
from neuronpipe.plans.planner.long_prompts import with_long_chunks
from neuronpipe.plans.planner.mode_choice import allowed_modes
from neuronpipe.plans.planner.plan_options import PlanOptions as PlannerOptions
from neuronpipe.plans.planner.planned_range import with_ranges
from neuronpipe.plans.planner.search import PRECISION, PROMPT_ALLOWANCE, Search
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

# How much faster a plan with a measured accelerator must be: it takes a driver, and expectations may be wrong.
MIN_ACCELERATOR_GAIN = 0.3
FOLLOWED_SHARE = 0.9  # of all memory: the limit of a run that follows what is available


@frozen(kw_only=True)
class Subject:
    """The model and the device that a plan is made for.

    read_activity: reads the package's activity profile; called only if the manifest has one
    prompts: the backend for prompts if the options name none
    """

    manifest: Manifest
    read_activity: Callable[[], Activity]
    device: Device
    prompts: PromptBackend = ON_CPU


def followed_limit_bytes(device: Device) -> int:
    """Return the largest limit of a run that follows the memory that is available."""
    return int(FOLLOWED_SHARE * device.memory_total_bytes)


def search_plan(
    subject: Subject, options: PlanOptions, *, several: bool, gateway: bool
) -> tuple[Search, SearchResult, Plan]:
    """Search for the best plan, and return the search, its result and the plan.

    several: unless the options name a number of sequences or a speed, plan for as many sequences as slow down a single
        one by at most a tenth

    Raises UserError if nothing fits the options.
    """
    sequences = 1 if options.sequences is None else options.sequences
    context_tokens = options.context_tokens
    if context_tokens is None:
        limit_bytes = _limit_bytes(subject.device, options)
        context_tokens = default_context(subject.manifest.model, limit_bytes, sequences, options.kv_type)
    requirements = PlannerOptions(
        ffn_resident_share=options.ffn_resident_share,
        context_tokens=context_tokens,
        sequences=sequences,
        without=options.without,
        baseline=options.baseline,
        hints=options.hints,
        kv_type=options.kv_type,
        follows=options.follows_available_memory,
        prompt_cache_bytes=options.prompt_cache_bytes,
    )
    if not 1 <= requirements.sequences <= MAX_SEQUENCES:
        raise UserError(f"--sequences {requirements.sequences}: between 1 and {MAX_SEQUENCES}")
    frequencies = AccessFrequencies.of(subject.manifest, subject.read_activity)
    outcome = _PlanSearch(options, subject, gateway, requirements, frequencies).best()
    chosen, target_speed, of_prompts = outcome.result.chosen, options.target_tokens_per_s, tuple[str, ...]()
    if target_speed is None:
        chosen, of_prompts = with_long_chunks(subject.manifest, chosen, frequencies)
    plan = chosen.plan
    if several and options.sequences is None and target_speed is None:
        open_choice = dataclasses.replace(chosen.options, offloaded_blocks=None, offloaded_matrices=None)
        plan = plan_for_sequences(subject.manifest, chosen.device, open_choice, frequencies)
    storage = subject.device.storage
    reasons = [
        *outcome.result.reasons(),
        *of_prompts,
        *outcome.reasons,
        *(() if storage is None else storage.notes()),
    ]
    if options.context_tokens is None and context_tokens < subject.manifest.model.context_tokens:
        reasons.append(context_reason(subject.manifest.model, context_tokens, sequences, options.kv_type))
    if subject.prompts.reason:
        reasons.append(subject.prompts.reason)
    if target_speed is not None:
        reasons.append(
            f"the limit is the smallest that is expected to reach {target_speed:g} tokens/s, "
            f"to within {PRECISION:.0%}, and {PROMPT_ALLOWANCE:.0%} for prompts"
        )
    plan = with_ranges(plan, subject.manifest, frequencies, chosen.device.measured)
    return outcome.search, outcome.result, dataclasses.replace(plan, reasons=(*plan.reasons, *reasons))


def _limit_bytes(device: Device, options: PlanOptions) -> int:
    """Return the memory limit of the options; without one, that of a run that uses what is available."""
    if options.follows_available_memory:
        return followed_limit_bytes(device)
    return options.memory_bytes or device_facts(device).memory_bytes


def quick_plan(subject: Subject, options: PlanOptions, limit_bytes: int) -> tuple[Plan, int]:
    """Return the plan for one sequence on the CPU, and the smallest limit that has one, in less time than
    `search_plan`.

    Of the options, the context and the mode count. Raises LimitTooSmall if no plan fits the limit, and UserError if
    nothing fits the options.
    """
    requirements = PlannerOptions(context_tokens=options.context_tokens, sequences=1)
    frequencies = AccessFrequencies.of(subject.manifest, subject.read_activity)
    space = _PlanSearch(options, subject, False, requirements, frequencies).space(None, None)
    search = Search(subject.manifest, space, requirements, USUAL, frequencies)
    candidate = search.best(limit_bytes)
    plan = with_ranges(candidate.plan, subject.manifest, frequencies, candidate.device.measured)
    return plan, search.limits_bytes()[0]


@frozen
class _Outcome:
    """The result of a search.

    reasons: why an accelerator is used or not, for the plan
    """

    search: Search
    result: SearchResult
    reasons: tuple[str, ...] = ()

    @property
    def ms(self) -> float:
        return self.search.ms(self.result.chosen)

    @property
    def speed(self) -> str:
        speed = self.result.chosen.tokens_per_s
        return "no speed" if speed is None else f"{show_number(speed)} tokens/s"


@frozen
class _PlanSearch:
    options: PlanOptions
    subject: Subject
    gateway: bool
    requirements: PlannerOptions
    frequencies: AccessFrequencies | None

    def best(self) -> _Outcome:
        """Return the best plan, with the accelerator of --backend, or with a measured one if that pays."""
        backend = self.options.backend(ACCELERATOR)
        measured = self._measured_accelerator()
        if backend is None and measured is not None:
            return self._compare(*measured)
        accelerator = accelerators.named_accelerator(
            backend, self.options.accelerator_memory_bytes, self.subject.manifest
        )
        return self._search(accelerator, backend)

    def _measured_accelerator(self) -> tuple[Accelerator, str] | None:
        """Return the accelerator that may be used although the options name none, and its backend."""
        options = self.options
        if options.baseline is not None or "pipeline" in options.without or options.target_tokens_per_s:
            return None
        return accelerators.measured_accelerator(
            self.subject.device.profile, options.accelerator_memory_bytes, self.subject.manifest
        )

    def _compare(self, accelerator: Accelerator, backend: str) -> _Outcome:
        """Return the plan with the accelerator if it is clearly faster and the device still exists."""
        cpu_only = self._search(None, None)
        try:
            offloaded = self._search(accelerator, backend)
        except UserError as error:  # the device's memory, or the run's with the driver, is too small
            return dataclasses.replace(cpu_only, reasons=(f"{accelerator.name} is not used: {error}",))
        speeds = f"{offloaded.speed} expected with it, {cpu_only.speed} without"
        if not math.isfinite(offloaded.ms) or (1 + MIN_ACCELERATOR_GAIN) * offloaded.ms >= cpu_only.ms:
            advice = f"--backend {ACCELERATOR}={backend} uses it all the same"
            return dataclasses.replace(cpu_only, reasons=(f"{accelerator.name} is not used: {speeds}; {advice}",))
        if (problem := accelerators.why_unusable(accelerator, backend)) is not None:
            return dataclasses.replace(cpu_only, reasons=(f"{accelerator.name} is not used: {problem}",))
        return dataclasses.replace(offloaded, reasons=(f"{accelerator.name} is used: {speeds}",))

    def _search(self, accelerator: Accelerator | None, backend: str | None) -> _Outcome:
        target_speed, limit_bytes = self.options.target_tokens_per_s, self.options.memory_bytes
        if self.requirements.follows:
            limit_bytes = followed_limit_bytes(self.subject.device)
        space = self.space(accelerator, backend)
        objective = USUAL if target_speed is None else ANSWER
        search = Search(self.subject.manifest, space, self.requirements, objective, self.frequencies)
        if target_speed is None:
            return _Outcome(search, search.within(limit_bytes))
        if limit_bytes is None:
            limit_bytes = space.place(space.workers[0]).memory_bytes
        return _Outcome(search, search.reaching(target_speed, limit_bytes))

    def space(self, accelerator: Accelerator | None, backend: str | None) -> Space:
        """Return the modes and workers that the options allow."""
        device, gateway, quota = self.subject.device, self.gateway, self.subject.device.cpu_quota
        cores = device.cores
        if self.options.cores is not None:
            _check_cores(self.options.cores, device)
            cores = restrict_cores(device.cores, self.options.cores)
        backends = dict(self.options.backends)
        if self.subject.prompts.backend is not None:
            backends.setdefault("prefill", self.subject.prompts.backend)
        if backend is not None:
            backends[ACCELERATOR] = backend

        def place(workers: int) -> DeviceFacts:
            return device_facts(
                device, workers, gateway=gateway, backends=backends, cores=cores, accelerator=accelerator
            )

        def place_on_all_cores(workers: int) -> DeviceFacts | None:
            if workers > max_decode_workers(device.cores, quota):
                return None
            return device_facts(device, workers, gateway=gateway, backends=backends, accelerator=accelerator)

        if self.options.workers is not None:
            if not 1 <= self.options.workers <= MAX_WORKERS:
                raise UserError(f"--workers {self.options.workers}: between 1 and {MAX_WORKERS}")
            workers: tuple[int, ...] = (self.options.workers,)
        else:
            # The number that the rules choose comes first. A baseline has no other.
            workers = (default_decode_workers(cores, quota),)
            if self.options.baseline is None:
                workers = tuple(dict.fromkeys((*workers, *range(1, max_decode_workers(cores, quota) + 1))))
        return Space(modes=self._modes(), workers=workers, place=place, more=place_on_all_cores)

    def _modes(self) -> tuple[Mode, ...]:
        if self.options.baseline is not None:
            return ("predicted",)
        if self.options.mode is not None:
            return (self.options.mode,)
        return allowed_modes(self.subject.manifest, self.options.quality or "exact")


def _check_cores(cores: tuple[int, ...], device: Device) -> None:
    """Raise UserError for a core that does not exist or that this process may not use."""
    allowed = [core.id for core in device.cores if core.allowed]
    if (missing := next((core for core in cores if core not in allowed), None)) is not None:
        raise UserError(f"--cores: core {missing} is none that this process may use; these are {show_cores(allowed)}")

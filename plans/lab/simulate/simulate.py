"""A device, a model, a system and wishes -> speeds. Pure and seeded: the same every time, on every machine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.token_time import expected, known_before_attention, shares_core
from neuronpipe.plans.cost.work_cost import WorkCost
from neuronpipe.plans.lab.simulate.caching import Traffic, traffic
from neuronpipe.plans.lab.simulate.decode import Decoded, Situation, decode
from neuronpipe.plans.lab.simulate.device_file import DeviceModel
from neuronpipe.plans.lab.simulate.models import SimulatedModel, model_of
from neuronpipe.plans.lab.simulate.npu_prefill import may_be_on_npu
from neuronpipe.plans.lab.simulate.prefill import prefill_s
from neuronpipe.plans.lab.simulate.residency import Text, planned_traffic
from neuronpipe.plans.lab.simulate.systems import SYSTEMS, System
from neuronpipe.plans.lab.simulate.task_times import FileCosts, PlannedCosts
from neuronpipe.plans.lab.simulate.wanted_neurons import Recording
from neuronpipe.plans.lab.simulate.workload import Workload, generated, in_clusters, recorded
from neuronpipe.plans.lab.synth.trajectory import PRESETS
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.borrowed_memory import with_borrowed_slots
from neuronpipe.plans.plan.document import Mode, Plan
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

SKIPPED_TOKENS = 64
MAX_TOKENS, MAX_BATCH, MAX_PROMPT_TOKENS = 4096, 8, 1 << 20


@frozen(kw_only=True)
class Wishes:
    """memory_bytes or resident (of the feed-forward); neither: everything is in memory."""

    memory_bytes: float | None = None
    resident: float | None = None
    batch: int = 1
    prompt_tokens: int = 64
    tokens: int = 160
    context_tokens: int = 576  # on average: a prompt of 64 and half of 1024
    preset: str = "default"
    seed: int = 1


@frozen(kw_only=True)
class Result:
    """What came of it. Shares are of the time of all tokens; `cpu` is the mean over the computing cores."""

    device: str
    model: str
    policy: str
    resident: float
    batch: int
    memory_bytes: float
    tokens_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    prefill_tokens_per_s: float
    miss_rate: float
    p99_miss_rate: float
    looked_miss_rate: float
    dram_bytes_per_token: float
    flash_bytes_per_token: float
    flash_reads_per_token: float
    exposed_io: float
    busy: dict[str, float]
    limit_tokens_per_s: float


def resident_share(model: SimulatedModel, wishes: Wishes) -> float:
    """Of the feed-forward. Raises UserError where memory does not hold what always stays."""
    if wishes.memory_bytes is None:
        return 1.0 if wishes.resident is None else wishes.resident
    if wishes.resident is not None:
        raise UserError("--memory and --ffn-resident: one decides the other; leave one of the two out")
    spare = wishes.memory_bytes - model.fixed_bytes
    if spare < 0:
        raise UserError(
            f"--memory {wishes.memory_bytes / 1e9:.2f} GB: {model.name} needs {model.fixed_bytes / 1e9:.2f} GB before "
            "anything is cached (attention, output, predictors, scales)"
        )
    return min(1.0, spare / model.cacheable_bytes)


def simulate(
    device: DeviceModel,
    model: SimulatedModel,
    system: System,
    wishes: Wishes,
    *,
    recording: Recording | None = None,
    traced_tokens: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[Result, Decoded]:
    """Raises UserError for wishes that cannot be met."""
    _check(wishes)
    system, model = system.on(device), _as_computed(model, system)
    resident = resident_share(model, wishes)
    work = _workload(model, wishes, recording)
    progress(0, wishes.tokens)
    costs = FileCosts(device, model, system)
    seen = traffic(
        work,
        system,
        resident,
        wishes.batch,
        min(SKIPPED_TOKENS, len(work.tokens) // 2),
        exact=model.predicted >= 1,
        stream_from=costs.stream_from(),
    )
    situation = Situation(
        device,
        model,
        system,
        costs,
        wishes.context_tokens,
        resident,
        wishes.batch,
        _repeat(model, seen, wishes.batch),
    )
    decoded = decode(situation, seen, traced_tokens, progress)
    prefill = wishes.prompt_tokens / prefill_s(situation, wishes.prompt_tokens)
    return _result(situation, seen, decoded, prefill), decoded


@frozen(kw_only=True)
class PlannedRun:
    """A package under its plan, on the device that the plan is for."""

    device: DeviceModel
    manifest: Manifest
    plan: Plan
    facts: DeviceFacts

    @property
    def cost(self) -> WorkCost:
        """Of the plan's workers."""
        compute, facts = self.plan.compute, self.facts
        workers, shared = compute.decode_workers(), shares_core(compute)
        return WorkCost(
            self.manifest, compute.mode, len(workers), shared, facts.flash, facts.memory_speed, facts.profile
        )


def simulate_plan(
    run: PlannedRun,
    texts: Sequence[Text],
    skipped_texts: int,
    *,
    sampled: int | None = None,
    context_tokens: float,
    prompt_tokens: int,
    traced_tokens: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[Result, Decoded]:
    """The services' own cache with the plan's slots, and the planner's costs; one text after the other. sampled: of
    planned_traffic. Raises UserError where the device was not measured."""
    manifest, plan = run.manifest, run.plan
    dense = manifest.model.experts == 1 and plan.compute.mode != "predicted"
    early = plan.compute.prefetch and (dense or known_before_attention(manifest, plan.compute))
    system = dataclasses.replace(SYSTEMS["ours"].on(run.device), early=early, cores=len(plan.compute.decode_workers()))
    model = model_of(manifest)
    if plan.compute.mode != "predicted":
        model = dataclasses.replace(model, predictor_rank=0)
    memory = with_borrowed_slots(manifest, plan.compute, plan.memory, tokens=int(context_tokens) + 1)
    seen = planned_traffic(manifest, dataclasses.replace(plan, memory=memory), texts, skipped_texts, sampled)
    costs = PlannedCosts(
        manifest, plan, run.cost, *(float(each.sum(axis=1).mean()) for each in (seen.looked, seen.fire))
    )
    resident = plan.memory.slots_bytes / plan.memory.ffn_bytes
    situation = Situation(run.device, model, system, costs, context_tokens, resident)
    decoded = decode(situation, seen, traced_tokens, progress)
    expects = expected(
        manifest,
        rates(manifest, plan.compute.mode),
        plan.compute,
        plan.memory,
        plan.flash,
        run.facts.flash,
        run.facts.memory_speed,
        run.facts.profile,
        prompt_tokens=prompt_tokens,
    )
    prefill_tokens_per_s = expects.prefill_tokens_per_s or 0.0
    if run.device.has_npu and may_be_on_npu(model.spec):
        by_file = dataclasses.replace(situation, costs=FileCosts(run.device, model, system))
        prefill_tokens_per_s = prompt_tokens / prefill_s(by_file, prompt_tokens)
    result = _result(situation, seen, decoded, prefill_tokens_per_s)
    return dataclasses.replace(result, memory_bytes=float(plan.memory.total_bytes())), decoded


def texts_of(
    manifest: Manifest, mode: Mode, wishes: Wishes, recording: Recording | None
) -> tuple[list[Text], int | None]:
    """What simulate_plan takes: tokens that warm the cache up, then those that count. Of what was recorded, again from
    its start where that is short; else generated, and then how many clusters of each feed-forward it has."""
    count, sampled = wishes.tokens + SKIPPED_TOKENS, None
    if recording is not None:
        _check_recording(recording, manifest.name, manifest.model.layers)
        if recording.clusters != manifest.layout.clusters:
            here = manifest.layout.clusters
            raise UserError(f"--recording: of {recording.clusters} clusters, but {manifest.name} has {here}")
        _, steps = recording.by_cluster()
        tokens = [steps[n % len(steps)] for n in range(count)]
    else:
        model, layout = model_of(manifest), manifest.layout
        if mode != "predicted":  # a value part is wanted where the gate fires, whether or not Up is positive too
            gates_fire = rates(manifest, mode).value_read
            model = dataclasses.replace(model, active=gates_fire, predicted=gates_fire)
        work = _generated(model, wishes.preset, count, wishes.seed, 1)
        tokens, sampled = in_clusters(work, model.spec.experts, layout.cluster_neurons)
    return [Text(tokens[:SKIPPED_TOKENS]), Text(tokens[SKIPPED_TOKENS:])], sampled


def _check_recording(recording: Recording, name: str, layers: int) -> None:
    """Raises UserError for another model's."""
    recorded_layers = recording.chosen.shape[1]
    if recorded_layers != layers:
        raise UserError(f"--recording: of {recorded_layers} layers, but {name} has {layers}")


def _as_computed(model: SimulatedModel, system: System) -> SimulatedModel:
    """Without a predictor we compute exactly: every neuron's first row. Others cannot do without one."""
    exact = system.name == "ours" and not model.predictor_rank
    return dataclasses.replace(model, predicted=1.0) if exact else model


def _check(wishes: Wishes) -> None:
    for name, value, most in (
        ("--batch", wishes.batch, MAX_BATCH),
        ("--tokens", wishes.tokens, MAX_TOKENS),
        ("--prompt", wishes.prompt_tokens, MAX_PROMPT_TOKENS),
    ):
        if not 1 <= value <= most:
            raise UserError(f"{name} {value}: between 1 and {most}")
    if wishes.preset not in PRESETS:
        raise UserError(f"--preset {wishes.preset}: is none of {', '.join(PRESETS)}")


def _workload(model: SimulatedModel, wishes: Wishes, recording: Recording | None) -> Workload:
    count = wishes.tokens + SKIPPED_TOKENS
    if recording is not None:
        _check_recording(recording, model.name, model.spec.layers)
        return recorded(recording, count)
    return _generated(model, wishes.preset, count, wishes.seed, wishes.batch)


@functools.lru_cache(maxsize=2)
def _generated(model: SimulatedModel, preset: str, tokens: int, seed: int, batch: int) -> Workload:
    return generated(model, PRESETS[preset], tokens, seed, batch)


def _repeat(model: SimulatedModel, seen: Traffic, batch: int) -> float:
    """Texts that want a neuron, of those that one text wants, on average."""
    spec = model.spec
    one = model.active * spec.neurons * spec.experts_per_token
    union = float(seen.all_fire.mean())
    return max(1.0, batch * one / union) if union and batch > 1 else 1.0


def _result(situation: Situation, seen: Traffic, decoded: Decoded, prefill_tokens_per_s: float) -> Result:
    model, device, use = situation.model, situation.device, decoded.use
    milliseconds = 1e3 * np.array(decoded.token_s)
    cores, total = situation.system.compute_cores(device), device.dram_total_gb_per_s.value * 1e9
    limit_s = max(
        decoded.dram_bytes_per_token / total,
        decoded.flash_bytes_per_token / device.sequential_bytes_per_s(),
    )
    return Result(
        device=device.name,
        model=model.name,
        policy=situation.system.name,
        resident=round(situation.resident, 4),
        batch=situation.batch,
        memory_bytes=model.fixed_bytes + situation.resident * model.cacheable_bytes,
        tokens_per_s=situation.batch * len(milliseconds) / sum(decoded.token_s),
        p50_ms=float(np.percentile(milliseconds, 50)),
        p90_ms=float(np.percentile(milliseconds, 90)),
        p99_ms=float(np.percentile(milliseconds, 99)),
        prefill_tokens_per_s=prefill_tokens_per_s,
        miss_rate=seen.miss_rate,
        p99_miss_rate=float(np.percentile(seen.miss_rates(), 99)),
        looked_miss_rate=seen.looked_miss_rate,
        dram_bytes_per_token=decoded.dram_bytes_per_token,
        flash_bytes_per_token=decoded.flash_bytes_per_token,
        flash_reads_per_token=decoded.flash_reads_per_token,
        exposed_io=use.exposed_io_s / use.total_s,
        busy={
            "cpu": use.busy_s["cpu"] / use.total_s / cores,
            "npu": use.busy_s["npu"] / use.total_s,
            "flash": use.busy_s["flash"] / use.total_s,
            "dram": decoded.dram_bytes_per_token
            * len(milliseconds)
            / use.total_s
            / (device.dram_total_gb_per_s.value * 1e9),
        },
        limit_tokens_per_s=situation.batch / limit_s if limit_s else float("inf"),
    )

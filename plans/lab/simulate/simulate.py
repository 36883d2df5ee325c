"""Simulation of a system's speeds, given a device, a model and options. The result is the same on every machine."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.step_reads import ReadOrder
from neuronpipe.plans.cost.token_time import expected
from neuronpipe.plans.lab.devices.device_description import planner_device
from neuronpipe.plans.lab.devices.device_file import DeviceModel
from neuronpipe.plans.lab.shapes.models import SimulatedModel, model_of
from neuronpipe.plans.lab.shapes.shape_manifest import manifest_of_shape
from neuronpipe.plans.lab.simulate.caching import Traffic, traffic
from neuronpipe.plans.lab.simulate.decode import Decoded, Situation, decode
from neuronpipe.plans.lab.simulate.npu_prefill import has_npu_worker
from neuronpipe.plans.lab.simulate.prefill import prefill_s
from neuronpipe.plans.lab.simulate.recording import Recording
from neuronpipe.plans.lab.simulate.residency import SequenceDemand, planned_traffic
from neuronpipe.plans.lab.simulate.systems import OURS, System
from neuronpipe.plans.lab.simulate.task_times import FileCosts, PlannedCosts
from neuronpipe.plans.lab.simulate.workload import Workload, generated, in_clusters, recorded
from neuronpipe.plans.lab.synth.trajectory import PRESETS
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.borrowed_memory import with_borrowed_slots
from neuronpipe.plans.plan.document import Mode, Plan
from neuronpipe.plans.planner.device_facts import DeviceFacts, device_facts
from neuronpipe.plans.planner.plan_options import MemoryLimit, PlanOptions, size_to_type
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

SKIPPED_TOKENS = 64
MAX_TOKENS, MAX_BATCH, MAX_PROMPT_TOKENS = 4096, 8, 1 << 20


@frozen(kw_only=True)
class SimulationOptions:
    """Options of a simulation.

    resident: share of the feed-forward in memory, instead of memory_bytes. If both are None, all of it is.
    context_tokens: mean number of tokens before a generated one
    """

    memory_bytes: int | None = None
    resident: float | None = None
    batch: int = 1
    prompt_tokens: int = 64
    tokens: int = 160
    context_tokens: int = 576  # a prompt of 64 and half of 1024
    preset: str = "default"
    seed: int = 1


@frozen(kw_only=True)
class Result:
    """The simulated speeds. Percentiles are of steps.

    quantization: quantization of most weights, or their bits for systems without a plan
    resident: share of the feed-forward in memory
    exposed_io: share of the time in which only flash works
    busy: share of the time in which each unit works; `cpu` is the mean over the computing cores, `dram` the share of
        its speed
    limit_tokens_per_s: speed if only memory or only flash took time, whichever is slower
    """

    device: str
    model: str
    policy: str
    quantization: str
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


def resident_share(model: SimulatedModel, options: SimulationOptions) -> float:
    """Return the resident share of the feed-forward. Raises UserError if the fixed part does not fit memory, or if both
    options are set."""
    if options.memory_bytes is None:
        return 1.0 if options.resident is None else options.resident
    if options.resident is not None:
        raise UserError("--memory and --ffn-resident: one decides the other; leave one of the two out")
    spare = options.memory_bytes - model.fixed_bytes
    if spare < 0:
        limit = MemoryLimit.of(options.memory_bytes)
        raise UserError(
            f"--memory {limit.as_typed}: {model.name} needs {size_to_type(math.ceil(model.fixed_bytes), limit.unit)} "
            "before anything is cached (attention, output, predictors, scales)"
        )
    return min(1.0, spare / model.cacheable_bytes)


def simulate(
    device: DeviceModel,
    model: SimulatedModel,
    system: System,
    options: SimulationOptions,
    *,
    recording: Recording | None = None,
    traced_tokens: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[Result, Decoded]:
    """Simulate decode and a prompt. Raises UserError for impossible options.

    recording: the workload; None: it is generated
    progress: as in `decode`
    """
    check_options(options)
    system = system.on(device)
    resident = resident_share(model, options)
    work = _workload(model, options, recording)
    progress(0, options.tokens)
    counts = traffic(
        work,
        system,
        resident,
        options.batch,
        min(SKIPPED_TOKENS, len(work.tokens) // 2),
        stream_from=FileCosts(device, model, system).stream_from(),
    )
    costs = FileCosts(
        device,
        model,
        system,
        context_tokens=options.context_tokens,
        batch=options.batch,
        repeat=_repeat(model, counts, options.batch),
        hot_share=counts.hot_share,
    )
    situation = Situation(device, model, system, costs, options.context_tokens, resident, options.batch)
    decoded = decode(situation, counts, traced_tokens, progress)
    prefill = options.prompt_tokens / prefill_s(situation, options.prompt_tokens)
    return _result(situation, counts, decoded, prefill), decoded


@frozen(kw_only=True)
class PlannedRun:
    """A package under its plan, on the device that the plan is for."""

    device: DeviceModel
    manifest: Manifest
    plan: Plan
    facts: DeviceFacts


def run_of_shape(device: DeviceModel, model: SimulatedModel, options: PlanOptions) -> PlannedRun:
    """Return a shape's run on a described device, planned by the rules. Raises UserError, as `make_plan` does."""
    manifest = manifest_of_shape(model)
    facts = device_facts(planner_device(device, manifest))
    return PlannedRun(device=device, manifest=manifest, plan=make_plan(manifest, facts, options), facts=facts)


def simulate_plan(
    run: PlannedRun,
    sequences: Sequence[SequenceDemand],
    skipped_sequences: int,
    *,
    sampled: int | None = None,
    batch: int = 1,
    context_tokens: int,
    prompt_tokens: int,
    traced_tokens: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[Result, Decoded]:
    """Simulate the decode steps of a package under its plan, with the services' cache and the planner's costs.

    Sequences are generated one after the other. Raises UserError if the device was not measured.

    batch: sequences of each step, whose clusters are in `sequences` together
    skipped_sequences: number of first sequences, which only fill the cache
    sampled: as in `planned_traffic`
    context_tokens: mean number of tokens before a generated one
    prompt_tokens: tokens of a prompt, whose speed is that of the cost model, or simulated on an NPU
    """
    manifest, measured = run.manifest, run.facts.measured
    memory = with_borrowed_slots(manifest, run.plan.compute, run.plan.memory, tokens=context_tokens + 1)
    plan = dataclasses.replace(run.plan, memory=memory)
    system = dataclasses.replace(
        OURS.on(run.device),
        early=ReadOrder(manifest, plan.compute, memory, plan.flash).before_attention,
        cores=len(plan.compute.decode_workers()),
    )
    model = model_of(manifest)
    counts = planned_traffic(manifest, plan, sequences, skipped_sequences, sampled, batch=batch)
    costs = PlannedCosts(
        manifest,
        plan,
        measured,
        batch=batch,
        position_tokens=context_tokens,
        looked=float(counts.looked.sum(axis=1).mean()),
        fire=float(counts.fire.sum(axis=1).mean()),
    )
    resident = memory.slots_bytes / memory.ffn_bytes
    situation = Situation(run.device, model, system, costs, context_tokens, resident, batch)
    decoded = decode(situation, counts, traced_tokens, progress)
    expects = expected(
        manifest,
        rates(manifest, plan.compute.mode),
        plan.compute,
        run.plan.memory,
        plan.flash,
        *measured,
        prompt_tokens=prompt_tokens,
    )
    prefill_tokens_per_s = expects.prefill_tokens_per_s or 0.0
    if run.device.has_npu and has_npu_worker(model.spec):
        prefill_tokens_per_s = prompt_tokens / prefill_s(situation, prompt_tokens)
    result = _result(situation, counts, decoded, prefill_tokens_per_s)
    memory_bytes = float(plan.memory.total_bytes())
    return dataclasses.replace(result, memory_bytes=memory_bytes, quantization=manifest.quantization), decoded


def sequences_of(
    manifest: Manifest, mode: Mode, options: SimulationOptions, recording: Recording | None
) -> tuple[list[SequenceDemand], int | None]:
    """Return two sequences for `simulate_plan`, of which the first warms the cache, and `sampled`. Of a batch, each has
    the clusters of all its sequences.

    recording: their clusters, repeated if it is short; None: they are generated, with a sample of the neurons. Raises
        UserError if it does not fit the package.
    """
    count, sampled = options.tokens + SKIPPED_TOKENS, None
    if recording is not None:
        _check_recording(recording, manifest.name, manifest.model.layers)
        if recording.clusters != manifest.layout.clusters:
            clusters = manifest.layout.clusters
            raise UserError(f"--recording: of {recording.clusters} clusters, but {manifest.name} has {clusters}")
        _, steps = recording.by_cluster()
        tokens = [steps[n % len(steps)] for n in range(count)]
    else:
        model, layout = model_of(manifest), manifest.layout
        if mode != "predicted":  # a value part is needed if the gate fires, even if Up is not positive
            gates_fire = rates(manifest, mode).value_read
            model = dataclasses.replace(model, active=gates_fire, predicted=gates_fire)
        work = _generated(model, options.preset, count, options.seed, options.batch)
        tokens, sampled = in_clusters(work, layout.cluster_neurons)
    return [SequenceDemand(tokens[:SKIPPED_TOKENS]), SequenceDemand(tokens[SKIPPED_TOKENS:])], sampled


def _check_recording(recording: Recording, name: str, layers: int) -> None:
    recorded_layers = recording.chosen.shape[1]
    if recorded_layers != layers:
        raise UserError(f"--recording: of {recorded_layers} layers, but {name} has {layers}")


def check_options(options: SimulationOptions) -> None:
    """Raise UserError, which names the option, if a value is impossible."""
    for name, value, max_value in (
        ("--batch", options.batch, MAX_BATCH),
        ("--tokens", options.tokens, MAX_TOKENS),
        ("--prompt", options.prompt_tokens, MAX_PROMPT_TOKENS),
    ):
        if not 1 <= value <= max_value:
            raise UserError(f"{name} {value}: between 1 and {max_value}")
    if options.preset not in PRESETS:
        raise UserError(f"--preset {options.preset}: is none of {', '.join(PRESETS)}")


def _workload(model: SimulatedModel, options: SimulationOptions, recording: Recording | None) -> Workload:
    count = options.tokens + SKIPPED_TOKENS
    if recording is not None:
        _check_recording(recording, model.name, model.spec.layers)
        return recorded(recording, count)
    return _generated(model, options.preset, count, options.seed, options.batch)


@functools.lru_cache(maxsize=2)
def _generated(model: SimulatedModel, preset: str, tokens: int, seed: int, batch: int) -> Workload:
    return generated(model, PRESETS[preset], tokens, seed, batch)


def _repeat(model: SimulatedModel, counts: Traffic, batch: int) -> float:
    spec = model.spec
    neurons_of_one = model.active * spec.neurons * spec.mean_active_experts
    union = float(counts.all_fire.mean())
    return max(1.0, batch * neurons_of_one / union) if union and batch > 1 else 1.0


def _result(situation: Situation, counts: Traffic, decoded: Decoded, prefill_tokens_per_s: float) -> Result:
    model, device, use = situation.model, situation.device, decoded.use
    milliseconds = 1e3 * np.array(decoded.token_s)
    cores, total = situation.system.compute_cores(device), device.dram_total_gb_per_s.value * 1e9
    limit_s = max(
        decoded.dram_bytes_per_step / total,
        decoded.flash_bytes_per_step / device.sequential_bytes_per_s(),
    )
    return Result(
        device=device.name,
        model=model.name,
        policy=situation.system.name,
        quantization=f"{situation.model.bits_per_weight:g} bits",
        resident=round(situation.resident, 4),
        batch=situation.batch,
        memory_bytes=model.fixed_bytes + situation.resident * model.cacheable_bytes,
        tokens_per_s=situation.batch * len(milliseconds) / sum(decoded.token_s),
        p50_ms=float(np.percentile(milliseconds, 50)),
        p90_ms=float(np.percentile(milliseconds, 90)),
        p99_ms=float(np.percentile(milliseconds, 99)),
        prefill_tokens_per_s=prefill_tokens_per_s,
        miss_rate=counts.miss_rate,
        p99_miss_rate=float(np.percentile(counts.miss_rates(), 99)),
        looked_miss_rate=counts.looked_miss_rate,
        dram_bytes_per_token=decoded.dram_bytes_per_step / situation.batch,
        flash_bytes_per_token=decoded.flash_bytes_per_step / situation.batch,
        flash_reads_per_token=decoded.flash_reads_per_step / situation.batch,
        exposed_io=use.exposed_io_s / use.total_s,
        busy={
            "cpu": use.busy_s["cpu"] / use.total_s / cores,
            "npu": use.busy_s["npu"] / use.total_s,
            "flash": use.busy_s["flash"] / use.total_s,
            "dram": decoded.dram_bytes_per_step
            * len(milliseconds)
            / use.total_s
            / (device.dram_total_gb_per_s.value * 1e9),
        },
        limit_tokens_per_s=situation.batch / limit_s if limit_s else float("inf"),
    )

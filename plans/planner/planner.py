"""The planner: from a package, a device and a limit to a plan. Pure: no files, no clock, no measuring."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.activation_rates import has_hints, rates, unmeasured_predictor
from neuronpipe.plans.cost.read_sizes import ClusterDemand, ReadSizes, choose_read_sizes
from neuronpipe.plans.cost.token_time import Measurements, expected
from neuronpipe.plans.device.cores import Core, assign_cores, default_decode_workers
from neuronpipe.plans.device.device import Device, FlashCurve, MemorySpeed
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.package.layout import PAGE_BYTES
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.borrowed_memory import max_borrowed_bytes
from neuronpipe.plans.plan.document import (
    ACCELERATOR,
    GATEWAY,
    VERSION,
    Compute,
    Flash,
    Memory,
    MemoryBudget,
    Mode,
    Plan,
    ProcessSpec,
    backend_of,
)
from neuronpipe.plans.plan.memory_budget import (
    MIB,
    Budgets,
    accelerator_bytes,
    min_chunk_tokens,
    trusted_bytes,
    untrusted_bytes,
)
from neuronpipe.plans.plan.offloaded_blocks import Accelerator, offload_reasons, offload_shape
from neuronpipe.plans.plan.runtime_memory import runtime_of
from neuronpipe.plans.plan.segment_sizes import PARTIAL_TOKENS, RunShape
from neuronpipe.plans.planner.assumptions import assumptions
from neuronpipe.plans.planner.mode_choice import mode_reason
from neuronpipe.plans.planner.offload_split import BestSplit
from neuronpipe.plans.planner.slot_regions import NOTHING_PINNED, Regions, allocate_slots
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

MEMORY_SHARE = 0.7  # of what is available now, when the user names no limit
# A prompt's chunk reads every weight once, so it is as large as memory allows; its buffers take no more than this.
CHUNK_TOKENS = (512, 256, 128, 64, 32, 16)
PREFILL_SHARE = 1 / 8
STAGING_SHARE = 1 / 32  # of the limit; and
STAGING_SPARE_SHARE = 1 / 8  # of what is left for neurons at most
BASELINE_CACHE_TOKENS = 5  # of the baseline: what so many tokens used stays

Technique = Literal["bundle", "cache", "pipeline", "predictor", "prefetch"]
TECHNIQUES: tuple[Technique, ...] = ("bundle", "cache", "pipeline", "predictor", "prefetch")
Baseline = Literal["llm-in-a-flash"]
BASELINES: tuple[Baseline, ...] = ("llm-in-a-flash",)


class LimitTooSmall(UserError):
    """The memory limit is below the least possible for what is wanted."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@frozen(kw_only=True)
class PlanOptions:
    """What the user asks for. Bytes and shares are limits; None leaves the choice to the planner. `without` and
    `baseline` are for experiments: they take techniques away."""

    memory_bytes: int | None = None
    ffn_resident_share: float | None = None  # 0..1 of all feed-forward bytes
    follows: bool = False  # what is available, up to memory_bytes
    context_tokens: int | None = None
    sequences: int = 1
    mode: Mode | None = None
    without: frozenset[Technique] = frozenset()
    baseline: Baseline | None = None
    hints: bool = False  # of the package's predictor or routers, in exact mode
    bundle: bool | None = None  # whether both parts of a cluster are read together
    prefill_chunk_tokens: int | None = None  # of a prompt at once at most; as many of them as the limit holds, or 8
    depth: int | None = None  # reads at once at most; as many of them as staging may take
    held_blocks: tuple[int, ...] | None = None  # of an accelerator, as Compute has them; those expected to be best
    held_matrices: tuple[str, ...] | None = None  # the same


@frozen(kw_only=True)
class DeviceFacts:
    """What the planner needs to know of a device; a curve or a speed is None where nothing was measured."""

    id: str
    memory_bytes: int  # what the run may take when the user names no limit
    flash_engine: str
    processes: tuple[ProcessSpec, ...]
    flash: FlashCurve | None = None
    memory_speed: MemorySpeed | None = None
    profile: DeviceProfile | None = None  # of `neuronpipe profile device`, while it holds
    accelerator: Accelerator | None = None  # that decode steps are to use

    @property
    def measured(self) -> Measurements:
        """As `plans/cost/token_time.py` takes it."""
        return self.flash, self.memory_speed, self.profile


def device_facts(
    device: Device,
    workers: int | None = None,
    *,
    gateway: bool = False,
    backends: Mapping[str, str] | None = None,
    cores: Sequence[Core] | None = None,
    accelerator: Accelerator | None = None,
) -> DeviceFacts:
    """Place `workers` decode workers (default: one per fast core) and the other roles; a gateway or an accelerator when
    asked for. backends: who computes, by role, where it is not the default. cores: instead of all that the device has.
    """
    cores = device.cores if cores is None else cores
    count = workers or default_decode_workers(cores, device.cpu_quota)
    places = assign_cores(cores, count)
    processes = [
        ProcessSpec(role=role, index=0, core=places[role]) for role in ("coordinator", "loader", "cache", "prefill")
    ]
    processes += [ProcessSpec(role="decode", index=n, core=places[f"decode.{n}"]) for n in range(count)]
    processes += [ProcessSpec(role=GATEWAY, index=0, core=places[GATEWAY])] if gateway else []
    if accelerator is not None:  # it mostly waits for its device
        processes.append(ProcessSpec(role=ACCELERATOR, index=0, core=places["coordinator"]))
    asked = backends or {}
    processes = [dataclasses.replace(spec, backend=asked.get(spec.role, spec.backend)) for spec in processes]
    return DeviceFacts(
        id=device.id,
        memory_bytes=int(MEMORY_SHARE * device.memory_available_bytes),
        flash_engine=device.flash_engine,
        processes=tuple(processes),
        flash=device.flash,
        memory_speed=device.memory_speed,
        profile=device.profile,
        accelerator=accelerator,
    )


def plan(
    manifest: Manifest,
    device: DeviceFacts,
    wanted: PlanOptions,
    budgets: Budgets | None = None,
    heat: AccessFrequencies | None = None,
) -> Plan:
    """Make a plan. Raises LimitTooSmall, saying what the least is and why, and UserError for what cannot be had.
    budgets: of this package, for whoever makes many plans of it; heat: how often its clusters are wanted, where
    that was measured."""
    wanted, budgets = _as_baseline(wanted), budgets or Budgets(manifest)

    def make(blocks: tuple[int, ...] | None, matrices: tuple[str, ...] | None) -> Plan:
        other = dataclasses.replace(wanted, held_blocks=blocks, held_matrices=matrices)
        return _Planning(manifest, device, other, budgets, heat).plan()

    made = make(wanted.held_blocks, wanted.held_matrices)
    if device.accelerator is None or wanted.held_blocks is not None:
        return made
    best = BestSplit(manifest, rates(manifest, made.compute.mode, heat), device.accelerator, device.measured, make)
    return best.of(made) if wanted.held_matrices is None else best.with_best_blocks(made)


def _as_baseline(wanted: PlanOptions) -> PlanOptions:
    """A windowed cache, up and down in one read, a predictor; no pipeline, nothing ahead of time."""
    if wanted.baseline is None:
        return wanted
    if wanted.mode not in (None, "predicted") or wanted.without:
        raise UserError(f"--baseline {wanted.baseline}: sets the mode and the techniques itself; leave the others out")
    return dataclasses.replace(wanted, mode="predicted", without=frozenset({"bundle", "pipeline", "prefetch"}))


class _Planning:
    def __init__(
        self,
        manifest: Manifest,
        device: DeviceFacts,
        wanted: PlanOptions,
        budgets: Budgets,
        heat: AccessFrequencies | None,
    ) -> None:
        self._manifest, self._device, self._wanted, self._budgets = manifest, device, wanted, budgets
        context_tokens = manifest.model.context_tokens if wanted.context_tokens is None else wanted.context_tokens
        if not 1 <= context_tokens <= manifest.model.context_tokens:
            raise UserError(
                f"--context {context_tokens}: between 1 and {manifest.model.context_tokens}, the package's context"
            )
        workers = sum(process.role == "decode" for process in device.processes)
        self._shape = RunShape(
            mode=self._mode(),
            processes=len(device.processes),
            workers=workers,
            prefill_threads=workers,
            sequences=wanted.sequences,
            context_tokens=context_tokens,
            logit_rows=max(8, wanted.sequences),
            gateways=sum(process.role == GATEWAY for process in device.processes),
            hints=self._hints(),
            prefill_backend=backend_of("prefill", device.processes),
            accelerator_backend=backend_of(ACCELERATOR, device.processes),
        )
        self._limit_bytes = device.memory_bytes if wanted.memory_bytes is None else wanted.memory_bytes
        if device.accelerator is not None:
            self._shape = self._accelerated(device.accelerator)
        self._rates = rates(manifest, self._shape.mode, heat)
        self._usable_bytes = trusted_bytes(manifest, self._shape, self._limit_bytes)

    def _accelerated(self, accelerator: Accelerator) -> RunShape:
        """The shape with as many blocks as the device has room for."""
        if "pipeline" in self._wanted.without:
            raise UserError("--without pipeline and an accelerator: it is part of the pipeline; leave one of them out")
        room = accelerator, self._device.profile, self._limit_bytes, self._shape
        return offload_shape(self._manifest, *room, self._wanted.held_blocks, self._wanted.held_matrices)

    def _mode(self) -> Mode:
        mode: Mode = self._wanted.mode or "exact"
        if mode == "predicted" and "predictor" in self._wanted.without:
            return "exact"
        if mode == "predicted" and self._manifest.predictor is None:
            raise UserError(
                f"--mode predicted: the package {self._manifest.name!r} has no predictor; "
                "make one with `neuronpipe profile PACKAGE`"
            )
        if mode == "thresholded" and self._manifest.silent is None:
            raise UserError(self._no_thresholds())
        return mode

    def _no_thresholds(self) -> str:
        name, activation = self._manifest.name, self._manifest.model.activation
        if activation != "silu":
            return (
                f"--mode thresholded: the package {name!r} computes {activation}, whose neurons are silent by "
                "themselves; take exact or predicted"
            )
        return (
            f"--mode thresholded: the package {name!r} has no thresholds; "
            "set them with `neuronpipe profile PACKAGE --silent 50% --text FILE`"
        )

    def _hints(self) -> bool:
        if self._wanted.hints and (self._mode() == "predicted" or not has_hints(self._manifest)):
            raise UserError(
                "--hints: those of a package's predictor, or of its routers, in exact mode; in predicted mode the "
                "predictor decides, and a package without one gets it from `neuronpipe profile PACKAGE`"
            )
        return self._wanted.hints

    def plan(self) -> Plan:
        manifest, shape, wanted = self._manifest, self._shape, self._wanted
        least = self._budgets.least(shape)
        least_slots = self._budgets.min_slots_bytes(shape.workers)
        if self._usable_bytes < least.total_bytes() + least_slots:
            self._refuse_limit(least, least_slots)
        chunk, read, others, regions = self._fitted(least, least_slots, wanted.prefill_chunk_tokens)
        sums_by_turns = not runtime_of(shape.prefill_backend) and chunk > PARTIAL_TOKENS
        if sums_by_turns and regions.window_blocks < manifest.layout.blocks:
            # They need a whole layer's neurons in place.
            chunk, read, others, regions = self._fitted(least, least_slots, PARTIAL_TOKENS)
        memory = self._memory(others, regions)
        compute = Compute(
            mode=shape.mode,
            processes=self._device.processes,
            sequences=shape.sequences,
            context_tokens=shape.context_tokens,
            prefill_chunk_tokens=chunk,
            prefill_threads=shape.prefill_threads,
            logit_rows=shape.logit_rows,
            decode_window_blocks=regions.window_blocks,
            prefill_window_blocks=regions.window_blocks,
            spin_us=50,
            pipeline="pipeline" not in wanted.without,
            prefetch="prefetch" not in wanted.without,
            hints=shape.hints,
            held_blocks=wanted.held_blocks or ((shape.held_blocks,) if shape.held_blocks else ()),
            held_matrices=shape.held_matrices,
            device_shares_memory=shape.device_shares_memory,
            device_name="" if self._device.accelerator is None else self._device.accelerator.name,
        )
        flash = Flash(
            engine=self._device.flash_engine,
            depth=read.depth,
            bundle=read.bundle,
            merge_gap_bytes=read.merge_gap_bytes,
            most_read_bytes=read.most_read_bytes,
            prefetch_depth=read.prefetch_depth,
            warm_up_reads=read.warm_up_reads,
            warm_up_read_bytes=read.warm_up_read_bytes,
            reserved_triggers=regions.reserved_triggers,
            reserved_values=regions.reserved_values,
        )
        return Plan(
            version=VERSION,
            package_id=manifest.id,
            device_id=self._device.id,
            compute=compute,
            memory=memory,
            flash=flash,
            expected=expected(manifest, self._rates, compute, memory, flash, *self._device.measured),
            reasons=(
                *self._mode_reasons(),
                *offload_reasons(manifest, self._device.accelerator, compute, memory, self._device.profile),
                *regions.reasons,
                *read.reasons,
                self._chunk_reason(chunk, others),
                *self._assumptions(memory),
            ),
        )

    def _fitted(
        self, least: MemoryBudget, least_slots: int, asked_tokens: int | None
    ) -> tuple[int, ReadSizes, MemoryBudget, Regions]:
        """The chunk, the reads, what both take with all else, and the neurons in what is left. A chunk that is asked
        for comes before more staging."""
        if asked_tokens is not None:
            chunk = self._chunk(least.staging_bytes, least_slots, asked_tokens)
            least = self._budgets.of(self._shape, prefill_chunk_tokens=chunk, staging_bytes=least.staging_bytes)
        read = self._reading(least)
        chunk = self._chunk(read.set_aside_bytes, least_slots, asked_tokens)
        others = self._budgets.of(self._shape, prefill_chunk_tokens=chunk, staging_bytes=read.staging_bytes)
        return chunk, read, others, self._regions(others, least_slots, read)

    def _reading(self, least: MemoryBudget) -> ReadSizes:
        """The reads, with staging for them beside this least budget: a share of the limit, and no less than it has."""
        manifest, wanted = self._manifest, self._wanted
        spare_bytes = self._usable_bytes - least.total_bytes() - self._budgets.min_slots_bytes(self._shape.workers)
        slots_bytes = spare_bytes
        if wanted.ffn_resident_share is not None:
            ffn_bytes = manifest.clusters * (manifest.trigger_slot_bytes + manifest.value_slot_bytes)
            slots_bytes = min(slots_bytes, int(wanted.ffn_resident_share * ffn_bytes))
        return choose_read_sizes(
            manifest.layout,
            self._device.flash,
            demands=ClusterDemand.of(manifest, self._rates, slots_bytes, self._shape.mode),
            bundle=False if "bundle" in wanted.without else wanted.bundle,
            depth=wanted.depth,
            prefetch="prefetch" not in wanted.without,
            staging_most_bytes=least.staging_bytes
            + min(int(STAGING_SPARE_SHARE * spare_bytes), int(STAGING_SHARE * self._usable_bytes)),
        )

    def _chunk(self, staging_bytes: int, least_slots: int, asked: int | None) -> int:
        """The largest chunk that leaves room for the fewest slots: of those asked for, or whose buffers take a small
        share of the limit."""
        context = self._shape.context_tokens
        least = min_chunk_tokens(self._shape)
        anyway = self._budgets.least(self._shape).private_bytes if runtime_of(self._shape.prefill_backend) else 0
        sizes = (size for size in CHUNK_TOKENS if (size > least if asked is None else size <= asked))
        for tokens in (min(size, context) for size in sizes):
            one = self._budgets.of(self._shape, prefill_chunk_tokens=tokens, staging_bytes=0)
            fits = one.total_bytes() + staging_bytes + least_slots <= self._usable_bytes
            buffers_bytes = one.private_bytes - anyway + one.prefill_stage_bytes  # a runtime is there with any chunk
            if fits and (asked is not None or buffers_bytes <= PREFILL_SHARE * self._usable_bytes):
                return tokens
        return least if asked is None else min(least, asked)

    def _regions(self, others: MemoryBudget, least_slots: int, read: ReadSizes) -> Regions:
        manifest, wanted = self._manifest, self._wanted
        usable = self._usable_bytes - others.total_bytes() - (read.set_aside_bytes - read.staging_bytes)
        budget = usable // PAGE_BYTES * PAGE_BYTES - PAGE_BYTES  # the segment begins with a page, and is whole pages
        ffn_bytes = manifest.clusters * (manifest.trigger_slot_bytes + manifest.value_slot_bytes)
        if wanted.ffn_resident_share is not None and wanted.ffn_resident_share < 1:
            budget = min(budget, int(wanted.ffn_resident_share * ffn_bytes))
        regions = allocate_slots(
            manifest,
            self._rates,
            mode=self._shape.mode,
            workers=self._shape.workers,
            texts=self._shape.sequences,
            budget=budget,
            whole=read.bundle,
            moved=read.moved_scales,
            cache="cache" not in wanted.without,
            cache_tokens=0 if wanted.baseline is None else BASELINE_CACHE_TOKENS,
            lendable_bytes=0 if wanted.ffn_resident_share else max_borrowed_bytes(others),
        )
        if regions is not None:
            return self._behind_held(regions)
        assert usable >= least_slots
        assert wanted.ffn_resident_share is not None
        raise UserError(
            f"--ffn-resident {wanted.ffn_resident_share:.1%}: the least for this package is "
            f"{least_slots / ffn_bytes:.1%} ({least_slots:,} bytes): one block of neurons per worker must be open, "
            "and as much arriving"
        )

    def _behind_held(self, regions: Regions) -> Regions:
        """Where an accelerator has the hottest, and memory does not hold everything, nothing is pinned: what else is
        hot stays by being used."""
        if not self._shape.held_blocks or min(regions.triggers, regions.values) == self._manifest.clusters:
            return regions
        return dataclasses.replace(regions, pins=(NOTHING_PINNED,))

    def _memory(self, others: MemoryBudget, regions: Regions) -> Memory:
        return Memory(
            **{field.name: getattr(others, field.name) for field in dataclasses.fields(MemoryBudget)},
            limit_bytes=self._limit_bytes,
            least_bytes=self._budgets.min_limit_bytes(self._shape),
            **untrusted_bytes(self._manifest, self._shape, self._limit_bytes),
            **regions.memory(self._manifest),
            follows=self._wanted.follows,
            ffn_bytes=self._budgets.ffn_bytes,
            accelerator_bytes=accelerator_bytes(self._manifest, self._shape),
        )

    def _refuse_limit(self, least: MemoryBudget, least_slots: int) -> None:
        limit = self._budgets.min_limit_bytes(self._shape)
        chosen = ", a share of what is available now" if self._wanted.memory_bytes is None else ""
        reserved_bytes = sum(untrusted_bytes(self._manifest, self._shape, limit).values())
        raise LimitTooSmall(
            f"--memory {self._limit_bytes:,}{chosen}: "
            f"the least for this package is {limit:,} bytes ({-(-limit // MIB)} MiB): "
            f"{least.total_bytes():,} for interpreters, fixed tensors, KV cache and exchange, "
            f"{reserved_bytes:,} for grammars and templates, {least_slots:,} for the neurons being computed; "
            "a smaller --context needs less",
            limit,
        )

    def _mode_reasons(self) -> list[str]:
        wanted, reasons = self._wanted, [mode_reason(self._manifest, self._shape.mode, self._rates)]
        if self._shape.hints:
            reasons.append("hints: what will probably be wanted is asked for before it is certain, by request")
        if (said := unmeasured_predictor(self._manifest, self._shape.mode)) is not None:
            reasons.append(said)
        if wanted.baseline is not None:
            reasons.append(f"baseline {wanted.baseline}, for comparison")
        if wanted.without:
            reasons.append(f"without {', '.join(sorted(wanted.without))}, by request")
        if wanted.ffn_resident_share is not None:
            reasons.append(f"feed-forward residency is limited to {wanted.ffn_resident_share:.0%} by request")
        return reasons

    def _assumptions(self, memory: Memory) -> tuple[str, ...]:
        return assumptions(
            self._manifest,
            self._shape.mode,
            all_resident=min(memory.trigger_slots, memory.value_slots) >= self._manifest.clusters,
            curve=self._device.flash,
            speed=self._device.memory_speed,
            profile=self._device.profile,
            prompts_by=self._shape.prefill_backend,
        )

    def _chunk_reason(self, chunk: int, others: MemoryBudget) -> str:
        buffers = f"{(others.private_bytes + others.prefill_stage_bytes) / MIB:.0f} MiB"
        said = f"prefill takes {chunk} tokens at a time with {self._shape.prefill_threads} thread(s): its buffers "
        if self._wanted.prefill_chunk_tokens is not None:
            return f"{said}take {buffers}"
        return f"{said}are within {PREFILL_SHARE:.1%} of the limit ({buffers})"

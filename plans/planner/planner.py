"""The planner: from a package, a device and a limit to a plan. Pure: no files, no clock, no measuring."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.activation_rates import has_hints, rates
from neuronpipe.plans.cost.read_sizes import ClusterDemand, ReadSizes, choose_read_sizes
from neuronpipe.plans.package.layout import PAGE_BYTES
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.borrowed_memory import max_borrowed_bytes
from neuronpipe.plans.plan.document import (
    ACCELERATOR,
    GATEWAY,
    MAX_DRAFT_TOKENS,
    VERSION,
    Compute,
    Flash,
    KvType,
    Memory,
    MemoryBudget,
    Mode,
    Plan,
    backend_of,
)
from neuronpipe.plans.plan.memory_budget import (
    MIB,
    accelerator_bytes,
    grammars_bytes,
    min_chunk_tokens,
    trusted_bytes,
    untrusted_bytes,
)
from neuronpipe.plans.plan.offloaded_blocks import Accelerator, offload_reasons, offload_shape
from neuronpipe.plans.plan.runtime_memory import runtime_of
from neuronpipe.plans.plan.segment_sizes import (
    PARTIAL_TOKENS,
    RunShape,
    embedding_flash_bytes,
    kv_type_fault,
    with_drafts,
)
from neuronpipe.plans.planner.assumptions import assumptions
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.offload_split import BestSplit
from neuronpipe.plans.planner.plan_options import LimitTooSmall, MemoryLimit, PlanOptions, size_to_type
from neuronpipe.plans.planner.plan_reasons import embedding_reasons, mode_reasons
from neuronpipe.plans.planner.shared_results import SharedResults
from neuronpipe.plans.planner.slot_regions import NOTHING_PINNED, Regions
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

# Every chunk of a prompt reads all weights once, so a chunk is as large as memory allows.
CHUNK_TOKENS = (512, 256, 128, 64, 32, 16)
LONG_CHUNK_TOKENS = (2048, 1024)  # on request (long_prompts.py)
PREFILL_SHARE = 1 / 8  # maximum of a chunk's buffers, as a share of the memory limit
# Staging beyond the minimum is limited to both of these.
STAGING_SHARE = 1 / 32  # of the memory limit
STAGING_SPARE_SHARE = 1 / 8  # of the memory that remains for neurons
FLASH_EMBEDDING_BYTES = 8 * MIB  # minimum of an embedding that gives its memory to slots
BASELINE_CACHE_TOKENS = 5  # the baseline has slots for what this many tokens use


def make_plan(
    manifest: Manifest,
    device: DeviceFacts,
    options: PlanOptions,
    shared: SharedResults | None = None,
    frequencies: AccessFrequencies | None = None,
) -> Plan:
    """Make one plan for these options by rules, with the fastest split if the device has an accelerator.

    shared: cache of this package's results, shared by several calls (default: a new one)
    frequencies: access frequencies of the clusters, if they were measured

    Raises LimitTooSmall with the smallest limit, and UserError for options that cannot be combined or obeyed.
    """
    options, shared = _as_baseline(options), shared or SharedResults(manifest)

    def make(blocks: tuple[int, ...] | None, matrices: tuple[str, ...] | None) -> Plan:
        tried = dataclasses.replace(options, offloaded_blocks=blocks, offloaded_matrices=matrices)
        return _PlanBuilder(manifest, device, tried, shared, frequencies).plan()

    plan = make(options.offloaded_blocks, options.offloaded_matrices)
    if device.accelerator is None or options.offloaded_blocks is not None:
        return plan
    best = BestSplit(
        manifest, rates(manifest, plan.compute.mode, frequencies), device.accelerator, device.measured, make
    )
    return best.of(plan) if options.offloaded_matrices is None else best.with_best_blocks(plan)


def _as_baseline(options: PlanOptions) -> PlanOptions:
    """Return the options with those of a baseline: predicted mode without bundles, pipeline and prefetch.

    Its cache of recent tokens follows from `options.baseline`. Raises UserError for options that contradict it.
    """
    if options.baseline is None:
        return options
    if options.mode not in (None, "predicted") or options.without:
        raise UserError(f"--baseline {options.baseline}: sets the mode and the techniques itself; leave the others out")
    return dataclasses.replace(options, mode="predicted", without=frozenset({"bundle", "pipeline", "prefetch"}))


@frozen
class _Fitted:
    """The part of a plan that fits a memory limit: prefill chunk, reads, the memory budget with both, slots."""

    chunk_tokens: int
    read_sizes: ReadSizes
    budget: MemoryBudget
    regions: Regions


class _PlanBuilder:
    def __init__(
        self,
        manifest: Manifest,
        device: DeviceFacts,
        options: PlanOptions,
        shared: SharedResults,
        frequencies: AccessFrequencies | None,
    ) -> None:
        self._manifest, self._device, self._options, self._shared = manifest, device, options, shared
        self._budgets = budgets = shared.budgets
        context_tokens = manifest.model.context_tokens if options.context_tokens is None else options.context_tokens
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
            sequences=options.sequences,
            context_tokens=context_tokens,
            logit_rows=max(8, options.sequences),
            gateways=sum(process.role == GATEWAY for process in device.processes),
            hints=self._hints(),
            kv_type=self._kv_type(),
            prefill_backend=backend_of("prefill", device.processes),
            accelerator_backend=backend_of(ACCELERATOR, device.processes),
        )
        self._limit_bytes = int(device.memory_bytes if options.memory_bytes is None else options.memory_bytes)
        draft_tokens = 0 if device.accelerator is not None or "drafts" in options.without else MAX_DRAFT_TOKENS
        self._shape = with_drafts(manifest, self._shape, draft_tokens, self._limit_bytes)
        if device.accelerator is not None:
            self._shape = self._offload_shape(device.accelerator)
        self._rates = rates(manifest, self._shape.mode, frequencies)
        self._usable_bytes = trusted_bytes(manifest, self._shape, self._limit_bytes)
        self._min_slots_bytes = budgets.min_slots_bytes(workers)
        self._ffn_bytes = manifest.clusters * (manifest.trigger_slot_bytes + manifest.value_slot_bytes)

    def _offload_shape(self, accelerator: Accelerator) -> RunShape:
        """Return the shape with the requested offloaded blocks and matrices, or those that the device has room for."""
        if "pipeline" in self._options.without:
            raise UserError("--without pipeline and an accelerator: it is part of the pipeline; leave one of them out")
        room = accelerator, self._device.profile, self._limit_bytes, self._shape
        return offload_shape(self._manifest, *room, self._options.offloaded_blocks, self._options.offloaded_matrices)

    def _mode(self) -> Mode:
        mode: Mode = self._options.mode or "exact"
        if mode == "predicted" and "predictor" in self._options.without:
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
            only = f"{name!r} computes {activation}, and only silu has thresholds"
            return f"--mode thresholded: {only}; take exact or predicted"
        return (
            f"--mode thresholded: the package {name!r} has no thresholds; convert the model with --by-neuron, if its "
            "feed-forwards are stored as wholes, and run `neuronpipe profile PACKAGE --silent 50% --text FILE`"
        )

    def _hints(self) -> bool:
        if self._options.hints and (self._mode() == "predicted" or not has_hints(self._manifest)):
            raise UserError(
                "--hints: those of a package's predictor, or of its routers, in exact mode; in predicted mode the "
                "predictor decides, and a package without one gets it from `neuronpipe profile PACKAGE`"
            )
        return self._options.hints

    def _kv_type(self) -> KvType:
        kv_type = self._options.kv_type
        if (reason := kv_type_fault(self._manifest.model, kv_type)) is not None:
            raise UserError(f"--kv-type {kv_type}: {reason}; take f16")
        return kv_type

    def plan(self) -> Plan:
        fitted = self._fitted_embedding()
        manifest, shape, options = self._manifest, self._shape, self._options
        chunk_tokens, read_sizes, budget, regions = (
            fitted.chunk_tokens,
            fitted.read_sizes,
            fitted.budget,
            fitted.regions,
        )
        memory = self._memory(budget, regions)
        compute = Compute(
            mode=shape.mode,
            processes=self._device.processes,
            sequences=shape.sequences,
            context_tokens=shape.context_tokens,
            prefill_chunk_tokens=chunk_tokens,
            prefill_threads=shape.prefill_threads,
            logit_rows=shape.logit_rows,
            decode_window_blocks=regions.window_blocks,
            prefill_window_blocks=regions.window_blocks,
            spin_us=50,
            pipeline="pipeline" not in options.without,
            prefetch="prefetch" not in options.without,
            hints=shape.hints,
            kv_type=shape.kv_type,
            held_blocks=options.offloaded_blocks
            or ((shape.max_offloaded_blocks,) if shape.max_offloaded_blocks else ()),
            held_matrices=shape.offloaded_matrices,
            state_slots=shape.state_slots,
            draft_tokens=shape.draft_tokens,
            embedding_on_flash=shape.embedding_on_flash,
            device_shares_memory=shape.device_shares_memory,
            device_name="" if self._device.accelerator is None else self._device.accelerator.name,
        )
        flash = Flash(
            engine=self._device.flash_engine,
            depth=read_sizes.depth,
            bundle=read_sizes.bundle,
            merge_gap_bytes=read_sizes.merge_gap_bytes,
            most_read_bytes=read_sizes.most_read_bytes,
            prefetch_depth=read_sizes.prefetch_depth,
            warm_up_reads=read_sizes.warm_up_reads,
            warm_up_read_bytes=read_sizes.warm_up_read_bytes,
            reserved_triggers=regions.reserved_triggers,
            reserved_values=regions.reserved_values,
            prompt_cache_bytes=options.prompt_cache_bytes,
        )
        return Plan(
            version=VERSION,
            package_id=manifest.id,
            device_id=self._device.id,
            compute=compute,
            memory=memory,
            flash=flash,
            expected=self._shared.expected(self._rates, compute, memory, flash, self._device.measured),
            reasons=(
                *mode_reasons(manifest, shape, options, self._rates),
                *offload_reasons(manifest, self._device.accelerator, compute, memory, self._device.profile),
                *embedding_reasons(manifest, shape),
                *regions.reasons,
                *read_sizes.reasons,
                self._chunk_reason(chunk_tokens, budget),
                *self._assumptions(memory),
            ),
        )

    def _fitted_embedding(self) -> _Fitted:
        """Return what fits the limit. The embedding stays on flash if slots lack its memory and it is worth a read for
        each token, if there is no room for it, or if the options say so; `self._shape` says so."""
        in_memory = None if self._options.embedding_on_flash or self._is_short() else self._fitted_chunk()
        flash_bytes = embedding_flash_bytes(self._manifest)
        if in_memory is not None and (flash_bytes < FLASH_EMBEDDING_BYTES or self._has_all_slots(in_memory)):
            return in_memory
        if flash_bytes:
            self._shape = dataclasses.replace(self._shape, embedding_on_flash=True)
        if self._is_short():
            self._refuse_limit()
        return self._fitted_chunk()

    def _is_short(self) -> bool:
        """Return True if the limit is below the smallest budget with the fewest slots."""
        min_bytes = self._budgets.min_budget(self._shape).total_bytes() + self._min_slots_bytes
        return self._usable_bytes < min_bytes

    def _has_all_slots(self, fitted: _Fitted) -> bool:
        """Return True if more memory would give no more slots: every cluster has one, or --ffn-resident is reached."""
        share, regions = self._options.ffn_resident_share, fitted.regions
        if share is None or share >= 1:
            return min(regions.triggers, regions.values) == self._manifest.clusters
        return self._slots_budget(fitted.budget, fitted.read_sizes) >= int(share * self._ffn_bytes)

    def _fitted_chunk(self) -> _Fitted:
        requested = self._options.prefill_chunk_tokens
        fitted = self._fitted(requested)
        sums_by_turns = not runtime_of(self._shape.prefill_backend) and fitted.chunk_tokens > PARTIAL_TOKENS
        if sums_by_turns and fitted.regions.window_blocks < self._manifest.layout.summed_blocks:
            # Block sums of more than PARTIAL_TOKENS tokens are computed in turns, with all these blocks open.
            return self._fitted(requested, PARTIAL_TOKENS)
        return fitted

    def _fitted(self, max_chunk_tokens: int | None, cap: int = LONG_CHUNK_TOKENS[0]) -> _Fitted:
        """Return the chunk, the reads, the memory budget with both, and the slots in the remaining memory.

        max_chunk_tokens: a requested maximum, by default with priority over more staging; None: the rules choose
        cap: maximum of either
        """
        min_budget = self._budgets.min_budget(self._shape)
        if max_chunk_tokens is not None and not self._options.staging_first:
            chunk_tokens = self._chunk(min_budget.staging_bytes, max_chunk_tokens, cap)
            min_budget = self._budgets.of(
                self._shape, prefill_chunk_tokens=chunk_tokens, staging_bytes=min_budget.staging_bytes
            )
        read_sizes = self._read_sizes(min_budget)
        chunk_tokens = self._chunk(read_sizes.set_aside_bytes, max_chunk_tokens, cap)
        budget = self._budgets.of(
            self._shape, prefill_chunk_tokens=chunk_tokens, staging_bytes=read_sizes.staging_bytes
        )
        return _Fitted(chunk_tokens, read_sizes, budget, self._regions(budget, read_sizes))

    def _read_sizes(self, min_budget: MemoryBudget) -> ReadSizes:
        """Return the reads. Their staging is at most that of `min_budget` and a share of the memory that is left."""
        manifest, options = self._manifest, self._options
        spare_bytes = self._usable_bytes - min_budget.total_bytes() - self._min_slots_bytes
        slots_bytes = spare_bytes
        if options.ffn_resident_share is not None:
            slots_bytes = min(slots_bytes, int(options.ffn_resident_share * self._ffn_bytes))
        return choose_read_sizes(
            manifest.layout,
            self._device.flash,
            demands=ClusterDemand.of(manifest, self._rates, slots_bytes, self._shape.mode),
            bundle=False if "bundle" in options.without else options.bundle,
            depth=options.depth,
            prefetch="prefetch" not in options.without,
            max_staging_bytes=min_budget.staging_bytes
            + min(int(STAGING_SPARE_SHARE * spare_bytes), int(STAGING_SHARE * self._usable_bytes)),
        )

    def _chunk(self, staging_bytes: int, max_tokens: int | None, cap: int) -> int:
        """Return the largest chunk that leaves room for staging and for the fewest slots, or the smallest chunk.

        max_tokens: maximum; None: the chunk's buffers take at most PREFILL_SHARE of the limit
        """
        context = self._shape.context_tokens
        min_tokens = min_chunk_tokens(self._shape)
        fixed_runtime_bytes = (
            self._budgets.min_budget(self._shape).private_bytes if runtime_of(self._shape.prefill_backend) else 0
        )
        known = [each for each in (*LONG_CHUNK_TOKENS, *CHUNK_TOKENS) if each <= cap]
        known = known if max_tokens is not None else [each for each in known if each <= CHUNK_TOKENS[0]]
        sizes = (size for size in known if (size > min_tokens if max_tokens is None else size <= max_tokens))
        for tokens in (min(size, context) for size in sizes):
            budget = self._budgets.of(self._shape, prefill_chunk_tokens=tokens, staging_bytes=0)
            fits = budget.total_bytes() + staging_bytes + self._min_slots_bytes <= self._usable_bytes
            # A runtime needs its own memory with any chunk, so this does not count as a buffer.
            buffers_bytes = budget.private_bytes - fixed_runtime_bytes + budget.prefill_stage_bytes
            if fits and (max_tokens is not None or buffers_bytes <= PREFILL_SHARE * self._usable_bytes):
                return tokens
        return min_tokens if max_tokens is None else min(min_tokens, max_tokens)

    def _slots_budget(self, budget: MemoryBudget, read_sizes: ReadSizes) -> int:
        """Return the bytes that remain for slots."""
        usable = self._usable_bytes - budget.total_bytes() - (read_sizes.set_aside_bytes - read_sizes.staging_bytes)
        # The slots' segment has a page before the first slot, and consists of whole pages.
        return usable // PAGE_BYTES * PAGE_BYTES - PAGE_BYTES

    def _regions(self, budget: MemoryBudget, read_sizes: ReadSizes) -> Regions:
        options = self._options
        slots_budget = self._slots_budget(budget, read_sizes)
        if options.ffn_resident_share is not None and options.ffn_resident_share < 1:
            slots_budget = min(slots_budget, int(options.ffn_resident_share * self._ffn_bytes))
        borrowable_bytes = max_borrowed_bytes(budget, grammars_bytes(self._limit_bytes))
        regions = self._shared.regions(
            self._rates,
            mode=self._shape.mode,
            workers=self._shape.workers,
            max_batch=self._shape.sequences,
            budget=slots_budget,
            whole=read_sizes.bundle,
            moved=read_sizes.moved_scales,
            cache="cache" not in options.without,
            cache_tokens=0 if options.baseline is None else BASELINE_CACHE_TOKENS,
            borrowable_bytes=0 if options.ffn_resident_share else borrowable_bytes,
        )
        if regions is not None:
            return self._without_offloaded_pins(regions)
        assert options.ffn_resident_share is not None
        min_bytes, min_share = self._min_slots_bytes, self._min_slots_bytes / self._ffn_bytes
        raise UserError(
            f"--ffn-resident {options.ffn_resident_share:.1%}: the least for this package is {min_share:.1%} "
            f"({min_bytes:,} bytes): one block of neurons per worker must be open, and as much arriving"
        )

    def _without_offloaded_pins(self, regions: Regions) -> Regions:
        """Return the slots without pins if an accelerator computes blocks and not every cluster has a slot.

        The accelerator computes the hottest clusters, and the hottest others stay in the cache by being used.
        """
        if not self._shape.max_offloaded_blocks or min(regions.triggers, regions.values) == self._manifest.clusters:
            return regions
        return dataclasses.replace(regions, pins=(NOTHING_PINNED,))

    def _memory(self, budget: MemoryBudget, regions: Regions) -> Memory:
        return Memory(
            **{field.name: getattr(budget, field.name) for field in dataclasses.fields(MemoryBudget)},
            limit_bytes=self._limit_bytes,
            least_bytes=self._budgets.min_limit_bytes(self._shape),
            **untrusted_bytes(self._manifest, self._shape, self._limit_bytes),
            **regions.memory(self._manifest),
            follows=self._options.follows,
            ffn_bytes=self._budgets.ffn_bytes,
            accelerator_bytes=accelerator_bytes(self._manifest, self._shape),
        )

    def _refuse_limit(self) -> NoReturn:
        min_bytes = self._budgets.min_budget(self._shape).total_bytes()
        limit = self._budgets.min_limit_bytes(self._shape)
        chosen = ", a share of what is available now" if self._options.memory_bytes is None else ""
        reserved_bytes = sum(untrusted_bytes(self._manifest, self._shape, limit).values())
        typed = MemoryLimit.of(self._limit_bytes if self._options.memory_bytes is None else self._options.memory_bytes)
        sizes = (limit, min_bytes, reserved_bytes, self._min_slots_bytes)
        least, trusted, reserved, slots = (size_to_type(size, typed.unit) for size in sizes)
        raise LimitTooSmall(
            f"--memory {typed.as_typed}{chosen}: the least for this package is {least}: "
            f"{trusted} for interpreters, fixed tensors, KV cache and exchange, {reserved} for grammars and templates, "
            f"{slots} for the neurons being computed; a smaller --context needs less",
            limit,
        )

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

    def _chunk_reason(self, chunk_tokens: int, budget: MemoryBudget) -> str:
        buffers = f"{(budget.private_bytes + budget.prefill_stage_bytes) / MIB:.0f} MiB"
        beginning = (
            f"prefill takes {chunk_tokens} tokens at a time with {self._shape.prefill_threads} thread(s): its buffers "
        )
        if self._options.prefill_chunk_tokens is not None:
            return f"{beginning}take {buffers}"
        return f"{beginning}are within {PREFILL_SHARE:.1%} of the limit ({buffers})"

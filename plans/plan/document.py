"""The plan: the planner's output, which the services follow. JSON with a version; refused for another package or
device."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
import shlex
from pathlib import Path
from typing import Literal

from neuronpipe.plans.plan.pinned_clusters import Pins
from neuronpipe.plans.strict_json import read_file
from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.schema import from_json, json_object

VERSION = 12
MAX_PLAN_BYTES = 16 << 20


Mode = Literal["exact", "predicted", "thresholded"]
MODES: tuple[Mode, ...] = ("exact", "predicted", "thresholded")

ACCELERATOR = "accelerator"
"""The role that computes the first blocks of decode steps on a device with memory of its own; few runs have one."""

BACKEND_ROLES = ("decode", "prefill", ACCELERATOR)
"""The roles that compute steps, by a backend."""

DEFAULT_BACKEND = "cpu"

GATEWAY = "gateway"
"""The one role that a run does not need: towards the coordinator it is a client."""


@frozen(kw_only=True)
class ProcessSpec:
    """One process of the run: its role and its core (None: not pinned). backend: who computes in a decode or prefill
    worker, as NAME or NAME:OPTIONS (services/steps/backend.py)."""

    role: str
    index: int
    core: int | None
    backend: str = DEFAULT_BACKEND


def reads_whole(compute: Compute, flash: Flash) -> bool:
    """Whether a value part comes with its trigger part, so that only triggers are looked up ahead of computing."""
    return compute.mode == "predicted" or flash.bundle


def backend_of(role: str, processes: tuple[ProcessSpec, ...]) -> str:
    """Who computes in a role of which there is one process; "" where there is none."""
    return next((process.backend for process in processes if process.role == role), "")


@frozen(kw_only=True)
class Compute:
    """Who computes what, where."""

    mode: Mode
    processes: tuple[ProcessSpec, ...]
    sequences: int  # KV slots: most sequences of one step
    context_tokens: int
    prefill_chunk_tokens: int
    prefill_threads: int  # participants of the prefill process
    logit_rows: int
    decode_window_blocks: int  # blocks of a feed-forward that a decode worker has open at once; or all of a layer's
    prefill_window_blocks: int
    spin_us: int
    pipeline: bool  # False: one matrix after the other, each when all it needs is there
    prefetch: bool  # False: nothing is asked for before its layer needs it
    hints: bool = False  # in exact mode, what the predictor names, and experts, are asked for before it is certain
    held_blocks: tuple[int, ...] = ()  # of every feed-forward the first ones, that the accelerator holds and computes:
    # by how many texts a step has, from one on; with more texts the last. Empty: there is no accelerator
    held_matrices: tuple[
        str, ...
    ] = ()  # whole matrices that it holds and computes besides: MATRICES of offloaded_blocks.py
    device_shares_memory: bool = False  # what it holds lies in this machine's memory
    device_name: str = ""  # of the accelerator's, as its driver says it

    def decode_workers(self) -> tuple[ProcessSpec, ...]:
        """The decode processes in index order."""
        return tuple(process for process in self.processes if process.role == "decode")

    def accelerator_backend(self) -> str:
        """Who computes the accelerator's blocks; "" where there is none."""
        return backend_of(ACCELERATOR, self.processes)

    def most_held_blocks(self) -> int:
        """What the accelerator has room for; 0 where there is none."""
        return max(self.held_blocks, default=0)

    def held_blocks_of(self, texts: int) -> int:
        """What it computes in a step of so many texts."""
        return self.held_blocks[min(max(1, texts), len(self.held_blocks)) - 1] if self.held_blocks else 0


@frozen(kw_only=True)
class MemoryBudget:
    """What a run takes besides neurons, in bytes; memory_budget.py computes it. Each layout has a field named after
    it."""

    # segments
    fixed_bytes: int  # with the predictor
    residency_bytes: int
    kv_bytes: int
    exchange_bytes: int
    board_bytes: int
    trace_bytes: int
    # what a process maps for itself
    prefill_stage_bytes: int
    # what has no layout
    interpreters_bytes: int
    private_bytes: int  # engines, sampling
    bookkeeping_bytes: int  # the loader's and the cache's of clusters
    staging_bytes: int  # where the loader's reads land
    device_bytes: int  # the accelerator's, where its device shares this machine's memory

    def total_bytes(self) -> int:
        """All of it."""
        return sum(_budgeted(self))


_budgeted = operator.attrgetter(*(field.name for field in dataclasses.fields(MemoryBudget)))


@frozen(kw_only=True)
class Memory(MemoryBudget):
    """All that a run takes, and its limits. Slots hold one cluster part each; slots_bytes is of their segment."""

    limit_bytes: int
    least_bytes: int  # the smallest limit this package accepts with these processes
    grammars_bytes: int  # by which grammars may make their helper process grow
    templates_bytes: int  # the same of chat templates; 0 where the run has no gateway, or the package no template
    trigger_slots: int
    value_slots: int
    slots_bytes: int
    lent_trigger_slots: (
        int  # more of them, in what KV cache and prompts do not need yet (borrowed_memory.py); their bytes are
    )
    lent_value_slots: int  # counted as kv_bytes and prefill_stage_bytes
    follows: bool  # the run takes what is available, up to its limit
    moving_slots: int  # of either part, those in which nothing is pinned: for clusters that are open or on their way
    ffn_bytes: int  # of slots, were everything resident
    accelerator_bytes: int  # what the accelerator holds in its device, whosever memory that is
    pins: tuple[Pins, ...]  # which clusters stay, by how many texts a step computes, with all lent slots; the first
    # entry is for one; see pins_within for fewer slots
    moved_scales_from: int = 0  # of a trigger part in bundles.bin: from here on,
    moved_scales_bytes: int = 0  # so many bytes lie at the end of a value slot; 0: all that is used is in trigger slots

    @property
    def lends(self) -> bool:
        """Whether there are lent slots."""
        return bool(self.lent_trigger_slots or self.lent_value_slots)

    @property
    def lent_bytes(self) -> int:
        """What the lent slots take at most."""
        return self.kv_bytes + self.prefill_stage_bytes if self.lends else 0

    @property
    def are_scales_moved(self) -> bool:
        """Whether value slots hold the scales of their rows, which the trigger part has in bundles.bin."""
        return self.moved_scales_bytes > 0

    def pins_for(self, texts: int) -> Pins:
        """What stays while steps compute so many texts."""
        return next(entry for entry in reversed(self.pins) if entry.texts <= max(1, texts))

    def total_bytes(self) -> int:
        """What the run takes at most, by the planner's budget."""
        return super().total_bytes() + self.grammars_bytes + self.templates_bytes + self.slots_bytes


@frozen(kw_only=True)
class Flash:
    """How flash is read."""

    engine: str  # "io_uring" or "threads"
    depth: int  # most reads in flight
    bundle: bool  # both parts of a cluster in one read; False: the gate first, the rest when the gate fired
    merge_gap_bytes: int  # neighbours no further apart than this are read together: the gap costs less than a read
    most_read_bytes: int  # of one read; also the size of a staging buffer
    prefetch_depth: int  # what nobody waits for yet is read while fewer reads than this are in flight
    warm_up_reads: int  # long reads in flight while memory warms up; 0: it is read as everything else
    warm_up_read_bytes: int  # of one of them; also the size of each of their staging buffers
    reserved_triggers: int  # free slots that the cache keeps ready in the loader
    reserved_values: int

    @property
    def staging_bytes(self) -> int:
        """Where reads land before their bytes are checked and copied."""
        return self.depth * self.most_read_bytes + self.warm_up_reads * self.warm_up_read_bytes


@frozen(kw_only=True)
class Expected:
    """What the planner expects of one token, from the package's activity and the device's measurements.

    A time is None where the device was not measured. miss_rate: of the cluster parts that a token wants, those not in
    memory when they are first looked for; where a value part comes with its trigger part, of the trigger parts.
    """

    sequential_bytes_per_token: int  # of memory, read from end to end
    neuron_bytes_per_token: int  # of memory, read in pieces of `piece_bytes`
    piece_bytes: int
    dram_bytes_per_token: int  # both
    flash_reads_per_token: int
    flash_bytes_per_token: int
    sequential_ms_per_token: float | None
    neuron_ms_per_token: float | None
    overhead_ms_per_token: float  # processor time of reads, barriers, messages
    flash_ms_per_token: float | None
    exposed_flash_ms_per_token: float | None  # what computing does not hide
    accelerator_ms_per_token: float | None  # of an accelerator that was measured, beside the workers
    accelerator_wait_ms_per_token: float | None  # of it, what the workers wait for, or lose to it
    tokens_per_s: float | None
    miss_rate: float
    first_token_ms: float | None  # of a prompt of one prefill chunk
    prefill_tokens_per_s: float | None  # of the same prompt


@frozen(kw_only=True)
class Plan:
    """One plan. `id` is a hash of everything else."""

    version: int
    package_id: str
    device_id: str
    compute: Compute
    memory: Memory
    flash: Flash
    expected: Expected
    reasons: tuple[str, ...]

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits that name this plan."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as a person may read and keep it."""
        return json.dumps({"id": self.id, **dataclasses.asdict(self)}, indent=2) + "\n"

    def check(self, *, package_id: str, device_id: str, where: str) -> None:
        """Refuse a plan made for something else (UserError, with the command that makes the right one)."""
        for name, mine, theirs in (("package", self.package_id, package_id), ("device", self.device_id, device_id)):
            if mine != theirs:
                raise UserError(
                    f"{where}: field '{name}_id': the plan was made for another {name}; "
                    f"make a new one with `neuronpipe plan PACKAGE -o {shlex.quote(where)}`"
                )


def parse_plan(data: bytes, where: str) -> Plan:
    """Read a plan; `where` names its file in errors. Raises UserError naming the field."""
    try:
        values = json_object(data, where)
        if values.get("version") != VERSION:
            found = quoted(values.get("version"))
            raise UserError(f"{where}: field 'version': {found}, this program reads {VERSION}")
        plan_id = values.pop("id", None)
        values.pop("search", None)  # what `plan --json` prints beside the plan
        plan = from_json(Plan, values, where)
        if plan_id != plan.id:
            raise UserError(f"{where}: field 'id' does not match the content")
    except UserError as error:
        raise UserError(f"{error}; make a new plan with `neuronpipe plan`") from None
    return plan


def read_plan(path: Path) -> Plan:
    """Read a plan file."""
    return parse_plan(read_file(path, MAX_PLAN_BYTES), str(path))

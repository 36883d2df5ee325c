"""The plan document: the planner's output, which the services follow.

A plan is JSON with a version, for one package and one device. Ranges that hold for every package are beside the fields,
and the reader checks them; what depends on the package or on other fields is for `validate` (planner/validation.py).
Names are those of the file format, and some are older than the glossary: `held_*` are offloaded blocks and matrices,
`lent_*` borrowed slots, `moved_scales_*` co-located scales, `least_bytes` and `most_read_bytes` a minimum and a
maximum; `texts` counts sequences.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
import shlex
from pathlib import Path
from typing import Annotated, Literal

from neuronpipe.plans.device.device import FlashEngine
from neuronpipe.plans.models.spec import MAX
from neuronpipe.plans.plan.pinned_clusters import Pins
from neuronpipe.plans.strict_json import read_file
from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.marks import Range
from neuronpipe.protocol.schema import from_json, json_object

VERSION = 16
MAX_PLAN_BYTES = 16 << 20
MAX_CORRECTION = 8.0


Mode = Literal["exact", "predicted", "thresholded"]
MODES: tuple[Mode, ...] = ("exact", "predicted", "thresholded")

KvType = Literal["f16", "q8"]
KV_TYPES: tuple[KvType, ...] = ("f16", "q8")
"""The types of the elements of the KV cache."""

ACCELERATOR = "accelerator"
"""The optional role that computes the first blocks of every feed-forward in decode steps, on a device such as a GPU."""

BACKEND_ROLES = ("decode", "prefill", ACCELERATOR)
"""The roles that compute steps, each with a backend."""

DEFAULT_BACKEND = "cpu"

MAX_DRAFT_TOKENS = 3
"""The maximum of drafted tokens in a decode step: with the newest token they are as many as kernels compute at once."""

MAX_SEQUENCES = MAX_WORKERS = 64
MAX_TOKENS_AT_ONCE = 4096
MAX_SPIN_US = 1_000_000
MAX_READS = 4096
MAX_READ_BYTES = 1 << 26
MAX_BLOCKS = MAX_SLOTS = 1 << 32  # a residency entry has 32 bits

Tokens = Annotated[int, Range(1, MAX_TOKENS_AT_ONCE)]
Blocks = Annotated[int, Range(1, MAX_BLOCKS)]
Slots = Annotated[int, Range(1, MAX_SLOTS)]
OptionalSlots = Annotated[int, Range(0, MAX_SLOTS)]
OptionalReads = Annotated[int, Range(0, MAX_READS)]
OptionalReadBytes = Annotated[int, Range(0, MAX_READ_BYTES)]

GATEWAY = "gateway"
"""The optional role that serves HTTP. It is a client of the coordinator."""


@frozen(kw_only=True)
class ProcessSpec:
    """One process of a run: its role, its core (None: not pinned) and, for a role that computes, its backend.

    A backend is NAME or NAME:OPTIONS (services/steps/backend.py).
    """

    role: str
    index: int
    core: int | None
    backend: str = DEFAULT_BACKEND


def reads_whole(compute: Compute, flash: Flash) -> bool:
    """Return True if a value part is read together with its trigger part, so that lookups of triggers suffice."""
    return compute.mode == "predicted" or flash.bundle


def backend_of(role: str, processes: tuple[ProcessSpec, ...]) -> str:
    """Return the backend of a role's first process; "" if the run has no process of this role."""
    return next((process.backend for process in processes if process.role == role), "")


@frozen(kw_only=True)
class Compute:
    """The processes of a run, and the steps that they compute."""

    mode: Mode
    processes: tuple[ProcessSpec, ...]
    sequences: Annotated[int, Range(1, MAX_SEQUENCES)]  # number of KV slots, and maximum of sequences in a step
    context_tokens: Annotated[int, Range(1, MAX.context_tokens)]  # maximum of tokens in a sequence
    prefill_chunk_tokens: Tokens  # maximum of a prompt's tokens in a step
    prefill_threads: Annotated[int, Range(1, MAX_WORKERS)]  # participants of the prefill process
    logit_rows: Tokens  # maximum of tokens in a step whose logits are returned
    decode_window_blocks: Blocks  # blocks of a feed-forward that a decode worker has open at once; or all of a layer's
    prefill_window_blocks: Blocks  # the same for a prefill thread
    spin_us: Annotated[int, Range(0, MAX_SPIN_US)]  # how long a participant spins at a barrier before it sleeps
    pipeline: bool  # False: matrices are computed one after the other, each when all its inputs are complete
    prefetch: bool  # False: nothing is read before its layer needs it
    hints: bool = False  # exact mode reads early what the predictor or the routers will probably choose
    # Numbers of offloaded blocks, which are the first of every feed-forward: entry n is for steps of n + 1 sequences,
    # the last one also for steps of more. Empty: there is no accelerator.
    held_blocks: tuple[int, ...] = ()
    held_matrices: tuple[str, ...] = ()  # whole offloaded matrices, some of MATRICES (offloaded_blocks.py)
    device_shares_memory: bool = False  # offloaded weights lie in this machine's memory
    state_slots: int = 0  # recurrent states: two of each sequence, one of each drafted token, snapshots
    device_name: str = ""  # the accelerator's device, as its driver names it; empty without one
    draft_tokens: Annotated[int, Range(0, MAX_DRAFT_TOKENS)] = 0  # maximum of drafted tokens in a decode step
    kv_type: KvType = "f16"  # of keys, values and latents; with q8 they take 17 bytes instead of 32, and are rounded
    embedding_on_flash: bool = False  # True: a token's row of the embedding is read when a step needs it

    def decode_workers(self) -> tuple[ProcessSpec, ...]:
        """Return the decode processes in index order."""
        return tuple(process for process in self.processes if process.role == "decode")

    def accelerator_backend(self) -> str:
        """Return the backend of the accelerator, or "" if the run has none."""
        return backend_of(ACCELERATOR, self.processes)

    def max_offloaded_blocks(self) -> int:
        """Return the number of blocks of each feed-forward that the accelerator stores; 0 without one."""
        return max(self.held_blocks, default=0)

    def offloaded_blocks(self, batch: int) -> int:
        """Return the number of blocks of each feed-forward that the accelerator computes in a step of `batch`
        sequences; 0 without one."""
        return self.held_blocks[min(max(1, batch), len(self.held_blocks)) - 1] if self.held_blocks else 0


@frozen(kw_only=True)
class MemoryBudget:
    """Bytes that a run takes besides neurons, as memory_budget.py computes them.

    The size of each layout of segment_sizes.py except slots is in the field of the same name.
    """

    # segments
    fixed_bytes: int  # with the predictor, without an embedding that stays on flash
    residency_bytes: int
    kv_bytes: int
    exchange_bytes: int
    board_bytes: int
    trace_bytes: int
    # private to one process
    prefill_stage_bytes: int
    # without a layout
    interpreters_bytes: int
    vocabulary_bytes: int  # growth of the helper process for grammars while it reads the vocabulary
    private_bytes: int  # engines, sampling
    bookkeeping_bytes: int  # state of each cluster in the loader and in the cache
    staging_bytes: int  # buffers of the loader's reads
    device_bytes: int  # offloaded weights and their scratch, if the device shares this machine's memory; else 0

    def total_bytes(self) -> int:
        return sum(_budgeted(self))


_budgeted = operator.attrgetter(*(field.name for field in dataclasses.fields(MemoryBudget)))


@frozen(kw_only=True)
class Memory(MemoryBudget):
    """All memory of a run, and its limits. A slot stores one part of a cluster."""

    limit_bytes: int
    least_bytes: int  # the smallest limit for this package with these processes
    grammars_bytes: int  # by how much grammars may make their helper process grow
    templates_bytes: int  # the same for chat templates; 0 without a gateway or without a template
    trigger_slots: Slots  # without borrowed ones
    value_slots: Slots
    slots_bytes: int  # size of the segment of all slots, without borrowed ones
    # Borrowed slots: additional slots in memory that sequences, prompts and grammars do not need yet
    # (borrowed_memory.py). Their bytes are counted in kv_bytes, prefill_stage_bytes, vocabulary_bytes and
    # grammars_bytes.
    lent_trigger_slots: OptionalSlots
    lent_value_slots: OptionalSlots
    follows: bool  # the run adapts its slots to the available memory, up to the limit
    moving_slots: int  # minimum of unpinned slots of either part, for clusters that are open or being read
    ffn_bytes: int  # size of the segment with slots for all clusters
    accelerator_bytes: int  # offloaded weights and their scratch, in the device's or in this machine's memory
    # Pinned clusters by the number of sequences in a step, if all borrowed slots are usable; the first entry is for one
    # sequence. With fewer slots, `pins_within` reduces them.
    pins: tuple[Pins, ...]
    # Co-located scales: these bytes of the trigger part, from this offset on, are stored at the end of the value slot.
    moved_scales_from: int = 0
    moved_scales_bytes: int = 0  # 0: trigger slots store the whole trigger part

    @property
    def has_borrowed_slots(self) -> bool:
        return bool(self.lent_trigger_slots or self.lent_value_slots)

    @property
    def max_borrowed_bytes(self) -> int:
        """Maximum of the bytes that borrowed slots take; 0 without borrowed slots."""
        if not self.has_borrowed_slots:
            return 0
        return self.kv_bytes + self.prefill_stage_bytes + self.vocabulary_bytes + self.grammars_bytes

    @property
    def are_scales_moved(self) -> bool:
        """True if scales are co-located: value slots store scales that bundles.bin has in the trigger part."""
        return self.moved_scales_bytes > 0

    def pins_for(self, batch: int) -> Pins:
        """Return the entry of `pins` that applies while steps compute `batch` sequences."""
        return next(entry for entry in reversed(self.pins) if entry.texts <= max(1, batch))

    def total_bytes(self) -> int:
        """Return the bytes of the whole run without headroom. They include all memory that slots may borrow."""
        return super().total_bytes() + self.grammars_bytes + self.templates_bytes + self.slots_bytes


@frozen(kw_only=True)
class Flash:
    """The reads from flash: how many, how large, and which bytes are read together."""

    engine: FlashEngine
    depth: Annotated[int, Range(1, MAX_READS)]  # maximum of reads in flight
    bundle: bool  # both parts of a cluster in one read; False: the trigger part, then the value part if it fires
    merge_gap_bytes: (
        OptionalReadBytes  # clusters no further apart than this are read together: the gap costs less than a read
    )
    most_read_bytes: OptionalReadBytes  # maximum of a read, and size of its staging buffer
    prefetch_depth: OptionalReads  # prefetches are issued while fewer reads than this are in flight; 0: none
    warm_up_reads: OptionalReads  # additional long reads in flight during warm-up; 0: warm-up uses the other reads
    warm_up_read_bytes: OptionalReadBytes  # maximum of a long read, and size of its staging buffer
    reserved_triggers: OptionalSlots  # free slots that the cache provides to the loader in advance
    reserved_values: OptionalSlots
    prompt_cache_bytes: int = 0  # maximum of all files of the prompt cache on disk; 0: there is none

    @property
    def staging_bytes(self) -> int:
        """Size of all staging buffers, where bytes that were read are checked before they are copied to slots."""
        return self.depth * self.most_read_bytes + self.warm_up_reads * self.warm_up_read_bytes


@frozen(kw_only=True)
class SpeedRange:
    """The range of an expected speed, which four of five runs should reach (plans/cost/speed_range.py)."""

    low: float
    high: float


@frozen(kw_only=True)
class Expected:
    """The planner's expectation for one decoded token, at half of the context, and for a prompt of one prefill chunk.

    A time is None if something that it needs was not measured. miss_rate is the share of the cluster parts looked up
    for a token that are not in memory; if value parts are read with trigger parts, only trigger parts count.
    """

    sequential_bytes_per_token: int  # from memory, sequentially
    neuron_bytes_per_token: int  # from memory, in pieces of `piece_bytes`
    piece_bytes: int
    dram_bytes_per_token: int  # sum of both
    flash_reads_per_token: int
    flash_bytes_per_token: int
    sequential_ms_per_token: float | None
    neuron_ms_per_token: float | None
    overhead_ms_per_token: float  # processor time of reads, barriers, messages
    flash_ms_per_token: float | None
    exposed_flash_ms_per_token: float | None  # the part of it that no computing overlaps
    accelerator_ms_per_token: float | None  # time of a measured accelerator, in parallel with the workers
    accelerator_wait_ms_per_token: float | None  # the part of it that workers wait for, or lose on shared cores
    tokens_per_s: float | None
    miss_rate: float
    first_token_ms: float | None  # time of the prompt
    prefill_tokens_per_s: float | None
    # None if the speed is None, or if the plan was made by rules alone, without a search.
    tokens_per_s_range: SpeedRange | None = None
    prefill_tokens_per_s_range: SpeedRange | None = None


@frozen(kw_only=True)
class Corrections:
    """Factors by which earlier runs have corrected the measured facts of a device, for times of decode steps.

    kernels: time of kernels and of reading memory
    reads: time that workers wait for flash
    """

    kernels: Annotated[float, Range(1 / MAX_CORRECTION, MAX_CORRECTION)] = 1.0
    reads: Annotated[float, Range(1 / MAX_CORRECTION, MAX_CORRECTION)] = 1.0


@frozen(kw_only=True)
class Plan:
    """One plan.

    reasons: sentences on why it is as it is, and on what was assumed
    corrections: those that are part of `expected`
    """

    version: int
    package_id: str
    device_id: str
    compute: Compute
    memory: Memory
    flash: Flash
    expected: Expected
    reasons: tuple[str, ...]
    corrections: Corrections = Corrections()

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits of a hash of all fields."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the plan as indented JSON with its id."""
        return json.dumps({"id": self.id, **dataclasses.asdict(self)}, indent=2) + "\n"

    def check(self, *, package_id: str, device_id: str, where: str) -> None:
        """Raise UserError, with the command that makes a new plan, if this one is for another package or device.

        where: name of the plan's file
        """
        for name, plan_id, run_id in (("package", self.package_id, package_id), ("device", self.device_id, device_id)):
            if plan_id != run_id:
                raise UserError(
                    f"{where}: field '{name}_id': the plan was made for another {name}; "
                    f"make a new one with `neuronpipe plan PACKAGE -o {shlex.quote(where)}`"
                )


def parse_plan(data: bytes, where: str) -> Plan:
    """Return the plan in the content of a file. `validate` checks it against its package.

    Raises UserError, naming `where` and the field, if it is malformed or has another version, or if its id is wrong.
    """
    try:
        values = json_object(data, where)
        if values.get("version") != VERSION:
            version = quoted(values.get("version"))
            raise UserError(f"{where}: field 'version': {version}, this program reads {VERSION}")
        plan_id = values.pop("id", None)
        values.pop("search", None)  # `plan --json` adds it
        plan = from_json(Plan, values, where)
        if plan_id != plan.id:
            raise UserError(f"{where}: field 'id' does not match the content")
    except UserError as error:
        raise UserError(f"{error}; make a new plan with `neuronpipe plan`") from None
    return plan


def read_plan(path: Path) -> Plan:
    return parse_plan(read_file(path, MAX_PLAN_BYTES), str(path))

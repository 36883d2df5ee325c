"""What watchers of a run receive: snapshots, which a monitor on the same machine makes of what any client can read."""

from __future__ import annotations

from neuronpipe.protocol.codec import Message, message
from neuronpipe.protocol.messages.client import WarmUp
from neuronpipe.protocol.messages.lifecycle import State


@message
class ProcessView(Message):
    """One process, in `Snapshot`.

    role: as in `Hello`
    index: as in `Hello`
    pid: process id; 0 when there is none at the moment
    state: as the coordinator sees it
    core: the processor it is pinned to
    step: as in `Beat`
    restarts: how often it was lost and restarted; replacing it by `swap` does not count
    cpu: processor time it used lately, over the time that passed; 1 is one core
    memory_bytes: its own, without shared memory; of pages that several processes share, its share
    numerics: as in `Hello`
    backend: as in `ProcessStatus`
    work: as in `ProcessStatus`
    doing: shares of the recent time by activity, named by the labels of groups of spans
    """

    role: str
    index: int
    pid: int
    state: State
    core: int | None = None
    step: int = 0
    restarts: int = 0
    cpu: float | None = None
    memory_bytes: int | None = None
    numerics: str = ""
    backend: str = ""
    work: str = ""
    doing: dict[str, float]


@message
class Region(Message):
    """A part of the run's shared memory, in `Snapshot`.

    name: "fixed" tensors, keys and values ("kv"), "hot" neurons that stay, "cold" ones that are replaced
    total_bytes: what is reserved for it
    used_bytes: how much of that is in memory: pages of keys and values, and of fixed tensors, are taken when they are
        first written
    """

    name: str
    total_bytes: int
    used_bytes: int


@message
class StripRow(Message):
    """A process on the time line of the last steps, in `Snapshot`.

    name: "role.index"
    cells: a letter for each of equal periods: what the process did for most of it, by the letters of groups of spans;
        "." is nothing
    """

    name: str
    cells: str


@message
class Snapshot(Message):
    """A run at one moment. Figures "of late" are over the last seconds of work.

    run: id of the run
    model: name of the package
    mode: "exact", "predicted" or "thresholded"
    quantization: of the neurons
    plan: id of the plan
    at_s: when, in seconds since 1970
    ready: whether requests are served
    silent_s: for how long the coordinator has not answered
    uptime_s: since the coordinator started
    steps: steps done
    tokens: tokens generated
    sequences_active: sequences that hold a KV slot
    max_sequences: KV slots there are
    sequences_waiting: requests that wait for one
    tokens_per_s: generated, over the time between tokens of late; 0 when nothing is
    prompt_tokens_per_s: computed by prefill, over the time of its steps, likewise
    tbt_ms: time between tokens of late: p50, p90, p99; empty when there were none
    memory_bytes: processes and segments together
    memory_peak_bytes: the most it was
    memory_limit_bytes: what the plan allows
    regions: of shared memory
    slots: for cluster parts, of the hot and cold regions together
    slots_free: how many of them are free
    withheld_bytes: of their memory, what they give back because the system is short of it
    warm_up: as in `Status`
    hit_rate: share of the needed cluster parts that were resident, of late
    flash_bytes_per_s: read of late
    flash_reads_per_s: likewise
    flash_bytes_per_token: of late
    flash_waiting: cluster parts that were requested and are not being read yet
    flash_in_flight: reads under way
    dram_bytes_per_s: what computing had to read from memory of late, by its counters
    dram_bytes_per_token: likewise
    flash_wait: share of step time that workers waited for flash, of late
    participant_wait: share of step time that workers waited for each other, of late
    fired: of each layer, the share of its neurons that fired, of late
    resident: of each layer, the share of its cluster parts that are in memory
    strip_ms: time that the time line shows
    strip_steps: numbers of the steps in it
    strip: the time line: what the processes did in the last steps
    processes: one for each process of the plan
    """

    run: str
    model: str
    mode: str
    quantization: str
    plan: str
    at_s: float
    ready: bool = False
    silent_s: float = 0.0
    uptime_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    sequences_active: int = 0
    max_sequences: int = 0
    sequences_waiting: int = 0
    tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    tbt_ms: dict[str, float]
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_limit_bytes: int = 0
    regions: tuple[Region, ...] = ()
    slots: int = 0
    slots_free: int = 0
    withheld_bytes: int = 0
    warm_up: WarmUp | None = None
    hit_rate: float | None = None
    flash_bytes_per_s: float = 0.0
    flash_reads_per_s: float = 0.0
    flash_bytes_per_token: float | None = None
    flash_waiting: int = 0
    flash_in_flight: int = 0
    dram_bytes_per_s: float = 0.0
    dram_bytes_per_token: float | None = None
    flash_wait: float | None = None
    participant_wait: float | None = None
    fired: tuple[float, ...] = ()
    resident: tuple[float, ...] = ()
    strip_ms: float = 0.0
    strip_steps: tuple[int, ...] = ()
    strip: tuple[StripRow, ...] = ()
    processes: tuple[ProcessView, ...] = ()

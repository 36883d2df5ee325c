"""Messages that watchers of a run receive: snapshots, which a monitor on the same machine computes from what any client
can read."""

from __future__ import annotations

from neuronpipe.protocol.codec import Message, message
from neuronpipe.protocol.messages.client import WarmUp
from neuronpipe.protocol.messages.lifecycle import State


@message
class ProcessView(Message):
    """One process, in `Snapshot`.

    role: as in `Hello`
    index: as in `Hello`
    pid: process id; 0 while there is none
    state: the state in the coordinator's view
    core: the processor to which it is pinned
    step: as in `Beat`
    restarts: how often it was lost and restarted; a replacement by `swap` does not count
    cpu: processor time that it used recently, over the time that passed; 1 is one core
    memory_bytes: its own memory without shared segments; for pages that several processes share, its share of them
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
    """A region of the run's shared memory, in `Snapshot`.

    name: "fixed": the fixed tensors; "kv": keys and values; "hot": neurons that stay; "cold": neurons that are replaced
    total_bytes: reserved size
    used_bytes: how much of that is in memory: pages of keys and values, and of fixed tensors, are allocated when they
        are first written
    """

    name: str
    total_bytes: int
    used_bytes: int


@message
class StripRow(Message):
    """A process on the time line of the last steps, in `Snapshot`.

    name: "role.index"
    cells: one letter for each of a number of equal periods: what the process did for the largest part of it, by the
        letters of groups of spans; "." is nothing
    """

    name: str
    cells: str


@message
class Snapshot(Message):
    """A run at one moment. Recent figures are over the last seconds of work.

    run: id of the run
    model: name of the package
    mode: "exact", "predicted" or "thresholded"
    quantization: quantization of the neurons
    plan: id of the plan
    at_s: time of the snapshot, in seconds since 1970
    ready: true if requests are served
    silent_s: for how long the coordinator has not answered
    uptime_s: time since the coordinator started
    steps: number of steps done
    tokens: number of tokens generated
    sequences_active: sequences that have a KV slot
    max_sequences: number of KV slots
    sequences_waiting: requests that wait for a KV slot
    tokens_per_s: tokens generated per second of recent time between tokens; 0 if none were
    prompt_tokens_per_s: prompt tokens computed per second of recent prefill steps; 0 if none were
    tbt_ms: recent time between tokens, as "p50", "p90" and "p99"; empty if there was none
    deviations: as in `Status`
    memory_bytes: memory of processes and segments together
    memory_peak_bytes: maximum of `memory_bytes` so far
    memory_limit_bytes: the plan's limit
    regions: regions of shared memory
    slots: number of slots for cluster parts, in the hot and cold regions together
    slots_free: number of free slots
    withheld_bytes: memory of slots that is returned to the system because the system is short of it
    warm_up: as in `Status`
    hit_rate: share of the needed cluster parts that were resident recently
    flash_bytes_per_s: recent reads from flash
    flash_reads_per_s: recent number of reads per second
    flash_bytes_per_token: recent reads from flash per token
    flash_waiting: cluster parts that were requested and are not being read yet
    flash_in_flight: reads under way
    dram_bytes_per_s: recent reads from memory by computing, estimated from its counters
    dram_bytes_per_token: recent reads from memory per token, estimated likewise
    flash_wait: share of recent step time that workers waited for flash
    participant_wait: share of recent step time that workers waited for each other
    fired: for each layer, the share of its neurons that fired recently
    resident: for each layer, the share of its cluster parts that are in memory
    strip_ms: time that the time line shows
    strip_steps: numbers of the steps in it
    strip: the time line: what the processes did in the last steps
    processes: one item for each process of the plan
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
    deviations: str = ""
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

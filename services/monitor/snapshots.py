"""The bookkeeping of a monitor, without sockets or clock: events, status and counts in, snapshots out.

Rates of reading cover the last TIME_WINDOW_S seconds. Figures of steps cover TIME_WINDOW_S seconds before the last
step, so that an idle run still shows its last request; tokens and DRAM bytes per second become 0. Times are seconds of
the monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from neuronpipe.protocol.messages.client import ProcessStatus, Status, WarmUp
from neuronpipe.protocol.messages.event import StepEvent
from neuronpipe.protocol.messages.lifecycle import Beat
from neuronpipe.protocol.messages.snapshot import ProcessView, Region, Snapshot, StripRow
from neuronpipe.protocol.run_directory import RunSummary
from neuronpipe.services.monitor.resident_regions import Residency

TIME_WINDOW_S = 3.0
MAX_EVENTS = 512  # at most two kinds, forty times a second
MEMORY_WORDS = {
    "memory_bytes": "current_bytes",
    "memory_peak_bytes": "peak_bytes",
    "memory_limit_bytes": "limit_bytes",
}
FlashCount = tuple[float, int, int]  # time, bytes, reads


class Monitor:
    """The state of one run, as far as snapshots show it."""

    def __init__(self, run: str, plan: str, summary: RunSummary) -> None:
        self._run, self._plan, self._summary = run, plan, summary
        self._status: Status | None = None
        self._heard_at: float | None = None
        self._flash: deque[FlashCount] = deque()
        self._events: deque[tuple[float, StepEvent]] = deque(maxlen=MAX_EVENTS)
        self._loader: Mapping[str, float] = {}
        self._residency: Residency | None = None
        self._held_bytes: Mapping[str, int] = {}
        self._memory: Mapping[str, int] = {}
        self._withheld_bytes = 0
        self._warm_up: WarmUp | None = None

    @property
    def processes(self) -> Sequence[ProcessStatus]:
        return self._status.processes if self._status else ()

    def take_status(self, status: Status, now_s: float) -> None:
        self._status, self._heard_at = status, now_s

    def take_event(self, event: Any, now_s: float) -> None:
        """Store a published event if it is a `StepEvent` or the heartbeat of the loader."""
        if isinstance(event, StepEvent):
            self._events.append((now_s, event))
        elif isinstance(event, Beat) and event.role == "loader":
            self._loader = event.counters

    def take_flash(self, read_bytes: int, reads: int, now_s: float) -> None:
        """Store the loader's counters of bytes and reads. They may start from zero again."""
        if self._flash and read_bytes < self._flash[-1][1]:
            self._flash.clear()
        self._flash.append((now_s, read_bytes, reads))
        _forget(self._flash, now_s - TIME_WINDOW_S)

    def take_warm_up(self, warm_up: WarmUp | None) -> None:
        self._warm_up = warm_up

    def take_memory(self, memory: Mapping[str, int]) -> None:
        """Store the memory of the whole run in bytes, by the names of the board's words."""
        self._memory = memory

    def take_residency(self, residency: Residency, held_bytes: Mapping[str, int], withheld_bytes: int) -> None:
        """Store what is resident.

        held_bytes: resident bytes of the segments "fixed" and "kv"
        withheld_bytes: bytes of slots that are given back because memory is short
        """
        self._residency, self._held_bytes, self._withheld_bytes = residency, held_bytes, withheld_bytes

    def snapshot(
        self,
        now_s: float,
        at_s: float,
        processes: tuple[ProcessView, ...],
        fired: tuple[float, ...],
        strip: tuple[float, tuple[int, ...], tuple[StripRow, ...]],
    ) -> Snapshot:
        """Return a snapshot.

        now_s, at_s: the present time, of the monotonic clock and in seconds since 1970
        fired: the result of `Activity.fired`
        strip: length in ms, step numbers and rows, of `Activity.strip`
        """
        status = self._status
        since_s = 0.0 if self._heard_at is None else now_s - self._heard_at
        strip_ms, strip_steps, strip_rows = strip
        last_s = self._events[-1][0] if self._events else now_s
        busy = [event for at, event in self._events if at >= last_s - TIME_WINDOW_S]
        late = [event for event in busy if last_s >= now_s - TIME_WINDOW_S]
        status_fields: dict[str, Any] = {}
        if status is not None:
            status_fields = {
                name: getattr(status, name)
                for name in (
                    "ready",
                    "uptime_s",
                    "steps",
                    "tokens",
                    "sequences_active",
                    "max_sequences",
                    "sequences_waiting",
                    "deviations",
                )
            }
        for name, word in MEMORY_WORDS.items():
            status_fields[name] = self._memory.get(word, 0)
        return Snapshot(
            run=self._run,
            model=self._summary.model,
            mode=self._summary.mode,
            quantization=self._summary.quantization,
            plan=self._plan,
            at_s=round(at_s, 3),
            silent_s=round(since_s, 1) if since_s >= 1 else 0.0,
            tokens_per_s=_speed([(event.tokens, event.tbt_ms) for event in late if event.tbt_ms]),
            prompt_tokens_per_s=_speed([(event.batch, event.ms) for event in late if event.prefill]),
            tbt_ms=_quantiles([gap_ms for event in busy for gap_ms in event.gaps_ms]),
            flash_waiting=int(
                self._loader.get("trigger_waiting", 0)
                + self._loader.get("value_waiting", 0)
                + (self._residency.queued_requests if self._residency else 0)
            ),
            flash_in_flight=int(self._loader.get("in_flight", 0)),
            flash_bytes_per_s=_rate([(at, size) for at, size, _ in self._flash], now_s),
            flash_reads_per_s=_rate([(at, reads) for at, _, reads in self._flash], now_s),
            dram_bytes_per_s=round(sum(map(self._dram_bytes, late)) / TIME_WINDOW_S),
            **status_fields,
            **self._of_steps(busy),
            **self._of_regions(),
            warm_up=self._warm_up,
            fired=fired,
            strip_ms=round(strip_ms, 3),
            strip_steps=strip_steps,
            strip=strip_rows,
            processes=processes,
        )

    def _of_steps(self, events: Sequence[StepEvent]) -> dict[str, Any]:
        """Return the hit rate over all steps, and bytes per token and shares of waiting over decode steps, without
        figures that have no data."""
        looked_up = sum(event.looked_up for event in events)
        decodes = [event for event in events if not event.prefill]
        tokens, ms = sum(event.tokens for event in decodes), sum(event.ms for event in decodes)
        figures: dict[str, Any] = {}
        if looked_up:
            figures["hit_rate"] = round(1 - sum(event.misses for event in events) / looked_up, 5)
        if tokens:
            figures["flash_bytes_per_token"] = round(sum(event.read_bytes for event in decodes) / tokens)
            figures["dram_bytes_per_token"] = round(sum(map(self._dram_bytes, decodes)) / tokens)
        if ms:
            figures["flash_wait"] = round(min(1.0, sum(event.flash_ms for event in decodes) / ms), 4)
            figures["participant_wait"] = round(min(1.0, sum(event.barrier_ms for event in decodes) / ms), 4)
        return figures

    def _dram_bytes(self, event: StepEvent) -> int:
        """Estimate the bytes that the steps of an event read from memory.

        A neuron's row counts once per step, however many tokens need it.
        """
        summary = self._summary
        rows = min(event.rows, 3 * summary.layers * summary.neurons * event.steps)
        return event.steps * summary.step_bytes + rows * summary.row_bytes + event.positions * summary.position_bytes

    def _of_regions(self) -> dict[str, Any]:
        summary, residency = self._summary, self._residency
        if residency is None:
            return {}
        sizes = (summary.trigger_slot_bytes, summary.value_slot_bytes)
        slots = residency.slots
        planned = {"fixed": summary.fixed_bytes, "kv": summary.kv_bytes}
        used = {name: min(size, self._held_bytes.get(name, 0)) for name, size in planned.items()}
        hot_bytes = sum(size * count for size, count in zip(sizes, residency.pinned, strict=True))
        cold_bytes = sum(size * count for size, count in zip(sizes, residency.cold, strict=True))
        slots_bytes = sum(size * count for size, count in zip(sizes, slots, strict=True))
        return {
            "regions": (
                *(Region(name=name, total_bytes=size, used_bytes=used[name]) for name, size in planned.items()),
                Region(name="hot", total_bytes=hot_bytes, used_bytes=hot_bytes),
                Region(name="cold", total_bytes=slots_bytes - hot_bytes, used_bytes=cold_bytes),
            ),
            "slots": sum(slots),
            "withheld_bytes": self._withheld_bytes,
            "slots_free": max(0, sum(slots) - sum(residency.pinned) - sum(residency.cold) - sum(residency.loading)),
            "resident": residency.by_layer,
        }


def _forget(samples: deque[Any], before_s: float) -> None:
    """Drop samples before this time, except the last of them, from which rates begin."""
    while len(samples) > 2 and samples[1][0] <= before_s:
        samples.popleft()


def _rate(samples: Sequence[tuple[float, int]], now_s: float) -> float:
    """Return the growth per second over (time, count) samples; 0 if none is recent enough."""
    if len(samples) < 2 or samples[-1][0] <= samples[0][0] or samples[-1][0] < now_s - TIME_WINDOW_S:
        return 0.0
    return round((samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0]), 1)


def _speed(steps: Sequence[tuple[int, float]]) -> float:
    """Return tokens per second.

    steps: (tokens, milliseconds) of each step
    """
    ms = sum(took for _, took in steps)
    return round(1000 * sum(tokens for tokens, _ in steps) / ms, 1) if ms else 0.0


def _quantiles(values: list[float]) -> dict[str, float]:
    """Return p50, p90 and p99; empty without values."""
    values.sort()
    return {f"p{share}": values[min(len(values) - 1, len(values) * share // 100)] for share in (50, 90, 99) if values}

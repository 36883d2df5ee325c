"""One test on a live run: a warm-up, then repetitions, and from the answers' figures one row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from neuronpipe.launch.bench.asking import Repetition, generate
from neuronpipe.launch.bench.cases import Case, Prompts
from neuronpipe.launch.bench.energy import EnergyMeter
from neuronpipe.launch.bench.planned import errors, planned
from neuronpipe.launch.bench.traffic import traffic
from neuronpipe.launch.client import Client
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan, reads_whole
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages.request import Generate

POLL_S = 0.02
QUIET_S = 0.3
MAX_WARM_UP_S = 60.0
FIRST_TOKENS = 8  # what "the first tokens" are: those of the warm-up, when the cache knows nothing of the text


def wait_until_warm(client: Client) -> None:
    """Until the run is ready and flash has been quiet: what is loaded ahead is there."""
    while not (status := client.status()).ready:
        time.sleep(POLL_S)
    quiet_since, last, began = time.monotonic(), -1, time.monotonic()
    while time.monotonic() - quiet_since < QUIET_S and time.monotonic() - began < MAX_WARM_UP_S:
        time.sleep(POLL_S)
        status = client.status()
        if status.flash_bytes != last:
            quiet_since, last = time.monotonic(), status.flash_bytes


@dataclass
class Cost:
    """Figures of all steps that a test counts, in sum."""

    figures: dict[str, float] = field(default_factory=dict)

    def add(self, figures: dict[str, float], texts: int) -> None:
        """Of one text. A step counts in full for each of its texts, so that so many together count it once."""
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + value / texts

    def __getitem__(self, name: str) -> float:
        return self.figures.get(name, 0.0)

    def of_one_participant_ms(self, name: str) -> float:
        """A time that participants counted, each for itself: their mean in a step, in sum over steps."""
        return self[name] * self["steps"] / self["answers"] if self["answers"] else 0.0


@frozen
class Bench:
    """What all tests of one command share."""

    package: Package
    plan: Plan
    device: Device
    prompts: Prompts
    client: Client
    batch: int = 1  # texts at once
    measured: list[Case] = field(default_factory=list)

    @cached_property
    def _frequencies(self) -> AccessFrequencies | None:
        return AccessFrequencies.of(self.package.manifest, self.package.read_activity)

    def measure(self, case: Case, repetitions: int, progress: Callable[[], None]) -> dict[str, Any]:
        """The row of one test. Raises UserError when a text ends before there is anything to measure."""
        warm_up = self.ask(case, 0)
        progress()
        energy = EnergyMeter()
        done = []
        for number in range(1, repetitions + 1):
            done.append(self.ask(case, number))
            progress()
        row = self.row(case, warm_up, done, energy.joules())
        self.measured.append(case)
        return row

    def ask(self, case: Case, number: int) -> Repetition:
        """The requests of one repetition, with texts that no other has. Raises UserError when one ends with nothing to
        measure."""
        asks = []
        for text in range(number * self.batch, (number + 1) * self.batch):
            prompt = self.prompts.take(text, case.prompt_tokens, case.prompt_tokens + case.decode_tokens)
            asks.append(
                Generate(
                    request=f"{case.name}-{text}",
                    tokens=prompt,
                    max_tokens=case.max_tokens,
                    temperature=0.0,
                    share_prefix=False,
                )
            )
        return generate(self.client, case, asks)

    def row(self, case: Case, warm_up: Repetition, done: list[Repetition], joules: float | None) -> dict[str, Any]:
        """The row of a test, from its repetitions."""
        plan = self.plan
        cost = Cost()
        for finished in (finished for one in done for finished in one.finished):
            if case.decode_tokens:
                cost.add(finished.decode, self.batch)
            if case.prefill_tokens:
                cost.add(finished.prefill, self.batch)
        windows = self.package.manifest.model.windows_tokens
        positions = sum(_positions(case, len(text.gaps_ms), windows) for one in done for text in one.texts)
        moved = traffic(self.package, plan, cost.figures, positions)
        time_ms = sum(one.time_ms(case) for one in done)
        tokens = sum(case.prefill_tokens + one.decoded_tokens for one in done)
        rates = [one.tokens_per_s(case) for one in done]
        gaps = sorted(gap for one in done for gap in one.gaps_ms)
        first = warm_up.texts[0].gaps_ms[:FIRST_TOKENS]
        dram_s, flash_s = moved.dram_limit_s(self.device), moved.flash_limit_s(self.device, plan.flash.depth)
        exposed_ms, native_ms = cost.of_one_participant_ms("flash_ms"), cost.of_one_participant_ms("step_ms")
        barrier_ms = cost.of_one_participant_ms("barrier_ms")
        row = {
            "test": case.name,
            "mode": plan.compute.mode,
            "batch": self.batch,
            "ffn_resident": _resident_share(self.package.manifest, plan),
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_least": min(rates),
            "tokens_per_s_most": max(rates),
            "prefill_tokens_per_s": _median_of_prefill(case, done),
            "tbt_ms": {f"p{share}": _quantile(gaps, share) for share in (50, 90, 99)},
            "tbt_most_ms": max(gaps, default=None),
            "dram_bytes_per_token": moved.dram_bytes / tokens,
            "dram_limit_fraction": None if dram_s is None else 1000 * dram_s / time_ms,
            "flash_bytes_per_token": moved.flash_bytes / tokens,
            "flash_reads_per_token": moved.flash_reads / tokens,
            "flash_limit_fraction": None if flash_s is None else 1000 * flash_s / time_ms,
            "miss_rate": miss_rate(cost.figures, whole=reads_whole(plan.compute, plan.flash) or not case.decode_tokens),
            "late_rate": _share(
                cost["trigger_missed"] + cost["value_missed"], cost["trigger_clusters"] + cost["value_clusters"]
            ),
            "late_rate_of_activated": _share(cost["value_missed"], cost["value_clusters"]),
            "guessed_right_share": _share(cost["guessed_right"], cost["guessed"]) if cost["guessed"] else None,
            "experts_guessed_per_token": cost["guessed"] / tokens,
            "hints_per_token": cost["hinted"] / tokens if cost["hinted"] else None,
            "hints_right": _share(cost["hinted_fired"], cost["hinted"]) if cost["hinted"] else None,
            "active_share": _share(cost["active"], cost["tokens"] * _neurons(self.package)),
            "exposed_io_share": min(1.0, exposed_ms / time_ms),
            "coordination_share": min(1.0, max(0.0, 1 - (native_ms - barrier_ms) / time_ms)),
            "barrier_share": min(1.0, barrier_ms / time_ms),
            "message_share": min(1.0, max(0.0, 1 - native_ms / time_ms)),
            "peak_memory_bytes": max(finished.memory["peak_bytes"] for one in done for finished in one.finished),
            "limit_memory_bytes": plan.memory.limit_bytes,
            "first_token_ms": warm_up.first_ms,
            "first_tokens_per_s": 1000 * len(first) / sum(first) if first else None,
            "joules_per_token": None if joules is None else joules / tokens,
            "repetitions": len(done),
            "tokens": tokens,
            "model": "demo" if self.package.path == DEMO else self.package.path.name,
            "model_bytes": sum(file.bytes for file in self.package.manifest.files.values()),
            "quantization": self.package.manifest.precision,
            "workers": len(plan.compute.decode_workers()),
            "workload": self.prompts.preset,
            "plan": plan.id,
        }
        figures = planned(self.package.manifest, plan, self.device, case, self.batch, self.measured, self._frequencies)
        return row | {"planned": figures, "error": errors(row, figures)}


def miss_rate(cost: Mapping[str, float], *, whole: bool) -> float:
    """Of the cluster parts that steps wanted, those not in memory when they were first looked for.

    Triggers are looked for ahead of computing, where anything is: with a predictor those of clusters it names, else all
    of a layer. Those that nobody looked for ahead are taken to miss as often. whole: a value part comes with its
    trigger part, so that triggers speak for both; otherwise those of clusters that fired count as well, when computing
    comes to them.
    """

    def count(name: str) -> float:
        return cost.get(name, 0.0)

    triggers, values = count("trigger_clusters"), count("value_clusters")
    if count("foreseen"):
        share = count("foreseen_missed") / count("foreseen")
    else:
        share = _share(count("trigger_missed"), triggers)
    return share if whole else _share(share * triggers + count("value_missed"), triggers + values)


def _positions(case: Case, decoded: int, windows: Sequence[int]) -> float:
    """Positions whose keys and values are read, as a mean over layers, each with its attention window: for each decoded
    token those before it; for a prompt, which is computed a chunk at a time, about its length once."""
    last = case.prompt_tokens + decoded if case.decode_tokens else 0
    seen = sum(min(n, window or n) for window in windows for n in range(case.prompt_tokens + 1, last + 1))
    return seen / len(windows) + case.prefill_tokens


def _median_of_prefill(case: Case, done: Sequence[Repetition]) -> float | None:
    """Of a prompt alone, tokens/s until its first token; None where the test has none."""
    if not case.prefill_tokens:
        return None
    return statistics.median(1000 * case.prefill_tokens / one.first_ms for one in done)


def _quantile(ordered: list[float], share: int) -> float | None:
    return ordered[min(len(ordered) - 1, share * len(ordered) // 100)] if ordered else None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _resident_share(manifest: Manifest, plan: Plan) -> float:
    """Of the bytes of all neurons, those that have slots."""
    memory, slots = plan.memory, manifest.slots(moved=plan.memory.are_scales_moved)
    resident = memory.trigger_slots * slots.trigger_bytes + memory.value_slots * slots.value_bytes
    return resident / (manifest.clusters * slots.both_bytes)


def _neurons(package: Package) -> int:
    model = package.manifest.model
    return model.layers * model.experts * model.neurons

"""The participants of a step over plain arrays, every cluster resident: the engine without a pipeline around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.memory.layout import LINE_WORDS
from neuronpipe.services.steps.backend import Share, StepWork
from neuronpipe.services.steps.scored_tokens import Ratings
from neuronpipe.services.worker.external_products import ComputeBlocks, ComputeRows, Multiply
from neuronpipe.services.worker.participant import EngineConfig, Participant, View
from numpy.typing import NDArray

RING_ENTRIES = 1024
Ranges = list[tuple[int, int]]


STATE_SLOTS = 5  # two that steps read and write in turn, and those from SNAPSHOT on for states within a step
SNAPSHOT = 2


class Participants:
    """So many participants of steps of up to max_tokens tokens of one text. config: fields of EngineConfig that are to
    be otherwise than here. holder: the last of them has another compute its blocks; rows: and offloaded_matrices.
    reuse: an np_reuse that counts uses of clusters."""

    def __init__(
        self,
        package: Package,
        *,
        count: int,
        max_tokens: int,
        predicts: bool = False,
        holder: ComputeBlocks | None = None,
        rows: ComputeRows | None = None,
        offloaded_matrices: tuple[str, ...] = (),
        reuse: Any = None,
        **config: Any,
    ) -> None:
        manifest, self._package = package.manifest, package
        self._model = model = manifest.model
        layout, tokens = manifest.layout, max_tokens
        neurons, pairs = layout.blocks * layout.block_neurons, tokens * model.most_active_experts
        rank = manifest.predictor.rank if predicts and manifest.predictor else 0
        self._claims = np.zeros(lib.np_engine_claims(model.layers), np.uint32)
        self._barrier = np.zeros(LINE_WORDS, np.uint32)
        self.in_flight = np.zeros(LINE_WORDS, np.uint32)
        self._logits = np.zeros((tokens, model.vocabulary), np.float32)
        self._drafted = np.zeros(tokens, np.uint32)
        self.partials = np.zeros((pairs, layout.blocks, model.width), np.float32)  # sums of blocks, by token and expert
        self._entries = [lib.NP_ENTRY_PRESENT | np.arange(manifest.clusters, dtype=np.uint32) for _ in range(2)]
        self._arrivals = np.zeros(LINE_WORDS, np.uint32)
        states = (STATE_SLOTS, model.all_state_elements)
        self.states = np.full(states, np.nan, np.float32) if model.all_state_elements else None
        shared: dict[str, Any] = {
            "fixed": self._tensors(predicts),
            "residual": np.zeros((tokens, model.width), np.float32),
            "queries": np.zeros((tokens, model.heads_width), np.float32),
            "attention": np.zeros((tokens, model.heads_width), np.float32),
            "hidden": np.zeros((pairs, neurons), np.float32),
            "partials": self.partials,
            "changes": np.zeros((tokens, model.change_width), np.float32) if model.norms_after else None,
            "ranks": np.zeros((pairs, rank), np.float32) if rank else None,
            "predicted": np.zeros((min(pairs, model.most_experts), neurons, -(-tokens // 8)), np.uint8)
            if rank
            else None,
            "claims": self._claims,
            "logits": self._logits,
            "drafted": self._drafted,
            "kv": np.zeros(model.position_elements * model.context_tokens, np.uint16),
            "states": self.states,
            "slots": self._slots(),
            "entries": tuple(self._entries),
            "arrivals": self._arrivals,
            "in_flight": self.in_flight,
            "epoch": np.zeros(LINE_WORDS, np.uint32),
            "barrier": self._barrier,
            "activity": None,
            "reuse": reuse,
            "inputs": np.zeros((tokens, max(model.width, model.query_width)), np.float32),
            "outputs": np.zeros((tokens, max(model.qkv_rows, model.width)), np.float32),
        }
        self._holder, self._rows, self._matrices = holder, rows, offloaded_matrices
        self._rings = [np.zeros(3 * LINE_WORDS + RING_ENTRIES, np.uint32) for _ in range(count)]
        self.all = [
            Participant(
                manifest,
                View(**shared, window=np.zeros(1, np.uint64), requests=_ring(ring), trace=ffi.new("np_trace *")),
                dataclasses.replace(
                    self._config(max_tokens, predicts),
                    **config,
                    offload_blocks=holder is not None and ring is self._rings[-1],
                ),
            )
            for ring in self._rings
        ]

    def run(
        self,
        tokens: Sequence[int],
        chunk: int,
        ranges: Callable[[int], Ranges] | None = None,
        multiply: Multiply | None = None,
        snapshot_after: int = 0,
    ) -> NDArray[np.float32]:
        """Logits after each token of a text from its start, computed in steps of `chunk` tokens. ranges: by the number
        of the step, the blocks of each that takes part, the first ones; all have all by default. multiply: who computes
        the products of layers, where the config says outside. snapshot_after: a step also writes the slot SNAPSHOT
        after so many of its tokens, if it has more."""
        logits = np.empty((len(tokens), self._model.vocabulary), np.float32)
        blocks = self._package.manifest.layout.blocks
        with ThreadPoolExecutor(len(self.all)) as threads:
            for number, first in enumerate(range(0, len(tokens), chunk)):
                some = list(tokens[first : first + chunk])
                self._claims[:] = 0
                shares = ranges(number) if ranges else [(0, blocks)] * len(self.all)
                offloaded_blocks = shares[-1][1] if self._holder else 0
                matrices = self._matrices if len(shares) == len(self.all) else ()
                works = [_work(first, some, shares, own, offloaded_blocks, matrices) for own in range(len(shares))]
                for work in works:
                    self._give_states(work, number, snapshot_after)
                held = [self._holder if one is self.all[-1] else None for one in self.all]
                others = [multiply] * len(shares), [self._rows] * len(shares)
                list(threads.map(_compute, self.all[: len(shares)], works, held, *others))
                logits[first : first + len(some)] = self._logits[: len(some)]
        return logits

    def draft(self, tokens: Sequence[int], chunk: int, drafted: int) -> tuple[list[int], NDArray[np.float32]]:
        """What the draft layer predicts after a text, and the logits after the text's last token and each of these.
        The text before its last token is computed in steps of `chunk` tokens."""
        starts = range(0, len(tokens) - 1, chunk)
        steps = [(first, list(tokens[first : min(first + chunk, len(tokens) - 1)])) for first in starts]
        steps.append((len(tokens) - 1, [tokens[-1], *[lib.NP_DRAFTED] * drafted]))
        with ThreadPoolExecutor(len(self.all)) as threads:
            for number, (first, some) in enumerate(steps):
                self._claims[:] = 0
                shares = [(0, self._package.manifest.layout.blocks)] * len(self.all)
                works = [_work(first, some, shares, own, 0, ()) for own in range(len(shares))]
                for work in works:
                    self._give_states(work, number)
                    if some[-1] != lib.NP_DRAFTED:
                        work.logits_count = 0
                    else:  # each of its tokens has a state of its own
                        work.states_to = range(SNAPSHOT, SNAPSHOT + len(some))
                        work.states_from = [work.states_from[0], *work.states_to[:-1]]
                list(threads.map(Participant.compute, self.all, works))
        return [int(token) for token in self._drafted[:drafted]], self._logits[: 1 + drafted].copy()

    def rate(self, tokens: Sequence[int], likely: int) -> Ratings:
        """Of each token after the first, in one step, with these tokens' logits a few rows at a time."""
        ratings = Ratings(tokens[1:], likely)
        self._claims[:] = 0
        shares = [(0, self._package.manifest.layout.blocks)] * len(self.all)
        with ThreadPoolExecutor(len(self.all)) as threads:
            works = [_work(0, list(tokens), shares, own, 0, ()) for own in range(len(shares))]
            for work in works:
                self._give_states(work, 0)
                work.logits_count, work.ratings = 0, ratings
            list(threads.map(Participant.compute, self.all, works))
        return ratings

    def _give_states(self, work: StepWork, number: int, snapshot_after: int = 0) -> None:
        """Let the steps of a text read and write the first two states in turn. number: of the step, from 0."""
        if self._model.all_state_elements:
            tokens, before, after = len(work.tokens), (number - 1) % 2 if number else lib.NP_NO_STATE, number % 2
            first = snapshot_after if snapshot_after < tokens else 0
            work.states_from = [before] * first + [SNAPSHOT if first else before] * (tokens - first)
            work.states_to = [SNAPSHOT] * first + [after] * (tokens - first)

    def lose(self, clusters: range) -> None:
        """These are no longer resident."""
        for entries in self._entries:
            entries[clusters.start : clusters.stop] = lib.NP_ENTRY_ABSENT

    def bring(self, clusters: range) -> None:
        """These are resident again, as if a loader had read them."""
        for entries in self._entries:
            entries[clusters.start : clusters.stop] = lib.NP_ENTRY_PRESENT | np.arange(clusters.start, clusters.stop)
        word = ffi.from_buffer("uint32_t[]", self._arrivals)
        lib.np_word_add(word, 1)
        lib.np_word_wake(word)

    def asked_for(self) -> set[int]:
        """Clusters that were asked of the loader, by anybody."""
        rings = [ring[: 3 * LINE_WORDS + int(ring[0])][3 * LINE_WORDS :] for ring in self._rings]
        return {int(entry) & lib.NP_REQUEST_CLUSTER_MASK for ring in rings for entry in ring}

    def counters(self) -> dict[str, float]:
        """Sums over the participants, of the last step."""
        counters = [participant.counters() for participant in self.all]
        return {name: sum(one[name] for one in counters) for name in counters[0]}

    def _config(self, max_tokens: int, predicts: bool) -> EngineConfig:
        return EngineConfig(
            sequences=1,
            context_tokens=self._model.context_tokens,
            max_tokens=max_tokens,
            logit_rows=max_tokens,
            window_blocks=2,
            state_slots=STATE_SLOTS if self._model.all_state_elements else 0,
            product_blocks=2,
            partial_tokens=max_tokens,
            spin_us=0,
            predicts=predicts,
            thresholded=False,
            bundle=False,
            prefetch=False,
            pipeline=True,
        )

    def _tensors(self, predicts: bool) -> dict[str, Any]:
        package = self._package
        file = np.fromfile(package.fixed_path, np.uint8)
        tensors = {name: file[entry.start : entry.stop] for name, entry in package.fixed.items()}
        if predicts and package.predictor is not None:
            file = np.fromfile(package.predictor_path, np.uint8)
            tensors |= {name: file[entry.start : entry.stop] for name, entry in package.predictor.items()}
        return tensors

    def _slots(self) -> tuple[Any, Any]:
        manifest, layout = self._package.manifest, self._package.manifest.layout
        bundles = np.fromfile(self._package.bundles_path, np.uint8).reshape(manifest.clusters, -1)
        trigger, value = bundles, bundles[:, layout.part_offset("value") :]
        return (
            np.ascontiguousarray(trigger[:, : manifest.trigger_slot_bytes]),
            np.ascontiguousarray(value[:, : manifest.value_slot_bytes]),
        )


def _compute(
    one: Participant,
    work: StepWork,
    holder: ComputeBlocks | None,
    multiply: Multiply | None,
    rows: ComputeRows | None,
) -> None:
    if holder is None:
        one.compute(work, multiply)
    else:
        one.compute_offloaded(work, holder, rows)


def _work(
    first: int, tokens: list[int], shares: Ranges, own: int, offloaded_blocks: int, matrices: tuple[str, ...]
) -> StepWork:
    """One step of one text, as the participant number `own` gets it."""
    sharers = [number for number, share in enumerate(shares) if share == shares[own]]
    return StepWork(
        number=first,
        epoch=0,
        sequences=[0] * len(tokens),
        positions=range(first, first + len(tokens)),
        tokens=tokens,
        logits_first=0,
        logits_count=len(tokens),
        share=Share(
            first_block=shares[own][0],
            end_block=shares[own][1],
            participants=len(shares),
            participant=own,
            sharers=len(sharers),
            sharer=sharers.index(own),
            offloaded_blocks=offloaded_blocks,
            offloaded_matrices=matrices,
        ),
    )


def _ring(words: NDArray[np.uint32]) -> Any:
    place = ffi.from_buffer("uint32_t[]", words)
    tail, head, asleep, entries = (place + n * LINE_WORDS for n in range(4))
    facts = {"tail": tail, "head": head, "asleep": asleep, "entries": entries}
    return ffi.new("np_requests *", facts | {"capacity": RING_ENTRIES, "doorbell": -1})

"""A participant's view of memory: the run's segments, and for prefill the stages of a step that nobody else reads."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.layout import LINE_WORDS
from neuronpipe.services.memory import RunMemory
from neuronpipe.services.participant import EngineConfig, View
from neuronpipe.services.rings import Rings
from neuronpipe.services.trace import Trace

Stage = Callable[[str], Any]
"""The buffer of one stage of a step, by its name in the layout of the exchange segment."""


def exchange_stage(memory: RunMemory) -> Stage:
    """The decode workers' stages, which they all see."""
    return lambda name: memory.view("exchange", name)


def private_stage(package: Package, config: EngineConfig) -> Stage:
    """The same for a process whose threads do its steps alone. Pages cost nothing until they are used."""
    model, layout, tokens = package.manifest.model, package.manifest.layout, config.max_tokens
    neurons = layout.blocks * layout.block_neurons
    rank = package.manifest.predictor.rank if config.predicts and package.manifest.predictor else 0
    sizes = {
        "residual": 4 * tokens * model.width,
        "queries": 4 * tokens * model.query_width,
        "attention": 4 * tokens * model.query_width,
        "hidden": 4 * tokens * neurons,
        "partials": 4 * config.partial_tokens * layout.blocks * model.width,
        "ranks": 4 * tokens * rank,
        "predicted": neurons * -(-tokens // 8) if rank else 0,
        "claims": 4 * lib.np_engine_claims(model.layers),
        "barriers": 4 * LINE_WORDS,
    }
    buffers = {name: mmap.mmap(-1, size) for name, size in sizes.items() if size}
    return buffers.get


def participant_view(
    package: Package,
    memory: RunMemory,
    rings: Rings,
    stage: Stage,
    window: int,
    trace: Trace | None,
    activity: array[int] | None = None,
) -> View:
    """The view of the participant with this window and ring of requests."""
    fixed = memory.view("fixed", "file")
    tensors = {name: fixed[entry.start : entry.stop] for name, entry in package.fixed.items()}
    predictor = memory.view("fixed", "predictor")
    if len(predictor) and package.predictor is not None:
        tensors |= {name: predictor[entry.start : entry.stop] for name, entry in package.predictor.items()}
    return View(
        fixed=tensors,
        residual=stage("residual"),
        queries=stage("queries"),
        attention=stage("attention"),
        hidden=stage("hidden"),
        partials=stage("partials"),
        ranks=stage("ranks"),
        predicted=stage("predicted"),
        claims=stage("claims"),
        barrier=stage("barriers"),
        logits=memory.view("exchange", "logits"),
        kv=memory.view("kv", "kv"),
        slots=(memory.view("slots", "trigger_slots"), memory.view("slots", "value_slots")),
        entries=(memory.view("residency", "trigger_entries"), memory.view("residency", "value_entries")),
        window=memory.view("residency", "windows")[window : window + 1],
        arrivals=memory.view("residency", "arrivals"),
        epoch=memory.view("exchange", "epoch"),
        requests=rings.of(window),
        trace=trace.native if trace else ffi.new("np_trace *"),
        activity=activity,
    )

"""The simulated systems: how each uses its cache, its cores and an NPU.

PowerInfer-2: the NPU computes attention and hot neurons; the cores compute the predictor, look up the predicted cold
neurons, and compute the resident ones. Missing neurons arrive in six groups: gates are read and computed, then the
other rows. If a token wants more cold neurons than fit the cache, LRU would have no hits. Then the hottest neurons fill
the cache, and further neurons that many tokens want are read sequentially for every token.

Ours: decode does not use the NPU. A package or shape is simulated under the plan of a run: whole clusters, borrowed
slots, the times of the cost model. Without a predictor, gates are computed block by block, and values are requested
when their gate has fired.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from neuronpipe.plans.lab.devices.device_file import DeviceModel, Issuer
from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.frozen import frozen

Cache = Literal["none", "lru"]
Reads = Literal["matrices", "row-column", "whole", "two-phase"]
MIN_CORES_FOR_OWN_LOADER = 4
HOT_OF_CACHE = 0.25
HOT_IN_MEMORY = 0.5
HOT_IN_MEMORY_LARGE_BATCH, LARGE_BATCH = 0.7, 3


@frozen(kw_only=True)
class System:
    """A system's policies.

    npu: the NPU computes attention and hot neurons, if there is one
    cache: replacement policy of cold neurons
    reads: reads of a missing neuron: each row (matrices); gate, then up and down together (row-column); all rows in one
        read (whole); trigger part, then value part if it fires (two-phase)
    pipeline: an I/O thread reads, and clusters are computed as they arrive; without it, all reads of a layer come first
    early: the predictor reads the input of attention
    all_layers: prefill reads whole layers, resident or not
    mapped: layers are dense and read from mapped pages
    cores: number of computing cores; 0: `compute_cores` decides
    """

    name: str
    npu: bool = False
    cache: Cache = "none"
    reads: Reads = "whole"
    pipeline: bool = False
    early: bool = False
    all_layers: bool = True
    mapped: bool = False
    cores: int = 0

    @property
    def issuer(self) -> Issuer:
        return "big" if self.pipeline else "several"

    def on(self, device: DeviceModel) -> System:
        """Return the system on a device: without use of an NPU if there is none."""
        return self if device.has_npu else dataclasses.replace(self, npu=False)

    def compute_cores(self, device: DeviceModel) -> int:
        """Return the number of computing cores: all fast cores, or one less if there are enough for an I/O thread."""
        if self.cores:
            return self.cores
        fast = len(device.fast_cores)
        return fast - 1 if self.pipeline and fast >= MIN_CORES_FOR_OWN_LOADER else fast

    def hot_share(self, resident: float, batch: int) -> float:
        """Return the share of a layer's neurons that the NPU computes densely. resident: share in memory."""
        if not self.npu:
            return 0.0
        max_share = HOT_IN_MEMORY_LARGE_BATCH if batch >= LARGE_BATCH else HOT_IN_MEMORY
        return max_share if resident >= 1 else min(max_share, HOT_OF_CACHE * resident)


OURS = System(name="ours", reads="two-phase", pipeline=True, early=True, all_layers=False)
SYSTEMS = {
    "powerinfer2": System(name="powerinfer2", npu=True, cache="lru", reads="two-phase", pipeline=True),
    "llm-in-a-flash": System(name="llm-in-a-flash", cache="lru", reads="row-column"),
    "llama.cpp-mapped": System(name="llama.cpp-mapped", mapped=True),
}

_FULL = SYSTEMS["powerinfer2"]
CPU_ONLY = dataclasses.replace(_FULL, npu=False)
ABLATION = {
    "baseline": System(name="powerinfer2", reads="matrices"),
    "+ bundle": System(name="powerinfer2"),
    "+ neuron cache": System(name="powerinfer2", cache="lru"),
    "+ cluster pipeline": CPU_ONLY,
    "+ XPU": _FULL,
}
"""The steps of PowerInfer-2's ablation, Figure 14. Without the neuron cache, all of the feed-forward is read."""


POLICIES = (OURS.name, *SYSTEMS)


def system_named(name: str) -> System:
    if name not in POLICIES:
        raise UserError(f"--policy {quoted(name)}: is none of {', '.join(POLICIES)}")
    return OURS if name == OURS.name else SYSTEMS[name]

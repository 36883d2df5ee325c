"""A prefill worker whose graphs take the time that a neural processor's would, and compute nothing: for how its
products follow each other. npu_runtime.c is the same for the program npu-prefill.

    NPU_DEVICE=10.75,50 neuronpipe up ... --backend prefill=onnx:cpu --use prefill=tests.npu_device:Phone
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from neuronpipe.services.offload.npu import backend
from neuronpipe.services.offload.npu.graphs import MIDDLE, Graph
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.steps.backend import Placement
from neuronpipe.services.worker.prefill import PrefillService

DEVICE = "NPU_DEVICE"
"""Of the environment: TFLOP/s, and microseconds that each graph takes besides."""


class DeviceRuntime:
    """In the place of ONNX Runtime. Every value comes out as 0."""

    def __init__(self, provider: object = None) -> None:
        tflop_per_s, start_us = map(float, os.environ[DEVICE].split(","))
        self._flop_per_s, self._start_s = tflop_per_s * 1e12, start_us * 1e-6

    def session(self, wanted: Graph) -> DeviceSession:
        """The graph's inputs say how long it takes."""
        graph = onnx.load_from_string(wanted.model).graph
        shapes, outputs = (
            {one.name: [n.dim_value for n in one.type.tensor_type.shape.dim] for one in some}
            for some in (graph.input, graph.output)
        )
        weights = sum(rows * columns for name, (rows, columns) in shapes.items() if name not in ("x", "factor"))
        return DeviceSession(outputs, self._start_s + 2 * shapes["x"][0] * weights / self._flop_per_s)


class DeviceSession:
    """A graph on the device."""

    def __init__(self, outputs: dict[str, list[int]], takes_s: float) -> None:
        self._outputs, self._takes_s = outputs, takes_s

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Zeros, when it is time."""
        until = time.perf_counter() + self._takes_s
        outputs = {name: np.full(shape, MIDDLE, np.uint16) for name, shape in self._outputs.items()}
        time.sleep(max(0.0, until - time.perf_counter()))
        return outputs


class PhoneBackend(backend.OnnxBackend):
    """The backend, on this device."""

    def load(self, placement: Placement) -> None:
        """See Backend."""
        backend.Runtime = DeviceRuntime  # type: ignore[assignment, misc]
        super().load(placement)


class Phone(PrefillService):
    """The prefill worker, on this device."""

    def backend(self, job: Job) -> PhoneBackend:
        """See PrefillService."""
        return PhoneBackend("cpu")

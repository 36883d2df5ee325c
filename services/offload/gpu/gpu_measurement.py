"""The measurement of an accelerator for the device profile.

It runs in a process of its own, since a driver takes memory and does not survive a fork. The process prints a JSON line
per point, with all repetitions; `measure_accelerator` reads them.

    launches  the smallest kernel, and the wait for it
    copies    a copy to the device, or back, and the wait for it
    visits    a call for a layer that has next to nothing to compute
    held      the kernels on whole blocks, one layer after the other, in more memory than caches hold
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from neuronpipe.plans.device.accelerator import (
    ACCELERATOR_VERSION,
    LISTS,
    MAX_SEQUENCES,
    AcceleratorProfile,
    Copy,
    Launch,
    LayerCall,
    OffloadedKind,
    OffloadedPoint,
)
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.package.layout import Quantization, quant_bytes, scale_bytes
from neuronpipe.protocol.errors import UserError, quoted

SHAPES: tuple[tuple[Quantization, int], ...] = (("q4", 2048), ("q4", 4096), ("q8", 2048), ("q8", 4096))
SHARES = (0.1, 0.5)
KINDS: tuple[OffloadedKind, ...] = ("exact", "predicted")
COPY_BYTES = (4 << 10, 64 << 10, 1 << 20)
LAYER_BYTES = 64 << 20
LAYERS = 2  # for each share
MEMORY_PART = 8  # the layers of a shape take at most an eighth of the device's memory
NARROW = 256  # width of the model with next to nothing to compute
ROUNDS = 3
VISIT_ROUNDS = 30
PASS_S = 0.01  # the minimum length of a repetition
MAX_LAYER_S = 0.02  # for a slower device fewer blocks are measured
WITHIN_S = 240
POINTS = 1 + 2 * len(COPY_BYTES) + 2 * MAX_SEQUENCES + len(SHAPES) * len(KINDS) * len(SHARES) * MAX_SEQUENCES
"""The number of measured points."""


def measure_accelerator(options: str, progress: Callable[[], None] = lambda: None) -> AcceleratorProfile:
    """Measure the device that the backend opencl selects by these options.

    Raises UserError if there is none, or if its driver fails.

    progress: called after each of POINTS points
    """
    command = [sys.executable, "-m", __name__, options]
    facts: dict[str, Any] = {}
    points: dict[str, list[Any]] = {name: [] for name in LISTS}
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        limit = threading.Timer(WITHIN_S, child.kill)
        limit.start()
        errors: list[str] = []
        listener = threading.Thread(target=lambda: errors.extend(child.stderr or ()))
        listener.start()
        for line in child.stdout:
            values = _line(line)
            if values is None:
                last = line
                continue
            if "error" in values:
                raise UserError(values["error"])
            if "device" in values:
                facts = values["device"]
                continue
            kind, point = _point(values)
            points[kind].append(point)
            progress()
        listener.join()
        limit.cancel()
    if child.returncode or not facts or sum(map(len, points.values())) < POINTS:
        lines = [line.strip() for line in (last, *errors) if line.strip()] or [f"status {child.returncode}"]
        raise UserError(f"backend opencl: measuring the device failed: {quoted(lines[-1])}")
    lists: dict[str, Any] = {name: tuple(measured) for name, measured in points.items()}
    return AcceleratorProfile(
        version=ACCELERATOR_VERSION, backend=f"opencl:{options}" if options else "opencl", **facts, **lists
    )


def _line(line: str) -> dict[str, Any] | None:
    """Parse a line of the measuring process; None for output of the driver."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _point(values: dict[str, Any]) -> tuple[str, Any]:
    kind, figure = values.pop("of"), Figure.of(values.pop("repetitions"))
    if kind == "held":
        return kind, OffloadedPoint(bytes_per_s=figure, **values)
    if kind == "copies":
        return kind, Copy(bytes_per_s=figure, **values)
    if kind == "visits":
        return kind, LayerCall(us=figure, **values)
    return kind, Launch(us=figure)


# ---- in the other process --------------------------------------------------------------------------------------------
def _measured(name: str) -> Iterator[Mapping[str, Any]]:
    from neuronpipe.native import ffi, lib
    from neuronpipe.services.offload.gpu.device import FACTS, find_device

    device = find_device(name)
    yield {"device": {name: getattr(device, name) for name in FACTS}}
    yield from _launches_and_copies(device)
    instructions = ffi.string(lib.np_isa_name()).decode()
    for routed in (False, True):
        yield from _visits(device, instructions, routed)
    for quantization, width in SHAPES:
        yield from _block_points(device, instructions, quantization, width)


def _launches_and_copies(device: Any) -> Iterator[Mapping[str, Any]]:
    import numpy as np
    from neuronpipe.services.offload.gpu.device import opencl

    cl = opencl()
    context = cl.Context([device.handle])
    queue = cl.CommandQueue(context)
    nothing = cl.Program(context, "__kernel void nothing(__global int *x) {}").build().nothing
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, max(COPY_BYTES))
    nothing.set_args(buffer)

    def launch() -> None:
        cl.enqueue_nd_range_kernel(queue, nothing, (1,), (1,))
        queue.finish()

    yield {"of": "launches", "repetitions": _typical_us(launch)}
    for size in COPY_BYTES:
        memory = np.zeros(size, np.uint8)
        for back in (False, True):
            pair = (memory, buffer) if back else (buffer, memory)

            def copy(pair: Any = pair) -> None:
                cl.enqueue_copy(queue, *pair, is_blocking=True)

            speeds = [1e6 * size / us for us in _typical_us(copy)]
            yield {"of": "copies", "back": back, "copy_bytes": size, "repetitions": speeds}


def _visits(device: Any, instructions: str, routed: bool) -> Iterator[Mapping[str, Any]]:
    from neuronpipe.services.offload.gpu.trial import TrialSteps, manifest_of, trial_blocks

    experts = {"experts": 8, "experts_per_token": 2} if routed else {}
    manifest = manifest_of("q8", NARROW, **experts)
    offloaded = trial_blocks(device, manifest, 1, instructions, SHARES[:1], 1)
    steps = TrialSteps(manifest, 1)
    for sequences in range(1, MAX_SEQUENCES + 1):
        request = steps.request(0, sequences)
        times_us = _typical_us(lambda request=request: offloaded(request))  # type: ignore[misc]
        yield {"of": "visits", "texts": sequences, "routed": routed, "repetitions": times_us}
    offloaded.close()


def _block_points(
    device: Any, instructions: str, quantization: Quantization, width: int
) -> Iterator[Mapping[str, Any]]:
    """Yield all points of one shape. Each round measures every point once, so that drift affects all alike."""
    from neuronpipe.services.offload.gpu.trial import TrialSteps, blocks_within, fired_of, manifest_of, trial_blocks

    manifest = manifest_of(quantization, width)
    layers = LAYERS * len(SHARES)
    max_layer_bytes = min(device.memory_bytes // MEMORY_PART // layers, device.max_buffer_bytes, LAYER_BYTES)
    blocks = blocks_within(manifest, max_layer_bytes)
    offloaded = trial_blocks(device, manifest, blocks, instructions, SHARES, LAYERS)
    steps = TrialSteps(manifest, blocks)
    layer_s = _kernels_s(offloaded, [steps.request(layer, MAX_SEQUENCES) for layer in range(layers)])
    blocks = steps.blocks = max(1, min(blocks, int(blocks * MAX_LAYER_S / layer_s)))
    neurons = blocks * manifest.layout.block_neurons
    row_bytes = quant_bytes(quantization, width) + scale_bytes(quantization, width)
    speeds: dict[tuple[OffloadedKind, float, int], list[float]] = {}
    cases: list[tuple[OffloadedKind, float, int]] = [
        (kind, share, sequences) for kind in KINDS for share in SHARES for sequences in range(1, MAX_SEQUENCES + 1)
    ]
    for _ in range(ROUNDS):
        for kind, share, sequences in cases:
            fired = fired_of(offloaded.blocks * manifest.layout.block_neurons, share)
            predicted = fired if kind == "predicted" else None
            first = SHARES.index(share) * LAYERS
            requests = [steps.request(first + layer, sequences, predicted) for layer in range(LAYERS)]
            part = min(1.0, sequences * share)
            rows = neurons * (2 * part + (1.0 if kind == "exact" else part))
            seconds = _kernels_s(offloaded, requests)
            speeds.setdefault((kind, share, sequences), []).append(rows * row_bytes / seconds)
            steps.forget()
    offloaded.close()
    for (kind, share, sequences), repetitions in speeds.items():
        yield {
            "of": "held", "kind": kind, "quantization": quantization, "row_weights": width, "share": share,
            "texts": sequences, "repetitions": repetitions,
        }  # fmt: skip


def _kernels_s(offloaded: Any, requests: list[Any]) -> float:
    """Return the mean seconds of one layer's copies and kernels, over repetitions of the requests for PASS_S."""
    calls, start_s = 0, time.perf_counter()
    while calls < len(requests) or time.perf_counter() - start_s < PASS_S:
        for request in requests:
            events = offloaded.send(request)
            offloaded.start(request)
        offloaded.finish()
        calls += len(requests)
    seconds = (time.perf_counter() - start_s) / calls
    del events
    return seconds


def _typical_us(call: Callable[[], object]) -> list[float]:
    """Return medians of three successive calls in microseconds, for the second half of VISIT_ROUNDS calls."""
    times_us = []
    for _ in range(VISIT_ROUNDS):
        start_ns = time.perf_counter_ns()
        call()
        times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
    second_half = times_us[VISIT_ROUNDS // 2 :]
    return [sorted(second_half[at : at + 3])[1] for at in range(0, len(second_half), 3)]


def _print_points(name: str) -> None:
    try:
        for values in _measured(name):
            print(json.dumps(values), flush=True)
    except UserError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    _print_points(sys.argv[1])

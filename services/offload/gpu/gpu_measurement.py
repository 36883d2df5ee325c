"""Measuring an accelerator for the device profile: in a process of its own, since a driver takes memory and does not
outlive a fork. It says every repetition as a line of JSON; `measure_accelerator` makes figures of them.

    launch   the smallest kernel, waited for
    copy     some bytes to the device, or back, waited for
    visit    a layer's call with next to nothing to compute
    held     the kernels on whole blocks, one layer after the other, more of them than caches hold
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
LAYERS = 2  # of each share
MEMORY_PART = 8  # of the device's memory, what the layers of a shape may take
NARROW = 256  # of the model with next to nothing to compute
ROUNDS = 3
VISIT_ROUNDS = 30
PASS_S = 0.01  # of a repetition at least
MOST_S = 0.02  # of one layer at most: of a slower device fewer blocks are measured
WITHIN_S = 240
POINTS = 1 + 2 * len(COPY_BYTES) + 2 * MAX_SEQUENCES + len(SHAPES) * len(KINDS) * len(SHARES) * MAX_SEQUENCES
"""How many figures there are."""


def measure_accelerator(options: str, progress: Callable[[], None] = lambda: None) -> AcceleratorProfile:
    """The device that the backend opencl finds with these options. progress is called POINTS times. Raises UserError
    where there is none, or its driver fails."""
    command = [sys.executable, "-m", __name__, options]
    facts: dict[str, Any] = {}
    points: dict[str, list[Any]] = {name: [] for name in LISTS}
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        limit = threading.Timer(WITHIN_S, child.kill)
        limit.start()
        said: list[str] = []
        listener = threading.Thread(target=lambda: said.extend(child.stderr or ()))
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
        words = [line.strip() for line in (last, *said) if line.strip()] or [f"status {child.returncode}"]
        raise UserError(f"backend opencl: measuring the device failed: {quoted(words[-1])}")
    lists: dict[str, Any] = {name: tuple(some) for name, some in points.items()}
    return AcceleratorProfile(
        version=ACCELERATOR_VERSION, backend=f"opencl:{options}" if options else "opencl", **facts, **lists
    )


def _line(line: str) -> dict[str, Any] | None:
    """A driver may print what it likes beside."""
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
def _measured(wanted: str) -> Iterator[Mapping[str, Any]]:
    """Everything that is to be said."""
    from neuronpipe.native import ffi, lib
    from neuronpipe.services.offload.gpu.device import FACTS, find_device

    device = find_device(wanted)
    yield {"device": {name: getattr(device, name) for name in FACTS}}
    yield from _launches_and_copies(device)
    instructions = ffi.string(lib.np_isa_name()).decode()
    for routed in (False, True):
        yield from _visits(device, instructions, routed)
    for quantization, width in SHAPES:
        yield from _held(device, instructions, quantization, width)


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
    from neuronpipe.services.offload.gpu.trial import TrialSteps, holder_of, manifest_of

    experts = {"experts": 8, "experts_per_token": 2} if routed else {}
    manifest = manifest_of("q8", NARROW, **experts)
    held = holder_of(device, manifest, 1, instructions, SHARES[:1], 1)
    steps = TrialSteps(manifest, 1)
    for texts in range(1, MAX_SEQUENCES + 1):
        wanted = steps.wanted(0, texts)
        taken = _typical_us(lambda wanted=wanted: held(wanted))  # type: ignore[misc]
        yield {"of": "visits", "texts": texts, "routed": routed, "repetitions": taken}
    held.close()


def _held(device: Any, instructions: str, quantization: Quantization, width: int) -> Iterator[Mapping[str, Any]]:
    """All points of one shape, by turns."""
    from neuronpipe.services.offload.gpu.trial import TrialSteps, blocks_within, fired_of, holder_of, manifest_of

    manifest = manifest_of(quantization, width)
    most = min(device.memory_bytes // MEMORY_PART // (LAYERS * len(SHARES)), device.max_buffer_bytes, LAYER_BYTES)
    blocks = blocks_within(manifest, most)
    held = holder_of(device, manifest, blocks, instructions, SHARES, LAYERS)
    steps = TrialSteps(manifest, blocks)
    taken_s = _kernels_s(held, [steps.wanted(layer, MAX_SEQUENCES) for layer in range(LAYERS * len(SHARES))])
    blocks = steps.blocks = max(1, min(blocks, int(blocks * MOST_S / taken_s)))
    neurons = blocks * manifest.layout.block_neurons
    row_bytes = quant_bytes(quantization, width) + scale_bytes(quantization, width)
    speeds: dict[tuple[OffloadedKind, float, int], list[float]] = {}
    cases: list[tuple[OffloadedKind, float, int]] = [
        (kind, share, texts) for kind in KINDS for share in SHARES for texts in range(1, MAX_SEQUENCES + 1)
    ]
    for _ in range(ROUNDS):
        for kind, share, texts in cases:
            fired = fired_of(held.blocks * manifest.layout.block_neurons, share)
            predicted = fired if kind == "predicted" else None
            first = SHARES.index(share) * LAYERS
            wanted = [steps.wanted(first + layer, texts, predicted) for layer in range(LAYERS)]
            part = min(1.0, texts * share)
            rows = neurons * (2 * part + (1.0 if kind == "exact" else part))
            seconds = _kernels_s(held, wanted)
            speeds.setdefault((kind, share, texts), []).append(rows * row_bytes / seconds)
            steps.forget()
    held.close()
    for (kind, share, texts), repetitions in speeds.items():
        yield {
            "of": "held", "kind": kind, "quantization": quantization, "row_weights": width, "share": share,
            "texts": texts, "repetitions": repetitions,
        }  # fmt: skip


def _kernels_s(held: Any, wanted: list[Any]) -> float:
    """Of one layer's kernels and of what they are told: all layers by turns, until that took long enough."""
    calls, began = 0, time.perf_counter()
    while calls < len(wanted) or time.perf_counter() - began < PASS_S:
        for one in wanted:
            kept = held.send(one)
            held.start(one)
        held.finish()
        calls += len(wanted)
    seconds = (time.perf_counter() - began) / calls
    del kept
    return seconds


def _typical_us(call: Callable[[], object]) -> list[float]:
    """Of the second half of the calls, by threes: the typical one of each."""
    taken = []
    for _ in range(VISIT_ROUNDS):
        began = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - began) / 1e3)
    later = taken[VISIT_ROUNDS // 2 :]
    return [sorted(later[at : at + 3])[1] for at in range(0, len(later), 3)]


def _say(wanted: str) -> None:
    try:
        for values in _measured(wanted):
            print(json.dumps(values), flush=True)
    except UserError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    _say(sys.argv[1])

"""The memory of a process that computes prompts' products by a runtime, measured and planned.

    python -m tests.bench.npu_memory PACKAGE cpu|qnn-emulated TOKENS

Prints a JSON line: measured bytes, from before numpy is imported to the peak (proportional set size), and planned
bytes. Products of every kind are computed, neurons in three, in all lengths of graphs, from equal weights, so that a
package's neurons are not read.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from neuronpipe.native import ROW_TYPES, ffi, lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.runtime_memory import graph_tokens, runtime_bytes
from neuronpipe.plans.plan.segment_sizes import product_blocks

KIB = 1024


def measure(manifest: Manifest, provider: str, tokens: int) -> dict[str, int]:
    """Return the measured and the planned bytes."""
    neurons = product_blocks(manifest.layout, manifest.layout.blocks) * manifest.layout.block_neurons
    before = _pss_bytes()

    import numpy as np
    from neuronpipe.services.offload.npu.layer_products import Products
    from neuronpipe.services.offload.npu.providers import provider_of
    from neuronpipe.services.offload.npu.sessions import Runtime

    model = manifest.model
    inputs = np.random.default_rng(1).normal(size=(tokens, max(model.width, model.query_width))).astype(np.float32)
    outputs = np.zeros((tokens, max(model.qkv_rows, model.width)), np.float32)
    products = Products(manifest, Runtime(provider_of(provider)).session, neurons=neurons, max_tokens=tokens)
    shapes = (
        (lib.NP_PRODUCT_QKV, model.qkv_rows, model.width, model.qkv_rows),
        (lib.NP_PRODUCT_ATTENTION_OUTPUT, model.width, model.query_width, model.width),
        (lib.NP_PRODUCT_NEURONS, neurons, model.width, model.width),
    )
    participant = _Participant(manifest)
    for length in graph_tokens(tokens):
        products.begin(participant)  # type: ignore[arg-type]
        for kind, rows, columns, out in shapes:
            for number in range(of := 3 if kind == lib.NP_PRODUCT_NEURONS else 1):
                participant.rows.append(participant.of(kind, rows, columns))
                product = ffi.new("np_product *")
                product.kind, product.rows, product.columns, product.inputs_stride = kind, rows, columns, columns
                product.number, product.count = number, of
                product.tokens, product.outputs_stride = min(length, tokens), out
                product.inputs = ffi.cast("float *", ffi.from_buffer(inputs))
                product.outputs = ffi.cast("float *", ffi.from_buffer(outputs))
                products(participant, product)  # type: ignore[arg-type]
        products.end()
    # The peak resident size, less what other processes share.
    peak = _status_bytes("VmHWM") - (_status_bytes("VmRSS") - _pss_bytes())
    planned = runtime_bytes(manifest, f"onnx:{provider}", neurons=neurons, tokens=tokens)
    return {"measured_bytes": peak - before, "planned_bytes": planned}


class _Participant:
    """A fake participant that hands out equal rows for the products in order."""

    def __init__(self, manifest: Manifest) -> None:
        self._type, self._kept = ROW_TYPES[manifest.quantization], []  # type: tuple[int, list[Any]]
        self.rows: list[Any] = []

    def of(self, kind: int, rows: int, columns: int) -> Any:
        quants = ffi.new("uint8_t[]", b"\x5a" * lib.np_quant_bytes(self._type, columns))
        scales = ffi.new("uint16_t[]", [0x2000] * (lib.np_scale_bytes(self._type, columns) // 2))
        place = ffi.new("np_product_rows *")
        place.kind, place.rows, place.columns = kind, rows, columns
        for matrix in range(3 if kind == lib.NP_PRODUCT_NEURONS else 1):
            pointers = ffi.new("void *[]", [quants] * rows), ffi.new("void *[]", [scales] * rows)
            place.types[matrix] = self._type
            place.quants[matrix], place.scales[matrix] = pointers
            self._kept += pointers
        self._kept += (quants, scales)
        return place

    def next_rows(self) -> Any:
        return self.rows.pop(0) if self.rows else ffi.new("np_product_rows *")

    def open_rows(self, rows: Any) -> None:
        pass

    def close_rows(self) -> None:
        pass

    def product(self, product: Any, rows: Any, tokens: Any, out: Any) -> None:
        out.fill(0)


def _status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * KIB


def _pss_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    report = measure(Package.open(Path(sys.argv[1])).manifest, sys.argv[2], int(sys.argv[3]))
    print(json.dumps(report), flush=True)
    os._exit(0)  # the emulator takes long to end

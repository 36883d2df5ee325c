"""What part of a prompt a neural processor waits for rows of weights, with a device that takes a phone's time.

    python -m tests.bench.npu_pipeline PACKAGE DEVICE [OPTION OF up ...]

One JSON line for each repetition: the counters of the prompt's steps, and the share of the time that the device, free
and asked for a product, had no rows for it. DEVICE: one that plans/lab/simulate knows.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from neuronpipe.launch.client import attach
from neuronpipe.plans.lab.simulate.device_file import read_device
from neuronpipe.protocol.messages.client import Finished
from neuronpipe.protocol.messages.request import Generate

from tests.npu_device import DEVICE
from tests.pipeline import Run, Shell

REPETITIONS = 5
PROMPT_TOKENS = 512
SHOWN = ("ms", "graphs_ms", "rows_wait_ms", "rows_ready", "rows_late", "flash_ms", "read_bytes", "steps")


def main(package: Path, device: str, options: list[str]) -> None:
    """Print the lines."""
    phone = read_device(device)
    os.environ[DEVICE] = f"{phone.npu_tflop_per_s.value},{phone.npu_start_us.value}"
    prompt = [1 + n % 400 for n in range(PROMPT_TOKENS)]
    words = ("--backend", "prefill=onnx:cpu", "--use", "prefill=tests.npu_device:Phone", *options)
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(Path(folder))
        with shell.up(package, *words, cwd=Path(__file__).parents[2]) as run:
            for repetition in range(REPETITIONS):
                prompt[0] = 1 + repetition  # nothing of it is kept from the time before
                cost = prefill_figures(run, prompt)
                waits = {"wait_share": round(cost["rows_wait_ms"] / cost["ms"], 4)}
                print(json.dumps(waits | {name: round(cost[name], 3) for name in SHOWN}), flush=True)
        shell.end()


def prefill_figures(run: Run, prompt: list[int]) -> dict[str, float]:
    """The figures of a prompt's steps."""
    ask = Generate(request="test", tokens=tuple(prompt), max_tokens=1, temperature=0.0, share_prefix=False)
    with attach(run.path) as client:
        return next(one.prefill for one in client.request(ask) if isinstance(one, Finished))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])

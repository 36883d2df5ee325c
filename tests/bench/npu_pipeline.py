"""The share of a prompt's time that an emulated NPU with a phone's timing waits for rows of weights.

    python -m tests.bench.npu_pipeline PACKAGE DEVICE [OPTION OF up ...]

Prints a JSON line for each repetition: the counters of the prompt's steps, and the share of the time in which the
device was free and had a product to compute, but no rows. DEVICE: a device of plans/lab/simulate.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from neuronpipe.launch.client import attach
from neuronpipe.plans.lab.devices.device_file import read_device
from neuronpipe.protocol.messages.client import Finished
from neuronpipe.protocol.messages.request import Generate

from tests.npu_device import DEVICE
from tests.pipeline import Run, Shell

REPETITIONS = 5
PROMPT_TOKENS = 512
FIGURES = ("ms", "graphs_ms", "rows_wait_ms", "rows_ready", "rows_late", "flash_ms", "read_bytes", "steps")


def main(package: Path, device: str, options: list[str]) -> None:
    """Run the prompts and print a line for each."""
    phone = read_device(device)
    os.environ[DEVICE] = f"{phone.npu_tflop_per_s.value},{phone.npu_start_us.value}"
    prompt = [1 + n % 400 for n in range(PROMPT_TOKENS)]
    words = ("--backend", "prefill=onnx:cpu", "--use", "prefill=tests.npu_device:Phone", *options)
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(Path(folder))
        with shell.up(package, *words, cwd=Path(__file__).parents[2]) as run:
            for repetition in range(REPETITIONS):
                prompt[0] = 1 + repetition  # so that nothing of the last prompt is reused
                cost = prefill_figures(run, prompt)
                waits = {"wait_share": round(cost["rows_wait_ms"] / cost["ms"], 4)}
                print(json.dumps(waits | {name: round(cost[name], 3) for name in FIGURES}), flush=True)
        shell.end()


def prefill_figures(run: Run, prompt: list[int]) -> dict[str, float]:
    """Return the figures of a prompt's steps."""
    ask = Generate(request="test", tokens=tuple(prompt), max_tokens=1, temperature=0.0, share_prefix=False)
    with attach(run.path) as client:
        return next(message.prefill for message in client.request(ask) if isinstance(message, Finished))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])

"""Hot blocks on an OpenCL device, through the whole pipeline: the same tokens with and without, whatever the memory,
who takes part and who is killed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.supervisor.watchdog import STOPPED_S
from neuronpipe.plans.convert import convert
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.plans.plan.offloaded_blocks import MATRICES

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.conformance.specs import SPECS, write_package
from tests.opencl import require_opencl
from tests.pipeline import SLOWER, Run, Shell, eventually

require_opencl()

HERE = Path(__file__).resolve().parents[2]
PROMPT = "def main(arguments):\n    for name in arguments"
OPENCL = ("--backend", "accelerator=opencl")
BLOCKS = 15  # of a layer of the demo
REPLACED_S = 10.0 * SLOWER


@pytest.fixture(scope="module")
def undisturbed(long_shell: Shell) -> dict[str, list[int]]:
    """What the demo says without an accelerator, by mode."""
    answers = {}
    for mode in ("exact", "predicted"):
        with long_shell.up(DEMO, "--mode", mode) as run:
            answers[mode] = run.ask(PROMPT, 32)["token_ids"]
    return answers


@pytest.fixture(scope="module")
def run(long_shell: Shell) -> Iterator[Run]:
    """One run for all that kill or count."""
    with long_shell.up(DEMO, *OPENCL, "--workers", "2", "--sequences", "4", "--gpu-memory", "64MiB") as live:
        yield live


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("exact", "--workers 1 --ffn-resident 25% --gpu-memory 4MiB"),
        pytest.param("exact", "--workers 2 --gpu-memory 1GiB", marks=pytest.mark.nightly),
        pytest.param("predicted", "--workers 2 --ffn-resident 40% --gpu-memory 8MiB", marks=pytest.mark.nightly),
        pytest.param("predicted", "--workers 1", marks=pytest.mark.nightly),
    ],
)
def test_the_same_tokens_with_an_accelerator(
    shell: Shell, undisturbed: dict[str, list[int]], mode: str, words: str
) -> None:
    with shell.up(DEMO, *OPENCL, "--mode", mode, *words.split()) as run:
        answer = run.ask(PROMPT, 32)
        compute = read_plan(run.path / "plan.json").compute
    assert answer["token_ids"] == undisturbed[mode]
    assert compute.held_blocks
    if compute.max_offloaded_blocks() == BLOCKS:
        assert answer["accelerator_share"] == 1, "what the device has, nobody else computes"
        if compute.held_matrices == MATRICES:
            assert answer["accelerator_matrix_share"] == 1
    else:
        assert compute.max_offloaded_blocks() / BLOCKS < answer["accelerator_share"] < 1, "its blocks are the hottest"


@pytest.mark.nightly
def test_who_has_all_blocks_leaves_nothing_to_read(shell: Shell, undisturbed: dict[str, list[int]]) -> None:
    with shell.up(DEMO, *OPENCL, "--workers", "1", "--ffn-resident", "15%", "--gpu-memory", "1GiB") as run:
        answer = run.ask(PROMPT, 32)
    assert answer["token_ids"] == undisturbed["exact"]
    assert answer["accelerator_share"] == answer["accelerator_matrix_share"] == 1


@pytest.mark.nightly
def test_texts_that_share_steps_are_each_as_alone(run: Run, undisturbed: dict[str, list[int]]) -> None:
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(run.ask(PROMPT, 32))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer["token_ids"] for answer in answers] == 4 * [undisturbed["exact"]]


def restarts(run: Run, role: str) -> int:
    return sum(one.restarts for one in run.status().processes if one.role == role)


@pytest.mark.parametrize("role", ["accelerator", "decode"])
def test_the_text_goes_on_through_a_kill(run: Run, undisturbed: dict[str, list[int]], role: str) -> None:
    """Without it the decode workers compute its blocks and matrices; and it comes back."""
    before = restarts(run, role)
    killed = []

    def kill(_: Any) -> None:
        if len(killed) < 1:
            killed.append(os.kill(run.pid(role), signal.SIGKILL))

    answer = run.ask(PROMPT, 32, seen=kill)
    assert killed
    assert answer["token_ids"] == undisturbed["exact"]
    assert eventually(lambda: run.status().ready, 30)
    assert restarts(run, role) == before + 1
    again = run.ask(PROMPT, 32)
    assert again["token_ids"] == undisturbed["exact"]
    assert again["accelerator_share"] > 0
    assert again["accelerator_matrix_share"] > 0


def test_the_text_goes_on_through_a_stop_and_the_stopped_process_is_replaced(
    run: Run, undisturbed: dict[str, list[int]]
) -> None:
    """It keeps what it has claimed of a step until the watchdog ends it; then as after a kill."""
    before, stopped = restarts(run, "accelerator"), list[int]()

    def stop(_: Any) -> None:
        if not stopped:
            stopped.append(run.pid("accelerator"))
            os.kill(stopped[0], signal.SIGSTOP)

    began = time.monotonic()
    answer = run.ask(PROMPT, 32, seen=stop)
    assert answer["token_ids"] == undisturbed["exact"]
    assert STOPPED_S < time.monotonic() - began < STOPPED_S + REPLACED_S
    assert eventually(lambda: run.status().ready, 30)
    assert restarts(run, "accelerator") == before + 1
    assert run.pid("accelerator") != stopped[0]
    assert "ended by the watchdog: a signal stopped it for" in (run.path / "accelerator.0.log").read_text()
    again = run.ask(PROMPT, 32)
    assert again["token_ids"] == undisturbed["exact"]
    assert again["accelerator_share"] > 0


@pytest.mark.nightly
def test_a_device_that_is_lost_in_the_middle_of_a_step_costs_no_token(
    shell: Shell, undisturbed: dict[str, list[int]]
) -> None:
    """Its successor does not find it, and the run goes on without."""
    (shell.folder / "lost.py").write_text(
        "from neuronpipe.protocol.errors import UserError\n"
        "from neuronpipe.services.offload.accelerator import AcceleratorService\n"
        "class Lost(AcceleratorService):\n"
        "    def __init__(self, job):\n"
        "        if job.incarnation:\n"
        "            raise UserError('the device is gone')\n"
        "        super().__init__(job)\n"
        "    def compute(self, step):\n"
        "        if step.positions[0] > 20:\n"
        "            self._worker._backend._blocks._layers[2].values = object()\n"
        "        return super().compute(step)\n"
    )
    with shell.up(DEMO, *OPENCL, "--use", "accelerator=lost:Lost", "--workers", "1", cwd=shell.folder) as run:
        answer = run.ask(PROMPT, 32)
        assert answer["token_ids"] == undisturbed["exact"]
        assert 0 < answer["accelerator_share"] < 1, "it computed until it was lost"
        assert 0 < answer["accelerator_matrix_share"] < 1
        assert not run.has("accelerator")
        assert eventually(lambda: run.status().ready, 30), "nothing is starting any more"
        states = {one.role: one for one in run.status().processes}
        assert (states["accelerator"].state, states["accelerator"].pid) == ("gone", 0)
        assert states["accelerator"].work == "decode workers compute its blocks"
        assert states["decode"].work == f"all {BLOCKS} blocks"
        shown = shell.call("status", "--run", run.path).out
        assert ": ready, up" in shown
        assert "gone" in shown
        assert "starting" not in shown
        watched = shell.call("watch", run.path, "--once").out
        assert "gone" in watched
        assert "accelerator.0: decode workers compute its blocks" in watched
        again = run.ask(PROMPT, 32)
        assert again["token_ids"] == undisturbed["exact"]
        assert "accelerator_share" not in again
        assert "Traceback" in (run.path / "accelerator.0.log").read_text()


FAULTS = {
    "an error of OpenCL's": "pyopencl.enqueue_copy(queue, bytearray(64), pyopencl.Buffer(queue.context, 1, 4))",
    "a signal": "os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("an error of OpenCL's", "clEnqueueReadBuffer failed: INVALID_VALUE", marks=pytest.mark.nightly),
        ("a signal", "it left no message; was it killed by the system for lack of memory?"),
    ],
)
def test_run_says_in_one_line_why_it_went_on_without(shell: Shell, fault: str, words: str) -> None:
    """In the middle of a step, while rows of a held matrix are wanted. The log with the reason goes with the run."""
    (shell.folder / "failing.py").write_text(
        "import os, pyopencl\n"
        "from neuronpipe.services.offload.accelerator import AcceleratorService\n"
        "class Failing(AcceleratorService):\n"
        "    def compute(self, step):\n"
        "        backend, first = self._worker._backend, self._service._hello.incarnation == 0\n"
        "        queue = backend._matrices._queue\n"
        "        if step.positions[0] > 20 and first:\n"
        f"            backend._matrices = lambda wanted: {FAULTS[fault]}\n"
        "        return super().compute(step)\n"
    )
    asked = ("run", DEMO, "-p", PROMPT, "-n", "60", "--ignore-end", "--temperature", "0", "--workers", "1")
    alone = shell.call(*asked, cwd=shell.folder)
    failed = shell.call(*asked, *OPENCL, "--use", "accelerator=failing:Failing", cwd=shell.folder)
    assert (alone.code, failed.code, failed.out) == (0, 0, alone.out)
    (said,) = [line for line in failed.errors.splitlines() if "accelerator.0" in line]
    assert said.startswith(
        "neuronpipe: accelerator.0 died once and was started again; decode workers computed its blocks"
    )
    assert said.endswith(words)


def test_status_says_who_computes_with_which_numerics(run: Run, long_shell: Shell) -> None:
    numerics = {one.role: one.numerics for one in run.status().processes}
    assert numerics["accelerator"] == numerics["decode"]
    shown = long_shell.call("status", "--run", run.path).out
    assert f"{numerics['accelerator']} by opencl, all {BLOCKS} blocks, output" in shown
    assert f"{numerics['decode']}, none of {BLOCKS} blocks" in shown
    backends = {one.role: one.backend for one in run.status().processes}
    assert backends["accelerator"] == "opencl"
    assert backends["decode"] == ""


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--backend", "accelerator=opencl:nobody"), "no device is called that"),
        (("--backend", "accelerator=opencl", "--gpu-memory", "64KiB"), "did you mean 64MiB?"),
        (("--backend", "accelerator=cpu"), "an accelerator's backend is opencl"),
        (("--backend", "decode=opencl"), "write accelerator=opencl"),
        (("--gpu-memory", "1GiB"), "name one with --backend accelerator=opencl"),
        (("--backend", "accelerator=opencl", "--without", "pipeline"), "it is part of the pipeline"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(shell: Shell, options: tuple[str, ...], why: str) -> None:
    assert why in shell.refused("run", DEMO, "-p", "a", *options)


def test_a_model_that_needs_an_exponential_is_refused(shell: Shell, tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", SPECS["qwen3"], "q8")
    assert "this model has silu" in shell.refused("plan", package.path, *OPENCL)


@pytest.mark.nightly
def test_damaged_weights_are_not_held(shell: Shell, tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", SPECS["scaled"], "q8")
    with package.bundles_path.open("r+b") as file:
        file.seek(5)
        file.write(b"\xff\x00")
    assert "layer 0, neurons 0 to" in shell.refused("up", package.path, *OPENCL)


@pytest.mark.nightly
def test_memory_is_kept(shell: Shell) -> None:
    """Of the driver, and of what the device holds, which shares this machine's memory here."""
    least = shell.json("plan", DEMO, *OPENCL)["memory"]["least_bytes"]
    limit = least + (4 << 20)
    with shell.up(DEMO, *OPENCL, "--memory", str(limit)) as run:
        run.ask(PROMPT, 32)
        assert shell.pss_bytes() < limit
        assert run.status().memory_peak_bytes < limit


@pytest.mark.nightly
def test_the_conformance_suite_tries_an_accelerator(shell: Shell) -> None:
    done = shell.call("conformance", "accelerator")
    assert done.code == 0, done.out
    assert "is started again after accelerator.0 was killed" in done.out


@pytest.mark.nightly
@pytest.mark.parametrize("kills", [pytest.param(0, marks=pytest.mark.nightly), 3])
def test_how_much_it_computes_follows_the_batch(shell: Shell, undisturbed: dict[str, list[int]], kills: int) -> None:
    """Texts come and go, so that every step has another share than the last; and it dies meanwhile."""
    file, options = shell.folder / "plan.json", (*OPENCL, "--sequences", "4", "--gpu-memory", "1GiB")
    assert shell.call("plan", DEMO, *options, "-o", file).code == 0
    made = read_plan(file)
    compute = dataclasses.replace(made.compute, held_blocks=(BLOCKS, 3, 11, 0))
    file.write_text(dataclasses.replace(made, compute=compute).to_json())
    lengths = [*range(1, 32, 3), 32]
    answers: dict[int, Any] = {}

    def ask(numbers: range) -> None:
        for number in numbers:
            answers[number] = run.ask(PROMPT, lengths[number % len(lengths)])["token_ids"]

    with shell.up(DEMO, "--plan", file) as run:
        threads = [threading.Thread(target=ask, args=(range(first, 60, 4),)) for first in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(kills):
            time.sleep(0.7)
            with contextlib.suppress(StopIteration, ProcessLookupError):
                os.kill(run.pid("accelerator"), signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert run.status().steps > 100
        assert restarts(run, "accelerator") <= kills
    for number, found in answers.items():
        assert found == undisturbed["exact"][: lengths[number % len(lengths)]], number
    assert len(answers) == 60


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("quantization", "output", "down"),
    [pytest.param("q4", "q8", "q4", marks=pytest.mark.nightly), ("q4k", "q6k", "q5k")],
)
def test_matrices_in_other_quantizations_than_the_rest_give_the_same_tokens(
    shell: Shell, tmp_path: Path, quantization: Quantization, output: Quantization, down: Quantization
) -> None:
    recipe = dataclasses.replace(TINY, name="mixed", width=128, neurons=512, head_width=32)
    package = convert(
        write_checkpoint(tmp_path / "source", recipe),
        tmp_path / "package",
        quantization=quantization,
        activation="relu",
    )
    manifest = package.manifest
    assert [manifest.quantization_of(name) for name in ("output", "layers.0.qkv")] == [output, quantization]
    assert manifest.row_quantization("down") == down
    answers = []
    for words in ((), (*OPENCL, "--gpu-memory", "64MiB")):
        with shell.up(package.path, "--workers", "1", *words) as run:
            answers.append(run.ask("a b c", 16))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[1]["accelerator_matrix_share"] == 1

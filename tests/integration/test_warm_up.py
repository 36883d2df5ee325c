"""Warm-up of a real run: it is shown while it lasts, and a text that comes meanwhile does not break its reads up."""

import dataclasses
import json
import os
import signal
import time

from neuronpipe.launch.client import show_warm_up
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.layouts.run import BOARD_FLASH
from neuronpipe.protocol.messages.client import WarmUp

from tests.pipeline import PATIENCE_S, Run, Shell, eventually


def warmed(run: Run) -> bool:
    warm_up = run.status().warm_up
    return warm_up is not None and warm_up.done


def test_a_run_that_takes_long_to_start_is_said_to_start(shell: Shell) -> None:
    """By whoever waits for it, and by whoever looks."""
    (shell.folder / "late.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from neuronpipe.services.loader.loader_service import LoaderService\n"
        "class Late(LoaderService):\n"
        "    def __init__(self, job):\n"
        "        while not Path('go').exists():\n"
        "            time.sleep(0.01)\n"
        "        super().__init__(job)\n"
    )
    place = shell.folder / "run"
    up = shell.start("up", "--run", place, "--use", "loader=late:Late", cwd=shell.folder)
    assert up.stderr is not None
    said = ""
    while not said.startswith("neuronpipe: starting, "):
        said = up.stderr.readline()
        assert said
    assert f"{place}: starting, up " in shell.call("status", "--run", place).out
    assert json.loads(shell.call("watch", place, "--once", "--json").out.splitlines()[-1])["ready"] is False
    ask = shell.start("ask", "--run", place, "-n", "2", "import os")
    assert ask.stderr is not None
    assert ask.stderr.readline().startswith("neuronpipe: starting, ")
    (shell.folder / "go").touch()
    assert "tokens" in ask.communicate(timeout=PATIENCE_S)[1]
    assert up.communicate(timeout=PATIENCE_S)[0].startswith(f"up: {place}\n")
    Run(shell, place).down()


def test_up_waits_for_warm_memory_when_asked_to(shell: Shell) -> None:
    package = Package.open(DEMO)
    with shell.up(DEMO, "--warm") as run:
        status = run.status()
        bundles_bytes = package.bundles_path.stat().st_size
        assert status.warm_up is not None
        assert (status.warm_up.loaded_bytes, status.warm_up.total_bytes) == (bundles_bytes, bundles_bytes)
        assert status.warm_up.left_s == 0
        shown = shell.json("status", "--run", run.path)["warm_up"]
        assert shown["bytes_per_s"] == status.warm_up.bytes_per_s > 0  # it ends with warm-up
        assert status.flash_bytes == bundles_bytes  # the file was read once, from end to end
        answer = run.ask("def f(x):", 8)
        assert (answer["flash"]["bytes"], answer["flash"]["miss_rate"]) == (0, 0)
        said = shell.call("status", "--run", run.path).out
        assert "warming up" not in said


def test_warm_up_reads_long_stretches_and_so_does_a_text_that_comes_meanwhile(shell: Shell) -> None:
    """Without it the text's clusters were read one by one, and the rest around them."""
    with shell.up(DEMO) as run:
        asked = run.ask("import os", 4)
        assert eventually(lambda: warmed(run))
        file_bytes = Package.open(DEMO).bundles_path.stat().st_size
        assert file_bytes <= run.status().flash_bytes < 1.25 * file_bytes  # once, and a few gaps that are there already
        assert run.ask("import os", 4)["token_ids"] == asked["token_ids"]
        clusters = 2 * Package.open(DEMO).manifest.clusters
        assert asked["flash"]["reads"] < clusters / 8


def test_half_of_memory_is_warmed_up_with_what_fits(shell: Shell) -> None:
    with shell.up(DEMO, "--ffn-resident", "50%", "--warm") as run:
        warm_up = run.status().warm_up
        assert warm_up is not None
        assert warm_up.done
        assert 0 < warm_up.total_bytes < 0.6 * Package.open(DEMO).bundles_path.stat().st_size


def test_a_killed_loader_goes_on_where_it_was(shell: Shell) -> None:
    with shell.up(DEMO, "--warm") as run:
        before = run.ask("def f(x):", 8)["token_ids"]
        os.kill(run.pid("loader"), signal.SIGKILL)
        assert eventually(lambda: run.status().ready and run.ask("def f(x):", 8)["token_ids"] == before, PATIENCE_S)


def test_nothing_to_warm_up_is_not_waited_for(shell: Shell) -> None:
    began = time.monotonic()
    with shell.up(DEMO, "--ffn-resident", "30%", "--without", "cache", "--warm") as run:
        warm_up = run.status().warm_up
        assert warm_up is None or warm_up.done
    assert time.monotonic() - began < PATIENCE_S / 2


def test_it_is_shown_in_part() -> None:
    assert show_warm_up(WarmUp(loaded_bytes=1 << 30, total_bytes=4 << 30)) == "25 %, 1.00 GiB of 4.00 GiB"
    told = WarmUp(loaded_bytes=1 << 30, total_bytes=4 << 30, bytes_per_s=1.5 * (1 << 30), left_s=2.1)
    assert show_warm_up(told) == "25 %, 1.00 GiB of 4.00 GiB, 1.50 GiB/s, 3 s left"
    assert show_warm_up(dataclasses.replace(told, left_s=300)).endswith(", 5 min left")
    assert show_warm_up(None) == "not begun"


def test_speed_and_time_are_what_the_loader_tells() -> None:
    board = [0] * 16
    assert WarmUp.on_board(board) is None
    for name, value in (("warm_up_bytes", 4000), ("warm_up_left_bytes", 3000)):
        board[BOARD_FLASH.index(name)] = value
    assert WarmUp.on_board(board) == WarmUp(loaded_bytes=1000, total_bytes=4000)  # a loader that does not
    board[BOARD_FLASH.index("warm_up_ns")] = 2_000_000_000
    assert WarmUp.on_board(board) == WarmUp(loaded_bytes=1000, total_bytes=4000, bytes_per_s=500, left_s=6.0)

"""Memory and time that a process takes to read a tokenizer.json, as runs read it and by the `tokenizers` library alone.

    python -m tests.bench.tokenizer_memory FILE...

Each figure is from a process of its own, which had read the demo's tokenizer before.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from neuronpipe.launch.planning import DEMO
from neuronpipe.native import lib
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer, LibraryTokens

READERS = {"tables": FileTokenizer, "library": LibraryTokens}


def resident_bytes(name: str) -> int:
    """Return VmRSS, the resident memory of this process, or VmHWM, its largest so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def measure(reader: str, file: Path) -> None:
    """Print what reading this file takes."""
    READERS[reader]((DEMO / "tokenizer.json").read_bytes())
    before_bytes, began = resident_bytes("VmRSS"), time.monotonic()
    tokenizer = READERS[reader](file.read_bytes())
    took_s, peak_bytes = time.monotonic() - began, resident_bytes("VmHWM") - before_bytes
    lib.np_memory_give_back()
    kept_bytes = resident_bytes("VmRSS") - before_bytes
    del tokenizer
    print(f"{file}, {file.stat().st_size / 1e6:.1f} MB, {reader}: {took_s:.2f} s, {peak_bytes / 1e6:.0f} MB", end="")
    print(f" while reading, {kept_bytes / 1e6:.0f} MB after it")


def main() -> None:
    """Measure every file in both ways."""
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], Path(sys.argv[3]))
        return
    for file in sys.argv[1:]:
        for reader in READERS:
            command = (sys.executable, "-m", "tests.bench.tokenizer_memory", "--measure", reader, file)
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

"""What stays of a large tokenizer: reading it takes twice as much, which is given back."""

from __future__ import annotations

import json
import platform
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel

TOKENS = 32_000
MAX_TIMES_FILE = 10  # 14 before memory was given back, 7 since
SCRIPT = """
import sys
from neuronpipe.launch.planning import DEMO
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer

def resident_kb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))

small = FileTokenizer((DEMO / "tokenizer.json").read_bytes())  # brings the library in
before_kb = resident_kb()
large = FileTokenizer(open(sys.argv[1], "rb").read())
print(1024 * (resident_kb() - before_kb))
"""


def write_tokenizer(path: Path) -> None:
    """Byte-level BPE of random merges."""
    draw, names = random.Random(1), sorted(ByteLevel.alphabet())
    known, merges = set(names), []
    while len(names) < TOKENS:
        parts = draw.choice(names), draw.choice(names[:2000])
        name = "".join(parts)
        if len(name) <= 14 and name not in known:
            known.add(name)
            names.append(name)
            merges.append(parts)
    model = {"type": "BPE", "vocab": {name: n for n, name in enumerate(names)}, "merges": merges}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": decoder, "decoder": decoder, "model": model}
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in its own way")
def test_memory_that_reading_a_tokenizer_took_is_given_back(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    write_tokenizer(file)
    grown = int(subprocess.run([sys.executable, "-c", SCRIPT, file], check=True, capture_output=True).stdout)
    assert grown < MAX_TIMES_FILE * file.stat().st_size

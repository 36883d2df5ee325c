"""What a large tokenizer takes: its tables, and while it is read the file besides."""

from __future__ import annotations

import json
import platform
import random
import subprocess
import sys
from pathlib import Path

import pytest
from neuronpipe.plans.package.byte_pair_tokens import tokenizer_bytes
from tokenizers.pre_tokenizers import ByteLevel

TOKENS = 128_000
MAX_TIMES_FILE = 1.2  # 7 when the library had read it, and 14 meanwhile
SCRIPT = """
import sys
from neuronpipe.launch.planning import DEMO
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer

def kb(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

small = FileTokenizer((DEMO / "tokenizer.json").read_bytes())  # brings the library in
before_kb = kb("VmRSS")
large = FileTokenizer(open(sys.argv[1], "rb").read())
print(1024 * (kb("VmRSS") - before_kb), 1024 * (kb("VmHWM") - before_kb))
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
def test_a_tokenizer_takes_what_plans_count_and_gives_back_what_reading_took(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    write_tokenizer(file)
    done = subprocess.run([sys.executable, "-c", SCRIPT, file], check=True, capture_output=True)
    kept_bytes, peak_bytes = map(int, done.stdout.split())
    assert kept_bytes < MAX_TIMES_FILE * file.stat().st_size
    assert peak_bytes < tokenizer_bytes(file.stat().st_size, compact=True)

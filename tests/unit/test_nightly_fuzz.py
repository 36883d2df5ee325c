"""The fuzz targets of tests/nightly/fuzz.py: they call what they test as the product does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline import PATIENCE_S

pytest.importorskip("llguidance")
ROOT = Path(__file__).parents[2]
MAX_BYTES = 512 << 20  # what the program itself needs is less than half of it
PATTERNS = {"type": "string", "allOf": [{"pattern": f".*a.{{{n + 5}}}b{n}"} for n in range(40)]}
PROGRAM = """
import resource, sys
from tests.nightly.fuzz import check, schema_target
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]), int(sys.argv[1])))
check(schema_target(), sys.stdin.buffer.read())
"""


def test_a_schema_that_takes_minutes_or_gigabytes_is_refused_and_the_fuzzer_goes_on() -> None:
    command = [sys.executable, "-c", PROGRAM, str(MAX_BYTES)]
    data = json.dumps(PATTERNS).encode()
    done = subprocess.run(command, cwd=ROOT, input=data, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr.decode()[-500:]

"""What programs in C read from outside, under address and undefined behaviour sanitizers: understood, or dropped."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.test_wire import GOLDEN, documents, values

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
COMPILER = shutil.which(os.environ.get("CC", "cc"))
FEW = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x04\x06\x05READY"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler: install gcc or set CC")
Program = Callable[[str, bytes], subprocess.CompletedProcess[bytes]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    folder = tmp_path_factory.mktemp("edges")
    sources = [HERE / "program_edges.c", NATIVE / "client" / "wire.c", NATIVE / "client" / "run_context.c"]
    flags = ("-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}")
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    subprocess.run([str(COMPILER), *flags, *sanitizers, "-o", folder / "edges", *sources], check=True)
    environment = os.environ | {"NEURONPIPE_RUN": str(folder), "ASAN_OPTIONS": "detect_leaks=0"}

    def run(mode: str, content: bytes) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([folder / "edges", mode], input=content, env=environment, capture_output=True, timeout=60)

    return run


def framed(*bodies: bytes) -> bytes:
    """A message of these frames."""
    parts = []
    for number, body in enumerate(bodies):
        more = number + 1 < len(bodies)
        short = len(body) < 256
        head = struct.pack(">BB", more, len(body)) if short else struct.pack(">BQ", 2 | more, len(body))
        parts.append(head + body)
    return b"".join(parts)


def heard(program: Program, sent: Sequence[bytes]) -> list[list[str]]:
    """What is understood of each peer."""
    done = program("wire", b"".join(struct.pack("<I", len(one)) + one for one in sent))
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    said = done.stdout.decode(errors="replace").split(".\n")
    assert len(said) == len(sent) + 1
    return [one.splitlines() for one in said[:-1]]


def test_every_message_of_the_protocol_is_understood(program: Program) -> None:
    sent = [GREETING + READY + framed(b"NP2", frame) for frame in GOLDEN]
    for lines, frame in zip(heard(program, sent), GOLDEN, strict=True):
        content = msgpack.unpackb(frame)
        tokens = content.get("tokens")
        numbers = tokens if isinstance(tokens, list) else []
        count = len(numbers) if isinstance(tokens, list) else -1
        assert lines == [f"{content['type']} {content.get('step', 0)} {count} {sum(numbers)}"]


@FEW
@given(st.lists(st.binary(max_size=300), max_size=20))
def test_any_bytes(program: Program, sent: list[bytes]) -> None:
    heard(program, sent)
    heard(program, [GREETING + READY + one for one in sent])


parts = st.binary(max_size=40) | st.sampled_from([b"NP2", b"NP3", *GOLDEN]) | values.map(msgpack.packb)


@FEW
@given(st.lists(st.lists(parts, min_size=1, max_size=4), max_size=20))
def test_any_frames(program: Program, messages: list[list[bytes]]) -> None:
    heard(program, [GREETING + READY + framed(*frames) for frames in messages])


@FEW
@given(
    st.lists(
        st.tuples(
            st.sampled_from(GOLDEN), st.dictionaries(st.integers(0, 999), st.integers(0, 255)), st.integers(1, 500)
        ),
        max_size=20,
    )
)
def test_damaged_messages(program: Program, drawn: list[tuple[bytes, dict[int, int], int]]) -> None:
    sent = []
    for frame, changes, keep in drawn:
        damaged = bytearray(frame)
        for place, value in changes.items():
            damaged[place % len(damaged)] = value
        sent.append(GREETING + READY + framed(b"NP2", bytes(damaged[:keep])))
        sent.append((GREETING + READY + framed(b"NP2", frame))[: keep + 70])
    heard(program, sent)


@FEW
@given(st.binary(max_size=100) | documents.map(lambda value: json.dumps(value).encode()), st.integers(0, 200))
def test_any_json(program: Program, content: bytes, keep: int) -> None:
    wrapped = b'{"a": {"b": 1.5}, "list": [1, 2], "text": "t", "more": ' + content + b"}"
    for text in (content, wrapped, wrapped[:keep]):
        assert program("json", text).returncode in (0, 2)
    whole = {"more": content.hex(), "a": {"b": 1.5}, "list": [1, 2], "text": "t"}
    good = program("json", json.dumps(whole).encode())
    assert good.stdout == b"1 1\n1.5\n1\n2\nt\n"

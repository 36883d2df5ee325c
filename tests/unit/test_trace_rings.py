"""Spans in shared memory: the same numbers in Python and C, one ring for each process, read from outside."""

from __future__ import annotations

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.protocol import layouts
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.protocol.memory.spans import FIELDS, KINDS, SPAN_BYTES
from neuronpipe.services.runtime.run_memory import RunMemory
from neuronpipe.services.runtime.trace import Trace, now


def test_kinds_have_the_numbers_of_the_native_library() -> None:
    native = {name: getattr(lib, name) for name in dir(lib) if name.startswith("NP_SPAN_")}
    assert {f"NP_SPAN_{kind.name.upper()}": kind.number for kind in KINDS} == native
    assert [kind.number for kind in KINDS] == list(range(1, len(KINDS) + 1))


def test_a_span_lies_in_memory_as_the_specification_says() -> None:
    assert ffi.sizeof("np_span") == SPAN_BYTES
    assert {name: int(offset) for offset, name, _ in FIELDS} == {
        name: ffi.offsetof("np_span", name) for name, _ in ffi.typeof("np_span").fields
    }


def test_each_process_writes_a_ring_of_its_own_and_the_oldest_spans_go() -> None:
    layout = layouts.trace(rings=2, spans=8)
    with Segment.create(layout) as segment:
        memory = RunMemory({"trace": segment}, {"trace": segment.map(writable=True)})
        first, second = Trace(memory, 0), Trace(memory, 1)
        for step in range(11):
            second.put(lib.NP_SPAN_SAMPLE, now(), value=5, step=step)
        first.put(lib.NP_SPAN_SEND, now(), step=77)
        with segment.map() as seen:
            assert list(seen.view("next")[::8]) == [1, 11]
            spans = np.frombuffer(seen.view("spans"), np.uint64).reshape(2, 8, 4).copy()
    assert spans[0, 0, 3] == 77
    assert not spans[0, 1:].any()
    assert sorted(spans[1, :, 3]) == list(range(3, 11))
    assert (spans[1, :, 0] <= spans[1, :, 1]).all()
    assert set(spans[1, :, 2]) == {lib.NP_SPAN_SAMPLE | 5 << 32}

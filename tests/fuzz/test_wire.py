"""Whatever bytes come, a reader either understands them or says so; it never fails in another way."""

import json
import os
import struct
import types
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from neuronpipe.protocol import layouts
from neuronpipe.protocol.channel import Connection, Listener, open_context
from neuronpipe.protocol.codec import MAGIC, Message, Vocabulary, encode
from neuronpipe.protocol.errors import NotRunning, UserError, WireError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.memory.layout import Layout
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.protocol.messages.lifecycle import Drained
from neuronpipe.protocol.messages.request import MAX_CALLS, MAX_THOUGHTS, Function, Thought
from neuronpipe.protocol.messages.worker import DRAFTED
from neuronpipe.protocol.run_directory import RUN_FILE, RunDirectory
from neuronpipe.protocol.spec import all_messages

EXAMPLES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
EVERY = Vocabulary(*all_messages())
GOLDEN_FILE = Path(__file__).parents[1] / "conformance" / "golden_messages.json"
GOLDEN = [bytes.fromhex(golden["frame"]) for golden in json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))]

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
keys = st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | st.binary(max_size=4), inner, max_size=3),
    max_leaves=8,
)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


def of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that fit an annotation of a message."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is types.UnionType:
        return st.none() | of(next(part for part in arguments if part is not types.NoneType))
    if origin is tuple:
        return st.lists(of(arguments[0]), max_size=4).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=8), of(arguments[1]), max_size=4)
    if isinstance(annotation, type) and issubclass(annotation, Message):
        return messages_of(annotation)
    return {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(),
        bytes: st.binary(),
        bool: st.booleans(),
    }[annotation]


@st.composite
def messages_of(draw: st.DrawFn, cls: type[Message]) -> Message:
    fields = {name: draw(of(hint)) for name, hint in get_type_hints(cls).items()}
    if "sequences" in fields and "positions" in fields:
        fields["sequences"] = fields["positions"] = fields["tokens"] = (*fields["tokens"], 1)
        blocks = (*fields["first_blocks"], 1)
        one = "accelerator.0" if fields["held_matrices"] else "decode.0"
        fields |= {"participants": (one,) * len(blocks), "first_blocks": blocks, "end_blocks": blocks}
        fields["tokens"] = (1, *(draw(st.sampled_from([1, DRAFTED])),) * (len(fields["tokens"]) - 1))
        states = draw(st.sampled_from([(), fields["tokens"]]))
        fields["states_from"] = fields["states_to"] = states
    elif cls.__name__ == "Prefill":
        fields["tokens"] = (*fields["tokens"], 1)
        fields["copy_from"] = None if fields["copy_from"] == fields["sequence"] else fields["copy_from"]
        fields["targets"] = fields["targets"][: len(fields["tokens"])] if fields["logits"] == "none" else ()
        fields["likely"] = abs(fields["likely"])
        fields["snapshot_tokens"] = fields["snapshot_slots"] = ()
        if draw(st.booleans()):
            fields |= {"tokens": (*fields["tokens"], 1), "snapshot_tokens": (1,), "snapshot_slots": (2,)}
            fields |= {"state_from": 3, "state_to": 4}
    elif cls.__name__ == "Save":
        fields["state_tokens"] = fields["state_slots"]
    elif cls.__name__ == "Thought":
        fields |= {name: fields[name] + "x" for name in ("before", "after")}
    elif cls.__name__ == "Calls":
        thoughts = tuple(draw(st.lists(messages_of(Thought), max_size=MAX_THOUGHTS)))
        fields |= {"thoughts": thoughts, "in_thought": bool(thoughts) and draw(st.booleans())}
        one_by_one = draw(st.sampled_from(["", "x"]))
        fields |= {f"parameter_{place}": one_by_one for place in ("before", "between", "after")}
        fields["argument_syntax"] = "" if one_by_one else fields["argument_syntax"]
        fields["functions"] = (*fields["functions"], draw(messages_of(Function)))
        fields |= {name: fields[name] + "x" for name in ("before", "between", "next")}
        fields["marker"], fields["most"] = (
            draw(st.sampled_from(["", fields["before"]])),
            draw(st.integers(1, MAX_CALLS)),
        )
    elif cls.__name__ == "Throttle":
        fields["share"], fields["for_s"] = draw(st.floats(0, 0.95)), draw(st.floats(1, 600))
    for packed in ("clusters", "slots", "tokens"):
        if isinstance(fields.get(packed), bytes):
            fields[packed] = fields[packed] * 4
    if cls.__name__ in ("Generate", "Score", "Tokenize"):
        text = "prompt" if cls.__name__ == "Generate" else "text"
        fields[text], fields["tokens"] = draw(st.sampled_from([("a", None), (None, (1, 2))]))
    return cls(**fields)


def understood_or_refused(frame: bytes) -> None:
    try:
        decoded = EVERY.decode(frame)
    except WireError:
        return
    written = encode(decoded)  # compared as bytes, since a NaN is not equal to itself
    assert encode(EVERY.decode(written)) == written


@pytest.mark.parametrize("cls", all_messages(), ids=lambda cls: cls.__name__)
def test_every_message_comes_back_as_it_was(cls: type[Message]) -> None:
    @settings(max_examples=40)
    @given(messages_of(cls))
    def round_trip(content: Message) -> None:
        assert Vocabulary(cls).decode(encode(content)) == content

    round_trip()


@EXAMPLES
@given(st.binary(max_size=300))
def test_any_bytes(frame: bytes) -> None:
    understood_or_refused(frame)


@EXAMPLES
@given(st.sampled_from([*(cls.__name__ for cls in all_messages()), "Other"]), st.dictionaries(keys, values, max_size=4))
def test_any_map(name: str, fields: dict[str, Any]) -> None:
    understood_or_refused(msgpack.packb({**fields, "type": name}))


@EXAMPLES
@given(st.sampled_from(all_messages()), st.data())
def test_the_right_fields_with_any_values(cls: type[Message], data: st.DataObject) -> None:
    fields = {name: data.draw(values) for name in get_type_hints(cls)}
    understood_or_refused(msgpack.packb({"type": cls.__name__, **fields}))


@EXAMPLES
@given(st.sampled_from(GOLDEN), st.dictionaries(st.integers(0, 999), st.integers(0, 255)), st.integers(0, 500))
def test_damaged_messages(frame: bytes, changes: dict[int, int], keep: int) -> None:
    damaged = bytearray(frame)
    for place, value in changes.items():
        damaged[place % len(damaged)] = value
    understood_or_refused(bytes(damaged[: max(1, keep)]))


@pytest.fixture
def line(tmp_path: Path) -> Iterator[tuple[Listener, Connection]]:
    endpoint = f"ipc://{os.path.relpath(tmp_path)}/control"
    with open_context() as context:
        yield Listener(context, CONTROL, endpoint), Connection(context, CONTROL, endpoint, "decode-0")


def seen(listener: Listener) -> int:
    """Messages that came, legal or not."""
    traffic = listener.traffic
    return traffic.received + traffic.garbage + traffic.unknown + traffic.foreign


parts = st.binary(max_size=40) | st.sampled_from([MAGIC, b"NP2", *GOLDEN])


@EXAMPLES
@given(batch=st.lists(st.lists(parts, min_size=1, max_size=4), max_size=20))
def test_any_frames_leave_a_listener_working(line: tuple[Listener, Connection], batch: list[list[bytes]]) -> None:
    listener, connection = line
    seen_before = seen(listener)
    for frames in batch:
        connection._socket.send_multipart(frames)
    farewell = Drained(role="fuzz", index=len(batch))
    connection.send(farewell)
    until = monotonic() + 10
    while listener.receive(100) != ("decode-0", farewell):
        assert monotonic() < until
    assert seen(listener) - seen_before == len(batch) + 1
    while connection.receive() is not None:  # the rejects of foreign versions
        pass


@EXAMPLES
@given(content=st.binary(max_size=200) | documents.map(lambda value: json.dumps(value).encode()))
def test_any_run_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RUN_FILE).write_bytes(content)
    with pytest.raises((UserError, NotRunning)) as caught:
        RunDirectory.find(tmp_path)
    assert "\n" not in str(caught.value)


@EXAMPLES
@given(header=st.binary(max_size=64), changes=st.dictionaries(st.integers(0, 31), st.integers(0, 255), max_size=3))
def test_any_segment_header(header: bytes, changes: dict[int, int]) -> None:
    layout = layouts.board(processes=3, sequences=2)
    with Segment.create(layout) as segment:
        good = bytearray(os.pread(segment.fd, 32, 0))
        for place, value in changes.items():
            good[place] = value
        for content in (header, bytes(good)):
            os.pwrite(segment.fd, content.ljust(64, b"\0"), 0)
            refusal = refusal_of(segment, layout)
            assert refusal is None or refusal.startswith("segment board: ")


def refusal_of(segment: Segment, layout: Layout) -> str | None:
    try:
        attached = Segment.attach(layout, segment.fd)
    except UserError as error:
        return str(error)
    assert attached.generation == struct.unpack_from("<I", os.pread(segment.fd, 32, 0), 16)[0]
    return None

"""The bytes of every message, as they were reviewed: a change of bytes is a change of the protocol.

To add a message, add its type and fields with an empty frame; the failing test shows the bytes to review and to put in.
"""

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
from neuronpipe.protocol.codec import Message, Vocabulary, encode, from_map
from neuronpipe.protocol.spec import all_messages

GOLDEN = json.loads((Path(__file__).parent / "golden_messages.json").read_text(encoding="utf-8"))
CLASSES = {cls.__name__: cls for cls in all_messages()}


def plain(value: Any) -> Any:
    """What msgpack would yield for a value of the file: arrays are tuples, {"hex": ...} is bytes."""
    if isinstance(value, list):
        return tuple(plain(item) for item in value)
    if isinstance(value, dict):
        if set(value) == {"hex"}:
            return bytes.fromhex(value["hex"])
        return {key: plain(item) for key, item in value.items()}
    return value


def message_of(golden: dict[str, Any]) -> Message:
    return from_map(CLASSES[golden["type"]], plain(golden["fields"]))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["type"])
def test_a_message_has_the_bytes_it_always_had(golden: dict[str, Any]) -> None:
    assert encode(message_of(golden)).hex() == golden["frame"]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["type"])
def test_the_bytes_are_read_as_the_message(golden: dict[str, Any]) -> None:
    frame = bytes.fromhex(golden["frame"])
    assert Vocabulary(CLASSES[golden["type"]]).decode(frame) == message_of(golden)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["type"])
def test_the_bytes_are_plain_msgpack_of_the_fields(golden: dict[str, Any]) -> None:
    """Any msgpack library sees what the specification says: a map of the type and the fields."""
    content = msgpack.unpackb(bytes.fromhex(golden["frame"]), use_list=False)
    assert content == {"type": golden["type"], **plain(golden["fields"])}


def test_every_message_has_golden_bytes() -> None:
    assert [golden["type"] for golden in GOLDEN] == list(CLASSES)

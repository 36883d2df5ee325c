"""The codec: strict about types, patient with what it does not know, and precise about what is wrong."""

from pathlib import Path
from typing import Any, Literal

import msgpack
import pytest
from neuronpipe.protocol import codec
from neuronpipe.protocol.codec import Message, Vocabulary, encode, message
from neuronpipe.protocol.errors import UnknownType, WireError
from neuronpipe.protocol.schema import describe


@message
class Inner(Message):
    """Nested in others."""

    size: int
    note: str = ""

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("size: expected 0 or more")


@message
class Everything(Message):
    """One field of every kind."""

    whole: int
    real: float = 0.5
    flag: bool = False
    text: str = ""
    raw: bytes = b""
    maybe: int | None = None
    choice: Literal[0, 1, "a"] = 0
    numbers: tuple[int, ...] = ()
    reals: tuple[float, ...] = ()
    named: dict[str, float] | None = None
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] | None = None


BOTH = Vocabulary(Everything, Inner)


def decode(**fields: Any) -> Message:
    return BOTH.decode(msgpack.packb({"type": "Everything", "whole": 1, **fields}))


def test_what_is_encoded_is_decoded_as_it_was() -> None:
    full = Everything(
        whole=-(2**63),
        real=-1.5,
        flag=True,
        text="Ж\0",
        raw=b"\0\xff",
        maybe=2**64 - 1,
        choice="a",
        numbers=(1, 2),
        reals=(0.5,),
        named={"x": 1.0},
        inner=Inner(size=3, note="n"),
        inners=(Inner(size=1), Inner(size=2)),
        by_name={"k": Inner(size=4)},
    )
    assert BOTH.decode(encode(full)) == full


def test_defaults_are_left_out() -> None:
    assert msgpack.unpackb(encode(Everything(whole=0))) == {"type": "Everything", "whole": 0}
    assert BOTH.decode(encode(Everything(whole=0))) == Everything(whole=0)


def test_unknown_fields_are_ignored() -> None:
    assert decode(colour="red", deep=[[{"a": [1]}]]) == Everything(whole=1)


def test_an_unknown_type_is_told_apart_from_garbage() -> None:
    with pytest.raises(UnknownType, match="'Later': no message of this link"):
        BOTH.decode(msgpack.packb({"type": "Later"}))
    with pytest.raises(UnknownType):
        Vocabulary(Inner).decode(encode(Everything(whole=1)))


def test_an_int_is_taken_for_a_float() -> None:
    decoded = decode(real=2, reals=[1, 0.5])
    assert isinstance(decoded, Everything)
    assert (type(decoded.real), decoded.reals) == (float, (1.0, 0.5))
    assert all(type(item) is float for item in decoded.reals)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"whole": True}, "Everything.whole: expected int"),
        ({"whole": 1.0}, "Everything.whole: expected int"),
        ({"real": True}, "Everything.real: expected float"),
        ({"flag": 1}, "Everything.flag: expected bool"),
        ({"text": b"x"}, "Everything.text: expected str"),
        ({"raw": "x"}, "Everything.raw: expected bytes"),
        ({"maybe": "x"}, "Everything.maybe: expected int"),
        ({"choice": 2}, 'Everything.choice: expected 0 or 1 or "a"'),
        ({"choice": True}, 'Everything.choice: expected 0 or 1 or "a"'),
        ({"choice": 1.0}, 'Everything.choice: expected 0 or 1 or "a"'),
        ({"choice": [1]}, 'Everything.choice: expected 0 or 1 or "a"'),
        ({"numbers": 1}, "Everything.numbers: expected array"),
        ({"numbers": [1, 2, 3, "4"]}, "Everything.numbers[3]: expected int"),
        ({"numbers": [1, False]}, "Everything.numbers[1]: expected int"),
        ({"reals": [0.5, None]}, "Everything.reals[1]: expected float"),
        ({"named": [1]}, "Everything.named: expected map"),
        ({"named": {"x": "1"}}, "Everything.named['x']: expected float"),
        ({"named": {b"x": 1.0}}, "Everything.named[\"b'x'\"]: expected a str as key"),
        ({"inner": 5}, "Everything.inner: expected map"),
        ({"inner": {"note": "n"}}, "Everything.inner.size: missing"),
        ({"inners": [{"size": 1}, {"size": None}]}, "Everything.inners[1].size: expected int"),
        ({"by_name": {"k": {"size": 1, "note": 2}}}, "Everything.by_name['k'].note: expected str"),
        ({"inner": {"size": -1}}, "Everything.inner: size: expected 0 or more"),
        ({"whole": msgpack.Timestamp(1)}, "Everything.whole: expected int"),
        ({"raw": msgpack.ExtType(5, b"x")}, "Everything.raw: expected bytes"),
    ],
)
def test_an_error_names_type_and_field(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(**fields)
    assert str(caught.value) == complaint


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x01",
        msgpack.packb([1]),
        msgpack.packb({}),
        msgpack.packb({"type": 1}),
        msgpack.packb({"type": "Inner"}),
        msgpack.packb({1: 2}),
        encode(Inner(size=1)) + b"\0",
        encode(Inner(size=1))[:-1],
        b"\x82\xa4type\xa5Inner\xa4note\xa2\xff\xfe",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x82\xa4type\xa5Inner\xa4size\xc7\x05\xff12345",
    ],
)
def test_garbage_is_a_wire_error(frame: bytes) -> None:
    with pytest.raises(WireError):
        BOTH.decode(frame)


def test_the_size_of_a_frame_is_bounded_both_ways() -> None:
    big = Everything(whole=1, raw=bytes(codec.MAX_FRAME_BYTES))
    with pytest.raises(WireError, match="more than the 16777216 of a frame"):
        encode(big)
    with pytest.raises(WireError, match="more than 16777216"):
        BOTH.decode(bytes(codec.MAX_FRAME_BYTES + 1))


def test_the_length_of_arrays_is_bounded() -> None:
    with pytest.raises(WireError, match="max_array_len"):
        decode(numbers=[1] * (codec.MAX_ARRAY_ITEMS + 1))


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, object(), "\ud800"])
def test_what_cannot_be_written_is_a_wire_error(value: Any) -> None:
    with pytest.raises(WireError, match="Everything: "):
        encode(Everything(whole=value))


@pytest.mark.parametrize("annotation", [int | str, tuple[int, int], dict[int, int], object, list[int]])
def test_an_annotation_the_wire_does_not_have_is_refused(annotation: Any) -> None:
    @message
    class Odd(Message):
        odd: annotation

    with pytest.raises(TypeError):
        Vocabulary(Odd).decode(msgpack.packb({"type": "Odd", "odd": 1}))


def test_the_name_of_the_type_is_not_a_field() -> None:
    @message
    class Odd(Message):
        type: str

    with pytest.raises(TypeError, match=r"Odd.type: this name is taken by the wire"):
        encode(Odd(type="x"))


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "int"),
        (int | None, "int or nil"),
        (tuple[float, ...], "array of float"),
        (dict[str, Inner], "map of Inner"),
        (Literal["a", 1], '"a" or 1'),
    ],
)
def test_types_are_described_in_words(annotation: Any, words: str) -> None:
    assert describe(annotation) == words


def test_the_client_library_speaks_the_same_version() -> None:
    source = (Path(__file__).parents[2] / "native/client/lifecycle.c").read_text("utf-8")
    assert f'pack_text(&p, "protocol", "{codec.VERSION}")' in source

"""Pulling from a hub that means harm: every answer has a bound, and every failure is one line with exit code 2."""

from __future__ import annotations

import gzip
import io
import json
import time
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.cli import main
from neuronpipe.plans.package.atomic_output import disk_usage_bytes
from neuronpipe.plans.pull import http_answers as answers
from neuronpipe.plans.pull import hub as hub_module

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.hub_mirror import INFO, Mirror, hub_mirror

Handler = BaseHTTPRequestHandler
BLOCK = b"x" * (1 << 16)
WEIGHTS = "model.safetensors"


def head(handler: Handler, status: int = 200, **headers: object) -> None:
    """Begin an answer."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()


def body(handler: Handler, data: bytes, **headers: object) -> None:
    """A whole answer."""
    head(handler, Content_Length=len(data), **headers)
    handler.wfile.write(data)


class Victim:
    """The one who pulls from the mirror."""

    def __init__(self, mirror: Mirror, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.mirror, self.data, self._capsys = mirror, data, capsys

    def refused(self, reference: str = "org/model") -> str:
        """What the pull says: it fails in one line, which a terminal can show."""
        code = main(["pull", reference])
        captured = self._capsys.readouterr()
        assert (code, captured.out) == (2, ""), captured
        assert "Traceback" not in captured.err
        assert captured.err.replace("\n", "").isprintable()
        assert len(captured.err) < 4000
        return captured.err.splitlines()[-1]

    def pulled(self) -> str:
        """What a pull says that succeeds, on stderr."""
        assert main(["pull", "org/model"]) == 0
        return self._capsys.readouterr().err

    def change(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Have the hub say something else of the repository."""

        def answer(handler: Handler, honest: bytes) -> None:
            info = json.loads(honest)
            change(info)
            body(handler, json.dumps(info).encode())

        self.mirror.hostile[INFO] = answer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file."""
    return write_checkpoint(tmp_path_factory.mktemp("source") / "model", TINY)


@pytest.fixture
def victim(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Victim]:
    """Somebody whose hub is a mirror that has the checkpoint as org/model."""
    with hub_mirror() as mirror:
        mirror.add("org/model", source)
        monkeypatch.setenv("HF_ENDPOINT", mirror.address)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path / "data"))
        monkeypatch.setattr(hub_module, "PAUSE_S", 0.01)
        monkeypatch.setattr(answers, "FIRST_WAIT_S", 0.01)
        yield Victim(mirror, tmp_path / "data", capsys)


def endless(handler: Handler, honest: bytes) -> None:
    """Send without end, and without saying how much it will be."""
    head(handler)
    while True:
        handler.wfile.write(BLOCK)


def endless_chunks(handler: Handler, honest: bytes) -> None:
    """The same in chunks."""
    head(handler, Transfer_Encoding="chunked")
    while True:
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(BLOCK), BLOCK))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
@pytest.mark.parametrize("send", [endless, endless_chunks])
def test_a_file_without_end_stops_at_the_length_that_was_announced(
    send: Callable[[Handler, bytes], None], name: str, victim: Victim, source: Path
) -> None:
    victim.mirror.hostile[name] = send
    size_bytes = (source / name).stat().st_size
    assert f"org/model: {name}: " in (line := victim.refused())
    assert f"sends more than the {size_bytes} bytes" in line or "damaged or truncated" in line
    assert disk_usage_bytes(victim.data) <= 2 * size_bytes


@pytest.mark.parametrize("send", [endless, endless_chunks])
def test_what_the_hub_says_of_a_repository_has_a_limit(
    send: Callable[[Handler, bytes], None], victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "MAX_SNAPSHOT_BYTES", 1 << 18)
    victim.mirror.hostile[INFO] = send
    assert "sends more than the 262144 bytes it may have" in victim.refused()


@pytest.mark.parametrize("name", [INFO, "config.json", WEIGHTS])
def test_a_compressed_answer_is_refused_and_not_unpacked(name: str, victim: Victim) -> None:
    def bomb(handler: Handler, honest: bytes) -> None:
        body(handler, gzip.compress(bytes(1 << 20)), Content_Encoding="gzip")

    victim.mirror.hostile[name] = bomb
    assert "sends it compressed (gzip)" in victim.refused()


def test_an_error_is_not_read_to_its_end(victim: Victim) -> None:
    def error(handler: Handler, honest: bytes) -> None:
        head(handler, 500)
        while True:
            handler.wfile.write(BLOCK)

    victim.mirror.hostile["config.json"] = error
    assert "answered 500" in victim.refused()


def test_another_length_than_the_hubs_is_refused_before_it_is_written(victim: Victim) -> None:
    victim.mirror.hostile["config.json"] = lambda handler, honest: body(handler, honest + b" ")
    assert "as its length, and sends" in victim.refused()


def test_an_answer_that_is_shorter_than_it_says_is_tried_again_and_then_named(victim: Victim) -> None:
    tries: list[int] = []

    def short(handler: Handler, honest: bytes) -> None:
        tries.append(1)
        head(handler)  # without a length: it ends with the connection

    victim.mirror.hostile["config.json"] = short
    assert "org/model: config.json: ended at byte 0 of" in victim.refused()
    assert len(tries) == hub_module.MAX_TRIES


def test_a_byte_for_each_connection_is_not_progress(victim: Victim) -> None:
    tries: list[int] = []

    def crumbs(handler: Handler, honest: bytes) -> None:
        tries.append(1)
        start = len(tries) - 1
        head(handler, 206 if start else 200, Content_Range=f"bytes {start}-{len(honest) - 1}/{len(honest)}")
        handler.wfile.write(honest[start : start + 1])

    victim.mirror.hostile["tokenizer.json"] = crumbs
    assert "tokenizer.json: ended at byte 6 of" in victim.refused()


def test_another_part_than_was_asked_for_is_refused(victim: Victim) -> None:
    def shifted(handler: Handler, honest: bytes) -> None:
        head(handler, 206, Content_Length=8, Content_Range=f"bytes 8-15/{len(honest)}")
        handler.wfile.write(honest[8:16])

    victim.mirror.hostile[WEIGHTS] = shifted
    assert "sends another part of it than was asked for" in victim.refused()
    victim.mirror.hostile[WEIGHTS] = lambda handler, honest: head(handler, 206, Content_Range="bytes x")
    assert "does not say which" in victim.refused()


def test_a_slow_hub_is_given_up(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    def drops(handler: Handler, honest: bytes) -> None:
        head(handler, Content_Length=len(honest))
        for byte in honest:
            handler.wfile.write(bytes([byte]))
            time.sleep(0.02)

    monkeypatch.setattr(answers, "WINDOW_S", 0.1)
    monkeypatch.setattr(hub_module, "MAX_TRIES", 2)
    victim.mirror.hostile["config.json"] = drops
    assert "too slow to go on" in victim.refused()


def test_a_head_that_trickles_is_given_up(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    def trickle(handler: Handler, honest: bytes) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            handler.wfile.write(b"x")
            time.sleep(0.02)

    monkeypatch.setattr(answers, "MAX_HEAD_S", 0.3)
    victim.mirror.hostile[INFO] = trickle
    assert "did not answer within" in victim.refused()


def test_a_hub_that_asks_to_wait_for_a_day_is_not_waited_for(victim: Victim) -> None:
    for headers in ({"Retry_After": 100000}, {"Retry_After": "Fri, 31 Dec 2999 23:59:59 GMT"}):
        for name in (INFO, "config.json"):
            for status in (429, 503):
                victim.mirror.hostile = {name: lambda h, _, s=status, more=headers: head(h, s, **more)}  # type: ignore[misc]
                began_s = time.monotonic()
                assert f"answered {status} and asks to wait" in (line := victim.refused())
                assert "hours; try again then, the same command goes on from here" in line
                assert time.monotonic() - began_s < 10


def test_a_short_wait_is_said_and_kept(victim: Victim) -> None:
    honest_from = iter((False, False, True))

    def busy(handler: Handler, honest: bytes) -> None:
        if next(honest_from):
            body(handler, honest)
        else:
            head(handler, 429, Retry_After=0)

    victim.mirror.hostile["config.json"] = busy
    lines = [line for line in victim.pulled().splitlines() if "answered 429: it is asked again in 0 s" in line]
    assert len(lines) == 2


def test_a_hub_that_is_always_busy_is_given_up(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_WAIT_S", 0.1)
    victim.mirror.hostile[INFO] = lambda handler, honest: head(handler, 429)
    assert "answered 429 and asks to wait" in victim.refused()


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("file:///etc/passwd", "redirects to 'file:///etc/passwd', which is not followed"),
        ("ftp://example/x", "which is not followed"),
        ("", "redirects to '', which is not followed"),
        ("http://[::1", "which is not followed"),
        ("http://127.0.0.1:9/x", "no connection to http://127.0.0.1:"),
        ("http://user:\u00e9@\u00e9.invalid:1/x", "http"),
        ("again", "redirects more than 5 times"),
    ],
)
def test_redirects_lead_to_http_and_end(location: str, message: str, victim: Victim) -> None:
    def redirect(handler: Handler, honest: bytes) -> None:
        head(handler, 302, Location=handler.path if location == "again" else location, Content_Length=0)

    victim.mirror.hostile[INFO] = redirect
    assert message in victim.refused()


def test_an_encrypted_connection_is_not_left_by_a_redirect() -> None:
    assert answers._redirect_target("https://hub.example/a", "http://hub.example/a") is None
    assert answers._redirect_target("https://hub.example/a", "/b") == "https://hub.example/b"


def test_the_token_goes_to_the_hub_alone(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    tokens: dict[str, list[str | None]] = {"hub": [], "elsewhere": []}
    with hub_mirror() as elsewhere:
        elsewhere.repositories = victim.mirror.repositories

        def redirect(handler: Handler, honest: bytes) -> None:
            tokens["hub"].append(handler.headers.get("Authorization"))
            head(handler, 302, Location=elsewhere.address + handler.path, Content_Length=0)

        def answer(handler: Handler, honest: bytes) -> None:
            tokens["elsewhere"].append(handler.headers.get("Authorization"))
            body(handler, honest)

        victim.mirror.hostile["config.json"], elsewhere.hostile["config.json"] = redirect, answer
        victim.pulled()
    assert tokens == {"hub": ["Bearer hf_secret"], "elsewhere": [None]}


def test_a_hub_that_does_not_encrypt_where_it_should_is_named(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", victim.mirror.address.replace("http:", "https:"))
    assert "no connection to https://127.0.0.1" in victim.refused()


@pytest.mark.parametrize("token", ["hf_\u00e9", "hf_a\x1b[2Jb"])
def test_a_token_that_no_header_can_hold_is_named(token: str, victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    assert "HF_TOKEN: holds characters" in victim.refused()


@pytest.mark.parametrize("endpoint", ["http://", "http://[::1", "http://a:b:c", "https:///x"])
def test_an_endpoint_that_is_no_address_is_named(
    endpoint: str, victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert "HF_ENDPOINT: " in victim.refused()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 200_000, "not valid JSON"),
        (b'{"siblings":' + b"[" * 200_000, "not valid JSON"),
        (b'{"siblings":[' + b"{}," * 2_500_000 + b"{}]}", "values"),
        (b"[]", "expected a JSON object"),
        (b"{}", "sha: missing"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"sha": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_an_answer_that_is_no_description_is_refused(data: bytes, message: str, victim: Victim) -> None:
    victim.mirror.hostile[INFO] = lambda handler, honest: body(handler, data)
    assert "answered what no hub does" in (line := victim.refused())
    assert message in line


def of_first(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    """Change a field of the first file."""
    return lambda info: info["siblings"][0].update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.update(sha="a" * 100_000), "sha: expected"),
        (lambda info: info.update(sha="\x1b[2J" + "a" * 36), r"found '\x1b[2Jaaa"),
        (lambda info: info.update(sha=None), "sha: expected a string, found None"),
        (lambda info: info.update(sha="../../../etc/passwd"), "sha: expected"),
        (lambda info: info.update(siblings="x"), "siblings: expected a list"),
        (lambda info: info.update(siblings=[]), "no files"),
        (lambda info: info.update(siblings=[7]), "expected a list of objects"),
        (lambda info: info["siblings"].append(info["siblings"][0]), "appears twice"),
        (lambda info: info.update(siblings=[{"rfilename": f"{n}", "size": 0} for n in range(50_001)]), "50001 files"),
        (of_first("size", "abc"), "siblings[0].size: expected a whole number, found 'abc'"),
        (of_first("size", 1.5), "siblings[0].size: expected a whole number, found 1.5"),
        (of_first("size", 2**70), "siblings[0].size: 1180591620717411303424 is outside"),
        (of_first("size", -1), "siblings[0].size: -1 is outside"),
        (of_first("size", None), "siblings[0].size: expected a whole number"),
        (of_first("rfilename", ["config.json"]), "siblings[0].rfilename: expected a string, found ['config.json']"),
        (of_first("blobId", "zz"), "siblings[0].blobId: expected"),
        (of_first("lfs", {"sha256": 7}), "siblings[0].lfs.sha256: expected a string"),
        (of_first("lfs", "x"), "siblings[0].lfs: expected an object"),
    ],
)  # fmt: skip
def test_a_field_that_is_no_such_thing_is_named(
    change: Callable[[dict[str, Any]], object], message: str, victim: Victim
) -> None:
    victim.change(change)
    assert message in victim.refused()


@pytest.mark.parametrize("name", ["../../config.json", "/etc/passwd", "a/../config.json", "x\x1b[2J", "", "n" * 5000])
def test_a_file_with_a_name_that_no_path_has_is_not_there(name: str, victim: Victim) -> None:
    def renamed(info: dict[str, Any]) -> None:
        for sibling in info["siblings"]:
            if sibling["rfilename"] == "config.json":
                sibling["rfilename"] = name

    victim.change(renamed)
    assert "config.json: the repository has no such file" in victim.refused()


@pytest.mark.parametrize("file", ["/abs/x.gguf", "../x.gguf", "a//x.gguf", "./x.gguf", "x\x1b.gguf"])
def test_a_file_that_is_not_of_a_repository_cannot_be_named(file: str, victim: Victim) -> None:
    assert "only a .gguf file of a repository can be named" in victim.refused(f"e/m:{file}")


def test_control_characters_of_names_and_errors_are_shown_as_escapes(victim: Victim, source: Path) -> None:
    def error(handler: Handler, honest: bytes) -> None:
        handler.wfile.write(b"HTTP/1.1 404 \x1b[2J\r\nX-Error-Code: \x1b[31m\r\nContent-Length: 0\r\n\r\n")

    victim.mirror.hostile["config.json"] = error
    victim.refused()
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["\x1b[2J\u202e"]}
    data = json.dumps(config).encode()
    victim.mirror.repositories["org/model"]["f" * 40] = {
        **victim.mirror.repositories["org/model"][str(victim.mirror.commit("org/model", None))],
        "config.json": data,
    }
    victim.mirror.hostile.clear()
    assert r"\x1b[2J\u202e" in victim.refused()


def test_an_address_of_a_gzip_stream_is_never_inflated(victim: Victim) -> None:
    """Also where the header says nothing of it: the bytes are those of the file, or are refused by the checksum."""
    compressor, packed = zlib.compressobj(wbits=31), io.BytesIO()
    packed.write(compressor.compress(b"{}") + compressor.flush())
    victim.mirror.hostile["config.json"] = lambda handler, honest: body(
        handler, packed.getvalue().ljust(len(honest), b"\0")
    )
    assert "came with another checksum" in victim.refused()

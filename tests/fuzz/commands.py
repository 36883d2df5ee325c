"""The command over damaged files: whatever stands in them, it ends with 0 or 2, says at most one line, and leaves
nothing half-made. What is tried here for seconds in CI is tried for minutes by tests/nightly/fuzz.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from neuronpipe.launch.cli import main
from neuronpipe.plans.package.manifest import identity

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.conformance.gguf_files import write_gguf
from tests.pipeline import beside_progress

MAX_LINE_CHARACTERS, MAX_S = 1000, 10
HEADER_BYTES = 16384  # about: most damage goes there
RECIPE = replace(TINY, layers=1, neurons=32, shards=2)
Target = Callable[[bytes], object]

NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3, 2**31, 2**32, 2**63, 2**64, 10**30, 10**4000, 0.5, -0.0, 1e308, "", "x" * 100_000, "\0",
    "a\0b", "\ud800", "\x1b[2J\n", "../x", "relu", "silu", "\U0001f980", [], [[]], ["x"], {}, {"": {}},
    {"k" * 5000: ["v" * 5000]},
)  # fmt: skip


class Call:
    """What one call of the command did: exit code, what it said on stderr, what it printed."""

    def __init__(self, *words: str | Path) -> None:
        out, errors = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), warnings.catch_warnings():
            warnings.simplefilter("always")  # a person would see them
            warnings.showwarning = lambda message, *_: errors.write(f"warning: {message}\n")  # type: ignore[assignment]
            self.code = main([str(word) for word in words])
            out.flush()
        self.errors = errors.getvalue()
        self.out = out.buffer.getvalue().decode()  # type: ignore[attr-defined]


class Fuzzed:
    """A checkpoint, a GGUF file, a package and a plan of one small model. `targets` are ways to damage one file of
    them and call the command, by name: each takes the file's content, and has contents that are right."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._source = write_checkpoint(folder / "source", RECIPE)
        self._gguf = write_gguf(folder / "model.gguf", replace(RECIPE, shards=1))
        self._package, self._plan, self._made = folder / "package", folder / "plan.json", folder / "made"
        self._frequencies = folder / "frequencies.npy"
        np.save(self._frequencies, np.full((RECIPE.layers, 1, RECIPE.neurons), 0.5, np.float32))
        (self._source / "generation_config.json").write_text('{"eos_token_id": [299, 298]}')
        tokens = {"bos_token": "<|end|>", "eos_token": {"content": "<|end|>"}}
        templates = [{"name": "default", "template": "{{ messages }}"}]
        (self._source / "tokenizer_config.json").write_text(json.dumps(tokens | {"chat_template": templates}))
        for words in (("convert", self._source, "-o", self._package), ("plan", self._package, "-o", self._plan)):
            done = Call(*words)
            assert done.code == 0, done.errors
        self._here = sorted(folder.iterdir())

    def targets(self) -> dict[str, tuple[Target, list[bytes]]]:
        """By name: a way to call the command with a file's content, and what the file holds when it is right."""
        convert = ("convert", self._source, "-o", self._made, "--json")
        found = {
            f"convert {file.name}": self._target(file, [convert])
            for file in sorted(self._source.iterdir())
            if file.name != "model-00002-of-00002.safetensors"
        }
        activation = ("--activation", "relu")
        found["convert relu"] = self._target(self._source / "config.json", [(*convert, *activation)])
        frequencies = (*convert, "--frequencies", self._frequencies)
        found["convert frequencies"] = self._target(self._frequencies, [frequencies])
        found["convert gguf"] = self._target(
            self._gguf, [("convert", self._gguf, "-o", self._made, "--json", *activation)]
        )
        inspect = [("inspect", self._package), ("inspect", self._package, "--json"), ("plan", self._package)]
        manifest = self._target(self._package / "manifest.json", inspect, _sealed_manifest)
        found["inspect"] = (manifest[0], [*manifest[1], *map(_measured, manifest[1])])
        obey = [("plan", self._package, option, self._plan) for option in ("--plan", "--diff")]
        found["plan"] = self._target(self._plan, obey, _sealed_plan)
        return found

    def _target(
        self, file: Path, calls: Sequence[tuple[str | Path, ...]], sealed: Callable[[Any], Any] | None = None
    ) -> tuple[Target, list[bytes]]:
        before = file.read_bytes()

        def target(data: bytes) -> None:
            for content in {data, _resealed(data, sealed)}:
                file.write_bytes(content)
                try:
                    for words in calls:
                        self._try(*words)
                finally:
                    file.write_bytes(before)

        return target, [before]

    def _try(self, *words: str | Path) -> None:
        began = time.monotonic()
        try:
            done = Call(*words)
            assert time.monotonic() - began < MAX_S, "it took too long"
            lines = beside_progress(done.errors).splitlines()
            if done.code == 0:
                assert not lines, done.errors
                if self._made.exists():
                    assert Call("inspect", self._made, "--json").code == 0, "what was made is refused"
            else:
                assert done.code == 2, f"exit code {done.code}"
                assert not self._made.exists(), "it failed and left a package"
                assert len(lines) == 1, done.errors
                assert lines[0].startswith("neuronpipe: "), lines[0]
                assert lines[0].isprintable()
                assert len(lines[0]) < MAX_LINE_CHARACTERS, lines[0]
                assert not done.out, "it failed and printed something"
        finally:
            shutil.rmtree(self._made, ignore_errors=True)
        assert sorted(self._folder.iterdir()) == self._here, "something is left"


def _resealed(data: bytes, sealed: Callable[[Any], Any] | None) -> bytes:
    """The content with an id that fits it, where it has one: an attacker can compute it."""
    with contextlib.suppress(ValueError, RecursionError):
        if sealed is not None and isinstance(values := json.loads(data), dict):
            return json.dumps(sealed(values)).encode()
    return data


def _sealed_manifest(values: Any) -> Any:
    values.pop("id", None)
    return values | {"id": identity(values)}


def _measured(data: bytes) -> bytes:
    """The manifest with what `profile` and `synth` add that is no file."""
    values = json.loads(data)
    activity = {"mean_by_layer": [0.5], "trigger_fired_by_layer": [0.5]}
    workload = {"seed": 1, "presets": {"default": {"first_token": 0, "tokens": 9}}}
    measured = {"activity": activity, "workload": workload, "npu": _npu(values["model"])}
    return json.dumps(_sealed_manifest(values | measured)).encode()


def _npu(model: dict[str, Any]) -> dict[str, Any]:
    """What `profile --npu` adds for a model of one layer."""
    width, head_width = model["width"], model["head_width"]
    sizes = (
        ((model["query_heads"] + 2 * model["key_heads"]) * head_width, width),
        (
            width,
            model["query_heads"] * head_width,
        ),
    )
    loss = {"perplexity": 2.0, "agreement": 1.0, "recomputed_share": 0.0, "error_by_layer": [0.01]}
    return {
        "scaling": "static",
        "text": "numbers",
        "calibration_tokens": 4,
        "held_out_tokens": 1,
        "exact_perplexity": 2.0,
        "losses": [{"scaling": one, **loss} for one in ("token", "static")],
        "ranges": {
            "matrices": [
                {"rows": rows, "columns": columns, "inputs": 1.0, "products": 1.0}
                for rows, columns in dict.fromkeys(sizes)
            ],
            "neurons": dict.fromkeys(("inputs", "gate", "up", "hidden", "outputs"), 1.0),
        },
    }


def _sealed_plan(values: Any) -> Any:
    values.pop("id", None)
    return {"id": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16], **values}


def damaged(draw: random.Random, content: bytes) -> bytes:
    """The content with something changed: a place in JSON, a string that is counted in front, or any bytes."""
    kind = draw.randrange(4)
    if kind < 2:
        with contextlib.suppress(ValueError):
            return json.dumps(_damaged_value(draw, json.loads(content))).encode()
    if content[8:9] == b"{" and kind < 2:  # safetensors
        length = int.from_bytes(content[:8], "little")
        header = json.dumps(_damaged_value(draw, json.loads(content[8 : 8 + length]))).encode()
        return len(header).to_bytes(8, "little") + header + content[8 + length :]
    if content[:4] == b"GGUF" and kind < 3:
        return _damaged_string(draw, content)
    data = bytearray(content)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(1 + (min(len(data), HEADER_BYTES) if draw.randrange(4) else len(data)))
        length = draw.choice((1, 1, 2, 4, 8, 64))
        new = draw.choice((b"", draw.randbytes(length), b"\xff" * length, b"\0" * length, b"9" * length, b"[" * length))
        data[at : at + draw.choice((0, length, len(new)))] = new
    return bytes(data) or b"\0"


def _damaged_value(draw: random.Random, value: Any) -> Any:
    """One place of a JSON value replaced, left out, named otherwise or added."""
    if not isinstance(value, dict | list) or not value or draw.randrange(8) == 0:
        return draw.choice(NASTY)
    if isinstance(value, list):
        at = draw.randrange(len(value))
        return [*value[:at], *([] if draw.randrange(4) == 0 else [_damaged_value(draw, value[at])]), *value[at + 1 :]]
    key = draw.choice(list(value))
    rest = {name: inner for name, inner in value.items() if name != key}
    kind = draw.randrange(6)
    if kind == 0:
        return rest
    if kind == 1:
        return {**rest, draw.choice([name for name in NASTY if isinstance(name, str)]): value[key]}
    return {**rest, key: _damaged_value(draw, value[key])}


def _damaged_string(draw: random.Random, content: bytes) -> bytes:
    """A GGUF file with one of the strings in its header replaced, its length and the alignment of what follows kept
    right: keys, texts and names of tensors."""
    at, places = 24, []
    while at < min(len(content), HEADER_BYTES) - 8:
        length = int.from_bytes(content[at : at + 8], "little")
        text = content[at + 8 : at + 8 + length]
        if 2 < length < 200 and len(text) == length and text.isascii():
            places.append((at, length))
            at += 8 + length
        else:
            at += 1
    at, length = draw.choice(draw.choice((places[:50], places[-30:], places)))  # between them, the tokenizer's pieces
    texts = [name for name in NASTY if isinstance(name, str)]
    text = draw.choice(texts).encode(errors="surrogatepass")
    text += b"x" * ((length - len(text)) % 32)
    return content[:at] + len(text).to_bytes(8, "little") + text + content[at + 8 + length :]

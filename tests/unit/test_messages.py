"""The messages as a whole: documented, on a link, and consistent in themselves."""

import dataclasses
import subprocess
import sys
from typing import Any, get_type_hints

import pytest
from neuronpipe.native import lib
from neuronpipe.protocol import links, run_directory, spec
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.links import LINKS, WATCH
from neuronpipe.protocol.messages.client import Likely, ProcessStatus, Rated, WarmUp
from neuronpipe.protocol.messages.loader import Grant, Warm
from neuronpipe.protocol.messages.outcome import Rating
from neuronpipe.protocol.messages.request import Bias, Calls, Function, Generate, Score, Thought
from neuronpipe.protocol.messages.snapshot import ProcessView, Region, StripRow
from neuronpipe.protocol.messages.worker import Prefill, Step

MESSAGES = spec.all_messages()
PARTS = {Bias, Calls, Function, Likely, ProcessStatus, ProcessView, Rated, Rating, Region, StripRow, Thought, WarmUp}
DOCUMENTED = [*MESSAGES, run_directory.RunFile, run_directory.SegmentHandle, run_directory.RunSummary]


@pytest.mark.parametrize("cls", DOCUMENTED, ids=lambda cls: cls.__name__)
def test_every_field_is_documented_and_nothing_else_is(cls: type[Message]) -> None:
    description, meanings = spec.documented(cls)
    assert description.endswith(".")
    assert list(meanings) == [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]


def test_every_message_travels_on_some_link() -> None:
    carried = {cls for link in (*LINKS, WATCH) for way in (link.inward, link.outward) for cls in way.carries.classes}
    assert carried == set(MESSAGES) - PARTS, "these are parts of others"


def test_no_two_messages_share_a_name() -> None:
    assert len({cls.__name__ for cls in MESSAGES}) == len(MESSAGES)


def test_the_specification_is_up_to_date() -> None:
    text = spec.PATH.read_text(encoding="utf-8")
    assert spec.render(text) == text, "run `python -m neuronpipe.protocol.spec --write`"


@pytest.mark.parametrize("link", [*links.LINKS, links.WATCH], ids=lambda link: link.name)
def test_the_specification_says_who_binds_a_link(link: links.Link) -> None:
    assert f"| `{link.name}` | {link.bound_by} |" in spec.PATH.read_text(encoding="utf-8")


def test_the_specification_counts_claims_as_the_engine_does() -> None:
    """A kind of work was added, and SPEC still said 7 of a layer."""
    of_layer = lib.np_engine_claims(2) - lib.np_engine_claims(1)
    text = spec.PATH.read_text(encoding="utf-8")
    assert f"Counter {of_layer} × layer + k belongs to this work, and counter {of_layer} × layers to the logits" in text
    table = text.partition("| k | work | pieces |")[2].partition("| logits |")[0]
    assert [row.split(" | ")[0] for row in table.splitlines()[2:]] == [f"| {work}" for work in range(of_layer)]


def test_a_specification_that_drifted_is_noticed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "SPEC.md"
    stale.write_text(spec.PATH.read_text(encoding="utf-8").replace("| `epoch` | int |", "| `epoch` | str |"))
    monkeypatch.setattr(spec, "PATH", stale)
    assert spec.main([]) == 1
    assert spec.main(["--write"]) == 0
    assert spec.main([]) == 0


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (Step, {"sequences": (0, 1), "positions": (0,), "tokens": (1, 2)}),
        (Step, {"sequences": (), "positions": (), "tokens": ()}),
        (Prefill, {"tokens": ()}),
        (Prefill, {"copy_from": 1}),
        (Grant, {"slots": b"12345"}),
        (Warm, {"clusters": b"1"}),
        (Generate, {"prompt": None, "tokens": None}),
        (Generate, {"prompt": "a", "tokens": (1,)}),
        (Score, {"text": "a", "tokens": (1,)}),
    ],
)
def test_fields_that_do_not_go_together_are_refused(cls: type[Message], fields: dict[str, Any]) -> None:
    samples = {"int": 1, "str": "x"}
    filled = {name: samples.get(getattr(hint, "__name__", ""), "none") for name, hint in get_type_hints(cls).items()}
    required = {field.name: filled[field.name] for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected"):
        cls(**{**required, **fields})


def test_matrices_that_nobody_would_compute_are_refused() -> None:
    """The decode workers leave out what is held."""
    step = Step(
        step=1, epoch=0, participants=("decode.0", "accelerator.0"), first_blocks=(1, 0), end_blocks=(2, 1),
        sequences=(0,), positions=(0,), tokens=(1,), held_matrices=("qkv",),
    )  # fmt: skip
    with pytest.raises(ValueError, match="no accelerator is among the participants"):
        dataclasses.replace(step, participants=("decode.0", "decode.1"))


def test_a_service_that_imports_the_protocol_stays_small() -> None:
    """Every process of a run imports this; each heavy module costs its memory once per process."""
    program = (
        "import sys, neuronpipe.protocol.channel, neuronpipe.protocol.memory.segments\n"
        "import neuronpipe.protocol.run_directory\n"
        "print(*sorted({'numpy', 'multiprocessing', 'asyncio', 'ctypes', 'ssl', '_hashlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []

"""The suite for implementations of a role: our own pass it, and it tells what is wrong with others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from neuronpipe.launch.conformance.peers import GARBAGE, with_unknown_field
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.codec import MAGIC
from neuronpipe.protocol.errors import UnknownType, WireError
from neuronpipe.protocol.links import CACHE, CONTROL
from neuronpipe.protocol.messages.loader import Reset
from neuronpipe.protocol.messages.worker import Step

from tests.pipeline import SLOWER, Shell

Converted = Callable[..., Package]
WRONG = """
import dataclasses
import time
from neuronpipe.protocol.messages.lifecycle import Beat
from neuronpipe.protocol.messages.worker import Prefill
from neuronpipe.services.worker.decode import DecodeService
from neuronpipe.services.worker.prefill import PrefillService

class OneBitOff(DecodeService):
    def compute(self, step):
        outcome = super().compute(step)
        if self._service.index == 1:
            self._worker.memory.view("exchange", "logits").cast("B").cast("I")[7] ^= 1
        return outcome

class ShowsNoLife(DecodeService):
    def __init__(self, job):
        super().__init__(job)
        answer = self._service.answer
        self._service.answer = lambda message: None if isinstance(message, Beat) else answer(message)

class CopiesNothing(PrefillService):
    def _handle(self, message):
        super()._handle(dataclasses.replace(message, copy_from=None) if isinstance(message, Prefill) else message)
"""


def report(shell: Shell, *words: Any) -> tuple[int, dict[str, str]]:
    """Exit code, and for every check why it failed, if it did."""
    done = shell.call("conformance", *words, "--patience", f"{30 * SLOWER:g}", "--json", cwd=shell.folder)
    assert done.out, done.errors
    said = json.loads(done.out)
    assert said["passed"] == (done.code == 0)
    return done.code, {check["name"]: check["why"] for check in said["checks"]}


@pytest.mark.parametrize(
    ("role", "checks"),
    [
        ("decode", 18),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("loader", 19), ("prefill", 18), ("cache", 17))),
    ],
)
def test_our_own_implementation_passes(shell: Shell, converted: Converted, role: str, checks: int) -> None:
    code, failures = report(shell, role, converted("relu2", "f16").path)
    assert [f"{name}: {why}" for name, why in failures.items() if why] == []
    assert (code, len(failures)) == (0, checks)


@pytest.mark.parametrize(
    ("role", "name", "why"),
    [
        ("decode", "ShowsNoLife", "decode-0: 0 beats in 1.5 s, without work"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("decode", "OneBitOff", "computes other bits in the same numerics: logits"),
                (
                    "prefill",
                    "CopiesNothing",
                    "computes other bits in the same numerics: a text that begins with another's",
                ),
            )
        ),
    ],
)
def test_what_is_wrong_is_told(shell: Shell, converted: Converted, role: str, name: str, why: str) -> None:
    (shell.folder / "wrong.py").write_text(WRONG)
    code, failures = report(shell, role, converted("relu2", "f16").path, "--use", f"wrong:{name}")
    assert code == 1
    assert why in failures["ordinary peers"]


def test_garbage_is_garbage_and_an_unknown_field_is_not() -> None:
    for link in (CONTROL, CACHE):
        for direction in (link.inward, link.outward):
            for frames in GARBAGE:
                if len(frames) == 2 and frames[0] == MAGIC:
                    with pytest.raises((WireError, UnknownType)):
                        direction.carries.decode(frames[1])
    shares: dict[str, Any] = {"participants": ("decode.0",), "first_blocks": (0,), "end_blocks": (1,)}
    step = Step(step=1, epoch=2, **shares, sequences=(0,), positions=(3,), tokens=(4,))
    assert CONTROL.outward.carries.decode(with_unknown_field(step)) == step
    assert CACHE.inward.carries.decode(with_unknown_field(Reset(generation=7))) == Reset(generation=7)
    assert b"unheard!" in with_unknown_field(step)

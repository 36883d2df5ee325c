"""A step whose products another computes: what the engine hands out, and what it makes of the results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.manifest import Quantization
from neuronpipe.services.worker.participant import Participant
from numpy.typing import NDArray

from tests.conformance.participants import Participants
from tests.conformance.specs import SPECS, write_package

TEXT = np.random.default_rng(5).integers(0, 100, 70).tolist()
GATED = {
    name: SPECS[name] for name in ("gated layer norm", "many neurons", "turbosparse", "smallthinker", "scaled")
} | {"gated parallel": replace(SPECS["parallel"], gated=True)}


class ByTheEngine:
    """Multiplies nothing else than the engine would, one product after the other."""

    def begin(self, participant: Participant) -> None:
        pass

    def __call__(self, participant: Participant, product: Any) -> None:
        rows = participant.next_rows()
        assert rows is not None
        participant.open_rows(rows)
        assert (rows.kind, rows.layer, rows.rows) == (product.kind, product.layer, product.rows)
        by_the_engine(participant, product, rows)

    def end(self) -> None:
        pass


def by_the_engine(participant: Participant, product: Any, rows: Any) -> None:
    out = np.empty((product.tokens, product.outputs_stride), np.float32)
    participant.product(product, rows, np.arange(product.tokens, dtype=np.uint32), out)
    outputs = np.frombuffer(ffi.buffer(product.outputs, out.nbytes), np.float32).reshape(out.shape)
    outputs[:] = outputs + out if product.kind == lib.NP_PRODUCT_NEURONS else out


def difference(rows: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """In units of their spread, at most."""
    return float((np.sqrt(np.mean(np.square(rows - wanted), axis=1)) / wanted.std(axis=1)).max())


@pytest.mark.parametrize("quantization", ["q8", "q4", "q3"])
@pytest.mark.parametrize("name", GATED)
def test_products_by_the_engines_own_kernels_make_the_engines_step(
    tmp_path: Path, name: str, quantization: Quantization
) -> None:
    """Block sums are added in another order, so bits differ; who takes part and how steps are cut changes none."""
    package = write_package(tmp_path / "package", GATED[name], quantization)
    wanted = Participants(package, count=1, max_tokens=1).run(TEXT, 1)
    alone = Participants(package, count=1, max_tokens=70, external_products=True).run(TEXT, 70, multiply=ByTheEngine())
    assert 0 < difference(alone, wanted) < 0.02
    several = Participants(package, count=3, max_tokens=16, external_products=True)
    assert np.array_equal(several.run(TEXT, 16, multiply=ByTheEngine()), alone)


def test_a_product_waits_for_its_clusters_and_asks_for_them(tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", SPECS["scaled"], "q8")
    participants = Participants(package, count=2, max_tokens=70, external_products=True)
    wanted = participants.run(TEXT, 70, multiply=ByTheEngine())
    lost = range(package.manifest.layout.clusters, package.manifest.layout.clusters + 5)
    participants.lose(lost)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(participants.run, TEXT, 70, None, ByTheEngine())
        while not set(lost) <= participants.asked_for() and not late.done():
            pass
        assert not late.done()
        participants.bring(lost)
        assert np.array_equal(late.result(60), wanted)


def test_an_engine_refuses_the_steps_of_the_other_kind(tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", SPECS["scaled"], "q8")
    with pytest.raises(ValueError, match="refused its arguments"):
        Participants(package, count=1, max_tokens=70).run(TEXT, 70, multiply=ByTheEngine())
    with pytest.raises(ValueError, match="refused its arguments"):
        Participants(package, count=1, max_tokens=70, external_products=True).run(TEXT, 70)


@pytest.mark.parametrize(("name", "quantization"), [("qwen3", "q8"), ("opt", "q8"), ("scaled", "f16")])
def test_an_engine_refuses_to_leave_what_another_cannot_compute(
    tmp_path: Path, name: str, quantization: Quantization
) -> None:
    package = write_package(tmp_path / "package", SPECS[name], quantization)
    with pytest.raises(ValueError, match="`external_products`"):
        Participants(package, count=1, max_tokens=70, external_products=True)


def test_products_of_tokens_that_there_are_not_are_refused(tmp_path: Path) -> None:
    class Beyond(ByTheEngine):
        def __call__(self, participant: Participant, product: Any) -> None:
            rows, out = participant.next_rows(), np.zeros((1, product.outputs_stride), np.float32)
            participant.open_rows(rows)
            with pytest.raises(ValueError, match="1 elements for 1 tokens"):
                participant.product(product, rows, np.zeros(1, np.uint32), out[:, :1].copy())
            participant.product(product, rows, np.array([product.tokens], np.uint32), out)

    package = write_package(tmp_path / "package", SPECS["scaled"], "q8")
    with pytest.raises(ValueError, match="refused its arguments"):
        Participants(package, count=1, max_tokens=70, external_products=True).run(TEXT, 70, multiply=Beyond())


class ReadAhead(ByTheEngine):
    """Names rows as far as they are known, opens them in that order, and opens each again for its product."""

    def __init__(self) -> None:
        self.known: list[int] = []  # products named before each one was wanted
        self._named: list[Any] = []

    def begin(self, participant: Participant) -> None:
        self._named, self._is_more = [], True

    def __call__(self, participant: Participant, product: Any) -> None:
        while self._is_more and (rows := participant.next_rows()) is not None and rows.kind:
            participant.open_rows(rows)
            self._named.append(rows)
        self._is_more = self._is_more and rows is not None
        self.known.append(len(self._named))
        rows = self._named.pop(0)
        participant.open_rows(rows)
        assert (rows.kind, rows.layer, rows.rows) == (product.kind, product.layer, product.rows)
        by_the_engine(participant, product, rows)


@pytest.mark.parametrize("name", GATED)
def test_rows_may_be_read_ahead_of_their_products(tmp_path: Path, name: str) -> None:
    """Of a dense model all at once; of a mixture up to the first whose router has not been computed."""
    package = write_package(tmp_path / "package", GATED[name], "q8")
    model, layout = package.manifest.model, package.manifest.layout
    wanted = Participants(package, count=1, max_tokens=70, external_products=True).run(TEXT, 70, multiply=ByTheEngine())
    ahead = ReadAhead()
    several = Participants(package, count=2, max_tokens=70, external_products=True, window_blocks=layout.blocks)
    assert np.array_equal(several.run(TEXT, 70, multiply=ahead), wanted)
    pieces = -(-layout.blocks // 2)
    if model.experts == 1:
        assert ahead.known == list(range(model.layers * (2 + pieces), 0, -1))
    elif model.router_reads == "layer":
        assert ahead.known[0] > 2  # the first layer's experts too
    else:
        assert ahead.known[:3] == [2, 1, ahead.known[2]]
        assert ahead.known[2] > 2  # its experts, and what of the next layer comes before the router

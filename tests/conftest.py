"""Packages converted from the recipes, each made once in a test run, and shells that must leave nothing behind."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import cast

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as `synth` does, so that the same seed makes the same package

import pytest
from hypothesis import HealthCheck, settings
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.convert import convert
from neuronpipe.plans.history.history_file import history_folder
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.models.spec import Activation
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import BUNDLES
from neuronpipe.plans.package.reader import Package
from selenium import webdriver

from tests.browser import opened_browser
from tests.conformance.checkpoints import RECIPES, write_checkpoint
from tests.pipeline import Shell

EXAMPLES = int(os.environ.get("NEURONPIPE_TEST_EXAMPLES", "40"))  # of each property; many at night
# How long an example takes says something about the machine, and whoever else is busy on it.
settings.register_profile("patient", max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever is given a shell starts a pipeline."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "browser" in fixtures:
            item.add_marker(pytest.mark.browser)
        if {"shell", "long_shell"} & fixtures:
            item.add_marker(pytest.mark.pipeline)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from the objects of seven thousand tests, which it would look at again and again."""
    gc.collect()
    gc.freeze()


FLASH = {4096: (12e6, 180e6, 250e6), 65536: (120e6, 700e6, 750e6), 262144: (300e6, 900e6, 950e6)}  # depths 1, 32, 128
ONE_THREAD, SEQUENTIAL = 12e9, 20e9  # bytes a second, whole memory
MEMORY = {1024: 9e9, 4096: 18e9, 16384: 20e9}
BARRIER_US, MESSAGE_US = 0.5, 200.0


@pytest.fixture(scope="session", autouse=True)
def settled_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, bytes]]:
    """The figures of this device, made up and beyond doubt: measured beside other tests, a disk came out as fast as
    memory and a barrier as long as a layer, and on a busy machine commands would measure again in the middle of a test,
    plan differently, and say so."""
    cache, package = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("device")
    shutil.copy(DEMO / BUNDLES, package)
    points = [
        {"request_bytes": size, "depth": depth, "bytes_per_s": speed}
        for size, speeds in FLASH.items()
        for depth, speed in zip((1, 32, 128), speeds, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))  # whatever packages this user has
        patch.setenv("NEURONPIPE_CONFIG", "")  # whatever options this user never wants to type
        for folder in (DEMO, package):  # they may lie on two file systems
            probe(folder)
        for kept in cache.glob("neuronpipe/*.json"):
            record = json.loads(kept.read_text())
            record["agreed"] = 2
            measured = record["measured"]
            measured["busy"] = 0.0
            if "points" in measured:
                measured |= {"points": points, "spread": 0.0}
            for entry in measured.get("dram", ()):
                whole = ONE_THREAD if entry["workers"] == 1 else SEQUENTIAL
                in_pieces = next((speed for size, speed in MEMORY.items() if entry["piece_bytes"] <= size), whole)
                speed = min(whole, in_pieces)
                entry["bytes_per_s"] = {"median": speed, "spread": 0.0}
            for name, us in (("barriers", BARRIER_US), ("messages", MESSAGE_US)):
                for entry in measured.get(name, ()):
                    entry["us"] = {"median": us, "spread": 0.0}
            kept.write_text(json.dumps(record))
        yield {kept: kept.read_bytes() for kept in cache.glob("neuronpipe/*.json")}


@pytest.fixture(autouse=True)
def unchanged_device(settled_device: dict[Path, bytes]) -> Iterator[None]:
    """Put the made-up figures back after a test: `bench` and `doctor` measure, and on a busy machine the doubtful
    figures that they leave would make commands of later tests measure again, and say so."""
    yield
    shutil.rmtree(history_folder(), ignore_errors=True)  # what runs of this test have counted is for no other plan
    for folder in {kept.parent for kept in settled_device}:
        for kept in set(folder.glob("*.json")) - settled_device.keys():
            kept.unlink(missing_ok=True)
    for kept, content in settled_device.items():
        if not kept.exists() or kept.read_bytes() != content:
            kept.write_bytes(content)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Package]:
    """converted(recipe name, quantization, activation=the recipe's, gates=as the rest) -> the package."""
    directory = tmp_path_factory.mktemp("packages")

    @cache
    def checkpoint(name: str) -> Path:
        return write_checkpoint(directory / name, RECIPES[name])

    @cache
    def package(name: str, quantization: str, activation: str | None, gates: str | None) -> Package:
        return convert(
            checkpoint(name),
            directory / f"{name}-{quantization}-{activation}-{gates}",
            quantization=cast(Quantization, quantization),
            activation=cast(Activation | None, activation),
            gates=cast(Quantization | None, gates),
        )

    return lambda name, quantization, activation=None, gates=None: package(name, quantization, activation, gates)


@pytest.fixture(scope="module")
def long_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """One browser for the tests of a module: its start takes two seconds of a core."""
    with opened_browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell in a folder of its own; whatever its commands leave behind fails the test."""
    made = Shell(tmp_path_factory.mktemp("s"))  # short: run directories in it hold sockets
    try:
        yield made
        left = made.leftovers()
    finally:
        made.end()
    assert not left, left


@pytest.fixture(scope="module")
def long_shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """The same for the runs that the tests of a module share."""
    made = Shell(tmp_path_factory.mktemp("s"))
    try:
        yield made
        left = made.leftovers()
    finally:
        made.end()
    assert not left, left

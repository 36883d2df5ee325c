"""Packages converted from the recipes, each made once in a test run, and shells that must leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, settings
from neuronpipe.plans.convert import convert
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import Activation
from neuronpipe.plans.package.reader import Package

from tests.conformance.checkpoints import RECIPES, write_checkpoint
from tests.pipeline import Shell

# How long an example takes says something about the machine, and whoever else is busy on it.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Package]:
    """converted(recipe name, quantization, activation=the recipe's) -> the package."""
    directory = tmp_path_factory.mktemp("packages")

    @cache
    def checkpoint(name: str) -> Path:
        return write_checkpoint(directory / name, RECIPES[name])

    @cache
    def package(name: str, quantization: str, activation: str | None) -> Package:
        return convert(
            checkpoint(name),
            directory / f"{name}-{quantization}-{activation}",
            quantization=cast(Quantization, quantization),
            activation=cast(Activation | None, activation),
        )

    return lambda name, quantization, activation=None: package(name, quantization, activation)


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

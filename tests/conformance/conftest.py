"""Packages converted from the recipes, each made once in a test run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.reader import Package

from tests.conformance.checkpoints import RECIPES, write_checkpoint


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Package]:
    """converted(recipe name, quantization) -> the package."""
    directory = tmp_path_factory.mktemp("packages")

    @cache
    def checkpoint(name: str) -> Callable[[str], Package]:
        source = write_checkpoint(directory / name, RECIPES[name])

        @cache
        def package(quantization: str) -> Package:
            return convert(source, directory / f"{name}-{quantization}", quantization=cast(Quantization, quantization))

        return package

    return lambda name, quantization: checkpoint(name)(quantization)

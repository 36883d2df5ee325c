"""What tests of real processes share."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.http_client import Server

if TYPE_CHECKING:
    import openai

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "native" / "client"


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the `server` that the test's module has."""
    import openai  # takes a second; most modules need none

    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture(scope="session")
def loader_in_c(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example loader in C, compiled. Skips without a compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler: install gcc or set CC")
    program = tmp_path_factory.mktemp("loader") / "loader"
    files = [ROOT / "services" / "examples" / "loader.c", *sorted(CLIENT.glob("*.c"))]
    flags = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{CLIENT.parent}")
    subprocess.run([compiler, *flags, "-o", program, *files, "-lm"], check=True)
    return program

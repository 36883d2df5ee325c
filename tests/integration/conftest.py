"""What tests of real processes share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.http_client import Server

if TYPE_CHECKING:
    import openai


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the `server` that the test's module has."""
    import openai  # takes a second; most modules need none

    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as one:
        yield one

"""What tests of several kinds of faults need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.memory_group import Group
from tests.pipeline import Shell


@pytest.fixture
def group(shell: Shell) -> Iterator[Group]:
    made = Group()
    try:
        yield made
    finally:
        shell.end()
        made.remove()

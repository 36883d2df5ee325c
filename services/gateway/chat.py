"""From a conversation to the text that the model continues.

A package without a chat template holds a base model, which knows no roles: the messages are written one below the
other, and the model goes on where the last one ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from neuronpipe.plans.package.reader import Package
from neuronpipe.services.gateway.requests import ChatMessage


def prompt_of(package: Package, messages: Sequence[ChatMessage]) -> str:
    """The prompt of a conversation."""
    return "\n".join(message.text for message in messages)

"""What a person sees of an error stays one harmless line, whatever names a damaged file brings."""

from __future__ import annotations

from neuronpipe.protocol.errors import UserError


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert str(UserError("a.gguf: na\n\x1b[2Jme: größer")) == "a.gguf: na\\n\\x1b[2Jme: größer"

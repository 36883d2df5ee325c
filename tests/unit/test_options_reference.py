"""The reference of all options in the guide is what the parsers say."""

from __future__ import annotations

import re
from functools import cache

from neuronpipe.launch.arguments.verbs import TWO_WORD_VERBS, VERBS, verb_parser
from neuronpipe.launch.options_reference import FILE, page

made_page = cache(page)  # it takes seconds


def test_the_reference_is_current() -> None:
    assert FILE.read_text(encoding="utf-8") == made_page(), (
        "run `python -m neuronpipe.launch.options_reference --write`"
    )


def test_the_reference_has_every_option_and_does_not_depend_on_the_machine() -> None:
    text = made_page()
    for verb in (*VERBS, *TWO_WORD_VERBS):
        assert f"\n### {verb}\n" in text
        for option in {*verb_parser(verb).options} - {"-h", "--help", "--help-all"}:
            assert re.search(rf"[`\s]{re.escape(option)}\b", text)
    assert "/home/" not in text
    assert "/root" not in text

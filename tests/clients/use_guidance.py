"""guidance, whose constraints on a remote model are those that the server knows."""

from __future__ import annotations

import json

import guidance
from report import CODE, MAX_TOKENS, MODEL, PARAMETERS, URL, report, valid


def ask(what: object) -> str:
    lm = guidance.models.OpenAI(MODEL, api_key="none", base_url=URL)
    lm.echo = False
    with guidance.user():
        lm += CODE
    with guidance.assistant():
        lm += what
    return str(lm["answer"])


def chat() -> None:
    assert ask(guidance.gen("answer", max_tokens=MAX_TOKENS))


def structured() -> None:
    valid(**json.loads(ask(guidance.json("answer", schema=PARAMETERS))))


report(chat=chat, structured=structured)

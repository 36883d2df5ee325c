"""Write the golden prompts with transformers: python make.py (from this directory, with transformers 5 and Jinja).

Every template of this directory is rendered by `apply_chat_template` of a plain tokenizer, on a fixed date. Templates
differ in the calls that they accept: arguments as an object or as text, no content or an empty one. The first form is
used that the template accepts, and in which it writes the arguments. A conversation that a template refuses has the
reason instead of a prompt. One that makes a template fail, and one whose calls it does not write, is left out.
"""

from __future__ import annotations

import datetime
import json
from itertools import product
from pathlib import Path
from typing import Any

from conversations import CONVERSATIONS, Conversation, Message
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent


class Monday(datetime.datetime):
    """The date of every prompt."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Monday:
        return cls(2026, 3, 2, tzinfo=tz)


def with_calls(messages: list[Message], *, objects: bool, empty: str | None) -> list[Message]:
    """Return messages with the arguments of calls as objects or as text, and this content beside calls."""
    changed = json.loads(json.dumps(messages))
    for message in changed:
        if "tool_calls" in message and message["content"] is None:
            message["content"] = empty
        for call in [] if objects else message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return changed


def expected(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> dict[str, str] | None:
    """Return the prompt, or the reason for which the template refuses the conversation; None if it fails."""
    results = list[dict[str, str]]()
    messages, tools, answer, continued, variables = conversation
    called = [call["function"]["name"] for message in messages for call in message.get("tool_calls", [])]
    for objects, empty in product((True, False), (None, "")):
        options: dict[str, Any] = {"tools": tools, "tokenize": False, "continue_final_message": continued, **variables}
        try:
            prompt = tokenizer.apply_chat_template(
                with_calls(messages, objects=objects, empty=empty),
                add_generation_prompt=answer and not continued,
                **options,
            )
        except TemplateError as error:
            if type(error) is TemplateError:  # of `raise_exception`
                results.append({"refused": str(error)})
        except (TypeError, ValueError):
            pass
        else:
            offered = sum(tool["function"]["name"] in called for tool in tools or [])
            if not called or prompt.count(called[-1]) >= 1 + offered:
                results.append({"prompt": prompt})
    prompts = [result for result in results if "prompt" in result]
    return next(iter(prompts or results), None)


def main() -> None:
    chat_template_utils.datetime = Monday
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    golden = dict[str, dict[str, dict[str, str]]]()
    for path in sorted(HERE.glob("*.jinja")):
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        results = {name: expected(tokenizer, conversation) for name, conversation in CONVERSATIONS.items()}
        golden[path.stem] = {name: result for name, result in results.items() if result is not None}
    text = json.dumps(golden, ensure_ascii=False, indent=1) + "\n"
    (HERE / "prompts.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

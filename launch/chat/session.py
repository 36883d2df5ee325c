"""A chat: what is typed is said to the model or done, the answer streams, Ctrl-C stops the answer and nothing else."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

from neuronpipe.launch.chat.conversation import Conversation
from neuronpipe.launch.chat.lines import FENCE, Lines
from neuronpipe.launch.chat.options import OPTIONS, list_options, shown, with_option, without_option
from neuronpipe.launch.client import Client, Declined
from neuronpipe.launch.generation import Screen, followed
from neuronpipe.launch.progress import heard
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Finished
from neuronpipe.protocol.messages.request import Cancel, Generate

HELP = {
    "/help": "show this",
    "/system [TEXT]": "what the model is told before the conversation: show or set it; /system - takes it back",
    "/set [OPTION VALUE]": "how answers are sampled, e.g. /set temperature 0.7; /set alone lists the options",
    "/unset [OPTION]": "set an option, or all of them, back to what it was",
    "/show": "the model, what it is told before, and the options that hold",
    "/clear": "begin a new conversation",
    "/again": "take the last answer back, and answer anew",
    "/save FILE": "write the conversation: as messages (FILE.json), or to be read",
    "/exit": "end the chat, as Ctrl-D does",
    "\\": "at the end of a line: it goes on in the next one",
    FENCE: "begins and ends a message of several lines",
    "Ctrl-C": "stops the answer, or drops what is typed",
}
WORDS = tuple(entry.split()[0] for entry in HELP if entry.startswith("/"))
INDENT, NARROW_COLUMNS = 21, 60


class Chat:
    """One chat with one run. ask: how texts are sampled; its prompt is put in. say: takes a line for a person, which is
    no answer."""

    def __init__(self, client: Client, conversation: Conversation, ask: Generate, say: Callable[[str], None]) -> None:
        self._client, self._conversation, self._ask, self._say = client, conversation, ask, say
        self._begun = ask
        self._texts = 0
        self._saved: set[Path] = set()
        self._lines = Lines(WORDS, {"/set": OPTIONS, "/unset": OPTIONS})

    def hold(self) -> None:
        """Until the input ends. Raises UserError when the run does."""
        while True:
            try:
                message = self._typed()
                if message is None:
                    if self._lines.asks:
                        print()
                    return
                if message.startswith("/") and "\n" not in message:
                    if not self._does(message.strip()):
                        return
                elif message.strip():
                    self._converse(message)
            except Declined as declined:
                self._say(f"{declined}; /clear begins a new conversation")
            except KeyboardInterrupt as interrupt:
                if type(interrupt) is not KeyboardInterrupt:
                    raise  # told to end, by SIGTERM
                print()
                self._say("Ctrl-D or /exit ends the chat")

    def _typed(self) -> str | None:
        """What is said next; None at the end. Who sits at a terminal may type again what was no text."""
        while True:
            try:
                message = self._lines.message()
                heard()
                return message
            except UserError as error:
                if not self._lines.asks:
                    raise
                self._say(str(error))

    def _does(self, line: str) -> bool:
        """What a line with a slash asks for; whether the chat goes on."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        match word:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/help" | "/?":
                print(show_help(shutil.get_terminal_size().columns))
            case "/clear":
                self._conversation.turns.clear()
                self._say("a new conversation")
            case "/system":
                self._instruct(rest)
            case "/set":
                self._set(rest)
            case "/unset":
                self._change(lambda: without_option(self._ask, self._begun, rest))
            case "/show":
                self._show()
            case "/again":
                self._answer_again()
            case "/save":
                self._save(rest)
            case _:
                self._say(_unknown(word))
        return True

    def _instruct(self, text: str) -> None:
        if text:
            try:
                self._conversation.instruct("" if text == "-" else text)
            except UserError as error:
                self._say(str(error))
                return
        system = self._conversation.system
        self._say("the model is told nothing before" if system is None else f"the model is told before: {system}")

    def _set(self, text: str) -> None:
        first, _, rest = text.partition(" ")
        if first == "system":  # as other programs have it
            self._instruct(rest.strip())
        elif first in ("", "parameter") and not rest.strip():
            print(list_options(self._ask, shutil.get_terminal_size().columns))
        else:
            self._change(lambda: with_option(self._ask, rest.strip() if first == "parameter" else text))

    def _change(self, change: Callable[[], tuple[Generate, str]]) -> None:
        try:
            self._ask, options = change()
        except UserError as error:
            self._say(f"{error}{'' if str(error).endswith('?') else ';'} /set lists the options")
        else:
            self._say(options)

    def _show(self) -> None:
        system = self._conversation.system
        facts = {
            "model": self._conversation.model,
            "system": "nothing" if system is None else system,
            "messages": str(len(self._conversation.turns)),
            "options": ", ".join(shown(self._ask, name) for name in OPTIONS),
        }
        columns = max(20, shutil.get_terminal_size().columns - 1)
        for name, fact in facts.items():
            print(textwrap.fill(fact, columns, initial_indent=f"{name:<10}", subsequent_indent=" " * 10))

    def _answer_again(self) -> None:
        turns = self._conversation.turns
        if not turns:
            self._say("nothing was answered yet")
            return
        if turns[-1][0] == "assistant":
            turns.pop()
        _, message = turns.pop()
        self._ask = dataclasses.replace(self._ask, seed=self._ask.seed + 1)  # the same one would give the same answer
        self._converse(message)

    def _save(self, name: str) -> None:
        if not name:
            self._say("/save FILE: name a file")
            return
        file = Path(name).expanduser()
        content = self._conversation.saved(as_json=file.suffix == ".json")
        try:
            with file.open("w" if file in self._saved else "x", encoding="utf-8") as stream:
                stream.write(content)
        except FileExistsError:
            self._say(f"{file} exists already; name another file")
        except (OSError, ValueError) as error:
            self._say(f"{file}: cannot be written: {getattr(error, 'strerror', None) or error}")
        else:
            self._saved.add(file)
            self._say(f"saved: {file}")

    def _converse(self, message: str) -> None:
        """Say it, and stream the answer. What was not answered was not said. Raises Declined, UserError."""
        turns = self._conversation.turns
        turns.append(("user", message))
        answer = ""
        try:
            try:
                prompt = self._conversation.prompt()
            except UserError as error:
                raise Declined(str(error)) from None
            answer = self._streamed(prompt.text, prompt.frame)
        finally:
            if answer:
                turns.append(("assistant", answer))
            else:
                turns.pop()

    def _streamed(self, prompt: str, frame: bool) -> str:
        """The answer, so far as it came."""
        self._texts += 1
        ask = dataclasses.replace(self._ask, request=str(self._texts), prompt=prompt, frame=frame)
        answer, finished, screen = "", None, Screen()
        try:
            for one in followed(self._client, ask):
                if isinstance(one, Finished):
                    finished = one
                else:
                    answer += one.text
                    screen.write(one.text)
        except KeyboardInterrupt as interrupt:
            self._client.send(Cancel(request=ask.request))  # it may have come while a token was shown
            if type(interrupt) is not KeyboardInterrupt:
                raise
        finally:
            if answer:
                print("\n" if self._lines.asks else "", flush=True)
        if finished is None:
            self._say("stopped" if answer else "stopped before there was an answer: what you said is taken back")
        elif finished.reason == "context":
            self._say("the context is full; /clear begins a new conversation")
        elif finished.reason == "length" and self._conversation.has_roles:
            self._say(f"ended after {finished.tokens} tokens, as -n says; /set max_tokens N changes that")
        elif not answer:
            self._say("the model has nothing to say to that: what you said is taken back")
        return answer


def _unknown(word: str) -> str:
    import difflib  # only a mistake pays for it

    near = difflib.get_close_matches(word, WORDS, n=1)
    meant = f"did you mean {near[0]}?" if near else "/help shows what there is."
    return f"there is no {word}; {meant} To say it to the model, begin with a blank"


def show_help(columns: int) -> str:
    """What can be typed, for a terminal of this width."""
    narrow = columns < NARROW_COLUMNS
    lines = []
    for typed, meaning in HELP.items():
        if narrow:
            lines.append(typed)
        indent = " " * (2 if narrow else INDENT)
        first = indent if narrow else f"{typed:<{INDENT}}"
        lines.append(textwrap.fill(meaning, max(20, columns - 1), initial_indent=first, subsequent_indent=indent))
    return "\n".join(lines)

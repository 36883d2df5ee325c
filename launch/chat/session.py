"""A chat in the terminal: messages go to the model and answers stream back; lines that begin with a slash are commands.

Ctrl-C stops the answer and nothing else.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

from neuronpipe.launch.chat.lines import FENCE, Lines
from neuronpipe.launch.chat.options import OPTIONS, list_options, reset_option, set_option, show_option
from neuronpipe.launch.client import Client, Declined
from neuronpipe.launch.generation.conversation import Conversation, Prompt
from neuronpipe.launch.generation.shown_answer import ShownAnswer
from neuronpipe.launch.generation.stream import stream
from neuronpipe.launch.generation.terminal import AnswerOutput
from neuronpipe.launch.progress import note_output
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Finished
from neuronpipe.protocol.messages.request import Cancel, Generate

HELP = {
    "/help": "show this",
    "/system [TEXT]": "show or set the system message; /system - removes it",
    "/set [OPTION VALUE]": "set a sampling option, e.g. /set temperature 0.7; /set alone lists the options",
    "/unset [OPTION]": "reset an option, or all of them, to the value at the start",
    "/show": "show the model, the system message and the options",
    "/clear": "begin a new conversation",
    "/again": "replace the last answer by a new one",
    "/save FILE": "write the conversation, as JSON (FILE.json) or as Markdown",
    "/exit": "end the chat, as Ctrl-D does",
    "\\": "at the end of a line: the message continues on the next line",
    FENCE: "begins and ends a message of several lines",
    "Ctrl-C": "stops the answer, or discards the line",
}
WORDS = tuple(entry.split()[0] for entry in HELP if entry.startswith("/"))
INDENT, NARROW_COLUMNS = 21, 60


class Chat:
    """A chat with one run.

    request: the sampling options; its prompt is replaced
    notify: called with lines for the user that are not answers
    hides_thinking: whether reasoning is not shown
    """

    def __init__(
        self,
        client: Client,
        conversation: Conversation,
        request: Generate,
        notify: Callable[[str], None],
        *,
        hides_thinking: bool = False,
    ) -> None:
        self._client, self._conversation, self._request, self._notify = client, conversation, request, notify
        self._initial_request, self._hides_thinking = request, hides_thinking
        self._requests_sent = 0
        self._saved: set[Path] = set()
        self._lines = Lines(WORDS, {"/set": OPTIONS, "/unset": OPTIONS})

    def run(self) -> None:
        """Handle messages and commands until the input ends. Raises UserError if the run ends."""
        while True:
            try:
                message = self._read_message()
                if message is None:
                    if self._lines.is_interactive:
                        print()
                    return
                if message.startswith("/") and "\n" not in message:
                    if not self._execute(message.strip()):
                        return
                elif message.strip():
                    self._converse(message)
            except Declined as declined:
                self._notify(f"{declined}; /clear begins a new conversation")
            except KeyboardInterrupt as interrupt:
                if type(interrupt) is not KeyboardInterrupt:
                    raise  # SIGTERM or SIGHUP
                print()
                self._notify("Ctrl-D or /exit ends the chat")

    def _read_message(self) -> str | None:
        """Return the next message; None at the end of the input. At a terminal, invalid input may be typed again."""
        while True:
            try:
                message = self._lines.message()
                note_output()
                return message
            except UserError as error:
                if not self._lines.is_interactive:
                    raise
                self._notify(str(error))

    def _execute(self, line: str) -> bool:
        """Execute a command; return False if it ends the chat."""
        command, _, argument = line.partition(" ")
        argument = argument.strip()
        match command:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/help" | "/?":
                print(show_help(shutil.get_terminal_size().columns))
            case "/clear":
                self._conversation.turns.clear()
                self._notify("a new conversation")
            case "/system":
                self._set_system(argument)
            case "/set":
                self._set(argument)
            case "/unset":
                self._change_options(lambda: reset_option(self._request, self._initial_request, argument))
            case "/show":
                self._show()
            case "/again":
                self._answer_again()
            case "/save":
                self._save(argument)
            case _:
                self._notify(_unknown(command))
        return True

    def _set_system(self, text: str) -> None:
        if text:
            try:
                self._conversation.set_system("" if text == "-" else text)
            except UserError as error:
                self._notify(str(error))
                return
        system = self._conversation.system
        self._notify("no system message" if system is None else f"system message: {system}")

    def _set(self, text: str) -> None:
        first, _, remainder = text.partition(" ")
        remainder = remainder.strip()
        if first == "system":  # `/set system` and `/set parameter` are Ollama's commands
            self._set_system(remainder)
        elif first in ("", "parameter") and not remainder:
            print(list_options(self._request, shutil.get_terminal_size().columns))
        else:
            self._change_options(lambda: set_option(self._request, remainder if first == "parameter" else text))

    def _change_options(self, change: Callable[[], tuple[Generate, str]]) -> None:
        try:
            self._request, options = change()
        except UserError as error:
            self._notify(f"{error}{'' if str(error).endswith('?') else ';'} /set lists the options")
        else:
            self._notify(options)

    def _show(self) -> None:
        system = self._conversation.system
        facts = {
            "model": self._conversation.model,
            "system": "none" if system is None else system,
            "messages": str(len(self._conversation.turns)),
            "options": ", ".join(show_option(self._request, name) for name in OPTIONS),
        }
        columns = max(20, shutil.get_terminal_size().columns - 1)
        for name, fact in facts.items():
            print(textwrap.fill(fact, columns, initial_indent=f"{name:<10}", subsequent_indent=" " * 10))

    def _answer_again(self) -> None:
        turns = self._conversation.turns
        if not turns:
            self._notify("there is no answer yet")
            return
        if turns[-1][0] == "assistant":
            turns.pop()
        _, message = turns.pop()
        # The same seed would give the same answer.
        self._request = dataclasses.replace(self._request, seed=self._request.seed + 1)
        self._converse(message)

    def _save(self, name: str) -> None:
        if not name:
            self._notify("/save FILE: name a file")
            return
        file = Path(name).expanduser()
        content = self._conversation.export(as_json=file.suffix == ".json")
        try:
            with file.open("w" if file in self._saved else "x", encoding="utf-8") as output:
                output.write(content)
        except FileExistsError:
            self._notify(f"{file} exists already; name another file")
        except (OSError, ValueError) as error:
            self._notify(f"{file}: cannot be written: {getattr(error, 'strerror', None) or error}")
        else:
            self._saved.add(file)
            self._notify(f"saved: {file}")

    def _converse(self, message: str) -> None:
        """Add a message, and stream the answer. A message without an answer is removed. Raises Declined, UserError."""
        turns = self._conversation.turns
        turns.append(("user", message))
        answer = ""
        try:
            try:
                prompt = self._conversation.prompt(may_think=self._request.grammar is None)
            except UserError as error:
                raise Declined(str(error)) from None
            answer = self._stream_answer(prompt)
        finally:
            if answer:
                turns.append(("assistant", answer))
            else:
                turns.pop()

    def _stream_answer(self, prompt: Prompt) -> str:
        """Return the answer without reasoning, or the part that came before Ctrl-C."""
        self._requests_sent += 1
        request = prompt.of(dataclasses.replace(self._request, request=str(self._requests_sent)))
        display, finished = ShownAnswer(prompt.form, AnswerOutput(), hides_thinking=self._hides_thinking), None
        try:
            for message in stream(self._client, request):
                if isinstance(message, Finished):
                    finished = message
                else:
                    display.add(message.text)
        except KeyboardInterrupt as interrupt:
            # Sent here as well: the interrupt may have come while a token was display, outside of the client.
            self._client.send(Cancel(request=request.request))
            if type(interrupt) is not KeyboardInterrupt:
                raise
        finally:
            display.finish()
            if display.shows_anything:
                print("\n" if self._lines.is_interactive else "", flush=True)
        self._notify_end(finished, display)
        return display.text

    def _notify_end(self, finished: Finished | None, display: ShownAnswer) -> None:
        """Notify of an answer that did not end by itself, or has no text."""
        answer = display.text
        if finished is None:
            before = "the answer" if display.reasoning else "the first token"
            self._notify("stopped" if answer else f"stopped before {before}: your message is removed")
        elif finished.reason == "context":
            self._notify("the context is full; /clear begins a new conversation")
        elif finished.reason == "length" and self._conversation.has_roles:
            self._notify(f"ended after {finished.tokens} tokens, the limit of -n; /set max_tokens N changes it")
        elif not answer:
            self._notify("the answer is empty: your message is removed")


def _unknown(command: str) -> str:
    import difflib  # imported here: only a mistake pays for it

    near = difflib.get_close_matches(command, WORDS, n=1)
    advice = f"did you mean {near[0]}?" if near else "/help lists the commands."
    return f"there is no {command}; {advice} To send it to the model, begin with a blank"


def show_help(columns: int) -> str:
    """Return the list of commands, for a terminal of this width."""
    narrow = columns < NARROW_COLUMNS
    lines = []
    for command, meaning in HELP.items():
        if narrow:
            lines.append(command)
        indent = " " * (2 if narrow else INDENT)
        first = indent if narrow else f"{command:<{INDENT}}"
        lines.append(textwrap.fill(meaning, max(20, columns - 1), initial_indent=first, subsequent_indent=indent))
    return "\n".join(lines)

"""`neuronpipe completion bash|zsh|fish`: what the shell needs to complete verbs, options, packages and files.

The script is made from the parsers, and holds all words: completing starts no Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import textwrap
from collections.abc import Iterator
from typing import Any

from neuronpipe.launch.arguments.parser import help_text
from neuronpipe.launch.arguments.verbs import ALIASES, TWO_WORD_VERBS, VERBS, verb_parser
from neuronpipe.plans.pull.package_library import VARIABLE
from neuronpipe.protocol.frozen import frozen

SHELLS = ("bash", "zsh", "fish")
HOW = {
    "bash": "~/.bashrc: source <(neuronpipe completion bash)",
    "zsh": "~/.zshrc, after compinit: source <(neuronpipe completion zsh)",
    "fish": "once: neuronpipe completion fish > ~/.config/fish/completions/neuronpipe.fish",
}
PACKAGES = f'"${{{VARIABLE}:-${{XDG_DATA_HOME:-$HOME/.local/share}}/neuronpipe}}/packages"'


@frozen
class Option:
    """One option as it is typed. values: what may follow it; None: nothing does."""

    names: tuple[str, ...]
    meaning: str
    values: tuple[str, ...] | None


@frozen
class Verb:
    """What a verb takes. words: what its first word may be, besides a file or a package."""

    name: str
    meaning: str
    options: tuple[Option, ...]
    words: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ways = "; ".join(HOW.values())
    parser.add_argument("shell", choices=SHELLS, help=f"the shell; to use it: {ways}")


def main(arguments: argparse.Namespace) -> int:
    made = {"bash": bash, "zsh": zsh, "fish": fish}[arguments.shell]
    print(made(list(verbs())), end="")
    return 0


def verbs() -> Iterator[Verb]:
    """Every verb and what it takes, aliases last."""
    said = {name: _verb(name, meaning) for name, meaning in VERBS.items()}
    for two_words in TWO_WORD_VERBS:
        first, second = two_words.split()
        verb = said[first]
        options = {option.names: option for option in (*verb.options, *_verb(two_words, "").options)}
        said[first] = Verb(verb.name, verb.meaning, tuple(options.values()), (*verb.words, second))
    said["help"] = dataclasses.replace(said["help"], words=tuple(VERBS))
    yield from said.values()
    for alias, meant in ALIASES.items():
        yield Verb(alias, said[meant].meaning, said[meant].options, said[meant].words)


def _verb(name: str, meaning: str) -> Verb:
    options, words = [], list[str]()
    for action in verb_parser(name)._actions:
        values = _values(action)
        if action.option_strings:
            options.append(
                Option(tuple(action.option_strings), help_text(action), None if action.nargs == 0 else values)
            )
        else:
            words += values
    return Verb(name, meaning, tuple(options), tuple(words))


def _values(action: argparse.Action) -> tuple[str, ...]:
    choices: Any = action.choices
    return tuple(map(str, choices)) if choices else ()


def bash(all_verbs: list[Verb]) -> str:
    """A completion function for bash, without bash-completion. Files are completed where nothing else fits."""
    options, values, words = [], [], []
    for verb in all_verbs:
        names = " ".join(name for option in verb.options for name in option.names)
        options.append(f"{verb.name}) echo {shlex.quote(names)} ;;")
        if verb.words:
            words.append(f"{verb.name}) echo {shlex.quote(' '.join(verb.words))} ;;")
        for option in verb.options:
            if option.values is not None:
                cases = "|".join(f"{verb.name}:{name}" for name in option.names)
                values.append(f"{cases}) echo {shlex.quote('+ ' + ' '.join(option.values))} ;;")
    case = {"options": options, "values": values, "words": words}
    functions = "\n".join(
        f'_neuronpipe_{name}() {{\n    case "$1" in\n{textwrap.indent(chr(10).join(lines), "    ")}\n    esac\n}}'
        for name, lines in case.items()
    )
    return f"""# Completes neuronpipe in bash.
{functions}
_neuronpipe() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} verb=${{COMP_WORDS[1]}} found
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W {shlex.quote(" ".join(verb.name for verb in all_verbs))} -- "$current"))
        return
    fi
    found=$(_neuronpipe_values "$verb:$before")
    if [ -n "$found" ]; then
        COMPREPLY=($(compgen -W "${{found#+}}" -- "$current"))
    elif [ "${{current#-}}" != "$current" ]; then
        COMPREPLY=($(compgen -W "$(_neuronpipe_options "$verb")" -- "$current"))
    else
        found="$(_neuronpipe_words "$verb") $(ls {PACKAGES} 2>/dev/null | tr '\\n' ' ')"
        COMPREPLY=($(compgen -W "$found" -- "$current"))
    fi
}}
complete -o default -F _neuronpipe neuronpipe ./launch/neuronpipe
"""


def zsh(all_verbs: list[Verb]) -> str:
    """A completion function for zsh, which shows what each word means."""
    cases = []
    for verb in all_verbs:
        specs = []
        for option in verb.options:
            takes = "" if option.values is None else f":value:{_zsh_values(option.values)}"
            for name in option.names:
                specs.append(shlex.quote(f"*{name}[{_zsh_escaped(option.meaning)}]{takes}"))
        specs.append(shlex.quote(f"*:word:_neuronpipe_words {' '.join(verb.words)}"))
        cases.append(f"    {verb.name}) _arguments {' '.join(specs)} ;;")
    described = "\n".join(f"    {shlex.quote(f'{verb.name}:{verb.meaning}')}" for verb in all_verbs)
    newline = "\n"
    return f"""#compdef neuronpipe
# Completes neuronpipe in zsh.
_neuronpipe_words() {{
    local -a named
    named=({PACKAGES}/*(N:t))
    compadd -- "$@" $named
    _files
}}
_neuronpipe() {{
    local -a known
    known=(
{described}
    )
    if (( CURRENT == 2 )); then
        _describe verb known
        return
    fi
    local verb=$words[2]
    shift words
    (( CURRENT-- ))
    case $verb in
{newline.join(cases)}
    esac
}}
compdef _neuronpipe neuronpipe
"""


def _zsh_values(values: tuple[str, ...]) -> str:
    return f"({' '.join(values)})" if values else "_files"


def _zsh_escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "\\[]:" else letter for letter in text)


def fish(all_verbs: list[Verb]) -> str:
    """Completions for fish, a line for each option."""
    lines = ["# Completes neuronpipe in fish.", "complete -c neuronpipe -f"]
    for verb in all_verbs:
        lines.append(f"complete -c neuronpipe -n __fish_use_subcommand -a {verb.name} -d {_fish(verb.meaning)}")
        seen = f'-n "__fish_seen_subcommand_from {verb.name}"'
        for option in verb.options:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
            takes = ""
            if option.values is not None:
                takes = f" -x -a {_fish(' '.join(option.values))}" if option.values else " -r -F"
            lines.append(f"complete -c neuronpipe {seen} {names}{takes} -d {_fish(option.meaning)}")
        if verb.words:
            lines.append(f"complete -c neuronpipe {seen} -a {_fish(' '.join(verb.words))}")
    data = f"(set -q {VARIABLE}; and echo ${VARIABLE}; or echo ~/.local/share/neuronpipe)"
    lines.append(f'complete -c neuronpipe -n "not __fish_use_subcommand" -F -a "(ls {data}/packages 2>/dev/null)"')
    return "\n".join(lines) + "\n"


def _fish(text: str) -> str:
    """A word in single quotes, in which fish knows two escapes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

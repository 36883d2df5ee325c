"""`neuronpipe completion bash|zsh|fish`: print what the shell needs to complete verbs, options, packages and files.

shtab makes the script from the parsers. The script holds all words, so that completing starts no Python. After an
upgrade, the line that sources it makes it again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from neuronpipe.launch.arguments.verbs import ALIASES, DESCRIPTION, TWO_WORD_VERBS, VERBS, verb_module, verb_parser
from neuronpipe.plans.pull.package_library import VARIABLE

SHELLS = ("bash", "zsh", "fish")
SETUP = {
    "bash": "in ~/.bashrc: source <(neuronpipe completion bash)",
    "zsh": "in ~/.zshrc, after compinit: source <(neuronpipe completion zsh)",
    "fish": "once: neuronpipe completion fish > ~/.config/fish/completions/neuronpipe.fish",
}
_PACKAGES = f'"${{{VARIABLE}:-${{XDG_DATA_HOME:-$HOME/.local/share}}/neuronpipe}}/packages"'
_PREAMBLES = {
    "bash": f"""
_neuronpipe_packages() {{
    compgen -W "$2 $(ls {_PACKAGES} 2>/dev/null | tr '\\n' ' ')" -- "$1"
    compgen -f -- "$1"
}}
_neuronpipe_profile() {{ _neuronpipe_packages "$1" "device diff"; }}
""",
    "zsh": f"""
_neuronpipe_packages() {{
    local -a names
    names=({_PACKAGES}/*(N:t))
    compadd -- "$@" $names
    _files
}}
_neuronpipe_profile() {{
    compadd -- device diff
    _neuronpipe_packages
}}
""",
    "fish": f"""
function _neuronpipe_packages
    set -l data ~/.local/share/neuronpipe
    set -q XDG_DATA_HOME; and set data $XDG_DATA_HOME/neuronpipe
    set -q {VARIABLE}; and set data ${VARIABLE}
    ls $data/packages 2>/dev/null
    __fish_complete_path (commandline -ct)
end
function _neuronpipe_profile
    printf '%s\\n' device diff
    _neuronpipe_packages
end
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help=f"the shell; to use the script: {'; '.join(SETUP.values())}")


def main(arguments: argparse.Namespace) -> int:
    import shtab  # imported here: the fuzz tests and other verbs need no shtab

    script = shtab.complete(_complete_parser(), arguments.shell, preamble=_PREAMBLES[arguments.shell])
    print(script, end="" if script.endswith("\n") else "\n")
    if arguments.shell == "bash":  # the script of a checkout
        print("complete -o bashdefault -F _shtab_neuronpipe ./launch/neuronpipe")
    return 0


def _complete_parser() -> argparse.ArgumentParser:
    """Return a parser with all verbs and their arguments, marked with what completes them."""
    parser = argparse.ArgumentParser(prog="neuronpipe", description=DESCRIPTION)
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    subparsers = parser.add_subparsers(dest="verb")
    for name, verb in {**{name: name for name in VERBS}, **ALIASES}.items():
        subparser = subparsers.add_parser(name, help=VERBS[verb], description=VERBS[verb])
        module = verb_module(verb)
        module.add_arguments(subparser)
        if hasattr(module, "COMMON_OPTIONS"):
            subparser.add_argument("--help-all", action="store_true", help="show all options and exit")
        for two_words in TWO_WORD_VERBS:
            if two_words.startswith(f"{verb} "):
                _add_options(subparser, two_words)
        for action in subparser._actions:
            _mark(action, verb)
    return parser


def _add_options(parser: argparse.ArgumentParser, two_words: str) -> None:
    """Add the options of a verb of two words to the parser of its first word."""
    for action in verb_parser(two_words)._actions:
        if action.option_strings and not {*action.option_strings} & {*parser._option_string_actions}:
            parser._add_action(action)


def _mark(action: Any, verb: str) -> None:
    import shtab

    if action.choices:
        action.choices = list(action.choices)  # shtab takes a mapping for subcommands
    elif action.dest == "topic":
        action.choices = list(VERBS)
    elif action.dest == "package":
        function = "_neuronpipe_profile" if verb == "profile" else "_neuronpipe_packages"
        action.complete = {"bash": function, "zsh": function, "fish": f"({function})"}
    elif action.type is Path:
        action.complete = shtab.FILE

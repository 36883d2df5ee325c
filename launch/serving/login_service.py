"""A server that starts by itself: the file that systemd or Termux:Boot reads, and the commands around it. Pure.

| system | file | starts | survives |
|---|---|---|---|
| Linux with systemd | a unit of this user | at login, with lingering at boot | the logout, with lingering |
| Termux on a phone | a script of Termux:Boot | at boot, with a wake lock | a screen that is off |
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from neuronpipe.protocol.errors import UserError
from neuronpipe.services.runtime.listener import KEY_VARIABLE

MARK = "# Written by `neuronpipe serve --install`; `neuronpipe serve --uninstall` removes it."
UNIT = "neuronpipe.service"
INSTALL = "--install"
OPTIONS_WITHOUT_IDLE_END = ("--keep-alive", "--run", "--plan")
KEEP_ALIVE = ("--keep-alive", "5m")


class Command(NamedTuple):
    """A command around the file.

    purpose: what does not work if it fails
    """

    words: tuple[str, ...]
    purpose: str


class LoginService(NamedTuple):
    """The file of a server that starts by itself.

    begin, end: commands after the file was written, and before it is removed
    log: where the server's messages are
    """

    path: Path
    text: str
    begin: tuple[Command, ...]
    end: tuple[Command, ...]
    log: str


def server_words(words: Sequence[str]) -> list[str]:
    """Return the words of the command that the file starts: `serve` with the options that were typed.

    The key is left out, since everyone on the machine can read the words of a process. Idle runs end, unless an option
    says otherwise.

    words: those of the command line, `serve` with --install
    """
    chosen_words, following = list[str](), iter(words)
    for word in following:
        if word == "--key":
            next(following, None)
        elif not word.startswith("--key=") and not (len(word) > 2 and INSTALL.startswith(word)):
            chosen_words.append(word)
    names = {word.partition("=")[0] for word in chosen_words}
    return chosen_words if names.intersection(OPTIONS_WITHOUT_IDLE_END) else [*chosen_words, *KEEP_ALIVE]


def login_service(
    environment: Mapping[str, str], home: Path, user: str, program: Sequence[str], folder: Path, key: str | None
) -> LoginService:
    """Return the service of this system. Raises UserError if the system has no way to start it.

    program: the words that start the server
    folder: the folder in which it starts, to which relative paths refer
    key: the key of clients
    """
    for word in (*program, str(folder)):
        if not word.isprintable():
            raise UserError(f"{word!r}: has control characters, which a file of a service cannot hold")
    if "TERMUX_VERSION" in environment:
        prefix = Path(environment.get("PREFIX", "/data/data/com.termux/files/usr"))
        log = home / ".neuronpipe-serve.log"
        text = _boot_script(prefix, program, folder, key, log)
        return LoginService(home / ".termux/boot/neuronpipe", text, (), (), str(log))
    if environment.get("XDG_RUNTIME_DIR") is None and not Path("/run/systemd/system").is_dir():
        raise UserError("--install: expected systemd, or Termux on a phone; start `neuronpipe serve` yourself here")
    configuration = Path(environment.get("XDG_CONFIG_HOME", ""))
    base = configuration if configuration.is_absolute() else home / ".config"
    systemctl = ("systemctl", "--user")
    return LoginService(
        path=base / "systemd/user" / UNIT,
        text=_unit(program, folder, key),
        begin=(
            Command((*systemctl, "daemon-reload"), "systemd does not know the file"),
            Command((*systemctl, "enable", UNIT), "the server does not start at login"),
            Command((*systemctl, "restart", UNIT), "the server does not run now"),
            Command(("loginctl", "enable-linger", user), "the server ends at logout"),
        ),
        end=(Command((*systemctl, "disable", "--now", UNIT), "the server still runs"),),
        log=f"journalctl --user -u {UNIT}",
    )


def _unit(program: Sequence[str], folder: Path, key: str | None) -> str:
    environment = "" if key is None else f"Environment={_systemd_word(f'{KEY_VARIABLE}={key}', expands='')}\n"
    return f"""{MARK}
[Unit]
Description=neuronpipe, language models over HTTP
After=network.target

[Service]
ExecStart={" ".join(_systemd_word(word, expands="$") for word in program)}
WorkingDirectory={str(folder).replace("%", "%%")}
{environment}Restart=on-failure
RestartSec=5
KillMode=mixed
TimeoutStopSec=60

[Install]
WantedBy=default.target
"""


def _systemd_word(word: str, *, expands: str) -> str:
    """Quote a word for a unit.

    expands: the characters besides % that are doubled, since systemd expands what follows one
    """
    for character in ("%", *expands):
        word = word.replace(character, 2 * character)
    word = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{word}"'


def _boot_script(prefix: Path, program: Sequence[str], folder: Path, key: str | None, log: Path) -> str:
    export = "" if key is None else f"export {KEY_VARIABLE}={shlex.quote(key)}\n"
    return f"""#!{prefix}/bin/sh
{MARK}
termux-wake-lock
cd {shlex.quote(str(folder))} || exit
{export}exec {shlex.join(program)} >{shlex.quote(str(log))} 2>&1
"""

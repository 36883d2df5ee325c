"""Any words after `neuronpipe`: work begins, or one line says what is wrong, with exit code 2. Never a traceback.

In this process, through `main`. What would start processes, take minutes or touch live runs is replaced by `Begun`:
up to there everything a person can get wrong has been looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from neuronpipe.launch import client, perplexity, progress
from neuronpipe.launch.arguments.verbs import VERBS, verb_module
from neuronpipe.launch.bench import live
from neuronpipe.launch.cli import main
from neuronpipe.launch.supervisor import start
from neuronpipe.launch.verbs.measurements import conformance, doctor
from neuronpipe.launch.verbs.packages import convert
from neuronpipe.launch.verbs.runs import ask, chat, run, serve, throttle, up
from neuronpipe.plans.device.thermal import ThermalState
from neuronpipe.plans.lab import gguf_counterpart
from neuronpipe.plans.lab.synth import measured_statistics as measure
from neuronpipe.plans.lab.synth import synthesize as make
from neuronpipe.plans.predictor import profiling as profiling
from neuronpipe.protocol import run_directory
from neuronpipe.protocol.errors import NotRunning
from neuronpipe.services.offload.npu import graph_files as files

EXAMPLES = int(os.environ.get("NEURONPIPE_FUZZ_EXAMPLES", "100"))  # a few seconds; more by hand
VALUES = st.one_of(
    st.sampled_from((
        "", "0", "1", "-1", "2", "64", "65", "1e400", "nan", "inf", "-inf", "0.5", "50%", "101%", "1GiB",
        "9" * 400 + "G", "9" * 5000, "0B", "½", "٣", "exact", "predicted", "thresholded", "decode",
        "decode.99", "cache=", "=", "5=nan", "5=1", "json",
        "{", "argv:", "a.b:C", "pp1,tg1", "pp0", "/nowhere", "/", "/proc/self/mem", "-", "--", "a b", "\x1b[2J",
        "t\udce9", "prefetch", "x" * 300, "tcp://a?key=b", "tcp://[:1", "default",
        "turbosparse-100m",
    )),
    st.text(st.characters(exclude_characters="\0"), max_size=12),
    st.integers().map(str),
    st.floats().map(str),
)  # fmt: skip


class Begun(Exception):
    """The words were good, as far as they can be judged without doing the work."""


def begun(*_: object, **__: object) -> NoReturn:
    raise Begun


def nowhere(*_: object) -> NoReturn:
    raise NotRunning("no run of yours; start one with `neuronpipe up`")


def actions_of(verb: str) -> list[argparse.Action]:
    """The arguments of a verb."""
    parser = argparse.ArgumentParser()
    verb_module(verb).add_arguments(parser)
    return parser._actions


ACTIONS = {verb: actions_of(verb) for verb in VERBS}


@pytest.fixture(scope="module", autouse=True)
def no_work(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Nothing is started, nothing is found, and what is written is written in a folder that goes."""
    folder = tmp_path_factory.mktemp("words")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setattr(run_directory, "_bound_places", set)  # where other runs of this user are
        for module in (start, run, chat, up, serve, live, perplexity):
            patch.setattr(module, "started_run", begun)
        for verb in (ask, throttle, client):
            patch.setattr(verb, "attach", nowhere)
        patch.setattr(progress, "SILENT_S", float("inf"))
        patch.setattr(serve, "bind", begun)
        patch.setattr(doctor, "checks", begun)
        patch.setattr(conformance, "Suite", begun)
        patch.setattr(convert, "convert", begun)
        patch.setattr(convert, "convert_with_options", begun)
        patch.setattr(make, "synthesize", begun)
        patch.setattr(gguf_counterpart, "write_gguf_counterpart", begun)
        patch.setattr(profiling, "profile", begun)
        patch.setattr(measure, "measure", begun)
        patch.setattr(files, "write_graphs", begun)
        if importlib.util.find_spec("onnx") is not None:
            patch.setattr("neuronpipe.services.offload.npu.accuracy_measurement.measure", begun)
        patch.setattr(throttle, "read_thermal_state", lambda *_: ThermalState(sensors=(), clock_share=None))
        patch.setattr(throttle, "battery_status", lambda: "")
        yield


def words_of(draw: st.DrawFn, action: argparse.Action) -> list[str]:
    """One argument, as it should be or nearly so."""
    numbers = {int: st.integers(-2, 1 << 70), float: st.floats(-2, 200)}.get(action.type, st.nothing())  # type: ignore[call-overload]
    good = st.sampled_from(sorted(action.choices)) if action.choices else numbers.map(str)
    value = draw(good | VALUES)
    if not action.option_strings:
        return [value]
    option = draw(st.sampled_from(action.option_strings))
    if action.nargs == 0:
        return [option]
    return draw(
        st.sampled_from(([option, value], [option, value], [f"{option}={value}"], [option], [f"{option}e", value]))
    )


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A verb, mostly one that there is, what it needs, and some of what it takes."""
    verb = draw(st.one_of(st.sampled_from(sorted(VERBS)), st.sampled_from(sorted(VERBS)), VALUES))
    actions = ACTIONS.get(verb, ACTIONS["run"])
    needed = [action for action in actions if action.required and draw(st.integers(0, 9))]
    chosen = [*needed, *draw(st.lists(st.sampled_from(actions), max_size=4))]
    words = [verb, *(word for action in chosen for word in words_of(draw, action))]
    words += draw(st.lists(VALUES, max_size=1)) if draw(st.integers(0, 4)) == 0 else []
    return draw(st.permutations(words)) if draw(st.integers(0, 9)) == 0 else words


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(words=command_lines(), piped=st.sampled_from(("", "the rain")))
def test_any_words_are_obeyed_or_refused_in_one_line(words: list[str], piped: str) -> None:
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        patch.setattr("sys.stdin", io.StringIO(piped))
        try:
            code = main(words)
        except Begun:
            return
        except SystemExit as asked:  # --help and --version
            code = asked.code
    said = errors.getvalue()
    assert code in (0, 1, 2, 3), said
    assert said or out.getvalue()
    if code in (2, 3):
        line = said.splitlines()[-1]
        assert said in (f"{line}\n", f"{said.splitlines()[0]}\n{line}\n")  # a warning may stand before it
        assert line.startswith("neuronpipe: ")
        assert line.isprintable()

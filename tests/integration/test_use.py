"""Other implementations in a role's place: a class, a program; and what is said of one that cannot be had."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.engine import ReferenceEngine

from tests.conformance.checkpoints import RECIPES, tokens
from tests.pipeline import Shell, beside_progress

Converted = Callable[..., Package]
FIRING_LOG = "decode=neuronpipe.services.examples.firing:FiringLog"


def fired_in(*logs: Path) -> Counter[tuple[int, int]]:
    """How often each (layer, neuron) stands in what the workers logged of their steps."""
    lines = [line for log in logs for line in log.read_text().splitlines() if line.startswith("step ")]
    return Counter((int(layer), int(neuron)) for line in lines for layer, neuron in re.findall(r" (\d+)/(\d+)", line))


def test_a_worker_that_logs_which_neurons_fire_names_those_of_the_reference_engine(
    shell: Shell, converted: Converted
) -> None:
    package, prompt = converted("relu2", "f16"), tokens(RECIPES["relu2"], 9)
    options = ("--use", FIRING_LOG, "--workers", "2", "--ffn-resident", "50%")
    with shell.up(package.path, *options) as run:
        said = run.ask(prompt, 8)["token_ids"]
        logged = fired_in(run.path / "decode.0.log", run.path / "decode.1.log")
    engine = ReferenceEngine(package)
    through = engine.run([*prompt, *said[:-1]])
    assert said == through.logits[len(prompt) - 1 :].argmax(axis=1).tolist()
    fired = through.fired - engine.run(prompt).fired
    expected = {(layer, neuron): int(fired[layer, neuron]) for layer, neuron in zip(*fired.nonzero(), strict=True)}
    assert logged == expected
    assert len(logged) > 100


def test_a_program_is_started_in_its_process_and_told_where_it_is(shell: Shell, converted: Converted) -> None:
    (shell.folder / "told.py").write_text(
        "import os, sys\n"
        "names = ('RUN', 'ROLE', 'INDEX', 'PACKAGE')\n"
        "words = sys.argv[1:] + [os.environ['NEURONPIPE_' + name] for name in names]\n"
        "open('told.txt', 'w').write(' '.join(words))\n"
        "assert os.path.exists(os.environ['NEURONPIPE_PLAN']) and os.path.exists(sys.argv[1] + '/run.json')\n"
        "sys.exit('this one cannot compute')\n"
    )
    package, place = converted("relu2", "f16"), shell.folder / "run"
    use = f"decode.1=argv:{shlex.quote(sys.executable)} told.py {{run}} {{role}}.{{index}}"
    done = shell.call("run", package.path, "-p", "x", "--workers", "2", "--use", use, "--run", place, cwd=shell.folder)
    assert done.code == 2
    assert beside_progress(done.errors) == "neuronpipe: decode.1 died 6 times within 30 s: this one cannot compute\n"
    told = (shell.folder / "told.txt").read_text()
    assert told == f"{place} decode.1 {place} decode 1 {package.path}"


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("decode", "write ROLE=package.module:Class or ROLE=argv:COMMAND"),
        ("decoder=a:B", "'decoder' is no role; the roles are loader, cache, decode, prefill"),
        ("decode=a.B", "neither package.module:Class nor argv:COMMAND"),
        ("decode=argv:'", "No closing quotation"),
        ("decode=argv:", "names no program"),
        ("decode.2=a:B", "this plan has decode.0, decode.1"),
        ("decode=no_such_module:B", "no_such_module:B: cannot be imported in"),
        ("loader=os.path:B", "os.path:B: module os.path has no B"),
        ("cache=argv:./no-such-program", "./no-such-program cannot be started in"),
    ],
)
def test_what_cannot_be_used_is_refused(shell: Shell, converted: Converted, use: str, said: str) -> None:
    assert said in shell.refused("run", converted("relu2", "f16").path, "-p", "x", "--workers", "2", "--use", use)


def test_another_cache_policy_changes_the_misses_and_no_token(shell: Shell, converted: Converted) -> None:
    package, prompt = converted("relu2", "f16"), tokens(RECIPES["relu2"], 9)
    with shell.up(package.path) as run:
        expected = run.ask(prompt, 24)["token_ids"]
    policy = "cache=neuronpipe.services.examples.random_eviction:RandomEviction"
    with shell.up(package.path, "--ffn-resident", "50%", "--use", policy) as run:
        answer = run.ask(prompt, 24)
    assert answer["token_ids"] == expected
    assert answer["flash"]["reads"] > 0, answer["flash"]

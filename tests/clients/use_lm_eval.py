"""lm-eval on three local tasks: its log-likelihoods are those of `neuronpipe perplexity` to the last bit."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import MODEL, URL, report

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

PACKAGE = Path(sys.argv[3])
NEURONPIPE = Path(__file__).resolve().parents[2] / "launch" / "neuronpipe"
END = "<|endoftext|>"
TEXTS = ["def fibonacci(n):\n    if n < 2:\n        return n", "import os\nimport sys\n\nprint(os.getcwd())"]
CHOICES = [" os", " fibonacci", " zebra"]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {name}
metadata: {{version: 1}}
"""
MORE = {
    "multiple_choice": "doc_to_text: '{{text}}'\ndoc_to_choice: choices\ndoc_to_target: 0\ntarget_delimiter: ''\n"
    "metric_list: [{metric: acc}]\n",
    "loglikelihood_rolling": "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: word_perplexity}]\n",
    "generate_until": "doc_to_text: '{{text}}'\ndoc_to_target: ''\nmetric_list: [{metric: exact_match}]\n"
    'generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16, temperature: 0}\n',
}


def samples(name: str) -> list[dict[str, Any]]:
    """Return the samples that lm-eval logs for a task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory(prefix="lm-eval-") as place:
        folder = Path(place)
        rows = [{"text": text, "choices": CHOICES} for text in TEXTS]
        (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=folder / "rows.json") + MORE[name])
        (folder / "tokenizer.json").write_text((PACKAGE / "tokenizer.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END})
        )
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": MODEL,
                "base_url": f"{URL}/completions",
                "tokenizer": str(folder),
                "max_length": 512,
                "num_concurrent": 2,
                "max_retries": 1,
            },
            tasks=[name],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
            log_samples=True,
        )
    return sorted(results["samples"][name], key=lambda sample: sample["doc_id"])


@functools.cache
def negative_logs(text: str) -> list[float]:
    """Return the negative logarithms that `perplexity` prints for each token after the first."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        words = [str(NEURONPIPE), "perplexity", str(PACKAGE), "--text", file.name, "--path", "prefill", "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout)["nll_by_token"])


def same(value: float, expected: float) -> None:
    assert value == expected, f"lm-eval has {value!r}, perplexity {expected!r}"


def multiple_choice() -> None:
    """The choice's tokens are those that the text has more with it than without: each begins with a blank."""
    for sample in samples("multiple_choice"):
        for choice, (response, *_) in zip(CHOICES, sample["resps"], strict=True):
            whole, text = negative_logs(sample["doc"]["text"] + choice), negative_logs(sample["doc"]["text"])
            same(float(response[0]), sum(-rated for rated in whole[len(text) :]))


def loglikelihood_rolling() -> None:
    for sample in samples("loglikelihood_rolling"):
        ((response,),) = sample["resps"]
        value = response[0] if isinstance(response, (list, tuple)) else response
        same(float(value), sum(-rated for rated in negative_logs(END + sample["doc"]["text"])))


def generate_until() -> None:
    responses = ["".join(response) for sample in samples("generate_until") for response in sample["resps"]]
    assert len(responses) == len(TEXTS)
    assert any(responses), responses
    assert not any("\n\n" in response for response in responses), responses


report(multiple_choice=multiple_choice, loglikelihood_rolling=loglikelihood_rolling, generate_until=generate_until)

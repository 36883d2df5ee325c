"""guidellm, a benchmark: eight short requests of random text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from report import URL, report

PACKAGE = Path(sys.argv[3])


def benchmark() -> None:
    with tempfile.TemporaryDirectory(prefix="guidellm-") as place:
        folder = Path(place)
        (folder / "tokenizer.json").write_text((PACKAGE / "tokenizer.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
        )
        options = {
            "backend": f"kind=openai_http,target={URL.removesuffix('/v1')}",
            "profile": "kind=synchronous",
            "constraint": "kind=max_requests,count=8",
            "tokenizer": f"kind=hf_auto,model={folder}",
            "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
            "output": f"kind=json,path={folder / 'out.json'}",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        program = Path(sys.executable).with_name("guidellm")
        done = subprocess.run(
            [str(program), "run", "--disable-progress", *words],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-300:] + done.stderr[-300:]
        counts = json.loads((folder / "out.json").read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (counts["successful"], counts["errored"]) == (8, 0), counts


report(benchmark=benchmark)

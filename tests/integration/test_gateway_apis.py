"""The rest of the API as clients see it: prompts that are scored, responses, small doors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer

from tests.http_client import Server, served
from tests.pipeline import Shell

PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n"
END = 0


@pytest.fixture(scope="module")
def server(long_shell: Shell) -> Iterator[Server]:
    with served(long_shell, "--sequences", "2") as one:
        yield one


@pytest.fixture(scope="module")
def tokenizer() -> FileTokenizer:
    return FileTokenizer((DEMO / "tokenizer.json").read_bytes())


def echoed(server: Server, prompt: Any, **options: Any) -> Any:
    body = {"prompt": prompt, "temperature": 0, "echo": True, "logprobs": 1, "max_tokens": 0, **options}
    reply = server.post("/v1/completions", **body)
    assert reply.status == 200, reply.body
    return reply.json()["choices"][0]


def test_a_scored_prompt_has_the_very_numbers_of_perplexity(
    server: Server, shell: Shell, tokenizer: FileTokenizer, tmp_path: Path
) -> None:
    """As an evaluation sends its requests: token ids, one token of an answer that is left out again."""
    text = tmp_path / "text"
    text.write_text(PROMPT * 12)
    scored = {path: shell.json("perplexity", DEMO, "--text", text, "--path", path) for path in ("prefill", "decode")}
    tokens = tokenizer.encode(text.read_text())
    assert len(tokens) > 64, "more than one chunk beside other texts"
    for options in ({"max_tokens": 0}, {"max_tokens": 1}, {"max_tokens": 1, "logit_bias": {str(END): 100}}):
        found = echoed(server, tokens, **options)["logprobs"]
        ratings = found["token_logprobs"][: len(tokens)]
        assert len(found["token_logprobs"]) == len(tokens) + options["max_tokens"]
        assert ratings[0] is None
        for path in scored.values():
            assert [-one for one in ratings[1:]] == path["nll_by_token"]
    assert echoed(server, text.read_text())["logprobs"]["token_logprobs"] == ratings


def test_a_scored_prompt_shows_where_its_tokens_begin_and_which_were_likeliest(
    server: Server, client: openai.OpenAI
) -> None:
    choice = echoed(server, PROMPT, logprobs=3, max_tokens=4)
    plain = client.completions.create(model="neuronpipe-demo", prompt=PROMPT, temperature=0, max_tokens=4, logprobs=3)
    assert choice["text"] == PROMPT + plain.choices[0].text
    found = choice["logprobs"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert plain.choices[0].logprobs is not None
    assert found["token_logprobs"][-4:] == plain.choices[0].logprobs.token_logprobs
    assert found["top_logprobs"][0] is None
    for token, logprob, top in list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))[
        1:
    ]:
        assert top[token] == logprob
        assert len(top) in (3, 4)
        assert max(top.values()) >= logprob


def test_prompts_are_scored_beside_each_other_and_in_a_stream(server: Server) -> None:
    alone = [echoed(server, prompt)["logprobs"] for prompt in (PROMPT, "import os\n")]
    body = {"prompt": [PROMPT, "import os\n"], "echo": True, "logprobs": 1, "max_tokens": 0}
    assert [one["logprobs"] for one in server.post("/v1/completions", **body).json()["choices"]] == alone
    chunks = server.post("/v1/completions", **body, stream=True).events()
    ratings = {
        chunk["choices"][0]["index"]: chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["text"]
    }
    assert [ratings[0], ratings[1]] == alone


def test_a_response_is_the_answer_of_a_chat(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "neuronpipe-demo", "temperature": 0}
    said = client.chat.completions.create(
        **options, messages=[{"role": "user", "content": PROMPT}], max_completion_tokens=8
    )
    response = client.responses.create(**options, input=PROMPT, max_output_tokens=8)
    assert response.output_text == said.choices[0].message.content
    assert response.status == "incomplete"
    assert response.usage is not None
    assert said.usage is not None
    assert response.usage.total_tokens == said.usage.total_tokens
    with client.responses.stream(**options, input=PROMPT, max_output_tokens=8) as stream:
        events = list(stream)
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == response.output_text
    )
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == response.output_text
    with pytest.raises(openai.BadRequestError, match="send the whole conversation in input"):
        client.responses.create(**options, input=PROMPT, previous_response_id=response.id)


def test_a_response_follows_its_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    asked: dict[str, Any] = {
        "model": "neuronpipe-demo",
        "input": PROMPT,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
        "extra_body": {"seed": 1},
    }
    response = client.responses.create(**asked)
    assert response.status == "completed"
    assert list(json.loads(response.output_text)) == ["n"], "an object has the properties that its schema names"
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == response.output_text


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-c]"}}, lambda text: text[:3].isdigit() and text[3] == "-"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, lambda text: text in ("true", "false")),
        ({"grammar": 'root ::= ("ab" | "cd") tail\ntail ::= [0-9] [0-9]'}, lambda text: text[:2] in ("ab", "cd")),
    ],
    ids=["choice", "regex", "json", "gbnf"],
)
def test_an_answer_follows_other_kinds_of_grammar(server: Server, asked: Any, fits: Any) -> None:
    reply = server.post("/v1/completions", prompt=PROMPT, max_tokens=20, **asked)
    assert reply.status == 200, reply.body
    choice = reply.json()["choices"][0]
    assert fits(choice["text"]), choice
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "asked",
    [{"structured_outputs": {"regex": "("}}, {"grammar": "root := x"}, {"structured_outputs": {"grammar": "x y z"}}],
    ids=json.dumps,
)
def test_a_grammar_that_is_none_is_refused(server: Server, asked: Any) -> None:
    reply = server.post("/v1/completions", prompt=PROMPT, max_tokens=4, **asked)
    assert reply.status == 400
    assert reply.json()["error"]["message"].startswith("grammar: ")


def test_texts_and_tokens_become_each_other(server: Server, tokenizer: FileTokenizer) -> None:
    tokens = tokenizer.encode(PROMPT, frame=False)
    assert server.post("/tokenize", content=PROMPT).json() == {"tokens": tokens}
    assert server.post("/tokenize", content=PROMPT, add_special=True).json() == {"tokens": tokenizer.encode(PROMPT)}
    assert server.post("/detokenize", tokens=tokens).json() == {"content": PROMPT}
    pieces = server.post("/tokenize", content="\N{SNOWMAN} x", with_pieces=True).json()["tokens"]
    spelled = b"".join(
        one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in pieces
    )
    assert spelled.decode() == "\N{SNOWMAN} x"
    assert server.post("/tokenize", content="").json() == {"tokens": []}
    assert server.post("/detokenize", tokens=[END, *tokens]).json() == {"content": f"<|endoftext|>{PROMPT}"}
    without = server.post("/detokenize", tokens=[END, *tokens], skip_special_tokens=True)
    assert without.json() == {"content": PROMPT}
    assert server.post("/detokenize", tokens=[1 << 20]).status == 400
    assert server.post("/tokenize", content="x" * (1 << 21)).json()["error"]["code"] == "context_length_exceeded"


def test_what_other_servers_have_beside_the_api(server: Server) -> None:
    props = server.call("GET", "/props").json()
    model = server.call("GET", "/v1/models").json()["data"][0]
    assert props["default_generation_settings"]["n_ctx"] == model["context_tokens"]
    assert props["total_slots"] == 2
    for path in ("/v1/embeddings", "/embeddings"):
        reply = server.post(path, input="x", model="y")
        assert (reply.status, reply.json()["error"]["code"]) == (400, "unsupported_endpoint")
    for path in ("/models", "/models/neuronpipe-demo"):
        assert server.call("GET", path).json() == server.call("GET", f"/v1{path}").json()
    for path, body in (
        ("/completions", {"prompt": PROMPT}),
        ("/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/responses", {"input": PROMPT}),
    ):
        most = "max_output_tokens" if path == "/responses" else "max_tokens"
        assert server.post(path, **body, **{most: 2}).status == 200

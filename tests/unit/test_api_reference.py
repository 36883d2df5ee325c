"""launch/guide/api.md is current, and every error code and every field of the API has a description."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.services.gateway import api_reference
from neuronpipe.services.gateway.http.api_errors import CODES, REFUSALS
from neuronpipe.services.gateway.http.request_body import ERROR_CODES
from neuronpipe.services.gateway.openapi_description import openapi_document

GATEWAY = Path(api_reference.__file__).resolve().parent
RAISED = re.compile(r"ApiError\(\s*(?P<status>\d{3}),\s*\"(?P<code>\w+)\"|unavailable\(\s*\"(?P<unavailable>\w+)\"")
TEXT = functools.cache(api_reference.text)  # it takes seconds


@pytest.fixture(autouse=True)
def text_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_reference, "text", TEXT)


def test_the_reference_is_current() -> None:
    assert api_reference.main([]) == 0


def test_an_outdated_reference_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api_reference, "PATH", tmp_path / "api.md")
    (tmp_path / "api.md").write_text("old")
    assert api_reference.main([]) == 1
    assert api_reference.COMMAND in capsys.readouterr().err
    assert api_reference.main(["--write"]) == api_reference.main([]) == 0


def test_the_reference_has_every_error_code_with_its_status() -> None:
    for file in GATEWAY.rglob("*.py"):
        for raised in RAISED.finditer(file.read_text(encoding="utf-8")):
            code, status = raised["code"] or raised["unavailable"], int(raised["status"] or 503)
            assert CODES[code][0] == status, f"{file.name}: {code}"
    assert {code: status for status, _, code in REFUSALS.values()}.items() <= {
        code: status for code, (status, _) in CODES.items()
    }.items()
    assert CODES.keys() >= {*ERROR_CODES.values(), "invalid_value"}


SCHEMAS: dict[str, Any] = openapi_document("1")["components"]["schemas"]


@pytest.mark.parametrize(
    "name", sorted(SCHEMAS.keys() - {"Error", "AnthropicError", "OllamaError", "Usage", "UnreadItem"})
)
def test_every_field_of_a_request_has_a_sentence_as_description(name: str) -> None:
    assert SCHEMAS[name]["description"].endswith(".")
    for field, schema in SCHEMAS[name]["properties"].items():
        variants = [schema, *schema.get("anyOf", [])]
        descriptions = [variant["description"] for variant in variants if "description" in variant]
        assert descriptions, f"{name}.{field}"
        assert all(re.fullmatch(r"[A-Z0-9`-].*\.", text, re.DOTALL) for text in descriptions), f"{name}.{field}"

"""The page of a manifest's section `model` and the engine's table are what ModelSpec declares."""

from __future__ import annotations

from dataclasses import fields

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package import native_fields
from neuronpipe.plans.package.model_reference import FILE, FORMAT, format_page, page


def test_the_page_of_model_fields_is_current() -> None:
    wanted = page()
    assert FILE.read_text(encoding="utf-8") == wanted, (
        "run `python -m neuronpipe.plans.package.model_reference --write`"
    )


def test_the_tables_of_sections_are_current_and_say_of_every_field_what_it_is() -> None:
    text = FORMAT.read_text(encoding="utf-8")
    assert format_page(text) == text, "run `python -m neuronpipe.plans.package.model_reference --write`"
    generated = [part.partition("<!-- end -->")[0] for part in text.split("<!-- generated: ")[1:]]
    rows = [line for part in generated for line in part.splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    assert [row for row in rows if row.endswith("|  |")] == []


def test_the_engine_s_table_of_fields_is_current() -> None:
    assert native_fields.FILE.read_text(encoding="utf-8") == native_fields.table(), (
        "run `python -m neuronpipe.plans.package.native_fields --write`"
    )


def test_every_field_of_a_model_is_described() -> None:
    rows = dict(line.split(" | ", 1) for line in page().splitlines() if line.startswith("| `"))
    for field in fields(ModelSpec):
        assert len(rows[f"| `{field.name}`"].split(" | ")[-1].split()) > 2, field.name

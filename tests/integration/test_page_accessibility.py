"""The page at `/` for people who cannot see or use it as most do: axe-core finds nothing in any state, light or dark,
on a wide screen or the narrowest phone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from selenium.webdriver.remote.webdriver import WebDriver

from tests.browser import Page, needs_browser, new_tab, prefer_scheme, resize
from tests.clients import environments
from tests.http_client import Server, served
from tests.pipeline import Shell

NARROW = (320, 640)
RUN_AXE = """
    const done = arguments[0];
    const nodes = rule => rule.nodes.map(node => node.target.join(" ")).join(", ");
    axe.run(document).then(found => done(found.violations.map(rule => `${rule.id}: ${nodes(rule)}`)),
                           error => done([String(error)]));
"""

pytestmark = needs_browser


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core."""
    try:
        _, folder = environments.node()
    except environments.Missing as why:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(why))
    return (folder / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server(long_shell: Shell) -> Iterator[Server]:
    with served(long_shell, "--ffn-resident", "50%", "--workers", "2") as one:
        yield one


def violations(page: Page, axe: str) -> list[str]:
    """The rules that the page breaks as it is now, and where."""
    page.browser.execute_script(axe)
    return list(page.browser.execute_async_script(RUN_AXE))


@pytest.mark.parametrize(
    ("scheme", "narrow"),
    [
        ("light", False),
        ("dark", True),
        pytest.param("light", True, marks=pytest.mark.nightly),
        pytest.param("dark", False, marks=pytest.mark.nightly),
    ],
)
def test_axe_finds_nothing_in_any_state(
    long_browser: WebDriver, server: Server, axe: str, scheme: str, narrow: bool
) -> None:
    browser = new_tab(long_browser)
    prefer_scheme(browser, scheme)
    if narrow:
        resize(browser, *NARROW)
    page = Page(browser, server).open()
    assert violations(page, axe) == []
    page.ask("def fibonacci(n):", 24)
    assert page.eventually(lambda: page.answers[0][1].startswith("24 tokens"))
    assert violations(page, axe) == []
    browser.execute_script("document.getElementById('settings').open = true")
    assert violations(page, axe) == []
    page.act("edit")
    assert violations(page, axe) == []
    if narrow:
        page["show-live"].click()
        assert page.eventually(lambda: page["hits"].text.endswith("%"))
        assert violations(page, axe) == []
        page["show-list"].click()
    page.in_list("rename")
    assert violations(page, axe) == []
    page.in_list("delete")
    assert violations(page, axe) == []
    browser.execute_script("document.getElementById('key-dialog').showModal()")
    assert violations(page, axe) == []


def test_a_missing_label_would_be_found(long_browser: WebDriver, server: Server, axe: str) -> None:
    page = Page(new_tab(long_browser), server).open()
    page.browser.execute_script("document.body.append(document.createElement('input'))")
    assert any(rule.startswith("label:") for rule in violations(page, axe))

"""The page's Markdown: what a model writes becomes elements, whatever it writes, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.remote.webdriver import WebDriver

from tests.browser import Page, needs_browser, new_tab, troubles
from tests.page_server import page_server

FENCE = "```"
HARMFUL = [
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:x)",
    "[x](//elsewhere.example)",
    "[x](/v1/models)",
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "<javascript:alert(1)>",
    "<a href='https://elsewhere.example'>x</a>",
]

# Draws texts as answers are drawn: whole, and in the pieces in which they might come.
DRAW = """
const { Prose } = await import('/page/prose.js');
const draw = (...texts) => {
    const body = document.createElement('div');
    const prose = new Prose(body);
    for (const text of texts) prose.update(text);
    return body;
};
"""

# Random texts of what has a meaning, each with the elements and addresses that came of it.
FUZZ = (
    DRAW
    + r"""
const words = ['*', '**', '_', '~~', '`', '``', '```', '[', '](', ')', '!', '<', '>', '> ', '- ', '* ', '1. ', '2) ',
    '\n', '\n', '\n\n', '  ', '    ', '\t', '#', '# ', '|', '|--|--|', '---', '\\', 'a', 'b c', 'https://a.b/c',
    'javascript:x', '<b>', '"', ':', '=', 'é', '\u2028', '😀', '[ ] ', '~~~', '| a | b |\n|--|:-:|\n'];
let state = arguments[0];
const random = (below) => (state = (state * 48271) % 2147483647) % below;
const tags = new Set(), addresses = new Set(), differ = [];
for (let n = 0; n < 1500; n++) {
    const text = Array.from({ length: 1 + random(40) }, () => words[random(words.length)]).join('');
    const whole = draw(text);
    const ends = [];
    for (let end = 0; end < text.length; ends.push(end)) end += 1 + random(6);
    const pieces = draw(...ends.map((end) => text.slice(0, end)), text);
    if (pieces.innerHTML !== whole.innerHTML) differ.push(text);
    for (const one of whole.querySelectorAll('*')) {
        tags.add(one.localName);
        if (one.href !== undefined) addresses.add(new URL(one.href).protocol);
    }
}
return [[...tags], [...addresses], differ.slice(0, 3)];
"""
)

pytestmark = needs_browser


@pytest.fixture(scope="module")
def page(long_browser: WebDriver) -> Iterator[Page]:
    with page_server() as server:
        yield Page(new_tab(long_browser), server).open()
        assert troubles(long_browser) == []


def run(page: Page, script: str, *arguments: Any) -> Any:
    """What a script says that may wait."""
    body = f"const done = arguments[arguments.length - 1]; (async function () {{ {script} }}).apply(null, arguments)"
    return page.browser.execute_async_script(f"{body}.then(done, (error) => done(String(error.stack)))", *arguments)


def drawn(page: Page, text: str) -> str:
    """The HTML of an answer, without the classes and titles."""
    names = "class|title|target|rel|tabindex"
    script = f'return draw(arguments[0]).innerHTML.replace(/ ({names})="[^"]*"/g, \'\')'
    return str(run(page, DRAW + script, text))


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("# A *b*\ntext", "<h3>A <em>b</em></h3><p>text</p>"),
        ("#no heading", "<p>#no heading</p>"),
        ("a **b *c*** `d*e*` ~~f~~", "<p>a <strong>b <em>c</em></strong> <code>d*e*</code> <del>f</del></p>"),
        ("snake_case_name 2 * 3 * 4 \\*no\\*", "<p>snake_case_name 2 * 3 * 4 *no*</p>"),
        ("- a\n- b\n  - c\n\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. a\n   - b\n4. c", '<ol start="3"><li>a<ul><li>b</li></ul></li><li>c</li></ol>'),
        ("So it was in\n1984. And then", "<p>So it was in<br>1984. And then</p>"),
        ("> a\nb\n> - c\n\nd", "<blockquote><p>a<br>b</p><ul><li>c</li></ul></blockquote><p>d</p>"),
        ("a\n\n---\n***", "<p>a</p><hr><hr>"),
        (
            "|a|b|\n|--|:-:|\n|1|`x\\|y`|\n|2|",
            "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><code>x|y</code></td></tr>"
            "<tr><td>2</td><td></td></tr></tbody></table></div>",
        ),
        ("a | b\nno table", "<p>a | b<br>no table</p>"),
        (
            "[a](https://b.example/c_(d)), ![e](https://f.example/g.png)",
            '<p><a href="https://b.example/c_(d)">a</a>, <a href="https://f.example/g.png">e</a></p>',
        ),
        ("(https://a.example/b_c).", '<p>(<a href="https://a.example/b_c">https://a.example/b_c</a>).</p>'),
        ("<b>&amp;</b>", "<p>&lt;b&gt;&amp;amp;&lt;/b&gt;</p>"),
    ],
)
def test_markdown_becomes_elements(page: Page, text: str, html: str) -> None:
    assert drawn(page, text) == html


def test_columns_of_a_table_are_aligned_as_it_says(page: Page) -> None:
    page.server.replies.append(["| a | b | c | d |\n|---|---|---|--:|\n| 1 | 2 | 3 | 4 |\n"])
    page.send("a table, please")
    assert page.eventually(lambda: page.answers and "ended" in page.answers[-1][1])
    cells = (
        "return [...document.querySelectorAll('#messages > :last-child :is(th, td)')]"
        ".map(one => getComputedStyle(one).textAlign)"
    )
    assert page.browser.execute_script(cells) == 2 * [*3 * ["left"], "right"]


def test_code_is_shown_as_it_is_with_a_button_that_copies_it(page: Page) -> None:
    code = "def f():\n\treturn '<b>**x**'\n\n    # end"
    if isinstance(page.browser, webdriver.Chrome):
        page.browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    page.server.replies.append([f"Here:\n{FENCE}python\n{code}\n{FENCE}\nDone."])
    page.send("code, please")
    assert page.eventually(lambda: page.answers and "ended" in page.answers[-1][1])
    assert page.browser.execute_script("return document.querySelector('figure code').textContent") == code
    page.browser.execute_script("document.querySelector('figure button').click()")
    assert page.eventually(lambda: page["announcement"].get_attribute("textContent") == "Copied")
    assert run(page, "return navigator.clipboard.readText()") == code


@pytest.mark.parametrize("text", HARMFUL)
def test_what_could_do_harm_stays_text(page: Page, text: str) -> None:
    script = (
        "const body = draw(arguments[0]); return [body.textContent, body.querySelectorAll('a, img, script').length]"
    )
    shown, elements = run(page, DRAW + script, text)
    allowed = 1 if "href=" in text else 0  # an address in it is one, and may be followed
    assert (shown, elements) == (text, allowed)


def test_whatever_comes_it_is_the_same_in_pieces_and_of_known_elements(page: Page) -> None:
    found = run(page, FUZZ, 20261123)
    assert not isinstance(found, str), found
    tags, addresses, differ = found
    assert differ == []
    known = (
        "p br h3 h4 h5 h6 em strong del code a ul ol li blockquote hr table thead tbody tr th td div figure figcaption"
    )
    assert set(tags) <= {*known.split(), "pre", "button"}
    assert set(addresses) <= {"https:"}


@pytest.mark.parametrize(
    "text",
    [
        "'['.repeat(n)",
        "'[*a'.repeat(n / 4) + '](x)'.repeat(n / 4)",
        "'*a'.repeat(n / 2) + 'a*'.repeat(n / 2)",
        "'*_~~'.repeat(n / 4)",
        "'http://%'.repeat(n / 8)",
        "'[a](' + ' '.repeat(n)",
        "'```' + ' '.repeat(n) + '`'",
        "'> '.repeat(n / 2)",
        "'- '.repeat(n / 2)",
        "'|a'.repeat(n / 2) + '\\n' + '|-'.repeat(n / 2)",
        "Array.from({ length: 300 }, (_, i) => ' '.repeat(2 * i) + '- a').join('\\n')",
    ],
)
def test_no_text_takes_long(page: Page, text: str) -> None:
    script = f"const n = 40000, begin = performance.now(); draw({text}); return performance.now() - begin"
    assert run(page, DRAW + script) < 10_000  # it takes a tenth of a second; in quadratic time it would be minutes

"""The page at `/` in a real browser: it streams, stops, shows the run, asks for the key, and fetches nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from neuronpipe.plans.pull.package_library import FIRST_MODEL
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver

from tests.browser import IN_FIREFOX, Page, failed_request, needs_browser, new_tab, resize, troubles
from tests.http_client import Server, served
from tests.pipeline import Shell

KEY = "a-key-of-the-test"
PHONE = (390, 844)

pytestmark = needs_browser


@pytest.fixture
def browser(long_browser: WebDriver) -> Iterator[WebDriver]:
    yield new_tab(long_browser)
    # A refused key is logged by the browser.
    assert [said for said in troubles(long_browser) if "401" not in said] == []


@pytest.fixture(scope="module")
def server(long_shell: Shell) -> Iterator[Server]:
    with served(long_shell, "--ffn-resident", "50%", "--workers", "2") as one:
        yield one


@pytest.fixture
def page(browser: WebDriver, server: Server) -> Page:
    return Page(browser, server).open()


def test_an_answer_streams_into_the_page_while_the_pipeline_is_shown(page: Page) -> None:
    lengths = page.record_lengths()
    page.ask("def quicksort(items):", 80)
    assert page.eventually(lambda: page.answers[0][1].startswith("80 tokens"))
    assert len(lengths()) > 2  # it came in pieces
    assert page.eventually(lambda: page["gap"].text.endswith("ms"))
    assert page["hits"].text.endswith("%")
    assert page["speed"].text != ""
    assert {"decode.0", "decode.1", "loader.0"} <= set(page["processes"].text.split())
    assert "waiting for flash" in page["legend"].text
    painted = (
        "const {width, height} = strip; "
        "return strip.getContext('2d').getImageData(0, 0, width, height).data.some(value => value)"
    )
    assert page.browser.execute_script(painted)  # an element is known by its id


def test_stop_ends_the_generation(page: Page) -> None:
    page.ask("def fibonacci(n):", 400)
    page.act_as_an_answer_begins("document.getElementById('stop').click()")
    assert page.eventually(lambda: page.answers[0][1] == "stopped")
    assert page.answers[0][0]
    assert page.eventually(lambda: page.server.run.status().sequences_active == 0)
    assert page["send"].is_displayed()


def test_a_reload_ends_the_generation_and_keeps_the_conversation(page: Page) -> None:
    page.ask("def fibonacci(n):", 400)
    page.act_as_an_answer_begins("null")
    page.browser.refresh()  # Chromium 150's driver hangs if a page is opened while it reloads itself
    page.shown()
    assert page.asked == ["def fibonacci(n):"]
    assert page.answers[0][1] == "stopped"
    assert page.eventually(lambda: page.server.run.status().sequences_active == 0)
    page.ask("import os", 8)
    assert page.eventually(lambda: page.answers[1][1].startswith("8 tokens"))


def test_a_message_that_is_refused_is_no_part_of_the_conversation(page: Page) -> None:
    page.ask("import re", 8)
    assert page.eventually(lambda: page.answers[0][1].startswith("8 tokens"))
    page.browser.execute_script("document.getElementById('prompt').value = 'import os '.repeat(400)")
    page.ask("", 8)
    assert page.eventually(lambda: page.answers[1:] and "maximum context length is 512 tokens" in page.answers[1][1])
    assert page.divided == []
    assert page["prompt"].get_attribute("value").startswith("import os ")
    page["prompt"].clear()
    page.ask("import os", 8)
    assert page.eventually(lambda: page.answers[2:] and page.answers[2][1].startswith("8 tokens"))
    assert page.answers[2][1].endswith("token limit reached")  # what came before the refusal was sent
    assert failed_request(page.browser, 400)


def test_a_conversation_that_no_longer_fits_goes_on_without_its_beginning(page: Page) -> None:
    for number in range(6):
        page.ask("import os; " * 30, 8)  # 91 tokens, and 512 fit
        assert page.eventually(lambda number=number: page.answers[number:] and "tokens" in page.answers[number][1])
        assert len(page.divided) == (number >= 5), number
    (above,) = page.divided
    assert 1 <= above <= 2
    assert page.answers[-1][1].endswith(f"the oldest {2 * above} messages were left out")
    page["new-in-list"].click()
    assert page.answers == []
    assert page.divided == []
    assert page["hint"].is_displayed()


def test_a_message_that_only_the_server_finds_too_long_takes_the_place_of_those_before(page: Page) -> None:
    page.ask("=" * 400, 8)  # 25 tokens: nothing warns of what comes
    assert page.eventually(lambda: "tokens" in page.answers[0][1])
    page.ask("x7" * 245, 8)  # 490
    assert page.eventually(lambda: page.answers[1:] and page.answers[1][1].startswith("8 tokens"))
    assert page.divided == [1]
    assert failed_request(page.browser, 400)


def test_a_new_conversation_ends_the_answer_of_the_one_before(page: Page) -> None:
    page.ask("def fibonacci(n):", 400)
    page.act_as_an_answer_begins("document.getElementById('new-in-list').click()")
    assert page.eventually(lambda: page.server.run.status().sequences_active == 0)
    page.ask("import os", 8)
    assert page.eventually(lambda: page.answers and page.answers[0][1].startswith("8 tokens"))
    assert len(page.answers) == 1


def test_an_answer_continued_twice_is_the_one_that_comes_in_one_piece(page: Page) -> None:
    page.ask("def quicksort(items):", 30)
    assert page.eventually(lambda: page.answers[0][1].startswith("30 tokens"))
    ((whole, _),) = page.answers
    page.set(tokens=10)
    page.act("regenerate")
    for tokens in (10, 20, 30):
        assert page.eventually(lambda tokens=tokens: page.answers[0][1].startswith(f"{tokens} tokens"))
        if tokens < 30:
            page.act("continue")
    assert page.answers[0][0] == whole


def test_a_server_that_has_gone_is_said_in_plain_words(shell: Shell, browser: WebDriver) -> None:
    with served(shell, "--ffn-resident", "50%") as server:
        page = Page(browser, server).open()
        page.ask("def fibonacci(n):", 400)
        assert page.eventually(lambda: page.answers[0][0])
    assert page.eventually(lambda: "ending" in page.answers[0][1])
    assert page.eventually(lambda: page["state"].text.endswith("the server does not answer"))
    assert page["prompt"].get_attribute("value") == "def fibonacci(n):"  # to be sent again
    page["send"].click()
    assert page.eventually(lambda: page.answers[1][1] == "the server does not answer")
    browser.get("about:blank")
    # Refused, reset, cut off in the middle of an answer, or 503 from a gateway that ends: it depends on the moment.
    gone = re.compile(
        rf"http://127\.0\.0\.1:{server.port}/(live|v1/\S+) - Failed to load resource: "
        r"(net::ERR_(CONNECTION_REFUSED|CONNECTION_RESET|EMPTY_RESPONSE|INCOMPLETE_CHUNKED_ENCODING)"
        r"|the server responded with a status of 503 \(Service Unavailable\))"
    )
    said = troubles(browser)
    assert said or IN_FIREFOX  # which does not report these
    assert [one for one in said if not gone.fullmatch(one)] == []


def test_who_talks_to_a_model_that_only_goes_on_with_text_is_told_so(page: Page) -> None:
    assert page.eventually(lambda: "continues the text" in page["hint"].text)
    assert "demo knows only Python" in page["hint"].text
    assert f"neuronpipe pull {FIRST_MODEL}" in page["advice"].text, "and how to get one that answers"


def test_on_a_phone_it_fits_and_shows_one_thing_at_a_time(page: Page) -> None:
    resize(page.browser, *PHONE)
    page.open()
    assert page["chat"].is_displayed()
    assert not page["live"].is_displayed()
    page["show-live"].click()
    assert page["live"].is_displayed()
    assert not page["chat"].is_displayed()
    assert page.eventually(lambda: "decode.0" in page["processes"].text)
    assert page.browser.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]


def test_everything_comes_from_the_server_itself(page: Page) -> None:
    assert page.eventually(lambda: "decode.0" in page["processes"].text)
    urls = page.browser.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
    home = f"http://127.0.0.1:{page.server.port}/"
    assert [url for url in urls if not url.startswith(home)] == []
    policy = page.server.call("GET", "/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_run_is_looked_at_only_while_somebody_looks(page: Page) -> None:
    assert page.eventually(lambda: "decode.0" in page["processes"].text)
    looking = _threads_of_the_gateway(page.server)
    page.browser.get("about:blank")
    assert page.eventually(lambda: _threads_of_the_gateway(page.server) < looking)


def _threads_of_the_gateway(server: Server) -> int:
    (pid,) = (
        pid for pid in server.run.shell.processes() if Path(f"/proc/{pid}/comm").read_text().strip() == "np-gateway.0"
    )
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_a_key_is_asked_for_and_kept_for_the_tab(shell: Shell, browser: WebDriver) -> None:
    with served(shell, "--key", KEY) as guarded:
        page = Page(browser, guarded).open()
        assert page.eventually(lambda: page["key"].is_displayed())
        page["key"].send_keys("another-key-altogether", Keys.ENTER)
        assert page.eventually(lambda: page["key-wrong"].is_displayed())
        page["key"].send_keys(KEY, Keys.ENTER)
        assert page.eventually(lambda: "decode.0" in page["processes"].text)
        page.open()
        assert page.eventually(lambda: "decode.0" in page["processes"].text)
        assert not page["key"].is_displayed()
        page.browser.get("about:blank")

"""What the page does in every state: settings, trouble, warm-up, narrow screens, the keyboard. The server is played."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from neuronpipe.services.gateway.http.api_errors import ApiError
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import Select

from tests.browser import Page, failed_request, needs_browser, new_tab, resize, troubles, troubles_at_end
from tests.page_server import PageServer, page_server, run_snapshot

NARROW = (360, 640)
BUSY = ApiError(429, "rate_limit_exceeded", "16 texts wait already", kind="rate_limit_error", retry_after_s=3)

pytestmark = needs_browser


@pytest.fixture
def browser(long_browser: WebDriver) -> Iterator[WebDriver]:
    yield new_tab(long_browser)
    assert troubles_at_end(long_browser) == []


@pytest.fixture
def server() -> Iterator[PageServer]:
    with page_server() as one:
        yield one


@pytest.fixture
def page(browser: WebDriver, server: PageServer) -> Iterator[Page]:
    yield Page(browser, server).open()
    browser.get("about:blank")  # a page that outlives its server complains of the requests that it still makes


def notes(page: Page) -> list[str]:
    return [note for _, note in page.answers]


def talk(page: Page, *questions: str) -> None:
    """Ask one after the other."""
    for question in questions:
        count = len(page.answers)
        page.send(question)
        assert page.eventually(lambda count=count: page.answers[count:] and "ended" in page.answers[count][1])


# ---- streaming -----------------------------------------------------------------------------------------------
def test_each_piece_of_an_answer_is_shown_before_the_next_one_comes(page: Page) -> None:
    second, third = threading.Event(), threading.Event()
    page.server.replies.append(["one", second, " two", third, " three"])
    page.send("count")
    assert page.eventually(lambda: page.answers[0][0] == "one")
    second.set()
    assert page.eventually(lambda: page.answers[0][0] == "one two")
    third.set()
    assert page.eventually(lambda: page.answers[0] == ("one two three", notes(page)[0]) and "ended" in notes(page)[0])


@pytest.mark.nightly
# ---- settings ------------------------------------------------------------------------------------------------
def test_send_opens_the_settings_at_a_value_that_is_wrong(page: Page) -> None:
    page["prompt"].send_keys("hello")
    for field, typed, said in (
        ("temperature", "5", "Temperature must be a number from 0 to 2, or empty for 0.7."),
        ("temperature", "-1", "Temperature must be a number from 0 to 2, or empty for 0.7."),
        ("penalty", "0", "Repetition penalty must be a number from 1 to 2, or empty for 1.1."),
        ("tokens", "0", "Max tokens must be a whole number from 1 to 16,777,216, or empty for as many as fit."),
        ("tokens", "2.5", "Max tokens must be a whole number from 1 to 16,777,216, or empty for as many as fit."),
        ("tokens", "99999999", "Max tokens must be a whole number from 1 to 16,777,216, or empty for as many as fit."),
        ("tokens", "1e", "Max tokens must be a whole number from 1 to 16,777,216, or empty for as many as fit."),
    ):
        page.browser.execute_script("document.getElementById('settings').open = true")
        page[field].clear()
        page[field].send_keys(typed)
        page.browser.execute_script("document.getElementById('settings').open = false")
        page["send"].click()
        assert page[field].is_displayed()
        assert page["wrong"].text == said
        assert page[field] == page.browser.switch_to.active_element
        assert page[field].get_attribute("aria-invalid") == "true"
        assert (page.server.asked, page.asked, page["prompt"].get_attribute("value")) == ([], [], "hello")
        page[field].clear()
        page[field].send_keys("1")
        assert page["wrong"].text == ""
        assert page[field].get_attribute("aria-invalid") is None
    page["send"].click()
    assert page.eventually(lambda: page.answers and "ended" in notes(page)[0])


def test_an_empty_setting_means_its_default(page: Page) -> None:
    talk(page, "with what the page begins with")
    page.set(temperature="", penalty="", tokens="", system=" ")
    talk(page, "with nothing")
    first, second = ({name: one[name] for name in one if name != "messages"} for one in page.server.asked)
    assert first == second
    assert (first["temperature"], first["repetition_penalty"]) == (0.7, 1.1)
    assert page["temperature"].get_attribute("placeholder") == "0.7"


def test_an_answer_is_as_long_as_in_the_terminal(page: Page) -> None:
    """It ended after 256 tokens, in the middle of a sentence. A base model never ends: 200 tokens."""
    talk(page, "of a chat model")
    page.set(tokens="7")
    talk(page, "seven tokens")
    assert [asked.get("max_tokens") for asked in page.server.asked] == [None, 7]
    assert page["tokens"].get_attribute("placeholder") == "as many as fit"


def test_an_answer_of_a_base_model_has_200_tokens(page: Page) -> None:
    page.server.chat = False
    page.open()
    talk(page, "def fibonacci(n):")
    assert [asked["max_tokens"] for asked in page.server.asked] == [200]
    assert page["tokens"].get_attribute("placeholder") == "200"


def test_a_number_between_the_steps_of_its_field_is_taken(page: Page) -> None:
    page.set(temperature="0.75", penalty="1.13")
    talk(page, "hello")
    (asked,) = page.server.asked
    assert (asked["temperature"], asked["repetition_penalty"]) == (0.75, 1.13)


# ---- trouble -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reply", [[BUSY], ["half an ans", BUSY]], ids=["at once", "half way"])
def test_after_trouble_the_message_is_there_to_be_sent_again(page: Page, reply: list[Any]) -> None:
    talk(page, "hello")
    page.server.replies.append(reply)
    page.send("and now?")
    assert page.eventually(lambda: notes(page)[1:] == ["16 texts wait already"])
    assert len(reply) > 1 or failed_request(page.browser, 429)
    assert page["prompt"].get_attribute("value") == "and now?"
    page["send"].click()
    assert page.eventually(lambda: len(page.answers) == 3 and "ended" in notes(page)[2])
    assert page.server.sent[2] == ["hello", "Fine.", "and now?"]


def test_a_chat_template_that_fails_is_reported_above_the_conversation(page: Page) -> None:
    assert not page["template-error"].is_displayed()
    page.server.models = ["broken", "sound"]
    page.server.template_errors = {"broken": "line 3: 'dict object' has no attribute 'x'"}
    page.open()
    said = "The chat template of broken fails, so it cannot answer: line 3: 'dict object' has no attribute 'x'"
    assert page.eventually(lambda: page["template-error"].text == said)
    assert page["template-error"].location["y"] < page["hint"].location["y"]
    talk(page, "hello")
    assert page["template-error"].location["y"] < page["messages"].location["y"]
    Select(page["models"]).select_by_visible_text("sound")
    assert page.eventually(lambda: not page["template-error"].is_displayed())


# ---- several models ------------------------------------------------------------------------------------------
def test_of_several_models_the_chosen_one_answers_and_its_run_is_shown(browser: WebDriver, server: PageServer) -> None:
    server.models, server.asleep = ["small", "large"], {"large"}
    page = Page(browser, server).open()
    talk(page, "hello")
    assert page.eventually(lambda: "ready" in page["state"].text)
    Select(page["models"]).select_by_value("large")
    assert page.eventually(lambda: page["state"].text == "no run now: your message starts it")
    held = threading.Event()
    server.replies.append([held, "It began."])
    page.send("and you?")
    assert page.eventually(lambda: notes(page)[1] == "waiting: the run is starting")
    assert not page["models"].is_enabled()
    server.asleep.clear()
    assert page.eventually(lambda: "ready" in page["state"].text)
    held.set()
    assert page.eventually(lambda: page.answers[1][0] == "It began.")
    assert [body["model"] for body in server.asked] == ["small", "large"]
    browser.refresh()
    assert page.eventually(lambda: Select(page["models"]).first_selected_option.text == "large")
    assert all("503" in line for line in troubles(browser))


# ---- warm-up -------------------------------------------------------------------------------------------------
def test_warm_up_is_shown_until_it_is_done(page: Page) -> None:
    def loaded(some: float, total: float) -> dict[str, Any]:
        return run_snapshot(warm_up={"loaded_bytes": some, "total_bytes": total})

    assert page.eventually(lambda: "ready" in page["state"].text)
    assert not page["warm-up"].is_displayed()
    page.server.snapshot = loaded(1.8e9, 4.2e9)
    assert page.eventually(lambda: page["warm-up"].text == "Warming up: 42 %, 1.8 of 4.2 GB")
    assert page["warm-up-bar"].get_attribute("value") == "42"
    page.server.snapshot = loaded(40.1e6, 80e6)
    assert page.eventually(lambda: page["warm-up"].text == "Warming up: 50 %, 40 of 80 MB")
    told = {"loaded_bytes": 1.8e9, "total_bytes": 4.2e9, "bytes_per_s": 1.2e9, "left_s": 1.6}
    page.server.snapshot = run_snapshot(warm_up=told)
    whole = "Warming up: 42 %, 1.8 of 4.2 GB, 1.2 GB/s, 2 s left"
    assert page.eventually(lambda: page["warm-up"].text == whole)
    for snapshot in (
        run_snapshot(warm_up=None),
        loaded(0, 0),
        loaded(4.2e9, 4.2e9),
        run_snapshot(),
    ):
        page.server.snapshot = loaded(1.8e9, 4.2e9)
        assert page.eventually(lambda: page["warm-up"].is_displayed())
        page.server.snapshot = snapshot
        assert page.eventually(lambda: not page["warm-up"].is_displayed())


@pytest.mark.nightly
def test_terms_that_are_off_the_plan_are_named(page: Page) -> None:
    assert page.eventually(lambda: "ready" in page["state"].text)
    assert "Off the plan" not in page["waits"].text
    page.server.snapshot = run_snapshot(deviations="misses: planned 8.0%, measured 21%")
    assert page.eventually(lambda: page["waits"].text.endswith("Off the plan: misses: planned 8.0%, measured 21%."))


# ---- for everybody -------------------------------------------------------------------------------------------
def test_it_fits_the_narrowest_phone_in_every_state(page: Page) -> None:
    resize(page.browser, *NARROW, touch=True)
    page.server.snapshot = run_snapshot(warm_up={"loaded_bytes": 1.8e9, "total_bytes": 4.2e9})
    page.server.models = ["a-model-whose-name-is-longer-than-a-phone-is-wide-Instruct.Q4_1", "another"]
    page.open()
    assert page.eventually(lambda: page["warm-up"].is_displayed() and page["models"].is_displayed())
    fits(page)
    table = "\n| a | b |\n|--|--|\n|" + "z" * 99 + "| - |\n"
    page.server.replies.append(["word " * 60 + "x" * 200, "\n\n```python\n" + "y" * 200 + "\n```\n", table])
    page.server.reason = "length"
    page.send("y" * 200)
    assert page.eventually(lambda: page.answers and "limit" in notes(page)[0])
    fits(page)
    page.act("edit")
    fits(page)
    page["show-list"].click()
    fits(page)
    page.in_list("rename")
    fits(page)
    page.in_list("delete")
    fits(page)
    page.set(tokens="0")
    page.send("hello")
    fits(page)
    page["show-live"].click()
    fits(page)


def test_the_state_and_the_chosen_model_can_be_read_on_the_narrowest_phone(page: Page) -> None:
    resize(page.browser, *NARROW, touch=True)
    page.server.snapshot = run_snapshot(tokens_per_s=124.1, sequences_active=1)
    page.open()
    assert page.eventually(lambda: page["state"].text == "124 tokens/s")
    cut = (
        "return ['state', 'show-live'].map(id => document.getElementById(id))"
        ".some(one => one.scrollWidth > one.clientWidth)"
    )
    assert not page.browser.execute_script(cut)
    page.server.models = ["qwen3-30b-a3b-instruct", "another"]
    page.open()
    assert page.eventually(lambda: page["models"].is_displayed() and page["state"].text == "124 tokens/s")
    assert not page.browser.execute_script(cut)
    assert page["models"].size["width"] > NARROW[0] / 2


def test_the_end_of_a_conversation_stays_in_sight_above_open_settings(page: Page) -> None:
    end = "const one = document.getElementById('messages'); return one.scrollHeight - one.scrollTop - one.clientHeight"
    page.server.replies.append(["A line.\n\n" * 60])
    talk(page, "hello")
    assert page.eventually(lambda: page.browser.execute_script(end) < 2)
    settings = page["settings"].find_element(By.TAG_NAME, "summary")
    height = page["messages"].size["height"]
    settings.click()
    assert page.eventually(lambda: page["messages"].size["height"] < height)
    assert page.eventually(lambda: page.browser.execute_script(end) < 2)
    settings.click()
    page.browser.execute_script("document.getElementById('messages').scrollTop = 0")  # who reads the beginning
    settings.click()
    assert page.eventually(lambda: page["messages"].size["height"] < height)
    assert page.browser.execute_script("return document.getElementById('messages').scrollTop") == 0


def fits(page: Page) -> None:
    """Nothing is wider than the screen, and what is to be touched is no smaller than a finger."""
    assert page.browser.execute_script("return document.documentElement.scrollWidth") <= NARROW[0]
    script = (
        "return [...document.querySelectorAll('button, summary, input, select, textarea')]"
        ".filter(one => one.checkVisibility()).map(one => [one.id, one.getBoundingClientRect()])"
        ".filter(([, box]) => box.height < 40 || box.left < 0 || box.right > innerWidth).map(([id]) => id)"
    )
    assert page.browser.execute_script(script) == []


def test_what_happens_is_said_to_who_listens_but_not_every_speed(page: Page) -> None:
    said = "const all = window.said = []; new MutationObserver(() => all.push(announcement.textContent)).observe"
    page.browser.execute_script(f"{said}(announcement, {{ childList: true }})")
    for speed in range(5):
        page.server.snapshot = run_snapshot(sequences_active=1, tokens_per_s=10.0 + speed)
        assert page.eventually(lambda speed=speed: f"{10 + speed}.0 tokens/s" in page["state"].text)
    talk(page, "hello")
    page.in_list("delete")
    page["undo"].click()
    answer, deleted, back = page.browser.execute_script("return said.filter(one => one !== 'connected')")
    assert answer.startswith("The answer: ")
    assert "deleted" in deleted
    assert back == "Undone."


@pytest.mark.nightly
def test_the_keyboard_alone_is_enough(page: Page) -> None:
    page.server.replies.append(["half an ", page.server.ended])
    page["prompt"].send_keys("hello", Keys.TAB, Keys.TAB)  # Settings
    assert page["send"] == page.browser.switch_to.active_element
    page["send"].send_keys(Keys.ENTER)
    assert page.eventually(lambda: page.answers[0][0] == "half an")
    assert page["stop"] == page.browser.switch_to.active_element
    page["stop"].send_keys(Keys.ENTER)
    assert page.eventually(lambda: notes(page) == ["stopped"])
    assert page["send"] == page.browser.switch_to.active_element
    page["prompt"].send_keys(Keys.SHIFT, Keys.TAB)
    assert focused(page) == "Continue"
    page.browser.switch_to.active_element.send_keys(Keys.SHIFT, Keys.TAB)
    assert focused(page) == "Regenerate"
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.eventually(lambda: page.answers[0][0] == "Fine.")
    page["undo"].send_keys(Keys.ENTER)
    assert page.answers == [("half an", "stopped")]
    page.browser.find_element(By.CSS_SELECTOR, "[data-action=rename]").send_keys(Keys.ENTER)
    page.browser.switch_to.active_element.send_keys("Greetings", Keys.ENTER)
    assert page.titles == ["Greetings"]
    assert page.browser.switch_to.active_element.accessible_name == "Rename: Greetings"


def focused(page: Page) -> str:
    return page.browser.switch_to.active_element.text


# ---- processes -----------------------------------------------------------------------------------------------
def test_who_computes_what_is_said_beside_each_process(page: Page) -> None:
    place = {"index": 0, "core": None, "step": 0, "cpu": None, "memory_bytes": None, "doing": {}, "restarts": 0}
    idle = {"numerics": "", "backend": "", "work": ""}
    page.server.snapshot = run_snapshot(
        processes=[
            {"role": "loader", "pid": 7, "state": "ready", **place, **idle},
            {
                "role": "decode",
                "pid": 8,
                "state": "ready",
                **place,
                **idle,
                "numerics": "cpu:avx2",
                "work": "all 15 blocks",
            },
            {
                "role": "accelerator",
                "pid": 0,
                "state": "gone",
                **place,
                **idle,
                "work": "decode workers compute its blocks",
            },
        ]
    )

    def rows() -> list[str]:
        return [row.text for row in page.browser.find_elements(By.CSS_SELECTOR, "#processes td:first-child")]

    wanted = ["loader.0", "decode.0\nall 15 blocks, cpu:avx2", "accelerator.0 gone\ndecode workers compute its blocks"]
    assert page.eventually(lambda: rows() == wanted)

"""Conversations on the page: what is kept of them and where, and going back in one. The server is played."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from neuronpipe.services.gateway.application import PAGE_FOLDER
from neuronpipe.services.gateway.http.api_errors import ApiError
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver

from tests.browser import Page, download_into, needs_browser, new_tab, troubles, troubles_at_end
from tests.firefox import Firefox
from tests.page_server import PageServer, Thought, page_server

BUSY = ApiError(429, "rate_limit_exceeded", "16 texts wait already", kind="rate_limit_error", retry_after_s=3)
TURN = {"question": "q", "answer": "a", "note": "", "reason": "stop", "model": "a-model", "ended": True}
DEFAULT_COOKIES, BLOCK_COOKIES = 5, 2  # of Firefox's network.cookie.cookieBehavior

pytestmark = needs_browser


@pytest.fixture
def browser(long_browser: WebDriver) -> Iterator[WebDriver]:
    yield new_tab(long_browser)
    assert [said for said in troubles_at_end(long_browser) if "429" not in said] == []


@pytest.fixture
def server() -> Iterator[PageServer]:
    with page_server() as one:
        yield one


@pytest.fixture
def page(browser: WebDriver, server: PageServer) -> Iterator[Page]:
    yield Page(browser, server).open()
    browser.get("about:blank")  # a page that outlives its server complains of the requests that it still makes


def talk(page: Page, *questions: str) -> None:
    """Ask one after the other."""
    for question in questions:
        count = len(page.answers)
        page.send(question)
        assert page.eventually(lambda count=count: page.answers[count:] and is_done(page))


def is_done(page: Page) -> bool:
    """Whether the last answer has ended by itself."""
    return page.answers[-1][1].endswith(("ended", "limit reached", "left out"))


def texts(page: Page) -> list[str]:
    return [text for text, _ in page.answers]


def stored(page: Page) -> str:
    """All that the tab and the browser keep."""
    return str(page.browser.execute_script("return JSON.stringify([{...localStorage}, {...sessionStorage}])"))


# ---- finding, saving and loading -----------------------------------------------------------------------------
def titles(page: Page) -> list[str]:
    return [entry.text for entry in page["entries"].find_elements(By.CSS_SELECTOR, '[data-action="open"]')]


def test_conversations_are_found_by_the_words_in_them(page: Page) -> None:
    talk(page, "the capital of Iceland")
    page["new-in-list"].click()
    talk(page, "bake bread")
    page["search"].send_keys("ICEland capital")
    assert titles(page) == ["the capital of Iceland"]
    page["search"].send_keys(" fine.")  # the answer
    assert titles(page) == ["the capital of Iceland"]
    page["search"].send_keys("x")
    assert titles(page) == []
    assert page["delete-all"].is_enabled()
    page["search"].clear()
    page["search"].send_keys(Keys.SPACE)
    assert len(titles(page)) == 2


def test_saved_conversations_are_loaded_again(page: Page, tmp_path: Path) -> None:
    download_into(page.browser, tmp_path)
    talk(page, "my name is Ada", "what is it?")
    page["save-all"].click()
    page["save-text"].click()
    assert page.eventually(
        lambda: {path.name for path in tmp_path.iterdir()} == {"conversations.json", "my-name-is-Ada.md"}
    )
    text = (tmp_path / "my-name-is-Ada.md").read_text()
    assert text.startswith("# my name is Ada\n\n## You\n\nmy name is Ada\n\n## a-model\n\nFine.\n")
    page["file"].send_keys(str(tmp_path / "conversations.json"))
    assert page.eventually(lambda: page["loaded"].text == "All of them are here already.")
    page["delete-all"].click()
    assert titles(page) == []
    page["file"].send_keys(str(tmp_path / "conversations.json"))
    assert page.eventually(lambda: page["loaded"].text == "1 conversation was loaded.")
    assert titles(page) == ["my name is Ada"]
    page["entries"].find_element(By.CSS_SELECTOR, '[data-action="open"]').click()
    assert page.asked == ["my name is Ada", "what is it?"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("not JSON", "no conversations that were saved here"),
        ('{"neuronpipe": "conversations", "conversations": 7}', "no conversations that were saved here"),
        ('{"neuronpipe": "conversations", "conversations": [{"id": "../x", "version": 2, "turns": []}]}', "is damaged"),
    ],
)
def test_a_file_that_is_none_of_these_changes_nothing(page: Page, tmp_path: Path, content: str, why: str) -> None:
    talk(page, "stays")
    (tmp_path / "file.json").write_text(content)
    page["file"].send_keys(str(tmp_path / "file.json"))
    assert page.eventually(lambda: why in page["loaded"].text)
    assert titles(page) == ["stays"]


# ---- system prompts, and the installed page ------------------------------------------------------------------
def test_system_prompts_are_kept_as_suggestions_until_they_are_forgotten(page: Page) -> None:
    def suggested() -> list[str]:
        options = "return [...document.getElementById('system-prompts').options].map(({ value }) => value)"
        return list(page.browser.execute_script(options))

    page["settings"].find_element(By.TAG_NAME, "summary").click()
    assert not page["keep-prompt"].is_enabled()
    for text in ("Be brief.", "Talk like a pirate."):
        page["system"].clear()
        page["system"].send_keys(text)
        page["keep-prompt"].click()
    page.open()
    assert suggested() == ["Talk like a pirate.", "Be brief."]
    page["settings"].find_element(By.TAG_NAME, "summary").click()
    assert page["keep-prompt"].text == "Forget"
    page["keep-prompt"].click()
    assert suggested() == ["Be brief."]
    assert page["keep-prompt"].text == "Keep"


def test_the_page_can_be_installed_and_opens_without_its_server(page: Page) -> None:
    if isinstance(page.browser, webdriver.Chrome):  # Firefox installs no page on a computer
        manifest = page.browser.execute_cdp_cmd("Page.getAppManifest", {})
        assert manifest["errors"] == []
        assert json.loads(manifest["data"])["start_url"] == "/"
        assert page.browser.execute_cdp_cmd("Page.getInstallabilityErrors", {})["installabilityErrors"] == []
    talk(page, "stays")
    stored = """const done = arguments[0]; caches.open("neuronpipe-page").then(async (store) =>
        done((await store.keys()).map(({ url }) => new URL(url).pathname)))"""
    names = {file.name for file in PAGE_FOLDER.iterdir()} - {"index.html", "offline.js"}  # "/" and the worker itself
    needed = {"/", *(f"/page/{name}" for name in names)}
    assert page.eventually(lambda: needed <= set(page.browser.execute_async_script(stored)))
    assert all(path == "/" or path.startswith("/page/") for path in page.browser.execute_async_script(stored))
    page.server.shutdown()
    page.server.server_close()
    page.open()
    assert page.asked == ["stays"]
    troubles(page.browser)  # those of the requests to the server that is gone


# ---- kept over a reload --------------------------------------------------------------------------------------
def test_a_conversation_goes_on_after_a_reload(page: Page) -> None:
    page["settings"].find_element(By.TAG_NAME, "summary").click()
    for field, value in (("system", "be brief"), ("temperature", "0.3")):
        page[field].clear()
        page[field].send_keys(value)
    talk(page, "my name is Ada", "what is it?")
    before = page.answers
    page["prompt"].send_keys("not sent yet")
    page.open()
    assert page.asked == ["my name is Ada", "what is it?"]
    assert page.answers == before
    assert page["prompt"].get_attribute("value") == "not sent yet"
    assert page["new-in-list"].is_enabled()
    assert not page["hint"].is_displayed()
    page["send"].click()
    assert page.eventually(lambda: len(page.server.asked) == 3)
    assert page.server.sent[2] == ["be brief", "my name is Ada", "Fine.", "what is it?", "Fine.", "not sent yet"]
    assert page.server.asked[2]["temperature"] == 0.3


def test_an_answer_under_way_stays_over_a_reload_as_far_as_it_had_come(page: Page) -> None:
    page.server.replies.append(["half an ", page.server.ended])
    page.send("tell me")
    assert page.eventually(lambda: page.answers[0][0] == "half an")
    page.open()
    assert page.answers == [("half an", "stopped")]
    talk(page, "go on")
    assert page.server.sent[1] == ["tell me", "half an ", "go on"]


THOUGHT = "return document.querySelector('#messages .assistant:last-child .thought').{}"


def thought(page: Page, part: str) -> object:
    """What the last answer shows of the model's thoughts."""
    return page.browser.execute_script(THOUGHT.format(part))


def test_thinking_is_folded_above_the_answer_and_stays_over_a_reload(page: Page) -> None:
    page.server.replies.append([Thought("Who "), Thought("is it?\n<b>Ada</b>"), page.server.ended, "Ada."])
    page.send("who am I?")
    assert page.eventually(lambda: thought(page, "querySelector('p').textContent") == "Who is it?\n<b>Ada</b>")
    assert thought(page, "querySelector('summary').textContent") == "Thinking …"
    assert thought(page, "open") is False
    page.server.ended.set()
    assert page.eventually(lambda: page.answers and is_done(page))
    assert (texts(page), thought(page, "querySelector('summary').textContent")) == (["Ada."], "Thought")
    page.open()
    assert (texts(page), thought(page, "textContent")) == (["Ada."], "ThoughtWho is it?\n<b>Ada</b>")
    page.server.ended.clear()
    talk(page, "sure?")
    assert thought(page, "hidden") is True
    assert page.server.sent[1] == ["who am I?", "Ada.", "sure?"]
    assert all("reasoning_content" not in message for message in page.server.asked[1]["messages"])


def test_thinking_that_was_stopped_is_continued(page: Page) -> None:
    page.server.replies.append([Thought("Who "), page.server.ended])
    page.send("who am I?")
    assert page.eventually(lambda: thought(page, "querySelector('p').textContent") == "Who ")
    page["stop"].click()
    assert page.eventually(lambda: "continue" in page.offers())
    page.server.replies.append([Thought("knows"), "Ada."])
    page.act("continue")
    assert page.eventually(lambda: is_done(page))
    begun = {"role": "assistant", "content": "", "reasoning_content": "Who "}
    assert page.server.asked[1]["messages"][-1] == begun
    assert page.server.asked[1]["continue_final_message"] is True
    assert (texts(page), thought(page, "querySelector('p').textContent")) == (["Ada."], "Who knows")


@pytest.mark.nightly
def test_what_does_not_fit_the_context_stays_left_out_over_a_reload(browser: WebDriver) -> None:
    with page_server(context_tokens=300) as server:
        page = Page(browser, server).open()
        page.set(tokens=100)
        talk(page, "a" * 150, "b" * 150)
        assert page.divided == [1]
        page.open()
        assert page.divided == [1]
        page.set(tokens=100)
        talk(page, "c")
        assert [text[:1] for text in server.sent[2]] == ["b", "F", "c"]


DAMAGED = (
    "{",
    "null",
    '{"version": 2}',
    '{"version": 2, "turns": [null]}',
    '{"version": 3, "turns": [{"question": "newer", "answer": "", "note": "", "reason": "", "model": ""}]}',
)
DAMAGED_ALIKE = (
    "",
    "7",
    "[]",
    '{"version": 2, "turns": {"length": 2}}',
    '{"version": 2, "turns": [{"question": 7, "answer": "", "note": "", "ended": true}]}',
    '{"version": 2, "turns": [{"question": "x"}]}',
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "contents", [DAMAGED, pytest.param(DAMAGED_ALIKE, marks=pytest.mark.nightly)], ids=["each kind", "alike"]
)
def test_a_damaged_conversation_is_none(page: Page, contents: tuple[str, ...]) -> None:
    for number, damaged in enumerate(contents):
        store(page, damaged, settings=damaged, draft="")
        assert page.asked == [], damaged
        assert page["hint"].is_displayed()
        talk(page, f"hello {number}")
        assert page.server.sent[number] == [f"hello {number}"]
        page.open()
        assert page.asked == [f"hello {number}"]


@pytest.mark.nightly
def test_a_conversation_with_figures_that_cannot_be_is_sent_whole(page: Page) -> None:
    for number, left_out in enumerate((-1, 2, "1", 1, 0.5, None)):
        kept = {"version": 2, "leftOut": left_out, "tokensPerCharacter": -3, "turns": [TURN]}
        store(page, json.dumps(kept), settings='{"tokens": 7, "system": null}', draft="")
        talk(page, "r")
        assert page.server.sent[number] == ["q", "a", "r"], left_out


def store(page: Page, conversation: str, **texts: str) -> None:
    """Load the page again; the browser has kept a conversation, which was open, and the tab these texts."""
    tab = json.dumps({f"neuronpipe-{name}": text for name, text in {"open": "c0ffee", **texts}.items()})
    keep = (
        f"localStorage.setItem('neuronpipe-conversation-c0ffee', {json.dumps(conversation)});"
        f"for (const [name, text] of Object.entries({tab})) sessionStorage.setItem(name, text)"
    )
    if isinstance(page.browser, webdriver.Chrome):
        with before_each_load(page.browser, keep):
            page.open()
        return
    page.browser.get(f"http://127.0.0.1:{page.server.port}/page/icon.svg")  # of the same origin, without scripts
    page.browser.execute_script(keep)
    page.open()


@contextlib.contextmanager
def before_each_load(browser: webdriver.Chrome, source: str) -> Iterator[None]:
    """A script runs before the page's own while the context lasts."""
    script = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


@contextlib.contextmanager
def forbidden_storage(browser: WebDriver) -> Iterator[None]:
    """Reading sessionStorage and localStorage fails while the context lasts, as where a person blocks cookies."""
    if isinstance(browser, Firefox):
        browser.prefer(network_cookie_cookieBehavior=BLOCK_COOKIES)
        yield
        browser.prefer(network_cookie_cookieBehavior=DEFAULT_COOKIES)
        return
    assert isinstance(browser, webdriver.Chrome)
    source = (
        "for (const name of ['sessionStorage', 'localStorage']) Object.defineProperty(window, name,"
        " { get() { throw new DOMException('', 'SecurityError'); } })"
    )
    with before_each_load(browser, source):
        yield


@pytest.mark.nightly
def test_what_is_kept_is_bounded_to_the_newest_turns(page: Page) -> None:
    page["prompt"].send_keys("x")
    page.browser.execute_script("document.getElementById('prompt').value = 'y'.repeat(600000)")
    talk(page, "")
    page.browser.execute_script("document.getElementById('prompt').value = 'z'.repeat(600000)")
    talk(page, "")
    page.open()
    assert [text[:1] for text in page.asked] == ["z"]
    sizes = "return Object.entries(localStorage).map(([name, text]) => name.length + text.length)"
    assert sum(page.browser.execute_script(sizes)) < 1 << 21


@pytest.mark.nightly
def test_without_storage_everything_but_the_reload_works(page: Page) -> None:
    with forbidden_storage(page.browser):
        page.open()
        talk(page, "hello", "again")
        page["new-in-list"].click()
        talk(page, "another one")
        assert page.titles == ["another one", "hello"]
        page.in_list("open", 1)
        assert page.asked == ["hello", "again"]
        page.open()
        assert page.asked == []
        # Firefox has no offline copy of the page then, and says so although the page catches the error.
        assert [said for said in troubles(page.browser) if "ServiceWorker" not in said] == []


# ---- the list ------------------------------------------------------------------------------------------------
def test_conversations_are_listed_by_their_first_words_and_opened_again(page: Page) -> None:
    assert page.titles == []
    assert not page["new-in-list"].is_enabled()
    talk(page, "my name is Ada", "what is it?")
    page["new-in-list"].click()
    assert page["hint"].is_displayed()
    talk(page, "Which of all the words  that I say\\nare in the title of this conversation?".replace("\\n", " "))
    assert page.titles == ["Which of all the words that I say are in the…", "my name is Ada"]
    page.in_list("open", 1)
    assert page.asked == ["my name is Ada", "what is it?"]
    talk(page, "say it")
    assert page.server.sent[-1] == ["my name is Ada", "Fine.", "what is it?", "Fine.", "say it"]
    assert page.titles[0] == "my name is Ada"  # the newest first


@pytest.mark.nightly
def test_a_conversation_has_the_title_that_it_is_given(page: Page) -> None:
    talk(page, "hello")
    for typed, title in ((" About  <b>me</b>", "About <b>me</b>"), ("", "hello")):
        page.in_list("rename")
        page.browser.switch_to.active_element.send_keys(typed or Keys.DELETE, Keys.ENTER)  # the old one is selected
        assert page.titles == [title]
        page.open()
        assert page.titles == [title]
    page.in_list("rename")
    page.browser.switch_to.active_element.send_keys("nothing of this", Keys.ESCAPE)
    assert page.titles == ["hello"]


@pytest.mark.nightly
def test_deleting_a_conversation_can_be_taken_back(page: Page) -> None:
    assert not page["undo"].is_displayed()
    talk(page, "my name is Ada")
    before = page.answers
    page.in_list("delete")
    assert (page.asked, page.answers, page.titles) == ([], [], [])
    assert "Ada" not in stored(page)
    page["undo"].click()
    assert (page.asked, page.answers, page.titles) == (["my name is Ada"], before, ["my name is Ada"])
    assert not page["undo"].is_displayed()
    talk(page, "what is it?")
    assert page.server.sent[1] == ["my name is Ada", "Fine.", "what is it?"]


@pytest.mark.nightly
def test_all_can_be_deleted_at_once_and_the_next_message_settles_it(page: Page) -> None:
    for word in ("one", "two"):
        talk(page, f"a secret, {word}")
        page["new-in-list"].click()
    page["delete-all"].click()
    assert (page.titles, "secret" in stored(page)) == ([], False)
    page["undo"].click()
    assert page.titles == ["a secret, two", "a secret, one"]
    page["delete-all"].click()
    talk(page, "hello")
    assert not page["undo"].is_displayed()
    page.open()
    assert (page.titles, page.asked, "secret" in stored(page)) == (["hello"], ["hello"], False)


def test_an_answer_that_deleting_stopped_comes_back_as_far_as_it_had_come(page: Page) -> None:
    page.server.replies.append(["half an ", page.server.ended])
    page.send("tell me")
    assert page.eventually(lambda: page.answers[0][0] == "half an")
    page.in_list("delete")
    assert page.eventually(lambda: page["send"].is_displayed())
    page["undo"].click()
    assert page.answers == [("half an", "stopped")]
    talk(page, "go on")
    assert page.server.sent[1] == ["tell me", "half an ", "go on"]


def test_opening_another_conversation_stops_an_answer_which_is_kept(page: Page) -> None:
    page.server.replies.append(["half an ", page.server.ended])
    page.send("tell me")
    assert page.eventually(lambda: page.answers[0][0] == "half an")
    page["new-in-list"].click()
    talk(page, "something else")
    page.open()
    page.in_list("open", 1)
    assert page.answers == [("half an", "stopped")]


@pytest.mark.nightly
def test_the_oldest_conversations_make_room_for_new_ones(page: Page) -> None:
    text = {"version": 2, "title": "", "leftOut": 0, "turns": [{**TURN, "answer": "a" * 1000}]}
    fill = (
        "for (let n = 0; n < 100; n++) localStorage.setItem(`neuronpipe-conversation-${n}`, "
        f"JSON.stringify({{...{json.dumps(text)}, changed: n, title: `${{n}}`}}))"
    )
    page.browser.execute_script(fill)
    page.open()
    talk(page, "one more")
    assert (page.titles[:2], page.titles[-1], len(page.titles)) == (["one more", "99"], "1", 100)
    page.browser.execute_script("localStorage.setItem('of-somebody-else', 'x'.repeat((5 << 20) - 250000))")
    page["new-in-list"].click()
    page.set(prompt="y" * 150_000)
    talk(page, " long")  # there is no room for it unless some go
    page.open()
    assert (len(page.titles) < 100, len(page.asked[0])) == (True, 150_005)


@pytest.mark.nightly
def test_another_tab_sees_what_is_said_and_deleted_but_neither_draft_nor_key(page: Page) -> None:
    talk(page, "hello")
    page["prompt"].send_keys("not sent yet")
    first = page.browser.current_window_handle
    page.browser.switch_to.new_window("tab")
    page.open()
    assert (page.asked, page.titles, page["prompt"].get_attribute("value")) == ([], ["hello"], "")
    page.in_list("open")
    talk(page, "from the other tab")
    second = page.browser.current_window_handle
    page.browser.switch_to.window(first)
    assert page.eventually(lambda: page.asked == ["hello", "from the other tab"])
    page.in_list("delete")
    page.browser.switch_to.window(second)
    assert page.eventually(lambda: (page.asked, page.titles) == ([], []))
    page.browser.close()
    page.browser.switch_to.window(first)


@pytest.mark.nightly
def test_conversations_go_with_the_tab_when_the_person_wants_it(page: Page) -> None:
    local = "return Object.entries(localStorage).filter(([name]) => name !== 'neuronpipe-keep').length"
    talk(page, "a secret")
    assert page.browser.execute_script(local) == 1
    page["stays"].click()
    assert page.browser.execute_script(local) == 0
    talk(page, "another secret")
    page.open()
    assert (page.asked, page["stays"].is_selected()) == (["a secret", "another secret"], False)
    assert page.browser.execute_script(local) == 0
    page["stays"].click()
    assert page.browser.execute_script(local) == 1
    new_tab(page.browser)
    page.open()
    assert page.titles == ["a secret"]


# ---- going back in one ---------------------------------------------------------------------------------------
def test_a_message_is_edited_and_the_conversation_goes_on_from_there(page: Page) -> None:
    talk(page, "one", "two", "three")
    before = page.answers
    page.act("edit", 1)
    field = page.browser.switch_to.active_element
    assert field.get_attribute("value") == "two"
    field.send_keys(Keys.ESCAPE)
    assert page.asked == ["one", "two", "three"]
    page.act("edit", 1)
    page.browser.switch_to.active_element.send_keys(" and a half", Keys.ENTER)
    assert page.eventually(lambda: page.asked == ["one", "two and a half"] and is_done(page))
    assert page.server.sent[3] == ["one", "Fine.", "two and a half"]
    page["undo"].click()
    assert (page.asked, page.answers) == (["one", "two", "three"], before)
    page.open()
    assert page.asked == ["one", "two", "three"]


def test_an_answer_is_made_anew(page: Page) -> None:
    page.server.replies.extend([["first"], ["second"]])
    talk(page, "hello")
    page.act("regenerate")
    assert page.eventually(lambda: texts(page) == ["second"] and is_done(page))
    assert page.server.sent == [["hello"], ["hello"]]
    page["undo"].click()
    assert texts(page) == ["first"]
    page.open()
    assert (page.asked, texts(page)) == (["hello"], ["first"])


def test_what_was_there_before_stays_when_there_is_trouble(page: Page) -> None:
    page.server.replies.extend([["first"], [BUSY]])
    talk(page, "hello")
    page.act("regenerate")
    assert page.eventually(lambda: [note for _, note in page.answers[1:]] == ["16 texts wait already"])
    assert texts(page)[0] == "first"
    assert not page["undo"].is_displayed()
    page.open()
    assert (page.asked, texts(page)) == (["hello"], ["first"])


def test_an_answer_cut_off_by_its_length_is_continued(page: Page) -> None:
    page.server.reason = "length"
    page.server.replies.extend([["one, ", "two, "], [BUSY], ["three"]])
    talk(page, "count")
    assert page.offers() == {"edit", "copy", "regenerate", "continue"}
    page.act("continue")
    assert page.eventually(lambda: page.answers == [("one, two,", "16 texts wait already")])
    page.server.reason = "stop"
    page.act("continue")
    assert page.eventually(lambda: texts(page) == ["one, two, three"] and is_done(page))
    assert page.answers[0][1].startswith("3 tokens")
    assert page.server.sent[2] == ["count", "one, two, "]
    assert [body["continue_final_message"] for body in page.server.asked] == [False, True, True]
    assert "continue" not in page.offers()


# ---- what answers --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chat", [True, False])
def test_the_first_answer_of_a_model_says_what_it_is(page: Page, chat: bool) -> None:
    page.server.chat = chat
    page.server.replies.append(["# a **comment**"])
    page.open()
    talk(page, "one", "two")
    script = "return [...document.querySelectorAll('.about')].map(one => one.textContent)"
    first, second = page.browser.execute_script(script)
    assert first.startswith("a-model is a chat model" if chat else "a-model is a base model")
    assert second == ""
    page.open()
    assert page.browser.execute_script(script) == [first, second]
    assert texts(page)[0] == ("a comment" if chat else "# a **comment**")  # Markdown is for who was trained to write it


def test_an_answer_says_that_memory_still_warms_up_until_it_begins(page: Page) -> None:
    page.server.snapshot |= {"warm_up": {"loaded_bytes": 1.0e9, "total_bytes": 4.0e9}}
    assert page.eventually(lambda: page["warm-up"].is_displayed())
    go = page.server.ended.__class__()
    page.server.replies.append([go, "here", page.server.ended])
    page.send("hello")
    assert page.eventually(lambda: page.answers[0][1] == "waiting: memory is still warming up, 25 %")
    page.server.snapshot["warm_up"]["loaded_bytes"] = 2.0e9
    assert page.eventually(lambda: page.answers[0][1] == "waiting: memory is still warming up, 50 %")
    go.set()
    assert page.eventually(lambda: page.answers[0] == ("here", ""))

"""The page at `/` as a person has it: in Chromium without a window, or Firefox (NEURONPIPE_TEST_BROWSER=firefox)."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement

from tests.firefox import Firefox
from tests.pipeline import eventually

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
PATIENCE_S = 20.0

IN_FIREFOX = os.environ.get("NEURONPIPE_TEST_BROWSER", "chromium") == "firefox"
needs_browser = pytest.mark.skipif(
    not IN_FIREFOX and not (BROWSER and DRIVER),  # who asks for Firefox does not want them skipped
    reason="no chromium and chromedriver here; Debian's packages have these names",
)


@contextlib.contextmanager
def opened_browser(profile: Path) -> Iterator[WebDriver]:
    """A browser that knows nothing yet, while the context lasts."""
    made = Firefox(profile) if IN_FIREFOX else _chromium(profile)
    try:
        yield made
    finally:
        made.quit()


def _chromium(profile: Path) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


def new_tab(browser: WebDriver) -> WebDriver:
    """The browser with one tab alone, a new one: the page keeps all that it keeps in its tab."""
    before = browser.current_window_handle
    browser.switch_to.new_window("tab")
    mine = browser.current_window_handle
    browser.switch_to.window(before)
    browser.close()
    browser.switch_to.window(mine)
    return browser


def troubles(browser: WebDriver) -> list[str]:
    """What the browser has complained of since it was asked last; Chromium also of requests that failed."""
    if isinstance(browser, Firefox):
        return browser.errors()
    assert isinstance(browser, webdriver.Chrome)
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def troubles_at_end(browser: WebDriver) -> list[str]:
    """The same without requests to a server that was gone: those that a page made while it was left."""
    return [said for said in troubles(browser) if "ERR_CONNECTION_REFUSED" not in said]


def failed_request(browser: WebDriver, status: int) -> bool:
    """Whether the one trouble since the last question is a request that was refused so. Firefox reports none."""
    said = troubles(browser)
    return said == [] if IN_FIREFOX else len(said) == 1 and str(status) in said[0]


def resize(browser: WebDriver, width: int, height: int, touch: bool = False) -> None:
    """Give the page the screen of a phone. touch: fingers are the only pointers."""
    if isinstance(browser, Firefox):
        browser.resize(width, height)
        browser.prefer(ui_primaryPointerCapabilities=int(touch) or 6, ui_allPointerCapabilities=int(touch) or 6)
        return
    assert isinstance(browser, webdriver.Chrome)
    screen = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})


def prefer_scheme(browser: WebDriver, scheme: str) -> None:
    """Ask for a "light" or "dark" page that does not move."""
    if isinstance(browser, Firefox):
        browser.prefer(ui_systemUsesDarkTheme=int(scheme == "dark"), ui_prefersReducedMotion=1)
        return
    assert isinstance(browser, webdriver.Chrome)
    media = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


def download_into(browser: WebDriver, folder: Path) -> None:
    """Save what is downloaded in a folder, without a question."""
    if isinstance(browser, Firefox):
        browser.prefer(browser_download_dir=str(folder))
        return
    assert isinstance(browser, webdriver.Chrome)
    browser.execute_cdp_cmd("Page.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})


class Page:
    """The page in a browser. server: what it is of; its `port` is all that is asked for here."""

    def __init__(self, browser: WebDriver, server: Any) -> None:
        self.browser, self.server = browser, server

    def open(self) -> Page:
        """Load it, and wait until it shows what it has kept."""
        self.browser.get(f"http://127.0.0.1:{self.server.port}/")
        return self.shown()

    def shown(self) -> Page:
        """Wait until it shows what it has kept."""
        ready = "const list = document.getElementById('messages'); return list && !list.hasAttribute('aria-busy')"
        assert self.eventually(lambda: self.browser.execute_script(ready))
        return self

    def __getitem__(self, name: str) -> WebElement:
        return self.browser.find_element(By.ID, name)

    def set(self, **values: Any) -> None:
        """Put values into fields, wherever they are on the page."""
        for name, value in values.items():
            script = "const field = document.getElementById(arguments[0]); field.value = arguments[1]"
            self.browser.execute_script(script, name, str(value))

    def act(self, name: str, number: int = -1) -> None:
        """Press a button of one turn: "edit", "copy", "regenerate", "continue"."""
        role = "user" if name == "edit" else "assistant"
        script = "document.querySelectorAll(arguments[0])[arguments[1]].click()"
        buttons = f"#messages > .{role} > .foot [data-action={name}]"
        count = len(self.browser.find_elements(By.CSS_SELECTOR, buttons))
        self.browser.execute_script(script, buttons, number % count)

    def offers(self, number: int = -1) -> set[str]:
        """What can be done with one turn."""
        script = (
            "const [all, n] = [[...document.querySelectorAll('#messages > .user')], arguments[0]];"
            "const one = all.at(n); return [one, one.nextElementSibling].flatMap(item =>"
            "[...item.querySelectorAll(':scope > .foot button:not([hidden])')].map(button => button.dataset.action))"
        )
        return set(self.browser.execute_script(script, number))

    @property
    def titles(self) -> list[str]:
        """The list of conversations."""
        script = "return [...document.querySelectorAll('#entries [data-action=open]')].map(one => one.textContent)"
        return list(self.browser.execute_script(script))

    def in_list(self, action: str, number: int = 0) -> None:
        """Press a button of one conversation in the list: "open", "rename", "delete"."""
        script = "document.querySelectorAll(arguments[0])[arguments[1]].click()"  # with a mouse, seen only below it
        self.browser.execute_script(script, f"#entries [data-action={action}]", number)

    def ask(self, text: str, tokens: int) -> None:
        """Type and send; the likeliest tokens, so that a text ends where it always does."""
        self.set(tokens=tokens, temperature=0, penalty=1)
        self.send(text)

    def send(self, text: str) -> None:
        """Paste all but the last character, type that, and send: a driver takes a core's 13 ms for each key."""
        paste = "document.getElementById('prompt').value += arguments[0]"
        self.browser.execute_script(paste, text[:-1])
        self["prompt"].send_keys(text[-1:])
        self["send"].click()

    @property
    def asked(self) -> list[str]:
        """The text of each message of the person."""
        script = "return [...document.querySelectorAll('#messages .user .body')].map(one => one.textContent)"
        return list(self.browser.execute_script(script))

    @property
    def answers(self) -> list[tuple[str, str]]:
        """(text, note below it) of each answer."""
        script = (
            "return [...document.querySelectorAll('#messages .assistant')]"
            ".map(one => ['.body', '.note'].map(part => one.querySelector(part).textContent))"
        )
        return [(text, note) for text, note in self.browser.execute_script(script)]

    def record_lengths(self) -> Callable[[], list[int]]:
        """From now on how long the last answer is, whenever that changes. What asks from here sees only a few of the
        changes when the machine is busy; the page sees all."""
        self.browser.execute_script("""
            const lengths = window.lengths = [];
            new MutationObserver(() => {
                const last = document.querySelector('#messages .assistant:last-child .body');
                if (last && last.textContent.length !== lengths.at(-1)) lengths.push(last.textContent.length);
            }).observe(document.getElementById('messages'), { childList: true, subtree: true });
        """)
        return lambda: list(self.browser.execute_script("return lengths"))

    @property
    def divided(self) -> list[int]:
        """How many messages of the person are above the line from which on messages are sent, if there is one."""
        script = (
            "return [...document.querySelectorAll('#messages .divider')]"
            ".map(line => [...document.querySelectorAll('#messages .user')]"
            ".filter(one => line.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_PRECEDING).length)"
        )
        return list(self.browser.execute_script(script))

    def act_as_an_answer_begins(self, script: str) -> None:
        """Run a script in the page when the first words of its first answer are there. The whole answer may take less
        than a second, and on a slow machine a click from outside comes after its end."""
        self.browser.execute_async_script(f"""
            const done = arguments[0], body = () => document.querySelector('#messages .assistant .body');
            const look = () => body()?.textContent ? done(void ({script})) : setTimeout(look, 5);
            look();
        """)

    def eventually(self, true: Callable[[], Any]) -> bool:
        """Whether something becomes true in time."""
        return eventually(true, PATIENCE_S, every_s=0.05)  # each look is work for the page

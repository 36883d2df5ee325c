"""Firefox for the tests of the page, driven through Marionette, its own form of WebDriver.

geckodriver translates WebDriver over HTTP into the same commands, but no registry of packages has it. So these few
names are translated here, and Debian's firefox-esr is all that is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from selenium.webdriver import FirefoxOptions
from selenium.webdriver.remote.webdriver import WebDriver

PROGRAM = shutil.which("firefox-esr") or shutil.which("firefox")
START_S, END_S = 60.0, 20.0
PREFERENCES = {
    "marionette.port": 0,
    "app.update.disabledForTesting": True,
    "browser.shell.checkDefaultBrowser": False,
    "browser.startup.page": 0,
    "datareporting.policy.dataSubmissionEnabled": False,
    "dom.events.testing.asyncClipboard": True,  # a script may read what a button has copied
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "services.settings.server": "data:,",  # a test talks to this machine only
    "toolkit.telemetry.enabled": False,
    "browser.download.folderList": 2,  # the folder of browser.download.dir
    "browser.download.alwaysOpenPanel": False,
}
# Selenium's commands -> Marionette's. Parameters are alike, except for those in `_parameters`.
COMMANDS = {
    "newSession": "WebDriver:NewSession",
    "quit": "Marionette:Quit",
    "get": "WebDriver:Navigate",
    "refresh": "WebDriver:Refresh",
    "getTitle": "WebDriver:GetTitle",
    "getCurrentUrl": "WebDriver:GetCurrentURL",
    "screenshot": "WebDriver:TakeScreenshot",
    "setWindowRect": "WebDriver:SetWindowRect",
    "setTimeouts": "WebDriver:SetTimeouts",
    "newWindow": "WebDriver:NewWindow",
    "close": "WebDriver:CloseWindow",
    "switchToWindow": "WebDriver:SwitchToWindow",
    "w3cGetCurrentWindowHandle": "WebDriver:GetWindowHandle",
    "w3cGetWindowHandles": "WebDriver:GetWindowHandles",
    "w3cGetActiveElement": "WebDriver:GetActiveElement",
    "w3cExecuteScript": "WebDriver:ExecuteScript",
    "w3cExecuteScriptAsync": "WebDriver:ExecuteAsyncScript",
    "findElement": "WebDriver:FindElement",
    "findElements": "WebDriver:FindElements",
    "findChildElement": "WebDriver:FindElement",
    "findChildElements": "WebDriver:FindElements",
    "clickElement": "WebDriver:ElementClick",
    "clearElement": "WebDriver:ElementClear",
    "sendKeysToElement": "WebDriver:ElementSendKeys",
    "getElementText": "WebDriver:GetElementText",
    "getElementAttribute": "WebDriver:GetElementAttribute",
    "getElementTagName": "WebDriver:GetElementTagName",
    "getElementProperty": "WebDriver:GetElementProperty",
    "getElementValueOfCssProperty": "WebDriver:GetElementCSSValue",
    "getElementRect": "WebDriver:GetElementRect",
    "getElementAriaLabel": "WebDriver:GetComputedLabel",
    "isElementEnabled": "WebDriver:IsElementEnabled",
    "isElementSelected": "WebDriver:IsElementSelected",
}
ERRORS_OF_PAGES = """
    const errors = [];
    for (const message of Services.console.getMessageArray()) {
        if (!(message instanceof Ci.nsIScriptError) || message.flags & Ci.nsIScriptError.warningFlag) continue;
        const { sourceName, errorMessage } = message;
        if (sourceName.startsWith("http://127.0.0.1")) errors.push(`${sourceName} ${errorMessage}`);
    }
    Services.console.reset();
    return errors;
"""
SET_PREFERENCE = """
    const [name, value] = arguments;
    if (typeof value === "string") Services.prefs.setStringPref(name, value);
    else if (typeof value === "number") Services.prefs.setIntPref(name, value);
    else Services.prefs.setBoolPref(name, value);
"""
RESIZE = """
    const { style } = gBrowser.selectedBrowser;
    for (const [side, pixels] of [["width", arguments[0]], ["height", arguments[1]]])
        for (const name of [side, `min-${side}`, `max-${side}`]) style.setProperty(name, `${pixels}px`);
"""


class Marionette:
    """A connection to a Firefox, with the interface of selenium's RemoteConnection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._replies = self._socket.makefile("rb")
        self._number = 0
        self._receive()  # the greeting

    def execute(self, command: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command of selenium's."""
        error, value = self.call(COMMANDS[command], _parameters(command, parameters))
        if error:
            return {"status": 500, "value": json.dumps({"value": error})}
        if isinstance(value, dict) and set(value) == {"value"}:
            value = value["value"]
        return {"value": value}

    def call(self, name: str, parameters: dict[str, Any]) -> tuple[Any, Any]:
        """Carry out a command of Marionette's. Returns its error, if any, and its result."""
        self._number += 1
        message = json.dumps([0, self._number, name, parameters]).encode()
        self._socket.sendall(b"%d:%s" % (len(message), message))
        _, _, error, value = self._receive()
        return error, value

    def close(self) -> None:
        """Close the connection; the browser goes on."""
        self._replies.close()
        self._socket.close()

    def _receive(self) -> Any:
        digits = b""
        while (byte := self._replies.read(1)) != b":":
            if not byte:
                raise ConnectionError("Firefox has closed the connection")
            digits += byte
        return json.loads(self._replies.read(int(digits)))


def _parameters(command: str, given: dict[str, Any]) -> dict[str, Any]:
    parameters = {name: value for name, value in given.items() if name != "sessionId"}
    if command == "newSession":
        return dict(parameters["capabilities"].get("alwaysMatch", {}))
    if command == "quit":
        return {"flags": ["eForceQuit"]}
    if command.startswith("findChild"):
        parameters["element"] = parameters.pop("id")
    return parameters


class Firefox(WebDriver):
    """A Firefox without a window, with a profile of its own."""

    def __init__(self, profile: Path) -> None:
        if PROGRAM is None:
            raise FileNotFoundError("no firefox-esr or firefox here; Debian has the former")
        lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in PREFERENCES.items()]
        (profile / "user.js").write_text("".join(lines))
        words = [PROGRAM, "--headless", "--no-remote", "--marionette", "--remote-allow-system-access"]
        with (profile / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [*words, "--width=1280", "--height=900", "--profile", str(profile)],
                stdout=output,
                stderr=output,
                env=os.environ | {"HOME": str(profile), "MOZ_CRASHREPORTER_DISABLE": "1"},
            )
        try:
            self._marionette = Marionette(self._port(profile))
            super().__init__(command_executor=self._marionette, options=FirefoxOptions())  # type: ignore[arg-type]
        except BaseException:
            self._end()
            raise
        self._is_remote = False  # files that are typed into a field lie on this machine

    def _port(self, profile: Path) -> int:
        deadline = time.monotonic() + START_S
        file = profile / "MarionetteActivePort"
        while time.monotonic() < deadline and self._process.poll() is None:
            if file.exists() and (text := file.read_text()):
                return int(text)
            time.sleep(0.05)
        raise TimeoutError((profile / "output").read_text())

    def quit(self) -> None:
        """End the browser."""
        try:
            super().quit()
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def privileged(self, script: str, *arguments: Any) -> Any:
        """Run a script with the rights of the browser itself."""
        self._marionette.call("Marionette:SetContext", {"value": "chrome"})
        try:
            return self.execute_script(script, *arguments)
        finally:
            self._marionette.call("Marionette:SetContext", {"value": "content"})

    def errors(self) -> list[str]:
        """The errors of pages since the last call. Requests that fail are none in Firefox."""
        return list(self.privileged(ERRORS_OF_PAGES))

    def prefer(self, **preferences: bool | int | str) -> None:
        """Set preferences of about:config; `_` stands for a dot."""
        for name, value in preferences.items():
            self.privileged(SET_PREFERENCE, name.replace("_", "."), value)

    def resize(self, width: int, height: int) -> None:
        """Give the page of this tab so many CSS pixels, also fewer than a window has at least."""
        self.privileged(RESIZE, width, height)

"""Debian's headless Chromium, spoken to as its developer tools speak to it: JSON over two pipes, no library.

One process serves a file of tests; each page has a profile of its own. What went wrong inside a page (an
exception, a broken policy) and every address that it asked for are kept, for tests to look at.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvasir_node.nurseries import open_unwrapping_nursery

NAMES: Final = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
DEADLINE_S: Final = 60.0
"""For anything that a page is waited for; a busy machine needs some seconds."""
_END_S: Final = 10.0
_LOOK_INTERVAL_S: Final = 0.03
_FLAGS: Final = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # CI is root, and in a container; what is shown is ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--force-color-profile=srgb",
)


class Chromium:
    """A running Chromium and the two pipes to it."""

    def __init__(self, command: Path, profile: Path) -> None:
        reading, self._to_it = os.pipe()
        self._from_it, writing = os.pipe()
        # It reads descriptor 3 and writes 4, which may be others' here: high ones are in nobody's way.
        ends = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 100) for each in (reading, writing)]
        os.close(reading)
        os.close(writing)
        flags = [*_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        start = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", start, "chromium", str(command), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=ends,
            start_new_session=True,
        )
        for each in ends:
            os.close(each)
        self._read = bytearray()
        self._n_calls = 0

    def close(self) -> None:
        """End it: it ends with its pipe, and is killed where it does not."""
        os.close(self._to_it)
        os.close(self._from_it)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()

    @contextlib.asynccontextmanager
    async def page(
        self, width: int = 1280, height: int = 900, media: Mapping[str, str] | None = None
    ) -> AsyncIterator[Page]:
        """An empty page of this size in a profile of its own; ``media`` are features that CSS asks for."""
        sending = trio.lowlevel.FdStream(os.dup(self._to_it))
        receiving = trio.lowlevel.FdStream(os.dup(self._from_it))
        async with sending, receiving, open_unwrapping_nursery() as nursery:
            page = Page(self, sending)
            nursery.start_soon(self._receive, receiving, page)
            await page.open(width, height, media or {})
            yield page
            await page.close()
            nursery.cancel_scope.cancel()

    async def _receive(self, receiving: trio.lowlevel.FdStream, page: Page) -> None:
        while True:
            while (end := self._read.find(b"\0")) >= 0:
                message = json.loads(self._read[:end])
                del self._read[: end + 1]
                page.hear(message)
            data = await receiving.receive_some(1 << 16)
            assert data, "Chromium has ended"
            self._read += data

    def next_id(self) -> int:
        """A number that no call had before."""
        self._n_calls += 1
        return self._n_calls


class Page:
    """One page. Whatever waits has a deadline."""

    def __init__(self, chromium: Chromium, sending: trio.lowlevel.FdStream) -> None:
        self._chromium = chromium
        self._sending = sending
        self._session = ""
        self._context = ""
        self._answers: dict[int, trio.MemorySendChannel[dict[str, Any]]] = {}
        self._turn = trio.Lock()
        self.faults: list[str] = []
        """Exceptions that nothing caught, and what its policy forbade."""
        self.addresses: list[str] = []
        """What it asked for, in that order."""

    async def open(self, width: int, height: int, media: Mapping[str, str]) -> None:
        """Make it."""
        self._context = (await self._call("Target.createBrowserContext"))["browserContextId"]
        target = await self._call("Target.createTarget", url="about:blank", browserContextId=self._context)
        attached = await self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._call(f"{domain}.enable")
        await self.resize(width, height)
        await self.emulate(media)

    async def close(self) -> None:
        """Let go of it."""
        self._session = ""
        await self._call("Target.disposeBrowserContext", browserContextId=self._context)

    async def resize(self, width: int, height: int) -> None:
        """Be a screen of this size; a narrow one is a phone's."""
        await self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    async def emulate(self, media: Mapping[str, str]) -> None:
        """Have CSS find these features."""
        features = [{"name": name, "value": value} for name, value in media.items()]
        await self._call("Emulation.setEmulatedMedia", features=features)

    async def before_load(self, script: str) -> None:
        """Run a script in each page that is loaded from now on, before its own."""
        await self._call("Page.addScriptToEvaluateOnNewDocument", source=script)

    async def go(self, address: str) -> None:
        """Load what is at an address."""
        await self._call("Page.navigate", url=address)
        await self.wait_for(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited; it is JSON."""
        result = await self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait_for(self, condition: str) -> None:
        """Return when an expression is true."""
        for _ in range(round(DEADLINE_S / _LOOK_INTERVAL_S)):
            if await self.evaluate(f"Boolean({condition})"):
                return
            await trio.sleep(_LOOK_INTERVAL_S)
        shown = await self.evaluate("document.body.innerText")
        raise AssertionError(f"never true: {condition}\nfaults: {self.faults}\n{shown}")

    async def text_of(self, selector: str) -> str:
        """What a person reads there."""
        text = await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        assert isinstance(text, str)
        return text

    async def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        await self._call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key and let it go."""
        code, text = {"Enter": (13, "\r"), "Tab": (9, ""), "Space": (32, " ")}[key]
        named = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
        modifiers = 8 if shift else 0
        for kind in ("keyDown", "keyUp"):
            said = {"text": text} if text and kind == "keyDown" else {}
            await self._call("Input.dispatchKeyEvent", type=kind, modifiers=modifiers, **named, **said)

    async def accessibility_tree(self) -> list[dict[str, Any]]:
        """What a screen reader is told: role, name and properties of each node that is not ignored."""
        nodes = (await self._call("Accessibility.getFullAXTree"))["nodes"]
        return [each for each in nodes if not each["ignored"]]

    async def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        whole = await self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(whole["data"])

    def hear(self, message: dict[str, Any]) -> None:
        """An answer or an event."""
        if (waiting := self._answers.pop(message.get("id", 0), None)) is not None:
            waiting.send_nowait(message)
            return
        if not self._session or message.get("sessionId") != self._session:
            return
        said = message["params"]
        match message["method"]:
            case "Runtime.exceptionThrown":
                self.faults.append(str(said["exceptionDetails"]))
            case "Log.entryAdded" if said["entry"]["source"] != "network":
                self.faults.append(said["entry"]["text"])
            case "Network.requestWillBeSent":
                self.addresses.append(said["request"]["url"])

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = self._chromium.next_id()
        send, receive = trio.open_memory_channel[dict[str, Any]](1)
        self._answers[number] = send
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        async with self._turn:
            await self._sending.send_all(json.dumps(message).encode() + b"\0")
        with trio.fail_after(DEADLINE_S):
            answer = await receive.receive()
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A Chromium for this file's tests, or none of them."""
    command = next((found for name in NAMES if (found := shutil.which(name))), None)
    if command is None:
        pytest.skip("there is no Chromium: as root, `make browser`")
    running = Chromium(Path(command), tmp_path_factory.mktemp("chromium"))
    try:
        yield running
    finally:
        running.close()

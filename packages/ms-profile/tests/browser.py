"""Render a page in headless Chromium."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any, BinaryIO

import pytest

__all__ = ["Tab", "needs_browser", "open_tab"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


class Tab:
    """One tab, controlled by Chrome DevTools messages on a pair of pipes."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO) -> None:
        self._requests, self._answers = requests, answers
        self._session = ""
        self._number = 0
        (target,) = (item for item in self.send("Target.getTargets")["targetInfos"]
                     if item["type"] == "page")  # fmt: skip
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]

    def send(self, method: str, **parameters: Any) -> Any:
        """Return the result of a DevTools method; events are skipped."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._requests.write(json.dumps(message).encode() + b"\0")
        self._requests.flush()
        while True:
            text = bytearray()
            while (byte := self._answers.read(1)) != b"\0":
                assert byte, "the browser ended"
                text += byte
            answer = json.loads(text)
            if answer.get("id") == self._number:
                return answer["result"]

    def visit(self, address: str, *, width: int) -> None:
        """Open an address in a window of this width, and wait for `data-ready`."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        self.send("Page.navigate", url=address)
        self.wait_for("document.documentElement.dataset.ready === 'yes'")

    def render(self, page: Path, part: str = "overview") -> str:
        """Return the document of a file after its scripts have run."""
        self.send("Page.navigate", url="about:blank")  # else only the fragment may change
        self.send("Page.navigate", url=f"file://{page}#{part}")
        self.wait_for("document.documentElement.dataset.ready === 'yes'")
        # The timeline is drawn in the next frame.
        panel = f"document.getElementById('panel-{part}')"
        self.wait_for(f"!{panel} || {panel}.childElementCount > 0")
        document: str = self.evaluate("document.documentElement.outerHTML")
        return document

    def title_from_script(self, page: Path, part: str = "overview") -> str:
        """Return the title that a script of the page sets when it has finished."""
        (initial,) = re.findall("<title>(.*?)</title>", page.read_text())
        self.render(page, part)
        self.wait_for(f"document.title !== {json.dumps(unescape(initial))}")
        title: str = self.evaluate("document.title")
        return title

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def wait_for(self, condition: str, *, timeout_s: float = 60.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"{condition} is false after {timeout_s} s"
            time.sleep(0.05)


@contextmanager
def open_tab(tmp_path: Path) -> Iterator[Tab]:
    """Start a browser with an empty profile and yield its tab."""
    request_reader, request_writer = os.pipe()
    answer_reader, answer_writer = os.pipe()
    # The browser expects its ends of the pipes as the descriptors 3 and 4.
    redirect = f'exec 3<&{request_reader} 4>&{answer_writer}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", redirect, "bash", CHROMIUM, *FLAGS, "--remote-debugging-pipe",
         f"--user-data-dir={tmp_path / 'browser'}", "about:blank"],
        pass_fds=(request_reader, answer_writer), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(request_reader)
    os.close(answer_writer)
    try:
        with os.fdopen(request_writer, "wb") as requests, os.fdopen(answer_reader, "rb") as answers:
            yield Tab(requests, answers)
    finally:
        process.terminate()
        process.wait(timeout=30)

"""Drive headless Chromium through chromedriver's HTTP interface, to time a report for a reader."""

import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Browser", "open_browser"]

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1400,900",
]  # fmt: skip


class Browser:
    """One browser tab."""

    def __init__(self, address: str, session: str) -> None:
        self._base = f"{address}/session/{session}"

    def visit(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        call(f"{self._base}/url", {"url": url})

    def run(self, script: str) -> Any:
        """Run an asynchronous script, which returns a value by calling `done(value)`."""
        body = "const done = arguments[arguments.length - 1];" + script
        return call(f"{self._base}/execute/async", {"script": body, "args": []})


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start chromedriver and a browser with an empty profile."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_for(f"{address}/status")
            options = {"args": [*FLAGS, f"--user-data-dir={Path(folder) / 'profile'}"]}
            capabilities = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
            session = call(f"{address}/session", capabilities)["sessionId"]
            call(f"{address}/session/{session}/timeouts", {"script": 120_000})
            try:
                yield Browser(address, session)
            finally:
                request = urllib.request.Request(f"{address}/session/{session}", method="DELETE")
                urllib.request.urlopen(request, timeout=30).close()
        finally:
            driver.terminate()
            driver.wait(timeout=30)


def call(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=180) as response:
        return json.load(response)["value"]


def wait_for(url: str) -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit("chromedriver did not start; install Debian's chromium and chromium-driver")

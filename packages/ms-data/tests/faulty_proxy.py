"""HTTP proxy that fails on purpose: 5xx, resets, delays, short and wrong bodies."""

import random
import socket
import struct
import threading
import time
from collections import Counter
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

FAULTS = ("busy", "reset", "cut", "stall", "flip")
STALL_S = 3.0


class FaultyProxy:
    """Forwards requests to a server on this machine; a share of the answers to GET is damaged.

    Args:
        port: port of the server.
        rate: probability of a fault for each GET of a file with the suffix.
        faults: kinds of faults to draw from.
        seed: random seed.
        suffix: part of the names of the files whose answers are damaged.
    """

    def __init__(
        self,
        port: int,
        *,
        rate: float = 0.0,
        faults: tuple[str, ...] = FAULTS,
        seed: int = 0,
        suffix: str = ".msd",
    ) -> None:
        self.rate, self.faults, self.suffix = rate, faults, suffix
        self.counts: Counter[str] = Counter()
        """Requests by method, and faults by kind."""
        self._random, self._lock = random.Random(seed), threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                proxy.forward(self, port)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "FaultyProxy":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.server.shutdown()
        self.server.server_close()

    def draw(self, handler: BaseHTTPRequestHandler) -> str:
        """Return the fault of a request, or an empty string."""
        with self._lock:
            listing = "list-type" in handler.path
            self.counts["LIST" if listing else handler.command] += 1
            shard = handler.command == "GET" and self.suffix in handler.path
            if not shard or self._random.random() >= self.rate:
                return ""
            fault = self._random.choice(self.faults)
            self.counts[fault] += 1
            return fault

    def forward(self, handler: BaseHTTPRequestHandler, port: int) -> None:
        """Answer one request."""
        fault = self.draw(handler)
        length = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(length) if length else None
        if fault == "busy":
            handler.send_response(503)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        if fault == "reset":
            linger = struct.pack("ii", 1, 0)
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            handler.close_connection = True
            handler.connection.close()
            return
        if fault == "stall":
            time.sleep(STALL_S)
        upstream = HTTPConnection("127.0.0.1", port, timeout=60)
        upstream.request(handler.command, handler.path, body, dict(handler.headers))
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        if fault == "flip" and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                handler.send_header(name, value)
        size = answer.getheader("Content-Length") if handler.command == "HEAD" else len(content)
        handler.send_header("Content-Length", str(size or 0))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if fault == "cut":
            content = content[: len(content) // 2]
            handler.close_connection = True
        try:
            handler.wfile.write(content)
        except OSError:  # the client has given up
            handler.close_connection = True

"""JSON requests to one server, with a time limit, a size limit and no redirects."""

import json
import os
import socket
import ssl
import threading
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from ms_align.errors import ConfigError, ServerError
from ms_align.secret_text import MASK, without_secrets

T = TypeVar("T")
MAX_DETAIL = 200
"""Characters of a server's own error message that are repeated in ours."""


class ConnectionLostError(ServerError):
    """Request that may succeed when it is repeated."""


class Connection:
    """Sends requests to one server; thread-safe, as each request opens a new connection.

    Args:
        url: address of the server.
        key_variable: environment variable with the server's API key, if it needs one. The key is
            sent to this address only and masked in messages.
        timeout_s: time limit of a request, from the connection to the last byte of the answer.
    """

    def __init__(self, url: str, *, key_variable: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.key_variable = key_variable
        self.timeout_s = timeout_s
        self._open: set[HTTPConnection] = set()
        self.closed = False

    def post(self, path: str, body: Any, answer: type[T], *, limit_bytes: int = 1 << 20) -> T:
        """Send a JSON body and decode the answer.

        Args:
            path: path of the endpoint.
            body: JSON value.
            answer: msgspec type of the answer.
            limit_bytes: maximum size of the answer.

        Raises:
            ConnectionLostError: the answer is missing, incomplete or not JSON, or the server
                failed; the request may be repeated.
            ServerError: any other answer.
            ConfigError: the server does not accept the request.
        """
        return self._request("POST", path, json.dumps(body).encode(), answer, limit_bytes)

    def get(self, path: str, answer: type[T]) -> T:
        """Read an endpoint; raises the errors of `post`."""
        return self._request("GET", path, None, answer, 1 << 20)

    def close(self) -> None:
        """Abort the requests in progress and fail later ones."""
        self.closed = True
        for connection in list(self._open):
            _shut_down(connection)

    def _request(
        self, method: str, path: str, body: bytes | None, answer: type[T], limit_bytes: int
    ) -> T:
        status, location, content = self._exchange(method, path, body, limit_bytes)
        if status != 200:
            raise self._rejected(path, status, location, content)
        if not content and answer is type(None):
            content = b"null"
        try:
            return msgspec.json.decode(content, type=answer)
        except msgspec.ValidationError as error:
            raise ServerError(
                f"{self.url}{path} gave an answer that vLLM would not give ({error}); "
                "check the address and the server's version"
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConnectionLostError(
                f"{self.url}{path} must answer in JSON, and the answer is malformed ({error}); "
                "check the address and the server's log"
            ) from error

    def _exchange(
        self, method: str, path: str, body: bytes | None, limit_bytes: int
    ) -> tuple[int, str, bytes]:
        """Return status, Location header and body of the answer."""
        parts = urlsplit(self.url)
        is_https = parts.scheme == "https"
        # http.client uses no proxy from the environment and follows no redirect.
        connection_class = HTTPSConnection if is_https else HTTPConnection
        connection = connection_class(parts.hostname or "", parts.port, timeout=self.timeout_s)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if key := self._key():
            headers["Authorization"] = f"Bearer {key}"
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _shut_down(connection)

        # The socket's own timeout only limits the silence between two bytes.
        timer = threading.Timer(self.timeout_s, expire)
        timer.daemon = True
        self._open.add(connection)
        try:
            if self.closed:
                raise OSError("the client is closed")
            timer.start()
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            with response:
                content = response.read(limit_bytes + 1)
            truncated = bool(response.length) and len(content) <= limit_bytes
            if expired.is_set() or truncated:
                raise OSError("the connection closed in the middle of the answer")
        except (OSError, HTTPException) as error:
            if expired.is_set() or isinstance(error, TimeoutError):
                raise ConnectionLostError(
                    f"{self.url}{path} must answer within {self.timeout_s:g} s and did not; check "
                    "the server, or raise vllm.timeout_s"
                ) from error
            if isinstance(error, ssl.SSLError):
                raise ServerError(
                    f"{self.url}: no secure connection ({error.reason or error}); check the "
                    "address and the server's certificate"
                ) from error
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ConnectionLostError(
                f"{self.url}{path} cannot be reached ({self._one_line(reason)}); check that the "
                "server runs there"
            ) from error
        finally:
            timer.cancel()
            self._open.discard(connection)
            connection.close()
        if len(content) > limit_bytes:
            raise ServerError(
                f"{self.url}{path} must answer with at most {limit_bytes} bytes, and sent more; "
                "check the address and the server's version"
            )
        return response.status, response.headers.get("Location", ""), content

    def _rejected(self, path: str, status: int, location: str, content: bytes) -> Exception:
        """Return the error for an answer with another status than 200."""
        detail = f"HTTP {status}{self._detail(content)}"
        if 300 <= status < 400:
            target = self._one_line(location)
            return ServerError(
                f"{self.url}{path} redirects to {target!r} ({detail}); set the server's final "
                "address"
            )
        if status in (401, 403) and "scale-out" not in detail and "scale_out" not in detail:
            return ConfigError(
                f"{self.url}{path} refused access ({detail}); set the environment variable "
                f"{self.key_variable} to the server's key"
            )
        if status >= 500 or status in (408, 425, 429):
            return ConnectionLostError(f"{self.url}{path} failed ({detail}); see the server's log")
        return ServerError(
            f"{self.url}{path} rejected the request ({detail}); see the server's log"
        )

    def _detail(self, content: bytes) -> str:
        """Return the message in the server's answer."""
        text = content[:4096].decode(errors="replace")
        with suppress(ValueError, TypeError, KeyError):
            text = str(json.loads(content)["error"]["message"])
        line = self._one_line(text)
        return f": {line}" if line else ""

    def _one_line(self, text: str) -> str:
        """Shorten text of a server, on one line and without the key."""
        line, key = " ".join(text.split()), self._key()
        return without_secrets(line.replace(key, MASK) if key else line)[:MAX_DETAIL]

    def _key(self) -> str:
        return os.environ.get(self.key_variable, "").strip()


def _shut_down(connection: HTTPConnection) -> None:
    """Wake the thread that waits for an answer; it then sees a closed connection."""
    with suppress(OSError):
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)

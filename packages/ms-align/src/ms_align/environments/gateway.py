"""OpenAI-compatible gateway through which an unmodified agent uses the policy in training.

It serves `POST /v1/chat/completions` and `GET /v1/models` on the loopback interface. The API key of
a request identifies its session: one session per episode. A request that continues the session's
conversation keeps all earlier tokens. Any other request forks the session: its messages are
rendered from scratch, and the previous branch ends.
"""

import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from attrs import define, field

from ms_align.environments.calls import Reply
from ms_align.environments.conversation import ChatFormat, Message, Turn
from ms_align.errors import DataError

MODEL = "policy"
BODY_BYTES = 4 << 20
"""Maximum size of a request body."""
MAX_MESSAGES = 1000
MAX_REQUESTS = 1000
"""Maximum number of requests in an episode."""


@define(eq=False)
class Branch:
    """Tokens of consecutive turns, where each turn continues the previous one."""

    prompt: list[int]
    tokens: list[int] = field(factory=list)
    mask: list[bool] = field(factory=list)
    columns: dict[str, list[float]] = field(factory=dict)
    stopped: bool = False

    def append(self, tokens: Sequence[int], columns: Mapping[str, list[float]] | None) -> None:
        """Append sampled tokens with their columns, or other tokens without columns."""
        # A column that appears late has 0 for the earlier tokens.
        for name in columns or {}:
            self.columns.setdefault(name, [0.0] * len(self.tokens))
        self.tokens += tokens
        self.mask += [columns is not None] * len(tokens)
        for name, values in self.columns.items():
            values += columns[name] if columns is not None else [0.0] * len(tokens)


@define(eq=False)
class PendingRequest:
    """A request waiting for the policy's response."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    max_tokens: int | None
    stream: bool = False
    """Send the response as server-sent events."""
    include_usage: bool = False
    """End the events with the token counts."""
    answered: threading.Event = field(factory=threading.Event)
    answer: dict[str, Any] = field(factory=dict)
    status: int = 200

    def refuse(self, status: int, problem: str, code: str | None = None) -> None:
        """Answer the request with an error, with OpenAI's code if there is one."""
        self.status, self.answer = status, error_body(problem, code)
        self.answered.set()


@define(eq=False)
class Session:
    """Requests of one agent, with the tokens, log-probabilities and masks of its branches."""

    key: str
    branches: list[Branch] = field(factory=list)
    messages: list[Message] = field(factory=list)
    """Messages of the latest request, followed by its answer."""
    tools: list[dict[str, Any]] | None = None
    pending: PendingRequest | None = None
    turns: int = 0
    rewritten: int = 0
    _turn: Turn | None = None
    _response: list[int] = field(factory=list)
    _reply: Reply | None = None
    _stopped: bool = False

    @property
    def forks(self) -> int:
        """Number of branches with responses, not counting the first."""
        return max(0, sum(any(branch.mask) for branch in self.branches) - 1)

    @property
    def context(self) -> list[int]:
        """Tokens before the next response."""
        branch = self.branches[-1]
        return [*branch.prompt, *branch.tokens]

    def begin(self, chat: ChatFormat, request: PendingRequest) -> None:
        """Render a request as a continuation of the latest branch, or as a new branch.

        Raises:
            DataError: the chat template rejects the messages.
        """
        chat.tools = request.tools
        # Agents send the entire conversation each time. It continues the branch if it starts with
        # the messages so far, as the model sees them, and offers the same tools.
        previous = len(self.messages)
        continues = (
            self._turn is not None
            and self._reply is not None
            and len(request.messages) > previous
            and request.tools == self.tools
            and [comparable(m) for m in request.messages[:previous]]
            == [comparable(m) for m in self.messages]
        )
        continuation = None
        if continues:
            assert self._turn is not None
            assert self._reply is not None
            continuation = chat.extend(
                self._turn,
                self._response,
                self._reply,
                request.messages[previous:],
                stopped=self._stopped,
                call_ids=self._call_ids(),
            )
        if continuation is not None:
            # Messages of the agent are not sampled by the policy: no columns, mask False.
            self.branches[-1].append(continuation.tokens, None)
            self.rewritten += not continuation.exact
            self._turn = continuation.turn
        else:
            self._turn, tokens = chat.start(request.messages)
            self.branches.append(Branch(prompt=tokens))
        self.messages, self.tools = list(request.messages), request.tools

    def _call_ids(self) -> list[str]:
        calls = self.messages[-1].get("tool_calls") or ()
        return [str(call["id"]) for call in calls]

    def finish(
        self,
        chat: ChatFormat,
        response: list[int],
        columns: Mapping[str, list[float]],
        *,
        stopped: bool,
    ) -> None:
        """Record a response and answer the request with it."""
        request = self.pending
        assert request is not None
        # Record before answering, as the agent may send its next request immediately.
        self.branches[-1].append(response, columns)
        self.branches[-1].stopped = stopped
        self._response, self._stopped = response, stopped
        self._reply = reply = chat.parse(response, stopped=stopped)
        # Nine characters, as Mistral's template requires.
        call_ids = [f"call{self.turns:03d}{index:02d}" for index in range(len(reply.calls))]
        self.turns += 1
        message = reply.message(call_ids)
        self.messages = [*self.messages, message]
        # OpenAI's format has the arguments as a JSON string, templates take an object.
        calls = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call_id, call in zip(call_ids, reply.calls, strict=True)
        ]
        prompt_tokens = len(self.context) - len(response)
        request.answer = {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {
                        **message,
                        "refusal": None,
                        **({"tool_calls": calls} if calls else {}),
                    },
                    "finish_reason": "tool_calls" if calls else "stop" if stopped else "length",
                    "logprobs": None,
                }
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(response),
                "total_tokens": prompt_tokens + len(response),
            },
        }
        self.pending = None
        request.answered.set()


def comparable(message: Message) -> dict[str, Any]:
    """Normalize a message to the parts that the model sees, for comparison."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # Clients may serialize the same arguments with other whitespace.
            with suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append((call.get("id"), function.get("name"), arguments))
    return {
        "role": message.get("role"),
        "content": content or "",
        "calls": calls,
        "tool_call_id": message.get("tool_call_id"),
    }


def chunks_of(answer: Mapping[str, Any], *, include_usage: bool) -> list[dict[str, Any]]:
    """Return a chat completion as the chunks of a stream.

    Responses are generated in batches, so the message is a single chunk.
    """
    (choice,) = answer["choices"]
    message = {name: value for name, value in choice["message"].items() if value is not None}
    if "tool_calls" in message:  # clients assemble calls by their index
        calls = enumerate(message["tool_calls"])
        message["tool_calls"] = [{"index": index, **call} for index, call in calls]
    base = {name: answer[name] for name in ("id", "created", "model")}
    base["object"] = "chat.completion.chunk"
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks = [
        {**base, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {**base, "choices": [end]},
    ]
    if include_usage:
        chunks.append({**base, "choices": [], "usage": answer["usage"]})
    return chunks


def error_body(problem: str, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    return {"error": {"message": problem, "type": "invalid_request_error", "code": code}}


class Gateway:
    """HTTP server on 127.0.0.1 whose sessions record the tokens of agents."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sessions: dict[str, Session] = {}
        gateway = self

        class Handler(_Handler):
            """Handler bound to this gateway."""

            owner = gateway

        # One thread per connection: a handler blocks until its response is generated.
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def base_url(self) -> str:
        """Address for `OpenAI(base_url=...)`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def open_session(self) -> Session:
        """Start a session with a new random key."""
        session = Session(key=f"sk-{secrets.token_urlsafe(24)}")
        with self.changed:
            self.sessions[session.key] = session
        return session

    def close_session(self, session: Session) -> None:
        """End a session; later requests with its key are refused."""
        with self.changed:
            self.sessions.pop(session.key, None)
            if session.pending is not None:
                session.pending.refuse(410, "the session has ended")
                session.pending = None

    def submit(self, session: Session, request: PendingRequest) -> bool:
        """Queue a request; return False if the session already has a pending request."""
        with self.changed:
            if session.pending is not None:
                return False
            session.pending = request
            self.changed.notify_all()
            return True

    def close(self) -> None:
        """Stop serving."""
        for session in list(self.sessions.values()):
            self.close_session(session)
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Validates a request (key, size, format), queues it and waits for the answer."""

    owner: Gateway
    protocol_version = "HTTP/1.1"
    timeout = 600

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Log nothing, as requests contain keys."""

    def _reply(self, status: int, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status >= 400:  # the body may not have been read
            self.send_header("Connection", "close")
            self.close_connection = True
        with suppress(OSError):  # the agent may have been killed
            self.end_headers()
            self.wfile.write(content)

    def _session(self) -> Session | None:
        key = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        session = self.owner.sessions.get(key)
        if session is None:
            self._reply(401, error_body("unknown API key; use the session's"))
        return session

    def do_GET(self) -> None:
        """List the only model."""
        if self._session() is None:
            return
        if self.path != "/v1/models":
            self._reply(404, error_body(f"no such path {self.path[:100]!r}"))
            return
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "ms-align"}
        self._reply(200, {"object": "list", "data": [model]})

    def do_POST(self) -> None:
        """Answer a chat completion."""
        session = self._session()
        if session is None:
            return
        if self.path != "/v1/chat/completions":
            self._reply(404, error_body(f"no such path {self.path[:100]!r}"))
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > BODY_BYTES:
            self._reply(413, error_body(f"the body must have at most {BODY_BYTES} bytes"))
            return
        try:
            request = parse_request(self.rfile.read(int(length)))
        except DataError as error:
            self._reply(400, error_body(str(error)))
            return
        if session.turns >= MAX_REQUESTS:
            self._reply(429, error_body(f"an episode may send {MAX_REQUESTS} requests; end it"))
            return
        if not self.owner.submit(session, request):
            self._reply(409, error_body("a request of this session is still being answered"))
            return
        request.answered.wait()
        if request.stream and request.status == 200:
            self._reply_events(request)
        else:
            self._reply(request.status, request.answer)

    def _reply_events(self, request: PendingRequest) -> None:
        content = b"".join(
            b"data: " + json.dumps(chunk).encode() + b"\n\n"
            for chunk in chunks_of(request.answer, include_usage=request.include_usage)
        )
        content += b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(content)))
        with suppress(OSError):  # the agent may have been killed
            self.end_headers()
            self.wfile.write(content)


def parse_request(content: bytes) -> PendingRequest:
    """Validate the body of a chat completion.

    Raises:
        DataError: it is not JSON, or has settings that training cannot honor.
    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body must be JSON: {error}") from error
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise DataError(f"messages must be a list of 1 to {MAX_MESSAGES} messages")
    for message in messages:
        content_ok = isinstance(message, dict) and isinstance(
            message.get("content"), str | list | None
        )
        if not content_ok or not isinstance(message.get("role"), str):
            raise DataError("each message must have a role and a text as content")
    stream, options = body.get("stream"), body.get("stream_options") or {}
    if not isinstance(stream, bool | None) or not isinstance(options, dict):
        raise DataError("stream must be true or false, and stream_options an object")
    if body.get("n") not in (None, 1):
        raise DataError("n must be 1")
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise DataError("max_tokens must be a positive integer")
    tools = body.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise DataError("tools must be a list")
    flat = [
        {
            **message,
            "content": "".join(str(part.get("text", "")) for part in message["content"])
            if isinstance(message.get("content"), list)
            else message.get("content") or "",
        }
        for message in messages
    ]
    return PendingRequest(
        messages=flat,
        tools=tools,
        max_tokens=max_tokens,
        stream=bool(stream),
        include_usage=bool(options.get("include_usage")),
    )

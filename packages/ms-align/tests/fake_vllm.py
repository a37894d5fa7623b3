"""Server with vLLM's endpoints and a small model, for tests: `python fake_vllm.py FOLDER`.

It prints its address, generates with the model in FOLDER, and loads other weights as vLLM does. It
ends when its standard input closes. With vLLM's own arguments --model and --port it runs until it
is killed, and writes its process id to the file in FAKE_VLLM_PID if that is set.

POST /fault {"name": NAME, "times": N} makes the next N requests that the fault concerns misbehave;
POST /stepwise {"delay_s": S} makes it sample one token at a time, so that weights may change in the
middle of a response; GET /served returns the number of requests by endpoint.
"""

import base64
import io
import json
import os
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ms_align import LocalGenerator, Responses, Sampling
from ms_align.generation.drawing import sample_tokens
from ms_align.models.folder import load_model
from ms_align.seeds import position_seed

GENERATE = "/inference/v1/generate"
PATHS = {
    "kept_weights": "/collective_rpc",
    "kept_head": "/collective_rpc",
    "no_dev_mode": "/collective_rpc",
    "reload_fails": "/collective_rpc",
    "other_models": "/v1/models",
    "older_version": "/update_weight_version",
}
"""Endpoint of each fault that does not concern generation."""


class Model:
    """The served model and its weight version."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.Lock()
        self.running = threading.Event()
        """Cleared while generation is paused."""
        self.running.set()
        self.delay_s: float | None = None
        """Seconds between two tokens; None generates a response at once."""
        self.tokens = 0
        """Tokens that were sampled one at a time."""
        self.version = "default"
        self.load(folder)

    def load(self, folder: Path, keeps_head: bool = False) -> None:
        """Load weights from a folder; optionally keep the old head."""
        new = load_model(folder)
        if keeps_head:
            old = self.generate.model.module.state_dict()["lm_head.weight"]
            new.load_state_dict({"lm_head.weight": old}, strict=False)
        self.has_experts = getattr(new.config, "mixture", None) is not None
        self.generate = LocalGenerator(new, fused=False, records_experts=self.has_experts)

    @torch.no_grad()
    def score(self, tokens: list[int]) -> list[dict[str, Any] | None]:
        """Log-probabilities of a prompt's tokens, in vLLM's format."""
        model = self.generate.model
        logits = model.project(model.hidden(torch.tensor([tokens]), None, None))
        logprobs = logits[0].float().log_softmax(-1)
        return [
            None,
            *(
                {str(token): {"logprob": float(logprobs[index, token]), "rank": 1}}
                for index, token in enumerate(tokens[1:])
            ),
        ]

    def respond(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a request for responses."""
        params, prompt = body["sampling_params"], body["token_ids"]
        sampling = Sampling(
            max_new_tokens=params["max_tokens"],
            temperature=params["temperature"],
            top_k=params.get("top_k") or None,
            top_p=params.get("top_p", 1.0),
            min_p=params.get("min_p", 0.0),
            stop_token_ids=params.get("stop_token_ids", ()),
        )
        choices = []
        for index in range(params.get("n", 1)):
            seed = params.get("seed", 0) + index
            if self.delay_s is not None:
                tokens, logprobs, versions = self.sample_stepwise(prompt, sampling, seed)
                experts = None
                stopped = tokens[-1] in sampling.stop_token_ids
            else:
                with self.lock:
                    sample = self.generate([prompt], sampling, count=1, seed=seed)
                    versions = [self.version] * int(sample.lengths[0])
                assert sample.sampling_logprobs is not None
                tokens, stopped = sample.row(0), bool(sample.stopped[0])
                logprobs = sample.sampling_logprobs[0, : len(tokens)].tolist()
                experts = self.experts(sample)
            content = [
                {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]
            choices.append(
                {
                    "index": index,
                    "finish_reason": "stop" if stopped else "length",
                    "token_ids": tokens,
                    "weight_versions": spans(versions),
                    "logprobs": {"content": content},
                    "routed_experts": experts,
                }
            )
        scores = self.score(prompt) if params.get("prompt_logprobs") is not None else None
        return {"request_id": "generate-tokens-1", "choices": choices, "prompt_logprobs": scores}

    def experts(self, sample: Responses) -> str | None:
        """Base64 of a .npy file with the experts of all layers, 0 in dense ones, as in vLLM."""
        if not self.has_experts:
            return None
        assert sample.routed_experts is not None
        config: Any = self.generate.model.module.config
        recorded = sample.routed_experts[0].numpy()
        experts = np.zeros((len(recorded), config.num_hidden_layers, recorded.shape[2]), np.uint8)
        experts[:, list(config.mixture.layers)] = recorded
        return experts_file(experts)

    @torch.no_grad()
    def sample_stepwise(
        self, prompt: list[int], sampling: Sampling, seed: int
    ) -> tuple[list[int], list[float], list[str]]:
        """Return tokens, log-probabilities and versions, sampling each token with current weights.

        If the weights do not change, the tokens match `LocalGenerator`.
        """
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[str] = []
        while len(tokens) < sampling.max_new_tokens:
            self.running.wait()
            with self.lock:
                model = self.generate.model
                hidden = model.hidden(torch.tensor([[*prompt, *tokens]]), None, None)
                generator = torch.Generator().manual_seed(position_seed(seed, len(tokens)))
                uniform = torch.rand(1, generator=generator, dtype=torch.float64)
                sampled = sample_tokens(model.project(hidden[:, -1]), sampling, uniform)
                versions.append(self.version)
                self.tokens += 1
            tokens.append(int(sampled.tokens))
            logprobs.append(float(sampled.sampling_logprobs))
            if tokens[-1] in sampling.stop_token_ids:
                break
            time.sleep(self.delay_s or 0.0)
        return tokens, logprobs, versions


def spans(versions: list[str]) -> list[dict[str, Any]]:
    """Return runs of equal versions, in vLLM's format."""
    starts = [i for i, version in enumerate(versions) if versions[i - 1 : i] != [version]]
    ends = [*starts[1:], len(versions)]
    return [
        {"version": versions[start], "start": start, "end": end}
        for start, end in zip(starts, ends, strict=True)
    ]


def experts_file(experts: Any) -> str:
    """Base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


def spoil(fault: str, answer: dict[str, Any], body: dict[str, Any]) -> None:
    """Change a correct answer in place, as a fault says."""
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    stops = body["sampling_params"].get("stop_token_ids") or [0]
    if fault == "foreign_token":
        choice["token_ids"][-1] = content[-1]["token_id"] = 258
    elif fault == "negative_token":
        choice["token_ids"][-1] = content[-1]["token_id"] = -1
    elif fault == "no_logprobs":
        choice["logprobs"] = None
    elif fault == "few_logprobs":
        content.pop()
    elif fault == "null_logprob":
        content[0]["logprob"] = None
    elif fault == "nan_logprob":
        content[0]["logprob"] = float("nan")
    elif fault == "infinite_logprob":
        content[0]["logprob"] = float("-inf")
    elif fault == "positive_logprob":
        content[0]["logprob"] = 0.5
    elif fault == "other_token_logprob":
        content[0]["token_id"] += 1
    elif fault == "raw_logprobs":
        for entry in content:
            entry["logprob"] -= 1.0
    elif fault == "many_tokens":
        choice["token_ids"] *= 2
        content *= 2
    elif fault == "no_tokens":
        choice["token_ids"], choice["logprobs"]["content"] = [], []
    elif fault == "few_tokens":
        choice["token_ids"].pop()
        content.pop()
        choice["finish_reason"] = "length"
    elif fault == "no_stop":
        choice["finish_reason"] = "stop"
    elif fault == "beyond_stop":
        choice["token_ids"][0] = content[0]["token_id"] = stops[0]
        choice["finish_reason"] = "length"
    elif fault == "aborted":
        choice["finish_reason"] = "abort"
    elif fault == "few_responses":
        answer["choices"].pop()
    elif fault == "other_version":
        choice["weight_versions"][0]["version"] = "99"
    elif fault == "no_versions":
        choice["weight_versions"] = None
    elif fault == "gap_in_versions":
        choice["weight_versions"][0]["start"] = 1
    elif fault == "no_experts":
        choice["routed_experts"] = None
    elif fault == "malformed_experts":
        choice["routed_experts"] = choice["routed_experts"][:40]
    elif fault == "few_experts":
        choice["routed_experts"] = experts_file(np.zeros((1, 3, 2), np.uint8))
    elif fault == "foreign_expert":
        tokens = len(body["token_ids"]) + len(choice["token_ids"])
        choice["routed_experts"] = experts_file(np.full((tokens - 1, 3, 2), 99))
    elif fault == "other_shape":
        answer["choices"] = 3


class Handler(BaseHTTPRequestHandler):
    """Answers vLLM's endpoints."""

    model: Model
    fault = ""
    times = 0
    served: Counter[str]

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer GET."""
        self.handle_request({})

    def do_POST(self) -> None:
        """Answer POST."""
        length = int(self.headers.get("Content-Length", 0))
        self.handle_request(json.loads(self.rfile.read(length) or b"{}"))

    def handle_request(self, body: dict[str, Any]) -> None:
        """Answer one request, or misbehave."""
        self.served[self.path] += 1
        if self.path == "/fault":
            cls = type(self)
            cls.fault, cls.times = body["name"], body.get("times", 10**9)
            return self.answer({})
        if self.path == "/served":
            return self.answer({**self.served, "tokens": self.model.tokens})
        if self.path == "/stepwise":
            self.model.delay_s = body["delay_s"]
            return self.answer({})
        fault = self.take_fault()
        if self.misbehaves(fault):
            return None
        if self.path == "/v1/models":
            names = ["policy", "other"] if fault == "other_models" else ["policy"]
            return self.answer({"data": [{"id": n, "max_model_len": 128} for n in names]})
        if self.path == "/health":
            return self.answer(None)
        if self.path == "/weight_info":
            return self.answer({"weight_version": self.model.version})
        if self.path == GENERATE:
            answer = self.model.respond(body)
            spoil(fault, answer, body)
            return self.answer(answer)
        if self.path == "/collective_rpc":
            if fault == "no_dev_mode":
                return self.answer({"detail": "Not Found"}, 404)
            if fault == "reload_fails":
                return self.error(500, "Call to collective_rpc method failed")
            if fault != "kept_weights":
                with self.model.lock:
                    self.model.load(Path(body["kwargs"]["weights_path"]), fault == "kept_head")
            return self.answer({"results": [None]})
        if self.path == "/update_weight_version":
            self.model.version = "older" if fault == "older_version" else body["new_version"]
            return self.answer({"success": True})
        if self.path in ("/pause?mode=keep", "/resume"):
            self.model.running.set() if self.path == "/resume" else self.model.running.clear()
            return self.answer({"status": "paused"})
        if self.path == "/reset_prefix_cache":
            return self.answer({"success": True})
        return self.answer({"detail": "Not Found"}, 404)

    def take_fault(self) -> str:
        """Return the fault of this request, if any."""
        cls = type(self)
        if cls.times < 1 or PATHS.get(cls.fault, GENERATE) != self.path:
            return ""
        cls.times -= 1
        return cls.fault

    def misbehaves(self, fault: str) -> bool:
        """Send a bad answer, for faults that do not change its JSON."""
        if fault == "malformed":
            self.send(200, b'{"choices": [')
        elif fault == "html":
            self.send(200, b"<html>welcome</html>")
        elif fault == "empty":
            self.send(200, b"")
        elif fault == "latin":
            self.send(200, b'{"choices": "\xff"}')
        elif fault == "closed":
            self.close_connection = True
        elif fault == "closed_in_answer":
            self.send(200, b'{"choices": [', length=1000)
            self.close_connection = True
        elif fault == "not_http":
            self.wfile.write(b"SSH-2.0-OpenSSH\r\n")
            self.close_connection = True
        elif fault == "slow":
            time.sleep(3)
            self.close_connection = True
        elif fault == "dripping":
            self.send(200, b"", length=10**6)
            with suppress(OSError):
                for _ in range(30):
                    self.wfile.write(b" ")
                    time.sleep(0.1)
            self.close_connection = True
        elif fault == "endless":
            self.send(200, b" " * (1 << 20), length=1 << 20)
        elif fault == "redirect":
            self.send(307, b"", {"Location": "http://127.0.0.1:9/"})
        elif fault == "unauthorized":
            self.error(401, "Unauthorized")
        elif fault == "not_found":
            self.answer({"detail": "Not Found"}, 404)
        elif fault == "failed":
            self.error(500, f"failed for {self.headers.get('Authorization', 'nobody')}")
        elif fault == "overloaded":
            self.error(503, "overloaded")
        elif fault == "too_many":
            self.error(429, "too many requests")
        elif fault == "rejected":
            self.error(400, "max_tokens is wrong")
        else:
            return False
        return True

    def answer(self, value: Any, status: int = 200) -> None:
        """Send JSON."""
        self.send(status, json.dumps(value).encode())

    def error(self, status: int, message: str) -> None:
        """Send an error as vLLM does."""
        self.answer({"error": {"message": message, "code": status}}, status)

    def send(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str] | None = None,
        length: int | None = None,
    ) -> None:
        """Send a response; `length` is a false Content-Length."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        with suppress(OSError):  # the client has closed the connection
            self.wfile.write(content)


def main() -> None:
    """Serve until standard input closes."""
    torch.set_num_threads(1)
    options = dict(pairwise(sys.argv))
    folder, port = options.get("--model", sys.argv[1]), int(options.get("--port", 0))
    Handler.model, Handler.served = Model(Path(folder)), Counter()
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    if port:
        if pid_file := os.environ.get("FAKE_VLLM_PID"):
            Path(pid_file).write_text(str(os.getpid()))
        server.serve_forever()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()

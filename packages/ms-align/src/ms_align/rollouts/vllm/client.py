"""Generation with one or several vLLM servers, without a policy in this process."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from ms_align.errors import DataError, ServerError
from ms_align.generation.responses import Responses, Span, TimedResponses
from ms_align.generation.routing import FREE, RoutedLayers
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode, first_stop
from ms_align.rollouts.vllm.connection import Connection, ConnectionLostError
from ms_align.rollouts.vllm.local_server import LocalServer
from ms_align.rollouts.vllm.options import VllmOptions
from ms_align.rollouts.vllm.server import SampledResponse, Server

T = TypeVar("T")
MAX_WAIT_S = 60.0
"""Longest wait between two attempts."""


@frozen(kw_only=True)
class _Answer:
    """Responses to one prompt, and the request that succeeded."""

    server: int
    """Index of the server."""
    responses: list[SampledResponse]
    began_s: float
    ended_s: float


class VllmClient:
    """Generates responses with vLLM servers.

    Prompts are spread evenly over the servers. If a connection fails, the prompt is sent again, to
    the next server if there are several; its seed makes the repeated request identical.

    Args:
        options: addresses, or the Python to start a server with, and limits.
        vocabulary: vocabulary size of the policy; None skips the check of token ids.
        max_num_seqs: responses generated at the same time, over all servers.
        log_path: file for the output of a server that is started here.
        decode: converts tokens to text; needed for stop strings only.
        routed_layers: layers whose experts the servers return; None without router replay.
    """

    def __init__(
        self,
        options: VllmOptions,
        *,
        vocabulary: int | None,
        max_num_seqs: int,
        log_path: Path,
        decode: Decode | None = None,
        routed_layers: RoutedLayers | None = None,
    ) -> None:
        self.options = options
        self.vocabulary = vocabulary
        self.max_num_seqs = max_num_seqs
        self.decode = decode
        self.routed_layers = routed_layers
        self._closing = threading.Event()
        self.servers: list[Server] = [
            Server(
                Connection(url, key_variable=options.api_key_env, timeout_s=options.timeout_s),
                name=options.model,
                vocabulary=vocabulary,
                max_restarts=options.restarts,
                start_timeout_s=options.start_timeout_s,
            )
            for url in options.addresses
        ]
        if options.python is not None:
            self.servers = [LocalServer(options, vocabulary=vocabulary, log_path=log_path)]
        for server in self.servers:
            server.in_flight = options.in_flight_weight_updates
            server.routed_layers = routed_layers

    def open(self, model_folder: Path | None = None) -> None:
        """Connect to the servers, or start one with the model in a folder.

        Raises:
            ConfigError: a server does not offer the model.
            ServerError: a server does not answer or start.
        """
        for server in self.servers:
            if not isinstance(server, LocalServer):
                self._with_retries(lambda server: server.open(), [server])
            elif model_folder is not None:
                server.start(model_folder)

    def load_weights(self, folder: Path, version: int) -> None:
        """Load weights from a folder into every server.

        Raises:
            ServerError: a server cannot load them.
        """
        for server in self.servers:
            self._with_retries(lambda server: server.load_weights(folder, version), [server])

    def score(self, tokens: Sequence[int]) -> dict[str, list[float]]:
        """Return the log-probability of each token after the first, by server.

        Raises:
            ServerError: a server failed, or gave an unusable answer.
        """
        return {
            str(server): self._with_retries(lambda server: server.score(tokens), [server])
            for server in self.servers
        }

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int = 1, seed: int = 0
    ) -> Responses:
        """Generate `count` responses per prompt; see `timed`."""
        return self.timed(prompts, sampling, count=count, seed=seed).responses

    def timed(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> TimedResponses:
        """Generate `count` responses per prompt; responses to a prompt are adjacent.

        `logprobs` is None, and `sampling_logprobs` come from the servers. The spans are the times
        of each server, from its first request to its last response.

        Raises:
            DataError: a prompt is empty, too long or has a token outside the vocabulary.
            ServerError: a server failed `retries` + 1 times, or gave an unusable answer.
        """
        began_s = monotonic()
        self._check(prompts, sampling)
        workers = max(1, min(self.max_num_seqs // count, len(prompts)))
        with ThreadPoolExecutor(workers, thread_name_prefix="vllm") as pool:
            futures = [
                pool.submit(self._respond, index, prompt, sampling, count, seed)
                for index, prompt in enumerate(prompts)
            ]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failure = next((f.exception() for f in futures if f in done and f.exception()), None)
            if failure is not None:
                # The others are aborted, so that the run ends now and not after their time limit.
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()
                raise failure
        answers = [future.result() for future in futures]
        responses = self._responses([r for answer in answers for r in answer.responses], sampling)
        if self.routed_layers is not None:
            lengths = torch.tensor([len(prompt) for prompt in prompts for _ in range(count)])
            rows = [r.experts for answer in answers for r in answer.responses]
            positions = int(lengths.max()) + sampling.max_new_tokens - 1
            experts = _padded_experts(rows, lengths + responses.lengths - 1, positions)
            responses = evolve(responses, routed_experts=experts)
        spans = []
        for number in sorted({answer.server for answer in answers}):
            times = [(a.began_s, a.ended_s) for a in answers if a.server == number]
            spans.append(
                Span(
                    kind="generate",
                    began_s=min(began for began, _ in times),
                    ended_s=max(ended for _, ended in times),
                    generator=number,
                )
            )
        return TimedResponses(
            responses=responses, began_s=began_s, ended_s=monotonic(), spans=spans
        )

    def close(self) -> None:
        """Abort the requests in progress and stop a server that was started here."""
        self._closing.set()
        for server in self.servers:
            server.close()

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Check prompts here, as a bad one ends the engine of vLLM 0.32."""
        if not prompts:
            raise DataError("prompts are empty; pass at least one prompt")
        contexts = [server.context for server in self.servers if server.context is not None]
        context = min(contexts, default=None)
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise DataError(f"prompt {index} is empty; every prompt needs at least one token")
            if context is not None and len(prompt) + sampling.max_new_tokens > context:
                raise DataError(
                    f"prompt {index} has {len(prompt)} tokens, which with max_new_tokens = "
                    f"{sampling.max_new_tokens} exceeds the server's context of {context}; shorten "
                    "it, lower max_new_tokens, or start the server with a larger --max-model-len"
                )
            limit = self.vocabulary
            if min(prompt) < 0 or (limit is not None and max(prompt) >= limit):
                raise DataError(
                    f"prompt {index} has a token outside the vocabulary of {limit}; use the "
                    "model's tokenizer"
                )

    def _respond(
        self, index: int, prompt: Sequence[int], sampling: Sampling, count: int, seed: int
    ) -> "_Answer":
        first = index % len(self.servers)

        def request(server: Server) -> _Answer:
            began_s = monotonic()
            request_seed = _request_seed(seed, index)
            responses = server.generate(prompt, sampling, count=count, seed=request_seed)
            return _Answer(
                server=self.servers.index(server),
                responses=responses,
                began_s=began_s,
                ended_s=monotonic(),
            )

        return self._with_retries(request, [*self.servers[first:], *self.servers[:first]])

    def _with_retries(self, request: Callable[[Server], T], servers: Sequence[Server]) -> T:
        """Send a request; if the connection fails, retry on the next server."""
        attempts = self.options.retries + 1
        for attempt in range(attempts):
            server = servers[attempt % len(servers)]
            try:
                if attempt:
                    server.recover()
                return request(server)
            except ConnectionLostError as error:
                delay_s = min(self.options.retry_wait_s * 2**attempt, MAX_WAIT_S)
                # The wait ends at once when the client is closed.
                if attempt + 1 == attempts or self._closing.wait(delay_s):
                    raise ServerError(f"{error} (attempts: {attempt + 1})") from error
        raise AssertionError("unreachable")

    def _responses(self, sampled: list[SampledResponse], sampling: Sampling) -> Responses:
        """Build padded tensors; cut responses after their first stop string."""
        longest = sampling.max_new_tokens
        tokens = torch.zeros(len(sampled), longest, dtype=torch.int64)
        logprobs = torch.zeros(len(sampled), longest)
        versions = torch.zeros(len(sampled), longest, dtype=torch.int64)
        lengths, stopped = [], []
        for row, response in enumerate(sampled):
            end = first_stop(response.tokens, sampling, self.decode)
            length = len(response.tokens) if end is None else end
            tokens[row, :length] = torch.tensor(response.tokens[:length])
            logprobs[row, :length] = torch.tensor(response.logprobs[:length])
            if response.versions:
                versions[row] = response.versions[-1]  # padding repeats the last one
                versions[row, :length] = torch.tensor(response.versions[:length])
            lengths.append(length)
            stopped.append(end is not None)
        return Responses(
            tokens=tokens,
            lengths=torch.tensor(lengths),
            logprobs=None,
            sampling_logprobs=logprobs,
            stopped=torch.tensor(stopped),
            versions=versions if sampled[0].versions else None,
        )


def _padded_experts(rows: Sequence[Tensor | None], lengths: Tensor, positions: int) -> Tensor:
    """Pad the experts of rows, (S, L, k) each, to `positions` after their `lengths` (N,)."""
    first = rows[0]
    assert first is not None  # every answer was checked
    padded = torch.full((len(rows), positions, *first.shape[1:]), FREE, dtype=torch.int16)
    for target, row, length in zip(padded, rows, lengths.tolist(), strict=True):
        assert row is not None
        target[:length] = row[:length]  # a stop string may cut a response
    return padded


def _request_seed(seed: int, index: int) -> int:
    """Return the seed of the first response to a prompt; below 2^62, and vLLM adds up to `n`."""
    digest = sha256(f"vllm {seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2

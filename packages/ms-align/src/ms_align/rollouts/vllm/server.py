"""Requests to a vLLM server: sampling, scoring and new weights.

Every answer is checked before it is used, as a response with a foreign token or a wrong
log-probability would be trained on without any other sign.
"""

import base64
import io
import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from ms_align.errors import ConfigError, ServerError
from ms_align.generation.routing import RoutedLayers
from ms_align.generation.sampling import Sampling
from ms_align.rollouts.vllm.connection import Connection, ConnectionLostError

logger = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
ANSWER_BYTES = 1 << 16
"""Bytes of an answer besides its tokens."""
TOKEN_BYTES = 1 << 10
"""Upper bound of the bytes per token in an answer; vLLM 0.32 needs about 200."""
EXPERT_BYTES = 16
"""Upper bound of the bytes per expert of a token; base64 of int64 needs 11."""
MAX_LOGPROB = 1e-3
"""Largest log-probability that rounding explains."""
INITIAL_VERSION = "default"
"""Weight version of a server before the first weight update."""
POLL_S = 0.25
"""Wait between two checks whether a server is back."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _TokenLogprob(msgspec.Struct):
    logprob: float
    token_id: int | None = None


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_VersionSpan] | None = None
    routed_experts: str | None = None
    """Base64 of a .npy file with (tokens of prompt and response - 1, layers, k) integers."""


class _CacheReset(msgspec.Struct):
    success: bool


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _Generated(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _TokenLogprob] | None] | None = None


@frozen(kw_only=True)
class SampledResponse:
    """One response of a server."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token under the distribution that it was sampled from."""
    stopped: bool
    """Ended by a stop token rather than at the maximum length."""
    versions: list[int]
    """Version of the weights that sampled each token; empty if the server was not updated."""
    experts: Tensor | None = None
    """(S, L, k) int16, experts of all tokens but the last; None if they are not needed."""


class Server:
    """A running server. Its requests may be sent from several threads.

    Args:
        connection: connection to the server.
        name: name of the model; None for the only one that the server offers.
        vocabulary: vocabulary size of the policy; None skips the check of token ids.
        max_restarts: number of times that the run waits for a failed server to be back.
        start_timeout_s: time limit of each wait.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        name: str | None,
        vocabulary: int | None,
        max_restarts: int = 0,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.connection = connection
        self.name = name
        self.vocabulary = vocabulary
        self.max_restarts = max_restarts
        self.start_timeout_s = start_timeout_s
        self.restarts = 0
        """Restarts so far."""
        self.model_folder: Path | None = None
        """Folder of the newest weights."""
        self._lock = threading.Lock()
        self._closed = False
        self.context: int | None = None
        """Maximum tokens of prompt and response; None before `open`."""
        self.version: int | None = None
        """Version of the loaded weights; None for the weights that the server started with."""
        self.newest: int | None = None
        """Version of the weights that are loaded or being loaded."""
        self.in_flight = False
        """True if weights may change in the middle of a response."""
        self.routed_layers: RoutedLayers | None = None
        """Layers whose experts every answer must contain."""

    def __str__(self) -> str:
        return self.connection.url

    def open(self) -> None:
        """Choose the model and read its context length.

        Raises:
            ConfigError: the server does not offer the model.
            ServerError: it does not answer.
        """
        models = self.connection.get("/v1/models", _Models).data
        names = [model.id for model in models]
        if self.name is None and len(models) != 1:
            raise ConfigError(f"{self} offers the models {names}; choose one with vllm.model")
        served = next((model for model in models if self.name in (None, model.id)), None)
        if served is None:
            raise ConfigError(
                f"{self} must offer the model {self.name!r} but offers {names}; correct vllm.model "
                "or start a server with it"
            )
        self.name, self.context = served.id, served.max_model_len

    def recover(self) -> None:
        """Wait until a failed server is back, and load the newest weights if it was restarted.

        Without restarts left for a server that does not answer, the next attempt decides.

        Raises:
            ServerError: the server is not back within the time limit, or cannot load the weights.
        """
        with self._lock:  # several requests fail at once, and one wait is enough
            if not self.max_restarts or self.context is None:
                return
            if not self._is_healthy():
                self._count_restart("its requests failed")
                self._wait_until_back()
            elif self._has_newest_weights():
                return
            else:
                self._count_restart("it was restarted and has other weights")
            if self.version is not None and self.model_folder is not None:
                self.load_weights(self.model_folder, self.version)

    def close(self) -> None:
        """Abort the requests in progress."""
        self._closed = True
        self.connection.close()

    def _count_restart(self, reason: str) -> None:
        """Count a restart.

        Raises:
            ServerError: no restart is left.
        """
        if self.restarts >= self.max_restarts:
            raise ServerError(
                f"{self} may be restarted vllm.max_restarts = {self.max_restarts} times and failed "
                f"once more ({reason}); see the server's log, or raise vllm.max_restarts"
            )
        self.restarts += 1
        logger.warning(
            "the vLLM server %s failed (%s); restart %d of %d",
            self,
            reason,
            self.restarts,
            self.max_restarts,
        )

    def _wait_until_back(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while True:
            with suppress(ConnectionLostError):
                self.open()
                return
            if self._closed or time.monotonic() > deadline:
                raise ServerError(
                    f"{self} must be back within {self.start_timeout_s:g} s and is not; restart "
                    "it, or raise vllm.start_timeout_s"
                )
            time.sleep(POLL_S)

    def _is_healthy(self) -> bool:
        try:
            self.connection.get("/health", type(None))
        except ServerError:
            return False
        return True

    def _has_newest_weights(self) -> bool:
        """Tell whether the server has the version that was loaded last."""
        if self.version is None:
            return True
        try:
            return self.connection.get("/weight_info", _WeightInfo).weight_version in (
                str(self.version),
                str(self.newest),
            )
        except ServerError:
            return False

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, count: int, seed: int
    ) -> list[SampledResponse]:
        """Sample responses to a prompt; response j has the seed `seed + j`.

        Raises:
            ConnectionLostError: the request failed and may be repeated.
            ServerError: the answer is not usable.
        """
        # vLLM samples one response at temperature 0, as all would be equal.
        samples = count if sampling.temperature else 1
        params = {
            # Everything is explicit, as a server may have other defaults.
            "n": samples,
            "seed": seed,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # only stop_token_ids end a response
            "logprobs": 0,  # of the sampled tokens only
            "detokenize": False,
        }
        tokens = count * sampling.max_new_tokens + len(prompt)
        limit = ANSWER_BYTES + TOKEN_BYTES * tokens
        if (routed := self.routed_layers) is not None:
            tokens += (count - 1) * len(prompt)  # every response has the experts of its prompt
            limit += tokens * EXPERT_BYTES * routed.depth * routed.experts_per_token
        oldest = self.version
        answer = self._generate(prompt, params, limit)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(samples)):
            raise self._unusable(f"must have {samples} responses but has {len(choices)}")
        responses = [self._checked(choice, sampling, oldest, len(prompt)) for choice in choices]
        return responses * (count // samples)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after the first, at temperature 1.

        Raises:
            ServerError: the answer is not usable, or none came.
        """
        # prompt_logprobs = 0 returns only the prompt's own tokens, and no alternatives. A request
        # must generate at least one token, which is ignored.
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        limit = ANSWER_BYTES + TOKEN_BYTES * len(tokens)
        columns = self._generate(tokens, params, limit).prompt_logprobs or []
        if len(columns) != len(tokens):
            raise self._unusable(
                f"must have {len(tokens)} prompt log-probabilities but has {len(columns)}"
            )
        # The first token has no context, so it has no log-probability.
        scores = []
        for token, column in zip(tokens[1:], columns[1:], strict=True):
            entry = (column or {}).get(str(token))
            if entry is None:
                raise self._unusable(f"lacks the log-probability of the prompt token {token}")
            scores.append(entry.logprob)
        return scores

    def load_weights(self, folder: Path, version: int) -> None:
        """Load weights from a folder, drop the cache of the old ones and stamp the version.

        With `in_flight`, responses in progress are paused and continue with the new weights.

        Raises:
            ServerError: the server cannot load them.
        """
        # The prefix cache has keys and values of the old weights, so it must be dropped too.
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        steps: list[tuple[str, dict[str, Any]]] = [
            ("/collective_rpc", load),
            ("/reset_prefix_cache", {}),
            ("/update_weight_version", {"new_version": str(version)}),
        ]
        if self.in_flight:
            steps = [("/pause?mode=keep", {}), *steps, ("/resume", {})]
        # Set first: tokens may have the new version before this method returns.
        self.newest = version
        for path, body in steps:
            try:
                if path != "/reset_prefix_cache":
                    self.connection.post(path, body, Any)
                elif not self.connection.post(path, body, _CacheReset).success:
                    # vLLM keeps the cache while a request of another client uses it.
                    raise ConnectionLostError(
                        f"{self}{path} must drop the cache of the old weights and did not; make "
                        "sure that no other run uses this server"
                    )
            except ConnectionLostError as error:
                raise type(error)(
                    f"{error}; new weights are in {folder}, which the server must be able to read "
                    "(vllm.weights_dir)"
                ) from error
            except ServerError as error:
                raise ServerError(
                    f"{error}; weight updates need a server that was started with "
                    "VLLM_SERVER_DEV_MODE=1"
                ) from error
        self.version, self.model_folder = version, folder

    def _generate(self, prompt: Sequence[int], params: dict[str, Any], limit: int) -> _Generated:
        body = {"model": self.name, "token_ids": list(prompt), "sampling_params": params}
        try:
            return self.connection.post(GENERATE, body, _Generated, limit_bytes=limit)
        except ConnectionLostError:
            raise
        except ServerError as error:
            if "HTTP 404" in str(error) or "HTTP 403" in str(error):
                raise ServerError(
                    f"{error}; responses need a server that was started with --enable-scale-out"
                ) from error
            raise

    def _checked(
        self, choice: _Choice, sampling: Sampling, oldest: int | None, prompt_length: int
    ) -> SampledResponse:
        """Check one response to a request sent at weight version `oldest`."""
        tokens = choice.token_ids
        if choice.finish_reason not in ("stop", "length"):
            # For example "abort", while the server is paused or shut down.
            raise ConnectionLostError(
                f"{self}{GENERATE} ended a response with {choice.finish_reason!r}; see the "
                "server's log"
            )
        if not 1 <= len(tokens) <= sampling.max_new_tokens:
            raise self._unusable(
                f"must have 1 to {sampling.max_new_tokens} tokens but has {len(tokens)}"
            )
        # A server with another model, or a padded vocabulary, may return larger ids.
        limit = self.vocabulary or math.inf
        foreign = next((token for token in tokens if not 0 <= token < limit), None)
        if foreign is not None:
            raise self._unusable(
                f"has the token {foreign} and the policy's vocabulary is {self.vocabulary}",
                remedy="start the server with the policy's model",
            )
        # A stop token must be the last token. It may coincide with the length limit.
        stops = [index for index, token in enumerate(tokens) if token in sampling.stop_token_ids]
        stopped = choice.finish_reason == "stop"
        if stopped and stops != [len(tokens) - 1]:
            raise self._unusable("must stop at the first of stop_token_ids and does not")
        if not stopped and stops[:1] not in ([], [len(tokens) - 1]):
            raise self._unusable("must end at its first stop token, but continues after it")
        if not stopped and not stops and len(tokens) < sampling.max_new_tokens:
            raise self._unusable(
                f"must have {sampling.max_new_tokens} tokens unless it stops but has {len(tokens)}"
            )
        return SampledResponse(
            tokens=tokens,
            logprobs=self._logprobs(choice),
            stopped=stopped or bool(stops),
            versions=[] if oldest is None else self._versions(choice, oldest),
            experts=self._experts(choice, prompt_length + len(tokens) - 1),
        )

    def _experts(self, choice: _Choice, positions: int) -> Tensor | None:
        """Return the experts of a response's tokens, (S, L, k) int16."""
        routed = self.routed_layers
        if routed is None:
            return None
        if choice.routed_experts is None:
            raise self._unusable(
                "must have the experts of each token but has none",
                remedy="start the server with --enable-return-routed-experts",
            )
        try:
            content = base64.b64decode(choice.routed_experts, validate=True)
            experts = np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise self._unusable(f"has experts that are not a .npy file ({error})") from error
        layers = experts.shape[1] if experts.ndim == 3 else 0
        expected = positions, layers, routed.experts_per_token
        if experts.shape != expected or layers not in (routed.depth, len(routed.layers)):
            raise self._unusable(
                f"must have the experts of {positions} tokens, {len(routed.layers)} layers and "
                f"{routed.experts_per_token} experts per token but has {experts.shape}",
                remedy="start the server with the policy's model",
            )
        # Servers may also return rows for layers without experts.
        if layers == routed.depth:
            experts = experts[:, list(routed.layers)]
        if experts.dtype.kind not in "iu" or experts.min() < 0 or experts.max() >= routed.experts:
            raise self._unusable(
                f"must have experts below {routed.experts} but has others",
                remedy="start the server with the policy's model",
            )
        return torch.from_numpy(experts.astype(np.int16))

    def _logprobs(self, choice: _Choice) -> list[float]:
        # One entry per token, which names its token in newer versions of vLLM.
        entries = (choice.logprobs.content if choice.logprobs else None) or []
        if len(entries) != len(choice.token_ids):
            raise self._unusable(
                f"must have {len(choice.token_ids)} log-probabilities but has {len(entries)}"
            )
        for token, entry in zip(choice.token_ids, entries, strict=True):
            if entry.token_id not in (None, token):
                raise self._unusable(
                    f"has the log-probability of token {entry.token_id} at token {token}"
                )
            if not -math.inf < entry.logprob <= MAX_LOGPROB:
                raise self._unusable(
                    f"must have finite log-probabilities of at most 0 but has {entry.logprob}"
                )
        return [entry.logprob for entry in entries]

    def _versions(self, choice: _Choice, oldest: int) -> list[int]:
        """Return the weight version of each token, increasing from `oldest` to the newest."""
        spans = choice.weight_versions or []
        # The spans must cover all tokens without a gap.
        ends = [0, *(span.end for span in spans)]
        starts = [*(span.start for span in spans), len(choice.token_ids)]
        if starts != ends:
            raise self._unusable(
                "must have the weight version of each token, but lacks some",
                remedy="use vLLM 0.32 or newer",
            )
        # A response may start before an update and end after it, but versions never decrease.
        newest = max(oldest, self.newest or 0)
        allowed = [str(version) for version in range(oldest, newest + 1)]
        expected = allowed[0] if oldest == newest else f"{oldest} to {newest}"
        versions: list[int] = []
        for span in spans:
            if span.version == INITIAL_VERSION and self.max_restarts:
                raise ConnectionLostError(
                    f"{self} must have weights of version {expected} and has those that it started "
                    "with; raise vllm.max_restarts if it was restarted"
                )
            if span.version not in allowed or (versions and int(span.version) < versions[-1]):
                raise self._unusable(
                    f"must be sampled with weights of version {expected} but has version "
                    f"{span.version}",
                    remedy="make sure that no other run updates this server",
                )
            versions += [int(span.version)] * (span.end - span.start)
        return versions

    def _unusable(
        self, problem: str, *, remedy: str = "check the server's version and model"
    ) -> ServerError:
        return ServerError(f"{self}{GENERATE}: the answer {problem}; {remedy}")

"""Rollouts by vLLM servers, which get the policy's weights before they generate.

The first process communicates with the servers and broadcasts the responses. Prompts are numbered
over all data ranks, so the same seed gives the same requests under every layout. If generation may
run ahead, a thread of the first process loads weights and generates, in the order in which both
were started; collective operations stay in the main thread.
"""

import shutil
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from ms_align import processes
from ms_align.engines.protocol import Engine
from ms_align.errors import ServerError
from ms_align.files.durable import writing
from ms_align.generation.responses import Responses, Span, TimedResponses
from ms_align.generation.routing import RoutedLayers
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode
from ms_align.rollouts.rows import logprobs_of
from ms_align.rollouts.vllm.client import VllmClient
from ms_align.rollouts.vllm.options import VllmOptions
from ms_align.rollouts.vllm.weights import untie_head

PROBE_TOKENS = 33
"""Length of the sequence that servers and policy score after each weight update."""


class VllmRollouts:
    """Rollouts by vLLM servers.

    Args:
        policy: engine of the policy.
        client: connection to the servers; used by the first process only.
        weights_dir: folder for new weights, which the servers read.
        max_staleness: updates by which generation may run ahead of training.
        in_flight: load new weights in the middle of responses.
        routed_layers: layers whose experts the servers return; None without router replay.
    """

    def __init__(
        self,
        policy: Engine,
        client: VllmClient,
        *,
        weights_dir: Path,
        max_staleness: int = 0,
        in_flight: bool = False,
        routed_layers: RoutedLayers | None = None,
    ) -> None:
        self.policy = policy
        self.client = client
        self.weights_dir = weights_dir
        self.routed_layers = routed_layers
        self.runs_ahead = max_staleness > 0
        self.version: int | None = None
        """Version of the weights that the next responses start with."""
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="vllm-weights")
        # Without in_flight, one thread does both: weights are loaded between two rollouts.
        self._generating = self._loading
        if in_flight:
            self._generating = ThreadPoolExecutor(max_staleness + 1, "vllm-rollouts")
        self._loaded: Future[None] = Future()
        """Done once the servers have the weights of `version`."""
        self._load_spans: deque[Span] = deque()
        """Weight updates in the background that are not reported yet."""
        self._weights: Path | None = None
        self._probe_logprobs: Tensor | None = None
        self._rounding: dict[str, float] = {}
        """Smallest distance so far between each server's and the policy's log-probabilities."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Responses:
        """Generate `count` responses per prompt of this data rank. Collective.

        Raises:
            DataError: a prompt does not fit the servers' context or vocabulary.
            ServerError: a server failed, or gave an unusable answer.
        """
        return self.start(prompts, sampling, count=count, seed=seed)().responses

    def start(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Callable[[], TimedResponses]:
        """Start `generate` with the newest weights; the result waits for it. Collective.

        The result raises the errors of `generate` and of loading the weights.
        """
        assert self.version is not None  # update_weights comes first
        all_prompts = _gather_prompts(self.policy, prompts)
        rows, width = len(all_prompts) * count, sampling.max_new_tokens
        loaded = self._loaded

        def sample() -> TimedResponses:
            loaded.result()
            return self.client.timed(all_prompts, sampling, count=count, seed=seed)

        future = self._generating.submit(sample) if processes.rank() == 0 else None
        # Buffers of the broadcast, with the rows of all data ranks; T is max_new_tokens.
        columns = {
            "tokens": torch.zeros(rows, width, dtype=torch.int64),
            "sampling_logprobs": torch.zeros(rows, width),
            "versions": torch.zeros(rows, width, dtype=torch.int64),
            "lengths": torch.zeros(rows, dtype=torch.int64),
            "stopped": torch.zeros(rows, dtype=torch.int64),
        }
        if (routed := self.routed_layers) is not None:
            positions = max(len(prompt) for prompt in all_prompts) + width - 1
            shape = rows, positions, len(routed.layers), routed.experts_per_token
            columns["routed_experts"] = torch.zeros(shape, dtype=torch.int16)
        times_s = torch.zeros(2, dtype=torch.float64)  # began, ended
        spans: list[Span] = []  # on the first process, which logs them

        def wait() -> TimedResponses:
            def copy_result() -> None:
                assert future is not None
                timed = future.result()
                spans.extend(timed.spans)
                while self._load_spans:
                    spans.append(self._load_spans.popleft())
                for name, column in columns.items():
                    column.copy_(timed.responses.columns[name])
                times_s.copy_(torch.tensor([timed.began_s, timed.ended_s]))

            _on_first_process(copy_result)
            # Every rank receives all rows and selects its own.
            local = processes.rows_of_rank(rows, self.policy.data_rank, self.policy.data_ranks)
            received = {name: processes.broadcast(c)[local] for name, c in columns.items()}
            received["stopped"] = received["stopped"].bool()
            began_s, ended_s = processes.broadcast(times_s).tolist()
            return TimedResponses(
                responses=Responses.of(received), began_s=began_s, ended_s=ended_s, spans=spans
            )

        return wait

    def update_weights(self, version: int) -> None:
        """Save the policy's weights and load them into all servers. Collective.

        Servers and policy then score a fixed sequence, which detects an update that a server
        reports as done but skipped or applied only in part. If generation runs ahead of training,
        the weights are loaded in the background.

        Raises:
            WriteError: the weights cannot be saved.
            ServerError: a server failed, or kept the old weights.
        """
        if version == self.version:
            return
        folder = self.weights_dir / f"version-{version}"
        if processes.rank() == 0:
            with writing(self.weights_dir):
                shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
                self.weights_dir.mkdir(parents=True, exist_ok=True)
        processes.barrier()
        self.policy.save(folder)
        probe, logprobs = self._score_probe()
        previous, self.version = self.version, version
        if processes.rank() == 0:
            self._loaded = self._loading.submit(
                self._load, folder, probe, logprobs, previous, version
            )
        if not self.runs_ahead:
            _on_first_process(lambda: self._loaded.result())

    def _load(
        self,
        folder: Path,
        probe: list[int],
        logprobs: Tensor | None,
        previous: int | None,
        version: int,
    ) -> None:
        """Load a folder's weights into all servers, and delete the previous folder."""
        began_s = monotonic()
        if previous is None:
            self.client.open()
        untie_head(folder)
        self.client.load_weights(folder, version)
        self._check_weights(probe, logprobs, previous, version)
        if self._weights is not None:
            shutil.rmtree(self._weights, ignore_errors=True)
        self._weights, self._probe_logprobs = folder, logprobs
        if self.runs_ahead:
            self._load_spans.append(
                Span(kind="update_weights", began_s=began_s, ended_s=monotonic())
            )

    def close(self) -> None:
        """Abort requests, stop a server that was started here, and delete the saved weights."""
        self.client.close()
        for thread in (self._generating, self._loading):
            thread.shutdown(cancel_futures=True)
        if processes.rank() == 0:
            for folder in self.weights_dir.glob("version-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def _score_probe(self) -> tuple[list[int], Tensor | None]:
        """Score the probe with the policy; return its tokens and their log-probabilities, (S,)."""
        vocabulary = self.policy.vocabulary_size
        if vocabulary is None:
            return [], None
        parts = self.policy.row_parts
        positions = -(-(PROBE_TOKENS - 1) // parts) * parts
        generator = torch.Generator().manual_seed(0)
        probe = torch.randint(vocabulary, (positions + 1,), generator=generator)
        row = {"tokens": probe[None, :-1], "targets": probe[None, 1:]}
        return probe.tolist(), logprobs_of(self.policy, row, temperature=1.0)[0].cpu()

    def _check_weights(
        self, probe: list[int], logprobs: Tensor | None, previous: int | None, version: int
    ) -> None:
        """Check that every server scores the probe as the policy does now.

        Servers round differently, so the limits are relative. With all weights old, a server is
        closer to the policy's previous log-probabilities than to the new ones. With some old, its
        distance from the new ones exceeds its rounding so far by a fraction of the update.
        """
        if logprobs is None:
            return
        for server, server_logprobs in self.client.score(probe).items():
            scores = torch.tensor(server_logprobs)
            to_new = _distance(scores, logprobs)
            rounding = min(self._rounding.get(server, to_new), to_new)
            if self._probe_logprobs is not None:
                to_old = _distance(scores, self._probe_logprobs)
                change = _distance(logprobs, self._probe_logprobs)
                if to_new > min(2 * to_old, 10 * rounding + 0.1 * change):
                    raise ServerError(
                        f"{server} must have the weights of version {version} and still has some "
                        f"of version {previous}: its log-probabilities differ by {to_new:.2g} "
                        f"from the new and {to_old:.2g} from the old ones; restart it, or use "
                        "vllm.python"
                    )
            self._rounding[server] = rounding


def _distance(first: Tensor, second: Tensor) -> float:
    """Return the mean absolute difference of log-probabilities (S,), in nats."""
    return float((first - second).abs().mean())


def build(
    policy: Engine,
    *,
    max_num_seqs: int,
    decode: Decode | None,
    vllm: VllmOptions,
    folder: Path,
    max_staleness: int = 0,
    routed_layers: RoutedLayers | None = None,
) -> VllmRollouts:
    """Generate with vLLM servers.

    Args:
        policy: engine of the policy.
        max_num_seqs: responses generated at the same time, over all servers.
        decode: converts tokens to text; needed for stop strings only.
        vllm: servers and weight updates.
        folder: the run's output folder.
        max_staleness: updates by which generation may run ahead of training.
        routed_layers: layers whose experts the servers return; None without router replay.
    """
    weights_dir = vllm.weights_dir or folder / "vllm"
    client = VllmClient(
        vllm,
        vocabulary=policy.vocabulary_size,
        max_num_seqs=max_num_seqs,
        log_path=folder / "vllm-server.log",
        decode=decode,
        routed_layers=routed_layers,
    )
    return VllmRollouts(
        policy,
        client,
        weights_dir=weights_dir.absolute(),
        max_staleness=max_staleness,
        in_flight=vllm.in_flight_weight_updates,
        routed_layers=routed_layers,
    )


def _gather_prompts(policy: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the prompts of all data ranks, in rank order; each rank has the same number."""
    if policy.data_ranks == 1:
        return [list(prompt) for prompt in prompts]
    lengths = policy.gather(torch.tensor([len(prompt) for prompt in prompts]))
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = torch.as_tensor(prompt)
    rows = policy.gather(padded)
    return [row[:length].tolist() for row, length in zip(rows, lengths.tolist(), strict=True)]


def _on_first_process(action: Callable[[], None]) -> None:
    """Run an action on the first process; if it fails, raise on all. Collective."""
    failure: Exception | None = None
    if processes.rank() == 0:
        try:
            action()
        except Exception as error:  # raised below, after the other processes know
            failure = error
    if processes.any_of(failure is not None):
        raise failure or ServerError("a rollout failed on the first process; see its error message")

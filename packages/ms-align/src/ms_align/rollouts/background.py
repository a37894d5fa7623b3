"""Rollouts from a copy of the policy in a background thread, while the policy trains.

The thread runs jobs in order. Each job loads the policy's weights as they were when it was
submitted, then generates, so responses depend on the order of jobs and never on timing. The copy
needs the memory of the policy's trained weights; frozen weights are shared.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import torch
from attrs import evolve
from torch import Tensor

from ms_align.engines.local import LocalEngine
from ms_align.generation.generator import LocalGenerator
from ms_align.generation.responses import Responses, Span, TimedResponses
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode
from ms_align.models.language_model import copy_of


class BackgroundRollouts:
    """Rollouts in a background thread.

    Args:
        policy: engine of the policy.
        max_num_seqs: maximum number of rows generated at the same time.
        decode: converts tokens to text; only needed for stop strings.
        records_experts: return the experts of each token.

    Raises:
        ModelError: the model does not support a KV cache.
    """

    def __init__(
        self,
        policy: LocalEngine,
        *,
        max_num_seqs: int,
        decode: Decode | None,
        records_experts: bool = False,
    ) -> None:
        self.policy = policy
        self.module = copy_of(policy.module).requires_grad_(False)
        # Frozen weights never change, so the copy can point to the policy's storage.
        for name, parameter in policy.module.named_parameters():
            if not parameter.requires_grad:
                self.module.get_parameter(name).data = parameter.data
        # The training thread may use the device's RNG state, which would break a capture.
        self.generator = LocalGenerator(
            self.module,
            max_num_seqs=max_num_seqs,
            decode=decode,
            cuda_graph=False,
            records_experts=records_experts,
        )
        self.version: int | None = None
        self._weights: Mapping[str, Tensor] | None = None
        """Weights that the next job loads; None if they have not changed since the previous job."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generator")

    def start(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Callable[[], TimedResponses]:
        """Start generating with the current weights; the result waits for the responses."""
        # Bound now: `update_weights` may replace both before the job runs.
        weights, self._weights = self._weights, None
        version = self.version
        assert version is not None  # update_weights comes first

        def generate() -> Responses:
            responses = self.generator(prompts, sampling, count=count, seed=seed)
            return evolve(responses, versions=torch.full_like(responses.tokens, version))

        def run() -> TimedResponses:
            if weights is None:
                return TimedResponses.measure(generate)
            began_s = monotonic()
            self._load(weights)
            loading = Span(kind="update_weights", began_s=began_s, ended_s=monotonic())
            timed = TimedResponses.measure(generate)
            return evolve(timed, began_s=began_s, spans=(loading, *timed.spans))

        return self._thread.submit(run).result

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Responses:
        """Generate with the current weights, after all jobs started earlier."""
        return self.start(prompts, sampling, count=count, seed=seed)().responses

    def update_weights(self, version: int) -> None:
        """Copy the policy's trained weights for all later jobs."""
        if version == self.version:
            return
        module = self.policy.module
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        tensors = {**trained, **dict(module.named_buffers())}
        # The optimizer updates in place, so the job needs its own copy.
        self._weights = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.version = version

    def close(self) -> None:
        """Cancel queued jobs and wait for the running one."""
        self._thread.shutdown(cancel_futures=True)

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor]) -> None:
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for name, tensor in weights.items():
            tensors[name].copy_(tensor)

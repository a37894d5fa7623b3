"""Rollouts by a copy of the policy in a background thread, while the policy is trained.

The thread runs one job after the other: it loads the weights of the policy as they were when the
job was started, and generates. So responses depend on the order of jobs and never on timing. The
copy takes as much memory as the policy; weights that are not trained are shared.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from attrs import evolve
from torch import Tensor

from ms_align.engines.local import LocalEngine
from ms_align.generation.generator import LocalGenerator
from ms_align.generation.responses import Responses, TimedResponses
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode
from ms_align.models.language_model import copy_of


class BackgroundRollouts:
    """Rollouts in a background thread.

    Args:
        policy: engine of the policy.
        max_num_seqs: rows generated at the same time.
        decode: converts tokens to text; needed for stop strings only.

    Raises:
        ModelError: the model does not support a KV cache.
    """

    def __init__(self, policy: LocalEngine, *, max_num_seqs: int, decode: Decode | None) -> None:
        self.policy = policy
        self.module = copy_of(policy.module).requires_grad_(False)
        for name, parameter in policy.module.named_parameters():
            if not parameter.requires_grad:
                self.module.get_parameter(name).data = parameter.data
        self.generator = LocalGenerator(self.module, max_num_seqs=max_num_seqs, decode=decode)
        self.version: int | None = None
        self._weights: Mapping[str, Tensor] | None = None
        """Weights that the next job loads; None for those of the job before."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generator")

    def start(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Callable[[], TimedResponses]:
        """Start generating with the weights of now; the result waits for the responses."""
        weights, self._weights = self._weights, None
        version = self.version
        assert version is not None  # update_weights comes first

        def generate() -> Responses:
            self._load(weights or {})
            responses = self.generator(prompts, sampling, count=count, seed=seed)
            return evolve(responses, versions=torch.full_like(responses.tokens, version))

        return self._thread.submit(TimedResponses.measure, generate).result

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Responses:
        """Generate with the weights of now, after the jobs that were started before."""
        return self.start(prompts, sampling, count=count, seed=seed)().responses

    def update_weights(self, version: int) -> None:
        """Copy the policy's trained weights for the jobs from now on."""
        if version == self.version:
            return
        module = self.policy.module
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        tensors = {**trained, **dict(module.named_buffers())}
        self._weights = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.version = version

    def close(self) -> None:
        """Drop the jobs that have not begun and wait for the one that has."""
        self._thread.shutdown(cancel_futures=True)

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor]) -> None:
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for name, tensor in weights.items():
            tensors[name].copy_(tensor)

"""Rollouts by the policy's own engine, in this process or under its layout."""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from ms_align.engines.generator import generator_of
from ms_align.engines.protocol import Engine
from ms_align.generation.responses import Generator, Responses
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode


class PolicyRollouts:
    """Rollouts by a generator in this process, which always has the policy's current weights.

    Args:
        generator: `LocalGenerator`, `EngineGenerator` or your own callable.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.version = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Responses:
        """Generate `count` responses per prompt of this data rank. Collective."""
        responses = self.generator(prompts, sampling, count=count, seed=seed)
        return evolve(responses, versions=torch.full_like(responses.tokens, self.version))

    def update_weights(self, version: int) -> None:
        """Record the version; the generator reads the policy's own weights."""
        self.version = version

    def close(self) -> None:
        """Do nothing: the generator has no processes or connections."""


def build(
    policy: Engine, *, max_num_seqs: int, decode: Decode | None, **unused: Any
) -> PolicyRollouts:
    """Generate with the policy's own engine."""
    return PolicyRollouts(generator_of(policy, max_num_seqs=max_num_seqs, decode=decode))

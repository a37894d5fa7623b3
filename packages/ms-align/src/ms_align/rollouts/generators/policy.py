"""Rollouts by the policy's own engine, in this process or under its layout."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve

from ms_align.engines.generator import generator_of
from ms_align.engines.local import LocalEngine
from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError
from ms_align.generation.responses import Generator, Responses, RolloutEngine, TimedResponses
from ms_align.generation.routing import RoutedLayers
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode
from ms_align.rollouts.background import BackgroundRollouts


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

    def start(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Callable[[], TimedResponses]:
        """Generate immediately, as the generator reads the weights that the policy trains."""
        timed = TimedResponses.measure(
            lambda: self.generate(prompts, sampling, count=count, seed=seed)
        )
        return lambda: timed

    def update_weights(self, version: int) -> None:
        """Record the version; the generator reads the policy's own weights."""
        self.version = version

    def close(self) -> None:
        """Do nothing: the generator has no processes or connections."""


def build(
    policy: Engine,
    *,
    max_num_seqs: int,
    decode: Decode | None,
    max_staleness: int = 0,
    routed_layers: RoutedLayers | None = None,
    **unused: Any,
) -> RolloutEngine:
    """Generate with the policy's engine or, to run ahead of training, with a copy of the policy.

    Raises:
        ConfigError: generation cannot run ahead or record experts because the policy has a layout.
    """
    options: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "decode": decode,
        "records_experts": routed_layers is not None,
    }
    if routed_layers is not None and not isinstance(policy, LocalEngine):
        raise ConfigError(
            "router_replay with generator = 'policy' needs a policy without a layout, as a "
            "distributed policy does not record experts; remove layout or router_replay, or use "
            "generator = 'vllm'"
        )
    if max_staleness:
        if not isinstance(policy, LocalEngine):
            raise ConfigError(
                f"max_staleness={max_staleness} with generator = 'policy' needs a policy without a "
                "layout, as a distributed policy cannot be copied; remove layout, set "
                "max_staleness = 0, or use generator = 'vllm'"
            )
        return BackgroundRollouts(policy, **options)
    return PolicyRollouts(generator_of(policy, **options))

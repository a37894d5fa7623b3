"""Generates with an engine that spreads its model over processes."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ms_align.errors import ModelError
from ms_align.generation.responses import Responses
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode, first_stop

__all__ = ["EngineGenerator", "GeneratingEngine"]


class GeneratingEngine(Protocol):
    """An engine that continues prompts itself, as `ms_parallel.Engine` does."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = ...,
        top_k: int | None = ...,
        top_p: float = ...,
        min_p: float = ...,
        seed: int = ...,
        stop_token: int | None = ...,
    ) -> list[list[int]]:
        """The new tokens of each of this data rank's prompts."""


class EngineGenerator:
    """Generates with the engine's own loop, under any layout.

    It keeps no log-probabilities: the trainer asks the engine's forward for them. The same seed
    draws the same under every layout. The engine stops at one token; where there are several, or
    stop strings, it writes on and what stands behind the first of them is cut off.

    Args:
        engine: what generates.
        decode: text of tokens; needed for stop strings alone.
    """

    def __init__(self, engine: GeneratingEngine, decode: Decode | None = None) -> None:
        self.engine = engine
        self.decode = decode

    def check(self, sampling: Sampling) -> None:
        """Refuse what it cannot do, before anything was drawn.

        Raises:
            ModelError: there are stop strings and no `decode`.
        """
        if sampling.stop_strings and self.decode is None:
            raise ModelError("stop_strings need a tokenizer to read tokens with; give decode=")

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int = 1, seed: int = 0
    ) -> Responses:
        """`count` responses to each prompt; those to one prompt are neighbours.

        Raises:
            ModelError: there are stop strings and no `decode`.
        """
        self.check(sampling)
        only = len(sampling.stop_tokens) == 1
        rows = self.engine.generate(
            [prompt for prompt in prompts for _ in range(count)],
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=seed,
            stop_token=sampling.stop_tokens[0] if only else None,
        )
        ends = [first_stop(row, sampling, self.decode) for row in rows]
        lengths = torch.tensor(
            [len(row) if end is None else end for row, end in zip(rows, ends, strict=True)]
        )
        # As wide on every data rank, whose rows are put together.
        tokens = torch.zeros(len(rows), sampling.max_new_tokens, dtype=torch.int64)
        for row, length, written in zip(tokens, lengths.tolist(), rows, strict=True):
            row[:length] = torch.tensor(written[:length])
        return Responses(
            tokens=tokens,
            lengths=lengths,
            logprobs=None,
            sampling_logprobs=None,
            stopped=torch.tensor([end is not None for end in ends]),
        )

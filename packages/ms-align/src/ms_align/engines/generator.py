"""Draws responses with an engine itself, as trainers do where no other rollout engine is named."""

from collections.abc import Sequence

import torch
from attrs import asdict
from attrs.filters import exclude

from ms_align.engines.local import LocalEngine
from ms_align.engines.protocol import Engine
from ms_align.errors import ModelError
from ms_align.generation.generator import LocalGenerator
from ms_align.generation.responses import Generator, Responses
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode, first_stop


def generator_of(engine: Engine, *, slots: int = 64, decode: Decode | None = None) -> Generator:
    """Build a `LocalGenerator` for an engine of one process; else use the engine's own loop.

    Args:
        engine: runs the policy.
        slots: rows that are written at once, in this process.
        decode: text of tokens; needed for stop strings alone.

    Raises:
        ModelError: the model takes no cache.
    """
    if isinstance(engine, LocalEngine):
        return LocalGenerator(engine.module, slots=slots, decode=decode)
    return EngineGenerator(engine, decode)


class EngineGenerator:
    """Generates with the engine's own loop, under any layout.

    It keeps no log-probabilities: the trainer asks the engine's forward for them. The same seed
    draws the same under every layout. Where there are stop strings, the engine writes on and what
    stands behind the first of them is cut off.

    Args:
        engine: what generates.
        decode: text of tokens; needed for stop strings alone.
    """

    def __init__(self, engine: Engine, decode: Decode | None = None) -> None:
        self.engine = engine
        self.decode = decode

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int = 1, seed: int = 0
    ) -> Responses:
        """Write `count` responses to each prompt; those to one prompt are neighbours.

        Raises:
            ModelError: there are stop strings and no `decode`.
        """
        if sampling.stop_strings and self.decode is None:
            raise ModelError("stop_strings need a tokenizer to read tokens with; give decode=")
        rows = self.engine.generate(
            [prompt for prompt in prompts for _ in range(count)],
            **asdict(sampling, filter=exclude("stop_tokens", "stop_strings")),
            seed=seed,
            stop_token=sampling.stop_tokens or None,
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

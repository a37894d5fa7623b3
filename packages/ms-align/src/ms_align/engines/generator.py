"""Rollout generation with the engine that runs the policy."""

from collections.abc import Sequence

import torch
from attrs import asdict, evolve
from attrs.filters import exclude

from ms_align.engines.local import LocalEngine
from ms_align.engines.protocol import Engine
from ms_align.errors import ModelError
from ms_align.generation.generator import LocalGenerator
from ms_align.generation.responses import Generator, Responses
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode, first_stop
from ms_align.models.language_model import StagedLanguageModel, language_model


def generator_of(
    engine: Engine,
    *,
    max_num_seqs: int = 64,
    decode: Decode | None = None,
    records_experts: bool = False,
) -> Generator:
    """Build the fastest generator that an engine supports.

    A `LocalGenerator` for the single-process engine, and on an accelerator for a complete decoder
    in any engine; an `EngineGenerator` for others.

    Args:
        engine: engine of the policy.
        max_num_seqs: rows generated at the same time, in one process.
        decode: converts tokens to text; needed for stop strings only.
        records_experts: return the experts of each token; in one process only.

    Raises:
        ModelError: the model does not support a KV cache.
    """
    if isinstance(engine, LocalEngine):
        return LocalGenerator(
            engine.module,
            max_num_seqs=max_num_seqs,
            decode=decode,
            records_experts=records_experts,
        )
    module = engine.module
    if module is not None and next(module.parameters()).device.type != "cpu":
        model = language_model(module)
        if isinstance(model, StagedLanguageModel):
            generator = LocalGenerator(module, max_num_seqs=max_num_seqs, decode=decode)
            return WithoutLogprobs(generator)
    return EngineGenerator(engine, decode)


class WithoutLogprobs:
    """Generator without log-probabilities: the trainer recomputes them, as under other layouts.

    Args:
        generator: generator of responses.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int = 1, seed: int = 0
    ) -> Responses:
        """Generate `count` responses per prompt; responses to a prompt are adjacent."""
        responses = self.generator(prompts, sampling, count=count, seed=seed)
        return evolve(responses, logprobs=None, sampling_logprobs=None)


class EngineGenerator:
    """Generates with the engine's own generation loop, under any layout.

    It returns no log-probabilities; the trainer computes them with a forward pass. The same seed
    gives the same responses under every layout. With stop strings, responses are generated to full
    length and cut after the first stop string.

    Args:
        engine: engine that generates.
        decode: converts tokens to text; needed for stop strings only.
    """

    def __init__(self, engine: Engine, decode: Decode | None = None) -> None:
        self.engine = engine
        self.decode = decode

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int = 1, seed: int = 0
    ) -> Responses:
        """Generate `count` responses per prompt; responses to a prompt are adjacent.

        Raises:
            ModelError: stop strings need `decode`, which is missing.
        """
        if sampling.stop_strings and self.decode is None:
            raise ModelError("stop_strings need a tokenizer to decode tokens; pass decode=")
        rows = self.engine.generate(
            [prompt for prompt in prompts for _ in range(count)],
            **asdict(sampling, filter=exclude("stop_token_ids", "stop_strings")),
            seed=seed,
            stop_token=sampling.stop_token_ids or None,
        )
        # Position of the first stop, if any; the rest of the row is dropped.
        ends = [first_stop(row, sampling, self.decode) for row in rows]
        lengths = torch.tensor(
            [len(row) if end is None else end for row, end in zip(rows, ends, strict=True)]
        )
        # The width is the same on all data ranks, whose rows are concatenated.
        tokens = torch.zeros(len(rows), sampling.max_new_tokens, dtype=torch.int64)
        for row, length, row_tokens in zip(tokens, lengths.tolist(), rows, strict=True):
            row[:length] = torch.tensor(row_tokens[:length])
        return Responses(
            tokens=tokens,
            lengths=lengths,
            logprobs=None,
            sampling_logprobs=None,
            stopped=torch.tensor([end is not None for end in ends]),
        )

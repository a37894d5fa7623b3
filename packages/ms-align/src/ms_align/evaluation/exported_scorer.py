"""Scores and generates with an exported model in its runtime."""

from collections.abc import Sequence

import torch
from torch.nn.functional import log_softmax

from ms_align.errors import ConfigError
from ms_align.evaluation.scorer import ContinuationScore, ExportedModel, Row
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode, first_stop


class ExportedScorer:
    """Scores and generates with an exported model.

    Args:
        model: model opened in its runtime.
        context: maximum number of tokens; None: no limit.
        batch_size: rows per forward pass.
        decode: converts tokens to text, for stop strings.
    """

    def __init__(
        self,
        model: ExportedModel,
        *,
        context: int | None,
        batch_size: int = 16,
        decode: Decode,
    ) -> None:
        self.model, self.context = model, context
        self._size, self._decode = batch_size, decode

    def score(self, rows: Sequence[Row], /) -> list[ContinuationScore]:
        """Score each row's continuation, in the order of the rows; batches have equal lengths."""
        # Longest first, so that an out-of-memory error occurs at the start.
        order = sorted(range(len(rows)), key=lambda index: (-len(rows[index].tokens), index))
        scores: dict[int, ContinuationScore] = {}
        while order:
            length = len(rows[order[0]].tokens)
            # Equal lengths only, as exported models take no mask.
            indices = [i for i in order[: self._size] if len(rows[i].tokens) == length]
            order = order[len(indices) :]
            tokens = torch.tensor([rows[index].tokens for index in indices])
            # (b, S - 1, V): position i predicts token i + 1.
            logprobs = log_softmax(self.model.logits(tokens[:, :-1]), dim=-1)
            for row, index in enumerate(indices):
                count = rows[index].scored
                row_logprobs, targets = logprobs[row, -count:], tokens[row, -count:]
                target_logprobs = row_logprobs.gather(1, targets[:, None])
                greedy = bool((row_logprobs.argmax(-1) == targets).all())
                scores[index] = ContinuationScore(float(target_logprobs.sum()), greedy)
        return [scores[index] for index in range(len(rows))]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, /, *, seed: int
    ) -> list[list[int]]:
        """Generate greedily for each prompt up to the first stop.

        Raises:
            ConfigError: the task requires sampling.
        """
        if sampling.temperature:
            raise ConfigError(
                f"exported models generate greedily, and the task sets temperature "
                f"{sampling.temperature}; set `temperature: 0` in the task"
            )
        answers = []
        for prompt in prompts:
            tokens = self.model.generate(list(prompt), sampling.max_new_tokens)
            answers.append(tokens[: first_stop(tokens, sampling, self._decode)])
        return answers

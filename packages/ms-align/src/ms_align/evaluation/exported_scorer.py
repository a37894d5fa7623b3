"""Scores and texts by an exported model, in the runtime that it was exported for."""

from collections.abc import Sequence

import torch
from torch.nn.functional import log_softmax

from ms_align.errors import ConfigError
from ms_align.evaluation.scorer import ContinuationScore, ExportedModel, Row
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode, first_stop


class ExportedScorer:
    """An exported model as its runtime computes it.

    Args:
        model: opened in its runtime.
        context: tokens that it takes at most; None where there is no limit.
        batch_size: rows of a forward.
        decode: text of tokens, for stop strings.
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
        """Score each row's continuation, in the rows' order; rows of equal length pass together."""
        order = sorted(range(len(rows)), key=lambda index: (-len(rows[index].tokens), index))
        scores: dict[int, ContinuationScore] = {}
        while order:
            length = len(rows[order[0]].tokens)
            part = [i for i in order[: self._size] if len(rows[i].tokens) == length]
            order = order[len(part) :]
            tokens = torch.tensor([rows[index].tokens for index in part])
            logprobs = log_softmax(self.model.logits(tokens[:, :-1]), dim=-1)
            for row, index in enumerate(part):
                count = rows[index].scored
                own, targets = logprobs[row, -count:], tokens[row, -count:]
                chosen = own.gather(1, targets[:, None])
                greedy = bool((own.argmax(-1) == targets).all())
                scores[index] = ContinuationScore(float(chosen.sum()), greedy)
        return [scores[index] for index in range(len(rows))]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, /, *, seed: int
    ) -> list[list[int]]:
        """Generate the likeliest tokens of each prompt up to its first stop; nothing is drawn.

        Raises:
            ConfigError: the task draws its tokens.
        """
        if sampling.temperature:
            raise ConfigError(
                f"an exported model writes its likeliest tokens, and the task has temperature "
                f"{sampling.temperature}; give the task `temperature: 0`"
            )
        answers = []
        for prompt in prompts:
            tokens = self.model.generate(list(prompt), sampling.max_new_tokens)
            answers.append(tokens[: first_stop(tokens, sampling, self._decode)])
        return answers

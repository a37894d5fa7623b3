"""Scores and generates with an engine, in one process or under any layout.

Every process gets all rows, computes the share of its data rank, and receives all results.
Shapes: B rows, S positions, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from ms_align import processes
from ms_align.engines.generator import generator_of
from ms_align.engines.protocol import Engine
from ms_align.evaluation.scorer import ContinuationScore, Row
from ms_align.generation.sampling import Sampling
from ms_align.generation.stops import Decode
from ms_align.losses.protocol import IGNORED, Batch, Output


class EngineScorer:
    """Scores and generates with an engine.

    Args:
        engine: engine of one or several processes.
        batch_size: rows per forward pass, over all data ranks.
        decode: converts tokens to text, for stop strings.
    """

    def __init__(self, engine: Engine, *, batch_size: int = 16, decode: Decode) -> None:
        self.engine, self.context = engine, engine.context
        self._size = -(-batch_size // engine.data_ranks) * engine.data_ranks
        self._generator = generator_of(engine, decode=decode)

    def score(self, rows: Sequence[Row], /) -> list[ContinuationScore]:
        """Score each row's continuation, in the order of the rows; long rows run first."""
        # Similar lengths together, and out-of-memory errors at the start.
        order = sorted(range(len(rows)), key=lambda index: (-len(rows[index].tokens), index))
        scores: dict[int, ContinuationScore] = {}
        for start in range(0, len(order), self._size):
            indices = order[start : start + self._size]
            batch_scores = self._score_batch([rows[index] for index in indices])
            scores |= dict(zip(indices, batch_scores, strict=True))
        return [scores[index] for index in range(len(rows))]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, /, *, seed: int
    ) -> list[list[int]]:
        """Generate new tokens for each prompt; prompts are divided equally among data ranks."""
        rank, ranks = self.engine.data_rank, self.engine.data_ranks
        padded = processes.pad_to_ranks(prompts, ranks)
        local = processes.rows_of_rank(len(padded), rank, ranks)
        answers = self._generator(padded[local], sampling, count=1, seed=seed)
        width = sampling.max_new_tokens
        # Equal widths on all ranks, with the length in the first column.
        tokens = torch.nn.functional.pad(answers.tokens, (0, width - answers.tokens.shape[1]))
        gathered = self.engine.gather(torch.cat((answers.lengths[:, None], tokens), dim=1))
        return [row[1 : 1 + int(row[0])].tolist() for row in gathered[: len(prompts)]]

    def _score_batch(self, rows: list[Row]) -> list[ContinuationScore]:
        """Score rows in one forward pass, split over the data ranks."""
        rank, ranks = self.engine.data_rank, self.engine.data_ranks
        padded = processes.pad_to_ranks(rows, ranks)
        batch = self._batch(padded)
        local = processes.rows_of_rank(len(padded), rank, ranks)
        local_sums = self.engine.evaluate(
            {name: value[local] for name, value in batch.items()}, _sums
        )
        gathered = self.engine.gather(local_sums)[: len(rows)].tolist()
        return [ContinuationScore(logprob, bool(greedy)) for logprob, greedy in gathered]

    def _batch(self, rows: list[Row]) -> dict[str, Tensor]:
        """Pad rows on the right, where a causal model is not affected by padding."""
        width = max(len(row.tokens) for row in rows) - 1
        width = -(-width // self.engine.row_parts) * self.engine.row_parts
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        targets = torch.full((len(rows), width), IGNORED)
        for index, row in enumerate(rows):
            length = len(row.tokens) - 1
            tokens[index, :length] = torch.tensor(row.tokens[:-1])
            targets[index, length - row.scored : length] = torch.tensor(row.tokens[-row.scored :])
        return {"tokens": tokens, "targets": targets}


def _sums(output: Output, batch: Batch) -> Tensor:
    """Return each row's sum of target logprobs and whether all are the argmax, (b, 2) float64."""
    targets = batch["targets"]
    counted = targets != IGNORED
    first = int(counted.any(0).nonzero()[0])
    # Positions before the first target of any row need no logits.
    targets, counted = targets[:, first:], counted[:, first:]
    logprobs = log_softmax(output.logits(slice(first, None)).float(), dim=-1)  # (b, s, V)
    target_logprobs = logprobs.gather(2, targets.clamp(min=0)[..., None])[..., 0]
    greedy = ((logprobs.argmax(-1) == targets) | ~counted).all(1)
    sums = torch.where(counted, target_logprobs, 0.0).sum(1)
    return torch.stack((sums.double(), greedy.double()), dim=1)

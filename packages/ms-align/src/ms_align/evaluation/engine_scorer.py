"""Scores and texts by an engine, of one process or under any layout.

Every process of a layout is asked for all rows, computes those of its data rank, and gets the
scores of all. Shapes: B rows, S positions, V vocabulary.
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
    """A model as its engine runs it.

    Args:
        engine: of one process or of many.
        batch_size: rows of a forward, of all data ranks together.
        decode: text of tokens, for stop strings.
    """

    def __init__(self, engine: Engine, *, batch_size: int = 16, decode: Decode) -> None:
        self.engine, self.context = engine, engine.context
        self._size = -(-batch_size // engine.data_ranks) * engine.data_ranks
        self._generator = generator_of(engine, decode=decode)

    def score(self, rows: Sequence[Row], /) -> list[ContinuationScore]:
        """Score each row's continuation, in the rows' order; the longest rows pass first."""
        order = sorted(range(len(rows)), key=lambda index: (-len(rows[index].tokens), index))
        scores: dict[int, ContinuationScore] = {}
        for first in range(0, len(order), self._size):
            part = order[first : first + self._size]
            found = self._pass([rows[index] for index in part])
            scores |= dict(zip(part, found, strict=True))
        return [scores[index] for index in range(len(rows))]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, /, *, seed: int
    ) -> list[list[int]]:
        """Generate the new tokens of each prompt; each data rank writes as many."""
        rank, ranks = self.engine.data_rank, self.engine.data_ranks
        filled = processes.pad_to_ranks(prompts, ranks)
        own = processes.rows_of_rank(len(filled), rank, ranks)
        answers = self._generator(filled[own], sampling, count=1, seed=seed)
        width = sampling.max_new_tokens
        tokens = torch.nn.functional.pad(answers.tokens, (0, width - answers.tokens.shape[1]))
        gathered = self.engine.gather(torch.cat((answers.lengths[:, None], tokens), dim=1))
        return [row[1 : 1 + int(row[0])].tolist() for row in gathered[: len(prompts)]]

    def _pass(self, rows: list[Row]) -> list[ContinuationScore]:
        """Score the rows in one forward pass, in which each data rank computes its part."""
        rank, ranks = self.engine.data_rank, self.engine.data_ranks
        filled = processes.pad_to_ranks(rows, ranks)
        batch = self._batch(filled)
        own = processes.rows_of_rank(len(filled), rank, ranks)
        mine = self.engine.evaluate({name: value[own] for name, value in batch.items()}, _sums)
        found = self.engine.gather(mine)[: len(rows)].tolist()
        return [ContinuationScore(logprob, bool(greedy)) for logprob, greedy in found]

    def _batch(self, rows: list[Row]) -> dict[str, Tensor]:
        """Pad rows on the right, which in a causal model changes nothing before."""
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
    """Sum each row's target log-probabilities, and tell if all are likeliest, (b, 2) float64."""
    targets = batch["targets"]
    counted = targets != IGNORED
    first = int(counted.any(0).nonzero()[0])
    targets, counted = targets[:, first:], counted[:, first:]
    logprobs = log_softmax(output.logits(slice(first, None)).float(), dim=-1)
    chosen = logprobs.gather(2, targets.clamp(min=0)[..., None])[..., 0]
    greedy = ((logprobs.argmax(-1) == targets) | ~counted).all(1)
    sums = torch.where(counted, chosen, 0.0).sum(1)
    return torch.stack((sums.double(), greedy.double()), dim=1)

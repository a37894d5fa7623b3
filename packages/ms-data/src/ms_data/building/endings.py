"""Counts assistant answers, in total and with an end-of-turn token."""

from functools import lru_cache

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ms_data.building.journal import AnswerCounts
from ms_data.disk.format import LOSS_BIT
from ms_data.tokenization.tokenizer import Tokenizer


@frozen
class EndCounter:
    """Counts answers in the words of samples.

    Args:
        tokenizer: its special tokens count as end-of-turn tokens.
        header_words: words before the tokens of a sample.
    """

    tokenizer: Tokenizer
    header_words: int
    _end_tokens: frozenset[int] = field(init=False)

    @_end_tokens.default
    def _special_ids(self) -> frozenset[int]:
        special = map(self.tokenizer.special_token, self.tokenizer.special_tokens)
        return frozenset((self.tokenizer.end_of_text, *special))

    def count(self, words: NDArray[np.integer]) -> AnswerCounts:
        """Count the answers of one sample, shape (n,): its runs of tokens with loss."""
        body = words[self.header_words :].astype(np.uint32)
        trained = np.concatenate(([False], (body & LOSS_BIT) != 0, [False]))
        # Alternating starts and ends of the runs with loss.
        edges = np.flatnonzero(trained[1:] != trained[:-1])
        tokens = body & ~LOSS_BIT
        runs = [tokens[start:stop].tolist() for start, stop in edges.reshape(-1, 2)]
        return AnswerCounts(
            trained_tokens=int(trained.sum()),
            answers=len(runs),
            ended=sum(self._ends_turn(run) for run in runs),
        )

    def _ends_turn(self, run: list[int]) -> bool:
        # Some templates include the line break after the end-of-turn token in the answer.
        while run and run[-1] not in self._end_tokens and _is_blank(self.tokenizer, run[-1]):
            run.pop()
        return bool(run) and run[-1] in self._end_tokens


@lru_cache(maxsize=1 << 14)
def _is_blank(tokenizer: Tokenizer, token: int) -> bool:
    return not tokenizer.decode([token]).strip()

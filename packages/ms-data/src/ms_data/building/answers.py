"""Counts assistant answers, in total and with an end-of-turn token."""

from functools import lru_cache

import msgspec
import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ms_data.disk.format import LOSS_BIT
from ms_data.tokenization.tokenizer import Tokenizer


class AnswerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Answers in conversations or pairs; zeros for text."""

    trained_tokens: int = 0
    """Tokens with loss."""
    answers: int = 0
    """Runs of tokens with loss."""
    ended: int = 0
    """Answers whose last token is special, such as the end-of-text token."""

    def plus(self, other: "AnswerCounts") -> "AnswerCounts":
        """Return the sum of two counts."""
        return AnswerCounts(
            trained_tokens=self.trained_tokens + other.trained_tokens,
            answers=self.answers + other.answers,
            ended=self.ended + other.ended,
        )


@frozen
class AnswerCounter:
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

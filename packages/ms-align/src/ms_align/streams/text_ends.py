"""Detects the tokens that end the answers in the training data.

A chat template may end an answer with a token such as `<|im_end|>` that is not the tokenizer's
end-of-text token. Only the data shows which token it is: the last target of each answer.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from attrs import define, field

from ms_align.losses.protocol import IGNORED
from ms_align.tokenizer_files import TokenizerFiles, files_of

OBSERVED_BATCHES = 8
"""Batches that are examined in each launch."""
TAIL = 3
"""Final targets searched for the end token: some templates print a newline after it."""


@define
class TextEnds:
    """Special tokens that end the answers in the batches observed so far."""

    special: Collection[int]
    """Ids of the tokenizer's special tokens."""
    tokens: set[int] = field(factory=set)
    """Special tokens that ended an answer."""
    batches: int = 0
    """Number of observed batches."""
    texts: int = 0
    """Number of observed answers."""
    ended: int = 0
    """Number of these that end with a special token."""

    @classmethod
    def of(cls, tokenizer: TokenizerFiles | None) -> "TextEnds":
        """Create an observer that knows the special tokens of `tokenizer`."""
        return cls(frozenset(tokenizer.ids.values()) if tokenizer else frozenset())

    def observe(self, batch: Mapping[str, Any]) -> None:
        """Record the end tokens of a batch's answers."""
        if not self.special or self.batches >= OBSERVED_BATCHES:
            return
        self.batches += 1
        targets = torch.as_tensor(batch["targets"])
        learned = targets != IGNORED
        # True where the answer continues at the next position of the same document.
        continues = torch.zeros_like(learned)
        continues[:, :-1] = learned[:, 1:]
        if "documents" in batch:
            documents = torch.as_tensor(batch["documents"])
            continues[:, :-1] &= documents[:, 1:] == documents[:, :-1]
        # The last target of every answer.
        for row, end in (learned & ~continues).nonzero().tolist():
            tail = targets[row, max(0, end - TAIL + 1) : end + 1].tolist()
            last = next((token for token in reversed(tail) if token in self.special), None)
            self.texts += 1
            if last is not None:
                self.ended += 1
                self.tokens.add(last)


def dataset_tokenizer(tokenizer: Any, stream: object) -> TokenizerFiles | None:
    """Return the files of a tokenizer, by default those of the stream's first dataset folder."""
    if tokenizer is None:
        folders = getattr(stream, "folders", ())
        tokenizer = folders[0] if folders else None
    return None if tokenizer is None else files_of(tokenizer)

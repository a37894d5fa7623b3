"""Which tokens a model learns to end its texts with: the last targets of its data.

A chat template may end an answer with a token of its own (`<|im_end|>`), which is not the end of a
text for the tokenizer. Nothing but the data says which it is.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from attrs import define, field

from ms_align.losses.protocol import IGNORED
from ms_align.tokenizer_files import TokenizerFiles, files_of

LOOKED_AT = 8
"""Batches of a launch that are looked at."""
TAIL = 3
"""Last targets of a text among which its end is: some templates end a line behind it."""


@define
class TextEnds:
    """The special tokens that end what is learnt, as far as batches have shown them."""

    special: Collection[int]
    found: set[int] = field(factory=set)
    looked_at: int = 0
    texts: int = 0
    """Texts whose end was looked at."""
    ended: int = 0
    """Those of them that end with a special token."""

    @classmethod
    def of(cls, tokenizer: TokenizerFiles | None) -> "TextEnds":
        """Begin with a tokenizer's special tokens, none of which was seen so far."""
        return cls(frozenset(tokenizer.ids.values()) if tokenizer else frozenset())

    def look(self, batch: Mapping[str, Any]) -> None:
        """See how the texts of a batch end."""
        if not self.special or self.looked_at >= LOOKED_AT:
            return
        self.looked_at += 1
        targets = torch.as_tensor(batch["targets"])
        learnt = targets != IGNORED
        behind = torch.zeros_like(learnt)
        behind[:, :-1] = learnt[:, 1:]
        if "documents" in batch:
            documents = torch.as_tensor(batch["documents"])
            behind[:, :-1] &= documents[:, 1:] == documents[:, :-1]
        for row, end in (learnt & ~behind).nonzero().tolist():
            tail = targets[row, max(0, end - TAIL + 1) : end + 1].tolist()
            last = next((token for token in reversed(tail) if token in self.special), None)
            self.texts += 1
            if last is not None:
                self.ended += 1
                self.found.add(last)


def tokenizer_beside(given: Any, stream: object) -> TokenizerFiles | None:
    """Find the files of a tokenizer that is given, else of the one in the stream's first folder."""
    if given is None:
        folders = getattr(stream, "folders", ())
        given = folders[0] if folders else None
    return None if given is None else files_of(given)

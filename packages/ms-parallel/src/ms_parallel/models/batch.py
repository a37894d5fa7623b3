"""A batch of text: what a model and its loss are given."""

from collections.abc import Mapping

from torch import Tensor

Batch = Mapping[str, Tensor]
"""`tokens` (B, S) int64; by choice `targets` (already shifted, -100 where no loss), `weights`,
`positions`, `documents`, and whatever a loss reads, each with B rows."""

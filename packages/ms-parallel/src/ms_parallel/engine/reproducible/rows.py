"""Rows of the global batch on each process, and sums over all rows in a fixed order."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.microbatches import sum_over_rows
from ms_parallel.engine.reproducible.tree import fold
from ms_parallel.engine.row_check import Fingerprint


@frozen(kw_only=True)
class BatchRows:
    """This data rank's rows within the global batch."""

    groups: Groups
    counts: tuple[int, ...]
    """Number of rows of each data rank; consecutive in the global batch."""

    @classmethod
    def exchange(
        cls, count: int, groups: Groups, local: Fingerprint
    ) -> "tuple[BatchRows, list[tuple[int, int]]]":
        """Exchange row counts and checksums of all data ranks; all processes call it."""
        ranks = groups.place.count
        summaries = [[count, *local.numbers]]
        if ranks > 1:
            # On the CPU, where all ranks have their numbers: no rank waits for its device.
            local_summary = torch.tensor(summaries[0])  # (3,) int64
            gathered = [torch.empty_like(local_summary) for _ in range(ranks)]
            dist.all_gather(gathered, local_summary, group=groups.group("rows"))
            summaries = torch.stack(gathered).tolist()
        rows = cls(groups=groups, counts=tuple(count for count, *_ in summaries))
        return rows, [(code, distinct) for _, code, distinct in summaries]

    @property
    def total(self) -> int:
        """Rows of the global batch."""
        return sum(self.counts)

    def of(self, rank: int) -> range:
        """Return the rows of a data rank."""
        start = sum(self.counts[:rank])
        return range(start, start + self.counts[rank])

    @property
    def local(self) -> range:
        """Rows of this process's data rank."""
        return self.of(self.groups.place.rank)

    def placed(self, values: Sequence[Tensor], width: int, like: Tensor) -> Tensor:
        """Place `values` (width,) in this data rank's rows of (total, width); other rows are 0."""
        table = like.new_zeros(self.total, width)
        if values:
            table[self.local.start : self.local.stop] = torch.stack(list(values)).to(like)
        return table

    def sum(self, local: Tensor) -> Tensor:
        """Sum local numbers (local rows, n), float64 on the CPU, over all rows, to (n,)."""
        # Zeros elsewhere: the sum over ranks only places rows, and `fold` adds them.
        placed = local.new_zeros(self.total, local.shape[1])
        placed[self.local.start : self.local.stop] = local
        return fold(sum_over_rows(placed, self.groups).t().contiguous())

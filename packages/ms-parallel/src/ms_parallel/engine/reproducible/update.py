"""Updates whose bits follow from the batch alone, whichever process computed what.

Every row passes by itself, so that no product or sum within a process has another shape; gradients,
losses and norms are added up over rows by one tree, and weights are updated elementwise or whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.utils.deterministic
from torch import Tensor, nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.reproducible.gradients import RowGradients
from ms_parallel.engine.reproducible.norm import FixedNorm
from ms_parallel.engine.reproducible.rows import Rows
from ms_parallel.engine.reproducible.tree import fold


class Reproducible:
    """What an engine asks of its gradients in place of sums over microbatches and processes.

    Args:
        stages: this process's, by number.
        parameters: what is trained of them, by name.
        counted: names of those that count in the norm here.
        groups: the layout's processes.
        copy: see `RowGradients`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        parameters: Mapping[str, Tensor],
        counted: Sequence[str],
        groups: Groups,
        copy: tuple[str, str] | None,
    ) -> None:
        self.groups = groups
        self.gradients = RowGradients(stages, parameters, groups, copy)
        self.norm = FixedNorm(parameters, counted)
        self.rows = Rows(groups=groups, counts=(0,))

    def begin(self, count: int) -> Rows:
        """Expect a batch of which this process's data rank has so many rows; all call it."""
        self.rows = Rows.meet(count, self.groups)
        self.gradients.begin(self.rows)
        return self.rows

    def global_sums(
        self, of_rows: Sequence[Tensor], width: int, gradients: Mapping[str, Tensor]
    ) -> tuple[float, list[float]]:
        """Return the gradients' sum of squares, and sums over all rows; the same on all processes.

        Args:
            of_rows: (width,) of each row here, on the processes that speak for them; else none.
            width: numbers a row.
            gradients: this process's parts of the global batch's, by name.
        """
        squares = self.norm.squares(gradients, self.groups.device)
        placed = self.rows.placed(of_rows, width, squares)
        self.groups.all_reduce(joined := torch.cat((squares, placed.flatten())))
        square = float(fold(joined[: self.norm.length]))
        sums = fold(joined[self.norm.length :].view_as(placed).t().contiguous())
        return square, sums.tolist()


@contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    """Let torch choose algorithms that come to the same bits each time, or say which does not."""
    if not asked:
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]

"""Says of each microbatch how the context axis shares out its rows."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.models.staged import RowSplit
from ms_parallel.split.context.assignment import (
    Balance,
    assign,
    document_starts,
    pieces_of,
    token_costs,
)
from ms_parallel.split.context.rows import SharedRows


@frozen(kw_only=True)
class ContextLoad:
    """How evenly the cost of attention was shared out: the slowest process's over the mean."""

    imbalance: float
    zig_zag_imbalance: float
    """What two blocks a process, one early and one late, would have had."""


class Splitter:
    """Shares out rows over the context axis.

    Args:
        config: of the model, for the windows of its layers.
        groups: the layout's processes.
        balance: how blocks of a row are assigned to processes.
    """

    def __init__(self, config: Any, groups: Groups, balance: Balance) -> None:
        self.groups, self.balance = groups, balance
        self.windows = windows_of(config)
        self.count = groups.layout.context
        self.load: ContextLoad | None = None
        """Of the last microbatch; None where nothing was shared out."""

    def split(self, batch: Mapping[str, Tensor]) -> RowSplit | None:
        """How the rows of a microbatch are shared out; None where one process has them whole."""
        if self.count == 1:
            return None
        documents = batch.get("documents")
        starts = document_starts(documents, *batch["tokens"].shape)
        costs = token_costs(starts, self.windows)
        chosen = assign(costs, self.count, self.balance)
        plain = assign(costs, self.count, "zig-zag")
        self.load = ContextLoad(imbalance=chosen.imbalance, zig_zag_imbalance=plain.imbalance)
        share, here = costs.shape[1] // self.count, self.groups.place.context
        own = chosen.order[:, here * share : (here + 1) * share]
        device = self.groups.device
        return SharedRows(
            chosen.order.to(device),
            None if documents is None else documents.to(device),
            pieces_of(own, starts),
            self.groups.mesh["context"],
        )


def windows_of(config: Any) -> dict[int | None, int]:
    """How many layers of a model have each window; None for no window."""
    window = getattr(config, "window", lambda layer: None)
    return dict(Counter(window(layer) for layer in range(config.num_hidden_layers)))

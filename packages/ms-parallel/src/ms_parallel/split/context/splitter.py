"""Says of each microbatch how the context axis shares out its rows."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.models.staged import RowSplit
from ms_parallel.operators.packed_rows import move_documents
from ms_parallel.split.context.assignment import (
    assign,
    document_starts,
    token_costs,
)
from ms_parallel.split.context.kinds import Balance, ContextKind, HeadSizes, choose, traders
from ms_parallel.split.context.rows import RowExchange, SharedRows
from ms_parallel.torch_private import unflatten_mesh


@frozen(kw_only=True)
class ContextLoad:
    """How evenly the cost of attention was shared out: the slowest process's over the mean."""

    attention: ContextKind
    """How it saw whole rows."""
    imbalance: float
    zig_zag_imbalance: float
    """What two blocks a process, one early and one late, would have had."""


class Splitter:
    """Shares out rows over the context axis.

    Args:
        config: of the model.
        groups: the layout's processes.
        kind: how attention sees whole rows, as `check_context` accepts it.
        balance: how blocks of a row are assigned to processes.
        element_bytes: of a number that is sent.
    """

    def __init__(
        self, config: Any, groups: Groups, kind: ContextKind, balance: Balance, element_bytes: int
    ) -> None:
        self.groups, self.kind, self.balance = groups, kind, balance
        self.element_bytes = element_bytes
        self.count = groups.layout.context
        self.load: ContextLoad | None = None
        """Load of the last microbatch; None where nothing was shared out."""
        self.exchanges: dict[ContextKind, RowExchange] = {}
        if self.count > 1:
            self.windows = windows_of(config)
            self.sizes = HeadSizes.of(config, groups.layout.tensor)

    def split(self, batch: Mapping[str, Tensor]) -> RowSplit | None:
        """Share out the rows of a microbatch; None where one process has them whole."""
        if self.count == 1:
            return None
        tokens, documents = batch["tokens"], batch.get("documents")
        kind = choose(self.kind, self.count, self.sizes, tokens.numel(), self.element_bytes)
        exchange, starts = self._exchange(kind), document_starts(documents, *tokens.shape)
        nodes = self.count // traders(kind, self.count, self.sizes)
        order, self.load = share_out(starts, self.windows, nodes, kind, self.balance)
        if documents is not None:
            documents = move_documents(documents, self.groups.device)
        return SharedRows(order, starts, documents, exchange)

    def _exchange(self, kind: ContextKind) -> RowExchange:
        """Choose along which processes a kind trades and gathers."""
        if kind not in self.exchanges:
            mesh = self.groups.mesh["context"]
            trading = traders(kind, self.count, self.sizes)
            heads, positions = (mesh, None) if trading == self.count else (None, mesh)
            if 1 < trading < self.count:
                sizes = (self.count // trading, trading)
                names = ("context_positions", "context_heads")
                positions, heads = unflatten_mesh(mesh, sizes, names)
            self.exchanges[kind] = RowExchange(
                whole=mesh, heads=heads, positions=positions, ring=kind.endswith("ring")
            )
        return self.exchanges[kind]


def share_out(
    starts: Tensor,
    windows: Mapping[int | None, int],
    nodes: int,
    kind: ContextKind,
    balance: Balance,
) -> tuple[Tensor, ContextLoad]:
    """Choose the places of each process in turn, (B, S), and say how even their costs are.

    Args:
        starts: (B, S), as `document_starts` gives them.
        windows: how many layers have each window.
        nodes: processes that have different positions of the same heads.
        kind: of context parallelism.
        balance: how blocks are assigned.
    """
    if nodes == 1:
        whole = torch.arange(starts.shape[1]).expand(starts.shape)
        return whole, ContextLoad(attention=kind, imbalance=1.0, zig_zag_imbalance=1.0)
    costs = token_costs(starts, windows)
    plain = assign(costs, nodes, "zig-zag")
    chosen = plain if balance == "zig-zag" else assign(costs, nodes, balance)
    return chosen.order, ContextLoad(
        attention=kind, imbalance=chosen.imbalance, zig_zag_imbalance=plain.imbalance
    )


def windows_of(config: Any) -> dict[int | None, int]:
    """Count the layers of a model that have each window; None for no window."""
    window = getattr(config, "window", lambda layer: None)
    return dict(Counter(window(layer) for layer in range(config.num_hidden_layers)))

"""Splits the rows of each microbatch over the context axis."""

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
from ms_parallel.split.context.kinds import (
    ContextBalance,
    ContextKind,
    HeadSizes,
    resolve_context_mode,
    ulysses_size,
)
from ms_parallel.split.context.rows import ContextRowSplit, RowExchange
from ms_parallel.torch_private import unflatten_mesh


@frozen(kw_only=True)
class ContextLoad:
    """Load balance of attention over the context ranks in one microbatch."""

    attention: ContextKind
    """Context-parallel mode of attention."""
    imbalance: float
    """Cost of the slowest rank over the mean."""
    zig_zag_imbalance: float
    """The same under zig-zag assignment, for comparison."""


class ContextSplitter:
    """Splits rows over the context axis.

    Args:
        config: model configuration.
        groups: process groups of the layout.
        mode: context-parallel mode, accepted by `check_context`.
        balance: how blocks of a row are assigned to ranks.
        element_bytes: size of the compute dtype.
    """

    def __init__(
        self,
        config: Any,
        groups: Groups,
        mode: ContextKind,
        balance: ContextBalance,
        element_bytes: int,
    ) -> None:
        self.groups, self.mode, self.balance = groups, mode, balance
        self.element_bytes = element_bytes
        self.count = groups.layout.context
        self.load: ContextLoad | None = None
        """Load balance of the last microbatch; None without context parallelism."""
        self.exchanges: dict[ContextKind, RowExchange] = {}
        if self.count > 1:
            self.windows = windows_of(config)
            self.sizes = HeadSizes.of(config, groups.layout.tensor)

    def split(self, batch: Mapping[str, Tensor]) -> RowSplit | None:
        """Split the rows of a microbatch; None without context parallelism."""
        if self.count == 1:
            return None
        tokens, documents = batch["tokens"], batch.get("documents")
        mode = resolve_context_mode(
            self.mode, self.count, self.sizes, tokens.numel(), self.element_bytes
        )
        exchange, starts = self._exchange(mode), document_starts(documents, *tokens.shape)
        # Ranks that trade heads have the same positions after the all-to-all.
        ranks = self.count // ulysses_size(mode, self.count, self.sizes)
        order, self.load = assign_positions(starts, self.windows, ranks, mode, self.balance)
        if documents is not None:
            documents = move_documents(documents, self.groups.device)
        return ContextRowSplit(order, starts, documents, exchange)

    def _exchange(self, mode: ContextKind) -> RowExchange:
        """Return the meshes along which a mode trades heads and gathers positions, cached."""
        if mode not in self.exchanges:
            mesh = self.groups.mesh["context"]
            heads_size = ulysses_size(mode, self.count, self.sizes)
            # All context ranks trade heads, or none do.
            heads, positions = (mesh, None) if heads_size == self.count else (None, mesh)
            if 1 < heads_size < self.count:
                sizes = (self.count // heads_size, heads_size)
                names = ("context_positions", "context_heads")
                positions, heads = unflatten_mesh(mesh, sizes, names)
            self.exchanges[mode] = RowExchange(
                context=mesh, heads=heads, positions=positions, ring=mode.endswith("ring")
            )
        return self.exchanges[mode]


def assign_positions(
    starts: Tensor,
    windows: Mapping[int | None, int],
    ranks: int,
    mode: ContextKind,
    balance: ContextBalance,
) -> tuple[Tensor, ContextLoad]:
    """Assign row positions to ranks.

    Args:
        starts: (B, S), from `document_starts`.
        windows: number of layers by attention window.
        ranks: number of ranks that hold different positions of the same heads.
        mode: context-parallel mode, for the report.
        balance: how blocks are assigned.

    Returns:
        Row positions (B, S) in rank order, and the load balance.
    """
    if ranks == 1:
        identity = torch.arange(starts.shape[1]).expand(starts.shape)
        return identity, ContextLoad(attention=mode, imbalance=1.0, zig_zag_imbalance=1.0)
    costs = token_costs(starts, windows)
    # Always computed, for the report.
    zig_zag = assign(costs, ranks, "zig-zag")
    assignment = zig_zag if balance == "zig-zag" else assign(costs, ranks, balance)
    return assignment.order, ContextLoad(
        attention=mode, imbalance=assignment.imbalance, zig_zag_imbalance=zig_zag.imbalance
    )


def windows_of(config: Any) -> dict[int | None, int]:
    """Count the layers by attention window; None is full attention."""
    window = getattr(config, "window", lambda layer: None)
    return dict(Counter(window(layer) for layer in range(config.num_hidden_layers)))

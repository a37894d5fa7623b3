"""A candidate of the layout search: a layout and its settings."""

from collections.abc import Callable
from typing import Any

from attrs import fields, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.memory.modes import Offload, Sharding


@frozen(kw_only=True)
class Split:
    """A layout and its microbatch size, which determine the time of a block."""

    layout: Layout
    rows: int
    """Microbatch size in rows."""
    microbatches: int
    """Microbatches per step on a data rank."""


@frozen(kw_only=True)
class Candidate:
    """A split with its schedule, sharding, recomputation and offloading."""

    split: Split
    schedule: str
    sharding: Sharding
    recompute: str
    offload: Offload

    @property
    def layout(self) -> Layout:
        """Number of ranks on each axis."""
        return self.split.layout

    def settings(self) -> dict[str, Any]:
        """Settings for a run file, without the layout."""
        return {
            "schedule": self.schedule,
            "microbatch_size": self.split.rows,
            "sharding": self.sharding,
            "recompute": self.recompute,
            "offload": self.offload,
        }

    def axes(self) -> dict[str, int]:
        """Layout for a run file; axes of one rank are left out."""
        sizes = {axis.name: getattr(self.layout, axis.name) for axis in fields(Layout)}
        return {name: size for name, size in sizes.items() if size > 1} or {"data": 1}

    def __str__(self) -> str:
        schedule = f" {self.schedule}" if self.layout.pipeline > 1 else ""
        recompute = f" recompute={self.recompute}" if self.recompute != "none" else ""
        offload = f" offload={self.offload}" if self.offload != "none" else ""
        sharding = f" {self.sharding}" if self.layout.token_ranks > 1 else ""
        return f"{self.layout} rows={self.split.rows}{schedule}{sharding}{recompute}{offload}"


@frozen(kw_only=True)
class SavedBytes:
    """Bytes that a rank saves for the backward of a microbatch of one row."""

    block: tuple[int, ...]
    """Bytes saved by a block, by kind of recomputation."""
    ends: int
    """Bytes saved outside of blocks, if embedding, head and loss are on the same rank."""


Count = Callable[[Candidate], SavedBytes]
"""Counts the saved bytes under a candidate's layout, with tensors without storage."""

"""One way to run a model: how it is split, and the settings that go with it."""

from collections.abc import Callable
from typing import Any

from attrs import fields, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.split.data_axis import Offload, Sharding


@frozen(kw_only=True)
class Split:
    """A layout, and how many rows pass at once: what decides the time of a block."""

    layout: Layout
    rows: int
    """Rows of a microbatch."""
    microbatches: int
    """Microbatches of an update on a data rank."""


@frozen(kw_only=True)
class Candidate:
    """A split, its schedule, and what is kept where."""

    split: Split
    schedule: str
    sharding: Sharding
    recompute: str
    offload: Offload

    @property
    def layout(self) -> Layout:
        """How many ranks stand on each axis."""
        return self.split.layout

    def settings(self) -> dict[str, Any]:
        """Return the settings as a run file has them, without the layout."""
        return {
            "schedule": self.schedule,
            "microbatch_size": self.split.rows,
            "sharding": self.sharding,
            "recompute": self.recompute,
            "offload": self.offload,
        }

    def axes(self) -> dict[str, int]:
        """Return the layout as a run file has it; axes of one rank are left out."""
        each = {axis.name: getattr(self.layout, axis.name) for axis in fields(Layout)}
        return {name: size for name, size in each.items() if size > 1} or {"data": 1}

    def __str__(self) -> str:
        schedule = f" {self.schedule}" if self.layout.pipeline > 1 else ""
        recompute = f" recompute={self.recompute}" if self.recompute != "none" else ""
        offload = f" offload={self.offload}" if self.offload != "none" else ""
        sharding = f" {self.sharding}" if self.layout.token_ranks > 1 else ""
        return f"{self.layout} rows={self.split.rows}{schedule}{sharding}{recompute}{offload}"


@frozen(kw_only=True)
class KeptBytes:
    """What a microbatch of one row keeps for its backward on a rank."""

    block: tuple[int, ...]
    """Bytes that a block keeps, by kind of recomputation."""
    ends: int
    """Beside the blocks, where embedding, head and loss are all on the rank."""


Count = Callable[[Candidate], KeptBytes]
"""Counts what is kept under a candidate's layout, in tensors that have a shape alone."""

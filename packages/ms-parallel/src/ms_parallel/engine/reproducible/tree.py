"""Sums whose order is fixed: a binary tree over a batch's rows, and one over a row's elements.

Floating-point sums depend on their order. Here the order follows from the number of rows alone:
node k of level l is the sum of rows k·2^l to (k+1)·2^l, of as many as there are, and is the sum of
its two children. Whoever has both children may add them, at any time.
"""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from attrs import define, field
from torch import Tensor

Node = tuple[int, int]
"""(level, number)."""
Value = TypeVar("Value")


@define
class RowTree(Generic[Value]):
    """Sums of some of the rows 0 to `rows`, as few as the tree allows."""

    rows: int
    add: Callable[[Value, Value], Value]
    """Adds a node and the one behind it; may write into the first."""
    nodes: dict[Node, Value] = field(factory=dict)
    """Nodes whose sibling is still to come."""

    def put(self, node: Node, value: Value) -> None:
        """Take a node's sum, and add up what it completes."""
        level, number = node
        while (1 << level) < self.rows:
            beside = (level, number ^ 1)
            if beside in self.nodes:
                pair = (self.nodes.pop(beside), value)
                value = self.add(*(pair if number & 1 else pair[::-1]))
            elif (beside[1] << level) < self.rows:
                break
            level, number = level + 1, number >> 1  # a node without a sibling is its parent
        self.nodes[level, number] = value

    @property
    def root(self) -> Value:
        """The sum of all rows; they have all been put."""
        (value,) = self.nodes.values()
        return value


def nodes_of(mine: Iterable[int], rows: int) -> list[Node]:
    """List, in order, the nodes left to a process that has put these rows of so many.

    >>> nodes_of(range(4), 12), nodes_of(range(6, 12), 12)
    ([(2, 0)], [(1, 3), (3, 1)])
    """
    tree = RowTree[None](rows, lambda first, second: None)
    for row in mine:
        tree.put((0, row), None)
    return sorted(tree.nodes)


def fold(x: Tensor) -> Tensor:
    """Sum `x` (..., n) over its last dim, (...), by halves; `x` is overwritten.

    Only elementwise additions are made, so that no bit depends on how a device shares out a sum,
    nor on the other dims.
    """
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        x, rest = x[..., :half], x[..., half:]
        x[..., : rest.shape[-1]] += rest
    return x.squeeze(-1)

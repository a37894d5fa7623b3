"""Sums in a fixed order: a binary tree over a batch's rows, and one over a row's elements.

Floating-point sums depend on their order. Here the order depends only on the number of rows:
node k of level l is the sum of the existing rows from k·2^l up to (k+1)·2^l, computed by adding
its two children. Any process that has both children may add them at any time.
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
    """Sums of some of the rows 0 to `rows`, merged as far as the tree allows."""

    rows: int
    add: Callable[[Value, Value], Value]
    """Adds a node and its right sibling; may write into the first."""
    nodes: dict[Node, Value] = field(factory=dict)
    """Nodes whose sibling is still missing."""

    def put(self, node: Node, value: Value) -> None:
        """Insert the sum of a node, and merge it upward while siblings are present."""
        level, number = node
        while (1 << level) < self.rows:
            sibling = (level, number ^ 1)
            if sibling in self.nodes:
                # Left child first, no matter which one arrived last.
                pair = (self.nodes.pop(sibling), value)
                value = self.add(*(pair if number & 1 else pair[::-1]))
            elif (sibling[1] << level) < self.rows:
                break  # the sibling has rows that are not summed yet
            level, number = level + 1, number >> 1  # a node without a sibling is its parent
        self.nodes[level, number] = value

    @property
    def root(self) -> Value:
        """Sum of all rows, once all have been inserted."""
        (value,) = self.nodes.values()
        return value


def nodes_of(local: Iterable[int], rows: int) -> list[Node]:
    """Return, in order, the nodes that remain after inserting these rows out of `rows`.

    >>> nodes_of(range(4), 12), nodes_of(range(6, 12), 12)
    ([(2, 0)], [(1, 3), (3, 1)])
    """
    tree = RowTree[None](rows, lambda first, second: None)
    for row in local:
        tree.put((0, row), None)
    return sorted(tree.nodes)


def fold(x: Tensor) -> Tensor:
    """Sum `x` (..., n) over its last dim to (...) by halving; overwrites `x`.

    It uses only elementwise additions, so the bits depend neither on a device's reduction
    algorithm nor on the other dims.
    """
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2  # an odd middle element is carried over
        x, upper = x[..., :half], x[..., half:]
        x[..., : upper.shape[-1]] += upper
    return x.squeeze(-1)

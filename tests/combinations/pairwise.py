"""Greedy pairwise covering arrays that learn from outcomes which pairs are refused.

After AETG (Cohen et al. 1997, IEEE TSE 23(7)): each row starts from a pair that no row covers yet
and adds, one axis at a time, the value that covers most. Unlike AETG no constraints are declared:
a refused row teaches the combination that caused it, and its other pairs are tried again.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

Row = dict[str, int]
"""The index of the value of each axis."""
Pair = tuple[tuple[str, int], ...]
"""One, two or more (axis, index of its value), sorted."""
CANDIDATES = 8


class Array:
    """Pairs of values that are still to be covered, and rows that cover them.

    Args:
        axes: number of values of each axis.
        refused: combinations that are known to be refused.
        seed: of the choices among equals.
    """

    def __init__(
        self, axes: Mapping[str, int], refused: Iterable[Pair] = (), seed: int = 0
    ) -> None:
        self.axes = dict(axes)
        self.random = random.Random(seed)
        self.total = {
            ((a, i), (b, j))
            for a, b in combinations(sorted(axes), 2)
            for i in range(axes[a])
            for j in range(axes[b])
        }
        self.open = set(self.total)
        self.trained: set[Pair] = set()
        self.impossible: set[Pair] = set()
        """Pairs that no allowed row can hold: they are, or force, a refused combination."""
        self.refused: set[Pair] = set()
        for each in refused:
            self.refuse(each)

    def pairs(self, row: Row) -> set[Pair]:
        """List the pairs of a row."""
        return set(combinations(sorted(row.items()), 2))

    def train(self, row: Row) -> None:
        """Count the pairs of a row that trained."""
        pairs = self.pairs(row)
        self.trained |= pairs
        self.open -= pairs

    def refuse(self, items: Iterable[tuple[str, int]]) -> None:
        """Learn a refused combination."""
        found = tuple(sorted(items))
        self.refused.add(found)
        if len(found) == 2:
            self.open.discard(found)
        if len(found) == 1:
            self.open = {pair for pair in self.open if found[0] not in pair}

    def allow(self, found: Pair) -> None:
        """Forget a refused combination, and cover its pairs like others."""
        self.refused.discard(found)
        if len(found) <= 2:
            whole = {pair for pair in self.total if set(found) <= set(pair)}
            self.open |= {pair for pair in whole - self.trained if pair not in self.refused}

    def allowed(self, row: Row) -> bool:
        """Return whether a (partial) row holds no combination that is known to be refused."""
        return not any(all(row.get(a) == i for a, i in each) for each in self.refused)

    def next(self) -> Row | None:
        """Return a row that covers open pairs; None when all that can be covered are."""
        while self.open:
            first = min(self.open, key=lambda pair: (self.random.random(), pair))
            rows = [row for _ in range(CANDIDATES) if (row := self._row(first))]
            if rows:
                return max(rows, key=lambda row: len(self.pairs(row) & self.open))
            self.open.discard(first)
            self.impossible.add(first)
        return None

    def _row(self, first: Pair) -> Row | None:
        row = dict(first)
        rest = [axis for axis in self.axes if axis not in row]
        self.random.shuffle(rest)
        return self._filled(row, rest)

    def _filled(self, row: Row, rest: Sequence[str]) -> Row | None:
        """Fill in the axes, those with most new pairs first; step back where none is allowed."""
        if not self.allowed(row):
            return None
        if not rest:
            return row
        axis, others = rest[0], rest[1:]
        scored = sorted(
            range(self.axes[axis]),
            key=lambda i: (-self._gain(row, axis, i), self.random.random()),
        )
        for value in scored:
            filled = self._filled({**row, axis: value}, others)
            if filled is not None:
                return filled
        return None

    def _gain(self, row: Row, axis: str, value: int) -> int:
        new = (axis, value)
        return sum(tuple(sorted((new, item))) in self.open for item in row.items())

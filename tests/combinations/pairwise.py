"""Greedy pairwise covering arrays that learn from outcomes which pairs are refused.

After AETG (Cohen et al. 1997, IEEE TSE 23(7)): each row starts from a pair that no row covers yet
and adds, one axis at a time, the value that covers most. Unlike AETG no constraints are declared:
a refused row teaches the combination that caused it, and its other pairs are tried again.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

Row = dict[str, int]
"""The index of the value of each axis."""
Pair = tuple[tuple[str, int], ...]
"""One, two or more (axis, index of its value), sorted."""
Rank = Callable[[Row, str, int], tuple[float, float]]
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
        self.reserved: list[set[Pair]] = []
        """Pairs of rows that are running."""
        self.failed: set[Pair] = set()
        """Combinations that fail: no further row holds one, and their pairs stay uncovered."""
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

    def allow(self, items: Pair) -> None:
        """Forget a refused combination, and cover the pairs that it made impossible."""
        self.refused.discard(items)
        covered = self.trained | self.refused
        blocked = {pair for pair in self.total if len(items) == 1 and items[0] in pair}
        self.open |= (blocked | self.impossible | ({items} & self.total)) - covered
        self.impossible.clear()

    def allowed(self, row: Row, but: Pair = ()) -> bool:
        """Return whether a (partial) row holds no combination that is refused, except `but`."""
        return not any(
            all(row.get(a) == i for a, i in each)
            for each in (*self.refused, *self.failed)
            if each != but
        )

    def next(self) -> Row | None:
        """Return a row that covers open pairs, and reserve them until `release`; None for none."""
        reserved = set().union(*self.reserved)
        while available := self.open - reserved:
            first = self.random.choice(sorted(available))
            rows = [row for _ in range(CANDIDATES) if (row := self._row(first))]
            if rows:
                best = max(rows, key=lambda row: len(self.pairs(row) & available))
                self.reserved.append(self.pairs(best))
                return best
            self.open.discard(first)
            self.impossible.add(first)
        return None

    def release(self, row: Row) -> None:
        """Release the pairs of a row that has ended, whatever its outcome."""
        self.reserved.remove(self.pairs(row))

    def beside(self, items: Pair) -> Row | None:
        """Return a row with a refused combination and no other one; None where there is none.

        Its other values differ from the plain ones where they can.
        """
        return self._filled(
            dict(items),
            self._order(dict(items)),
            but=items,
            rank=lambda _, __, i: (i == 0, self.random.random()),
        )

    def uncovered(self) -> set[Pair]:
        """List the pairs that are neither trained nor refused, but for combinations that fail."""
        failed, self.failed = self.failed, set()
        blocked = {pair for pair in self.impossible if self._row(pair) is not None}
        self.failed = failed
        return self.open | blocked

    def _row(self, first: Pair) -> Row | None:
        row = dict(first)
        return self._filled(row, self._order(row))

    def _order(self, row: Row) -> list[str]:
        """Order the axes to fill in: those in most refused combinations first, the rest by chance.

        A conflict of theirs then shows before the other axes are filled in; in any other order the
        search for a row that does not exist takes a time that is exponential in the axes.
        """
        counts = Counter(axis for items in (*self.refused, *self.failed) for axis, _ in items)
        noise = {axis: self.random.uniform(0.7, 1.3) for axis in self.axes}
        rest = [axis for axis in self.axes if axis not in row]
        return sorted(rest, key=lambda axis: (-counts[axis] * noise[axis], noise[axis]))

    def _filled(
        self, row: Row, rest: Sequence[str], but: Pair = (), rank: Rank | None = None
    ) -> Row | None:
        """Fill in the axes, best values first, and step back where none is allowed.

        Args:
            row: values that are fixed.
            rest: axes to fill in.
            but: refused combination that the row may hold.
            rank: sort key of an axis's value; by default, values with most open pairs come first.
        """
        if not self.allowed(row, but):
            return None
        if not rest:
            return row
        axis, others = rest[0], rest[1:]
        rank = rank or (lambda row, axis, i: (-self._gain(row, axis, i), self.random.random()))
        for value in sorted(range(self.axes[axis]), key=lambda i: rank(row, axis, i)):
            filled = self._filled({**row, axis: value}, others, but, rank)
            if filled is not None:
                return filled
        return None

    def _gain(self, row: Row, axis: str, value: int) -> int:
        new = (axis, value)
        return sum(tuple(sorted((new, item))) in self.open for item in row.items())

"""Greedy pairwise covering arrays that learn from outcomes which pairs are refused.

After AETG (Cohen et al. 1997, IEEE TSE 23(7)): each row starts from a pair that no row covers yet
and adds, one axis at a time, the value that covers most. Unlike in AETG, constraints are not
declared: a refused row reveals the combination that caused it, and its other pairs are retried.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

Row = dict[str, int]
"""Index of the value of each axis."""
Pair = tuple[tuple[str, int], ...]
"""Sorted tuple of one or more (axis, index of its value)."""
Rank = Callable[[Row, str, int], tuple[float, float]]
CANDIDATES = 8


class Array:
    """Uncovered pairs of values, and rows that cover them.

    Args:
        axes: number of values of each axis.
        refused: combinations known to be refused.
        seed: random seed of tie breaks.
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
        """Failing combinations: no later row contains one, and their pairs stay uncovered."""
        self.impossible: set[Pair] = set()
        """Pairs in no allowed row: they are, or force, a refused combination."""
        self.refused: set[Pair] = set()
        for combination in refused:
            self.refuse(combination)

    def pairs(self, row: Row) -> set[Pair]:
        """Pairs of a row."""
        return set(combinations(sorted(row.items()), 2))

    def train(self, row: Row) -> None:
        """Count the pairs of a row that trained."""
        pairs = self.pairs(row)
        self.trained |= pairs
        self.open -= pairs

    def refuse(self, items: Iterable[tuple[str, int]]) -> None:
        """Add a refused combination."""
        combination = tuple(sorted(items))
        self.refused.add(combination)
        if len(combination) == 2:
            self.open.discard(combination)
        if len(combination) == 1:
            self.open = {pair for pair in self.open if combination[0] not in pair}

    def allow(self, items: Pair) -> None:
        """Remove a refused combination, and reopen the pairs that it made impossible."""
        self.refused.discard(items)
        covered = self.trained | self.refused
        blocked = {pair for pair in self.total if len(items) == 1 and items[0] in pair}
        self.open |= (blocked | self.impossible | ({items} & self.total)) - covered
        self.impossible.clear()

    def allowed(self, row: Row, ignored: Pair = ()) -> bool:
        """Whether a (partial) row contains no refused or failing combination except `ignored`."""
        return not any(
            all(row.get(a) == i for a, i in combination)
            for combination in (*self.refused, *self.failed)
            if combination != ignored
        )

    def next(self) -> Row | None:
        """Return a row that covers open pairs, reserved until `release`; None if none is left."""
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
        """Release the pairs of a finished row, regardless of its outcome."""
        self.reserved.remove(self.pairs(row))

    def row_with(self, items: Pair) -> Row | None:
        """Return a row whose only refused combination is `items`; None if impossible.

        Its other values differ from the defaults if possible.
        """
        return self._filled(
            dict(items),
            self._order(dict(items)),
            ignored=items,
            rank=lambda _, __, i: (i == 0, self.random.random()),
        )

    def uncovered(self) -> set[Pair]:
        """Pairs that are neither trained nor refused, ignoring failing combinations."""
        failed, self.failed = self.failed, set()
        blocked = {pair for pair in self.impossible if self._row(pair) is not None}
        self.failed = failed
        return self.open | blocked

    def _row(self, first: Pair) -> Row | None:
        row = dict(first)
        return self._filled(row, self._order(row))

    def _order(self, row: Row) -> list[str]:
        """Order the free axes: most refused combinations first, ties at random.

        Conflicts then appear before the other axes are filled in. In any other order, the search
        for a row that does not exist takes time exponential in the number of axes.
        """
        counts = Counter(axis for items in (*self.refused, *self.failed) for axis, _ in items)
        noise = {axis: self.random.uniform(0.7, 1.3) for axis in self.axes}
        free_axes = [axis for axis in self.axes if axis not in row]
        return sorted(free_axes, key=lambda axis: (-counts[axis] * noise[axis], noise[axis]))

    def _filled(
        self, row: Row, free_axes: Sequence[str], ignored: Pair = (), rank: Rank | None = None
    ) -> Row | None:
        """Fill in the free axes, best values first, and backtrack if none is allowed.

        Args:
            row: fixed values.
            free_axes: axes to fill in.
            ignored: refused combination that the row may contain.
            rank: sort key of an axis's value; default: most open pairs first.
        """
        if not self.allowed(row, ignored):
            return None
        if not free_axes:
            return row
        axis, remaining = free_axes[0], free_axes[1:]
        rank = rank or (lambda row, axis, i: (-self._gain(row, axis, i), self.random.random()))
        for value in sorted(range(self.axes[axis]), key=lambda i: rank(row, axis, i)):
            filled = self._filled({**row, axis: value}, remaining, ignored, rank)
            if filled is not None:
                return filled
        return None

    def _gain(self, row: Row, axis: str, value: int) -> int:
        new = (axis, value)
        return sum(tuple(sorted((new, item))) in self.open for item in row.items())

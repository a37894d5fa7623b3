"""Balance of attention over context ranks on packed rows: "balanced" compared with "zig-zag".

    python packages/ms-parallel/benchmarks/context.py --batches 32 --timed 4

Rows are packed with documents of random lengths (log-normal, median 245 tokens, 1% above 5,000), as
in corpora. "seen" counts the keys visible to each rank's queries, "computed" the scores that its
attention computes, including masked ones, and "measured" is the CPU time of that attention, forward
and backward, on one thread. Figures are the slowest rank's value over the mean of all ranks: the
maximum over batches for "seen" and "computed", the median for "measured".
"""

import argparse
import json
from collections.abc import Sequence
from statistics import median
from time import process_time

import torch
from torch import Tensor

from ms_parallel import operators
from ms_parallel.split.context.assignment import (
    Assignment,
    assign,
    document_starts,
    query_ranges,
    token_costs,
)
from ms_parallel.split.context.kinds import CONTEXT_BALANCES
from ms_parallel.split.context.rows import attend_ranges

LIMIT = 1.1
"""Limit for "seen" and "computed" of "balanced"; times also contain the noise of the machine."""
ROWS, LENGTH, HEADS, WIDTH = 2, 4096, 4, 64
TURNS = 40
"""Repetitions; the fastest counts, as other load only adds time. With 12 repetitions the slowest of
eight ranks was up to 1.16 of the mean on batches where 40 give 1.03."""
CASES = [(ranks, window) for ranks in (2, 4, 8) for window in (None, 1024)]


def draw(seed: int) -> Tensor:
    """Random document ids (ROWS, LENGTH)."""
    generator = torch.Generator().manual_seed(seed)
    documents = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    for row in documents:
        at, document_id = 0, 0
        while at < LENGTH:
            size = max(1, int(torch.empty(()).log_normal_(5.5, 1.3, generator=generator)))
            row[at : at + size] = document_id
            at, document_id = at + size, document_id + 1
    return documents


def seconds(
    assignment: Assignment, documents: Tensor, ranks: int, window: int | None
) -> list[float]:
    """CPU seconds of each rank's attention."""
    starts = document_starts(documents, *documents.shape)
    k, v = (torch.randn(ROWS, LENGTH, HEADS, WIDTH, requires_grad=True) for _ in range(2))
    cpu_seconds = []
    for part in assignment.order.chunk(ranks, 1):
        pieces = query_ranges(part, starts)
        q = torch.randn(ROWS, LENGTH // ranks, HEADS, WIDTH, requires_grad=True)
        start = process_time()
        out = attend_ranges(operators.attention, q, k, v, pieces, documents, window=window)
        out.sum().backward()
        cpu_seconds.append(process_time() - start)
    return cpu_seconds


def scores(assignment: Assignment, starts: Tensor, ranks: int, window: int | None) -> list[int]:
    """Number of scores that each rank's attention computes."""
    counts = []
    for part in assignment.order.chunk(ranks, 1):
        pieces = query_ranges(part, starts)
        counts.append(sum((p.stop - p.start) * (p.stop - p.first_seen(window)) for p in pieces))
    return counts


def above_mean(values: Sequence[float]) -> float:
    """Maximum over mean."""
    return max(values) * len(values) / sum(values)


def compare(ranks: int, window: int | None, batches: int, timed: int) -> dict[str, object]:
    """Figures of both assignments."""
    result: dict[str, object] = {"context": ranks, "window": window}
    for name in CONTEXT_BALANCES:
        seen, computed, measured = [], [], []
        for seed in range(batches):
            documents = draw(seed)
            starts = document_starts(documents, *documents.shape)
            assignment = assign(token_costs(starts, {window: 1}), ranks, name)
            seen.append(assignment.imbalance)
            computed.append(above_mean(scores(assignment, starts, ranks, window)))
            if seed < timed:
                turns = [seconds(assignment, documents, ranks, window) for _ in range(TURNS)]
                measured.append(above_mean([min(times) for times in zip(*turns, strict=True)]))
        result |= {f"seen {name}": round(max(seen), 3), f"computed {name}": round(max(computed), 3)}
        if measured:
            result[f"measured {name}"] = round(median(measured), 3)
    return result


def main() -> int:
    """Print a line per case; exit with 1 if ours exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--timed", type=int, default=4, help="number of batches to time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    over = False
    for ranks, window in CASES:
        result = compare(ranks, window, arguments.batches, arguments.timed)
        print(json.dumps(result), flush=True)
        over |= any(float(str(result[f"{key} balanced"])) > LIMIT for key in ("seen", "computed"))
    return int(over)


if __name__ == "__main__":
    raise SystemExit(main())

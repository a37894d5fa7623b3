"""Pairwise tests of option, optional argument, dtype, layout, sizes and backend against float64.

    python packages/ms-kernels/tests/combinations.py                        # the full array
    python packages/ms-kernels/tests/combinations.py --sample 60 --seed 3   # some of its rows

The factors of an operator come from its contract and its implementations, so a new operator,
option, argument or backend is covered without a change here. Triton kernels run interpreted, in
a separate process.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ms_kernels import ArgumentError
from ms_kernels.checking import compare
from ms_kernels.contracts.contract import Contract
from ms_kernels.core.choice import obstacle_to
from ms_kernels.core.dispatch import describe_call
from ms_kernels.operators import OPERATORS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "float64": torch.float64}  # fmt: skip
LAYOUTS = ("contiguous", "strided", "expanded")
Row = dict[str, int]
"""The level of each factor, by name."""


def factors_of(operator: str) -> dict[str, list[Any]]:
    """Return the levels of each factor of an operator's calls."""
    contract = OPERATORS[operator].contract
    optional = [argument.name for argument in contract.arguments if argument.optional]
    return {
        "backend": [
            impl.backend
            for impl in OPERATORS[operator].implementations
            if impl.backend == "triton" or impl.devices is None or "cpu" in impl.devices
        ],
        "dtype": list(DTYPES),
        "layout": list(LAYOUTS),
        "sizes": [({}, {}), *((variant.options, variant.dims) for variant in contract.variants)],
        **{f"argument {name}": [True, False] for name in optional},
        **{
            f"option {option.name}": [option.default, *option.trials] for option in contract.options
        },
    }


def pairs_of(row: Row) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    """Return the pairs of levels that a row covers."""
    return set(itertools.combinations(row.items(), 2))


def covering_array(factors: Mapping[str, list[Any]], seed: int = 0) -> list[Row]:
    """Return a greedily small set of rows that covers every pair of levels of two factors."""
    chance = random.Random(seed)
    names = list(factors)
    missing = {
        ((first, i), (second, j))
        for first, second in itertools.combinations(names, 2)
        for i in range(len(factors[first]))
        for j in range(len(factors[second]))
    }
    rows: list[Row] = []
    while missing:
        best: Row = {}
        for _ in range(20):
            row = {name: chance.randrange(len(factors[name])) for name in names}
            row.update(chance.choice(sorted(missing)))
            if not best or len(pairs_of(row) & missing) > len(pairs_of(best) & missing):
                best = row
        rows.append(best)
        missing -= pairs_of(best)
    return rows


def with_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor of the same shape in a layout; "expanded" repeats the first item."""
    if layout == "strided" and tensor.ndim:
        wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
        wide[..., ::2] = tensor
        return wide[..., ::2]
    # Index tensors keep their values: repeated positions or counts would be invalid arguments.
    if layout == "expanded" and tensor.is_floating_point() and tensor.shape[:1] > (1,):
        return tensor[:1].expand_as(tensor)
    return tensor


def run_row(operator: str, row: Row) -> tuple[str, str]:
    """Run one row; return its outcome (held, refused or wrong) and the reason."""
    factors = factors_of(operator)
    level = {name: factors[name][index] for name, index in row.items()}
    contract: Contract = OPERATORS[operator].contract
    forced, dims = level["sizes"]
    dtype = DTYPES[level["dtype"]]
    example = contract.draw(dims, dtype=dtype)
    tensors = [
        with_layout(tensor, level["layout"]) if level.get(f"argument {name}", True) else None
        for name, tensor in example.items()
    ]
    options = tuple(
        forced.get(option.name, level[f"option {option.name}"]) for option in contract.options
    )
    implementation = next(
        impl for impl in OPERATORS[operator].implementations if impl.backend == level["backend"]
    )
    try:
        call = describe_call(contract, tuple(tensors), options)
        contract.bind(call)
    except ArgumentError as error:
        return "refused", str(error)
    kernels = level["backend"] == "triton"
    if kernels and implementation.dtypes and dtype not in implementation.dtypes:
        return "refused", f"triton has no {level['dtype']}"
    obstacle = implementation.refuses(call) if kernels else obstacle_to(implementation, call)
    if obstacle is not None:
        return "refused", obstacle
    try:
        for part, ratio in compare(contract, implementation.run, tensors, options):
            if not ratio <= 1:
                return "wrong", f"{part} is off by {ratio:.3g} times the tolerance"
    except Exception as error:  # any error from torch or Triton is a defect of ours
        return "wrong", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "held", ""


def main() -> int:
    """Run the array or a sample; return 1 if a row is wrong or nothing was compared."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sample", type=int, help="number of rows to run instead of all")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample")
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows:  # the process of Triton's interpreter
        from interpreter import correct_bfloat16

        correct_bfloat16()
        for line in Path(options.rows).read_text().splitlines():
            operator, row = json.loads(line)
            sys.stdout.write(json.dumps(run_row(operator, row)) + "\n")
            sys.stdout.flush()
        return 0
    start = time.monotonic()
    arrays = {operator: covering_array(factors_of(operator)) for operator in OPERATORS}
    jobs = [(operator, row) for operator, rows in arrays.items() for row in rows]
    pairs = sum(len(set().union(*map(pairs_of, rows))) for rows in arrays.values())
    if options.sample is not None:
        jobs = random.Random(options.seed).sample(jobs, min(options.sample, len(jobs)))
    interpreted = [job for job in jobs if backend_of(*job) == "triton"]
    jobs = [job for job in jobs if backend_of(*job) != "triton"]
    outcomes = [(*job, *run_row(*job)) for job in jobs]
    outcomes += [
        (*job, *result) for job, result in zip(interpreted, interpret(interpreted), strict=True)
    ]
    for operator, row, outcome, why in outcomes:
        if outcome == "wrong":
            factors = factors_of(operator)
            levels = {name: factors[name][index] for name, index in row.items()}
            sys.stdout.write(f"WRONG {operator} {levels}: {why}\n")
    counts = {
        outcome: sum(result[2] == outcome for result in outcomes)
        for outcome in ("held", "refused", "wrong")
    }
    sys.stdout.write(
        f"{len(OPERATORS)} operators, {pairs} pairs in the full array; {len(outcomes)} runs: "
        + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        + f"; {time.monotonic() - start:.0f} s\n"
    )
    return 1 if counts["wrong"] or not counts["held"] else 0


def backend_of(operator: str, row: Row) -> str:
    """Return the backend of a row."""
    backend: str = factors_of(operator)["backend"][row["backend"]]
    return backend


def interpret(jobs: list[tuple[str, Row]]) -> list[list[str]]:
    """Run rows of Triton kernels in a process with Triton's interpreter."""
    if not jobs:
        return []
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"combinations-{os.getpid()}.jsonl"
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    try:
        process = subprocess.run(
            [sys.executable, __file__, "--rows", str(path)],
            env={**os.environ, "TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        path.unlink()
    outcomes = [json.loads(line) for line in process.stdout.splitlines()]
    missing = len(jobs) - len(outcomes)
    return outcomes + [["wrong", f"the process ended with code {process.returncode}"]] * missing


if __name__ == "__main__":
    sys.exit(main())

"""`bench`: time implementations, or create a chip's tuning table."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ms_kernels.commands.arguments import available_device, dtype_of
from ms_kernels.core.chips import chip_of
from ms_kernels.core.choice import obstacle_to
from ms_kernels.core.dispatch import describe_call
from ms_kernels.core.tables import write_table
from ms_kernels.errors import TableError
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS
from ms_kernels.selection import check_backends, contract_of
from ms_kernels.tuning.measure import one_pass, time_interleaved
from ms_kernels.tuning.tuner import largest, tune


def bench(options: argparse.Namespace) -> int:
    """Time implementations, or create a tuning table."""
    for name in options.operator or ():
        contract_of(name)
    check_backends(options.backend or ())
    device = available_device(options.device)
    if options.tune:
        path = options.out or Path(f"{chip_of(device)}.json")
        if not path.absolute().parent.is_dir():  # fail before measuring for an hour
            raise TableError(f"{path} cannot be written: the folder does not exist")
        table = tune(
            device,
            operators=options.operator,
            on_progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
        write_table(table, path)
        print(json.dumps({"table": str(path)}) if options.json else f"wrote {path}")
        return 0
    rows = list(_timings(options, device))
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        sizes = " ".join(f"{name}={size}" for name, size in row["sizes"].items())
        both = f"{1e3 * row['both_s']:9.3f}" if row["both_s"] is not None else "       --"
        print(
            f"{row['operator']:<21} {row['backend']:<10} {1e3 * row['forward_s']:9.3f} ms forward"
            f" {both} ms with backward {row['forward_bytes_per_s'] / 1e9:8.1f} GB/s"
            f" {row['forward_flops_per_s'] / 1e9:9.1f} GFLOP/s   {sizes}"
        )
    return 0


def _timings(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the times of every backend at the largest size that the tuner measures."""
    dtype = dtype_of(options.dtype)
    for contract in CONTRACTS.values():
        if options.operator and contract.name not in options.operator:
            continue
        dims = largest(contract, device)
        tensors = contract.draw(dims, dtype=dtype, device=device)
        inputs = tuple(
            None if argument.optional else tensors[argument.name] for argument in contract.arguments
        )
        call = describe_call(contract, inputs, contract.defaults)
        runs = {
            implementation.backend: implementation.run
            for implementation in IMPLEMENTATIONS
            if implementation.operator == contract.name
            and (not options.backend or implementation.backend in options.backend)
            and obstacle_to(implementation, call) is None
        }
        times = [
            time_interleaved(
                {
                    name: one_pass(contract, run, inputs, contract.defaults, backward=backward)
                    for name, run in runs.items()
                },
                device,
            )
            for backward in (False, True)
        ]
        work = contract.forward(dims, dtype.itemsize)
        differentiable = any(argument.differentiable for argument in contract.arguments)
        for name in runs:
            yield {
                "operator": contract.name,
                "backend": name,
                "sizes": dims,
                "forward_s": times[0][name],
                "both_s": times[1][name] if differentiable else None,
                "forward_bytes_per_s": work.size_bytes / times[0][name],
                "forward_flops_per_s": work.flops / times[0][name],
            }

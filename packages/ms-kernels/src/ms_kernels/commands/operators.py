"""`list` and `explain`: the available operators, and the implementation that a call gets."""

import argparse
import json
from contextlib import nullcontext
from typing import Any

import msgspec

from ms_kernels.commands.arguments import device_of, dtype_of, read_details
from ms_kernels.contracts.contract import Contract
from ms_kernels.core.chips import chip_of
from ms_kernels.core.choice import with_launches
from ms_kernels.core.dispatch import decide
from ms_kernels.core.tables import chips
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS
from ms_kernels.selection import contract_of, use_backend


def list_operators(options: argparse.Namespace) -> int:
    """Print all operators and their implementations."""
    facts = [_facts(contract) for contract in CONTRACTS.values()]
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    for fact in facts:
        arguments = ", ".join(f"{name} ({dims})" for name, dims in fact["arguments"].items())
        print(f"{fact['operator']}: {fact['summary']}")
        print(f"    {arguments} -> {fact['returns']}")
        for backend in fact["backends"]:
            print(f"    {backend['backend']:<10} {backend['devices']:<4} {backend['merit']}")
    return 0


def _facts(contract: Contract) -> dict[str, Any]:
    """Return an operator's contract and implementations as JSON-serializable values."""
    return {
        "operator": contract.name,
        "summary": contract.summary,
        "arguments": {argument.name: " ".join(argument.dims) for argument in contract.arguments},
        "options": {option.name: option.default for option in contract.options},
        "returns": contract.returns,
        "backends": [
            {
                "backend": choice.backend,
                "devices": " ".join(sorted(choice.devices)) if choice.devices else "any",
                "version": choice.version,
                "merit": choice.merit,
            }
            for choice in IMPLEMENTATIONS
            if choice.operator == contract.name
        ],
    }


def explain(options: argparse.Namespace) -> int:
    """Print the implementation that a call gets, and the reasons."""
    contract = contract_of(options.operator)
    sizes, settings, requested = read_details(contract, options.details)
    optional = [argument.name for argument in contract.arguments if argument.optional]
    device = device_of(options.device)
    call = contract.call(
        sizes,
        dtype=dtype_of(options.dtype),
        device=device,
        chip=options.chip or chip_of(device),
        options=settings,
        without=[name for name in optional if name not in requested],
    )
    dims = contract.bind(call)
    with use_backend(*options.backend) if options.backend else nullcontext():
        choice = with_launches(decide(call), call, dims)
    works = {
        "forward": contract.forward(dims, call.dtype.itemsize),
        "backward": contract.backward(dims, call.dtype.itemsize),
    }
    if options.json:
        fact = {
            "operator": choice.operator,
            "device": choice.device,
            "chip": call.chip,
            "table": call.chip in chips(),
            "dtype": choice.dtype,
            "sizes": dims,
            "backend": choice.backend,
            "verdicts": msgspec.to_builtins(choice.verdicts),
            "launches": msgspec.to_builtins(choice.launches),
            "least_work": {name: work._asdict() for name, work in works.items()},
        }
        print(json.dumps(fact, indent=2))
        return 0
    at = " ".join(f"{name}={size}" for name, size in dims.items())
    print(f"{choice.operator} on {choice.device} in {choice.dtype}, {at}")
    if call.chip not in chips():
        print(f"  no tuning table for {call.chip}: built-in thresholds apply")
    for verdict in choice.verdicts:
        print(f"  {'->' if verdict.taken else '  '} {verdict.backend:<10} {verdict.reason}")
    for launch in choice.launches:
        print(f"  {launch}")
    for name, work in works.items():
        mib = work.size_bytes / 2**20
        print(f"  {name}: at least {mib:.4g} MiB moved and {work.flops / 1e9:.4g} GFLOP")
    return 0

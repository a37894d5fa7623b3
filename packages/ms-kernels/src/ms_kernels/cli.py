"""The command `ms-kernels`: which operators and backends there are, why one is taken, proofs."""

import argparse
import ast
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ms_kernels.check import Finding, check
from ms_kernels.contract import FLOATING, Contract, describe
from ms_kernels.dispatch import BACKENDS, CONTRACTS, IMPLEMENTATIONS, decide, use_backend
from ms_kernels.errors import ArgumentError, BackendError, KernelError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 a check failed, 2 bad input."""
    parser = _parser()
    # argparse finds no positional arguments after options where there are subcommands.
    options, rest = parser.parse_known_args(arguments)
    if any(each.startswith("-") for each in rest) or (rest and "details" not in options):
        parser.error(f"not understood: {' '.join(rest)}; --help shows what is")
    if rest:
        options.details += rest
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except KernelError as error:
        print(f"ms-kernels: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ms-kernels",
        description="Operators, their backends, and the proof that they agree.",
        epilog="example: ms-kernels explain attention --dtype bfloat16 Sq=1 Sk=4096",
    )
    commands = parser.add_subparsers(required=True, metavar="list | explain | check")
    listing = commands.add_parser(
        "list",
        help="show every operator and what implements it",
        epilog="example: ms-kernels list --json",
    )
    listing.set_defaults(run=_list)
    why = commands.add_parser(
        "explain",
        help="show which backend a call gets, why, and the least work it must do",
        epilog="example: ms-kernels explain attention Sq=1 Sk=4096 window=1024 documents",
    )
    why.add_argument("operator", help=f"one of: {', '.join(CONTRACTS)}")
    why.add_argument(
        "details",
        nargs="*",
        metavar="NAME[=VALUE]",
        help="a size or an option that differs from the usual, or an optional argument",
    )
    why.set_defaults(run=_explain)
    proof = commands.add_parser(
        "check",
        help="compare backends with the truth in float64, forward and backward",
        epilog="example: ms-kernels check --operator attention --dtype bfloat16",
    )
    proof.add_argument("--operator", action="append", help="only this one; may be repeated")
    proof.set_defaults(run=_check)
    for command in (why, proof):
        command.add_argument("--backend", action="append", help="only this one; may be repeated")
        command.add_argument("--device", default="cpu", help="such as cpu, cuda or npu")
        command.add_argument("--dtype", default="float32", help="such as bfloat16")
    for command in (listing, why, proof):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _list(options: argparse.Namespace) -> int:
    facts = [_facts(contract) for contract in CONTRACTS.values()]
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    for fact in facts:
        arguments = ", ".join(f"{name} ({dims})" for name, dims in fact["arguments"].items())
        print(f"{fact['operator']}: {fact['summary']}")
        print(f"    {arguments} -> {fact['returns']}")
        for each in fact["backends"]:
            print(f"    {each['backend']:<10} {each['devices']:<4} {each['merit']}")
    return 0


def _facts(contract: Contract) -> dict[str, Any]:
    """Say what an operator is and what implements it, for JSON."""
    return {
        "operator": contract.name,
        "summary": contract.summary,
        "arguments": {each.name: " ".join(each.dims) for each in contract.arguments},
        "options": {each.name: each.default for each in contract.options},
        "returns": contract.returns,
        "backends": [
            {
                "backend": each.backend,
                "devices": " ".join(sorted(each.devices)) if each.devices else "any",
                "version": each.version,
                "merit": each.merit,
            }
            for each in IMPLEMENTATIONS
            if each.operator == contract.name
        ],
    }


def _explain(options: argparse.Namespace) -> int:
    contract = _contract(options.operator)
    sizes, settings, wanted = _details(contract, options.details)
    without = [each.name for each in contract.arguments if each.optional]
    call = contract.call(
        sizes,
        dtype=_dtype(options.dtype),
        device=_device(options.device),
        options=settings,
        without=[name for name in without if name not in wanted],
    )
    dims = contract.bind(call)
    with use_backend(*options.backend) if options.backend else nullcontext():
        choice = decide(call)
    works = {
        "forward": contract.forward(dims, call.dtype.itemsize),
        "backward": contract.backward(dims, call.dtype.itemsize),
    }
    if options.json:
        fact = {
            "operator": choice.operator,
            "device": choice.device,
            "dtype": choice.dtype,
            "sizes": dims,
            "backend": choice.backend,
            "verdicts": [
                {"backend": each.backend, "taken": each.taken, "reason": each.reason}
                for each in choice.verdicts
            ],
            "least_work": {name: work._asdict() for name, work in works.items()},
        }
        print(json.dumps(fact, indent=2))
        return 0
    at = " ".join(f"{name}={size}" for name, size in dims.items())
    print(f"{choice.operator} on {choice.device} in {choice.dtype}, {at}")
    for verdict in choice.verdicts:
        print(f"  {'->' if verdict.taken else '  '} {verdict.backend:<10} {verdict.reason}")
    for name, work in works.items():
        mib = work.size_bytes / 2**20
        print(f"  {name}: at least {mib:.4g} MiB moved and {work.flops / 1e9:.4g} GFLOP")
    return 0


def _check(options: argparse.Namespace) -> int:
    for name in options.operator or ():
        _contract(name)
    for name in options.backend or ():
        if name not in BACKENDS:
            raise BackendError(f"there is no backend {name!r}; there are {', '.join(BACKENDS)}")
    device = _device(options.device)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BackendError(f"device {device} is not available here: {reason}") from error
    findings = check(options.operator, options.backend, device=device, dtype=_dtype(options.dtype))
    if options.json:
        print(json.dumps([_row(each) for each in findings], indent=2))
    else:
        _print_findings(findings)
    # A check that ran nothing has not held.
    run = [each for each in findings if not each.reason]
    return 0 if run and all(each.holds for each in run) else 1


def _row(finding: Finding) -> dict[str, Any]:
    names = ("operator", "backend", "device", "dtype", "options", "part", "share", "reason")
    return {**{name: getattr(finding, name) for name in names}, "holds": finding.holds}


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print a line for each trial's worst part, then how many held."""
    worst: dict[tuple[str, str, str], Finding] = {}
    for each in findings:
        key = (each.operator, each.backend, each.options)
        if key not in worst or not each.share <= worst[key].share:
            worst[key] = each
    for (operator, backend, settings), each in worst.items():
        told = each.reason or f"{each.share:6.1%} of the tolerance, at worst, in {each.part}"
        mark = "  --" if each.reason else "  ok" if each.holds else "FAIL"
        print(f"{mark}  {operator:<21} {backend:<10} {settings or 'defaults':<24} {told}")
    run = [each for each in findings if not each.reason]
    print(f"{sum(each.holds for each in run)} of {len(run)} results and gradients hold")


def _contract(name: str) -> Contract:
    if name not in CONTRACTS:
        raise BackendError(f"there is no operator {name!r}; there are {', '.join(CONTRACTS)}")
    return CONTRACTS[name]


def _details(
    contract: Contract, details: Sequence[str]
) -> tuple[dict[str, int], dict[str, object], set[str]]:
    """Sort NAME[=VALUE] into sizes, options and optional arguments."""
    sizes: dict[str, int] = {}
    settings: dict[str, object] = {}
    wanted: set[str] = set()
    spare = [each.name for each in contract.arguments if each.optional]
    known = [each.name for each in contract.options]
    for detail in details:
        name, _, text = detail.partition("=")
        if name in contract.example and text.isdecimal():
            sizes[name] = int(text)
        elif name in known and text:
            settings[name] = _value(text)
        elif name in spare and not text:
            wanted.add(name)
        else:
            sizes_fit = ", ".join(f"{each}=SIZE" for each in contract.example)
            options_fit = ", ".join([f"{each}=VALUE" for each in known] + spare)
            fits = f"one of {sizes_fit}{', ' if options_fit else ''}{options_fit}"
            raise ArgumentError(contract.name, detail, "not understood", fits)
    return sizes, settings, wanted


def _value(text: str) -> object:
    try:
        value: object = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    return value


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if found not in FLOATING:
        fits = ", ".join(describe(each) for each in FLOATING)
        raise BackendError(f"no operator is made for dtype {name!r}; there are {fits}")
    assert isinstance(found, torch.dtype)
    return found


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise BackendError(f"there is no device {name!r}; there are cpu, cuda, npu") from error

"""The command `ms-kernels`: which operators and backends there are, why one is taken, proofs."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress as RichProgress

from ms_kernels.aot import TARGETS, build
from ms_kernels.aot.building import Progress
from ms_kernels.aot.manifest import read_manifest
from ms_kernels.aot.workers import cores
from ms_kernels.arguments import (
    check_backends,
    contract_of,
    device_of,
    dtype_of,
    present,
    read_details,
)  # fmt: skip
from ms_kernels.check import Finding, check
from ms_kernels.contract import Contract
from ms_kernels.dispatch import (
    CONTRACTS,
    IMPLEMENTATIONS,
    decide,
    describe_call,
    use_backend,
)
from ms_kernels.errors import KernelError, TableError
from ms_kernels.measure import in_turn, one_pass
from ms_kernels.registry import obstacle_to, with_launches
from ms_kernels.tuner import largest, tune
from ms_kernels.tuning import chip_of, chips, write_table

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
    commands = parser.add_subparsers(
        required=True, metavar="list | explain | check | bench | build"
    )
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
    timing = commands.add_parser(
        "bench",
        help="time every backend on this machine, or make its tuning table",
        epilog="example: ms-kernels bench --tune --device cuda --out sm_90.json",
    )
    timing.add_argument("--operator", action="append", help="only this one; may be repeated")
    timing.add_argument("--tune", action="store_true", help="make a tuning table of this chip")
    timing.add_argument("--out", type=Path, help="where to write the table; CHIP.json if left out")
    timing.set_defaults(run=_bench)
    making = commands.add_parser(
        "build",
        help="make the operator library of a chip that need not be here",
        epilog="example: ms-kernels build --target sm_90 --out lib/    makes lib/sm_90/",
    )
    making.add_argument("--target", required=True, help=f"one of: {', '.join(TARGETS)}")
    making.add_argument("--out", type=Path, required=True, help="where the target's folder goes")
    making.add_argument(
        "--only", action="append", default=[], help="kernels or operators whose names begin so"
    )
    making.add_argument(
        "--jobs", type=int, default=cores(), help="processes to compile in; one a core if left out"
    )
    making.set_defaults(run=_build)
    why.add_argument("--chip", help="whose tuning table counts, such as sm_90; this machine's")
    for command in (why, proof, timing):
        command.add_argument("--backend", action="append", help="only this one; may be repeated")
        command.add_argument("--device", default="cpu", help="such as cpu, cuda or npu")
        command.add_argument("--dtype", default="float32", help="such as bfloat16")
    for command in (listing, why, proof, timing, making):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _build(options: argparse.Namespace) -> int:
    if options.json:
        place = build(options.target, options.out, only=options.only, jobs=options.jobs)
    else:
        with _progress() as told:
            place = build(
                options.target, options.out, only=options.only, jobs=options.jobs, progress=told
            )
    manifest = read_manifest(place)
    if options.json:
        facts = {"folder": str(place), "manifest": msgspec.to_builtins(manifest)}
        print(json.dumps(facts, indent=2))
    else:
        size = sum(each.size_bytes for each in manifest.files) / 2**20
        print(f"{place}: {len(manifest.kernels)} for {manifest.target}, {size:.1f} MiB")
    return 0


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a bar on a terminal, and a line for each tenth of the work elsewhere."""
    if not sys.stderr.isatty():
        yield _tell_tenths
        return
    with RichProgress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("building")
        yield lambda what, done, count: bar.update(
            task, description=what, completed=done, total=count
        )


def _tell_tenths(what: str, done: int, count: int) -> None:
    if done == count or done % max(count // 10, 1) == 0:
        print(f"{done} of {count}: {what}", file=sys.stderr)


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
    contract = contract_of(options.operator)
    sizes, settings, wanted = read_details(contract, options.details)
    without = [each.name for each in contract.arguments if each.optional]
    device = device_of(options.device)
    call = contract.call(
        sizes,
        dtype=dtype_of(options.dtype),
        device=device,
        chip=options.chip or chip_of(device),
        options=settings,
        without=[name for name in without if name not in wanted],
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
            "verdicts": [
                {"backend": each.backend, "taken": each.taken, "reason": each.reason}
                for each in choice.verdicts
            ],
            "launches": msgspec.to_builtins(choice.launches),
            "least_work": {name: work._asdict() for name, work in works.items()},
        }
        print(json.dumps(fact, indent=2))
        return 0
    at = " ".join(f"{name}={size}" for name, size in dims.items())
    print(f"{choice.operator} on {choice.device} in {choice.dtype}, {at}")
    if call.chip not in chips():
        print(f"  there is no tuning table of {call.chip}: built-in thresholds count")
    for verdict in choice.verdicts:
        print(f"  {'->' if verdict.taken else '  '} {verdict.backend:<10} {verdict.reason}")
    for launch in choice.launches:
        print(f"  {launch}")
    for name, work in works.items():
        mib = work.size_bytes / 2**20
        print(f"  {name}: at least {mib:.4g} MiB moved and {work.flops / 1e9:.4g} GFLOP")
    return 0


def _check(options: argparse.Namespace) -> int:
    for name in options.operator or ():
        contract_of(name)
    check_backends(options.backend)
    device = present(options.device)
    findings = check(
        options.operator, options.backend, device=device, dtype=dtype_of(options.dtype)
    )
    if options.json:
        print(json.dumps([_row(each) for each in findings], indent=2))
    else:
        _print_findings(findings)
    # A check that ran nothing has not held.
    run = [each for each in findings if not each.reason]
    return 0 if run and all(each.holds for each in run) else 1


def _bench(options: argparse.Namespace) -> int:
    for name in options.operator or ():
        contract_of(name)
    check_backends(options.backend)
    device = present(options.device)
    if options.tune:
        path = options.out or Path(f"{chip_of(device)}.json")
        if not path.absolute().parent.is_dir():
            raise TableError(f"{path} cannot be written: there is no such folder")
        if path.is_dir():
            raise TableError(f"{path} cannot be written: it is a folder; name a file in it")
        table = tune(
            device,
            operators=options.operator,
            told=lambda line: print(line, file=sys.stderr, flush=True),
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
    """Yield the times of every backend at the largest size that a tuner tries."""
    dtype = dtype_of(options.dtype)
    for contract in CONTRACTS.values():
        if options.operator and contract.name not in options.operator:
            continue
        dims = largest(contract, device)
        drawn = contract.draw(dims, dtype=dtype, device=device)
        inputs = tuple(None if each.optional else drawn[each.name] for each in contract.arguments)
        call = describe_call(contract, inputs, contract.defaults)
        runs = {
            each.backend: each.run
            for each in IMPLEMENTATIONS
            if each.operator == contract.name
            and (not options.backend or each.backend in options.backend)
            and obstacle_to(each, call) is None
        }
        took = [
            in_turn(
                {
                    name: one_pass(contract, run, inputs, contract.defaults, backward=backward)
                    for name, run in runs.items()
                },
                device,
            )
            for backward in (False, True)
        ]
        work = contract.forward(dims, dtype.itemsize)
        differentiable = any(each.differentiable for each in contract.arguments)
        for name in runs:
            yield {
                "operator": contract.name,
                "backend": name,
                "sizes": dims,
                "forward_s": took[0][name],
                "both_s": took[1][name] if differentiable else None,
                "forward_bytes_per_s": work.size_bytes / took[0][name],
                "forward_flops_per_s": work.flops / took[0][name],
            }


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

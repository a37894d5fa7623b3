"""`check`: compares implementations with the reference in float64."""

import argparse
import json
from collections.abc import Sequence

from attrs import asdict

from ms_kernels.checking import Finding
from ms_kernels.checking import check as compare_all
from ms_kernels.commands.arguments import dtype_of, present
from ms_kernels.selection import check_backends, contract_of


def check(options: argparse.Namespace) -> int:
    """Compare implementations with the truth; return 1 where one is off."""
    for name in options.operator or ():
        contract_of(name)
    check_backends(options.backend or ())
    device = present(options.device)
    findings = compare_all(
        options.operator, options.backend, device=device, dtype=dtype_of(options.dtype)
    )
    if options.json:
        rows = [{**asdict(each), "holds": each.holds} for each in findings]
        print(json.dumps(rows, indent=2))
    else:
        _print_findings(findings)
    # A check that ran nothing has not held.
    run = [each for each in findings if not each.reason]
    return 0 if run and all(each.holds for each in run) else 1


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print a line for each trial's worst part, then how many held."""
    worst: dict[tuple[str, str, str], Finding] = {}
    for each in findings:
        key = (each.operator, each.backend, each.options)
        if key not in worst or not each.share <= worst[key].share:
            worst[key] = each
    for (operator, backend, settings), each in worst.items():
        result = each.reason or f"{each.share:6.1%} of the tolerance, at worst, in {each.part}"
        mark = "  --" if each.reason else "  ok" if each.holds else "FAIL"
        print(f"{mark}  {operator:<21} {backend:<10} {settings or 'defaults':<24} {result}")
    run = [each for each in findings if not each.reason]
    print(f"{sum(each.holds for each in run)} of {len(run)} results and gradients hold")

"""`check`: compare implementations with the reference in float64."""

import argparse
import json
from collections.abc import Sequence

from attrs import asdict

from ms_kernels.checking import Finding
from ms_kernels.checking import check as compare_all
from ms_kernels.commands.arguments import available_device, dtype_of
from ms_kernels.selection import check_backends, contract_of


def check(options: argparse.Namespace) -> int:
    """Compare implementations with the reference; return 1 if one exceeds its tolerance."""
    for name in options.operator or ():
        contract_of(name)
    check_backends(options.backend or ())
    device = available_device(options.device)
    findings = compare_all(
        options.operator, options.backend, device=device, dtype=dtype_of(options.dtype)
    )
    if options.json:
        rows = [{**asdict(finding), "holds": finding.holds} for finding in findings]
        print(json.dumps(rows, indent=2))
    else:
        _print_findings(findings)
    # A check that ran nothing fails.
    run = [finding for finding in findings if not finding.reason]
    return 0 if run and all(finding.holds for finding in run) else 1


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print the worst result or gradient of each trial, then the number within tolerance."""
    worst: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.operator, finding.backend, finding.options)
        if key not in worst or not finding.share <= worst[key].share:
            worst[key] = finding
    for (operator, backend, settings), finding in worst.items():
        result = (
            finding.reason or f"{finding.share:6.1%} of the tolerance, at worst, in {finding.part}"
        )
        mark = "  --" if finding.reason else "  ok" if finding.holds else "FAIL"
        print(f"{mark}  {operator:<21} {backend:<10} {settings or 'defaults':<24} {result}")
    run = [finding for finding in findings if not finding.reason]
    print(
        f"{sum(finding.holds for finding in run)} of {len(run)} results and gradients are "
        "within tolerance"
    )

"""Every operator on this process's device; run by `test_device.py`."""

from functools import partial
from typing import Any

import torch

import ms_kernels
from ms_kernels.checking import check
from ms_kernels.operators import CONTRACTS


def current_device() -> torch.device:
    """Return this process's device, which is not the CPU."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.device(device.type, torch.accelerator.current_device_index())


def run_check() -> dict[str, Any]:
    """Return a summary of the check of every backend on the device."""
    findings = check(device=current_device())
    return {
        "proved": sorted({finding.operator for finding in findings if finding.part}),
        "backends": sorted({finding.backend for finding in findings if finding.part}),
        "wrong": [str(finding) for finding in findings if finding.part and not finding.holds],
    }


def compare_with_cpu() -> dict[str, bool]:
    """Return for each operator whether its default backend on the device matches the CPU."""
    same = {}
    for name, contract in CONTRACTS.items():
        options = {option.name: option.default for option in contract.options}
        operator = partial(getattr(ms_kernels, name), **options)
        inputs = contract.draw({}, dtype=torch.float32, device="cpu")
        with ms_kernels.use_backend("reference"):
            expected = _results(contract, operator, {n: t.clone() for n, t in inputs.items()})
        results = _results(
            contract, operator, {n: t.to(current_device()) for n, t in inputs.items()}
        )
        assert all(result.device == current_device() for result in results)
        # Matrix products use the same kernels, attention others: float32 rounding.
        same[name] = all(
            torch.allclose(result.cpu(), reference, rtol=1e-5, atol=1e-5)
            for result, reference in zip(results, expected, strict=True)
        )
    return same


def _results(contract: Any, operator: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    output = operator(**inputs)
    return list(output) if isinstance(output, tuple) else [output]

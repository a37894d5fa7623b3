"""Every operator on this process's device; see `test_device.py`."""

from functools import partial
from typing import Any

import torch

import ms_kernels
from ms_kernels.checking import check
from ms_kernels.operators import CONTRACTS


def here() -> torch.device:
    """This process's device, which is not the CPU."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def checked() -> dict[str, Any]:
    """What the proof of every backend finds there."""
    findings = check(device=here())
    return {
        "proved": sorted({each.operator for each in findings if each.part}),
        "backends": sorted({each.backend for each in findings if each.part}),
        "wrong": [str(each) for each in findings if each.part and not each.holds],
    }


def called() -> dict[str, bool]:
    """Whether each operator, chosen by the package itself, gives there what the CPU gives."""
    same = {}
    for name, contract in CONTRACTS.items():
        options = {each.name: each.default for each in contract.options}
        operator = partial(getattr(ms_kernels, name), **options)
        inputs = contract.draw({}, dtype=torch.float32, device="cpu")
        with ms_kernels.use_backend("reference"):
            truths = _results(contract, operator, {n: t.clone() for n, t in inputs.items()})
        found = _results(contract, operator, {n: t.to(here()) for n, t in inputs.items()})
        assert all(each.device == here() for each in found)
        # Matrices are multiplied by the same kernels, attention by others: float32's rounding.
        same[name] = all(
            torch.allclose(one.cpu(), truth, rtol=1e-5, atol=1e-5)
            for one, truth in zip(found, truths, strict=True)
        )
    return same


def _results(contract: Any, operator: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    made = operator(**inputs)
    if contract.mutates:
        return [inputs[each.name] for each in contract.arguments if each.mutated]
    return list(made) if isinstance(made, tuple) else [made]

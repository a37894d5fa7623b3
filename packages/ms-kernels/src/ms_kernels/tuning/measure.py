"""Times implementations in turn, so that what disturbs one disturbs all.

On the CPU it is the process's own time, which a busy machine stretches little; on an accelerator
the time between two events.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ms_kernels.contracts.contract import Contract


def one_pass(
    contract: Contract,
    run: Callable[..., Any],
    inputs: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    *,
    backward: bool,
) -> Callable[[], object]:
    """Return a function that runs an implementation once, forward or forward and backward.

    Args:
        contract: the operator.
        run: as `Implementation.run`.
        inputs: its tensors; those that it writes are written.
        options: its options.
        backward: whether gradients of all differentiable arguments are made as well.
    """
    leaves = [
        each
        if each is None or argument.mutated
        else each.detach().requires_grad_(backward and argument.differentiable)
        for argument, each in zip(contract.arguments, inputs, strict=True)
    ]
    wanted = [each for each in leaves if each is not None and each.requires_grad]

    def step() -> object:
        result = run(*leaves, *options)
        if not wanted:
            return result
        results = result if isinstance(result, tuple) else (result,)
        pulled = [each for each in results if each.requires_grad]
        return torch.autograd.grad(pulled, wanted, [torch.ones_like(each) for each in pulled])

    return step


def in_turn(
    ways: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    spend_s: float = 0.2,
    rounds: int = 5,
) -> dict[str, float]:
    """Return the median seconds of one call of each way, measured round after round.

    Args:
        ways: what to time, by name.
        device: where they run.
        spend_s: seconds for each way, in all rounds together; at least one call a round.
        rounds: how often each has its turn.
    """
    timer = _process_seconds if device.type == "cpu" else _event_seconds
    calls = {}
    for name, way in ways.items():
        way()  # what is compiled or allocated once does not count
        once = max(timer(way, 1, device), 1e-7)
        calls[name] = max(min(int(spend_s / rounds / once), 10_000), 1)
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            took[name].append(timer(way, calls[name], device) / calls[name])
    return {name: statistics.median(each) for name, each in took.items()}


def _process_seconds(way: Callable[[], object], calls: int, device: torch.device) -> float:
    start = time.process_time()
    for _ in range(calls):
        way()
    return time.process_time() - start


def _event_seconds(way: Callable[[], object], calls: int, device: torch.device) -> float:
    start = torch.Event(device=device, enable_timing=True)
    end = torch.Event(device=device, enable_timing=True)
    start.record()
    for _ in range(calls):
        way()
    end.record()
    torch.accelerator.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3

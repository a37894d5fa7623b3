"""Interleaved timing of implementations, so that disturbances affect all of them equally.

On the CPU this is process time, which load on the machine changes little; on an accelerator it is
the time between two events. On CUDA the calls are captured in a graph and replayed: launching a
small kernel from Python takes longer than running it.
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ms_kernels.contracts.contract import Contract

log = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Several calls of a function as one callable, such as a captured graph."""

    run: Callable[[], object]
    size: int
    """Number of calls of the function."""


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
        contract: contract of the operator.
        run: the implementation, as in `Implementation.run`.
        inputs: tensor arguments.
        options: option values.
        backward: also compute the gradients of all differentiable arguments.
    """
    leaves = [
        tensor
        if tensor is None
        else tensor.detach().requires_grad_(backward and argument.differentiable)
        for argument, tensor in zip(contract.arguments, inputs, strict=True)
    ]
    trainable = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]

    def step() -> object:
        result = run(*leaves, *options)
        if not trainable:
            return result
        results = result if isinstance(result, tuple) else (result,)
        outputs = [tensor for tensor in results if tensor.requires_grad]
        return torch.autograd.grad(
            outputs, trainable, [torch.ones_like(output) for output in outputs]
        )

    return step


def time_interleaved(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    spend_s: float = 0.2,
    rounds: int = 5,
) -> dict[str, float]:
    """Return the median seconds per call of each function, measured in interleaved rounds.

    Args:
        functions: functions to time, by name.
        device: device they run on.
        spend_s: total seconds per function over all rounds; at least one call per round.
        rounds: number of rounds.
    """
    timer = _process_seconds if device.type == "cpu" else _event_seconds
    batches, calls = {}, {}
    for name, function in functions.items():
        function()  # warm-up: exclude compilation and first allocations
        batches[name] = _capture(function) if device.type == "cuda" else Batch(function, 1)
        # A single call may be below the resolution of the clock.
        batch_s = max(timer(batches[name].run, 1, device), 1e-7)
        calls[name] = max(min(int(spend_s / rounds / batch_s), 10_000), 1)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, batch in batches.items():
            batch_s = timer(batch.run, calls[name], device) / calls[name]
            seconds[name].append(batch_s / batch.size)
    return {name: statistics.median(samples) for name, samples in seconds.items()}


def _capture(function: Callable[[], object], size: int = 4) -> Batch:
    """Capture `size` calls of a function in a CUDA graph; the function itself if that fails."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            function()  # workspaces of libraries are allocated per stream
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(size):
                function()
    except (
        RuntimeError
    ) as error:  # the function synchronizes, or a library does not support capture
        torch.cuda.synchronize()
        log.info("CUDA graph capture failed, so times include kernel launches: %s", error)
        return Batch(function, 1)
    return Batch(graph.replay, size)


def _process_seconds(function: Callable[[], object], calls: int, device: torch.device) -> float:
    start = time.process_time()
    for _ in range(calls):
        function()
    return time.process_time() - start


def _event_seconds(function: Callable[[], object], calls: int, device: torch.device) -> float:
    start = torch.Event(device=device, enable_timing=True)
    end = torch.Event(device=device, enable_timing=True)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.accelerator.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3

"""Checks backends against their contracts: results and gradients vs. the float64 reference."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ms_kernels.contracts.call import describe
from ms_kernels.contracts.contract import Contract, Variant
from ms_kernels.contracts.tolerance import Tolerance
from ms_kernels.core.choice import Implementation, obstacle_to
from ms_kernels.core.dispatch import describe_call
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS


@frozen(kw_only=True)
class Finding:
    """Error of one backend in one trial."""

    operator: str
    backend: str
    device: str
    dtype: str
    options: str
    """Options and sizes that differ from the example, and omitted optional arguments."""
    part: str
    """``"result"`` or ``"gradient of NAME"``; ``""`` if the backend does not support the call."""
    share: float
    """Largest error as a fraction of the tolerance; 1 or less passes."""
    reason: str = ""
    """Reason why the backend does not support the call."""

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance; False for NaN."""
        return self.share <= 1


def check(
    operators: Iterable[str] | None = None,
    backends: Iterable[str] | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Finding, ...]:
    """Compare backends with the float64 reference on the contracts' examples.

    Each option is tried at its default and, one option at a time, at the other values listed in
    its contract. Optional arguments are tried with and without.

    Args:
        operators: names of operators. None: all.
        backends: names of backends. None: all.
        device: device to run on.
        dtype: dtype of the inputs.

    Returns:
        One finding per result and gradient of a trial.
    """
    findings: list[Finding] = []
    for implementation in IMPLEMENTATIONS:
        if operators is not None and implementation.operator not in operators:
            continue
        if backends is not None and implementation.backend not in backends:
            continue
        contract = CONTRACTS[implementation.operator]
        for without, variant in _trials(contract):
            findings += _attempt(contract, implementation, without, variant, device, dtype)
    return tuple(findings)


def _trials(contract: Contract) -> Iterator[tuple[tuple[str, ...], Variant]]:
    """Yield the optional arguments to omit, and the options and sizes to set."""
    optional = tuple(argument.name for argument in contract.arguments if argument.optional)
    yield (), Variant({}, {})
    if optional:
        yield optional, Variant({}, {})
    for option in contract.options:
        for value in option.trials:
            yield optional, Variant({option.name: value}, {})
    for variant in contract.variants:
        yield (), variant


def _attempt(
    contract: Contract,
    candidate: Implementation,
    without: tuple[str, ...],
    variant: Variant,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Iterator[Finding]:
    options = variant.options
    tensors = contract.draw(variant.dims, dtype=dtype, device=device)
    inputs = [None if name in without else tensor for name, tensor in tensors.items()]
    values = tuple(options.get(option.name, option.default) for option in contract.options)
    facts = {
        "operator": contract.name,
        "backend": candidate.backend,
        "device": str(device),
        "dtype": describe(dtype),
        "options": ", ".join(
            [f"{name}={value}" for name, value in {**options, **variant.dims}.items()]
            + [f"no {name}" for name in without]
        ),
    }
    call = describe_call(contract, tuple(inputs), values)
    obstacle = obstacle_to(candidate, call)
    if obstacle is not None:
        yield Finding(**facts, part="", share=0.0, reason=obstacle)
        return
    for part, share in compare(contract, candidate.run, inputs, values):
        yield Finding(**facts, part=part, share=share)


def compare(
    contract: Contract,
    run: Callable[..., Any],
    inputs: Iterable[Tensor | None],
    options: tuple[Any, ...],
) -> Iterator[tuple[str, float]]:
    """Yield each result and gradient with its error as a fraction of the tolerance.

    The expected values come from the reference in float64, on the same rounded inputs.
    """
    inputs = list(inputs)
    results, gradients = _differentiate(contract, run, inputs, options, None)
    wide = [
        tensor.to(torch.float64) if tensor is not None and tensor.is_floating_point() else tensor
        for tensor in inputs
    ]
    expected_results, expected_grads = _differentiate(
        contract, contract.reference, wide, options, results
    )
    dtype = next(tensor.dtype for tensor in inputs if tensor is not None)
    for result, expected in zip(results, expected_results, strict=True):
        yield "result", _error_ratio(result, expected, contract.tolerance.results[dtype])
    for name, gradient in gradients.items():
        share = _error_ratio(gradient, expected_grads[name], contract.tolerance.gradients[dtype])
        yield f"gradient of {name}", share


def _differentiate(
    contract: Contract,
    run: Callable[..., Any],
    inputs: list[Tensor | None],
    options: tuple[Any, ...],
    like: list[Tensor] | None,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return results and gradients, the latter for a random gradient of the results.

    The random gradient is rounded to the dtype of `like`, so that the reference gets the same
    values. For a mean it is multiplied by the number of rows; otherwise the argument gradients
    would vanish below the absolute tolerance.
    """
    leaves: dict[str, Tensor] = {}
    call_inputs: list[Tensor | None] = []
    for argument, tensor in zip(contract.arguments, inputs, strict=True):
        leaf = tensor
        if leaf is not None and argument.differentiable:
            leaf = leaves[argument.name] = leaf.detach().requires_grad_()
        call_inputs.append(leaf)
    output = run(*call_inputs, *options)
    results = list(output) if isinstance(output, tuple) else [output]
    if not leaves:
        return results, {}
    grad_indices = [index for index, result in enumerate(results) if result.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    first = next(tensor for tensor in call_inputs if tensor is not None)
    strength = first.numel() // first.shape[-1] if "mean" in options else 1
    result_grads = [
        torch.randn(results[index].shape, generator=generator)
        .to((like or results)[index].dtype)
        .to(results[index].device, results[index].dtype)
        * strength
        for index in grad_indices
    ]
    grads = torch.autograd.grad(
        [results[index] for index in grad_indices], list(leaves.values()), result_grads
    )
    return [result.detach() for result in results], dict(zip(leaves, grads, strict=True))


def _error_ratio(got: Tensor, truth: Tensor, tolerance: Tolerance) -> float:
    """Return the largest error as a fraction of the allowed error."""
    if got.shape != truth.shape:
        return float("inf")
    if not truth.numel():
        return 0.0
    truth = truth.to(torch.float64)
    allowed = tolerance.relative * truth.abs() + tolerance.absolute
    # NaN passes through `max`, and then `holds` is False.
    return float(((got.to(torch.float64) - truth).abs() / allowed).max())

"""Checks backends against the contract: results and gradients beside the reference in float64."""

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
    """How far one backend lies from the truth in one trial."""

    operator: str
    backend: str
    device: str
    dtype: str
    options: str
    """Options and sizes that are not the example's, and optional arguments that were left out."""
    part: str
    """``"result"`` or ``"gradient of NAME"``; ``""`` when the backend does not take the call."""
    share: float
    """Largest error, as a share of the tolerance: it holds up to 1."""
    reason: str = ""
    """Why the backend does not take the call."""

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
    """Compare backends with the reference in float64, on the contracts' examples.

    Each option is tried at its default and, one at a time, at each other value that its contract
    names; optional arguments are tried with and without.

    Args:
        operators: names; all if None.
        backends: names; all if None.
        device: where to run.
        dtype: dtype of the inputs.

    Returns:
        A finding for each result and gradient of each trial.
    """
    findings: list[Finding] = []
    for each in IMPLEMENTATIONS:
        if operators is not None and each.operator not in operators:
            continue
        if backends is not None and each.backend not in backends:
            continue
        contract = CONTRACTS[each.operator]
        for without, variant in _trials(contract):
            findings += _attempt(contract, each, without, variant, device, dtype)
    return tuple(findings)


def _trials(contract: Contract) -> Iterator[tuple[tuple[str, ...], Variant]]:
    """Yield the optional arguments to leave out, and the options and sizes to set."""
    spare = tuple(each.name for each in contract.arguments if each.optional)
    yield (), Variant({}, {})
    if spare:
        yield spare, Variant({}, {})
    for option in contract.options:
        for value in option.trials:
            yield spare, Variant({option.name: value}, {})
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
    values = tuple(options.get(each.name, each.default) for each in contract.options)
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
    """Yield each part of an implementation's answer with its error as a share of the tolerance.

    The truth is the reference in float64, given the same rounded inputs.
    """
    inputs = list(inputs)
    results, gradients = _differentiate(contract, run, inputs, options, None)
    wide = [
        each.to(torch.float64) if each is not None and each.is_floating_point() else each
        for each in inputs
    ]
    truths, slopes = _differentiate(contract, contract.reference, wide, options, results)
    dtype = next(each.dtype for each in inputs if each is not None)
    for result, truth in zip(results, truths, strict=True):
        yield "result", _share(result, truth, contract.tolerance.results[dtype])
    for name, gradient in gradients.items():
        share = _share(gradient, slopes[name], contract.tolerance.gradients[dtype])
        yield f"gradient of {name}", share


def _differentiate(
    contract: Contract,
    run: Callable[..., Any],
    inputs: list[Tensor | None],
    options: tuple[Any, ...],
    like: list[Tensor] | None,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return results and gradients, the latter for one random gradient of the results.

    That one is rounded to the dtype of `like`, so that the truth is given the same numbers. A
    mean's is multiplied by the number of rows, as the gradients of the arguments would else vanish
    under the absolute tolerance. Arguments that are written in place are copied, and the copies
    are the results.
    """
    leaves: dict[str, Tensor] = {}
    given: list[Tensor | None] = []
    written: list[Tensor] = []
    for argument, tensor in zip(contract.arguments, inputs, strict=True):
        each = tensor
        if each is not None and argument.mutated:
            each = _copy(each)
            written.append(each)
        elif each is not None and argument.differentiable:
            each = leaves[argument.name] = each.detach().requires_grad_()
        given.append(each)
    output = run(*given, *options)
    if contract.mutates:
        return written, {}
    results = list(output) if isinstance(output, tuple) else [output]
    if not leaves:
        return results, {}
    pulled = [place for place, each in enumerate(results) if each.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    first = next(each for each in given if each is not None)
    strength = first.numel() // first.shape[-1] if "mean" in options else 1
    pulls = [
        torch.randn(results[place].shape, generator=generator)
        .to((like or results)[place].dtype)
        .to(results[place].device, results[place].dtype)
        * strength
        for place in pulled
    ]
    slopes = torch.autograd.grad([results[place] for place in pulled], list(leaves.values()), pulls)
    return [each.detach() for each in results], dict(zip(leaves, slopes, strict=True))


def _copy(tensor: Tensor) -> Tensor:
    """Return the same numbers under the same strides."""
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


def _share(got: Tensor, truth: Tensor, tolerance: Tolerance) -> float:
    """Return the largest error as a share of the allowed one."""
    if got.shape != truth.shape:
        return float("inf")
    if not truth.numel():
        return 0.0
    truth = truth.to(torch.float64)
    allowed = tolerance.relative * truth.abs() + tolerance.absolute
    return float(((got.to(torch.float64) - truth).abs() / allowed).max())

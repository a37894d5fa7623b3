"""Makes torch operators of backends that torch cannot look into.

A Triton kernel or a vendor's call is opaque: torch.compile cannot trace it, FakeTensor cannot run
it, autograd and DTensor do not know it. `opaque` wraps a forward and a backward function into two
`torch.library` operators, ``ms_kernels::NAME_BACKEND`` and ``ms_kernels::NAME_BACKEND_backward``,
with all of that registered: what fake tensors become, what the backward pass needs, how DTensor
may split it. It returns the `run` of an `Implementation`. Then torch.compile makes one graph of
it, forward and backward; activation recompute, FSDP2 and tensor parallelism work;
`torch.library.opcheck` passes. Where none of these looks on, plain tensors go to the two functions
directly, by an autograd function.

What a backend writes, for ``rms_norm``::

    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ...launch; return result, scale          # the operator's results, then what is kept

    def backward(
        grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, wanted: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        ...one gradient for each differentiable argument; `unwanted(x)` where it is not wanted

    run = opaque(
        CONTRACT, "triton",
        forward=forward, kept={"scale": "..."},
        backward=backward, saves=("x", "weight", "scale"),
    )
    Implementation(operator="rms_norm", backend="triton", run=run, subclasses=True, ...)

Rules:

1. `forward` and `backward` are annotated with plain types (``Tensor``, ``Tensor | None``, ``int``,
   ``float``, ``bool``, ``str``, sequences of them): torch's schema is inferred from them. The
   contract's tensors come first, then its options, all by position; ``*options`` stands for all of
   the contract's.
2. `forward` returns new tensors, never a view of an argument, and takes any strides: it is given
   what the user passed. What it returns is contiguous, the results of the contract's dtype, the
   kept tensors float32 (float64 for float64); else pass a `fake`, which gives exactly its shapes,
   dtypes and strides without data.
3. `backward` takes the results' gradients (contiguous; where nothing flowed into one it is zeros,
   or None if annotated ``Tensor | None``), then the tensors that `saves` names (arguments, results
   by the contract's names, kept ones), then `wanted`, then the options. Bit i of `wanted` is set
   when the gradient of the i-th differentiable argument is wanted: see `is_wanted`.
4. A gradient has its argument's shape and dtype, contiguous. Where what is saved and the results'
   gradients do not tell the sizes, pass `fake_backward`.
5. Both run below autograd, which records nothing there: `torch.autograd.grad` is of no use inside.
6. Where the contract mutates arguments, `forward` writes them and returns None; no more is needed.
7. An option that leaves out a result, as `entropy` does, is handled outside: the torch operator
   always returns the result, and a function around `run` drops it.
8. DTensor may split along the contract's `splits`; where there are none, it is
   ``subclasses=False``. What `forward` and `backward` are given then are each process's own parts.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ms_kernels.contracts.contract import Contract
from ms_kernels.core.plan import DimNames, Plan
from ms_kernels.core.tracing import known_when_traced

_NAMESPACE = "ms_kernels"
_registry = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

_PLAIN = (Tensor, torch.nn.Parameter)


def opaque(
    contract: Contract,
    backend: str,
    *,
    forward: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    kept: Mapping[str, str] | None = None,
    backward: Callable[..., Any] | None = None,
    fake_backward: Callable[..., Any] | None = None,
    saves: Sequence[str] = (),
) -> Callable[..., Any]:
    """Make torch operators of a backend's functions; the module's text says how to write them.

    Args:
        contract: the operator.
        backend: name of the backend, part of the torch operators' names.
        forward: returns the contract's results, then the kept tensors, all new; or None when the
            contract mutates.
        fake: the same without data; derived from the contract's dims if None.
        kept: names and dims of what `forward` returns beyond the results, in order.
        backward: returns a gradient for each differentiable argument; None when there is none.
        fake_backward: the same without data; derived likewise.
        saves: names of the tensors that `backward` takes.

    Returns:
        A function of the contract's arguments and options, by position, as `Implementation.run`.
    """
    if contract.mutates:
        return _in_place(contract, backend, forward)
    plan = Plan(contract=contract, kept=dict(kept or {}), saves=tuple(saves))
    name = f"{contract.name}_{backend}"
    overload = _define(contract, name, forward, fake or plan.fake)
    rules = [(overload, plan.dims_of(plan.arguments), plan.dims_of(plan.outputs))]
    if backward is not None:
        back = _define(contract, f"{name}_backward", backward, fake_backward or plan.fake_backward)
        given = plan.dims_of((*contract.results, *plan.saves))
        gradients = (plan.arguments[place] for place in plan.differentiable)
        rules.append((back, given, plan.dims_of(gradients)))
        torch.library.register_autograd(
            f"{_NAMESPACE}::{name}",
            once_differentiable(plan.differentiate(back, backward)),
            setup_context=plan.remember,
            lib=_registry,
        )
    split = _SplitRules(contract.splits, rules)
    direct = plan.function(forward, backward) if backward is not None else forward
    return _runner(plan, overload, forward, direct, split)


def _runner(
    plan: Plan,
    overload: Callable[..., Any],
    forward: Callable[..., Any],
    direct: Callable[..., Any],
    split: "_SplitRules",
) -> Callable[..., Any]:
    """Return a function that calls the torch operator where torch looks on, else its function."""
    tensors, count = len(plan.contract.arguments), plan.count
    alone = count == 1 and not plan.kept

    def run(*given: Any) -> Any:
        plain = True
        for each in given[:tensors]:
            if each is not None and type(each) not in _PLAIN:
                plain = False
                split.register()
        # Nobody looks on: spare the dispatcher, which takes twice as long as a launch.
        if plain and not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode():
            outputs = direct(*given) if torch.is_grad_enabled() else forward(*given)
        else:
            outputs = overload(*given)
        if alone:
            return outputs
        return outputs[0] if count == 1 else tuple(outputs[:count])

    return run


class _SplitRules:
    """Tells DTensor how operators may be split, when the first DTensor comes."""

    def __init__(
        self, splits: Sequence[str], rules: Sequence[tuple[Any, list[DimNames], list[DimNames]]]
    ) -> None:
        self._splits = splits
        self._rules = list(rules)

    @known_when_traced
    def register(self) -> None:
        """Register the rules once, after something else has imported DTensor: that takes a second."""
        if not self._rules or "torch.distributed.tensor" not in sys.modules:
            return
        from torch.distributed.tensor.experimental import register_sharding

        from ms_kernels.core.sharding import shardings

        while self._splits and self._rules:
            overload, inputs, outputs = self._rules.pop()

            def rule(
                *given: Any,
                inputs: list[DimNames] = inputs,
                outputs: list[DimNames] = outputs,
            ) -> Any:
                tensors = list(zip(inputs, given, strict=False))
                return shardings(self._splits, tensors, outputs, len(given) - len(tensors))

            register_sharding(overload)(rule)


def _define(
    contract: Contract, name: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """Register a function and its fake; return the torch operator."""
    schema = torch.library.infer_schema(_with_schema(contract, function), mutates_args=())
    tags = (torch.Tag.pt2_compliant_tag,)
    _registry.define(f"{name}{schema}", tags=tags)  # type: ignore[no-untyped-call]
    # The default backend's key: below autograd, so that a call inside is not recorded.
    _registry.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_registry)
    return getattr(torch.ops.ms_kernels, name).default


def _in_place(contract: Contract, backend: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function that writes into its arguments: torch bumps their versions."""
    mutated = [argument.name for argument in contract.arguments if argument.mutated]
    operator = torch.library.custom_op(
        f"{_NAMESPACE}::{contract.name}_{backend}",
        _with_schema(contract, forward),
        mutates_args=mutated,
    )
    operator.register_fake(lambda *given: None)

    def run(*given: Any) -> None:
        with torch.no_grad():
            operator(*given)

    return run


def _with_schema(contract: Contract, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under a signature that torch infers a schema from.

    It has no defaults, since torch would drop such arguments, and names the contract's options.
    """

    def same(*given: Any) -> Any:
        return function(*given)

    named, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    options = [inspect.Parameter(o.name, named, annotation=o.kind) for o in contract.options]
    signature = inspect.signature(function, eval_str=True)
    bare: list[inspect.Parameter] = []
    for each in signature.parameters.values():
        starred = each.kind is inspect.Parameter.VAR_POSITIONAL
        bare += options if starred else [each.replace(default=empty)]
    same.__signature__ = signature.replace(parameters=bare)  # type: ignore[attr-defined]
    same.__annotations__ = {each.name: each.annotation for each in bare}
    same.__annotations__["return"] = signature.return_annotation
    return same

"""Registers opaque backend functions as torch operators.

torch cannot look into a Triton kernel or a vendor call: torch.compile cannot trace it, FakeTensor
cannot run it, and autograd and DTensor have no rules for it. `opaque` wraps a forward and a
backward function in two `torch.library` operators, ``ms_kernels::NAME_BACKEND`` and
``ms_kernels::NAME_BACKEND_backward``, with their fake versions, autograd formula and DTensor
sharding rules. It returns the `run` of an `Implementation`. With it, torch.compile captures forward
and backward without a graph break; activation checkpointing, FSDP2 and tensor parallelism work; and
`torch.library.opcheck` passes. Outside of those, plain tensors skip the dispatcher and go to the
two functions through an autograd function.

A backend of ``rms_norm`` looks like this::

    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ...launch; return result, scale          # the results, then the intermediates

    def backward(
        grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, grad_mask: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        ...one gradient per differentiable argument; `absent_grad(x)` if it is not needed

    run = opaque(
        CONTRACT, "triton",
        forward=forward, intermediates={"scale": "..."},
        backward=backward, saves=("x", "weight", "scale"),
    )
    Implementation(operator="rms_norm", backend="triton", run=run, subclasses=True, ...)

Rules:

1. Annotate `forward` and `backward` with plain types (``Tensor``, ``Tensor | None``, ``int``,
   ``float``, ``bool``, ``str``, sequences of them); torch infers the schema from them. The
   contract's tensors come first, then its options, all positional; ``*options`` takes all options.
2. `forward` accepts any strides, as users pass them, and returns new tensors, never a view of an
   argument. By default outputs are contiguous, results have the contract's dtype, and intermediates
   are float32 (float64 for float64). Otherwise pass a `fake` that returns the right shapes, dtypes
   and strides without data.
3. `backward` takes the gradients of the results (contiguous; zeros by default, or None if
   annotated ``Tensor | None``), then the tensors named in `saves` (arguments, results or
   intermediates), then `grad_mask`, then the options. Bit i of `grad_mask` is set if the gradient
   of the i-th differentiable argument is needed: see `needs_grad`.
4. Each gradient is contiguous, with its argument's shape and dtype. Pass `fake_backward` if the
   sizes do not follow from the saved tensors and the gradients of the results.
5. Both run below autograd, so `torch.autograd.grad` does not work inside them.
6. Options that drop a result, such as `entropy`, are handled outside: the torch operator always
   returns the result, and a wrapper of `run` drops it.
7. DTensor may shard along the contract's `splits`; an operator without any has
   ``subclasses=False``. `forward` and `backward` then get the local shards.
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
    intermediates: Mapping[str, str] | None = None,
    backward: Callable[..., Any] | None = None,
    fake_backward: Callable[..., Any] | None = None,
    saves: Sequence[str] = (),
) -> Callable[..., Any]:
    """Register a backend's functions as torch operators; the module docstring has the rules.

    Args:
        contract: contract of the operator.
        backend: name of the backend, part of the torch operators' names.
        forward: returns the contract's results, then the intermediates, all new tensors.
        fake: `forward` on fake tensors. None: derived from the contract's dims.
        intermediates: names and dims of the outputs of `forward` after the results, in order.
        backward: returns one gradient per differentiable argument. None: no gradient.
        fake_backward: `backward` on fake tensors. None: derived from the contract's dims.
        saves: names of the tensors that `backward` takes.

    Returns:
        A function of the contract's arguments and options, all positional: `Implementation.run`.
    """
    plan = Plan(contract=contract, intermediates=dict(intermediates or {}), saves=tuple(saves))
    name = f"{contract.name}_{backend}"
    overload = _define(contract, name, forward, fake or plan.fake)
    rules = [(overload, plan.dims_of(plan.arguments), plan.dims_of(plan.outputs))]
    if backward is not None:
        back = _define(contract, f"{name}_backward", backward, fake_backward or plan.fake_backward)
        back_inputs = plan.dims_of((*contract.results, *plan.saves))
        gradients = (plan.arguments[index] for index in plan.differentiable)
        rules.append((back, back_inputs, plan.dims_of(gradients)))
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
    """Return a function that goes through the torch operator only if torch needs to see it."""
    tensor_count, count = len(plan.contract.arguments), plan.count
    single_output = count == 1 and not plan.intermediates

    def run(*args: Any) -> Any:
        plain = True
        for tensor in args[:tensor_count]:
            if tensor is not None and type(tensor) not in _PLAIN:
                plain = False
                split.register()
        # The dispatcher takes twice as long as a launch, so plain eager calls bypass it.
        if plain and not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode():
            outputs = direct(*args) if torch.is_grad_enabled() else forward(*args)
        else:
            outputs = overload(*args)
        if single_output:
            return outputs
        return outputs[0] if count == 1 else tuple(outputs[:count])

    return run


class _SplitRules:
    """DTensor sharding rules of an operator, registered when its first DTensor arrives."""

    def __init__(
        self, splits: Sequence[str], rules: Sequence[tuple[Any, list[DimNames], list[DimNames]]]
    ) -> None:
        self._splits = splits
        self._rules = list(rules)

    @known_when_traced
    def register(self) -> None:
        """Register the rules once, and only if DTensor, which is slow to import, is imported."""
        if not self._rules or "torch.distributed.tensor" not in sys.modules:
            return
        from torch.distributed.tensor.experimental import register_sharding

        from ms_kernels.core.sharding import shardings

        while self._splits and self._rules:
            overload, inputs, outputs = self._rules.pop()

            # The defaults bind the values of this iteration.
            def rule(
                *args: Any,
                inputs: list[DimNames] = inputs,
                outputs: list[DimNames] = outputs,
            ) -> Any:
                tensors = list(zip(inputs, args, strict=False))
                return shardings(self._splits, tensors, outputs, len(args) - len(tensors))

            register_sharding(overload)(rule)


def _define(
    contract: Contract, name: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """Register a function and its fake version; return the torch operator."""
    schema = torch.library.infer_schema(_with_schema(contract, function), mutates_args=())
    tags = (torch.Tag.pt2_compliant_tag,)
    _registry.define(f"{name}{schema}", tags=tags)  # type: ignore[no-untyped-call]
    # This key is below autograd, so operations inside the function are not recorded.
    _registry.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_registry)
    return getattr(torch.ops.ms_kernels, name).default


def _with_schema(contract: Contract, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function in a signature from which torch can infer a schema.

    Parameters lose their defaults, since torch would drop arguments equal to them, and
    ``*options`` becomes the contract's options by name.
    """

    def wrapper(*args: Any) -> Any:
        return function(*args)

    named, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    options = [inspect.Parameter(o.name, named, annotation=o.kind) for o in contract.options]
    signature = inspect.signature(function, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        starred = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        parameters += options if starred else [parameter.replace(default=empty)]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    wrapper.__annotations__["return"] = signature.return_annotation
    return wrapper

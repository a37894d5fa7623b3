"""How a backend that torch cannot look into becomes an operator that torch works with.

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

    def fake(x, weight, eps):                    # the same shapes, dtypes and strides, no data
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        return result, x.new_empty(x.shape[:-1], dtype=torch.float32)

    def backward(
        grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, wanted: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        ...one gradient for each differentiable argument; `unwanted(x)` where it is not wanted

    run = opaque(
        CONTRACT, "triton",
        forward=forward, fake=fake, kept={"scale": "..."},
        backward=backward, saves=("x", "weight", "scale"),
    )
    Implementation(operator="rms_norm", backend="triton", run=run, subclasses=True, ...)

Rules:

1. `forward` and `backward` are annotated with plain types (``Tensor``, ``Tensor | None``, ``int``,
   ``float``, ``bool``, ``str``, sequences of them): torch's schema is inferred from them. The
   contract's tensors come first, then its options, all by position.
2. `forward` returns new tensors, never a view of an argument, and takes any strides: it is given
   what the user passed. `fake` gives exactly its shapes, dtypes and strides.
3. `backward` takes the results' gradients (contiguous; where nothing flowed into one it is zeros,
   or None if annotated ``Tensor | None``), then the tensors that `saves` names (arguments, results
   by the contract's names, kept ones), then `wanted`, then the options. Bit i of `wanted` is set
   when the gradient of the i-th differentiable argument is wanted: see `is_wanted`.
4. A gradient has its argument's shape and dtype, contiguous. Where the argument is not saved and no
   result has its dims, pass `fake_backward`.
5. Both run below autograd, which records nothing there: `torch.autograd.grad` is of no use inside.
6. Where the contract mutates arguments, `forward` writes them and returns None; no more is needed.
7. An option that leaves out a result, as `entropy` does, is minded outside: the torch operator
   returns it always, and a function around `run` drops it.
8. DTensor may split along the contract's `splits`; where there are none, it is
   ``subclasses=False``. What `forward` and `backward` are given then are each process's own parts.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ms_kernels.contract import Contract
from ms_kernels.tracing import known_when_traced

__all__ = ["is_wanted", "opaque", "unwanted"]

_NAMESPACE = "ms_kernels"
_registry = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

_PLAIN = (Tensor, torch.nn.Parameter)

Dims = tuple[str, ...]


def is_wanted(wanted: int, place: int) -> bool:
    """Return whether the gradient of the differentiable argument at `place` is wanted."""
    return bool(wanted >> place & 1)


def unwanted(like: Tensor) -> Tensor:
    """Return the empty tensor that stands for a gradient that is not wanted."""
    return like.new_empty((0,) * like.ndim)


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
        fake: the same without data; needed unless the contract mutates.
        kept: names and dims of what `forward` returns beyond the results, in order.
        backward: returns a gradient for each differentiable argument; None when there is none.
        fake_backward: the same without data; derived from the arguments if None.
        saves: names of the tensors that `backward` takes.

    Returns:
        A function of the contract's arguments and options, by position, as `Implementation.run`.
    """
    if contract.mutates:
        return _in_place(contract, backend, forward)
    assert fake is not None, "an operator that returns something needs a fake"
    plan = _Plan(contract=contract, kept=dict(kept or {}), saves=tuple(saves))
    name = f"{contract.name}_{backend}"
    overload = _define(name, forward, fake)
    rules = [(overload, plan.argument_dims, plan.output_dims)]
    if backward is not None:
        back = _define(f"{name}_backward", backward, fake_backward or plan.fake_backward)
        rules.append((back, plan.backward_dims, plan.gradient_dims))
        torch.library.register_autograd(
            f"{_NAMESPACE}::{name}",
            once_differentiable(plan.differentiate(back, backward)),
            setup_context=plan.remember,
            lib=_registry,
        )
    split = _SplitRules(contract.splits, rules)
    tensors, count, alone = len(contract.arguments), plan.count, plan.count == 1 and not kept

    direct = plan.function(forward, backward) if backward is not None else forward

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


@frozen(kw_only=True, eq=False)
class _Plan:
    """Which tensor stands where, in the forward operator's results and the backward's arguments."""

    contract: Contract
    kept: dict[str, str]
    saves: tuple[str, ...]
    arguments: tuple[str, ...] = field(init=False)
    outputs: tuple[str, ...] = field(init=False)
    differentiable: tuple[int, ...] = field(init=False)
    """Places of the arguments that have a gradient."""
    dims: dict[str, Dims] = field(init=False)
    """Of every tensor, by name."""

    @arguments.default
    def _arguments(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.contract.arguments)

    @outputs.default
    def _outputs(self) -> tuple[str, ...]:
        return (*self.contract.results, *self.kept)

    @differentiable.default
    def _differentiable(self) -> tuple[int, ...]:
        arguments = enumerate(self.contract.arguments)
        return tuple(place for place, argument in arguments if argument.differentiable)

    @dims.default
    def _dims(self) -> dict[str, Dims]:
        named = {argument.name: argument.dims for argument in self.contract.arguments}
        made = {**self.contract.results, **self.kept}
        return {**named, **{name: tuple(text.split()) for name, text in made.items()}}

    @property
    def count(self) -> int:
        """How many of the outputs are the operator's results."""
        return len(self.contract.results)

    @property
    def argument_dims(self) -> list[Dims]:
        return [self.dims[name] for name in self.arguments]

    @property
    def output_dims(self) -> list[Dims]:
        return [self.dims[name] for name in self.outputs]

    @property
    def backward_dims(self) -> list[Dims]:
        return [self.dims[name] for name in (*self.contract.results, *self.saves)]

    @property
    def gradient_dims(self) -> list[Dims]:
        return [self.dims[self.arguments[place]] for place in self.differentiable]

    def remember(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what the backward pass needs."""
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        by_name = dict(zip(self.arguments, inputs, strict=False))
        by_name |= dict(zip(self.outputs, outputs, strict=True))
        ctx.save_for_backward(*(by_name[name] for name in self.saves))
        ctx.options = inputs[len(self.arguments) :]
        ctx.set_materialize_grads(False)
        results = outputs[: self.count]
        ctx.made = [(each.shape, each.dtype, each.device) for each in results]
        without = list(outputs[self.count :])
        without += [each for each in results if not each.is_floating_point()]
        ctx.mark_non_differentiable(*without)

    def function(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
        """Return both passes as an autograd function, which calls them without the dispatcher."""

        def make(ctx: Any, *given: Any) -> Any:
            output = forward(*given)
            self.remember(ctx, given, output)
            return output

        passes = {
            "forward": staticmethod(make),
            "backward": staticmethod(once_differentiable(self.differentiate(backward, backward))),
        }
        return type(self.contract.name, (torch.autograd.Function,), passes).apply  # type: ignore[attr-defined]

    def differentiate(self, back: Any, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the backward pass in autograd's form."""
        parameters = list(inspect.signature(backward, eval_str=True).parameters.values())
        may_be_none = [each.annotation is not Tensor for each in parameters[: self.count]]

        def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            pulls = [
                grad.contiguous()
                if grad is not None
                else (None if none else torch.zeros(made[0], dtype=made[1], device=made[2]))
                for grad, made, none in zip(grads, ctx.made, may_be_none, strict=False)
            ]
            needed = [ctx.needs_input_grad[place] for place in self.differentiable]
            wanted = sum(1 << place for place, need in enumerate(needed) if need)
            found = back(*pulls, *ctx.saved_tensors, wanted, *ctx.options)
            found = (found,) if isinstance(found, Tensor) else found
            slots: list[Tensor | None] = [None] * (len(self.arguments) + len(ctx.options))
            for place, need, gradient in zip(self.differentiable, needed, found, strict=True):
                slots[place] = gradient if need else None
            return tuple(slots)

        return differentiate

    def fake_backward(self, *given: Any) -> Any:
        """Make a gradient like its argument, or like a result that has its dims."""
        count = self.count + len(self.saves)
        pulls = dict(zip(self.contract.results, given, strict=False))
        saved = dict(zip(self.saves, given[self.count : count], strict=True))
        found = []
        for number, place in enumerate(self.differentiable):
            like = self._like(self.arguments[place], saved, pulls)
            full = torch.empty_like(like, memory_format=torch.contiguous_format)
            found.append(full if is_wanted(given[count], number) else unwanted(like))
        return found[0] if len(found) == 1 else tuple(found)

    def _like(
        self, name: str, saved: Mapping[str, Tensor | None], pulls: Mapping[str, Tensor | None]
    ) -> Tensor:
        """Return a tensor of the shape and dtype that the gradient of `name` has."""
        found = saved.get(name)
        if found is not None:
            return found
        # A result has the first argument's dtype, and so have the arguments that are like it.
        first = self.contract.arguments[0].name
        like = {argument.name: argument.like for argument in self.contract.arguments}
        for result in self.contract.results if first in (name, like[name]) else ():
            found = saved.get(result, pulls[result])
            if found is not None and self.dims[result] == self.dims[name]:
                return found
        raise LookupError(f"{self.contract.name}: save {name} or pass a fake_backward")


class _SplitRules:
    """Tells DTensor how operators may be split, when the first DTensor comes."""

    def __init__(
        self, splits: Sequence[str], rules: Sequence[tuple[Any, list[Dims], list[Dims]]]
    ) -> None:
        self._splits = splits
        self._rules = list(rules)

    @known_when_traced
    def register(self) -> None:
        """Do it once; importing DTensor takes a second, so it waits until somebody else did."""
        if not self._rules or "torch.distributed.tensor" not in sys.modules:
            return
        from torch.distributed.tensor.experimental import register_sharding

        from ms_kernels.sharding import shardings

        while self._splits and self._rules:
            overload, inputs, outputs = self._rules.pop()

            def rule(
                *given: Any,
                inputs: list[Dims] = inputs,
                outputs: list[Dims] = outputs,
            ) -> Any:
                tensors = list(zip(inputs, given, strict=False))
                return shardings(self._splits, tensors, outputs, len(given) - len(tensors))

            register_sharding(overload)(rule)


def _define(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register a function and its fake; return the torch operator."""
    schema = torch.library.infer_schema(_without_defaults(function), mutates_args=())
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
        _without_defaults(forward),
        mutates_args=mutated,
    )
    operator.register_fake(lambda *given: None)

    def run(*given: Any) -> None:
        with torch.no_grad():
            operator(*given)

    return run


def _without_defaults(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under a signature without defaults: torch would drop such arguments."""

    def same(*given: Any) -> Any:
        return function(*given)

    signature = inspect.signature(function, eval_str=True)
    bare = [each.replace(default=inspect.Parameter.empty) for each in signature.parameters.values()]
    same.__signature__ = signature.replace(parameters=bare)  # type: ignore[attr-defined]
    same.__annotations__ = {each.name: each.annotation for each in bare}
    same.__annotations__["return"] = signature.return_annotation
    return same

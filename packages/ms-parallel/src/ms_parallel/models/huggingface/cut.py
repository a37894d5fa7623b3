"""Cuts one pipeline stage out of a whole module, in place.

The module's own forward still runs, with stand-ins for the parts of other stages. On later stages
the embedding and the preceding blocks return the hidden states that arrived; on earlier stages an
exception leaves the forward after the last local block. The code around the blocks can therefore
stay unknown.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from ms_parallel.errors import LayoutError, ModelError
from ms_parallel.models.plan import ModelPlan


class Gate:
    """Entry and exit of hidden states in a stage."""

    def __init__(self) -> None:
        self.entering: Tensor | None = None
        """(B, S, H) from the previous stage, during a forward."""

    def run(self, forward: Callable[[], Any], entering: Tensor | None) -> Any:
        """Run `forward`; return its result, or the hidden states (B, S, H) at its early exit."""
        self.entering = entering
        try:
            return forward()
        except _LeftError as signal:
            return signal.hidden
        finally:
            self.entering = None


class _LeftError(Exception):
    """Leaves a forward after the last block of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _StandIn(nn.Module):
    """Stand-in with the plain attributes of the original module, which a forward may read."""

    def __init__(self, original: nn.Module, gate: Gate) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and isinstance(value, str | int | float | bool | None):
                self.__dict__[name] = value
        self.__dict__["gate"] = gate

    def arrived(self) -> Tensor:
        """Return the hidden states that entered the stage."""
        entering: Tensor = self.__dict__["gate"].entering
        return entering


class _Arriving(_StandIn):
    """Stand-in for a part before the blocks; its output has the right shape but is not used."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.arrived().detach()


class _Passed(_StandIn):
    """Stand-in for a block of an earlier stage; returns the hidden states that arrived."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.arrived()


class _Leave(_StandIn):
    """Stand-in for the first block of the next stage; leaves the forward."""

    def forward(self, *args: Any, **named: Any) -> NoReturn:
        hidden = args[0] if args else named.pop("hidden_states", None)
        if not isinstance(hidden, Tensor):
            raise ModelError("a block is not given its hidden states first, so no stage ends there")
        others: dict[Any, Any] = {**dict(enumerate(args[1:], 1)), **named}
        for name, value in others.items():
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    raise ModelError(
                        f"blocks take input {name!r} next to their hidden states, which weights of"
                        " another stage compute; set pipeline=1"
                    )
        raise _LeftError(hidden)


class _Elsewhere(_StandIn):
    """Stand-in for parts that only the last stage has."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise ModelError("a part of the last stage was called on an earlier one; name it in head")


def block_names(module: nn.Module, plan: ModelPlan) -> list[str]:
    """Return the full names of a module's blocks, in order."""
    return [name for name, _ in module.named_modules() if plan.is_block(name)]


def check_cut(module: nn.Module, plan: ModelPlan, pipeline: int) -> None:
    """Check that a plan assigns each parameter to a stage.

    Raises:
        LayoutError: there are no or too few blocks, a parameter is neither in a block nor named by
            the plan, or stages share a weight that the plan does not tie.
    """
    why = f"pipeline={pipeline} cannot cut {type(module).__name__}"
    blocks = len(block_names(module, plan))
    if not blocks:
        raise LayoutError(
            f"{why}: its blocks are not known; name them, and what stands before and behind:"
            " ModelPlan(blocks='layers.*', embedding=('embed',), head=('norm', 'head')), or set"
            " pipeline=1 and give its processes to data"
        )
    if blocks < pipeline:
        raise LayoutError(f"{why}, which has {blocks} blocks; values that fit: 1 to {blocks}")
    tied = {frozenset(pair) for pair in plan.tied}
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not plan.holds((plan.blocks, *plan.embedding, *plan.head), name):
            raise LayoutError(
                f"{why}: {name!r} is in no block; name its module in the plan's embedding or head"
            )
        other = names.setdefault(parameter, name)
        if other != name and frozenset((other, name)) not in tied:
            raise LayoutError(
                f"{why}: {other!r} and {name!r} are one weight; say so in the plan:"
                f" tied=(({other!r}, {name!r}),)"
            )


def cut(module: nn.Module, plan: ModelPlan, layers: range) -> Gate:
    """Reduce a module to some of its blocks, and the parts at its ends that belong to them.

    Args:
        module: whole module; parts of other stages are replaced in place.
        plan: names the blocks and the parts before and after them.
        layers: numbers of the blocks to keep.
    """
    gate, names = Gate(), block_names(module, plan)
    for number, name in enumerate(names):
        if number < layers.start:
            _replace(module, name, _Passed, gate)
        elif number == layers.stop:
            _replace(module, name, _Leave, gate)
        elif number > layers.stop:
            _replace(module, name, _Elsewhere, gate)
    for name in [name for name, _ in module.named_modules() if name]:
        if layers.start > 0 and plan.names(plan.embedding, name):
            _replace(module, name, _Arriving, gate)
        elif layers.stop < len(names) and plan.names(plan.head, name):
            _replace(module, name, _Elsewhere, gate)
    return gate


def _replace(module: nn.Module, name: str, kind: Callable[..., nn.Module], gate: Gate) -> None:
    parent, _, child_name = name.rpartition(".")
    holder = module.get_submodule(parent)
    holder._modules[child_name] = kind(holder._modules[child_name], gate)

"""Cuts one pipeline stage out of a module that was built whole, in place.

The module's own forward still runs, over stand-ins for what other stages hold: on a later stage
its embedding and the blocks before give way to what arrives, and on an earlier one the forward is
left behind the last block. So nothing need be known of what a forward does around its blocks.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from ms_parallel.errors import LayoutError, ModelError
from ms_parallel.models.plan import ModelPlan


class Gate:
    """Where hidden states enter a stage that is cut out, and leave it."""

    def __init__(self) -> None:
        self.entering: Tensor | None = None
        """(B, S, H) from the stage before, while a forward lasts."""

    def run(self, forward: Callable[[], Any], entering: Tensor | None) -> Any:
        """Run `forward`; return its result, or the hidden states (B, S, H) at which it is left."""
        self.entering = entering
        try:
            return forward()
        except _LeftError as left:
            return left.hidden
        finally:
            self.entering = None


class _LeftError(Exception):
    """Ends a forward behind the last block of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _StandIn(nn.Module):
    """Bears the settings of the module that it stands for, which a forward may ask for."""

    def __init__(self, original: nn.Module, gate: Gate) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and isinstance(value, str | int | float | bool | None):
                self.__dict__[name] = value
        self.__dict__["gate"] = gate

    def arrived(self) -> Tensor:
        """Return what entered the stage."""
        entering: Tensor = self.__dict__["gate"].entering
        return entering


class _Arriving(_StandIn):
    """Stands for a part before the blocks: of the right shape, and replaced before it is used."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.arrived().detach()


class _Passed(_StandIn):
    """Stands for a block of an earlier stage: what arrives, whatever it is given."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.arrived()


class _Leave(_StandIn):
    """Stands for the first block of the next stage: the forward ends here."""

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
    """Stands for what only the last stage has."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise ModelError("a part of the last stage was called on an earlier one; name it in head")


def block_names(module: nn.Module, plan: ModelPlan) -> list[str]:
    """List the full names of a module's blocks, in their order."""
    return [name for name, _ in module.named_modules() if plan.is_block(name)]


def check_cut(module: nn.Module, plan: ModelPlan, pipeline: int) -> None:
    """Check that a plan says of each parameter which stage has it.

    Raises:
        LayoutError: there are no blocks or too few, a parameter is neither theirs nor named, or
            stages share one that the plan does not tie.
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
    """Leave in a module only the blocks of these numbers, and what stands at its ends.

    Args:
        module: whole; its own parts are replaced.
        plan: names its blocks, what stands before them and what behind.
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
    parent, _, own = name.rpartition(".")
    holder = module.get_submodule(parent)
    holder._modules[own] = kind(holder._modules[own], gate)

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

__all__ = ["Gate", "block_names", "check_cut", "cut"]


class Gate:
    """Where hidden states enter a stage that is cut out, and leave it."""

    def __init__(self) -> None:
        self.entering: Tensor | None = None
        """(B, S, H) from the stage before, while a forward lasts."""

    def run(self, forward: Callable[[], Any], entering: Tensor | None) -> Any:
        """What `forward` returns, or the hidden states (B, S, H) at which it is left."""
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


class _Arriving(_StandIn):
    """Stands for a part before the blocks: of the right shape, and replaced before it is used."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        entering: Tensor = self.gate.entering
        return entering.detach()


class _Passed(_StandIn):
    """Stands for a block of an earlier stage: what arrives, whatever it is given."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        entering: Tensor = self.gate.entering
        return entering


class _Leave(_StandIn):
    """Stands for the first block of the next stage: the forward ends here."""

    def forward(self, *args: Any, **named: Any) -> NoReturn:
        hidden = args[0] if args else named.pop("hidden_states", None)
        if not isinstance(hidden, Tensor):
            raise ModelError("a block is not given its hidden states first, so no stage ends there")
        for name, value in {**dict(enumerate(args[1:], 1)), **named}.items():
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    raise ModelError(
                        f"blocks are given {name!r} beside their hidden states, which weights of"
                        " another stage have made; set pipeline=1"
                    )
        raise _LeftError(hidden)


class _Elsewhere(_StandIn):
    """Stands for what only the last stage has."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise ModelError("a part of the last stage was called on an earlier one; name it in head")


def block_names(module: nn.Module, plan: ModelPlan) -> list[str]:
    """Full names of a module's blocks, in their order."""
    return [name for name, _ in module.named_modules() if plan.is_block(name)]


def check_cut(module: nn.Module, plan: ModelPlan) -> None:
    """Check that a plan says of each parameter which stage has it.

    Raises:
        LayoutError: there are no blocks, or a parameter is neither theirs nor named.
    """
    kind = type(module).__name__
    if not block_names(module, plan):
        raise LayoutError(
            f"no stage can be cut out of {kind} without its blocks; name them, and what stands"
            " before and behind: ModelPlan(blocks='layers.*', embedding=('embed',), head=('norm',"
            " 'head')), or set pipeline=1"
        )
    for name, _ in module.named_parameters():
        if not plan.holds((plan.blocks, *plan.embedding, *plan.head), name):
            raise LayoutError(
                f"no stage has {name!r} of {kind}, which is in no block; name its module in the"
                " plan's embedding or head, or set pipeline=1"
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

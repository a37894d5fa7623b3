"""Reduce a full module to one pipeline stage, in place.

The module's forward still runs unchanged, with placeholders for the parts of other stages. On later
stages the embedding and the earlier blocks return the hidden states received from the previous
stage. On earlier stages an exception leaves the forward after the last local block. No knowledge of
the code around the blocks is needed.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from ms_parallel.errors import LayoutError, ModelError
from ms_parallel.models.plan import ModelPlan


class StageBoundary:
    """Feeds hidden states into a stage's forward and catches them at its exit."""

    def __init__(self) -> None:
        self.entering: Tensor | None = None
        """(B, S, H) from the previous stage; set only during a forward."""

    def run(self, forward: Callable[[], Any], entering: Tensor | None) -> Any:
        """Run `forward`; return its result, or the hidden states (B, S, H) at the stage's exit."""
        self.entering = entering
        try:
            return forward()
        except _StageExitError as signal:
            return signal.hidden
        finally:
            self.entering = None


class _StageExitError(Exception):
    """Control flow: leaves the forward after the last block of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Placeholder(nn.Module):
    """Placeholder with the scalar attributes of the original, which a forward may read."""

    def __init__(self, original: nn.Module, boundary: StageBoundary) -> None:
        super().__init__()
        # Model loops read attributes such as `attention_type` from their blocks.
        for name, value in vars(original).items():
            if not name.startswith("_") and isinstance(value, str | int | float | bool | None):
                self.__dict__[name] = value
        self.__dict__["boundary"] = boundary

    def stage_input(self) -> Tensor:
        """Hidden states (B, S, H) from the previous stage."""
        entering: Tensor = self.__dict__["boundary"].entering
        return entering


class _InputPart(_Placeholder):
    """Placeholder for a module before the blocks; only the shape of its output matters."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        # Only its shape matters: gradients reach the previous stage through the blocks.
        return self.stage_input().detach()


class _EarlierBlock(_Placeholder):
    """Placeholder for a block of an earlier stage; returns the stage's input."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.stage_input()


class _ExitBlock(_Placeholder):
    """Placeholder for the first block of the next stage; leaves the forward."""

    def forward(self, *args: Any, **named: Any) -> NoReturn:
        hidden = args[0] if args else named.pop("hidden_states", None)
        if not isinstance(hidden, Tensor):
            raise ModelError(
                "a block must take its hidden states as the first argument or as hidden_states; set"
                " pipeline=1"
            )
        # Gradients through other inputs would not reach the earlier stage.
        inputs: dict[Any, Any] = {**dict(enumerate(args[1:], 1)), **named}
        for name, value in inputs.items():
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    raise ModelError(
                        f"blocks take an input {name!r} computed by weights of another stage; set"
                        " pipeline=1"
                    )
        raise _StageExitError(hidden)


class _LaterPart(_Placeholder):
    """Placeholder for modules of later stages, which must not run."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise ModelError(
            "a module of the last stage was called on an earlier stage; list it in the plan's head"
        )


def block_names(module: nn.Module, plan: ModelPlan) -> list[str]:
    """Return the full names of a module's blocks, in order."""
    return [name for name, _ in module.named_modules() if plan.is_block(name)]


def check_stage_plan(module: nn.Module, plan: ModelPlan, pipeline: int) -> None:
    """Check that a plan assigns each parameter to a stage.

    Raises:
        LayoutError: the module has fewer blocks than stages, a parameter is neither in a block nor
            named by the plan, or stages share a weight that the plan does not tie.
    """
    prefix = f"pipeline={pipeline} cannot cut {type(module).__name__}"
    blocks = len(block_names(module, plan))
    if not blocks:
        raise LayoutError(
            f"{prefix}: its plan does not name the blocks; pass ModelPlan(blocks='layers.*',"
            " embedding=('embed',), head=('norm', 'head')), or set pipeline=1 and use data ranks"
            " instead"
        )
    if blocks < pipeline:
        raise LayoutError(f"{prefix}, which has {blocks} blocks; use 1 to {blocks}")
    tied = {frozenset(pair) for pair in plan.tied}
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not plan.holds((plan.blocks, *plan.embedding, *plan.head), name):
            raise LayoutError(
                f"{prefix}: {name!r} is not in a block; list its module in the plan's embedding or"
                " head"
            )
        owner = names.setdefault(parameter, name)
        if owner != name and frozenset((owner, name)) not in tied:
            raise LayoutError(
                f"{prefix}: {owner!r} and {name!r} share one weight; add it to the plan:"
                f" tied=(({owner!r}, {name!r}),)"
            )


def extract_stage(module: nn.Module, plan: ModelPlan, layers: range) -> StageBoundary:
    """Replace all parts of a module outside one pipeline stage by placeholders, in place.

    Args:
        module: full module.
        plan: names the blocks and the modules before and after them.
        layers: block indices of the stage.

    Returns:
        The boundary through which to run the stage.
    """
    boundary, names = StageBoundary(), block_names(module, plan)
    for number, name in enumerate(names):
        if number < layers.start:
            _replace(module, name, _EarlierBlock, boundary)
        elif number == layers.stop:
            _replace(module, name, _ExitBlock, boundary)
        elif number > layers.stop:
            _replace(module, name, _LaterPart, boundary)
    # A list, because `_replace` changes the tree.
    for name in [name for name, _ in module.named_modules() if name]:
        if layers.start > 0 and plan.names(plan.embedding, name):
            _replace(module, name, _InputPart, boundary)
        elif layers.stop < len(names) and plan.names(plan.head, name):
            _replace(module, name, _LaterPart, boundary)
    return boundary


def _replace(
    module: nn.Module, name: str, placeholder: Callable[..., nn.Module], boundary: StageBoundary
) -> None:
    parent_name, _, child_name = name.rpartition(".")
    parent = module.get_submodule(parent_name)
    parent._modules[child_name] = placeholder(parent._modules[child_name], boundary)

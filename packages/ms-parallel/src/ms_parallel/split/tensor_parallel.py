"""Tensor and sequence parallelism according to a model's plan."""

from typing import Any, get_args

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from ms_parallel.cluster.groups import Groups
from ms_parallel.errors import ModelError
from ms_parallel.models.experts.grouped import GroupedLinear
from ms_parallel.models.experts.router import Router
from ms_parallel.models.parts.norm import FullWidthNorm
from ms_parallel.models.plan import ModelPlan, Style


def split_model(
    model: nn.Module, plan: ModelPlan, groups: Groups, *, gather_logits: bool = False
) -> None:
    """Replace, in place, the parameters that the plan splits by DTensors on the tensor axis.

    Between blocks each rank holds its part of the sequence. What feeds `column` modules gathers
    it once for all of them; `row` modules and the embedding sum and scatter it again. Parameters
    that stay whole stay plain tensors, so that any operator takes them; each rank then has only
    its own share of their gradient, see `is_whole`.

    Args:
        model: to be split.
        plan: how.
        groups: the layout's processes.
        gather_logits: a linear map over the vocabulary gives whole logits on each rank, where its
            module is called; else who uses its weight asks for the local part.
    """
    if groups.layout.tensor == 1:
        return
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if not plan.split_sequence:
            styles |= _of_whole_sequence(plan, name)
            continue
        match plan.style(f"{name}.weight"):
            case "column":
                styles[name] = ColwiseParallel()
                styles[name.rpartition(".")[0]] = PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate()
                )
            case "gathering_column":
                styles[name] = ColwiseParallel(input_layouts=Shard(1))
                styles[name.rpartition(".")[0]] = ShowWhole()
            case "row":
                styles[name] = RowwiseParallel(output_layouts=Shard(1))
            case "vocabulary" if isinstance(module, nn.Embedding):
                styles[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
            case "vocabulary" if gather_logits:
                styles[name] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
            case "vocabulary":
                styles[name] = SplitRows()
            case "split_heads":
                styles[name] = SplitHeads()
            case "split_width":
                styles[name] = SplitWidth()
            case "router":
                styles[name] = SpreadChoices()
            case "expert_column" | "expert_row" as style:
                styles[name] = SplitExperts(rows=style == "expert_column")
                styles[name.rpartition(".")[0]] = GatherTokens()
            case "sequence" | "heads":
                pass
            case style:
                raise _misfit(name, style, plan)
    # None: every rank slices locally without communication, since weights are filled later.
    parallelize_module(model, groups.mesh["tensor"], styles, src_data_rank=None)


def _of_whole_sequence(plan: ModelPlan, name: str) -> dict[str, ParallelStyle]:
    """Choose a module's style without sequence parallelism."""
    match plan.style(f"{name}.weight"):
        case "column":
            return {name: ColwiseParallel()}
        case "column_to_whole":
            return {name: ColwiseParallel(output_layouts=Replicate())}
        case "row":
            return {name: RowwiseParallel()}
        case "row_of_whole":
            return {name: RowwiseParallel(input_layouts=Replicate())}
        case "summed":
            return {name: SumOfParts(plan, name)}
        case "heads" | "replicated":
            return {}
        case style:
            raise _misfit(name, style, plan)


SEQUENCE_STYLES = tuple(
    style
    for style in get_args(Style)
    if style not in ("column_to_whole", "replicated", "row_of_whole", "summed")
)
"""Styles with sequence parallelism: each rank has its part of the sequence between blocks."""
WHOLE_STYLES = ("column", "column_to_whole", "heads", "replicated", "row", "row_of_whole", "summed")
"""Styles without sequence parallelism: each rank has the full sequence between blocks."""


def _misfit(name: str, style: str, plan: ModelPlan) -> ModelError:
    styles = SEQUENCE_STYLES if plan.split_sequence else WHOLE_STYLES
    return ModelError(
        f"the style of {name!r} must be one of {', '.join(styles)} in a plan with"
        f" split_sequence={plan.split_sequence}, got {style!r}; change it, or set split_sequence"
        f" to {not plan.split_sequence}"
    )


def is_whole(name: str, plan: ModelPlan) -> bool:
    """Whether tensor ranks have the full parameter but only a partial sum of its gradient."""
    style = plan.style(name)
    return style in ("sequence", "heads", "router") or (
        style == "expert_row" and name.endswith(".bias")
    )


def gather_sequence(hidden: Tensor, groups: Groups) -> Tensor:
    """All-gather the sequence on every tensor rank; the backward pass sums the gradients."""
    return _gathered(hidden, groups.mesh["tensor"])


def gather_vocabulary(logits: Tensor, groups: Groups) -> Tensor:
    """All-gather logits (B, S, V) of the full vocabulary on every tensor rank."""
    spread = DTensor.from_local(logits, groups.mesh["tensor"], [Shard(2)], run_check=False)
    return spread.redistribute(placements=[Replicate()]).to_local()


def local_view(weight: Tensor) -> Tensor:
    """Return this process's rows of a weight, differentiably."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class SplitRows(ParallelStyle):
    """Splits dim 0 of a module's parameters; who uses them asks for their local part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            split: DTensor = distribute_tensor(
                parameter, device_mesh, [Shard(0)], src_data_rank=None
            )
            module.register_parameter(
                name, nn.Parameter(split, requires_grad=parameter.requires_grad)
            )
        return module


class SumOfParts(ParallelStyle):
    """Splits a module's own parameters as the plan says of each, and sums the module's output.

    Who uses them asks for their local part. Each rank has a share of the inputs' gradient.
    """

    def __init__(self, plan: ModelPlan, name: str) -> None:
        super().__init__()
        self.plan, self.name = plan, name

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for own, parameter in list(module.named_parameters(recurse=False)):
            dim = self.plan.split_dim(f"{self.name}.{own}")
            assert dim is not None
            split: DTensor = distribute_tensor(
                parameter, device_mesh, [Shard(dim % parameter.ndim)], src_data_rank=None
            )
            module._parameters[own] = nn.Parameter(split, requires_grad=parameter.requires_grad)

        def shared(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.is_floating_point()):
                return value
            whole = DTensor.from_local(value, device_mesh, [Replicate()], run_check=False)
            return whole.to_local(grad_placements=[Partial()])

        def share(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return tuple(map(shared, args)), {key: shared(value) for key, value in named.items()}

        def total(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            part = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            return part.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_pre_hook(share, with_kwargs=True)
        module.register_forward_hook(total)
        return module


class ShowWhole(ParallelStyle):
    """Gives a module on a part of the sequence a function that gathers the full sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shown: Any = module
        assert callable(shown.whole)
        shown.whole = lambda part: _gathered(part, device_mesh)
        return module


class SplitHeads(SplitRows):
    """Splits a parameter with one row per head, added to tensors (B, S, local heads, D)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)

        def spread(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            return (DTensor.from_local(inputs[0], device_mesh, [Shard(2)], run_check=False),)

        module.register_forward_pre_hook(spread)
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


class SplitWidth(SplitRows):
    """Splits a norm's weight along with its width; the mean square is summed over processes."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, FullWidthNorm)
        module.across = _Mesh(device_mesh)
        return super()._apply(module, device_mesh)


class _Mesh:
    """Sum over the processes of a mesh, for norms over a split width."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def total(self, sums: Tensor) -> Tensor:
        spread = DTensor.from_local(sums, self.mesh, [Partial()], run_check=False)
        return spread.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def local(self, weight: Tensor) -> Tensor:
        return local_view(weight)


class SpreadChoices(ParallelStyle):
    """Gives a router on a part of the sequence the choices of the full sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Router)
        module.whole = lambda part: _gathered(part, device_mesh)
        module.part = device_mesh.get_local_rank()
        return module


class SplitExperts(ParallelStyle):
    """Splits the width of every expert; each rank computes a partial sum of the output."""

    def __init__(self, *, rows: bool) -> None:
        super().__init__()
        self.rows = rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, GroupedLinear)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name == "bias" and not self.rows:
                module.share = 1.0 / device_mesh.size()
                continue
            split = distribute_tensor(parameter, device_mesh, [Shard(2)], src_data_rank=None)
            module.register_parameter(
                name, nn.Parameter(split, requires_grad=parameter.requires_grad)
            )
        return module


class GatherTokens(ParallelStyle):
    """Gathers sequence and routing before the experts, and reduce-scatters their output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(_gathered(part, device_mesh) for part in inputs)

        def scatter(_: nn.Module, inputs: object, share: Tensor) -> Tensor:
            spread = DTensor.from_local(share, device_mesh, [Partial()], run_check=False)
            return spread.redistribute(placements=[Shard(1)]).to_local()

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(scatter)
        return module


def _gathered(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather all positions (B, S, ...) from each rank's (B, part of S, ...); sum the gradients."""
    spread = DTensor.from_local(part, mesh, [Shard(1)], run_check=False)
    return spread.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

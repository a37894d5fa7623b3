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
    """Split the parameters that the plan names over the tensor axis, in place, as DTensors.

    Between blocks each rank holds a slice of the sequence. The parent of `column` modules gathers
    the sequence once for its children; `row` modules and the embedding reduce-scatter it again.
    Replicated parameters stay plain tensors, so that any operator accepts them; each rank then has
    only a partial sum of their gradient, see `has_partial_gradient`.

    Args:
        model: model to split.
        plan: parallel plan of the model.
        groups: process groups of the layout.
        gather_logits: the head's module returns full logits on each rank. Otherwise its weight is
            only split, and the loss uses the local rows.
    """
    if groups.layout.tensor == 1:
        return
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        # A container gets its style from its children below.
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if not plan.split_sequence:
            styles |= _full_sequence_style(plan, name)
            continue
        match plan.style(f"{name}.weight"):
            case "column":
                styles[name] = ColwiseParallel()
                styles[name.rpartition(".")[0]] = PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate()
                )
            # MLA: these modules gather their own input, and the parent the key that heads share.
            case "gathering_column":
                styles[name] = ColwiseParallel(input_layouts=Shard(1))
                styles[name.rpartition(".")[0]] = GatherSequenceFunction()
            case "row":
                styles[name] = RowwiseParallel(output_layouts=Shard(1))
            # Each rank looks up its part of the vocabulary; partial sums are reduce-scattered.
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
                styles[name] = GatherRouterChoices()
            case "expert_column" | "expert_row" as style:
                styles[name] = SplitExpertWidth(rows=style == "expert_column")
                styles[name.rpartition(".")[0]] = GatherTokens()
            # Replicated parameters on a slice of the sequence, or on the local heads.
            case "sequence" | "heads":
                pass
            case style:
                raise _unsupported_style(name, style, plan)
    # None: every rank slices locally without communication, since weights are filled later.
    parallelize_module(model, groups.mesh["tensor"], styles, src_data_rank=None)


def _full_sequence_style(plan: ModelPlan, name: str) -> dict[str, ParallelStyle]:
    """Return a module's parallel style without sequence parallelism."""
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
            return {name: PartialSumModule(plan, name)}
        case "heads" | "replicated":
            return {}
        case style:
            raise _unsupported_style(name, style, plan)


SEQUENCE_STYLES = tuple(
    style
    for style in get_args(Style)
    if style not in ("column_to_whole", "expert", "replicated", "row_of_whole", "summed")
)
"""Styles with sequence parallelism: each rank has a slice of the sequence between blocks."""
FULL_SEQUENCE_STYLES = (
    "column",
    "column_to_whole",
    "heads",
    "replicated",
    "row",
    "row_of_whole",
    "summed",
)
"""Styles without sequence parallelism: each rank has the full sequence between blocks."""


def _unsupported_style(name: str, style: str, plan: ModelPlan) -> ModelError:
    styles = SEQUENCE_STYLES if plan.split_sequence else FULL_SEQUENCE_STYLES
    return ModelError(
        f"the style of {name!r} must be one of {', '.join(styles)} in a plan with"
        f" split_sequence={plan.split_sequence}, got {style!r}; change it, or set split_sequence"
        f" to {not plan.split_sequence}"
    )


def has_partial_gradient(name: str, plan: ModelPlan) -> bool:
    """Whether tensor ranks have the full parameter but only a partial sum of its gradient."""
    style = plan.style(name)
    return style in ("sequence", "heads", "router", "expert") or (
        style == "expert_row" and name.endswith(".bias")
    )


def gather_sequence(hidden: Tensor, groups: Groups) -> Tensor:
    """All-gather the sequence on every tensor rank; the backward pass sums the gradients."""
    return _all_gather_sequence(hidden, groups.mesh["tensor"])


def gather_vocabulary(logits: Tensor, groups: Groups) -> Tensor:
    """All-gather logits (B, S, V) of the full vocabulary on every tensor rank."""
    # (B, S, V/tensor) -> (B, S, V).
    sharded = DTensor.from_local(logits, groups.mesh["tensor"], [Shard(2)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local()


def local_view(weight: Tensor) -> Tensor:
    """Return this process's rows of a weight; differentiable."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class SplitRows(ParallelStyle):
    """Splits dim 0 of a module's parameters; the module's users take their local part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            split: DTensor = distribute_tensor(
                parameter, device_mesh, [Shard(0)], src_data_rank=None
            )
            module.register_parameter(
                name, nn.Parameter(split, requires_grad=parameter.requires_grad)
            )
        return module


class PartialSumModule(ParallelStyle):
    """Splits each parameter of a module by the plan, and all-reduces the module's output.

    The module computes with local parts, so each rank has a partial sum of the inputs' gradient.
    """

    def __init__(self, plan: ModelPlan, name: str) -> None:
        super().__init__()
        self.plan, self.name = plan, name

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for param_name, parameter in list(module.named_parameters(recurse=False)):
            dim = self.plan.split_dim(f"{self.name}.{param_name}")
            assert dim is not None
            split: DTensor = distribute_tensor(
                parameter, device_mesh, [Shard(dim % parameter.ndim)], src_data_rank=None
            )
            module._parameters[param_name] = nn.Parameter(
                split, requires_grad=parameter.requires_grad
            )

        # Each rank computes a part of the output, so it gets a partial input gradient.
        def mark_partial_grad(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.is_floating_point()):
                return value
            replicated = DTensor.from_local(value, device_mesh, [Replicate()], run_check=False)
            return replicated.to_local(grad_placements=[Partial()])

        def mark_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return tuple(map(mark_partial_grad, args)), {
                key: mark_partial_grad(value) for key, value in kwargs.items()
            }

        def all_reduce_output(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            partial = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_pre_hook(mark_inputs, with_kwargs=True)
        module.register_forward_hook(all_reduce_output)
        return module


class GatherSequenceFunction(ParallelStyle):
    """Sets a module's `gather_sequence`, which gathers the full sequence from its slice."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        typed: Any = module
        assert callable(typed.gather_sequence)
        typed.gather_sequence = lambda part: _all_gather_sequence(part, device_mesh)
        return module


class SplitHeads(SplitRows):
    """Splits a parameter with one row per head, added to tensors (B, S, local heads, D)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)

        def to_dtensor(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            return (DTensor.from_local(inputs[0], device_mesh, [Shard(2)], run_check=False),)

        module.register_forward_pre_hook(to_dtensor)
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


class SplitWidth(SplitRows):
    """Splits a norm's weight along with its width; the mean square is summed over processes."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, FullWidthNorm)
        module.across = _NormReduction(device_mesh)
        return super()._apply(module, device_mesh)


class _NormReduction:
    """All-reduce of sums of squares, for norms over a split width."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def total(self, sums: Tensor) -> Tensor:
        partial = DTensor.from_local(sums, self.mesh, [Partial()], run_check=False)
        # The backward sums as well: each rank's gradient covers only its part of the width.
        return partial.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def local(self, weight: Tensor) -> Tensor:
        return local_view(weight)


class GatherRouterChoices(ParallelStyle):
    """Sets a router's `gather_sequence`, which gathers the choices of the full sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Router)
        module.gather_sequence = lambda part: _all_gather_sequence(part, device_mesh)
        module.part = device_mesh.get_local_rank()
        return module


class SplitExpertWidth(ParallelStyle):
    """Splits the width of every expert; each rank computes a partial sum of the output."""

    def __init__(self, *, rows: bool) -> None:
        super().__init__()
        self.rows = rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, GroupedLinear)
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Every rank adds the bias to its partial sum, so each adds its share of it.
            if name == "bias" and not self.rows:
                module.share = 1.0 / device_mesh.size()
                continue
            # Dim 2 is the expert width I of both gate_up_proj (E, 2, I, H) and down_proj (E, H, I).
            split = distribute_tensor(parameter, device_mesh, [Shard(2)], src_data_rank=None)
            module.register_parameter(
                name, nn.Parameter(split, requires_grad=parameter.requires_grad)
            )
        return module


class GatherTokens(ParallelStyle):
    """Gathers sequence and routing before the experts, and reduce-scatters their output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(_all_gather_sequence(part, device_mesh) for part in inputs)

        def scatter(_: nn.Module, inputs: object, partial_sum: Tensor) -> Tensor:
            # Partial sums (B, S, H) -> (B, S/tensor, H).
            partial = DTensor.from_local(partial_sum, device_mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=[Shard(1)]).to_local()

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(scatter)
        return module


def _all_gather_sequence(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """All-gather (B, S, ...) from the (B, S/tensor, ...) of each rank; sum the gradients."""
    sharded = DTensor.from_local(part, mesh, [Shard(1)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

"""All private names of torch that this package uses, to be checked against each new version."""

from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "AsyncCollectiveTensor",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "box_offsets",
    "checkpoint",
    "end_fsdp_backward",
    "fake_store",
    "flash_attention",
    "flash_attention_backward",
    "foreach_add_",
    "foreach_mul_",
    "foreach_norm",
    "fsdp_owner",
    "fsdp_parameters",
    "fsdp_shards",
    "fsdp_size",
    "gathered_weight",
    "has_triton",
    "is_persistent",
    "local_of",
    "privateuse1_name",
    "spec_of",
    "start_fsdp_streams",
    "tree_leaves",
    "tree_map_only",
    "unflatten_mesh",
    "unsafe_view",
    "unset_fake_temporarily",
    "varlen_attention",
    "with_spec",
]

foreach_add_, foreach_mul_, foreach_norm = (
    torch._foreach_add_,
    torch._foreach_mul_,
    torch._foreach_norm,
)
flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
unsafe_view: Any = torch.ops.aten._unsafe_view


def fake_store() -> Any:
    """Store of the "fake" backend, whose collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    return FakeStore()


def privateuse1_name() -> str:
    """Name of the out-of-tree device type, such as `npu`."""
    return str(torch._C._get_privateuse1_backend_name())


def unflatten_mesh(
    mesh: DeviceMesh, sizes: tuple[int, int], names: tuple[str, str]
) -> tuple[DeviceMesh, DeviceMesh]:
    """Split the only axis of a mesh into two; adjacent ranks share the second one."""
    unflattened = mesh._unflatten(0, sizes, names)
    return unflattened[names[0]], unflattened[names[1]]


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a buffer of a module is part of its state_dict."""
    return name not in module._non_persistent_buffers_set


def box_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Offset of this process's shard in the full tensor, per dim."""
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets)


def spec_of(tensor: DTensor) -> Any:
    """Mesh, placements and shape of a DTensor."""
    return tensor._spec


def local_of(tensor: DTensor) -> Tensor:
    """Local tensor of a DTensor, outside autograd."""
    return tensor._local_tensor


def with_spec(local: Tensor, spec: Any) -> DTensor:
    """Build a DTensor from a local tensor and a spec, without copies or checks."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def start_fsdp_streams(model: FSDPModule) -> None:
    """Run FSDP's lazy initialization, for example of its streams, before the first forward."""
    model._get_fsdp_state()._lazy_init()


def end_fsdp_backward(model: FSDPModule) -> None:
    """Run FSDP's callback at the end of a backward pass."""
    model._get_fsdp_state()._root_post_backward_final_callback()


def fsdp_parameters(module: FSDPModule) -> list[Any]:
    """FSDP's records (`FSDPParam`) of the parameters that one module shards."""
    state: Any = module._get_fsdp_state()
    # Older versions of torch have one group per module, newer ones a list.
    group = getattr(state, "_fsdp_param_group", None)
    groups = getattr(state, "_fsdp_param_groups", [group] if group else [])
    return [parameter for group in groups for parameter in group.fsdp_params]


def fsdp_shards(module: FSDPModule) -> int:
    """Number of processes over which one module is sharded."""
    group: Any = module._get_fsdp_state()._fsdp_param_group
    return int(group.mesh_info.shard_mesh_size)


def fsdp_size(parameter: Any) -> int:
    """Number of elements of the unsharded parameter of an FSDP record."""
    return int(parameter._orig_size.numel())


def fsdp_owner(parameter: Any) -> nn.Module:
    """Module that owns the parameter of an FSDP record."""
    owner: nn.Module = parameter._module_info.module
    return owner


def gathered_weight(parameter: Any) -> Tensor | None:
    """Unsharded weight of an FSDP record; None before the first forward."""
    weight: Tensor | None = getattr(parameter, "_unsharded_param", None)
    return weight


@cache
def has_triton() -> bool:
    """Whether torch.compile can generate kernels for the accelerator."""
    from torch.utils._triton import has_triton as torch_has_triton  # imports Triton

    return bool(torch_has_triton())


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: Tensor,
    longest: int,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """FlashAttention over packed sequences (T, heads, D), on CUDA in half precision.

    torch 2.11 detects grouped-query heads; later versions need `enable_gqa`.
    """
    from torch.nn.attention.varlen import varlen_attn

    window_left = -1 if window is None else window - 1  # positions before the query; -1: unlimited
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    out: Any = varlen_attn(
        q,
        k,
        v,
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scale,
        window_size=(window_left, 0 if causal else window_left),
        **grouped,
    )
    return out  # type: ignore[no-any-return]

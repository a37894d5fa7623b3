"""Small QAT runs for every layout; `run_processes` calls these functions by name."""

import hashlib
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from ms_compress import CompressError, export, fit_scales, qat
from ms_compress.methods.pattern import parse_pattern
from ms_compress.methods.pruning import keep_zeros, mask_zeros, masks, prune, set_masks
from ms_parallel import AdamWConfig, Engine, Layout, NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.models import DecoderConfig, StagedModel, architecture

VOCABULARY = 64
CONFIG = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    initializer_range=0.1,
)
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "initializer_range"),
)
TARGETS = {
    "ct.int4_g32": {"learned_scales": True},
    "ct.int3_g32": {},
    "ct.w8a8": {},
    # Inputs are not rounded: with norms of one they fall on borders between codes.
    "gguf.q4_0": {
        "learned_scales": True,
        "embeddings": True,
        "head": True,
        "activations": False,
    },
    "ort.matmulnbits": {},
}
STEPS = 3


def train(
    layout: dict[str, int],
    scheme: str,
    folder: str,
    sparse: bool = False,
    device: str | None = "cpu",
) -> dict[str, Any]:
    """Return losses of some steps in float64, and the digest of every exported file."""
    torch.set_default_dtype(torch.float64)
    try:
        return _train_and_export(connect(Layout(**layout), device=device), scheme, folder, sparse)
    finally:
        torch.set_default_dtype(torch.float32)


def _train_and_export(groups: Groups, scheme: str, folder: str, sparse: bool) -> dict[str, Any]:
    masks = {}
    if sparse:
        for layer in range(CONFIG.num_hidden_layers):
            for name, shape in (("mlp.up_proj", (256, 128)), ("mlp.down_proj", (128, 256))):
                generator = torch.Generator().manual_seed(layer)
                scores = torch.rand(shape, generator=generator)
                masks[f"model.layers.{layer}.{name}"] = parse_pattern("2:4").keep(scores)

    def prepare(stage: StagedModel) -> None:
        set_masks(stage, masks)
        qat(stage, scheme, **TARGETS[scheme])
        stage.double()

    engine = Engine(
        CONFIG,
        optimizer=AdamWConfig(learning_rate=2e-3, warmup_steps=0, weight_decay=0.1),
        groups=groups,
        microbatch_size=1 if groups.layout.pipeline > 1 else None,
        prepare=prepare,
    )
    losses = []
    rows = 4 // groups.layout.data
    local_rows = slice(groups.place.data * rows, groups.place.data * rows + rows)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(0, VOCABULARY, (4, 17), generator=generator)[local_rows]
        batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
        losses.append(engine.step(batch, NextTokenLoss()).loss)
    out = export(list(engine.stages.values()), Path(folder))
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}
    return {"losses": losses, "files": files}


def export_same_weights(
    layout: dict[str, int], scheme: str, folder: str, family: str = "llama"
) -> dict[str, str]:
    """Return digests of the exported files of an untrained model."""
    groups = connect(Layout(**layout), device="cpu")
    sizes = {name: getattr(CONFIG, name) for name in SIZES}
    config = CONFIG if family == "llama" else architecture(family, sizes)
    engine = Engine(config, groups=groups, prepare=lambda s: qat(s, scheme, **TARGETS[scheme]))
    with torch.no_grad():
        for name, parameter in engine.parameters.items():
            if name.endswith("scale_factor"):
                parameter.fill_(0.05)
    out = export(list(engine.stages.values()), Path(folder))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}


def export_that_fails(
    layout: dict[str, int], folder: str, tokenizer: str, limit_bytes: int | None
) -> str:
    """Return this process's error when process 0 cannot write its files."""
    groups = connect(Layout(**layout), device="cpu")
    engine = Engine(CONFIG, groups=groups, prepare=lambda s: qat(s, "ct.int4_g32"))
    if dist.get_rank() == 0 and limit_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        export(list(engine.stages.values()), Path(folder), tokenizer=tokenizer)
    except CompressError as error:
        return f"{type(error).__name__}: {error}"
    return "exported"


def export_wrapped(folder: str) -> dict[str, dict[str, str]]:
    """Return digests of one model's files, by scheme and file, for every wrapper."""
    from models import llama

    if not dist.is_initialized():
        dist.init_process_group("gloo")

    def checkpointed(model: nn.Module) -> nn.Module:
        is_block = lambda block: type(block).__name__ == "LlamaDecoderLayer"  # noqa: E731
        apply_activation_checkpointing(model, check_fn=is_block)
        return model

    def compiled(model: nn.Module) -> Any:
        model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="eager")  # type: ignore[union-attr,index]
        return torch.compile(model, backend="eager")

    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "plain": lambda model: model,
        "compiled": compiled,
        "checkpointed": checkpointed,
        "replicated": nn.parallel.DistributedDataParallel,
        "sharded": fully_shard,
    }
    digests: dict[str, dict[str, str]] = {}
    for wrapper, wrap in wrappers.items():
        digests[wrapper] = {}
        for scheme in ("ct.int4_g32", "gguf.q4_0", "ort.matmulnbits"):
            out = export(wrap(qat(llama(1), scheme)), Path(folder) / wrapper / scheme)
            digests[wrapper] |= {
                f"{scheme} {path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
                for path in out.iterdir()
            }
    return digests


def export_odd_rows(folder: str) -> dict[str, str]:
    """Return digests of a masked model's weights: unsplit, split unevenly, and also sharded."""
    from models import llama

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    digests = {}
    for name in ("whole", "split", "split and sharded"):
        model = llama(1, inner=97)
        prune(model, 0.5)
        qat(model, "ct.int4_g32", ignore=["*.down_proj"])
        mlp = model.get_submodule("model.layers.0.mlp")
        with torch.no_grad():  # like an optimizer's momentum; masks undo it
            for layer in (mlp.up_proj, mlp.gate_proj):
                layer.weight.add_(0.1)  # type: ignore[operator,union-attr]
        if name != "whole":
            by_rows = {"up_proj": ColwiseParallel(), "gate_proj": ColwiseParallel()}
            parallelize_module(mlp, mesh["tensor"], by_rows)
        if name == "split and sharded":
            fully_shard(mlp, mesh=mesh["data"])
        out = export(model, Path(folder) / name) / "model.safetensors"
        digests[name] = hashlib.sha256(out.read_bytes()).hexdigest()
    return digests


def wrapping_orders(split: bool) -> dict[str, str]:
    """Return the outcome of every order of torch's wrappers and `qat`, on two processes."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))

    def fresh() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 128))

    def parallel(model: nn.Module) -> nn.Module:
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})

    def outcome(*steps: Any) -> str:
        model: Any = fresh()
        try:
            for step in steps:
                model = step(model) or model
        except CompressError as error:
            return f"{type(error).__name__}: {error}"
        expected = qat(fresh(), "ct.int4_g32")(x)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
        model(x).sum().backward()
        return "equal"

    def plain(model: nn.Module) -> nn.Module:
        return qat(model, "ct.int4_g32")

    def learned(model: nn.Module) -> nn.Module:
        return qat(model, "ct.int4_g32", learned_scales=True)

    def wide(model: nn.Module) -> nn.Module:
        return qat(model, "ct.int4_g64")

    def whole_rows(model: nn.Module) -> nn.Module:
        return qat(model, "ct.w8a8")

    def shard(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=mesh)

    def two_of_four(model: nn.Module) -> None:
        prune(model, "2:4")

    def masked(model: nn.Module) -> None:
        set_masks(model, {"0": torch.ones(64, 128, dtype=torch.bool)})

    def replicate(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def two_axes(model: nn.Module) -> None:
        wide_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rows", "columns"))
        distribute_module(model, wide_mesh)

    return {
        "qat, split": outcome(plain, parallel),
        "split, qat": outcome(parallel, plain),
        "split, learned": outcome(parallel, learned),
        "learned, split": outcome(learned, parallel),
        "qat, shard": outcome(plain, shard),
        "shard, qat": outcome(shard, plain),
        "learned, shard": outcome(learned, shard),
        "shard, learned": outcome(shard, learned),
        "split, wide": outcome(parallel, wide),
        "wide, split": outcome(wide, parallel),
        "split, whole rows": outcome(parallel, whole_rows),
        "shard, prune": outcome(shard, two_of_four),
        "shard, mask": outcome(shard, masked),
        "shard, zeros": outcome(shard, mask_zeros),
        "learned, replicate": outcome(learned, replicate),
        "replicate, qat": outcome(replicate, plain),
        "replicate, learned": outcome(replicate, learned),
        "two axes, qat": outcome(two_axes, plain),
        "qat, two axes": outcome(plain, two_axes),
        "split, zeros": outcome(parallel, mask_zeros),
    }


def masked_weights_are_zeroed(data: int, tensor: int) -> dict[str, bool]:
    """Return for each layer whether `keep_zeros` zeroes exactly the masked weights.

    All weights were changed first, as by momentum, and a forward pass without a backward pass left
    the root unsharded. Four processes share 194 rows unevenly.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 194), nn.Linear(194, 64))
    prune(model, 0.5)
    saved_masks = {name: mask.clone() for name, mask in masks(model).items()}
    if tensor > 1:
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if data > 1:
        fully_shard(model[0], mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    expected = {}
    with torch.no_grad():
        for name, mask in saved_masks.items():
            weight = model.get_parameter(f"{name}.weight")
            weight.add_(0.01)
            expected[name] = weight.full_tensor() * mask
        model(torch.ones(2, 64))
    keep_zeros(model)
    return {
        name: torch.equal(model.get_parameter(f"{name}.weight").full_tensor(), weight)
        for name, weight in expected.items()
    }


def fitted_scales(shard: bool) -> list[list[float]]:
    """Return the learned scales that `fit_scales` sets in a pruned layer, after a forward pass."""
    if shard and not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 97), nn.Linear(97, 64))
    prune(model, 0.5, ignore=["1"])
    qat(model, "ct.int4_g32", ignore=["1"], learned_scales=True)
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        model(torch.ones(2, 64))
    fit_scales(model)
    factor: Any = model.get_parameter("0.scale_factor")
    full_factor: list[list[float]] = (factor.full_tensor() if shard else factor).tolist()
    return full_factor

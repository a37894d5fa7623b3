"""Folders of torch.distributed.checkpoint: torchtitan's names in and out, and hostile ones."""

import copyreg
import io
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import write_run
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from ms_parallel import AdamWConfig, Engine, NextTokenLoss, checkpoint
from ms_parallel.checkpoint.dcp_metadata import read_dcp_index
from ms_parallel.cli import main
from ms_parallel.errors import CheckpointError, DamageError
from ms_parallel.models import architecture

HEADS, GROUPS, WIDTH = 4, 2, 8
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": WIDTH,
}
OPTIMIZER = AdamWConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=9)
NAMES = {
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "model.layers": "layers",
}
QKV = "attention.qkv_linear.w"
OTHER = ("optimizer.", "engine.")
"""Beginnings of the names in an engine's state that are not weights."""


def engine(family: str = "llama", **settings: Any) -> Engine:
    """A small engine with its initial weights."""
    extra = {"query_key_norm": True} if family == "qwen3" else {}
    config = architecture(family, {**SIZES, **extra, **settings})
    return Engine(config, optimizer=OPTIMIZER, seed=settings.get("num_hidden_layers", 3))


def step(trained: Engine, seed: int) -> float:
    """Loss of one step on random tokens."""
    tokens = torch.randint(40, (4, 12), generator=torch.Generator().manual_seed(seed))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    return trained.step(batch, NextTokenLoss()).loss


def interleave(rows: Tensor) -> Tensor:
    """Move the halves of each head to its even and odd rows, as Llama's original code has them."""
    heads = rows.reshape(-1, 2, WIDTH // 2, rows.shape[1])
    return heads.transpose(1, 2).reshape(rows.shape)


def titan(tensors: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Rename and reorder tensors as torchtitan has them."""
    renamed = {}
    for name, tensor in tensors.items():
        if family == "llama" and re.search(r"[qk]_proj", name):
            tensor = interleave(tensor)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        renamed[name] = tensor.clone()
    return renamed


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace q, k and v by one matrix: by key-value head, its queries, its key, its value."""
    for name in [n for n in tensors if f"{QKV}q." in n]:
        q, k, v = (tensors.pop(name.replace(f"{QKV}q.", f"{QKV}{c}.")) for c in "qkv")
        columns = q.shape[1]
        parts = (
            q.view(GROUPS, -1, columns),
            k.view(GROUPS, -1, columns),
            v.view(GROUPS, -1, columns),
        )
        tensors[name.replace(f"{QKV}q.", f"{QKV}qkv.")] = torch.cat(parts, 1).reshape(-1, columns)
    return tensors


def titan_state(state: Mapping[str, Tensor], family: str, *, fused: bool) -> dict[str, Any]:
    """State dict with which torchtitan would save an engine's state."""
    moments: dict[str, Any] = {}
    for moment in ("exp_avg", "exp_avg_sq"):
        prefix = f"optimizer.{moment}."
        local = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        renamed = titan(local, family)
        for name, tensor in (fuse(renamed) if fused else renamed).items():
            moments[f"state.{name}.{moment}"] = tensor
            moments[f"state.{name}.step"] = state["optimizer.taken"].float()
    weights = {n: t for n, t in state.items() if n.startswith(("model.", "lm_head."))}
    train_state = {"step": int(state["engine.step"]), "ntokens_seen": 12345}
    return {**titan(weights, family), "optimizer": moments, "train_state": train_state}


@pytest.fixture(scope="module")
def trained() -> Engine:
    """A Llama after three steps."""
    result = engine()
    for seed in range(3):
        step(result, seed)
    return result


@pytest.fixture(scope="module")
def titan_folder(trained: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the Llama as torchtitan saves it, written by torch."""
    folder = tmp_path_factory.mktemp("titan") / "step-3"
    state = titan_state(trained.state_dict(), "llama", fused=True)
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def load(folder: Path, target: Engine) -> checkpoint.RunPosition:
    """Load a folder into an engine."""
    state = target.state_dict()
    loaded = checkpoint.load_distributed(folder, target.config, state)
    target.load_state_dict(state)
    return loaded


def test_a_folder_with_torchtitans_names_continues_with_the_same_losses(
    trained: Engine, titan_folder: Path
) -> None:
    """Weights, fused moments, counters and the following three losses are equal bit for bit."""
    target = engine()
    expected = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    loaded = load(titan_folder, target)
    assert (loaded.step, loaded.tokens) == (3, 12345)
    state = target.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    uninterrupted = engine()
    for seed in range(3):
        step(uninterrupted, seed)
    assert [step(target, s) for s in (3, 4, 5)] == [step(uninterrupted, s) for s in (3, 4, 5)]


@pytest.mark.parametrize(
    ("family", "fused", "tied"), [("llama", False, True), ("qwen3", True, False)]
)
def test_separate_projections_tied_embeddings_and_qwen_load(
    tmp_path: Path, family: str, fused: bool, tied: bool
) -> None:
    """Qwen 3 rotates halves as we do, so nothing is interleaved."""
    source = engine(family, tie_word_embeddings=tied)
    step(source, 0)
    state = source.state_dict()
    dcp.save(titan_state(state, family, fused=fused), checkpoint_id=tmp_path / "s", no_dist=True)
    target = engine(family, tie_word_embeddings=tied)
    load(tmp_path / "s", target)
    assert all(torch.equal(target.state_dict()[n], tensor) for n, tensor in state.items())


def megatron(tensors: Mapping[str, Tensor], *, stacked: bool, fused_norms: bool) -> dict[str, Any]:
    """Rename, fuse and stack weights as Megatron-Core does, with four padded rows of vocabulary."""
    layers: dict[str, list[Tensor]] = {}
    saved: dict[str, Any] = {"decoder.layers.self_attention.core_attention._extra_state": b"state"}
    norm_names = {
        True: ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
        False: ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
    }[fused_norms]
    for layer in range(2):
        block = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in block:
                q, k, v = (block.pop(f"self_attn.{c}_proj.{kind}") for c in "qkv")
                groups = [part.view(GROUPS, -1, *part.shape[1:]) for part in (q, k, v)]
                fused = torch.cat(groups, 1).reshape(-1, *q.shape[1:])
                block[f"self_attention.linear_qkv.{kind}"] = fused
        block["mlp.linear_fc1.weight"] = torch.cat(
            [block.pop("mlp.gate_proj.weight"), block.pop("mlp.up_proj.weight")]
        )
        renames = {
            "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
            "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
            "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
            "mlp.down_proj.weight": "mlp.linear_fc2.weight",
            "input_layernorm.weight": norm_names[0],
            "post_attention_layernorm.weight": norm_names[1],
        }
        for name, tensor in block.items():
            layers.setdefault(renames.get(name, name), []).append(tensor)
    for name, parts in layers.items():
        if stacked:
            saved[f"decoder.layers.{name}"] = torch.stack(parts)
        else:
            saved |= {f"decoder.layers.{n}.{name}": part.clone() for n, part in enumerate(parts)}
    ends = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
        "lm_head.weight": "output_layer.weight",
    }
    for ours, theirs in ends.items():
        if ours in tensors:
            padding = torch.full((4 * (ours != "model.norm.weight"), 32), 9.0)
            tensor = tensors[ours]
            saved[theirs] = torch.cat([tensor, padding]) if len(padding) else tensor.clone()
    return saved


@pytest.mark.parametrize(
    ("family", "stacked", "fused_norms", "tied"),
    [("llama", True, True, False), ("qwen3", False, False, True), ("qwen2", True, False, True)],
)
def test_weights_of_a_megatron_folder_load(
    tmp_path: Path, family: str, stacked: bool, fused_norms: bool, tied: bool
) -> None:
    """Stacked or separate layers, fused projections and norms, biases and a padded vocabulary."""
    extra = {"attention_bias": True} if family == "qwen2" else {}
    source = engine(family, tie_word_embeddings=tied, **extra)
    step(source, 0)
    weights = {n: t for n, t in source.state_dict().items() if not n.startswith(OTHER)}
    saved = megatron(weights, stacked=stacked, fused_norms=fused_norms)
    dcp.save(saved, checkpoint_id=tmp_path / "iter_0000100", no_dist=True)
    # Never opened: it would create a file.
    (tmp_path / "iter_0000100" / "common.pt").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    target = engine(family, tie_word_embeddings=tied, num_hidden_layers=2, **extra)
    before = {n: t.clone() for n, t in target.state_dict().items() if n.startswith("optimizer.")}
    loaded = load(tmp_path / "iter_0000100", target)
    assert (loaded.step, loaded.tokens) == (0, None)
    state = target.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError, match=r"but this run's .* needs"):
        load(tmp_path / "iter_0000100", engine(family, intermediate_size=64, **extra))
    with pytest.raises(CheckpointError, match="Megatron's names are known for llama"):
        load(tmp_path / "iter_0000100", engine("gemma2"))


@pytest.mark.parametrize(("stacked", "masters"), [(True, "fp32_param"), (False, "param")])
def test_optimizer_states_of_a_megatron_folder_load(
    tmp_path: Path, stacked: bool, masters: str
) -> None:
    """Moments and float32 weights are stored under the names of the bfloat16 weights."""
    source = engine(num_hidden_layers=2)
    step(source, 0)
    state = source.state_dict()
    weights = {n: t for n, t in state.items() if not n.startswith(OTHER)}
    saved = megatron(
        {n: t.bfloat16() for n, t in weights.items()}, stacked=stacked, fused_norms=True
    )
    for name in ("exp_avg", "exp_avg_sq"):
        moments = {n: state[f"optimizer.{name}.{n}"] for n in weights}
        renamed = megatron(moments, stacked=stacked, fused_norms=True)
        saved |= {f"optimizer.state.{name}.{n}": t for n, t in renamed.items()}
    renamed = megatron(weights, stacked=stacked, fused_norms=True)
    saved |= {f"optimizer.state.{masters}.{n}": t for n, t in renamed.items()}
    if not stacked:  # separate layers come with separate projections
        for name in [n for n in saved if n.endswith("linear_fc1.weight")]:
            gate, up = saved.pop(name).chunk(2)
            saved |= {f"{name}_w": gate.clone(), f"{name}_v": up.clone()}
    dcp.save(saved, checkpoint_id=tmp_path / "iter_0000007", no_dist=True)
    target = engine(num_hidden_layers=2)
    loaded = load(tmp_path / "iter_0000007", target)
    assert (loaded.step, loaded.tokens) == (7, None)
    expected = {n: t for n, t in state.items() if "exp_avg" in n or n in weights}
    assert len(expected) == 3 * len(weights)
    assert all(torch.equal(target.state_dict()[n], t) for n, t in expected.items())
    # The iteration is in the name of the folder alone.
    (tmp_path / "iter_0000007").rename(tmp_path / "latest")
    with pytest.raises(CheckpointError, match="does not say after which step"):
        load(tmp_path / "latest", target)
    # The rounded weights alone.
    state = engine(num_hidden_layers=2).state_dict()
    moments = {n: t.clone() for n, t in state.items() if "exp_avg" in n}
    position = checkpoint.load_distributed(
        tmp_path / "latest", target.config, state, weights_only=True
    )
    assert position.step == 0
    assert all(torch.equal(state[n], t.bfloat16().float()) for n, t in weights.items())
    assert all(torch.equal(state[n], t) for n, t in moments.items())


@pytest.mark.parametrize("buffer", ["flat", "pieces", "object"])
def test_other_optimizer_states_of_megatron_are_refused(tmp_path: Path, buffer: str) -> None:
    """Flat buffers, flat pieces and pickled objects; the message names the option to save with."""
    source = engine(num_hidden_layers=2)
    weights = {n: t for n, t in source.state_dict().items() if not n.startswith(OTHER)}
    saved = megatron(weights, stacked=True, fused_norms=True)
    group = "optimizer.distributed.dp_group_idx_0"
    saved |= {
        "flat": {f"{group}.gbuf_idx_0.dtype_(torch.float32).bucket_idx_0.exp_avg": torch.ones(9)},
        "pieces": {
            f"optimizer.state.{name}.embedding.word_embeddings.weight": torch.ones(1, 1, 44 * 32)
            for name in ("exp_avg", "exp_avg_sq")
        },
        "object": {f"{group}.param_state/shard_0_1": b"state"},
    }[buffer]
    dcp.save(saved, checkpoint_id=tmp_path / "iter_0000007", no_dist=True)
    with pytest.raises(CheckpointError, match="save with --dist-ckpt-optim-fully-reshardable"):
        load(tmp_path / "iter_0000007", source)


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("names", ["torchtitan", "huggingface"])
def test_torch_loads_what_is_written(trained: Engine, tmp_path: Path, names: Any) -> None:
    """`dcp.load` fills the reader's own state dict, including the settings of AdamW."""
    state = trained.state_dict()
    folder = tmp_path / "out" / "step-3"
    settings = {"betas": (0.9, 0.95), "lr": 1e-3}
    groups = dict.fromkeys((n for n in state if n.startswith(("model", "lm_head"))), settings)
    checkpoint.save_distributed(folder, trained.config, state, names=names, groups=groups, tokens=7)
    weights = {n: t for n, t in state.items() if n.startswith(("model", "lm_head"))}
    if names == "torchtitan":
        expected = titan_state(state, "llama", fused=True)
        expected["train_state"]["ntokens_seen"] = 7
        expected["lr_scheduler"] = {"last_epoch": 3}
        key = "optimizer.param_groups.tok_embeddings.weight"
    else:
        expected = {**weights}
        expected["optimizer"] = {
            f"state.{n}.{m}": state[f"optimizer.{m}.{n}"]
            for n in weights
            for m in ("exp_avg", "exp_avg_sq")
        }
        key = "optimizer.param_groups.model.embed_tokens.weight"
    target = {
        n: {k: torch.zeros_like(v) if isinstance(v, Tensor) else 0 for k, v in value.items()}
        if isinstance(value, dict)
        else torch.zeros_like(value)
        for n, value in expected.items()
    }
    target |= {f"{key}.betas": None, f"{key}.lr": 0.0}
    dcp.load(target, checkpoint_id=folder, no_dist=True)
    assert (target.pop(f"{key}.betas"), target.pop(f"{key}.lr")) == ((0.9, 0.95), 1e-3)
    assert _flat(target).keys() == _flat(expected).keys()
    assert all(_equal(_flat(target)[n], value) for n, value in _flat(expected).items())
    # Both names load into an engine again.
    again = engine()
    assert load(folder, again).step == 3
    assert all(torch.equal(again.state_dict()[n], tensor) for n, tensor in state.items())


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    nested = {n: v for n, v in tree.items() if isinstance(v, dict)}
    inner = {f"{n}.{k}": v for n, value in nested.items() for k, v in value.items()}
    return {**{n: v for n, v in tree.items() if n not in nested}, **inner}


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(b, Tensor) else a == b


def test_nested_states_of_own_scripts_load(trained: Engine, tmp_path: Path) -> None:
    """Prefixes such as `model.` and `optim.` are found; an unrecorded step is required."""
    state = trained.state_dict()
    weights = {n: t for n, t in state.items() if n.startswith(("model.", "lm_head"))}
    moments = {
        f"state.{n.split('.', 2)[2]}.{n.split('.', 2)[1]}": t
        for n, t in state.items()
        if n.startswith("optimizer.exp")
    }
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=tmp_path / "s", no_dist=True)
    target = engine().state_dict()
    with pytest.raises(CheckpointError, match="does not say after which step"):
        checkpoint.load_distributed(tmp_path / "s", trained.config, target)
    loaded = checkpoint.load_distributed(tmp_path / "s", trained.config, target, step=3)
    assert loaded == checkpoint.RunPosition(step=3, tokens=None)
    assert all(torch.equal(target[n], tensor) for n, tensor in state.items())


def test_another_model_or_existing_folder_is_refused(trained: Engine, titan_folder: Path) -> None:
    """The message names the tensor and both shapes."""
    wide = engine(intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"w1.weight' has shape \(48, 32\) but .* \(64, 32\)"):
        load(titan_folder, wide)
    with pytest.raises(CheckpointError, match="already exists"):
        checkpoint.save_distributed(titan_folder, trained.config, trained.state_dict())
    sized = architecture("gemma2", {**SIZES})
    with pytest.raises(CheckpointError, match="names are known for llama and qwen3"):
        checkpoint.save_distributed(titan_folder.with_name("x"), sized, trained.state_dict())


# Hostile folders


class Runs:
    """Pickles as a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def rewrite(folder: Path, change: Callable[[Metadata], object]) -> None:
    """Change the metadata of a folder with torch's own classes."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - written by this test
    replaced = change(metadata)
    path.write_bytes(pickle.dumps(metadata if replaced is None else replaced))


@pytest.mark.parametrize(
    "written_as", [lambda member: (getattr, (type(member), member.name)), lambda m: (type(m), (0,))]
)
def test_members_of_enums_are_read_as_every_python_writes_them(
    titan_folder: Path, tmp_path: Path, written_as: Any
) -> None:
    """By name as in Python 3.11.2, or by value as in 3.11.7."""
    folder = Path(shutil.copytree(titan_folder, tmp_path / "step-3"))
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - written by this test
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = copyreg.dispatch_table | {_MEM_FORMAT_ENCODING: written_as}
    pickler.dump(metadata)
    assert (b"getattr" in stream.getvalue()) == (written_as(_MEM_FORMAT_ENCODING(0))[0] is getattr)
    (folder / ".metadata").write_bytes(stream.getvalue())
    assert read_dcp_index(folder) == read_dcp_index(titan_folder)


def storage(change: Callable[[_StorageInfo], None]) -> Callable[[Metadata], None]:
    """Change the place of every tensor."""

    def apply(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            change(info)

    return apply


def claims_a_huge_tensor(metadata: Metadata) -> None:
    """A tensor of 2^40 rows whose chunk says so too."""
    entry: Any = metadata.state_dict_metadata["norm.weight"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 40])


def leaves_a_hole(metadata: Metadata) -> None:
    """A tensor without chunks."""
    entry: Any = metadata.state_dict_metadata["norm.weight"]
    entry.chunks = []


def outside(metadata: Metadata) -> None:
    """A chunk that starts after the end of its tensor."""
    entry: Any = metadata.state_dict_metadata["norm.weight"]
    entry.chunks[0].offsets = torch.Size([5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: Runs("touch mark"), r"refers to (posix|nt)\.system"),
        (lambda m: setattr(m, "planner_data", Runs("touch mark")), r"refers to posix\.system"),
        (lambda m: setattr(m, "planner_data", eval), r"refers to builtins\.eval"),
        (lambda m: setattr(m, "planner_data", torch.load), r"refers to torch\.serialization\.load"),
        (lambda m: setattr(m, "planner_data", torch.nn.Linear), r"refers to torch\.nn"),
        (lambda m: {"state_dict_metadata": {}}, "not the metadata of a checkpoint"),
        (lambda m: setattr(m, "storage_data", None), "lists no tensors"),
        (storage(lambda i: setattr(i, "relative_path", "../../x")), "is not the name of a file"),
        (storage(lambda i: setattr(i, "relative_path", "/etc/passwd")), "not the name of a file"),
        (storage(lambda i: setattr(i, "relative_path", "__9_0.distcp")), "cannot be read: No such"),
        (
            storage(lambda i: setattr(i, "offset", 1 << 60)),
            r"ends at byte \d+ of .*, which has \d+",
        ),
        (storage(lambda i: setattr(i, "length", 1 << 62)), r"ends at byte \d+"),
        (storage(lambda i: setattr(i, "offset", -1)), "invalid position"),
        (storage(lambda i: setattr(i, "offset", 1.5)), "invalid position"),
        (storage(lambda i: setattr(i, "transform_descriptors", ["zstd"])), "is compressed"),
        (claims_a_huge_tensor, "larger than its bytes on disk"),
        (leaves_a_hole, "do not fill it"),
        (outside, "outside its tensor"),
    ],
)
def test_hostile_metadata_is_refused_in_one_line_and_runs_nothing(
    titan_folder: Path,
    tmp_path: Path,
    change: Callable[[Metadata], object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is called, and nothing is allocated for sizes that the files do not have."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "step-3"
    shutil.copytree(titan_folder, folder)
    rewrite(folder, change)
    with pytest.raises(DamageError, match=message) as raised:
        load(folder, engine())
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04.",
        b"no pickle",
        b"\x80\x02N" + b"r\xff\xff\xff\x7f.",  # a memo of 2^31 entries
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81N}X\x01\x00\x00\x00xNs\x86b.",
        b"ctorch\nSize\n(I1\nI2\ntR.",
        b"(" * 100_000 + b".",
        b"\x80\x02ctorch\nSize\nN}X\x07\x00\x00\x00__len__Ns\x86b.",
    ],
    ids=range(9),
)
def test_damaged_metadata_is_refused(titan_folder: Path, tmp_path: Path, content: bytes) -> None:
    """Malformed pickles, and pickles that set attributes of classes."""
    shutil.copytree(titan_folder, tmp_path / "s")
    (tmp_path / "s" / ".metadata").write_bytes(content)
    with pytest.raises(DamageError, match="metadata: it"):
        load(tmp_path / "s", engine())


def test_every_truncation_and_missing_file_is_refused(titan_folder: Path, tmp_path: Path) -> None:
    """8 lengths of the metadata; then the tensors cut short, and gone."""
    shutil.copytree(titan_folder, tmp_path / "s")
    path = tmp_path / "s" / ".metadata"
    content = path.read_bytes()
    for length in range(0, len(content), len(content) // 8):
        path.write_bytes(content[:length])
        with pytest.raises(DamageError):
            load(tmp_path / "s", engine())
    path.unlink()
    with pytest.raises(DamageError, match="No such file"):
        load(tmp_path / "s", engine())
    path.write_bytes(content)
    (data,) = (tmp_path / "s").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1000])
    with pytest.raises(DamageError, match=r"ends at byte"):
        load(tmp_path / "s", engine())
    data.unlink()
    with pytest.raises(DamageError, match="cannot be read"):
        load(tmp_path / "s", engine())


def archive(value: object, *, compress: bool = False) -> bytes:
    """A `torch.save` archive, optionally with compressed entries."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    if compress:
        source, buffer = zipfile.ZipFile(buffer), io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
            for name in source.namelist():
                target.writestr(name, source.read(name))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (archive(Runs("touch mark")), "is damaged"),
        (archive(torch.zeros(32, dtype=torch.float64)), "is not the torch.float32 tensor"),
        (archive(torch.zeros(31)), "is not the torch.float32 tensor"),
        (archive({"a": 1}), "is not the torch.float32 tensor"),
        (archive(torch.zeros(1 << 20), compress=True), "larger than its bytes|is damaged"),
        (b"no archive", "is damaged"),
    ],
    ids=["os.system", "dtype", "shape", "no tensor", "bomb", "garbage"],
)
def test_a_hostile_tensor_is_refused(
    titan_folder: Path, tmp_path: Path, content: bytes, message: str, monkeypatch: Any
) -> None:
    """An archive in place of a tensor's bytes neither runs code nor grows."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "s"
    shutil.copytree(titan_folder, folder)
    (folder / "evil.distcp").write_bytes(content + bytes(2000))

    def redirect(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "norm.weight":
                info.relative_path, info.offset = "evil.distcp", 0
                info.length = max(200, len(content))

    rewrite(folder, redirect)
    with pytest.raises(DamageError, match=message) as raised:
        load(folder, engine())
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_convert_exports_a_run_and_starts_another_from_it(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that continues from the export ends with the same weights as the original run."""
    first = write_run(
        tmp_path / "first.toml", corpus, steps=6, checkpoint_every=4, keep_checkpoints=9
    )
    assert main(["train", str(first)]) == 0
    half = tmp_path / "half"
    shutil.copytree(first.with_suffix(""), half)
    shutil.rmtree(half / "checkpoints" / "step-00000006")
    out = tmp_path / "dcp" / "step-4"
    assert main(["convert", str(first), f"output_dir={half}", "--to-dcp", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote the checkpoint of step 4 to {out}"
    other = tmp_path / "other"
    words = ["convert", str(first), f"output_dir={other}", "--from-dcp", str(out)]
    assert main(words) == 0
    assert main(["train", str(first), f"output_dir={other}"]) == 0
    final = [
        (folder / "model" / "model.safetensors").read_bytes()
        for folder in (first.with_suffix(""), other)
    ]
    assert final[0] == final[1]
    capsys.readouterr()
    assert main(words) == 2
    assert "holds checkpoints already" in capsys.readouterr().err
    assert main([*words[:2], f"output_dir={tmp_path / 'n'}", "--to-dcp", str(out)]) == 2

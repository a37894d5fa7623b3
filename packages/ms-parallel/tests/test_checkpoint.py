"""Checkpoints are restored exactly under any layout, or the damage is named."""

import json
import random
import tempfile
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ms_parallel import checkpoint
from ms_parallel.cluster.connection import disconnect
from ms_parallel.errors import CheckpointError, DamageError

FACTS = {"stream": {"consumed": 12}, "note": "déjà vu"}


def sample_state() -> dict[str, Tensor]:
    """Tensors of many dtypes and odd shapes, the same at every call."""
    generator = torch.Generator().manual_seed(7)
    wide = torch.randn(7, 6, generator=generator)
    return {
        "model.weight": wide,
        "model.half": torch.randn(5, 3, generator=generator).bfloat16(),
        "optimizer.taken": torch.tensor(41),
        "model.bytes": torch.arange(11, dtype=torch.uint8),
        "model.empty": torch.zeros(0, 4),
    }


def blank(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same shapes and dtypes with other values."""
    return {name: torch.full_like(tensor, 1) for name, tensor in state.items()}


def saved(root: Path, step: int = 3) -> Path:
    """Folder of a small checkpoint."""
    folder = checkpoint.step_folder(root, step)
    checkpoint.save(folder, sample_state(), step=step, facts=FACTS)
    return folder


def load(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint of `sample_state`."""
    target = blank(sample_state())
    checkpoint.load(folder, checkpoint.read_manifest(folder), target)
    return target


def test_a_load_restores_what_was_saved(tmp_path: Path) -> None:
    """Tensors, step and facts, in one process without a process group."""
    folder = saved(tmp_path)
    assert all(torch.equal(load(folder)[name], saved) for name, saved in sample_state().items())
    manifest = checkpoint.read_manifest(folder)
    assert (manifest.step, manifest.facts) == (3, FACTS)


def test_the_files_are_plain_safetensors(tmp_path: Path) -> None:
    """The safetensors library reads equal tensors."""
    with safe_open(saved(tmp_path) / "rank-00000.safetensors", "pt") as file:
        tensors = {name.partition("@")[0]: file.get_tensor(name) for name in list(file.keys())}
    assert all(torch.equal(tensors[name], saved) for name, saved in sample_state().items())


@pytest.mark.parametrize("flips", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_any_flipped_bit_in_any_file_is_named(tmp_path: Path, flips: int) -> None:
    """Checksums cover every byte on disk; random flips are detected."""
    folder = saved(tmp_path)
    rng = random.Random(5)
    for _ in range(flips):
        path = rng.choice(sorted(folder.iterdir()))
        original = path.read_bytes()
        content = bytearray(original)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        with pytest.raises(DamageError, match=path.name):
            load(folder)
        path.write_bytes(original)
    load(folder)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("cut", [1, 200])
def test_a_truncated_or_missing_file_is_named(tmp_path: Path, name: str, cut: int) -> None:
    """Both count as damage to that file."""
    path = saved(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DamageError, match=name):
        load(path.parent)
    path.unlink()
    with pytest.raises(DamageError, match=name):
        load(path.parent)


def reseal(path: Path, old: str, new: str) -> None:
    """Change a manifest's text and update its checksum, as an attacker would."""
    text = path.read_text()
    content = text[text.index('"content":') + len('"content":') : -1].replace(old, new)
    path.write_text(f'{{"crc32":{zlib.crc32(content.encode())},"content":{content}}}')


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rank-00000.safetensors", "../../outside"),
        ("rank-00000.safetensors", "/etc/passwd"),
        ('"shape":[7,6]', '"shape":[7000000,6000000]'),
        ('"size_bytes":168', '"size_bytes":168000000000'),
        ('"begin":', '"begin":9'),
        ('"offsets":[0,0]', '"offsets":[1,0]'),
        ('"dtype":"F32"', '"dtype":"F99"'),
    ],
)
def test_an_inconsistent_manifest_is_refused_before_allocation(
    tmp_path: Path, old: str, new: str
) -> None:
    """Paths cannot leave the folder, and sizes must be consistent, even with a valid checksum."""
    folder = saved(tmp_path)
    reseal(folder / "checkpoint.json", old, new)
    with pytest.raises(DamageError):
        checkpoint.read_manifest(folder)


def test_only_tensors_are_saved(tmp_path: Path) -> None:
    """A save refuses values that are not tensors, so a load never needs pickle."""
    with pytest.raises(CheckpointError, match="'when' is not a tensor"):
        checkpoint.save(tmp_path / "step-00000001", {"when": "now"}, step=1, facts={})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    """The message names the tensor and both shapes."""
    folder = saved(tmp_path)
    manifest = checkpoint.read_manifest(folder)
    with pytest.raises(CheckpointError, match=r"'model.weight' has shape \(7, 6\).*another model"):
        checkpoint.load(folder, manifest, {"model.weight": torch.zeros(7, 5)})
    with pytest.raises(CheckpointError, match=r"'model\.other' is missing"):
        checkpoint.load(folder, manifest, {"model.other": torch.zeros(7, 5)})


def test_incomplete_checkpoints_are_ignored_and_swept(tmp_path: Path) -> None:
    """A folder without a manifest or with its temporary name is not a checkpoint."""
    for step in (1, 2, 3):
        saved(tmp_path, step)
    (tmp_path / "step-00000004.partial").mkdir()
    (tmp_path / "step-00000005").mkdir()
    assert checkpoint.complete_steps(tmp_path) == [1, 2, 3]
    checkpoint.sweep(tmp_path)
    checkpoint.keep_last(tmp_path, 2)
    assert checkpoint.complete_steps(tmp_path) == [2, 3]
    assert not (tmp_path / "step-00000004.partial").exists()
    moved = checkpoint.set_aside(tmp_path, 3)
    assert moved.name == "step-00000003.damaged-1"
    assert checkpoint.complete_steps(tmp_path) == [2]


PLACEMENTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicated": [Replicate()],
}


def _rank(rank: int, world: int, path: str, placement: str, folder: Path, saves: bool) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        source = sample_state() if saves else blank(sample_state())
        split = ("model.weight", "model.half")
        state = {
            name: distribute_tensor(tensor, mesh, PLACEMENTS[placement])
            if name in split
            else tensor
            for name, tensor in source.items()
        }
        state[f"model.stage-{rank}"] = torch.full((2,), float(rank if saves else -1))
        if saves:
            checkpoint.save(folder, state, step=3, facts=FACTS)
        else:
            checkpoint.load(folder, checkpoint.read_manifest(folder), state)
            for name, tensor in sample_state().items():
                loaded = state[name]
                assert torch.equal(loaded.full_tensor() if name in split else loaded, tensor), name
            assert state[f"model.stage-{rank}"].tolist() == [rank, rank]
    finally:
        dist.destroy_process_group()


def in_processes(world: int, placement: str, folder: Path, saves: bool) -> None:
    """Save or load in `world` gloo processes."""
    disconnect()  # a fork would inherit a process group left by an earlier test
    with tempfile.TemporaryDirectory() as store_folder:
        arguments = (world, f"{store_folder}/store", placement, folder, saves)
        mp.start_processes(_rank, arguments, nprocs=world, start_method="fork")


@pytest.mark.parametrize("written", ["rows", "columns"])
def test_a_checkpoint_of_three_ranks_loads_on_two(tmp_path: Path, written: str) -> None:
    """Uneven shards of 3 gloo ranks are resharded; ranks have their own stage tensors."""
    folder = checkpoint.step_folder(tmp_path, 3)
    in_processes(3, written, folder, saves=True)
    in_processes(2, "columns", folder, saves=False)
    in_processes(2, "replicated", folder, saves=False)
    files = json.loads((folder / "checkpoint.json").read_text())["content"]["files"]
    assert len(files) == 3


def test_replicated_tensors_are_written_once(tmp_path: Path) -> None:
    """The files of 2 ranks contain each byte of the state once."""
    folder = checkpoint.step_folder(tmp_path, 3)
    in_processes(2, "replicated", folder, saves=True)
    tensors = checkpoint.read_manifest(folder).tensors
    total = sum(tensor.nbytes for tensor in sample_state().values()) + 2 * 8
    assert sum(chunk.size_bytes for t in tensors.values() for chunk in t.chunks) == total

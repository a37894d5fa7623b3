"""Checkpoints: one folder per step with one safetensors file per process and a manifest.

    checkpoints/step-00000012/manifest.json            size and CRC-32 of every file
                             /rank-00000.safetensors   tensors of process 0

The folder is written as `step-*.partial`, synced, and renamed when every process is done, so a
crash never damages earlier checkpoints. Nothing is unpickled, and every byte has a checksum.
"""

import shutil
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from attrs import frozen
from msgspec import Meta, Struct
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.tensor import DTensor

from ms_align import processes
from ms_align.checkpoint_store import CheckpointStore
from ms_align.errors import CheckpointError, DamageError
from ms_align.files.durable import publish, replace_folder, sync_folder, write_synced, writing
from ms_align.files.run_folder import digest_of
from ms_align.files.untrusted import read_bytes, read_json
from ms_align.models.finite import check_tensors

NAME = "step-{:08d}"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26


class RunStore(CheckpointStore):
    """Checkpoints of a run in an object store."""

    manifest_name = MANIFEST


@frozen(kw_only=True)
class State:
    """Complete state of a run, from which it resumes exactly."""

    tensors: Mapping[str, Tensor]
    """Tensors by name; each process saves its shard of a DTensor."""
    facts: Mapping[str, Any]
    """JSON values, the same on every process."""


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^rank-[0-9]{5}\.safetensors$")]
    size_bytes: Annotated[int, Meta(ge=0)]
    crc32: Annotated[int, Meta(ge=0, lt=1 << 32)]


class _Manifest(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ms-align.checkpoint.2"
):
    step: Annotated[int, Meta(ge=0)]
    processes: Annotated[int, Meta(ge=1)]
    files: tuple[_File, ...]
    facts: dict[str, Any]
    digest: str = ""
    """BLAKE2b hash of all other fields."""


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return root / NAME.format(step)


def complete_steps(root: Path) -> list[int]:
    """List the steps whose checkpoint is complete, ascending."""
    folders = [path for path in root.glob("step-*") if (path / MANIFEST).is_file()]
    return sorted(int(path.name[5:]) for path in folders if path.name[5:].isdigit())


def incomplete(root: Path) -> list[Path]:
    """List checkpoint folders that have lost their manifest, for example by manual deletion."""
    folders = (path for path in root.glob("step-*") if path.name[5:].isdigit())
    return sorted(path for path in folders if not (path / MANIFEST).is_file())


def write(root: Path, step: int, state: State) -> Path:
    """Write a checkpoint. Collective: every process passes its own tensors.

    Raises:
        CheckpointError: the disk is full or read-only; earlier checkpoints stay intact.
    """
    folder = step_folder(root, step)
    partial = folder.with_name(folder.name + ".partial")
    rank = processes.rank()
    if rank == 0:
        with writing(folder):
            shutil.rmtree(partial, ignore_errors=True)  # left by a crash
            partial.mkdir(parents=True)
    # The folder exists on every rank.
    processes.barrier()
    with writing(folder):
        content = save({name: _local(value) for name, value in state.tensors.items()})
        write_synced(partial / f"rank-{rank:05d}.safetensors", content)
    # All files are written, so rank 0 can list them in the manifest.
    processes.barrier()
    if rank == 0:
        with writing(folder):
            write_synced(partial / MANIFEST, _manifest(partial, step, state.facts))
            sync_folder(partial)
            replace_folder(folder, partial)
    # No rank continues before the checkpoint is complete.
    processes.barrier()
    return folder


def read(folder: Path) -> State:
    """Read this process's part of a checkpoint and verify its checksums.

    Raises:
        DamageError: a file is missing or differs from its checksum.
        CheckpointError: the number of processes differs.
    """
    manifest = _read_manifest(folder / MANIFEST)
    if manifest.processes != processes.count():
        raise CheckpointError(
            f"{folder} was written by {manifest.processes} processes and this run has "
            f"{processes.count()}; start {manifest.processes}, or set another output_dir"
        )
    entry = next((f for f in manifest.files if f.name == _file_name(processes.rank())), None)
    if entry is None:
        raise DamageError(f"{folder / MANIFEST} lists no file of process {processes.rank()}")
    path = folder / entry.name
    if not path.is_file() or path.stat().st_size != entry.size_bytes:
        raise DamageError(f"{path} is missing or is not {entry.size_bytes} bytes long")
    content = read_bytes(path, error=DamageError, limit_bytes=entry.size_bytes)
    if zlib.crc32(content) != entry.crc32:
        raise DamageError(f"{path} is damaged: its CRC-32 differs from the manifest's")
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise DamageError(f"{path} is not a safetensors file: {error}") from error
    # Rollout buffers may hold NaN, for responses without a valid reward; weights may not.
    weights = {name: value for name, value in tensors.items() if not name.startswith("buffer.")}
    check_tensors(path, weights, error=DamageError)
    return State(tensors=tensors, facts=manifest.facts)


def keep_last(root: Path, count: int, *, pinned: Collection[Path] = ()) -> None:
    """Delete partial checkpoints left by a crash, and all but the last `count` and the `pinned`."""
    if processes.rank() == 0:
        with writing(root):
            for partial in root.glob("step-*.partial"):
                shutil.rmtree(partial)
            for step in complete_steps(root)[:-count]:
                folder = step_folder(root, step)
                if folder in pinned:
                    continue
                partial = folder.with_name(folder.name + ".partial")
                # Rename first: a partly deleted checkpoint must not look like a complete one.
                publish(folder, partial)
                shutil.rmtree(partial)
    processes.barrier()


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # safetensors rejects tensors that share memory, as tied weights do.
    return local.cpu().contiguous().clone() if local.device.type == "cpu" else local.cpu()


def _manifest(folder: Path, step: int, facts: Mapping[str, Any]) -> bytes:
    files = []
    for path in sorted(folder.glob("rank-*.safetensors")):
        content = path.read_bytes()
        files.append(_File(name=path.name, size_bytes=len(content), crc32=zlib.crc32(content)))
    manifest = _Manifest(
        step=step,
        processes=processes.count(),
        files=tuple(files),
        facts=dict(facts),
    )
    return msgspec.json.encode(msgspec.structs.replace(manifest, digest=digest_of(manifest)))


def _read_manifest(path: Path) -> _Manifest:
    manifest = read_json(path, _Manifest, error=DamageError, limit_bytes=MAX_MANIFEST_BYTES)
    # The folder's name must match too, as a renamed checkpoint has another step.
    if digest_of(manifest) != manifest.digest or path.parent != step_folder(
        path.parents[1], manifest.step
    ):
        raise DamageError(f"{path} is damaged: its content does not match its digest")
    return manifest

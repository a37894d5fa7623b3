"""Saves and loads a state of tensors, alone or together with the other ranks."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from ms_parallel.checkpoint.manifest import Manifest
from ms_parallel.checkpoint.reader import Reader
from ms_parallel.checkpoint.writer import Writer
from ms_parallel.errors import CheckpointError, ParallelError


def save(folder: Path, state: Mapping[str, Tensor], *, step: int, facts: Mapping[str, Any]) -> None:
    """Write a checkpoint; every rank calls this with its own part of the state.

    The folder appears under its name when all ranks have written and synced their files, and
    not before. What is replicated is written once.

    Args:
        folder: the checkpoint's own folder, which must not exist.
        state: DTensors, and plain tensors that are equal on every rank that has them.
        step: updates that have been made.
        facts: plain JSON values to keep beside the tensors; rank 0's are written.

    Raises:
        CheckpointError: on every rank, when any of them cannot write: a full disk, say.
    """
    writer = Writer(folder, step=step, facts=facts)
    try:
        with _quiet():
            alone = not dist.is_initialized()
            state_dict_saver.save(dict(state), storage_writer=writer, no_dist=alone)
    except CheckpointException as failure:
        if not dist.is_initialized() or dist.get_rank() == 0:
            writer.discard()
        raise _cause(failure, folder) from failure


def load(folder: Path, manifest: Manifest, state: Mapping[str, Tensor]) -> None:
    """Fill the state's tensors in place from a checkpoint, whatever layout wrote it.

    Args:
        folder: the checkpoint's own folder.
        manifest: what `read_manifest(folder)` gave.
        state: names and tensors to fill; the checkpoint may hold more.

    Raises:
        DamageError: on every rank, when a byte that any of them needs has changed.
        CheckpointError: a tensor is missing, or has another shape.
    """
    try:
        with _quiet():
            reader = Reader(folder, manifest, {name: tuple(t.shape) for name, t in state.items()})
            alone = not dist.is_initialized()
            state_dict_loader.load(dict(state), storage_reader=reader, no_dist=alone)
    except CheckpointException as failure:
        raise _cause(failure, folder) from failure


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warning of one process without a group, which is a normal way to run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _cause(failure: CheckpointException, folder: Path) -> BaseException:
    """Our own error if a rank gave one; the lowest rank's if many did."""
    causes = [failure.failures[rank][0] for rank in sorted(failure.failures)]
    ours = [cause for cause in causes if isinstance(cause, ParallelError)]
    return (ours or [CheckpointError(f"{folder}: {type(causes[0]).__name__}: {causes[0]}")])[0]

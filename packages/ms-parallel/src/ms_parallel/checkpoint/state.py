"""Saves and loads a state dict of tensors, on one or many ranks."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from ms_parallel.arguments import check_integer, check_type
from ms_parallel.checkpoint.manifest import Manifest
from ms_parallel.checkpoint.reader import Reader
from ms_parallel.checkpoint.writer import Writer
from ms_parallel.errors import CheckpointError, ParallelError
from ms_parallel.files.untrusted import check_path


def save(
    folder: str | Path, state: Mapping[str, Tensor], *, step: int, facts: Mapping[str, Any]
) -> None:
    """Write a checkpoint. Collective: every rank passes its part of the state.

    The folder gets its name after all ranks have written and synced their files. Replicated tensors
    are written once.

    Args:
        folder: folder of the checkpoint; must not exist.
        state: DTensors, and plain tensors that are equal on all ranks that have them.
        step: number of steps taken.
        facts: metadata as plain JSON values; rank 0's are stored.

    Raises:
        CheckpointError: a rank could not write, for example on a full disk; raised on every rank.
    """
    check_path("folder", folder, error=CheckpointError)
    check_integer("step", step, minimum=0, error=CheckpointError)
    check_type("facts", facts, Mapping, "a dict of JSON values", error=CheckpointError)
    check_type("state", state, Mapping, "a dict of tensors", error=CheckpointError)
    folder = Path(folder)
    writer = Writer(folder, step=step, facts=facts)
    try:
        with without_warning():
            single_process = not dist.is_initialized()
            state_dict_saver.save(dict(state), storage_writer=writer, no_dist=single_process)
    except CheckpointException as failure:
        if not dist.is_initialized() or dist.get_rank() == 0:
            writer.discard()
        raise _cause(failure, folder) from failure


def load(folder: str | Path, manifest: Manifest, state: Mapping[str, Tensor]) -> None:
    """Load a checkpoint written under any layout into the tensors of a state, in place.

    Args:
        folder: folder of the checkpoint.
        manifest: the result of `read_manifest(folder)`.
        state: tensors to fill, by name; the checkpoint may have more.

    Raises:
        DamageError: bytes that a rank needs have changed; raised on every rank.
        CheckpointError: a tensor is missing or has another shape.
    """
    check_path("folder", folder, error=CheckpointError)
    check_type(
        "manifest",
        manifest,
        Manifest,
        "a Manifest, as read_manifest returns",
        error=CheckpointError,
    )
    check_type("state", state, Mapping, "a dict of tensors", error=CheckpointError)
    for name, tensor in state.items():
        check_type(f"state[{name!r}]", tensor, Tensor, "a tensor", error=CheckpointError)
    folder = Path(folder)
    try:
        with without_warning():
            reader = Reader(folder, manifest, {name: tuple(t.shape) for name, t in state.items()})
            single_process = not dist.is_initialized()
            state_dict_loader.load(dict(state), storage_reader=reader, no_dist=single_process)
    except CheckpointException as failure:
        raise _cause(failure, folder) from failure


@contextmanager
def without_warning() -> Iterator[None]:
    """Suppress torch's warning that no process group is initialized."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _cause(failure: CheckpointException, folder: Path) -> BaseException:
    """Return the lowest rank's `ParallelError`, or else wrap the lowest rank's error."""
    causes = [failure.failures[rank][0] for rank in sorted(failure.failures)]
    parallel_errors = [cause for cause in causes if isinstance(cause, ParallelError)]
    return (
        parallel_errors or [CheckpointError(f"{folder}: {type(causes[0]).__name__}: {causes[0]}")]
    )[0]

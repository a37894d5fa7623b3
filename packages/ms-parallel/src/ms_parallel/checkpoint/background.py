"""Background checkpoints: this process copies its state, a writing process stores it.

A save has four phases. First, all ranks plan which rank writes which chunk; the plan is reused as
long as the state keeps its shapes. Second, each rank copies its chunks to memory shared with its
writing process and continues training. Third, ranks compare the progress of their writers between
steps; when every file is durable, rank 0's writer writes the manifest and renames the folder.
Fourth, all ranks learn that the checkpoint is complete.

Collectives therefore run on the main thread only. If any rank fails, the error is raised on all
ranks at the next step, and the folder never gets its final name.

Memory: one copy of a rank's part of the state, kept from the first save on.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ms_parallel.checkpoint.folder import LAST, complete_steps, step_folder
from ms_parallel.checkpoint.manifest import MANIFEST, Chunk, SavedFile
from ms_parallel.checkpoint.shared_memory import SharedMemory, WritingProcess
from ms_parallel.checkpoint.writer import Writer, box_of, dtype_of, header_of_items
from ms_parallel.cluster.agreement import sums
from ms_parallel.errors import StuckWriterError, WriteError

POLL_INTERVAL_S = 0.002
"""Interval at which `finish` polls."""


@frozen(kw_only=True, eq=False)
class RankPlan:
    """Chunks of a state that one rank writes in every checkpoint."""

    items: list[WriteItem]
    header: bytes
    sizes: list[int]
    """Bytes of each item."""
    metadata: Metadata
    """Metadata of the entire state."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Dtypes and shapes of the planned state."""

    @property
    def part_bytes(self) -> list[int]:
        """Sizes in bytes of the file's checksummed parts: the header, then the chunks."""
        return [len(self.header), *self.sizes] if self.items else []


@frozen(kw_only=True, eq=False)
class CheckpointJob:
    """A checkpoint that is being written."""

    folder: Path
    writer: Writer
    keep: int
    committing: bool = False
    error: str | None = None
    """Local error before writing started, reported to all ranks at the next poll."""
    note: Callable[[], object] = field(factory=lambda: lambda: None)
    """Called once the checkpoint is complete."""


class BackgroundSaver:
    """Writes one checkpoint at a time. All methods are collective.

    Args:
        root: folder of the run's checkpoints.
        keep: number of complete checkpoints to keep.
        timeout_s: seconds without progress after which a writing process counts as stuck.
        pinned: returns folders that must not be deleted now.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        timeout_s: float = 600.0,
        *,
        pinned: Callable[[], Collection[Path]] = tuple,
    ) -> None:
        self.root, self.keep, self.timeout_s, self.pinned = root, keep, timeout_s, pinned
        self.memory = SharedMemory()
        self.process: WritingProcess | None = None
        self.rank_plan: RankPlan | None = None
        self.job: CheckpointJob | None = None
        self.single_process = not dist.is_initialized() or dist.get_world_size() == 1
        self.rank = 0 if self.single_process else dist.get_rank()

    def save(
        self,
        step: int,
        state: Mapping[str, Tensor],
        *,
        facts: Mapping[str, Any],
        note: Callable[[], object],
    ) -> None:
        """Start writing a checkpoint, after waiting for the previous one.

        The state may change once this returns.

        Args:
            step: number of steps taken.
            state: tensors, as in `checkpoint.save`.
            facts: metadata as plain JSON values; rank 0's are stored.
            note: called on every rank once the checkpoint is complete.

        Raises:
            CheckpointError: the previous checkpoint could not be written.
        """
        # One checkpoint at a time: the shared memory still has the previous one's bytes.
        self.finish()
        rank_plan = self.rank_plan = self._plan(state)
        folder = step_folder(self.root, step)
        writer = Writer(folder, step=step, facts=facts)
        error = self._copy(state, rank_plan) if rank_plan.items else None
        if self.process is None:
            self.process = WritingProcess(self.memory)
        if rank_plan.items and error is None:
            file = writer.partial / f"rank-{self.rank:05d}.safetensors"
            self.process.submit(
                {
                    "kind": "write",
                    "folder": str(folder),
                    "file": str(file),
                    "parts": rank_plan.part_bytes,
                }
            )
        self.job = CheckpointJob(
            folder=folder, writer=writer, keep=self.keep, error=error, note=note
        )

    def poll(self) -> None:
        """Complete a checkpoint that has been written, or raise its error; called between steps.

        Raises:
            CheckpointError: a rank could not write; raised on every rank.
            StuckWriterError: a writing process made no progress for `timeout_s`; raised on every
                rank.
        """
        job = self.job
        if job is None:
            return
        result, error = self._writer_result(job)
        stuck = None if result is not None or error is not None else self._stuck(job)
        # One small all-reduce, so all ranks take the same branch below.
        done, failed, stuck_at = self._sums(
            float(result is not None), float(error is not None), float(stuck is not None)
        )
        if failed or stuck_at:
            self._abort(job, error, stuck)
        # `done` counts only rank 0 during the commit.
        if job.committing and done:
            self.job = None
            job.note()
        elif not job.committing and done == (1 if self.single_process else dist.get_world_size()):
            self._commit(job, result or {})

    def finish(self) -> None:
        """Wait until the current checkpoint is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        while self.job is not None:
            self.poll()
            if self.job is not None:
                sleep(POLL_INTERVAL_S)

    def close(self) -> None:
        """Kill the writing process, even while it writes."""
        if self.process is not None:
            self.process.end()
        self.process, self.job = None, None
        self.memory.close()

    def _writer_result(self, job: CheckpointJob) -> tuple[dict[str, Any] | None, str | None]:
        """Return the result of this rank's writer and its error; None for either if absent.

        During the commit, only rank 0's writer has a job.
        """
        assert self.process is not None
        assert self.rank_plan is not None
        if job.error is not None or (job.committing and self.rank > 0):
            return None, job.error
        if not job.committing and not self.rank_plan.items:
            return {}, None
        result = self.process.result()
        error = None if result is None else result.get("error")
        return (None, error) if error else (result, None)

    def _stuck(self, job: CheckpointJob) -> str | None:
        """Describe this rank's writing process if it made no progress for `timeout_s`."""
        assert self.process is not None
        silent_s = monotonic() - self.process.last_activity
        # Each poll is a successful collective, so no timeout of the process group ever fires.
        if silent_s < self.timeout_s or (job.committing and self.rank > 0):
            return None
        return (
            f"rank {self.rank}: the process that writes checkpoints made no progress for"
            f" {silent_s:.0f} s while writing {job.folder}: it is suspended, or its disk does not"
            " respond; the previous checkpoint is complete: rerun the same command to resume"
        )

    def _commit(self, job: CheckpointJob, result: Mapping[str, Any]) -> None:
        """Let rank 0 write the manifest and rename the folder, once all files are durable."""
        gathered: list[Any] = [None] * (1 if self.single_process else dist.get_world_size())
        local = self._results(result)
        if self.single_process:
            gathered = [local]
        else:
            dist.gather_object(local, gathered if self.rank == 0 else None, dst=0)
        # The manifest is written by rank 0's writer; other ranks wait for its result in `poll`.
        self.job = CheckpointJob(
            folder=job.folder, writer=job.writer, keep=job.keep, committing=True, note=job.note
        )
        if self.rank > 0:
            return
        assert self.process is not None
        assert self.rank_plan is not None
        manifest = job.writer.manifest(self.rank_plan.metadata, gathered)
        old = [step_folder(self.root, step) for step in complete_steps(self.root)]
        pinned = self.pinned()
        removed = [folder for folder in [*old, job.folder][: -job.keep] if folder not in pinned]
        # The writer does this in order: manifest, rename, `last`, removal of old checkpoints. A
        # crash in between leaves the new checkpoint complete, or absent with the old ones intact.
        self.process.submit(
            {
                "kind": "commit",
                "folder": str(job.folder),
                "aside": str(job.writer.partial),
                "manifest": [MANIFEST, manifest.encode().decode()],
                "last": [str(self.root / LAST), f"{job.writer.step}\n"],
                "removed": [str(folder) for folder in removed],
            }
        )

    def _results(self, result: Mapping[str, Any]) -> list[WriteResult]:
        """Describe this rank's chunks and file for the manifest."""
        assert self.rank_plan is not None
        if not self.rank_plan.items:
            return []
        name, header = f"rank-{self.rank:05d}.safetensors", self.rank_plan.header
        header_crc32, *checksums = result["checksums"]
        offset, results = len(header), []
        sizes = self.rank_plan.sizes
        for item, size, checksum in zip(self.rank_plan.items, sizes, checksums, strict=True):
            box = box_of(item)
            chunk = Chunk(
                file=name,
                begin=offset,
                size_bytes=size,
                crc32=checksum,
                offsets=tuple(box.offsets),
                shape=tuple(box.sizes),
            )
            offset += size
            results.append(WriteResult(item.index, size, chunk))
        saved_file = SavedFile(
            name=name, size_bytes=offset, header_bytes=len(header), header_crc32=header_crc32
        )
        return [*results, WriteResult(MetadataIndex(name), len(header), saved_file)]

    def _abort(self, job: CheckpointJob, error: str | None, stuck: str | None) -> None:
        """Abort the checkpoint on all ranks; raise the error of the lowest rank that failed."""
        reasons = [(error, stuck)]
        if not self.single_process:
            reasons = [(None, None)] * dist.get_world_size()
            dist.all_gather_object(reasons, (error, stuck))
        self.close()
        # Stuck before failed: its error would come from a disk that does not respond.
        if stuck_at := next((stuck for _, stuck in reasons if stuck), None):
            raise StuckWriterError(stuck_at)  # keeps the folder: its disk may not respond
        if self.rank == 0:
            job.writer.discard()
        raise WriteError(next(error for error, _ in reasons if error))

    def _plan(self, state: Mapping[str, Tensor]) -> RankPlan:
        """Plan which rank writes which chunk; reuse the plan while dtypes and shapes are equal."""
        shapes = {name: (t.dtype, tuple(t.shape)) for name, t in state.items()}
        if self.rank_plan is not None and self.rank_plan.shapes == shapes:
            return self.rank_plan
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(state), None, self.rank == 0)
        local_plan = Writer(self.root, step=0, facts={}).prepare_local_plan(
            planner.create_local_plan()
        )
        plan, metadata = self._global_plan(planner, local_plan)
        # Wide dtypes first, so that every tensor is aligned without padding.
        items = sorted(plan.items, key=lambda item: -dtype_of(item).itemsize)
        return RankPlan(
            items=items,
            header=header_of_items(items),
            sizes=[box_of(item).sizes.numel() * dtype_of(item).itemsize for item in items],
            metadata=metadata,
            shapes=shapes,
        )

    def _global_plan(
        self, planner: DefaultSavePlanner, local_plan: SavePlan
    ) -> tuple[SavePlan, Metadata]:
        """Deduplicate replicated chunks over all ranks; return this rank's plan."""
        if self.single_process:
            (plan,), metadata = planner.create_global_plan([local_plan])
            return plan, metadata
        count = dist.get_world_size()
        plans: list[Any] = [None] * count
        dist.gather_object(local_plan, plans if self.rank == 0 else None, dst=0)
        rank_plans: list[Any] = [None] * count
        if self.rank == 0:
            global_plans, metadata = planner.create_global_plan(plans)
            rank_plans = [(plan, metadata) for plan in global_plans]
        received: list[Any] = [None]
        # Each rank gets its own plan and the metadata of the whole state.
        dist.scatter_object_list(received, rank_plans if self.rank == 0 else None, src=0)
        return received[0][0], received[0][1]

    @torch.no_grad()
    def _copy(self, state: Mapping[str, Tensor], rank_plan: RankPlan) -> str | None:
        """Copy this rank's chunks to shared memory; return an error message on failure."""
        # A planner only to resolve items to tensors; the plan itself is reused.
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(state), None, self.rank == 0)
        try:
            buffer = self.memory.of_size(sum(rank_plan.part_bytes))
        except OSError as error:
            size = sum(rank_plan.part_bytes)
            reason = f"no memory for a copy of {size:,} bytes: {error.strerror}"
            return f"{reason}; set async_checkpoints to false"
        offset = len(rank_plan.header)
        buffer[:offset].copy_(torch.frombuffer(bytearray(rank_plan.header), dtype=torch.uint8))
        for item, size in zip(rank_plan.items, rank_plan.sizes, strict=True):
            if size:
                source = planner.resolve_data(item)
                assert isinstance(source, Tensor)
                # Reinterpreted in the shared buffer, so a GPU copies straight into it.
                target = buffer[offset : offset + size].view(source.dtype).view(source.shape)
                target.copy_(source.detach())
            offset += size
        return None

    def _sums(self, *values: float) -> list[float]:
        return list(values) if self.single_process else sums(*values)

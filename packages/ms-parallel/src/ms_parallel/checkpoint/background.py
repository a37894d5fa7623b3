"""Saves checkpoints beside the training: this process copies, another one writes.

A save is four things. All ranks plan who writes what, once, as their state keeps its shape. Each
copies its part to memory that it shares with its writing process, and goes on training. Between
steps all ranks say how far their writers are; when every file is durable, rank 0's writer is told
to write the manifest and to give the checkpoint its name. When that is done, all are told. So
collectives run on the main thread alone, and a checkpoint is complete or is none: whatever fails
is raised on all ranks at the next step, and its folder never gets its name.

Memory: one copy of a rank's part of the state, kept from the first save on.
"""

from collections.abc import Callable, Mapping
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

PAUSE_S = 0.002
"""Between questions, where there is nothing else to do."""


@frozen(kw_only=True, eq=False)
class RankShare:
    """What one rank writes of every checkpoint of a state."""

    items: list[WriteItem]
    header: bytes
    sizes: list[int]
    """Bytes of each item."""
    metadata: Metadata
    """Metadata of the whole state."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Dtypes and shapes of the state that the share was planned for."""

    @property
    def parts(self) -> list[int]:
        """Bytes of each part of the file that has a checksum."""
        return [len(self.header), *self.sizes] if self.items else []


@frozen(kw_only=True, eq=False)
class CheckpointJob:
    """A checkpoint on its way."""

    folder: Path
    writer: Writer
    keep: int
    committing: bool = False
    error: str | None = None
    """Why this rank could not begin, which all are told at the next question."""
    note: Callable[[], object] = field(factory=lambda: lambda: None)
    """Called once it is complete."""


class BackgroundSaver:
    """Writes one checkpoint at a time, all ranks together; every method is called by all of them.

    Args:
        root: where the checkpoints of the run lie.
        keep: complete ones that are kept.
        timeout_s: seconds without progress after which a writing process counts as stuck.
    """

    def __init__(self, root: Path, keep: int, timeout_s: float = 600.0) -> None:
        self.root, self.keep, self.timeout_s = root, keep, timeout_s
        self.memory = SharedMemory()
        self.process: WritingProcess | None = None
        self.share: RankShare | None = None
        self.job: CheckpointJob | None = None
        self.alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.rank = 0 if self.alone else dist.get_rank()

    def save(
        self,
        step: int,
        state: Mapping[str, Tensor],
        *,
        facts: Mapping[str, Any],
        note: Callable[[], object],
    ) -> None:
        """Begin a checkpoint; one that is still on its way is waited for.

        When this returns, the state may change: what is written is what it was.

        Args:
            step: updates that have been made.
            state: as `checkpoint.save` takes it.
            facts: plain JSON values to keep beside the tensors; rank 0's are written.
            note: called on every rank once the checkpoint is complete.

        Raises:
            CheckpointError: the one before could not be written.
        """
        self.finish()
        share = self.share = self._plan(state)
        folder = step_folder(self.root, step)
        writer = Writer(folder, step=step, facts=facts)
        error = self._copy(state, share) if share.items else None
        if self.process is None:
            self.process = WritingProcess(self.memory)
        if share.items and error is None:
            file = writer.aside / f"rank-{self.rank:05d}.safetensors"
            self.process.ask(
                {"kind": "write", "folder": str(folder), "file": str(file), "parts": share.parts}
            )
        self.job = CheckpointJob(
            folder=folder, writer=writer, keep=self.keep, error=error, note=note
        )

    def poll(self) -> None:
        """Complete, between two steps, a checkpoint that is written, or raise why it cannot be.

        Raises:
            CheckpointError: on every rank, where any of them could not write.
            StuckWriterError: on every rank, where a writing process made no progress for
                `timeout_s`.
        """
        job = self.job
        if job is None:
            return
        answer, error = self._answer(job)
        stuck = None if answer is not None or error is not None else self._stuck(job)
        done, failed, hung = self._sums(
            float(answer is not None), float(error is not None), float(stuck is not None)
        )
        if failed or hung:
            self._fail(job, error, stuck)
        if job.committing and done:
            self.job = None
            job.note()
        elif not job.committing and done == (1 if self.alone else dist.get_world_size()):
            self._commit(job, answer or {})

    def finish(self) -> None:
        """Wait until nothing is on its way.

        Raises:
            CheckpointError: it could not be written.
        """
        while self.job is not None:
            self.poll()
            if self.job is not None:
                sleep(PAUSE_S)

    def close(self) -> None:
        """End the writing process, in the midst of a file if there is one."""
        if self.process is not None:
            self.process.end()
        self.process, self.job = None, None
        self.memory.close()

    def _answer(self, job: CheckpointJob) -> tuple[dict[str, Any] | None, str | None]:
        """Return what this rank's writer answered, and why it failed; None for what is not there.

        Away from rank 0 there is nothing to be said of a commit.
        """
        assert self.process is not None
        assert self.share is not None
        if job.error is not None or (job.committing and self.rank > 0):
            return None, job.error
        if not job.committing and not self.share.items:
            return {}, None
        answer = self.process.answer()
        error = None if answer is None else answer.get("error")
        return (None, error) if error else (answer, None)

    def _stuck(self, job: CheckpointJob) -> str | None:
        """Describe this rank's writing process if it made no progress for `timeout_s`."""
        assert self.process is not None
        silent_s = monotonic() - self.process.last_sign
        # Each poll is a successful collective, so no timeout of the process group ever fires.
        if silent_s < self.timeout_s or (job.committing and self.rank > 0):
            return None
        return (
            f"rank {self.rank}: the process that writes checkpoints made no progress for"
            f" {silent_s:.0f} s while writing {job.folder}: it is stopped, or its disk does not"
            " answer; the checkpoint before is complete: rerun the same command to resume"
        )

    def _commit(self, job: CheckpointJob, answer: Mapping[str, Any]) -> None:
        """Have the manifest written and the folder named, now that all files are durable."""
        found: list[Any] = [None] * (1 if self.alone else dist.get_world_size())
        mine = self._results(answer)
        if self.alone:
            found = [mine]
        else:
            dist.gather_object(mine, found if self.rank == 0 else None, dst=0)
        self.job = CheckpointJob(
            folder=job.folder, writer=job.writer, keep=job.keep, committing=True, note=job.note
        )
        if self.rank > 0:
            return
        assert self.process is not None
        assert self.share is not None
        manifest = job.writer.manifest(self.share.metadata, found)
        old = [step_folder(self.root, step) for step in complete_steps(self.root)]
        self.process.ask(
            {
                "kind": "commit",
                "folder": str(job.folder),
                "aside": str(job.writer.aside),
                "manifest": [MANIFEST, manifest.encode().decode()],
                "last": [str(self.root / LAST), f"{job.writer.step}\n"],
                "removed": [str(each) for each in [*old, job.folder][: -job.keep]],
            }
        )

    def _results(self, answer: Mapping[str, Any]) -> list[WriteResult]:
        """List what this rank has written, as the manifest says it."""
        assert self.share is not None
        if not self.share.items:
            return []
        name, header = f"rank-{self.rank:05d}.safetensors", self.share.header
        of_header, *checksums = answer["checksums"]
        begin, results = len(header), []
        sizes = self.share.sizes
        for item, size, checksum in zip(self.share.items, sizes, checksums, strict=True):
            box = box_of(item)
            chunk = Chunk(
                file=name,
                begin=begin,
                size_bytes=size,
                crc32=checksum,
                offsets=tuple(box.offsets),
                shape=tuple(box.sizes),
            )
            begin += size
            results.append(WriteResult(item.index, size, chunk))
        whole = SavedFile(
            name=name, size_bytes=begin, header_bytes=len(header), header_crc32=of_header
        )
        return [*results, WriteResult(MetadataIndex(name), len(header), whole)]

    def _fail(self, job: CheckpointJob, error: str | None, stuck: str | None) -> None:
        """Give up a checkpoint on all ranks, with the words of the first that could not write."""
        reasons = [(error, stuck)]
        if not self.alone:
            reasons = [(None, None)] * dist.get_world_size()
            dist.all_gather_object(reasons, (error, stuck))
        self.close()
        if hung := next((stuck for _, stuck in reasons if stuck), None):
            raise StuckWriterError(hung)  # the folder is left alone: its disk may not answer
        if self.rank == 0:
            job.writer.discard()
        raise WriteError(next(error for error, _ in reasons if error))

    def _plan(self, state: Mapping[str, Tensor]) -> RankShare:
        """Plan who writes what; keep the plan as long as the state keeps its dtypes and shapes."""
        shapes = {name: (t.dtype, tuple(t.shape)) for name, t in state.items()}
        if self.share is not None and self.share.shapes == shapes:
            return self.share
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(state), None, self.rank == 0)
        local = Writer(self.root, step=0, facts={}).prepare_local_plan(planner.create_local_plan())
        whole, metadata = self._agree(planner, local)
        items = sorted(whole.items, key=lambda item: -dtype_of(item).itemsize)
        return RankShare(
            items=items,
            header=header_of_items(items),
            sizes=[box_of(item).sizes.numel() * dtype_of(item).itemsize for item in items],
            metadata=metadata,
            shapes=shapes,
        )

    def _agree(self, planner: DefaultSavePlanner, local: SavePlan) -> tuple[SavePlan, Metadata]:
        """Plan with all ranks to write once what is replicated; return this rank's part."""
        if self.alone:
            (whole,), metadata = planner.create_global_plan([local])
            return whole, metadata
        count = dist.get_world_size()
        plans: list[Any] = [None] * count
        dist.gather_object(local, plans if self.rank == 0 else None, dst=0)
        parts: list[Any] = [None] * count
        if self.rank == 0:
            found, metadata = planner.create_global_plan(plans)
            parts = [(plan, metadata) for plan in found]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, parts if self.rank == 0 else None, src=0)
        return mine[0][0], mine[0][1]

    @torch.no_grad()
    def _copy(self, state: Mapping[str, Tensor], share: RankShare) -> str | None:
        """Copy the file's bytes into the memory that the writing process reads; say why if not."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(state), None, self.rank == 0)
        try:
            buffer = self.memory.of_size(sum(share.parts))
        except OSError as error:
            size = sum(share.parts)
            why = f"no memory for a copy of {size:,} bytes: {error.strerror}"
            return f"{why}; turn async_checkpoints off"
        begin = len(share.header)
        buffer[:begin].copy_(torch.frombuffer(bytearray(share.header), dtype=torch.uint8))
        for item, size in zip(share.items, share.sizes, strict=True):
            if size:
                source = planner.resolve_data(item)
                assert isinstance(source, Tensor)
                target = buffer[begin : begin + size].view(source.dtype).view(source.shape)
                target.copy_(source.detach())
            begin += size
        return None

    def _sums(self, *values: float) -> list[float]:
        return list(values) if self.alone else sums(*values)

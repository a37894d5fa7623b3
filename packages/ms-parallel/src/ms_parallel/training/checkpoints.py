"""Checkpoints of a run: saving, finding and loading them."""

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import msgspec
from attrs import asdict, field, frozen

from ms_parallel import checkpoint
from ms_parallel.checkpoint.background import BackgroundSaver
from ms_parallel.checkpoint.dcp import Names
from ms_parallel.checkpoint.manifest import MANIFEST
from ms_parallel.checkpoint_store import CheckpointStore, CheckpointUploader
from ms_parallel.cluster.agreement import run_on_rank_zero
from ms_parallel.cluster.watch import position
from ms_parallel.engine.engine import Engine
from ms_parallel.errors import CheckpointError, DamageError
from ms_parallel.events import OnEvent
from ms_parallel.files.untrusted import decoding
from ms_parallel.optim.grouped import GroupedOptimizer
from ms_parallel.optim.optimizer import learning_rate
from ms_parallel.optim.optimizers.adamw import AdamWRule
from ms_parallel.progress import RunDisplay
from ms_parallel.training.options import Options

logger = logging.getLogger(__name__)

CONSUMED = "consumed_samples"
"""Key of the number of consumed samples in the state of ms-data's stream."""


class Stream(Protocol):
    """Batches with a position that can be saved and restored."""

    def __next__(self) -> Mapping[str, Any]:
        """Return this data rank's rows of the next global batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values; equal on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore the position saved in `state`."""

    def share_out(self, shares: Sequence[int], /) -> None:
        """Set the number of rows of each data rank for the following batches."""


class RunProgress(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Progress of a run over all launches; part of each checkpoint."""

    loss: float | None = None
    """Loss of the last step's batch; None before the first step, or if it is not finite."""
    tokens: int = 0
    """Tokens trained on."""
    samples: int | None = None
    """Samples drawn from the stream; None in checkpoints that do not record it."""
    seconds: float = 0.0
    """Time spent in steps."""
    first_held_out_loss: float | None = None
    """Loss on held-out text before the first step."""
    held_out_loss: float | None = None
    """Loss on held-out text at the last evaluation."""
    held_out_step: int | None = None
    skipped: dict[str, int] = {}
    """Number of skipped steps by reason."""
    rolled_back: int = 0
    """Number of roll-backs to a checkpoint."""
    recent: list[tuple[float, float]] = []
    """Loss and gradient norm of recent steps, for detecting spikes."""
    shares: list[int] = []
    """Rows of each data rank, if they are assigned by measured speed."""


class RunMetadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a checkpoint in addition to tensors."""

    model: dict[str, Any]
    layout: str
    stream: dict[str, Any]
    progress: RunProgress = msgspec.field(name="standing")  # key in checkpoint files


@frozen(kw_only=True)
class RunCheckpoints:
    """Saves and restores the checkpoints of a run."""

    engine: Engine
    stream: Stream
    progress: RunProgress
    options: Options
    total: int
    """Steps of the whole run."""
    display: RunDisplay
    emit: OnEvent
    background: BackgroundSaver | None = None
    """Background writer, with `async_checkpoints`."""
    uploads: CheckpointUploader | None = None
    """Uploader to `checkpoint_store`, on rank 0."""
    damaged: Counter[int] = field(factory=Counter)
    """Number of damaged copies of each step that were found on resuming."""

    @property
    def root(self) -> Path:
        """Folder of all checkpoints."""
        return self.options.output_dir / "checkpoints"

    def resume(self) -> None:
        """Load the newest complete checkpoint, if any.

        A damaged checkpoint is renamed with a warning, and the one before it is loaded; the steps
        in between are repeated with identical results.

        Raises:
            CheckpointError: it belongs to another model, all are damaged, or `resume` is False.
        """
        # Rank 0 decides, so that all ranks load the same checkpoint.
        while newest := run_on_rank_zero(self._newest_anywhere):
            folder, manifest = newest
            try:
                self._restore(folder, manifest)
            except DamageError as error:
                # Raised on all ranks, so all ranks skip it.
                self._pass_over(manifest.step, error)
                continue
            if self.engine.step_count < self.total:
                self.display.note(
                    f"resuming from {folder} (step {self.engine.step_count} of {self.total})"
                )
            self.emit("resume", {"step": self.engine.step_count, "checkpoint": str(folder)})
            run_on_rank_zero(partial(self._upload_if_unpublished, folder))
            return

    def start_from(
        self, folder: str | Path, step: int | None, *, weights_only: bool = False
    ) -> int:
        """Load a checkpoint of torch.distributed.checkpoint and save it as this run's first.

        The data position is this run's stream after the same number of steps.

        Returns:
            The step at which the run continues.

        Raises:
            CheckpointError: the run has checkpoints already, or the folder has another model.
        """
        if run_on_rank_zero(lambda: checkpoint.was_begun(self.root)):
            raise CheckpointError(
                f"{self.root} holds checkpoints already; set another output_dir, or delete them"
            )
        state = self.engine.state_dict()
        loaded = checkpoint.load_distributed(
            folder, self.engine.config, state, step=step, weights_only=weights_only
        )
        self.engine.load_state_dict(state)
        samples = loaded.step * self.options.batch_size
        self.stream.load_state_dict({**self.stream.state_dict(), CONSUMED: samples})
        self.progress.samples = samples
        tokens = samples * self.options.sequence_length
        self.progress.tokens = tokens if loaded.tokens is None else loaded.tokens
        self.save()
        self.finish()
        return loaded.step

    def export(self, folder: str | Path, names: Names) -> int:
        """Write the newest checkpoint for torch.distributed.checkpoint; return its step.

        Raises:
            CheckpointError: the run has no checkpoint, or the folder cannot be written.
        """
        self.resume()
        engine = self.engine
        if engine.step_count == 0:
            raise CheckpointError(f"{self.root} holds no checkpoint; train before you export")
        checkpoint.save_distributed(
            folder,
            engine.config,
            engine.state_dict(),
            names=names,
            groups=adamw_groups(engine.optimizer),
            tokens=self.progress.tokens,
        )
        return engine.step_count

    def roll_back(self) -> bool:
        """Load the newest complete checkpoint, but keep the data position and the counters.

        The recent losses that spikes are compared with are the checkpoint's.

        Returns:
            False without a checkpoint, in which case nothing changes.
        """
        # A save in progress may become the newest checkpoint.
        self.finish()
        newest = run_on_rank_zero(lambda: self._newest_complete() if self._any() else None)
        if newest is None:
            return False
        folder, manifest = newest
        metadata = self._load(folder, manifest)
        self.progress.recent = list(metadata.progress.recent)
        return True

    def _newest_anywhere(self) -> tuple[Path, checkpoint.Manifest] | None:
        """Return the newest complete checkpoint, after a download if the store has a newer one."""
        if self.uploads is not None and self.options.resume:
            self._download_newer(self.uploads.store)
        return self._newest_complete()

    def _download_newer(self, store: CheckpointStore) -> None:
        local = max(checkpoint.complete_steps(self.root), default=-1)
        # After two damaged copies of a step, older steps are tried.
        published = [step for step in store.steps() if self.damaged[step] < 2]
        if not published or published[-1] <= local:
            return
        step = published[-1]
        self.display.note(f"downloading the checkpoint of step {step} from {store.url}")
        try:
            store.download(self.root, step=step)
        except DamageError as damage:
            self.damaged[step] += 2
            logger.warning("%s", damage)
            self.emit("damaged_checkpoint", {"step": step, "problem": str(damage)})
            self._download_newer(store)
            return
        self.emit("download", {"step": step, "store": store.url})

    def _upload_if_unpublished(self, folder: Path) -> None:
        """Upload the checkpoint that a killed process did not finish uploading."""
        if self.uploads is None:
            return
        step = int(folder.name.removeprefix("step-"))
        if step not in self.uploads.store.steps():
            self.uploads.submit(folder)

    def _any(self) -> bool:
        return bool(checkpoint.complete_steps(self.root))

    def _newest_complete(self) -> tuple[Path, checkpoint.Manifest] | None:
        checkpoint.sweep(self.root)
        steps = checkpoint.all_steps(self.root)
        # A roll-back, after the first step, may load checkpoints of this launch.
        if steps and not self.options.resume and self.engine.step_count == 0:
            raise CheckpointError(
                f"resume=false but {self.root} holds checkpoints; set another output_dir, or delete"
                " them"
            )
        for step in reversed(steps):
            folder = checkpoint.step_folder(self.root, step)
            try:
                manifest = checkpoint.read_manifest(folder)
                metadata_of(folder, manifest)
                return folder, manifest
            except DamageError as damage:
                self._set_aside(step, damage)
                if self.uploads is not None and self.options.resume and self.engine.step_count == 0:
                    return self._newest_anywhere()  # the store may have an intact copy
        if checkpoint.was_begun(self.root):
            damaged = len(list(self.root.glob("*.damaged-*")))
            raise CheckpointError(
                f"no complete checkpoint is left in {self.root}, {damaged} are damaged; restore"
                f" one, or move {self.root} away to start from the beginning"
            )
        return None

    def _pass_over(self, step: int, damage: DamageError) -> None:
        run_on_rank_zero(lambda: self._set_aside(step, damage))

    def _set_aside(self, step: int, damage: DamageError) -> None:
        renamed = checkpoint.set_aside(self.root, step)
        self.damaged[step] += 1
        logger.warning(
            "%s; kept as %s, resuming from the checkpoint before it", damage, renamed.name
        )
        self.emit("damaged_checkpoint", {"step": step, "problem": str(damage)})

    def _load(self, folder: Path, manifest: checkpoint.Manifest) -> RunMetadata:
        """Load a checkpoint into the engine and return its metadata."""
        metadata = metadata_of(folder, manifest)
        self._check_model(folder, metadata.model)
        # Read into the engine's own tensors; `load_state_dict` then restores counters and tied
        # copies.
        state = self.engine.state_dict()
        checkpoint.load(folder, manifest, state)
        self.engine.load_state_dict(state)
        return metadata

    def _restore(self, folder: Path, manifest: checkpoint.Manifest) -> None:
        metadata = self._load(folder, manifest)
        self.stream.load_state_dict(metadata.stream)
        for name in RunProgress.__struct_fields__:
            setattr(self.progress, name, getattr(metadata.progress, name))
        if self.progress.samples is None:
            self.progress.samples = metadata.stream.get(CONSUMED)

    def _check_model(self, folder: Path, saved: Mapping[str, Any]) -> None:
        current = model_facts(self.engine)
        names = {name for name in current.keys() | saved.keys() if not name.endswith("_token_id")}
        for name in sorted(names):
            if current.get(name) != saved.get(name):
                raise CheckpointError(
                    f"{folder} is a checkpoint of another model: {name} is {saved.get(name)!r} in"
                    f" the checkpoint but {current.get(name)!r} in this run; set another output_dir"
                )

    def mark(self) -> bytes:
        """Return the stamp of the final model: its step and the digest of its checkpoint."""
        manifest = checkpoint.step_folder(self.root, self.engine.step_count) / MANIFEST
        # Two runs may end at the same step, but not with the same checkpoint.
        digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
        return msgspec.json.encode({"step": self.engine.step_count, "checkpoint": digest})

    def save(self) -> None:
        """Save a checkpoint of this step, in the background if enabled, and delete the oldest.

        Raises:
            CheckpointError: it cannot be written; earlier checkpoints remain valid.
        """
        step, started = self.engine.step_count, monotonic()
        position.activity = "checkpoint"
        folder = checkpoint.step_folder(self.root, step)
        facts = {
            "model": model_facts(self.engine),
            "layout": str(self.engine.groups.layout),
            "stream": self.stream.state_dict(),
            "standing": msgspec.to_builtins(self.progress),
        }

        def note() -> None:
            seconds = round(monotonic() - started, 3)
            self.emit("checkpoint", {"step": step, "folder": str(folder), "seconds": seconds})
            if self.uploads is not None:
                self.uploads.submit(folder)

        state = self.engine.state_dict()
        if self.background is not None:
            self.background.save(step, state, facts=facts, note=note)
            return
        checkpoint.save(folder, state, step=step, facts=facts)
        run_on_rank_zero(lambda: self._record_and_prune(step))
        note()

    def poll(self) -> None:
        """Complete a background save that has finished writing; called between steps.

        Raises:
            CheckpointError: any rank failed to write; raised on all ranks.
        """
        if self.background is not None:
            self.background.poll()
        self._report_uploads()

    def _report_uploads(self) -> None:
        """Log the uploads that have ended."""
        if self.uploads is not None:
            self.uploads.report(self.emit)

    def finish_uploads(self) -> None:
        """Wait until the newest checkpoint is in the store; collective.

        Raises:
            CheckpointError: it could not be uploaded; it is complete on this machine.
        """
        if self.options.checkpoint_store is None:
            return
        position.activity = "upload of a checkpoint"
        run_on_rank_zero(self._finish_uploads)

    def _finish_uploads(self) -> None:
        assert self.uploads is not None
        self.uploads.wait()
        problem = self.uploads.last_problem
        self._report_uploads()
        checkpoint.keep_last(self.root, self.options.keep_checkpoints)
        if problem:
            raise CheckpointError(
                f"{problem}; the checkpoint is complete in {self.root}, and the same command"
                " uploads it"
            )

    def finish(self) -> None:
        """Wait for a background save to complete.

        Raises:
            CheckpointError: it failed.
        """
        if self.background is not None:
            position.activity = "checkpoint"
            self.background.finish()

    def close(self) -> None:
        """Stop the background writer, even if it is still writing."""
        if self.background is not None:
            self.background.close()

    def _record_and_prune(self, step: int) -> None:
        checkpoint.note_last(self.root, step)
        pinned = self.uploads.pinned if self.uploads is not None else ()
        checkpoint.keep_last(self.root, self.options.keep_checkpoints, pinned=pinned)


def metadata_of(folder: Path, manifest: checkpoint.Manifest) -> RunMetadata:
    """Read a checkpoint's metadata and check its data position against its step count.

    Raises:
        DamageError: the metadata is not that of a training run, or its data position does not
            match its steps.
    """
    with decoding(folder / MANIFEST, error=DamageError):
        metadata = msgspec.convert(manifest.facts, RunMetadata)
    samples, position = metadata.progress.samples, metadata.stream.get(CONSUMED)
    if (
        samples is not None
        and position is not None
        and (position != samples or samples < manifest.step)
    ):
        raise DamageError(
            f"{folder / MANIFEST}: the data position is after {position} samples, where step"
            f" {manifest.step} was reached with {samples}"
        )
    return metadata


def adamw_groups(optimizer: GroupedOptimizer) -> dict[str, dict[str, Any]]:
    """Return the settings that torch's AdamW needs for each parameter, by name.

    Raises:
        CheckpointError: it is not AdamW.
    """
    rate = learning_rate(optimizer.update_count, optimizer.config)
    groups: dict[str, dict[str, Any]] = {}
    for rule in optimizer.rules:
        if not isinstance(rule, AdamWRule):
            raise CheckpointError(
                "only checkpoints of AdamW can be exported; train with optimizer='AdamW'"
            )
        group = rule.group
        settings = {
            "lr": rate * group.rate,
            "initial_lr": optimizer.config.learning_rate * group.rate,
            "betas": tuple(group.config.betas),
            "eps": group.config.eps,
            "weight_decay": group.weight_decay,
            "decoupled_weight_decay": True,
            "amsgrad": False,
            "maximize": False,
            "capturable": False,
            "differentiable": False,
            "foreach": False,
            "fused": True,
        }
        groups |= dict.fromkeys(group.names, settings)
    return groups


def model_facts(engine: Engine) -> dict[str, Any]:
    """Return the model's configuration as JSON values, without special token ids."""
    facts = asdict(engine.config)
    return {
        name: list(v) if isinstance(v, tuple) else v
        for name, v in facts.items()
        if not name.endswith("_token_id")
    }

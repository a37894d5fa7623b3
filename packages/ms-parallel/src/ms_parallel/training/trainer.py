"""`DistributedTrainer`: a model, a layout and a dataset, trained by one call."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from attrs import asdict, evolve

from ms_parallel.arguments import check_type
from ms_parallel.checkpoint.background import BackgroundSaver
from ms_parallel.checkpoint.dcp import Names
from ms_parallel.checkpoint_store import CheckpointStore, CheckpointUploader
from ms_parallel.cluster.agreement import run_on_rank_zero
from ms_parallel.cluster.connection import connect, join
from ms_parallel.cluster.error_report import install_exception_hook
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.process import is_first, rank, world_size
from ms_parallel.cluster.slurm import adopt_scheduler
from ms_parallel.engine.assembly import sharded_layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.stopwatch import Stopwatch
from ms_parallel.errors import CheckpointError, ConfigError, LaunchError
from ms_parallel.events import JsonLines
from ms_parallel.files.untrusted import check_path
from ms_parallel.pipeline.choice import SEARCH
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.planner.searched_schedule import (
    FILE,
    SearchedSchedule,
    read_searched_schedule,
    write_searched_schedule,
)
from ms_parallel.planner.tuning import conditions_of, search_schedule
from ms_parallel.progress import RunDisplay
from ms_parallel.signature import takes
from ms_parallel.split.precision_choice import MixedPrecision
from ms_parallel.training.audits import AuditLog
from ms_parallel.training.checkpoints import RunCheckpoints, RunProgress
from ms_parallel.training.dataset import prepare, stream_source
from ms_parallel.training.engine_setup import (
    build_engine,
    fit_model,
    layout_of,
    memory_cap,
    microbatch,
    row_assignment,
)
from ms_parallel.training.held_out import HeldOut
from ms_parallel.training.microbatch_size import predict_microbatch_size, resolve_microbatch_size
from ms_parallel.training.optional import data_package, operators_of
from ms_parallel.training.options import AUTO, USED_IF, Length, Options
from ms_parallel.training.ownership import output_lock
from ms_parallel.training.planning.auto_layout import resolve_layout
from ms_parallel.training.planning.subprocesses import ask_memory
from ms_parallel.training.read_ahead import ReadAhead
from ms_parallel.training.recovery import Recovery, RecoveryPolicy
from ms_parallel.training.result import Result
from ms_parallel.training.run import Run, StepRecorder, TakeStep
from ms_parallel.training.step_log import StepLog
from ms_parallel.used_settings import check_used


class DistributedTrainer:
    """Pre-trains a decoder on a dataset under any layout, and resumes interrupted runs.

    The constructor only validates the settings; `train` does everything else.

    Args:
        model_arch: `llama`, `mistral`, `qwen2`, `qwen3`, or a folder with a Hugging Face
            config.json. If the folder has weights, training starts from them.
        parallel_config: axes such as `{"tensor_parallel": 2}`, in which data may be `"rest"`; a
            Layout; or `auto`, which plans one. None puts all processes on `data`.
        optimizer: `AdamW`, `Muon`, `SGD`, `Adafactor`, or an elementwise class of torch.optim; or
            a table of its `name` and settings.
        mixed_precision: compute in bfloat16 (True) or `"float16"`; weights, optimizer state and
            reductions stay float32.

    Raises:
        ConfigError: a setting has the wrong type or is out of range, or has no effect because of
            another one.
        LayoutError: the layout is invalid.
    """

    @takes(Options)
    def __init__(
        self,
        model_arch: str | Path,
        parallel_config: Layout | Mapping[str, int | str] | str | None = None,
        optimizer: str | Mapping[str, Any] = "AdamW",
        mixed_precision: MixedPrecision = False,
        **settings: Any,
    ) -> None:
        self.options = Options(
            model_arch=model_arch,
            parallel_config=parallel_config,
            optimizer=optimizer,
            mixed_precision=mixed_precision,
            **settings,
        )
        check_used(self.options, USED_IF, error=ConfigError)
        self._resolved = self.options
        """The options with the planned layout, if `parallel_config` is "auto"."""
        self._run: Run | None = None
        self._shards = Path()

    @classmethod
    def from_options(cls, options: Options) -> "DistributedTrainer":
        """Create a trainer from options that are already validated.

        Raises:
            ConfigError: options are not `Options`.
        """
        check_type("options", options, Options, "Options", error=ConfigError)
        return cls(**asdict(options, recurse=False))

    def train(
        self, dataset_path: str | Path, epochs: float | None = None, steps: int | None = None
    ) -> Result:
        """Train to the last step or until SIGTERM, resuming from the newest checkpoint.

        Args:
            dataset_path: folder of shards, or its URL in an object store; or raw text, which is
                built into shards first.
            epochs: passes over the training text. Batches may straddle epochs.
            steps: optimizer steps, instead of epochs.

        Returns:
            The result of the run, also if a signal stopped it.

        Raises:
            ConfigError: both or neither of epochs and steps are set, or sizes do not fit together.
            LaunchError: the layout needs processes that were not started.
            LayoutError: the layout does not fit the processes or the model.
            CheckpointError: the checkpoints belong to another model or cannot be written.
            FolderError: another process uses output_dir, or it belongs to another run.
            ms_data.DataError: the dataset cannot be used.
        """
        check_path("dataset", dataset_path, error=ConfigError)
        with self._open_run(dataset_path, Length(epochs=epochs, steps=steps)) as (run, changes):
            run.resume(changes)
            self._run, resumed = run, run.engine.step_count
            return run.finish(run.take_steps(), resumed)

    def import_checkpoint(
        self,
        folder: str | Path,
        dataset_path: str | Path,
        epochs: float | None = None,
        steps: int | None = None,
        *,
        step: int | None = None,
        weights_only: bool = False,
    ) -> int:
        """Start this run from a checkpoint of torch.distributed.checkpoint, such as torchtitan's.

        Weights, AdamW moments and the step become the run's first checkpoint, from which `train`
        resumes under any layout. Each process reads only its part.

        Args:
            folder: folder with `.metadata`.
            dataset_path: as in `train`; training continues after `step` batches of it.
            epochs: as in `train`.
            steps: as in `train`; counts from the start of the imported run.
            step: number of steps taken, if the folder does not record it.
            weights_only: load the weights alone, with a new optimizer state; the step is 0, or
                `step`.

        Returns:
            The step at which the run continues.

        Raises:
            CheckpointError: the folder is damaged or of another model, or `output_dir` holds
                checkpoints already.
            ConfigError: as in `train`.
        """
        check_path("folder", folder, error=CheckpointError)
        check_path("dataset", dataset_path, error=ConfigError)
        with self._open_run(dataset_path, Length(epochs=epochs, steps=steps)) as (run, _):
            imported_step = run.checkpoints.start_from(folder, step, weights_only=weights_only)
            run.checkpoints.finish_uploads()
            return imported_step

    def export_checkpoint(
        self,
        folder: str | Path,
        dataset_path: str | Path,
        epochs: float | None = None,
        steps: int | None = None,
        *,
        names: Names = "torchtitan",
    ) -> int:
        """Write this run's newest checkpoint for torch.distributed.checkpoint, in one process.

        Args:
            folder: folder to create, such as `outputs/checkpoint/step-100`.
            dataset_path: as in `train`.
            epochs: as in `train`; sets the learning rate of the next step.
            steps: as in `train`.
            names: `"torchtitan"` or `"huggingface"`.

        Returns:
            The step of the checkpoint.

        Raises:
            CheckpointError: there is no checkpoint, or the folder exists or cannot be written.
            LaunchError: several processes were started.
        """
        check_path("folder", folder, error=CheckpointError)
        check_path("dataset", dataset_path, error=ConfigError)
        if world_size() > 1:
            raise LaunchError(f"export needs a single process, got {world_size()}; start it alone")
        with self._open_run(dataset_path, Length(epochs=epochs, steps=steps)) as (run, _):
            return run.checkpoints.export(folder, names)

    @contextmanager
    def _open_run(
        self, dataset_path: str | Path, length: Length
    ) -> Iterator[tuple[Run, Sequence[str]]]:
        """Lock the output folder and assemble the run; yield it with the changed settings."""
        options = self.options
        install_exception_hook()
        adopt_scheduler()
        layout = layout_of(options)
        join(layout, device=options.wanted_device, timeout_s=options.timeout_s)
        if options.parallel_config != AUTO:
            fit_model(options, layout, None)  # fail before the shards are built
        with (
            output_lock(options, dataset_path, epochs=length.epochs, steps=length.steps) as changes,
            self._events() as emit,
        ):
            # Under the lock, so that two launches cannot build the same shards.
            self._shards = run_on_rank_zero(lambda: prepare(dataset_path, options))
            self._resolved = resolve_layout(options, self._shards, emit)
            run = self._assemble(layout_of(self._resolved), length, emit)
            try:
                yield run, changes
            finally:
                run.stream.close()
                # Kills a background write that an error left running; complete checkpoints are
                # not affected.
                run.checkpoints.close()
                run.display.close()

    def evaluate(self) -> float | None:
        """Return the held-out loss of the current weights; None without held-out text.

        Raises:
            ConfigError: nothing has been trained yet.
        """
        return self._trained().evaluate()

    def generate(
        self, prompt: str, *, max_new_tokens: int = 96, temperature: float = 0.8, top_k: int = 50
    ) -> str:
        """Continue a prompt with the current weights. Collective: every process must call it.

        Raises:
            ConfigError: nothing has been trained yet.
        """
        return self._trained().generate(
            prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k
        )

    def _trained(self) -> Run:
        if self._run is None:
            raise ConfigError("nothing has been trained yet; call train first")
        return self._run

    @contextmanager
    def _events(self) -> Iterator[Any]:
        """Yield the event callback on rank 0, and a no-op on other ranks."""
        if not is_first():
            yield lambda kind, fields: None
        elif self.options.on_event is not None:
            yield self.options.on_event
        else:
            lines = JsonLines(self.options.output_dir / "events.jsonl")
            try:
                yield lines
            finally:
                lines.close()

    def _assemble(self, layout: Layout, length: Length, emit: Any) -> Run:
        options, data = self._resolved, data_package()
        config = fit_model(options, layout, self._shards)
        data_place = layout.place(rank())
        source = stream_source(self._shards, options)
        stream = data.TokenStream(
            source,
            sequence_length=options.sequence_length,
            batch_size=options.batch_size,
            seed=options.seed,
            place=data_place,
        )
        samples = round((length.epochs or 0) * stream.samples_per_epoch)
        total = length.steps or samples // options.batch_size
        if not total:
            raise ConfigError(
                f"{length.epochs} epochs of {stream.samples_per_epoch} samples of"
                f" {options.sequence_length} tokens do not fill one batch of"
                f" {options.batch_size}; lower batch_size or sequence_length, or give more epochs"
            )
        engine, schedule, options = self._engine(config, layout, total, emit)
        batches = ReadAhead(stream, pin=engine.device.type != "cpu")
        # Held-out batches are multiples of this, so all data ranks run the same microbatches.
        rows = layout.data_ranks * (microbatch(options, layout) or 1)
        shares = row_assignment(options, layout, data_place, emit)
        if shares.measured:
            # Ranks that share weights wait for each other in the first and last microbatch.
            between_microbatches = engine.groups.layout.shards > 1
            engine.runner.stopwatch = Stopwatch(
                engine.runner.runtime, engine.device, between=between_microbatches
            )
        progress = RunProgress()
        display = RunDisplay(
            total=total, every=options.log_every, active=options.progress and is_first()
        )
        uploads = self._uploader()
        checkpoints = RunCheckpoints(
            engine=engine,
            stream=batches,
            progress=progress,
            options=options,
            total=total,
            display=display,
            emit=emit,
            background=self._background_saver(uploads),
            uploads=uploads,
        )
        policy = RecoveryPolicy(
            on_nonfinite=options.on_nonfinite,
            on_spike=options.on_spike,
            factor=options.spike_factor,
            window=options.spike_window,
        )
        take_step: TakeStep = engine.step
        if options.record_every is not None:
            folder = options.output_dir / "timelines"
            take_step = StepRecorder(engine=engine, every=options.record_every, folder=folder).step
        return Run(
            engine=engine,
            take_step=take_step,
            stream=batches,
            shards=self._shards,
            held_out=HeldOut.find(
                self._shards,
                data_place,
                rows,
                source=source,
                sequence_length=options.sequence_length,
                batch_size=options.batch_size,
                batches=options.eval_batches,
            ),
            total=total,
            options=options,
            schedule=schedule,
            display=display,
            emit=emit,
            step_log=self._step_log(total, display, emit),
            checkpoints=checkpoints,
            progress=progress,
            recovery=Recovery(
                policy=policy,
                engine=engine,
                checkpoints=checkpoints,
                progress=progress,
                emit=emit,
            ),
            shares=shares,
        )

    def _engine(
        self, config: Any, layout: Layout, total: int, emit: Any
    ) -> tuple[Engine, SearchedSchedule | None, Options]:
        """Build the engine; return it with the searched schedule and the resolved options."""

        @cache
        def predict(rows: int) -> list[RankMemory]:
            return ask_memory(self._resolved, layout, self._shards, rows)

        options = predict_microbatch_size(self._resolved, layout, predict)
        schedule = _find_schedule(options, config, layout)
        engine = build_engine(options, config, layout, total, schedule)
        microbatch_record = resolve_microbatch_size(engine, self._resolved, layout, predict)
        if microbatch_record is not None:
            options = evolve(options, microbatch_size=microbatch_record.rows)
            emit(
                "microbatch",
                {"rows": microbatch_record.rows, "counted_bytes": microbatch_record.counted_bytes},
            )
        return engine, schedule, options

    def _step_log(self, total: int, display: RunDisplay, emit: Any) -> StepLog:
        options = self._resolved
        audits = AuditLog(options.output_dir, emit, display) if is_first() else None
        return StepLog(
            total=total, every=options.log_every, display=display, emit=emit, audits=audits
        )

    def _uploader(self) -> CheckpointUploader | None:
        """Create the uploader on rank 0 if `checkpoint_store` is set."""
        url = self._resolved.checkpoint_store
        if url is None:
            return None
        stores: list[CheckpointStore] = []
        # A missing client is an error on all ranks; only rank 0 uses the store.
        run_on_rank_zero(lambda: stores.append(CheckpointStore(url)))
        keep = self._resolved.keep_checkpoints
        return CheckpointUploader(stores[0], keep=keep) if stores else None

    def _background_saver(self, uploads: CheckpointUploader | None) -> BackgroundSaver | None:
        """Create the background checkpoint writer if `async_checkpoints` is set."""
        options = self._resolved
        if not options.async_checkpoints:
            return None
        return BackgroundSaver(
            options.output_dir / "checkpoints",
            options.keep_checkpoints,
            options.timeout_s,
            pinned=tuple if uploads is None else lambda: uploads.pinned,
        )


def _find_schedule(options: Options, config: Any, layout: Layout) -> SearchedSchedule | None:
    """Search for the run's pipeline schedule, or read the stored one; None unless `search` is set.

    All processes call this; it connects them.

    Raises:
        ConfigError: the stored schedule is damaged.
        ScheduleError: schedule_memory_gib is below the minimum of any schedule.
    """
    if options.schedule != SEARCH or layout.pipeline == 1:
        return None
    groups = connect(sharded_layout(layout, options.sharding), device=options.wanted_device)
    rows = options.batch_size // layout.data_ranks
    cap = memory_cap(options, layout)
    size = microbatch(options, layout) or rows
    measured_with: dict[str, Any] = {
        "mixed_precision": options.mixed_precision,
        "recompute": options.recompute,
    }
    if layout.context > 1:
        measured_with["context_attention"] = options.context_attention
        measured_with["context_balance"] = options.context_balance
    if options.sharding != "auto":
        measured_with["sharding"] = options.sharding
    conditions = conditions_of(
        config, groups, rows, options.sequence_length, size, cap, measured_with
    )
    path = options.output_dir / FILE
    stored = run_on_rank_zero(lambda: read_searched_schedule(path))
    # Reused if nothing that it depends on has changed, so a resumed run keeps its schedule.
    if stored is not None and stored.conditions == conditions:
        return stored
    result = search_schedule(
        config,
        groups,
        rows=rows,
        sequence_length=options.sequence_length,
        microbatch_size=size,
        memory_cap_bytes=cap,
        ops=operators_of(options.ops),
        **measured_with,
    )
    run_on_rank_zero(lambda: write_searched_schedule(path, result))
    return result

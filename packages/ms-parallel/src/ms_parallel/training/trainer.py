"""The face that users type: a model, a layout, a dataset, and one call that trains."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from ms_parallel.cluster import connect as launch
from ms_parallel.cluster.agreement import first_does
from ms_parallel.cluster.endings import end_scripts_plainly
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.slurm import adopt_scheduler
from ms_parallel.errors import ConfigError
from ms_parallel.events import JsonLines
from ms_parallel.files.durable import publish, write_synced, writing
from ms_parallel.planner.found_schedule import FoundSchedule
from ms_parallel.progress import RunDisplay, duration
from ms_parallel.settings.validators import MOST
from ms_parallel.training.dataset import data_package, prepare
from ms_parallel.training.fitting import build_engine, find_schedule, fit_model, microbatch
from ms_parallel.training.held_out import HeldOut
from ms_parallel.training.options import Options
from ms_parallel.training.ownership import held
from ms_parallel.training.run import Run, Stream
from ms_parallel.training.tokenizer import run_tokenizer
from ms_parallel.weights import has_weights, load_weights, save_model

MOST_EPOCHS = 10**6

__all__ = ["DistributedTrainer", "Result", "Stream"]


@frozen(kw_only=True)
class Result:
    """What a run has come to; the same on every process, but for `sample`."""

    step: int
    """Updates made, over all launches."""
    finished: bool
    """False if a signal stopped the run; the same command goes on."""
    stopped_by: str | None
    """The signal that stopped the run, SIGTERM or SIGINT (Ctrl-C); None if it finished."""
    loss: float
    """Of the last step's batch, in nats a token."""
    held_out_loss: float | None
    """At the end; None without held-out text."""
    first_held_out_loss: float | None
    """Before the first step."""
    tokens: int
    """Tokens trained on."""
    seconds: float
    """Time in steps, over all launches."""
    model_folder: Path | None
    """The trained model as a Hugging Face folder; None if not finished."""
    sample: str | None
    """What the model writes after `sample_prompt`."""


@define(eq=False, slots=False)
class DistributedTrainer(Options):
    """Pre-trains a decoder on a dataset under any layout, and goes on where it was interrupted.

    Args:
        model_arch: `llama`, `mistral`, `qwen2`, `qwen3`, or a folder with a Hugging Face
            config.json; if it has weights too, training starts from them.
        parallel_config: axes such as `{"tensor_parallel": 2}`, or a Layout; None puts all
            processes on `data`.
        optimizer: `AdamW`.
        mixed_precision: compute in bfloat16; weights, moments and sums stay float32.

    All other settings are keywords: see `Options`. Nothing starts before `train`.

    Raises:
        ConfigError: a setting is of the wrong kind or out of range.
        LayoutError: the layout is not one.
    """

    _run: Run | None = field(default=None, init=False, repr=False)
    _shards: Path = field(default=Path(), init=False, repr=False)

    def __attrs_pre_init__(self) -> None:
        end_scripts_plainly()

    def train(
        self, dataset_path: str | Path, epochs: float | None = None, steps: int | None = None
    ) -> Result:
        """Train to the end, or to SIGTERM, from the last complete checkpoint of `output_dir`.

        Args:
            dataset_path: a folder of shards; or raw text, which is built into shards first.
            epochs: passes over the training text; batches straddle epochs without a seam.
            steps: updates, instead of epochs.

        Returns:
            What the run came to.

        Raises:
            ConfigError: not exactly one of epochs and steps; or sizes that do not fit.
            LaunchError: the layout needs processes that were not started.
            LayoutError: the layout does not fit the processes or the model.
            CheckpointError: the checkpoints are of another model, or cannot be written.
            FolderError: another process works in output_dir, or it belongs to another run.
            ms_data.DataError: the dataset cannot be used.
        """
        _check_length(epochs, steps)
        adopt_scheduler()
        layout = self.layout
        launch.join(layout, timeout_s=self.timeout_s)
        fit_model(self, layout, None)  # what can be told now should not wait for the shards
        with (
            held(self, dataset_path, epochs=epochs, steps=steps) as changes,
            self._events() as emit,
        ):
            self._shards = first_does(lambda: prepare(dataset_path, self))
            run = self._assemble(layout, epochs, steps, emit)
            try:
                run.tell_changes(changes)
                return self._perform(run)
            finally:
                run.show.close()

    @property
    def layout(self) -> Layout:
        """The layout asked for, or all processes on the data axis."""
        return self.parallel_config or Layout(data=launch.world_size())

    def evaluate(self) -> float | None:
        """The held-out loss of the model as it is; None without held-out text.

        Raises:
            ConfigError: nothing has been trained yet.
        """
        return self._trained().evaluate()

    def generate(
        self, prompt: str, *, max_new_tokens: int = 96, temperature: float = 0.8, top_k: int = 50
    ) -> str:
        """What the model writes after a text; every process must call it.

        Raises:
            ConfigError: nothing has been trained yet.
        """
        run = self._trained()
        tokenizer = data_package().Tokenizer.load(self._shards / "tokenizer.json")
        tokens = tokenizer.encode(prompt) or [tokenizer.end_of_text]
        (written,) = run.engine.generate(
            [tokens],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=self.seed,
            stop_token=tokenizer.end_of_text,
        )
        text: str = tokenizer.decode([t for t in written if t < tokenizer.vocabulary_size])
        return text

    def _trained(self) -> Run:
        if self._run is None:
            raise ConfigError("nothing has been trained yet; call train first")
        return self._run

    @contextmanager
    def _events(self) -> Iterator[Any]:
        """Rank 0's callable, and one that does nothing elsewhere."""
        if not launch.is_first():
            yield lambda kind, fields: None
        elif self.on_event is not None:
            yield self.on_event
        else:
            lines = JsonLines(self.output_dir / "events.jsonl")
            try:
                yield lines
            finally:
                lines.close()

    def _assemble(self, layout: Layout, epochs: float | None, steps: int | None, emit: Any) -> Run:
        data = data_package()
        config = fit_model(self, layout, self._shards)
        place = layout.place(launch.rank())
        stream = data.TokenStream(
            self._shards,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            seed=self.seed,
            place=place,
        )
        total = steps or round((epochs or 0) * stream.samples_per_epoch) // self.batch_size
        if not total:
            raise ConfigError(
                f"{epochs} epochs of {stream.samples_per_epoch} samples of {self.sequence_length}"
                f" tokens do not fill one batch of {self.batch_size}; lower batch_size or"
                " sequence_length, or give more epochs"
            )
        found = find_schedule(self, config, layout)
        engine = build_engine(self, config, layout, total, found)
        if (folder := self.model_folder) and has_weights(folder):
            for stage in engine.stages.values():
                load_weights(stage, folder)
        rows = layout.data * (microbatch(self, layout) or 1)
        return Run(
            engine=engine,
            stream=stream,
            held_out=HeldOut.find(self._shards, self, place, rows),
            total=total,
            options=self,
            found=found,
            show=RunDisplay(
                total=total, every=self.log_every, active=self.progress and launch.is_first()
            ),
            emit=emit,
        )

    def _perform(self, run: Run) -> Result:
        count = sum(parameter.numel() for parameter in run.engine.parameters.values())
        run.emit(
            "begin", {"steps": run.total, "layout": str(self.layout), "local_parameters": count}
        )
        if run.found is not None:
            _tell_schedule(run, run.found)
        run.resume()
        resumed = run.engine.step
        self._run = run
        finished = run.go()
        standing = run.standing
        folder = self._export(run) if finished else None
        sample = None
        if finished and self.sample_prompt is not None:
            sample = self.generate(self.sample_prompt, max_new_tokens=self.sample_tokens)
            run.show.note(f"sample:\n{_printable(self.sample_prompt + sample)}")
        if not finished:
            run.show.note(
                f"stopped by {run.stop.signal_name} at step {run.engine.step} of"
                f" {run.total}; a checkpoint is saved, the same command goes on"
            )
        elif resumed == run.engine.step:
            run.show.note(f"already trained to step {resumed}; nothing left to do")
        else:
            run.show.note(
                f"trained {run.engine.step} steps in {duration(standing.seconds)}: {folder}"
            )
        run.emit("end", {"step": run.engine.step, "finished": int(finished)})
        return Result(
            step=run.engine.step,
            finished=finished,
            stopped_by=None if finished else run.stop.signal_name,
            loss=standing.loss,
            held_out_loss=standing.held_out_loss,
            first_held_out_loss=standing.first_held_out_loss,
            tokens=standing.tokens,
            seconds=standing.seconds,
            model_folder=folder,
            sample=sample,
        )

    def _export(self, run: Run) -> Path:
        """The model as a Hugging Face folder with its tokenizer; whole or not at all."""
        folder = self.output_dir / "model"
        made = folder / "training.json"
        if first_does(lambda: made.is_file() and made.read_bytes() == run.mark()):
            return folder
        aside = folder.with_name("model.partial")
        first_does(lambda: shutil.rmtree(aside, ignore_errors=True))
        tokenizer = run_tokenizer(self._shards, self.model_folder)
        save_model(list(run.engine.stages.values()), aside, tokenizer=tokenizer)
        first_does(lambda: self._publish(aside, folder, run.mark()))
        return folder

    def _publish(self, aside: Path, folder: Path, mark: bytes) -> None:
        with writing(folder):
            write_synced(aside / "training.json", mark)
            shutil.rmtree(folder, ignore_errors=True)
            publish(aside, folder)


def _check_length(epochs: float | None, steps: int | None) -> None:
    if (epochs is None) == (steps is None):
        both = "both" if steps is not None else "neither"
        raise ConfigError(f"{both} of epochs and steps given; give one of them")
    whole = isinstance(steps, int) and not isinstance(steps, bool)
    if steps is not None and not (whole and 1 <= steps <= MOST):
        raise ConfigError(f"steps is {steps!r}; give a whole number of at least 1, at most {MOST}")
    number = isinstance(epochs, int | float) and not isinstance(epochs, bool)
    if epochs is not None and not (number and 0 < epochs <= MOST_EPOCHS):
        raise ConfigError(f"epochs is {epochs!r}; give a number above 0, up to {MOST_EPOCHS}")


def _tell_schedule(run: Run, found: FoundSchedule) -> None:
    run.emit(
        "schedule",
        {
            "makespan_ms": found.makespan_ms,
            "lower_bound_ms": found.lower_bound_ms,
            "one_f_one_b_ms": found.one_f_one_b_ms,
            "placement": str(found.staged.schedule.placement),
            "layers": str(found.layers),
        },
    )
    run.show.note(
        f"schedule found: a step of {found.makespan_ms:.3g} ms by measured costs, 1F1B"
        f" {found.one_f_one_b_ms:.3g} ms; layers of the stages {found.layers}"
    )


def _printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )

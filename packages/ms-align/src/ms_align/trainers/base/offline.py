"""Training on a fixed dataset: trainer and learner shared by SFT, DPO and reward models."""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from attrs import evolve, field, frozen

from ms_align.engines.protocol import Engine, StepReport
from ms_align.errors import ConfigError, NothingToLearnError
from ms_align.generation.sampling import Sampling
from ms_align.losses.protocol import Loss
from ms_align.run.checkpoint import State
from ms_align.run.initial_weights import model_name
from ms_align.run.loop import Notice, Result, RunLog
from ms_align.run.options import check_length
from ms_align.run.samples import SamplePrompts
from ms_align.settings import integer, valid_path
from ms_align.streams.folders import (
    first_batches,
    folders_of,
    have_media,
    held_out_prompts,
    without_held_out,
)
from ms_align.streams.protocol import HeldOut, Stream, check_fit, check_tokenizers, next_batch
from ms_align.streams.text_ends import OBSERVED_BATCHES, TextEnds, dataset_tokenizer
from ms_align.tokenizer_files import (
    TokenizerFiles,
    check_same_tokenizer,
    files_of,
    merge_tokenizers,
)
from ms_align.trainers.base.trainer import Trainer


@frozen(kw_only=True)
class TrainingData:
    """Training stream, held-out data and sample prompts of a run."""

    stream: Stream
    name: str = ""
    """Dataset folders; empty for a stream passed by the caller."""
    steps: int | None = None
    """Updates in `epochs` passes, if known."""
    held_out: HeldOut | None = None
    samples: SamplePrompts | None = None
    held_out_left_out: int = 0
    """Held-out pairs or responses that evaluations skip because an answer starts past the row's
    end."""
    folders_without_held_out: Sequence[str] = ()
    """Folders without a `held_out` split."""


def data_notices(data: TrainingData, eval_every: int | None) -> list[Notice]:
    """Build the notices about missing held-out data and shortened samples."""
    notices = []
    # Streams of pairs and of single responses count what does not fit; others have no such counts.
    pairs: int = getattr(data.stream, "pairs_per_epoch", 0)
    noun, reason = (
        ("pairs", "one of their answers starts") if pairs else ("responses", "they start")
    )
    if eval_every is not None and data.held_out is None:
        source = (
            f"{', '.join(data.folders_without_held_out)} has"
            if data.folders_without_held_out
            else "the stream comes with"
        )
        notices.append(
            Notice(
                event="no_held_out",
                fields={
                    "eval_every": eval_every,
                    "lacking": ", ".join(data.folders_without_held_out),
                },
                line=f"warning: nothing is evaluated, as {source} no held-out samples; rebuild the "
                "data with a larger --held-out-fraction, or remove eval_every",
            )
        )
    if data.held_out_left_out:
        notices.append(
            Notice(
                event="held_out_left_out",
                fields={"left_out": data.held_out_left_out},
                line=f"warning: {data.held_out_left_out} held-out {noun} are skipped in "
                f"evaluations, as {reason} beyond sequence_length; raise it",
            )
        )
    left_out = getattr(data.stream, "left_out", 0)
    cut_off = getattr(data.stream, "cut_off", 0)
    if left_out or cut_off:
        count = left_out + (pairs or getattr(data.stream, "responses_per_epoch", 0))
        notices.append(
            Notice(
                event="left_out",
                fields={"left_out": left_out, "cut_off": cut_off, noun: count},
                line=f"warning: of {count} {noun}, {left_out} are skipped, as {reason} beyond "
                f"sequence_length, and {cut_off} are truncated to it; raise it to train on them",
            )
        )
    return notices


@frozen(kw_only=True, slots=False)
class OfflineTrainer(Trainer):
    """Data and length of training."""

    model: Any = field(validator=valid_path(objects=True))
    """Base model: a folder; in Python also a torch.nn.Module or an Engine."""
    tokenizer: Any = field(default=None, validator=valid_path(optional=True, objects=True))
    """Tokenizer to save with the trained model: a folder or a tokenizer. Default: the tokenizer of
    the data."""
    sequence_length: int | None = field(default=None, validator=integer(minimum=2, optional=True))
    """Maximum row length in tokens; required when the dataset is a folder."""
    batch_size: int = field(default=8, validator=integer())
    """Rows, or pairs, per update over all processes."""
    steps: int | None = field(default=None, validator=integer(optional=True))
    """Total updates; alternative to epochs."""
    epochs: int | None = field(default=None, validator=integer(optional=True))
    """Passes over the data; alternative to steps."""
    eval_samples: int = field(default=3, validator=integer(minimum=0))
    """Held-out prompts whose responses are shown at each evaluation."""
    eval_batches: int | None = field(default=None, validator=integer(optional=True))
    """Batches per evaluation. Default: the entire `held_out` split."""

    def __attrs_post_init__(self) -> None:
        check_length(self.steps, self.epochs)
        self.check_used()

    def train(
        self,
        dataset: str | Path | Mapping[str, str | Path] | Stream,
        *,
        held_out: HeldOut | None = None,
        samples: SamplePrompts | None = None,
    ) -> Result:
        """Train on a dataset until the end or SIGTERM; resume if there is a checkpoint.

        Args:
            dataset: a folder written by `ms-data build --chat-template`, for `sft` also a table of
                several; or a stream of batches, such as `ms_data.InstructionStream`.
            held_out: with a stream: function that returns an iterator over held-out batches.
            samples: with a stream: prompts whose responses are shown at each evaluation.

        Returns:
            Result of the run. The trained model and its tokenizer are in `output_dir/model`,
            adapters in `output_dir/adapter`.

        Raises:
            ConfigError: a setting is invalid or does not match the data.
            ModelError: tokenizer and model do not match, or rows exceed the context length.
            NothingToLearnError: a batch has no target tokens.
            NonFiniteError: a weight is infinite or NaN.
            FolderError: `output_dir` belongs to another run.
        """
        folders = None if isinstance(dataset, Stream) else folders_of(dataset)
        if folders is not None and self.sequence_length is None:
            raise ConfigError("sequence_length is required for a dataset folder; set it")
        engine = self.engine()
        if isinstance(dataset, Stream):
            data = TrainingData(stream=dataset, held_out=held_out, samples=samples)
        else:
            data = self._from_folders(folders, engine)
        # A dataset folder has converted `epochs` to a number of steps.
        steps = self.steps or data.steps
        if steps is None:
            raise ConfigError("epochs need a dataset folder to count steps; set steps for a stream")
        check_fit(engine, data.stream, "training data")
        tokenizer = self._tokenizer(data.stream)
        learner = self.learner(engine, data, TextEnds.of(tokenizer))
        learner.stops = tokenizer.ends if tokenizer else ()
        identity = {"model": model_name(self.model), **learner.identity}
        if data.name:
            identity["dataset"] = data.name
        return self.run(
            learner,
            engine,
            steps=steps,
            identity=identity,
            tokenizer=lambda: tokenizer and tokenizer.with_ends(learner.ends.tokens),
            notices=data_notices(data, self.eval_every),
        )

    def engine(self) -> Engine:
        """Build the engine that trains the model."""
        return self.start_engine(self.model, adapted=True)

    @abstractmethod
    def learner(self, engine: Engine, data: TrainingData, ends: TextEnds) -> "OfflineLearner":
        """Build the learner."""

    @abstractmethod
    def stream(self, dataset: Any, engine: Engine, **settings: Any) -> Any:
        """Open the stream of a dataset's folders."""

    @abstractmethod
    def count_steps(self, dataset: Any, engine: Engine) -> int:
        """Count the updates in `epochs` passes over the dataset folders."""

    def _tokenizer(self, stream: Stream) -> TokenizerFiles | None:
        """Return the tokenizer to save with the trained model; check that it matches the data.

        Raises:
            ModelError: the data or `tokenizer` does not match the tokenizer of the model's folder.
        """
        base = self.base_folder
        model_files = None if base is None else files_of(base)
        setting_files = None if self.tokenizer is None else files_of(self.tokenizer)
        name = f"the model {base}"
        check_same_tokenizer(
            model_files, name, setting_files, "`tokenizer`", remedy="remove `tokenizer`"
        )
        check_tokenizers(
            model_files or setting_files, name if model_files else "`tokenizer`", stream
        )
        return merge_tokenizers(model_files, setting_files or dataset_tokenizer(None, stream))

    def _from_folders(self, folders: Any, engine: Engine) -> TrainingData:
        data = TrainingData(
            stream=self.stream(folders, engine),
            name=folders
            if isinstance(folders, str)
            else ", ".join(f"{name}={folder}" for name, folder in folders.items()),
            steps=None if self.steps else self.count_steps(folders, engine),
        )
        data = evolve(data, folders_without_held_out=without_held_out(folders))
        if data.folders_without_held_out:
            return data
        # The same rows in the same order at every evaluation.
        split = {"split": "held_out", "shuffle": False, "epochs": 1}
        return evolve(
            data,
            held_out_left_out=getattr(self.stream(folders, engine, **split), "left_out", 0),
            # A new stream for every evaluation.
            held_out=lambda: first_batches(
                self.stream(folders, engine, **split), self.eval_batches
            ),
            samples=self._samples(folders),
        )

    def _samples(self, folders: Any) -> SamplePrompts | None:
        # Responses are generated from text alone.
        if not self.eval_samples or have_media(folders):
            return None
        prompts, tokenizer = held_out_prompts(folders, self.eval_samples)
        # Half of the row for the prompt, so that the response fits as well.
        longest = max(1, (self.sequence_length or 0) // 2)
        return SamplePrompts(
            prompts=[prompt[-longest:] for prompt in prompts],
            decode=tokenizer.decode,
            sampling=Sampling(max_new_tokens=min(48, longest), temperature=0.0),
        )


class OfflineLearner(ABC):
    """Learns from a stream of batches; subclasses define the loss and the metrics."""

    no_targets: ClassVar[str]
    """Error message for a batch without targets; `{step}` is the number of the update."""

    def __init__(self, engine: Engine, data: TrainingData, ends: TextEnds) -> None:
        self.engine = engine
        self.data = data
        self.ends = ends
        self.step = 0
        self.identity: Mapping[str, str] = {}
        """Entries of the run's identity, in addition to model and dataset."""
        self.stops: Sequence[int] = ()
        """End-of-text tokens of the tokenizer's files."""
        self._logged_counts: dict[str, int] = {}
        """Sample counts of the last warning."""
        self._ends_logged = False

    @abstractmethod
    def loss(self) -> Loss:
        """Return the loss of the next update."""

    @abstractmethod
    def held_out_metrics(self, held_out: HeldOut) -> Mapping[str, float]:
        """Compute metrics on the held-out batches."""

    def next_batch(self) -> Mapping[str, Any]:
        """Read the next batch, with all columns that the loss reads."""
        return next_batch(self.data.stream)

    def observe(self, update: StepReport, log: RunLog) -> Mapping[str, float]:
        """Process the statistics of an update and return those to log."""
        return update.statistics

    def extra_state(self) -> dict[str, Any]:
        """Return additional state as JSON values."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - optional hook
        """Restore additional state."""

    def update(self, log: RunLog) -> tuple[StepReport, Mapping[str, float]]:
        """Read a batch and update the weights once."""
        batch = self.next_batch()
        self.ends.observe(batch)
        update = self.engine.step(batch, self.loss())
        if update.skipped == "no_targets":
            raise NothingToLearnError(self.no_targets.format(step=self.step + 1))
        self.step += 1
        if self.step == 1:
            self._log_counts(log)
        if self.ends.batches >= OBSERVED_BATCHES:
            self._log_ends(log)
        return update, self.observe(update, log)

    def evaluate(self, log: RunLog) -> Mapping[str, float]:
        """Log data counts and sample responses, and return held-out metrics."""
        if self.step:
            self._log_counts(log)
            self._log_ends(log)
        if self.data.samples is not None:
            # Before the first update only held-out data can show the end tokens.
            if self.data.held_out is not None and not self.ends.tokens:
                for batch in itertools.islice(self.data.held_out(), 1):
                    self.ends.observe(batch)
            self.data.samples.log(self.engine, log, ends={*self.stops, *self.ends.tokens})
        return {} if self.data.held_out is None else self.held_out_metrics(self.data.held_out)

    def _log_counts(self, log: RunLog) -> None:
        """Log the stream's sample counts and warn about samples that were cut."""
        sources: Mapping[str, Mapping[str, int]] = getattr(self.data.stream, "counts", {})
        counts = {
            name if len(sources) == 1 else f"{name}.{source}": count
            for source, source_counts in sources.items()
            for name, count in source_counts.items()
        }
        if not counts:
            return
        log.event("data", {"step": self.step, **counts})
        sums: Counter[str] = Counter()
        for source_counts in sources.values():
            sums.update(source_counts)
        lost = {name: sums[name] for name in ("without_targets", "truncated") if sums[name]}
        # Warn again only when the counts have changed.
        if lost != self._logged_counts and lost:
            self._logged_counts = lost
            log.note(
                f"warning: of {sums['drawn']} samples so far, {sums['truncated']} were truncated "
                f"to sequence_length and {sums['without_targets']} parts have no answer tokens "
                "left; raise sequence_length, or set long = 'split'"
            )

    def _log_ends(self, log: RunLog) -> None:
        """Log once how many answers end with an end-of-text token, and warn if none does."""
        if self._ends_logged or not self.ends.texts:
            return
        self._ends_logged = True
        ends = self.ends
        log.event("text_ends", {"texts": ends.texts, "ended": ends.ended})
        if not ends.ended:
            log.note(
                f"warning: none of the first {ends.texts} answers ends with a special token of the "
                "tokenizer, so the trained model will not learn to stop; put the end-of-turn token "
                "inside {% generation %} in the chat template"
            )

    def state(self) -> State:
        """Return engine state, stream position and counters."""
        facts = {
            "step": self.step,
            "stream": self.data.stream.state_dict(),
            "ends": sorted(self.ends.tokens),
            **self.extra_state(),
        }
        return State(tensors=self.engine.state_dict(), facts=facts)

    def load(self, state: State) -> None:
        """Restore a state."""
        self.engine.load_state_dict(state.tensors)
        self.step = int(state.facts["step"])
        self.ends.tokens |= set(state.facts["ends"])
        self.data.stream.load_state_dict(state.facts["stream"])
        self.load_extra_state(state.facts)

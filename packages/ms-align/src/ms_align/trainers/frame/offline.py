"""What trainers share that learn from a dataset which is there before the run."""

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
from ms_align.run.initial_weights import name_of
from ms_align.run.loop import Notice, Result, RunLog
from ms_align.run.options import check_length
from ms_align.run.samples import SamplePrompts
from ms_align.settings import a_path, whole
from ms_align.streams.folders import (
    first_batches,
    folders_of,
    held_out_prompts,
    without_held_out,
)
from ms_align.streams.protocol import HeldOut, Stream, check_fit, check_tokenizers, next_batch
from ms_align.streams.text_ends import LOOKED_AT, TextEnds, tokenizer_beside
from ms_align.tokenizer_files import TokenizerFiles, carried, check_same_tokenizer, files_of
from ms_align.trainers.frame.trainer import Trainer


@frozen(kw_only=True)
class TrainingData:
    """What a run learns from."""

    stream: Stream
    name: str = ""
    """The folders; empty for a stream of the caller's."""
    steps: int | None = None
    """Updates in `epochs` passes, where that is known."""
    held_out: HeldOut | None = None
    samples: SamplePrompts | None = None
    held_out_left_out: int = 0
    """Held-out pairs that no evaluation uses, as an answer does not begin within a row."""
    lacking: Sequence[str] = ()
    """Folders that have no split of held-out samples."""


def data_notices(data: TrainingData, evaluate_every: int | None) -> list[Notice]:
    """Collect what a user should know of the data before a run begins."""
    notices = []
    if evaluate_every is not None and data.held_out is None:
        whose = f"{', '.join(data.lacking)} has" if data.lacking else "the stream comes with"
        notices.append(
            Notice(
                kind="no_held_out",
                fields={"evaluate_every": evaluate_every, "lacking": ", ".join(data.lacking)},
                line=f"warning: nothing is evaluated, as {whose} no held-out samples; build the "
                "data with a larger --hold-out, or leave evaluate_every out",
            )
        )
    if data.held_out_left_out:
        notices.append(
            Notice(
                kind="held_out_left_out",
                fields={"left_out": data.held_out_left_out},
                line=f"warning: {data.held_out_left_out} held-out pairs are left out of evaluations"
                ", as one of their answers does not begin within sequence_length; raise it",
            )
        )
    left_out = getattr(data.stream, "left_out", 0)
    cut_off = getattr(data.stream, "cut_off", 0)
    if left_out or cut_off:
        pairs = left_out + getattr(data.stream, "pairs_per_epoch", 0)
        notices.append(
            Notice(
                kind="left_out",
                fields={"left_out": left_out, "cut_off": cut_off, "pairs": pairs},
                line=f"warning: of {pairs} pairs, {left_out} are left out, as one of their answers "
                f"does not begin within sequence_length, and {cut_off} are cut off at it; raise it "
                "to train on them",
            )
        )
    return notices


@frozen(kw_only=True, slots=False)
class OfflineTrainer(Trainer):
    """What is learnt from, and how long."""

    model: Any = field(validator=a_path(objects=True))
    """Folder of the model to begin with; in Python also a torch.nn.Module or an Engine."""
    tokenizer: Any = field(default=None, validator=a_path(optional=True, objects=True))
    """What is put beside the trained model, a folder or a tokenizer; by default what lies beside
    the data."""
    sequence_length: int | None = field(default=None, validator=whole(least=2, optional=True))
    """Tokens in a row at most; must be given where a folder is read."""
    batch_size: int = field(default=8, validator=whole())
    """Rows of an update, or pairs, over all processes."""
    steps: int | None = field(default=None, validator=whole(optional=True))
    """Updates of the whole run; or give epochs."""
    epochs: int | None = field(default=None, validator=whole(optional=True))
    """Passes over the data; or give steps."""
    evaluate_samples: int = field(default=3, validator=whole(least=0))
    """Held-out prompts whose answers are shown at each evaluation."""
    held_out_batches: int | None = field(default=None, validator=whole(optional=True))
    """Batches of an evaluation; all of the split `held_out` by default."""

    def __attrs_post_init__(self) -> None:
        check_length(self.steps, self.epochs)

    def train(
        self,
        dataset: str | Path | Mapping[str, str | Path] | Stream,
        *,
        held_out: HeldOut | None = None,
        samples: SamplePrompts | None = None,
    ) -> Result:
        """Learn from a dataset, to the end or to SIGTERM, going on where it stopped.

        Args:
            dataset: the folder that `ms-data build --chat-template` wrote, for `sft` also a table
                of several; or a stream of batches, such as `ms_data.InstructionStream`.
            held_out: for a stream: makes an iterator of held-out batches.
            samples: for a stream: prompts whose answers are shown at each evaluation.

        Returns:
            What the run came to. The trained model lies in `output_dir/model`, its tokenizer
            beside it; adapters lie in `output_dir/adapter`.

        Raises:
            ConfigError: a setting cannot be used as given, or does not fit the data.
            ModelError: tokenizer and model disagree, or rows are longer than the context.
            NothingToLearnError: a batch has no target.
            NonFiniteError: a weight is infinite or no number.
            FolderError: `output_dir` is another run's.
        """
        folders = None if isinstance(dataset, Stream) else folders_of(dataset)
        if folders is not None and self.sequence_length is None:
            raise ConfigError("sequence_length is missing; add it")
        engine = self.engine()
        if isinstance(dataset, Stream):
            data = TrainingData(stream=dataset, held_out=held_out, samples=samples)
        else:
            data = self._from_folders(folders, engine)
        steps = self.steps or data.steps
        if steps is None:
            raise ConfigError("epochs are counted in folders; give steps where data is a stream")
        check_fit(engine, data.stream, "training data")
        tokenizer = self._tokenizer(data.stream)
        learner = self.learner(engine, data, TextEnds.of(tokenizer))
        learner.stops = tokenizer.ends if tokenizer else ()
        identity = {"model": name_of(self.model), **learner.identity}
        if data.name:
            identity["dataset"] = data.name
        return self.run(
            learner,
            engine,
            steps=steps,
            identity=identity,
            tokenizer=lambda: tokenizer and tokenizer.ending(learner.ends.found),
            notices=data_notices(data, self.evaluate_every),
        )

    def engine(self) -> Engine:
        """Build the engine of the model, ready to learn."""
        return self.start_engine(self.model, adapted=True)

    @abstractmethod
    def learner(self, engine: Engine, data: TrainingData, ends: TextEnds) -> "OfflineLearner":
        """Build what learns from the data."""

    @abstractmethod
    def stream(self, dataset: Any, engine: Engine, **settings: Any) -> Any:
        """Open the stream of a dataset's folders."""

    @abstractmethod
    def count_steps(self, dataset: Any, engine: Engine) -> int:
        """Count the updates in `epochs` passes over a dataset's folders."""

    def _tokenizer(self, stream: Stream) -> TokenizerFiles | None:
        """Return what is put beside the trained model, once data and model are known to agree.

        Raises:
            ModelError: the data, or `tokenizer`, has another tokenizer than the model's folder.
        """
        base = self.base_folder
        own = None if base is None else files_of(base)
        given = None if self.tokenizer is None else files_of(self.tokenizer)
        name = f"the model {base}"
        check_same_tokenizer(own, name, given, "`tokenizer`", remedy="leave `tokenizer` out")
        check_tokenizers(own or given, name if own else "`tokenizer`", stream)
        return carried(own, given or tokenizer_beside(None, stream))

    def _from_folders(self, folders: Any, engine: Engine) -> TrainingData:
        data = TrainingData(
            stream=self.stream(folders, engine),
            name=folders
            if isinstance(folders, str)
            else ", ".join(f"{name}={folder}" for name, folder in folders.items()),
            steps=None if self.steps else self.count_steps(folders, engine),
        )
        data = evolve(data, lacking=without_held_out(folders))
        if data.lacking:
            return data
        split = {"split": "held_out", "shuffle": False, "epochs": 1}
        return evolve(
            data,
            held_out_left_out=getattr(self.stream(folders, engine, **split), "left_out", 0),
            held_out=lambda: first_batches(
                self.stream(folders, engine, **split), self.held_out_batches
            ),
            samples=self._samples(folders),
        )

    def _samples(self, folders: Any) -> SamplePrompts | None:
        if not self.evaluate_samples:
            return None
        prompts, tokenizer = held_out_prompts(folders, self.evaluate_samples)
        longest = max(1, (self.sequence_length or 0) // 2)
        return SamplePrompts(
            prompts=[prompt[-longest:] for prompt in prompts],
            decode=tokenizer.decode,
            sampling=Sampling(max_new_tokens=min(48, longest), temperature=0.0),
        )


class OfflineLearner(ABC):
    """Learns from a stream; a trainer's learner says how."""

    no_targets: ClassVar[str]
    """What is wrong with a batch without a target, and the remedy; `{step}` is the update."""

    def __init__(self, engine: Engine, data: TrainingData, ends: TextEnds) -> None:
        self.engine = engine
        self.data = data
        self.ends = ends
        self.step = 0
        self.identity: Mapping[str, str] = {}
        """What else makes another run."""
        self.stops: Sequence[int] = ()
        """Tokens that end a text by the tokenizer's files."""
        self._told: dict[str, int] = {}
        """Counts of the stream that were shown last."""
        self._ends_told = False

    @abstractmethod
    def loss(self) -> Loss:
        """Return the loss of the next update."""

    @abstractmethod
    def held_out_metrics(self, held_out: HeldOut) -> Mapping[str, float]:
        """Compute metrics of the held-out batches."""

    def next_batch(self) -> Mapping[str, Any]:
        """Take the next batch, with all that the loss reads."""
        return next_batch(self.data.stream)

    def observe(self, update: StepReport, log: RunLog) -> Mapping[str, float]:
        """Learn from an update's statistics, and return what of them is logged."""
        return update.statistics

    def extra_state(self) -> dict[str, Any]:
        """Return further state, as JSON values."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most have none
        """Go to where `state` was taken."""

    def update(self, log: RunLog) -> tuple[StepReport, Mapping[str, float]]:
        """Update the weights once."""
        batch = self.next_batch()
        self.ends.look(batch)
        update = self.engine.step(batch, self.loss())
        if update.skipped == "no_targets":
            raise NothingToLearnError(self.no_targets.format(step=self.step + 1))
        self.step += 1
        if self.step == 1:
            self._tell_counts(log)
        if self.ends.looked_at >= LOOKED_AT:
            self._tell_ends(log)
        return update, self.observe(update, log)

    def evaluate(self, log: RunLog) -> Mapping[str, float]:
        """Log counts of the data and samples, and compute held-out metrics."""
        if self.step:
            self._tell_counts(log)
            self._tell_ends(log)
        if self.data.samples is not None:
            if self.data.held_out is not None and not self.ends.found:
                for batch in itertools.islice(self.data.held_out(), 1):
                    self.ends.look(batch)
            self.data.samples.log(self.engine, log, ends={*self.stops, *self.ends.found})
        return {} if self.data.held_out is None else self.held_out_metrics(self.data.held_out)

    def _tell_counts(self, log: RunLog) -> None:
        """Log the stream's counts of samples, and warn of those that teach nothing."""
        sources: Mapping[str, Mapping[str, int]] = getattr(self.data.stream, "counts", {})
        counts = {
            name if len(sources) == 1 else f"{name}.{source}": count
            for source, found in sources.items()
            for name, count in found.items()
        }
        if not counts:
            return
        log.event("data", {"step": self.step, **counts})
        sums: Counter[str] = Counter()
        for found in sources.values():
            sums.update(found)
        lost = {name: sums[name] for name in ("without_targets", "truncated") if sums[name]}
        if lost != self._told and lost:
            self._told = lost
            log.note(
                f"warning: of {sums['drawn']} samples drawn so far, {sums['truncated']} were cut "
                f"at sequence_length and {sums['without_targets']} parts teach nothing, as no "
                "token of an answer is left; raise sequence_length, or set long = 'split'"
            )

    def _tell_ends(self, log: RunLog) -> None:
        """Log once how many answers end with a token that ends a text, and warn if none does."""
        if self._ends_told or not self.ends.texts:
            return
        self._ends_told = True
        ends = self.ends
        log.event("text_ends", {"texts": ends.texts, "ended": ends.ended})
        if not ends.ended:
            log.note(
                f"warning: none of the first {ends.texts} answers ends with a special token of the "
                "tokenizer, so the trained model will not stop by itself; let the chat template "
                "write the end of a turn within the answer ({% generation %})"
            )

    def state(self) -> State:
        """Return weights, moments and the stream's place."""
        facts = {
            "step": self.step,
            "stream": self.data.stream.state_dict(),
            "ends": sorted(self.ends.found),
            **self.extra_state(),
        }
        return State(tensors=self.engine.state_dict(), facts=facts)

    def load(self, state: State) -> None:
        """Go to where `state` was taken."""
        self.engine.load_state_dict(state.tensors)
        self.step = int(state.facts["step"])
        self.ends.found |= set(state.facts["ends"])
        self.data.stream.load_state_dict(state.facts["stream"])
        self.load_extra_state(state.facts)

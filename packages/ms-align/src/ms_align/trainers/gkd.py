"""GKD: distillation of a teacher on the student's own responses."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from ms_align.engines.generator import generator_of
from ms_align.engines.layout import check_layout
from ms_align.engines.protocol import Engine, StepReport
from ms_align.errors import ConfigError, ModelError, NothingToLearnError
from ms_align.generation.responses import Generator
from ms_align.generation.sampling import Sampling
from ms_align.losses.distillation import GKDOptions
from ms_align.losses.gkd import GKDLoss
from ms_align.losses.protocol import IGNORED, Batch, Output
from ms_align.losses.sft import token_weights
from ms_align.models.folder import folder_of
from ms_align.rollouts.rows import sequences
from ms_align.run.initial_weights import weights_checksum
from ms_align.run.loop import RunLog
from ms_align.seeds import seed_of
from ms_align.settings import valid_path
from ms_align.streams.folders import instructions
from ms_align.streams.protocol import HeldOut, next_batch
from ms_align.streams.text_ends import TextEnds
from ms_align.tokenizer_files import check_same_tokenizer, files_of
from ms_align.trainers.base.offline import OfflineLearner, OfflineTrainer, TrainingData

SEED_STRIDE = 1 << 40
"""Distance between the seeds of consecutive run seeds; one seed per update."""


def _check_teacher_layout(instance: object, attribute: object, value: Any) -> None:
    check_layout(value)


@frozen(kw_only=True, slots=False)
class GKDTrainer(GKDOptions, OfflineTrainer):
    """Distill a teacher into a student on the student's own responses.

    `GKDTrainer(model=student, teacher_model="folder", steps=100).train(dataset)` with the
    conversations of `sft`: the student responds to their prompts.

    Raises:
        ConfigError: a setting has the wrong type or is out of range.
    """

    algorithm = "gkd"

    teacher_model: Any = field(validator=valid_path(objects=True, multiple=True))
    """Teacher: a folder, or a table of several by name; in Python also modules or Engines. It must
    have the tokenizer of the student."""
    teacher_layout: Any = field(default=None, validator=_check_teacher_layout)
    """Ranks of the teacher per ms-parallel axis; the data ranks must equal those of `layout`.
    Default: `layout`."""

    def learner(self, engine: Engine, data: TrainingData, ends: TextEnds) -> "GKDLearner":
        """Build the learner.

        Raises:
            ModelError: teacher and student have different tokenizers.
            ConfigError: the rows of generated responses do not fit the student's context, or the
                layouts have different data ranks.
        """
        models = self.teacher_model
        teachers = {
            name: self._teacher(model, engine, data)
            for name, model in (models if isinstance(models, Mapping) else {"": models}).items()
        }
        weights = self._teacher_weights(list(teachers))
        # By source, the teacher of each; with weights, all of them.
        of_task = None if weights else self._teacher_of_task(list(teachers), data.stream)
        return GKDLearner(
            engine,
            data,
            ends,
            self.subset(GKDOptions),
            teachers,
            weights=weights or (1.0,),
            of_task=of_task,
            seed=self.seed,
        )

    def _teacher_weights(self, names: Sequence[str]) -> tuple[float, ...]:
        """Return the weight of each teacher; empty if each teaches its own dataset."""
        if not isinstance(self.teacher_model, Mapping):
            if self.teacher_weights is not None:
                raise ConfigError(
                    "teacher_weights needs several teachers, and teacher_model is one; write it as "
                    "a table of names and folders, or remove teacher_weights"
                )
            return (1.0,)
        if not names:
            raise ConfigError("teacher_model is an empty table; add a teacher")
        if self.seq_kd:
            raise ConfigError(
                "seq_kd needs one teacher, and teacher_model is a table; remove one of them"
            )
        if self.teacher_weights is None:
            return ()
        if sorted(self.teacher_weights) != sorted(names) or not any(self.teacher_weights.values()):
            raise ConfigError(
                f"teacher_weights must have a weight for each of the teachers {sorted(names)}, not "
                f"all 0, got {dict(self.teacher_weights)}; correct it"
            )
        return tuple(float(self.teacher_weights[name]) for name in names)

    def _teacher_of_task(self, names: Sequence[str], stream: Any) -> list[int]:
        """Return the index of the teacher of each source of the data."""
        sources = list(getattr(stream, "names", ()))
        if sorted(sources) != sorted(names):
            raise ConfigError(
                f"teacher_model must have one teacher for each dataset {sorted(sources)}, got "
                f"{sorted(names)}; use the same names in `dataset`, or set teacher_weights"
            )
        return [list(names).index(source) for source in sources]

    def _teacher(self, model: Any, engine: Engine, data: TrainingData) -> Engine:
        """Start the engine of a teacher; check that it matches the student and the data."""
        folder = folder_of(model)
        if folder is not None and folder.is_dir():
            check_same_tokenizer(
                self._tokenizer(data.stream),  # the student's, or else the dataset's
                "the student",
                files_of(folder),
                f"teacher_model {folder}",
                remedy="use a teacher of the same model family",
            )
        starter = self if self.teacher_layout is None else evolve(self, layout=self.teacher_layout)
        teacher = starter.start_engine(model, trained=False)
        if (teacher.data_rank, teacher.data_ranks) != (engine.data_rank, engine.data_ranks):
            raise ConfigError(
                f"teacher_layout must have {engine.data_ranks} data ranks like layout, got "
                f"{teacher.data_ranks}; change either layout"
            )
        sizes = (engine.vocabulary_size, teacher.vocabulary_size)
        if folder is None and None not in sizes and sizes[0] != sizes[1]:
            raise ModelError(
                f"teacher_model must have the student's tokenizer, and has {sizes[1]} tokens "
                f"instead of {sizes[0]}; use a teacher of the same model family"
            )
        longest = (self.sequence_length or 0) + self.max_new_tokens
        generates = self.lmbda > 0 or self.seq_kd
        for name, each in (("model", engine), ("teacher_model", teacher)):
            if generates and each.context is not None and longest > each.context:
                raise ConfigError(
                    f"sequence_length + max_new_tokens must be at most {each.context}, the "
                    f"context of {name}, got {longest}; lower max_new_tokens or sequence_length"
                )
        return teacher

    def stream(self, dataset: Any, engine: Engine, **settings: Any) -> Any:
        """Open the conversations of the dataset folders, one per row."""
        return instructions(
            dataset,
            engine,
            **{
                "sequence_length": self.sequence_length,
                "batch_size": self.batch_size,
                "long": "truncate",
                "open_rows": 0,
                "seed": self.seed,
                "epochs": None,
                **settings,
            },
        )

    def count_steps(self, dataset: Any, engine: Engine) -> int:
        """Count the updates in `epochs` passes over the dataset folders."""
        return sum(1 for _ in self.stream(dataset, engine, epochs=self.epochs))


class GKDLearner(OfflineLearner):
    """Learns the teacher's distribution at the tokens of the dataset's or generated responses."""

    no_targets = (
        "the batch of step {step} has no target tokens, so nothing would be learned; check whether "
        "the chat template or sequence_length masks all answers"
    )

    def __init__(
        self,
        engine: Engine,
        data: TrainingData,
        ends: TextEnds,
        options: GKDOptions,
        teachers: Mapping[str, Engine],
        *,
        weights: Sequence[float],
        of_task: Sequence[int] | None,
        seed: int,
    ) -> None:
        super().__init__(engine, data, ends)
        self.options = options
        self.teachers = teachers
        self.weights = tuple(weights)
        """Weight of each teacher whose logits are in a batch."""
        self.of_task = of_task
        """Index of the teacher of each source; None if all teach every response."""
        self.seed = seed
        self.source = "data"
        """Author of the last batch's responses: `student`, `teacher` or `data`."""
        self._first = 0
        self.identity = {
            "policy": weights_checksum(engine),
            **{
                f"teacher {name}".strip(): weights_checksum(teacher)
                for name, teacher in teachers.items()
            },
        }

    def loss(self) -> GKDLoss:
        """Return the loss of the next update."""
        options = self.options
        return GKDLoss(
            beta=options.beta,
            temperature=options.temperature,
            teacher_weights=self.weights,
            first=self._first,
        )

    def next_batch(self) -> Mapping[str, Any]:
        """Read the next batch, replace its responses if needed, and add the teacher's logits."""
        rows = _columns(next_batch(self.data.stream))
        seed = seed_of(self.seed, self.step, stride=SEED_STRIDE)
        # A function of seed and step, so that a resumed run needs no state for it.
        draw = float(torch.rand((), generator=torch.Generator().manual_seed(seed)))
        self.source = "data"
        if draw < self.options.lmbda:
            self.source = "student"
            rows = self._respond(rows, generator_of(self.engine), seed)
        elif self.options.seq_kd:
            self.source = "teacher"
            (teacher,) = self.teachers.values()
            rows = self._respond(rows, generator_of(teacher), seed)
        return self._with_teacher_logits(rows)

    def observe(self, update: StepReport, log: RunLog) -> Mapping[str, float]:
        """Return 1 if the student generated the responses, else 0."""
        return {"on_policy": float(self.source == "student")}

    def held_out_metrics(self, held_out: HeldOut) -> Mapping[str, float]:
        """Return the mean divergence per token of held-out responses."""
        totals = torch.zeros(2, dtype=torch.float64)  # weight, divergence
        for batch in held_out():
            rows = self._with_teacher_logits(_columns(batch))
            sums = self.engine.evaluate(rows, self.loss().row_sums).cpu()
            local = torch.stack((token_weights(rows, per_row=False).sum(1), sums), 1)  # (B, 2)
            totals += self.engine.gather(local).cpu().double().sum(0)
        weight, divergence = totals.tolist()
        if weight == 0:
            raise NothingToLearnError("the held-out data has no target tokens; hold out more")
        return {"held_out_loss": divergence / weight}

    def _respond(self, rows: Batch, generator: Generator, seed: int) -> dict[str, Tensor]:
        """Replace the responses of all rows by generated ones."""
        is_target = rows["targets"] != IGNORED
        # The first target is the token after the prompt. A row without targets fills up a batch.
        lengths = torch.where(is_target.any(1), is_target.int().argmax(1) + 1, 1)
        prompts: Sequence[list[int]] = [
            tokens[:length].tolist()
            for tokens, length in zip(rows["tokens"], lengths.tolist(), strict=True)
        ]
        sampling = Sampling(
            max_new_tokens=self.options.max_new_tokens,
            temperature=self.options.temperature,
            stop_token_ids=sorted({*self.stops, *self.ends.tokens}),
        )
        responses = generator(prompts, sampling, count=1, seed=seed)
        # Data ranks must agree on the width, but each sees only its own prompts.
        longest = int(self.engine.gather(lengths).max()) + sampling.max_new_tokens
        batch = sequences(prompts, responses, min_tokens=longest, parts=self.engine.row_parts)
        targets = batch["targets"].masked_fill(~is_target.any(1)[:, None], IGNORED)
        weights = rows["weights"].amax(1, keepdim=True) * (targets != IGNORED)
        result = {"tokens": batch["tokens"], "targets": targets, "weights": weights}
        return {**result, "task": rows["task"]} if "task" in rows else result

    def _with_teacher_logits(self, rows: Batch) -> dict[str, Tensor]:
        """Add `teacher_logits` (B, W, T, V), from the first to the last column with a target.

        T is the number of teachers with weights. If each teaches its own dataset, T is 1, and each
        row has the logits of its teacher; every teacher scores all rows, as that is collective.
        """
        rows = dict(rows)
        task = rows.pop("task", None)
        columns = (rows["targets"] != IGNORED).any(0).nonzero()[:, 0]
        first, width = 0, 1
        if len(columns):
            first, width = int(columns[0]), int(columns[-1] - columns[0]) + 1

        def target_logits(output: Output, batch: Batch) -> Tensor:
            logits = output.logits(slice(first, first + width))
            # Microbatches may be narrower, as trailing columns without targets are dropped.
            return torch.nn.functional.pad(logits, (0, 0, 0, width - logits.shape[1]))

        self._first = first
        inputs = {name: column for name, column in rows.items() if name != "weights"}
        merged: Tensor | None = None
        for index, teacher in enumerate(self.teachers.values()):
            logits = teacher.evaluate(inputs, target_logits)
            if merged is None:
                if self.of_task is None and len(self.weights) > 1:
                    batch, columns_read, vocabulary = logits.shape
                    merged = logits.new_empty(batch, columns_read, len(self.weights), vocabulary)
                else:
                    merged = logits[:, :, None]  # by dataset, rows of other teachers follow
            # Teachers may pad their embeddings differently.
            vocabulary = min(merged.shape[3], logits.shape[2])
            merged, logits = merged[..., :vocabulary], logits[..., :vocabulary]
            if self.of_task is not None:
                assert task is not None  # a stream with names has it
                is_own = torch.tensor(self.of_task)[task].to(logits.device) == index
                merged[is_own, :, 0] = logits[is_own].to(merged.dtype)
            elif len(self.weights) > 1:
                merged[:, :, index] = logits
        assert merged is not None  # there is at least one teacher
        return {**rows, "teacher_logits": merged}


def _columns(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the columns of conversations that distillation reads."""
    columns = {name: torch.as_tensor(value) for name, value in batch.items()}
    columns.setdefault("weights", (columns["targets"] != IGNORED).float())
    names = ("tokens", "targets", "positions", "documents", "weights", "task")
    return {name: columns[name] for name in names if name in columns}

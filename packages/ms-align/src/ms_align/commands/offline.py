"""`ms-align sft | reward | dpo`: learning from a dataset that is there before the run."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from attrs import Attribute, evolve, field, fields, frozen
from torch import nn

from ms_align.commands.facts import facts_of
from ms_align.commands.launch import check_launched
from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.parallel import ParallelEngine
from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError
from ms_align.generation.sampling import Sampling
from ms_align.lora.adapters import LoraOptions, add_lora
from ms_align.models.folder import load_model
from ms_align.run.loop import Result
from ms_align.run.options import RunOptions
from ms_align.run.ownership import Ownership, plain
from ms_align.run.samples import Showing
from ms_align.settings import flag, nearest, numbers, one_of, text, whole
from ms_align.settings.run_file import build, refuse_renamed
from ms_align.trainers.frame.pairs import DPOOptions, DPOTrainer, RewardOptions, RewardTrainer
from ms_align.trainers.sft import SFTOptions, SFTTrainer

__all__ = ["DPORun", "OfflineRun", "RewardRun", "SFTRun", "dpo", "reward", "sft"]


def _folders(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    folders = list(value.values()) if isinstance(value, dict) else [value]
    if not all(isinstance(folder, str) and folder for folder in folders):
        raise ConfigError(f"dataset is {value!r}; give a folder, or a table of them")


def _ranks(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    if not (value is None or isinstance(value, dict)):
        raise ConfigError(f"layout is {value!r}; give a table, as {{ data = 2, tensor = 2 }}")


@frozen(kw_only=True, slots=False)  # a run inherits from more than one
class OfflineRun(OptimizerOptions, RunOptions):
    """What the three have in common, beside optimizer and run."""

    model: str = field(validator=text())
    """Folder of the model to begin with."""
    dataset: str | dict[str, str] = field(validator=_folders)
    """Folder that `ms-data build --chat-template` wrote; for `sft` also a table of several."""
    sequence_length: int = field(validator=whole(least=2))
    """Tokens in a row at most."""
    batch_size: int = field(default=8, validator=whole())
    """Rows of an update, or pairs, over all processes."""
    microbatch_size: int | None = field(default=None, validator=whole(optional=True))
    """Rows that pass at once; all by default."""
    steps: int | None = field(default=None, validator=whole(optional=True))
    """Updates of the whole run; or give epochs."""
    epochs: int | None = field(default=None, validator=whole(optional=True))
    """Passes over the data; or give steps."""
    evaluate_samples: int = field(default=3, validator=whole(least=0))
    """Held-out prompts whose answers are shown at each evaluation."""
    held_out_batches: int | None = field(default=None, validator=whole(optional=True))
    """Batches of an evaluation; all of the split `held_out` by default."""
    lora: LoraOptions | None = field(default=None, metadata={"table": LoraOptions})
    """Train adapters alone; they are written to `output_dir/adapter`."""
    merge: bool = field(default=True, validator=flag)
    """With adapters, in one process: write the merged model too."""
    layout: dict[str, int] | None = field(default=None, validator=_ranks)
    """Ranks of ms-parallel's axes, as `{ data = 2, tensor = 2 }`; None runs in one process."""

    def __attrs_post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError("give steps or epochs, one of them")

    def part(self, kind: type[Any]) -> Any:
        """The settings of one class that this one inherits from."""
        return kind(**{each.name: getattr(self, each.name) for each in fields(kind)})

    def engine(self) -> LocalEngine | ParallelEngine:
        """The model, ready to learn."""
        if self.layout is not None:
            return self._parallel()
        model = load_model(self.model)
        if self.lora:
            model = add_lora(model, self.lora, seed=self.seed, base_name=self.model)
        return LocalEngine(model, self.part(OptimizerOptions), microbatch_size=self.microbatch_size)

    def _parallel(self) -> ParallelEngine:
        from ms_parallel import Layout

        axes = [each.name for each in fields(Layout)]
        for name in self.layout or {}:
            if name not in axes:
                raise ConfigError(f"layout has no axis {name!r}; {nearest(name, axes)}")
        layout = Layout(**(self.layout or {}))
        check_launched(layout.world_size)
        engine = ParallelEngine.start(
            self.model,
            layout,
            optimizer=self.part(OptimizerOptions),
            microbatch_size=self.microbatch_size,
        )
        if self.lora:
            engine.adapt(self.lora, seed=self.seed, base_name=self.model)
        return engine

    def showing(self) -> Showing | None:
        """The first held-out prompts, up to where the assistant speaks."""
        from ms_data import PairSample, Samples, Tokenizer

        folders = list(self.dataset.values()) if isinstance(self.dataset, dict) else [self.dataset]
        if not self.evaluate_samples or not all(_has_held_out(folder) for folder in folders):
            return None
        prompts: list[list[int]] = []
        for folder in folders:
            samples = Samples(folder, "held_out")
            for at in range(min(len(samples), -(-self.evaluate_samples // len(folders)))):
                one = samples[at]
                part = one.chosen if isinstance(one, PairSample) else one
                prompts.append(part.tokens[: int(part.learnt.argmax())].tolist())
        tokenizer = Tokenizer.load(folders[0])
        room = max(1, self.sequence_length // 2)
        return Showing(
            prompts=[prompt[-room:] for prompt in prompts if prompt][: self.evaluate_samples],
            decode=tokenizer.decode,
            sampling=Sampling(
                max_new_tokens=min(48, room), temperature=0.0, stop_tokens=tokenizer.end_of_text
            ),
        )

    @property
    def reads(self) -> dict[str, Any]:
        """The models that the run begins from, by setting."""
        return {"model": self.model}

    def owner(self) -> Ownership:
        """What the run says of itself when it takes its folder; the trainer adds the kind."""
        names = self.dataset
        dataset = (
            names if isinstance(names, str) else ", ".join(f"{k}={v}" for k, v in names.items())
        )
        return Ownership(
            kind="ms-align",
            identity={"model": self.model, "dataset": dataset},
            settings=plain(self),
            reads=self.reads,
        )


@frozen(kw_only=True, slots=False)
class SFTRun(SFTOptions, OfflineRun):
    """`ms-align sft`."""

    algorithm = "sft"

    weights: dict[str, float] | None = field(default=None, validator=numbers(optional=True))
    """How often samples of each source are drawn; by default as many as each holds."""
    long: str = field(default="truncate", validator=one_of("truncate", "split"))
    """What becomes of a sample longer than a row."""
    open_rows: int = field(default=512, validator=whole(least=0))
    """Rows packed at a time for each source; 0 gives each sample a row of its own."""
    weighting: str = field(default="token", validator=one_of("token", "sample"))
    """What counts alike: each `token`, or each `sample`."""

    def __attrs_post_init__(self) -> None:
        SFTOptions.__attrs_post_init__(self)
        OfflineRun.__attrs_post_init__(self)
        if self.tasks is not None and self.steps is None:
            raise ConfigError("tasks are drawn without an end, so epochs mean nothing; give steps")

    def run(self) -> Result:
        """Train, and write the model."""
        engine = self.engine()
        stream = self._stream(engine)
        steps = self.steps or sum(1 for _ in self._stream(engine, epochs=self.epochs))
        trainer = SFTTrainer(
            engine,
            stream,
            held_out=self._held_out(engine),
            showing=self.showing(),
            sft=self.part(SFTOptions),
            options=self.part(RunOptions),
            merge=self.merge,
            owner=self.owner(),
        )
        return trainer.train(steps)

    def _stream(self, engine: Engine, *, epochs: int | None = None, **settings: Any) -> Any:
        from ms_data import InstructionStream

        given: dict[str, Any] = {
            "weights": self.weights,
            "long": self.long,
            "open_rows": self.open_rows,
            "weighting": self.weighting,
            "epochs": epochs,
            "seed": self.seed,
            **settings,
        }
        sources: Any = self.dataset
        return InstructionStream(
            sources,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            place=_Place(engine),
            **given,
        )

    def _held_out(self, engine: Engine) -> Any:
        folders = self.dataset.values() if isinstance(self.dataset, dict) else [self.dataset]
        if not all(_has_held_out(folder) for folder in folders):
            return None
        settings = {"split": "held_out", "shuffle": False, "weights": None, "weighting": "token"}
        return lambda: _first(self._stream(engine, epochs=1, **settings), self.held_out_batches)


@frozen(kw_only=True, slots=False)
class _PairRun(OfflineRun):
    """What `dpo` and `reward` share."""

    def _stream(self, engine: Engine, **settings: Any) -> Any:
        from ms_data import PreferenceStream, Samples

        if not isinstance(self.dataset, str):
            raise ConfigError("dataset is a table; preference pairs come from one folder")
        if Samples(self.dataset).kind != "preferences":
            raise ConfigError(
                f"{self.dataset} holds conversations and no preference pairs; build it with "
                "`ms-data build --pairs`, or run `ms-align sft`"
            )
        return PreferenceStream(
            self.dataset,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            place=_Place(engine),
            **{"seed": self.seed, **settings},
        )

    def _held_out(self, engine: Engine) -> Any:
        if not _has_held_out(str(self.dataset)):
            return None
        return lambda: _first(
            self._stream(engine, split="held_out", shuffle=False, epochs=1), self.held_out_batches
        )

    def _steps(self, stream: Any) -> int:
        pairs = cast(int, stream.pairs_per_epoch)
        return self.steps or -(-pairs * (self.epochs or 1) // self.batch_size)


@frozen(kw_only=True, slots=False)
class DPORun(DPOOptions, _PairRun):
    """`ms-align dpo`."""

    algorithm = "dpo"

    reference_model: str | None = field(default=None, validator=text(optional=True))
    """Folder of the reference; by default the model as it begins."""

    @property
    def reads(self) -> dict[str, Any]:
        """The model and the reference."""
        return {"model": self.model, "reference_model": self.reference_model}

    def run(self) -> Result:
        """Train, and write the model."""
        engine = self.engine()
        stream = self._stream(engine)
        trainer = DPOTrainer(
            engine,
            stream,
            reference=self._reference(),
            held_out=self._held_out(engine),
            showing=self.showing(),
            dpo=self.part(DPOOptions),
            options=self.part(RunOptions),
            merge=self.merge,
            owner=self.owner(),
        )
        return trainer.train(self._steps(stream))

    def _reference(self) -> nn.Module | Engine | None:
        if self.reference_free:
            return None
        if self.layout is not None and self.lora and not self.reference_model:
            return None  # the adapters are switched off
        if self.layout is not None:
            return evolve(self, model=self.reference_model or self.model).engine()
        return load_model(self.reference_model) if self.reference_model else None


@frozen(kw_only=True, slots=False)
class RewardRun(RewardOptions, _PairRun):
    """`ms-align reward`."""

    algorithm = "reward"

    def run(self) -> Result:
        """Train, and write the reward model, which `ms-align ppo` takes as its reward_model."""
        if self.layout is not None or self.lora is not None:
            raise ConfigError(
                "a reward model is trained whole and in one process; leave out layout and lora"
            )
        model = load_model(self.model)
        alone = LocalEngine(model)
        stream = self._stream(alone)
        trainer = RewardTrainer(
            model,
            stream,
            held_out=self._held_out(alone),
            reward=self.part(RewardOptions),
            optimizer=self.part(OptimizerOptions),
            microbatch_size=self.microbatch_size,
            options=self.part(RunOptions),
            owner=self.owner(),
        )
        return trainer.train(self._steps(stream))


class _Place:
    """Where an engine reads, as ms-data asks."""

    def __init__(self, engine: Engine) -> None:
        self.rank, self.count = engine.data_rank, engine.data_ranks


def _has_held_out(folder: str) -> bool:
    from ms_data import inspect

    return "held_out" in inspect(folder).splits


def _first(stream: Iterable[Mapping[str, Any]], most: int | None) -> Iterable[Mapping[str, Any]]:
    for number, batch in enumerate(stream):
        if number == most:
            return
        yield batch


RENAMED = {"data": "dataset", "reference": "reference_model", "out": "output_dir"}


def _run(kind: type[Any], settings: dict[str, Any], where: str) -> dict[str, Any]:
    refuse_renamed(settings, RENAMED, where=where)
    run = build(kind, settings, where=where)
    return facts_of(run.run(), run.output_dir or Path("runs", kind.algorithm))


def sft(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """`ms-align sft`."""
    return _run(SFTRun, settings, where)


def dpo(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """`ms-align dpo`."""
    return _run(DPORun, settings, where)


def reward(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """`ms-align reward`."""
    return _run(RewardRun, settings, where)

"""`ms-align sft | reward | dpo`: learning from a dataset that is there before the run."""

import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from attrs import Attribute, evolve, field, fields, frozen
from torch import nn

from ms_align import processes
from ms_align.commands.command import Command
from ms_align.durable import writing
from ms_align.engine import Engine
from ms_align.errors import ConfigError
from ms_align.local import LocalEngine
from ms_align.loop import Result
from ms_align.lora import AdaptedModel, LoraOptions, add_lora
from ms_align.model_folder import load_model, save_model
from ms_align.options import OptimizerOptions, RunOptions
from ms_align.parallel import ParallelEngine
from ms_align.reward_model import HEAD_FILE
from ms_align.run_file import build
from ms_align.sampling import Sampling
from ms_align.settings import flag, nearest, numbers, one_of, text, whole
from ms_align.trainers.preference import DPOOptions, DPOTrainer, RewardOptions, RewardTrainer
from ms_align.trainers.sft import SFTOptions, SFTTrainer
from ms_align.trainers.showing import Showing

__all__ = ["COMMANDS", "DPORun", "OfflineRun", "RewardRun", "SFTRun"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def _folders(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    folders = list(value.values()) if isinstance(value, dict) else [value]
    if not all(isinstance(folder, str) and folder for folder in folders):
        raise ConfigError(f"data is {value!r}; give a folder, or a table of them")


def _ranks(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    if not (value is None or isinstance(value, dict)):
        raise ConfigError(f"layout is {value!r}; give a table, as {{ data = 2, tensor = 2 }}")


@frozen(kw_only=True, slots=False)  # a run inherits from more than one
class OfflineRun(OptimizerOptions, RunOptions):
    """What the three have in common, beside optimizer and run."""

    model: str = field(validator=text())
    """Folder of the model to begin with."""
    data: str | dict[str, str] = field(validator=_folders)
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

        folders = list(self.data.values()) if isinstance(self.data, dict) else [self.data]
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

    def result(self) -> Path:
        """What `save` writes last."""
        adapter = self.lora is not None and (self.layout is not None or not self.merge)
        return self.output_dir / ("adapter" if adapter else "model")

    def save(self, engine: Engine, name: str = "model") -> None:
        """Write what was learnt, and the tokenizer that goes with it."""
        folder = self.output_dir / name
        if isinstance(engine, ParallelEngine):
            if engine.adapters is not None:
                engine.adapters.save_pretrained(self.output_dir / "adapter")
            else:
                engine.save(folder)
        elif isinstance(engine, LocalEngine):
            module = engine.module
            if isinstance(module, AdaptedModel):
                module.save_pretrained(self.output_dir / "adapter")
                module = module.merged_model() if self.merge else None  # type: ignore[assignment]
            if module is not None:
                save_model(module, folder)
        self.copy_tokenizer(folder)

    def copy_tokenizer(self, folder: Path) -> None:
        """Put the data's tokenizer and chat template beside a model that was written."""
        first = next(iter(self.data.values())) if isinstance(self.data, dict) else self.data
        if processes.rank() == 0 and folder.is_dir():
            for each in TOKENIZER_FILES:
                if Path(first, each).is_file():
                    with writing(folder / each):
                        shutil.copyfile(Path(first, each), folder / each)


@frozen(kw_only=True, slots=False)
class SFTRun(SFTOptions, OfflineRun):
    """`ms-align sft`."""

    weights: dict[str, float] | None = field(default=None, validator=numbers(optional=True))
    """How often samples of each source are drawn; by default as many as each holds."""
    long: str = field(default="truncate", validator=one_of("truncate", "split"))
    """What becomes of a sample longer than a row."""
    open_rows: int = field(default=512, validator=whole(least=0))
    """Rows packed at a time for each source; 0 gives each sample a row of its own."""
    weighting: str = field(default="token", validator=one_of("token", "sample"))

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
        )
        result = trainer.train(steps, result=self.result())
        if result.finished:
            self.save(engine)
        return result

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
        sources: Any = self.data
        return InstructionStream(
            sources,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            place=_Place(engine),
            **given,
        )

    def _held_out(self, engine: Engine) -> Any:
        folders = self.data.values() if isinstance(self.data, dict) else [self.data]
        if not all(_has_held_out(folder) for folder in folders):
            return None
        settings = {"split": "held_out", "shuffle": False, "weights": None, "weighting": "token"}
        return lambda: _first(self._stream(engine, epochs=1, **settings), self.held_out_batches)


@frozen(kw_only=True, slots=False)
class _PairRun(OfflineRun):
    """What `dpo` and `reward` share."""

    def _stream(self, engine: Engine, **settings: Any) -> Any:
        from ms_data import PreferenceStream, Samples

        if not isinstance(self.data, str):
            raise ConfigError("data is a table; preference pairs come from one folder")
        if Samples(self.data).kind != "preferences":
            raise ConfigError(
                f"{self.data} holds conversations and no preference pairs; build it with "
                "`ms-data build --pairs`, or run `ms-align sft`"
            )
        return PreferenceStream(
            self.data,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            place=_Place(engine),
            **{"seed": self.seed, **settings},
        )

    def _held_out(self, engine: Engine) -> Any:
        if not _has_held_out(str(self.data)):
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

    reference: str | None = field(default=None, validator=text(optional=True))
    """Folder of the reference; by default the model as it begins."""

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
        )
        result = trainer.train(self._steps(stream), result=self.result())
        if result.finished:
            self.save(engine)
        return result

    def _reference(self) -> nn.Module | Engine | None:
        if self.reference_free:
            return None
        if self.layout is not None and self.lora and not self.reference:
            return None  # the adapters are switched off
        if self.layout is not None:
            return evolve(self, model=self.reference or self.model).engine()
        return load_model(self.reference) if self.reference else None


@frozen(kw_only=True, slots=False)
class RewardRun(RewardOptions, _PairRun):
    """`ms-align reward`."""

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
        )
        result = trainer.train(self._steps(stream), result=self.output_dir / "model" / HEAD_FILE)
        if result.finished:
            trainer.reward_model().save(self.output_dir / "model")
            self.copy_tokenizer(self.output_dir / "model")
        return result


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


def _run(kind: type[Any], settings: dict[str, Any], where: str) -> int:
    return 0 if build(kind, settings, where=where).run().finished else 1


COMMANDS = tuple(
    Command(name=name, help=text, example=f"ms-align {name} RUN.toml --set {sets}", run=run)
    for name, text, sets, run in (
        (
            "sft",
            "tune a model on instructions; the same command goes on",
            "steps=200 --set learning_rate=1e-5",
            partial(_run, SFTRun),
        ),
        (
            "reward",
            "train a reward model on preference pairs",
            "epochs=1 --set centring=0.01",
            partial(_run, RewardRun),
        ),
        (
            "dpo",
            "optimise preferences directly",
            "epochs=1 --set beta=0.1",
            partial(_run, DPORun),
        ),
    )
)

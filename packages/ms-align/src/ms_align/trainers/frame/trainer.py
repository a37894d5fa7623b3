"""What all trainers share: where the model runs, what of it is trained, and how a run is kept."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
from attrs import Attribute, evolve, field, fields, frozen

from ms_align.engines.assembly import start_engine
from ms_align.engines.layout import check_layout, layout_of
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.options import EngineOptions
from ms_align.engines.protocol import Engine
from ms_align.lora.adapters import LoraOptions, lora_options
from ms_align.models.folder import experts_of, folder_of, stored_dtype
from ms_align.run.initial_weights import name_of
from ms_align.run.loop import Learner, Loop, Notice, Result
from ms_align.run.options import RunOptions
from ms_align.run.ownership import Ownership, plain
from ms_align.run.saving import check_finite, result_folder, write_result
from ms_align.settings import flag, whole
from ms_align.tokenizer_files import TokenizerFiles

T = TypeVar("T")
MODELS = ("model", "policy_model", "reference_model", "value_model", "reward_model")
"""Settings that hold a model; one in the run's own folder would be written over."""


def _ranks(instance: "Trainer", attribute: "Attribute[Any]", value: Any) -> None:
    check_layout(value)
    if value is None:
        instance.check_alone(instance.alone_remedy)


@frozen(kw_only=True, slots=False)  # trainers inherit from more than one
class Trainer(OptimizerOptions, RunOptions, EngineOptions):
    """Where the model runs, and what of it is trained."""

    algorithm: ClassVar[str]
    alone_remedy = "set `layout = { data = 1 }`"
    """Remedy for a setting that one process without a layout cannot honor."""

    microbatch_size: int | None = field(default=None, validator=whole(optional=True))
    """Rows that pass at once; all by default."""
    lora: LoraOptions | None = field(
        default=None,
        converter=lora_options,
        metadata={"table": LoraOptions},
    )
    """Train adapters alone; they are written to `output_dir/adapter`."""
    merge: bool = field(default=True, validator=flag)
    """With adapters: write the merged model to `output_dir/model` too."""
    layout: Any = field(default=None, validator=_ranks)
    """Ranks of ms-parallel's axes, as `{ data = 2, tensor = 2 }`; None runs in one process."""

    @property
    def place(self) -> Path:
        """The run's folder."""
        return self.output_dir or Path("runs", self.algorithm)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Settings that cannot change while a run goes on."""
        return ("seed", "lora")

    @property
    def processes(self) -> int:
        """How many processes the layout is for."""
        return 1 if self.layout is None else layout_of(self.layout).world_size

    @property
    def base_folder(self) -> Path | None:
        """Folder of the model that is trained, where it has one."""
        return folder_of(getattr(self, "model", getattr(self, "policy_model", None)))

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the saved model; None for that of a model in memory."""
        if self.save_dtype is not None:
            return cast(torch.dtype, getattr(torch, self.save_dtype))
        model = getattr(self, "model", getattr(self, "policy_model", None))
        base = self.base_folder
        return None if base is None or not isinstance(model, str | Path) else stored_dtype(base)

    def part(self, kind: type[T]) -> T:
        """Return the settings of one class that this one inherits from."""
        names = [each.name for each in fields(cast(Any, kind))]
        return kind(**{name: getattr(self, name) for name in names})

    def start_engine(
        self,
        model: Any,
        *,
        heads: Mapping[str, int] | None = None,
        adapted: bool = False,
        trained: bool = True,
    ) -> Engine:
        """Build an engine for a model, under these settings.

        Args:
            model: a folder, a module, or an engine, which is taken as it is.
            heads: width of each extra linear head, by name.
            adapted: whether it is the policy, which gets the adapters.
            trained: False for a reference, which needs no compiled blocks and no balanced experts.
        """
        options = self.part(EngineOptions)
        if not trained:
            options = evolve(options, compile=False)
        if not adapted and (not trained or experts_of(model) is None):
            options = evolve(options, balance="none", balance_coefficient=None)
        layout = self.layout if adapted or isinstance(model, str | Path) else None
        return start_engine(
            model,
            layout=layout,
            lora=self.lora if adapted else None,
            optimizer=self.part(OptimizerOptions),
            heads=heads,
            microbatch_size=self.microbatch_size,
            seed=self.seed,
            options=options,
        )

    def run(
        self,
        learner: Learner,
        engine: Engine,
        *,
        steps: int,
        identity: Mapping[str, str],
        tokenizer: Callable[[], TokenizerFiles | None],
        notices: Sequence[Notice] = (),
    ) -> Result:
        """Run a learner to the end, or to where a signal stops it, and write what it came to."""
        check_finite(engine)
        models = {name: getattr(self, name) for name in MODELS if hasattr(self, name)}
        names = {name: name_of(one) for name, one in models.items()}
        done = Loop(
            learner,
            steps=steps,
            options=self,
            folder=self.place,
            owner=Ownership(
                kind=f"ms-align {self.algorithm}",
                identity=identity,
                settings={**plain(self), **names},
                fixed=self.fixed,
                reads=models,
            ),
            write=lambda: self.write(engine, tokenizer()),
            result=self.result_path(engine),
            notices=[*notices, *self._notices()],
        ).run()
        return evolve(done, model=self.trained(engine))

    def _notices(self) -> list[Notice]:
        """Say how experts are balanced, where the model has some."""
        model = getattr(self, "model", getattr(self, "policy_model", None))
        experts = experts_of(self.base_folder or model)
        if experts is None or isinstance(model, Engine):
            return []
        way = (
            "trained without balancing"
            if self.balance == "none"
            else f"balanced by {self.balance!r}"
        )
        return [
            Notice(
                kind="experts",
                fields={"experts": experts, "balance": self.balance},
                line=f"the model's {experts} experts are {way} (balance)",
            )
        ]

    def write(self, engine: Engine, tokenizer: TokenizerFiles | None) -> None:
        """Write the trained model; every process calls it."""
        write_result(
            engine, self.place, tokenizer, merge=self.merge, base=self.base_folder, dtype=self.dtype
        )

    def result_path(self, engine: Engine) -> Path:
        """Return the path of what `write` writes last."""
        return result_folder(engine, self.place, merge=self.merge)

    def trained(self, engine: Engine) -> Any:
        """Return the trained model as Python users take it."""
        return engine.module

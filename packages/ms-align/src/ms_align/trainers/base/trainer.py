"""Settings and methods of all trainers: model, engine, adapters and output."""

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
from ms_align.errors import ConfigError
from ms_align.lora.options import LoraOptions, lora_options
from ms_align.models.folder import experts_of, folder_of, stored_dtype
from ms_align.run.initial_weights import model_name
from ms_align.run.loop import Learner, Loop, Notice, Result
from ms_align.run.options import RunOptions
from ms_align.run.ownership import Ownership, plain
from ms_align.run.saving import check_finite, result_folder, write_result
from ms_align.settings import flag, integer
from ms_align.tokenizer_files import TokenizerFiles
from ms_align.used_settings import UsedIf, check_used

T = TypeVar("T")
MODELS = (
    "model",
    "policy_model",
    "reference_model",
    "value_model",
    "reward_model",
    "teacher_model",
)
"""Settings that name a model; a model in the run's own output folder would be overwritten."""


def _ranks(instance: "Trainer", attribute: "Attribute[Any]", value: Any) -> None:
    check_layout(value)
    if value is None:
        instance.check_single_process(instance.single_process_remedy)


@frozen(kw_only=True, slots=False)  # trainers inherit from more than one
class Trainer(OptimizerOptions, RunOptions, EngineOptions):
    """Model parallelism and adapters."""

    algorithm: ClassVar[str]
    single_process_remedy = "set `layout = { data = 1 }`"
    """Remedy for a setting that one process without a layout cannot honor."""

    microbatch_size: int | None = field(default=None, validator=integer(optional=True))
    """Rows per forward pass on each data rank. Default: all rows at once."""
    lora: LoraOptions | None = field(
        default=None,
        converter=lora_options,
        metadata={"table": LoraOptions},
    )
    """Train LoRA adapters only; they are saved to `output_dir/adapter`."""
    merge: bool = field(default=True, validator=flag)
    """With adapters: also save the merged model to `output_dir/model`."""
    layout: Any = field(default=None, validator=_ranks)
    """Ranks per ms-parallel axis, such as `{ data = 2, tensor = 2 }`. None: one process."""

    used_if: ClassVar[tuple[UsedIf, ...]] = (
        UsedIf("merge", "with lora", lambda run: run.lora is not None),
    )
    """Conditions of settings that another one can make useless; classes of settings add theirs."""

    def check_used(self) -> None:
        """Check that every setting has an effect.

        Raises:
            ConfigError: one has none.
        """
        for cls in type(self).__mro__:
            check_used(self, vars(cls).get("used_if", ()), error=ConfigError)

    @property
    def run_dir(self) -> Path:
        """Output folder of the run."""
        return self.output_dir or Path("runs", self.algorithm)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Settings that cannot change when a run resumes."""
        return ("seed", "lora")

    @property
    def processes(self) -> int:
        """World size of the layout."""
        return 1 if self.layout is None else layout_of(self.layout).world_size

    @property
    def base_folder(self) -> Path | None:
        """Folder of the base model; None for a model in memory."""
        return folder_of(getattr(self, "model", getattr(self, "policy_model", None)))

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the saved model; None keeps the dtype of a model in memory."""
        if self.save_dtype is not None:
            return cast(torch.dtype, getattr(torch, self.save_dtype))
        model = getattr(self, "model", getattr(self, "policy_model", None))
        base = self.base_folder
        return None if base is None or not isinstance(model, str | Path) else stored_dtype(base)

    def subset(self, options_class: type[T]) -> T:
        """Return the settings that an inherited options class declares."""
        names = [attribute.name for attribute in fields(cast(Any, options_class))]
        return options_class(**{name: getattr(self, name) for name in names})

    def start_engine(
        self,
        model: Any,
        *,
        heads: Mapping[str, int] | None = None,
        adapted: bool = False,
        trained: bool = True,
    ) -> Engine:
        """Build an engine for a model with these settings.

        Args:
            model: a folder, a module, or an engine, which is returned unchanged.
            heads: width of each extra linear head, by name.
            adapted: True for the policy, which gets the adapters.
            trained: False for a reference, which needs no compiled blocks and no expert balancing.
        """
        options = self.subset(EngineOptions)
        if not trained:
            options = evolve(options, compile=False)
        if not adapted and (not trained or experts_of(model) is None):
            options = evolve(options, balance="none", balance_coefficient=None)
        # A reference or value model that is in memory stays in one process.
        layout = self.layout if adapted or isinstance(model, str | Path) else None
        return start_engine(
            model,
            layout=layout,
            lora=self.lora if adapted else None,
            optimizer=self.subset(OptimizerOptions),
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
        """Run a learner until the end or a stop signal, and write the trained model."""
        # A NaN in the initial weights would only show as skipped updates.
        check_finite(engine)
        models: dict[str, Any] = {}
        for name in MODELS:
            model = getattr(self, name, None)
            several = model.items() if isinstance(model, Mapping) else ()
            models |= {f"{name}.{key}": value for key, value in several}
            if hasattr(self, name) and not several:
                models[name] = model
        names = {name: model_name(model) for name, model in models.items()}
        result = Loop(
            learner,
            steps=steps,
            options=self,
            folder=self.run_dir,
            owner=Ownership(
                command=f"ms-align {self.algorithm}",
                identity=identity,
                settings={**plain(self), **names},
                fixed=self.fixed,
                reads=models,
            ),
            write=lambda: self.write(engine, tokenizer()),
            result=self.result_path(engine),
            notices=[*notices, *self._notices()],
        ).run()
        return evolve(result, model=self.trained(engine))

    def _notices(self) -> list[Notice]:
        """Build the notice about expert load balancing, for a mixture-of-experts model."""
        model = getattr(self, "model", getattr(self, "policy_model", None))
        experts = experts_of(self.base_folder or model)
        if experts is None or isinstance(model, Engine):
            return []
        balancing = (
            "trained without balancing"
            if self.balance == "none"
            else f"balanced by {self.balance!r}"
        )
        return [
            Notice(
                event="experts",
                fields={"experts": experts, "balance": self.balance},
                line=f"the model's {experts} experts are {balancing} (balance)",
            )
        ]

    def write(self, engine: Engine, tokenizer: TokenizerFiles | None) -> None:
        """Write the trained model. Collective."""
        write_result(
            engine,
            self.run_dir,
            tokenizer,
            merge=self.merge,
            base=self.base_folder,
            dtype=self.dtype,
        )

    def result_path(self, engine: Engine) -> Path:
        """Return the folder that `write` creates last."""
        return result_folder(engine, self.run_dir, merge=self.merge)

    def trained(self, engine: Engine) -> Any:
        """Return the trained model for Python callers."""
        return engine.module

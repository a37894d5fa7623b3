"""Settings shared by all optimizers, their selection by name, and the learning rate of a step."""

import ast
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import Attribute, evolve, field, fields, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.optim.decays import Decay, decay, decay_of
from ms_parallel.optim.names import check_known, resolve_name
from ms_parallel.settings import integer, nearest, number, short_repr
from ms_parallel.settings.keys import groups_of

if TYPE_CHECKING:  # a run file's keys are known without torch
    from ms_parallel.optim.rule import LocalParameters, UpdateRule

MIN_DIVISOR = 1e-30
"""Smallest accepted value of settings that divide."""
SHARED = (
    "learning_rate",
    "warmup_steps",
    "decay",
    "decay_steps",
    "final_ratio",
    "weight_decay",
    "max_grad_norm",
)
"""Settings of all optimizers; top-level keys of a run file."""
GROUP_OVERRIDES = ("learning_rate", "weight_decay")
"""Shared settings that a parameter group may override."""


@frozen(kw_only=True)
class OptimizerKind:
    """Optimizer that can be selected by name."""

    build: Callable[..., "OptimizerConfig"]
    keys: tuple[str, ...]
    """Settings of this optimizer, without the shared ones."""


@cache
def optimizers() -> Mapping[str, OptimizerKind]:
    """Return the optimizers by name, from the `KINDS` of each module of `optimizers/`.

    They take precedence over entries of the same name in a module's `OTHERS`.
    """
    package = import_module("ms_parallel.optim.optimizers")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = [import_module(f"{package.__name__}.{name}") for name in names]
    # Later tables win, so our optimizers replace torch's classes of the same name.
    tables = [getattr(module, name, {}) for name in ("OTHERS", "KINDS") for module in modules]
    return {name: entry for table in tables for name, entry in table.items()}


@cache
def declared_optimizers() -> Mapping[str, tuple[str, ...] | None]:
    """Return the settings of each optimizer by name, without importing torch.

    Our optimizers' settings are parsed from the source. Other classes of torch map to None, because
    only their signatures list their settings.
    """
    torch = find_spec("torch")
    exports = torch and _assigned(Path(torch.origin or "").parent / "optim/__init__.py", "__all__")
    names = ast.literal_eval(exports) if exports else []
    declared: dict[str, tuple[str, ...] | None] = {
        name: None for name in names if name[0].isupper() and name != "Optimizer"
    }
    for file in sorted((Path(__file__).parent / "optimizers").glob("*.py")):
        kinds = _assigned(file, "KINDS")
        if not isinstance(kinds, ast.Dict):
            continue
        for name, call in zip(kinds.keys, kinds.values, strict=True):
            if isinstance(name, ast.Constant) and isinstance(call, ast.Call):
                groups = groups_of(f"optim.optimizers.{file.stem}:{ast.unparse(call.args[0])}")
                keys = [key.name for group in groups for key in group.keys]
                declared[str(name.value)] = tuple(key for key in keys if key not in SHARED)
    return declared


def _assigned(path: Path, name: str) -> ast.expr | None:
    """Return the expression that a module assigns to a name, parsed from its source."""
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    for statement in body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            return statement.value
    return None


def kind_of(config: type[Any]) -> OptimizerKind:
    """Build an `OptimizerKind` from the class of an optimizer's settings."""
    return OptimizerKind(
        build=config, keys=tuple(f.name for f in fields(config) if f.name not in SHARED)
    )


def named_optimizer(value: object) -> tuple[str, dict[str, Any]]:
    """Return an optimizer's canonical name and the settings given with it.

    Raises:
        ConfigError: the optimizer is unknown.
    """
    return resolve_name("optimizer", value, declared_optimizers())


def optimizer_of(
    value: object, otherwise: Mapping[str, Any] | None = None, **shared: Any
) -> "OptimizerConfig":
    """Build the settings of an optimizer from its name, or a table of its `name` and settings.

    Args:
        value: name in any case and with or without hyphens, or a table.
        otherwise: defaults for settings that only some optimizers have.
        shared: settings that all optimizers have.

    Raises:
        ConfigError: the optimizer is unknown, or a setting is invalid.
    """
    name, settings = named_optimizer(value)
    check_known(f"optimizer {name!r}", settings, declared_optimizers()[name])
    entry = optimizers()[name]
    check_known(f"optimizer {name!r}", settings, entry.keys)
    defaults = {key: setting for key, setting in (otherwise or {}).items() if key in entry.keys}
    return entry.build(**{**shared, **defaults, **settings})


def check_accepts(value: object, keys: Iterable[str]) -> None:
    """Check that an optimizer has all of these settings.

    Raises:
        ConfigError: a setting is unknown.
    """
    name, _ = named_optimizer(value)
    declared = declared_optimizers()[name]
    for key in keys:
        if key not in (optimizers()[name].keys if declared is None else declared):
            raise ConfigError(f"optimizer {name!r} does not have the setting {key}; remove it")


def betas(value: Sequence[float]) -> tuple[float, float]:
    """Convert a list of two moment decays to a pair.

    Raises:
        ConfigError: the value is not two numbers in [0, 1).
    """
    pair = tuple(value) if isinstance(value, list | tuple) else ()
    fits = [isinstance(b, int | float) and not isinstance(b, bool) and 0 <= b < 1 for b in pair]
    if len(pair) != 2 or not all(fits):
        raise ConfigError(
            f"betas must be two numbers of at least 0 and below 1, got {short_repr(value)}"
        )
    return pair


def _groups(instance: "OptimizerConfig", attribute: "Attribute[Any]", value: object) -> None:
    """Validate a table of settings per pattern of parameter names."""
    specific = [f.name for f in fields(type(instance)) if f.name not in (*SHARED, attribute.name)]
    allowed = [*GROUP_OVERRIDES, *specific]
    if not isinstance(value, Mapping) or not all(isinstance(g, Mapping) for g in value.values()):
        raise ConfigError(
            f"{attribute.name} must map name patterns to tables of settings, such as"
            f" {{'*.bias' = {{learning_rate = 1e-4}}}}, got {short_repr(value)}"
        )
    for pattern, settings in value.items():
        for key in settings:
            if key not in allowed:
                raise ConfigError(
                    f"group {pattern!r} has unknown setting {short_repr(key)};"
                    f" {nearest(str(key), allowed)}"
                )


@frozen(kw_only=True)
class ParameterGroup:
    """Parameters with the same optimizer settings."""

    names: tuple[str, ...]
    config: Any
    """Optimizer settings with the overrides of the group."""
    rate: float
    """Factor on the learning rate."""
    weight_decay: float


@frozen(kw_only=True)
class OptimizerConfig(ABC):
    """Settings of every optimizer: learning rate schedule, weight decay and gradient clipping.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    offloads: ClassVar[bool] = False
    """Whether moments can be offloaded to host memory."""

    learning_rate: float = field(default=3e-4, validator=number())
    """Peak learning rate, reached at the end of the warm-up."""
    warmup_steps: int = field(default=0, validator=integer(minimum=0))
    """Number of linear warm-up steps."""
    decay: str | Mapping[str, Any] = field(default="cosine", validator=decay)
    """Decay after the warm-up: `cosine`, `linear` or `wsd`; or a table of `name` and settings."""
    decay_steps: int | None = field(default=None, validator=integer(optional=True))
    """Step, counted from the start, at which the decay ends. None: no decay."""
    final_ratio: float = field(default=0.1, validator=number(maximum=1.0))
    """Final learning rate as a fraction of `learning_rate`."""
    weight_decay: float = field(default=0.1, validator=number())
    """Decoupled weight decay of matrices; vectors (norm weights and biases) are not decayed."""
    max_grad_norm: float | None = field(
        default=1.0, validator=number(minimum=MIN_DIVISOR, optional=True)
    )
    """Clip the global gradient norm to this. None: no clipping."""
    groups: Mapping[str, Mapping[str, Any]] = field(factory=dict, validator=_groups)
    """Overrides for parameters by name pattern, in which `*` matches anything; the first matching
    pattern applies. A weight_decay set here applies to vectors too."""

    def __attrs_post_init__(self) -> None:
        # Build each group's settings once, so that a bad override fails here.
        for pattern in self.groups:
            self._group_config(pattern)

    @cached_property
    def schedule(self) -> Decay:
        """Decay of the learning rate after the warm-up."""
        return decay_of(self.decay)

    @abstractmethod
    def rules(self, params: "LocalParameters") -> "list[UpdateRule]":
        """Build the rules that update this process's parameters.

        Raises:
            ConfigError: the optimizer cannot update them under this layout.
        """

    def parameter_groups(
        self, params: "LocalParameters", subset: Iterable[str] | None = None
    ) -> list[ParameterGroup]:
        """Group the parameters (`subset`, or all) by the settings that apply to them."""
        names: dict[tuple[str | None, bool], list[str]] = {}
        for name in params.parameters if subset is None else subset:
            setting_name = params.settings_name(name)
            pattern = next((p for p in self.groups if fnmatchcase(setting_name, p)), None)
            overrides = self.groups.get(pattern or "", {})
            # Vectors, such as norm weights and biases, are decayed only if a group asks for it.
            decays = params.parameters[name].dim() > 1 or "weight_decay" in overrides
            names.setdefault((pattern, decays), []).append(name)
        return [
            self._parameter_group(pattern, decays, tuple(group_names))
            for (pattern, decays), group_names in names.items()
        ]

    def _parameter_group(
        self, pattern: str | None, decays: bool, names: tuple[str, ...]
    ) -> ParameterGroup:
        config = self if pattern is None else self._group_config(pattern)
        peak = self.learning_rate
        return ParameterGroup(
            names=names,
            config=config,
            # The schedule is shared, so a group's own peak is a factor on it.
            rate=config.learning_rate / peak if peak else 1.0,
            weight_decay=config.weight_decay if decays else 0.0,
        )

    def _group_config(self, pattern: str) -> "OptimizerConfig":
        try:
            return evolve(self, groups={}, **self.groups[pattern])
        except ConfigError as error:
            raise ConfigError(f"group {pattern!r}: {error}") from error


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Return the learning rate of update number `step`, counted from 0.

    Warm-up: lr·(step+1)/warmup. Then lr·(f + (1-f)·d(t)), where t is the progress from 0 to 1
    between the warm-up and `decay_steps`, d the decay, and f the `final_ratio`.
    """
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.decay_steps is None:
        return peak
    # At least 1, for a decay that ends with the warm-up.
    span = max(config.decay_steps - config.warmup_steps, 1)
    elapsed = min((step - config.warmup_steps) / span, 1.0)
    floor = config.final_ratio
    return peak * (floor + (1.0 - floor) * config.schedule.remaining(elapsed))

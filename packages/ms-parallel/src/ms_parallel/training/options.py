"""Options of a training run, validated on construction."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from attrs import field, fields, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.mixed.devices import Devices, devices_of
from ms_parallel.cluster.partial_layout import PartialLayout
from ms_parallel.engine.settings import (
    BAD_STEPS,
    EXECUTION,
    MODEL,
    OPTIMIZATION,
    OUTPUT,
    RAW_TEXT,
    EngineSettings,
)
from ms_parallel.errors import ConfigError
from ms_parallel.events import OnEvent
from ms_parallel.memory.modes import budget_bytes
from ms_parallel.optim.decays import decay
from ms_parallel.optim.optimizer import betas, check_accepts, optimizer_of
from ms_parallel.pipeline.choice import SEARCH
from ms_parallel.schedules.generators.registry import GENERATORS
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.settings import (
    as_path,
    flag,
    integer,
    nearest,
    number,
    one_of,
    short_repr,
    store_url,
    text,
    valid_path,
)
from ms_parallel.split.precision_choice import MixedPrecision, mixed_precision
from ms_parallel.training.rows_per_rank.setting import RowsPerRank, as_tuple, check_type
from ms_parallel.used_settings import UsedIf

AUTO: Final = "auto"
MAX_EPOCHS = 10**6
MAX_BATCH_ROWS = 1 << 20
"""Sanity limit on the batch size, hundreds of times larger than in the largest runs."""
DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,3})?")


def _model_config(value: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"model_config must be a table of model settings, got {short_repr(value)}"
        )
    return dict(value)


def _text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Parallel = Layout | PartialLayout | Literal["auto"] | None
"""Layout of a run: fixed, with the remaining processes on data, planned, or None: all on data."""


def _layout(value: Parallel | Mapping[str, int | str] | str) -> Parallel:
    if value is None or isinstance(value, Layout | PartialLayout):
        return value
    if value == AUTO:
        return AUTO
    if isinstance(value, str):
        return Layout.parse(value)
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"parallel_config must be a table such as tensor = 2, got {short_repr(value)}"
        )
    return PartialLayout.of(value) or Layout.from_config(value)


def _device(instance: object, attribute: Any, value: Any) -> None:
    if value is None or (isinstance(value, str) and DEVICE.fullmatch(value)):
        return
    raise ConfigError(
        f"{attribute.name} must be 'cpu' or an accelerator such as 'npu' or 'cuda:1', got"
        f" {short_repr(value)}"
    )


def _devices(instance: Any, attribute: Any, value: Devices | None) -> None:
    if value is not None and instance.device is not None:
        raise ConfigError(
            f"device = {short_repr(instance.device)} and [devices] both set the ranks' devices; set"
            " only one"
        )


def _of_each_rank(instance: Any, attribute: Any, value: Any) -> None:
    for limit in value if isinstance(value, tuple) and value else (value,):
        number(minimum=0, optional=limit is value)(instance, attribute, limit)


def _schedule(instance: Any, attribute: Any, value: Any) -> None:
    named = isinstance(value, str) and value in GENERATORS
    if getattr(instance, "microbatch_size", None) == AUTO and not named:
        raise ConfigError(
            "microbatch_size='auto' chooses the number of microbatches, but"
            f" schedule={short_repr(str(value))} is fixed to one number; use a named schedule such"
            " as 1f1b, or set microbatch_size"
        )
    if isinstance(value, Schedule):
        return
    valid_path()(instance, attribute, value)
    if isinstance(value, os.PathLike):
        return
    names = [*GENERATORS, SEARCH]
    if not value.lower().endswith(".csv") and value not in names:
        raise ConfigError(f"schedule is {value!r}; {nearest(value, names)} Or name a CSV file")


def _microbatch(instance: Any, attribute: Any, value: Any) -> None:
    if value != AUTO:
        if isinstance(value, str):
            raise ConfigError(
                f"{attribute.name} must be a number or 'auto', got {short_repr(value)}"
            )
        integer(optional=True)(instance, attribute, value)


@frozen(eq=False)
class _Positional(EngineSettings):
    """Settings that `DistributedTrainer` also accepts by position."""

    model_arch: str = field(converter=_text, validator=valid_path(), metadata=MODEL)
    """`llama`, `mistral`, `qwen2`, `qwen3`, or a folder with a Hugging Face config.json."""
    parallel_config: Parallel = field(default=None, converter=_layout, metadata=MODEL)
    """Layout: a table of axes such as `{"tensor_parallel": 2}`, in which data may be `"rest"` for
    all remaining processes; or `auto`, planned for these machines. None: all processes on data."""
    optimizer: str | Mapping[str, Any] = field(default="AdamW", metadata=OPTIMIZATION)
    """`AdamW`, `Muon`, `SGD`, `Adafactor` or an elementwise class of torch.optim; or a table of its
    `name` and settings, such as momentum = 0.95."""
    mixed_precision: MixedPrecision = field(  # redeclared to make it positional
        default=False, converter=mixed_precision, metadata=EXECUTION
    )


@frozen(kw_only=True, eq=False)
class Options(_Positional):
    """Settings of a training run: the keys of a run file, without dataset and length.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
        LayoutError: the layout is invalid.
    """

    cluster: Path | None = field(
        default=None, converter=as_path, validator=valid_path(optional=True), metadata=MODEL
    )
    """Cluster file for `parallel_config = "auto"`. None: measure these machines."""
    model_config: dict[str, Any] = field(factory=dict, converter=_model_config, metadata=MODEL)
    """Model settings to change, by their names in Hugging Face's config.json."""

    learning_rate: float = field(default=3e-4, validator=number(), metadata=OPTIMIZATION)
    """Peak learning rate, reached after the warm-up."""
    warmup_steps: int | None = field(
        default=None, validator=integer(minimum=0, optional=True), metadata=OPTIMIZATION
    )
    """Steps of linear warm-up. None: 5% of all steps."""
    learning_rate_decay: str | Mapping[str, Any] = field(
        default="cosine", validator=decay, metadata=OPTIMIZATION
    )
    """Learning rate decay until the last step: `cosine`, `linear` or `wsd` (over the last fifth);
    or a table of its `name` and settings, such as share = 0.1."""
    final_learning_rate_ratio: float = field(
        default=0.1, validator=number(maximum=1.0), metadata=OPTIMIZATION
    )
    """Learning rate at the end of the decay, as a fraction of learning_rate."""
    weight_decay: float = field(default=0.1, validator=number(), metadata=OPTIMIZATION)
    """Weight decay of matrices; norms and biases are never decayed."""
    betas: tuple[float, float] = field(default=(0.9, 0.95), converter=betas, metadata=OPTIMIZATION)
    """Betas of AdamW, including the AdamW that Muon uses for vectors."""
    eps: float = field(default=1e-8, validator=number(minimum=1e-30), metadata=OPTIMIZATION)
    """Epsilon of AdamW, including the AdamW that Muon uses for vectors."""
    max_grad_norm: float | None = field(
        default=1.0, validator=number(minimum=1e-30, optional=True), metadata=OPTIMIZATION
    )
    """Clip gradients to this global L2 norm. None: no clipping."""
    batch_size: int = field(
        default=8, validator=integer(maximum=MAX_BATCH_ROWS), metadata=OPTIMIZATION
    )
    """Samples per step over all processes."""
    sequence_length: int = field(default=512, validator=integer(minimum=2), metadata=OPTIMIZATION)
    """Tokens per sample."""
    mtp_weight: float = field(default=0.3, validator=number(), metadata=OPTIMIZATION)
    """Weight of the multi-token-prediction loss, for models with such layers; 0 does not train
    them."""
    z_loss_coefficient: float = field(default=0.0, validator=number(), metadata=OPTIMIZATION)
    """Weight of the z-loss: the mean squared logsumexp of the logits, which keeps them from
    drifting; PaLM used 1e-4."""

    on_nonfinite: Literal["skip", "roll_back", "stop"] = field(
        default="skip", validator=one_of("skip", "roll_back", "stop"), metadata=BAD_STEPS
    )
    """Response to a loss or gradient that is not finite: `skip` the step, `roll_back` to the newest
    complete checkpoint and continue with the next data, or `stop`."""
    on_spike: Literal["ignore", "skip", "roll_back", "stop"] = field(
        default="ignore",
        validator=one_of("ignore", "skip", "roll_back", "stop"),
        metadata=BAD_STEPS,
    )
    """Response to a loss or gradient norm far above the previous ones; `ignore` applies the
    update."""
    spike_factor: float = field(default=12.0, validator=number(minimum=1.0), metadata=BAD_STEPS)
    """Standard deviations above the median from which a number is a spike, estimated from the
    median distance."""
    spike_window: int = field(
        default=100, validator=integer(minimum=4, maximum=10_000), metadata=BAD_STEPS
    )
    """Steps in the median; nothing is a spike before there are this many."""

    microbatch_size: int | Literal["auto"] | None = field(
        default=None, validator=_microbatch, metadata=EXECUTION
    )
    """Samples per forward pass on each data rank; `auto`: as many as fit into memory. None: all at
    once, or with a pipeline the most that leave twice as many microbatches as ranks."""
    memory_gib: float | None = field(
        default=None, validator=number(minimum=1e-6, optional=True), metadata=EXECUTION
    )
    """Memory limit per rank for `microbatch_size = "auto"`, in GiB. None: the device's free
    memory."""
    shares: RowsPerRank = field(
        default="equal", converter=as_tuple, validator=check_type, metadata=EXECUTION
    )
    """Rows of the batch per data rank: `equal`; a list such as [8, 4]; or `measured`, by the speed
    of each rank, repeatedly, which needs sharding `replicate` or `zero1`."""
    schedule: str | Path | Schedule = field(default="1f1b", validator=_schedule, metadata=EXECUTION)
    """Pipeline schedule: a generator's name, a CSV file, a Schedule, or `search`, which measures
    this model on these processes and finds the best."""
    schedule_memory_gib: float | tuple[float, ...] | None = field(
        default=None, converter=as_tuple, validator=_of_each_rank, metadata=EXECUTION
    )
    """Limit on activations per rank for `search`, in GiB, or a list of limits by pipeline rank.
    None: as much as 1F1B needs."""
    ops: str = field(default="torch", validator=one_of("torch", "ms_kernels"), metadata=EXECUTION)
    """Operators of the model: `torch`, or `ms_kernels`, which needs the extra `kernels`."""
    device: str | None = field(default=None, validator=_device, metadata=EXECUTION)
    """`cpu` or an accelerator. None: the machine's best."""
    devices: Devices | None = field(
        default=None, converter=devices_of, validator=_devices, metadata=EXECUTION
    )
    """Devices of different kinds: a table of the ranks on each, such as `cpu = "0-3"` and
    `"npu:0" = "4"`; `npu` alone numbers the devices of a machine. None: `device` on all ranks."""
    timeout_s: float = field(
        default=600.0, validator=number(minimum=1.0, maximum=1e7), metadata=EXECUTION
    )
    """Seconds after which a silent process counts as lost."""

    tokenizer: Path | None = field(
        default=None, converter=as_path, validator=valid_path(optional=True), metadata=RAW_TEXT
    )
    """A `tokenizer.json` for raw text. None: train one."""
    vocab_size: int = field(default=8192, validator=integer(minimum=257), metadata=RAW_TEXT)
    """Vocabulary size of the tokenizer that is trained if none is given."""
    held_out_fraction: float = field(default=0.02, validator=number(below=1.0), metadata=RAW_TEXT)
    """Fraction of documents that is held out for evaluation when raw text is built into shards."""
    text_column: str = field(default="text", validator=text(), metadata=RAW_TEXT)
    """Field of a JSON line that holds the text."""
    dataset_cache: Path | None = field(
        default=None,
        converter=as_path,
        validator=valid_path(optional=True, written="folder"),
        metadata=RAW_TEXT,
    )
    """Folder of cached blocks of a dataset in an object store. None: in `~/.cache/ms-data`."""
    dataset_cache_mib: int = field(default=4096, validator=integer(), metadata=RAW_TEXT)
    """Size of that cache on each machine, in MiB."""

    output_dir: Path = field(
        default=Path("runs/train"),
        converter=as_path,
        validator=valid_path(written="folder"),
        metadata=OUTPUT,
    )
    """Folder for shards, checkpoints, events and the trained model. The same folder resumes."""
    resume: bool = field(default=True, validator=flag, metadata=OUTPUT)
    """Resume from the last complete checkpoint of output_dir; false: fail if output_dir has any."""
    checkpoint_every: int | None = field(
        default=100, validator=integer(optional=True), metadata=OUTPUT
    )
    """Steps between checkpoints. None: only after the last step."""
    async_checkpoints: bool = field(default=False, validator=flag, metadata=OUTPUT)
    """Write checkpoints in a background process per rank; training continues once the state is
    copied."""
    keep_checkpoints: int = field(default=3, validator=integer(), metadata=OUTPUT)
    """Number of checkpoints to keep; with more than one, a damaged one can be passed over."""
    checkpoint_store: str | None = field(default=None, validator=store_url(), metadata=OUTPUT)
    """URL such as `s3://bucket/run`, to which checkpoints are uploaded while training continues,
    and from which a run without newer local checkpoints resumes. None: local folder only."""
    eval_every: int | None = field(default=None, validator=integer(optional=True), metadata=OUTPUT)
    """Steps between evaluations on held-out text. None: only before the first and after the last
    step."""
    eval_batches: int = field(default=8, validator=integer(), metadata=OUTPUT)
    """Maximum number of held-out batches per evaluation."""
    record_every: int | None = field(
        default=None, validator=integer(optional=True), metadata=OUTPUT
    )
    """Steps between recordings of when each pipeline rank computes what. None: never."""
    sample_prompt: str | None = field(default=None, validator=text(optional=True), metadata=OUTPUT)
    """Prompt that the trained model continues at the end. None: no sample."""
    sample_tokens: int = field(default=96, validator=integer(), metadata=OUTPUT)
    """Maximum number of tokens in that sample."""
    log_every: int = field(default=10, validator=integer(), metadata=OUTPUT)
    """Steps between progress lines without a terminal."""
    progress: bool = field(default=True, validator=flag, metadata=OUTPUT)
    """Show progress on standard output of rank 0."""
    on_event: OnEvent | None = field(default=None)
    """Called on rank 0 with each event. None: write JSON lines to output_dir/events.jsonl."""

    def __attrs_post_init__(self) -> None:
        if budget_bytes(self.recompute) is not None and self.schedule == SEARCH:
            raise ConfigError(
                f"recompute={self.recompute!r} selects operators by the schedule's peak memory, but"
                " schedule='search' needs a fixed recomputation; name a schedule, or set"
                " recompute to selective or full"
            )
        shared = [f for f in fields(type(self)) if f.name in ("betas", "eps")]
        changed = [f.name for f in shared if getattr(self, f.name) != f.default]
        check_accepts(self.optimizer, changed)
        optimizer_of(self.optimizer)  # last, as it imports torch, which takes seconds

    @property
    def wanted_device(self) -> Devices | str | None:
        """Device or devices of the ranks, in the form that `connect` accepts."""
        return self.devices or self.device

    @property
    def model_folder(self) -> Path | None:
        """Hugging Face folder that `model_arch` names; None if it is an architecture."""
        folder = Path(self.model_arch)
        return folder if os.path.isfile(folder / "config.json") else None

    @property
    def raw_text_tokenizer(self) -> Path | None:
        """Tokenizer for raw text: the configured one or the model folder's; None to train one."""
        if self.tokenizer is not None or self.model_folder is None:
            return self.tokenizer
        path = self.model_folder / "tokenizer.json"
        return path if os.path.isfile(path) else None


USED_IF = (
    UsedIf("cluster", "with layout='auto'", lambda run: run.parallel_config == AUTO),
    UsedIf(
        "spike_factor spike_window",
        "with on_spike='skip', 'roll_back' or 'stop'",
        lambda run: run.on_spike != "ignore",
    ),
    UsedIf(
        "memory_gib",
        "with microbatch_size='auto' or layout='auto'",
        lambda run: AUTO in (run.microbatch_size, run.parallel_config),
    ),
    UsedIf("schedule_memory_gib", "with schedule='search'", lambda run: run.schedule == SEARCH),
    UsedIf("sample_tokens", "with sample_prompt", lambda run: run.sample_prompt is not None),
    UsedIf(
        "vocab_size",
        "to train a tokenizer, and this run has one",
        lambda run: run.raw_text_tokenizer is None,
    ),
)
"""Conditions of options that another option can make useless. They are checked when a run starts,
as the planner, which fills in a layout and sizes, builds options that have both."""
USED_WITH_RAW_TEXT = UsedIf(
    "tokenizer vocab_size held_out_fraction text_column",
    "to build shards from raw text, and the dataset is shards",
)
"""Refuses settings of raw text where the dataset is shards."""
USED_WITH_A_STORE = UsedIf("dataset_cache dataset_cache_mib", "with shards in an object store")
"""Refuses settings of the cache where the dataset is not shards in an object store."""


@frozen(kw_only=True)
class Length:
    """Length of a run in epochs or steps.

    Raises:
        ConfigError: both or neither are set, or the value is out of range.
    """

    epochs: float | None = field(
        default=None, validator=number(minimum=1e-9, maximum=MAX_EPOCHS, optional=True)
    )
    """Passes over the training text. Batches may straddle epochs."""
    steps: int | None = field(default=None, validator=integer(optional=True))
    """Optimizer steps."""

    def __attrs_post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            both = "both" if self.steps is not None else "neither"
            raise ConfigError(f"set either epochs or steps, got {both}")

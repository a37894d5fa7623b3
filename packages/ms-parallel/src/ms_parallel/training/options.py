"""The options of a training run, validated when they are built."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from attrs import field, fields, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.mixed.devices import Devices, devices_of
from ms_parallel.cluster.rest import RestOnData
from ms_parallel.engine.balance.settings import method
from ms_parallel.engine.optimizer import betas, check_takes, decay, optimizer_of
from ms_parallel.engine.updates.settings import check_loss_scale, loss_scale_of
from ms_parallel.errors import ConfigError
from ms_parallel.events import OnEvent
from ms_parallel.pipeline.choice import SEARCH
from ms_parallel.schedules.generators.registry import GENERATORS
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.settings import a_path, as_path, flag, nearest, number, one_of, shown, text, whole
from ms_parallel.split.context.kinds import BALANCES, KINDS, ContextKind
from ms_parallel.split.context.kinds import Balance as ContextBalance
from ms_parallel.split.data_axis import OFFLOADS, SHARDINGS, Offload, Sharding
from ms_parallel.split.memory.recompute_choice import Recompute, budget_bytes, recompute_setting
from ms_parallel.split.precision_choice import MixedPrecision, mixed_precision
from ms_parallel.training.shares.setting import Shares, as_tuple, check_kind

AUTO: Final = "auto"
MOST_EPOCHS = 10**6
MOST_ROWS = 1 << 20
"""Rows of a batch: hundreds of times what the largest runs take."""
DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,3})?")


def _model_config(value: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"model_config is {value!r}; give a table of model settings")
    return dict(value)


def _text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Parallel = Layout | RestOnData | Literal["auto"] | None
"""How a run is split: as given, with all that is left on data, chosen by a plan, or all on data."""


def _layout(value: Parallel | Mapping[str, int | str] | str) -> Parallel:
    if value is None or isinstance(value, Layout | RestOnData):
        return value
    if value == AUTO:
        return AUTO
    if isinstance(value, str):
        return Layout.parse(value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"parallel_config is {value!r}; give a table such as tensor = 2")
    return RestOnData.of(value) or Layout.from_config(value)


def _device(instance: object, attribute: Any, value: Any) -> None:
    if value is None or (isinstance(value, str) and DEVICE.fullmatch(value)):
        return
    given = f"{attribute.name} is {shown(value)}"
    raise ConfigError(f"{given}; give 'cpu', or an accelerator, such as 'npu' or 'cuda:1'")


def _devices(instance: Any, attribute: Any, value: Devices | None) -> None:
    if value is not None and instance.device is not None:
        raise ConfigError(
            f"device = {shown(instance.device)} and [devices] both say where ranks compute; leave"
            " one of them out"
        )


def _of_each_rank(instance: Any, attribute: Any, value: Any) -> None:
    for each in value if isinstance(value, tuple) and value else (value,):
        number(least=0, optional=each is value)(instance, attribute, each)


def _schedule(instance: Any, attribute: Any, value: Any) -> None:
    named = isinstance(value, str) and value in GENERATORS
    if getattr(instance, "microbatch_size", None) == AUTO and not named:
        raise ConfigError(
            f"microbatch_size='auto' chooses how many microbatches there are, and"
            f" schedule={shown(str(value))} is made for a number of them; name a schedule of any"
            " number, such as 1f1b, or give microbatch_size"
        )
    if isinstance(value, Schedule):
        return
    a_path()(instance, attribute, value)
    if isinstance(value, os.PathLike):
        return
    names = [*GENERATORS, SEARCH]
    if not value.lower().endswith(".csv") and value not in names:
        raise ConfigError(f"schedule is {value!r}; {nearest(value, names)} Or name a CSV file")


def _loss_scale(instance: Any, attribute: Any, value: Any) -> None:
    check_loss_scale(loss_scale_of(value), instance.mixed_precision)


def _microbatch(instance: Any, attribute: Any, value: Any) -> None:
    if value != AUTO:
        if isinstance(value, str):
            raise ConfigError(f"{attribute.name} is {shown(value)}; give a number, or 'auto'")
        whole(optional=True)(instance, attribute, value)


def _recompute(instance: Any, attribute: Any, value: Any) -> None:
    recompute_setting(instance, attribute, value)
    if budget_bytes(value) is not None and instance.schedule == SEARCH:
        raise ConfigError(
            f"recompute={value!r} chooses by what the schedule keeps at once, and schedule='search'"
            " by what blocks keep; name the schedule, or set recompute to selective or full"
        )


def _optimizer(instance: Any, attribute: Any, value: Any) -> None:
    optimizer_of(value)
    some = [f for f in fields(type(instance)) if f.name in ("betas", "epsilon")]
    check_takes(value, [f.name for f in some if getattr(instance, f.name) != f.default])


@frozen(eq=False)
class Essentials:
    """The settings that `DistributedTrainer` takes by place too."""

    model_arch: str = field(converter=_text, validator=a_path())
    """`llama`, `mistral`, `qwen2`, `qwen3`, or a folder with a Hugging Face config.json."""
    parallel_config: Parallel = field(default=None, converter=_layout)
    """Axes such as `{"tensor_parallel": 2}`, of which data may be `"rest"`: what the others leave;
    None puts all processes on `data`, and `auto` plans the layout for these machines."""
    optimizer: str | Mapping[str, Any] = field(default="AdamW", validator=_optimizer)
    """`AdamW`, `Muon`, `SGD`, `Adafactor` or an elementwise class of torch.optim; or a table of the
    `name` and its own settings, such as momentum = 0.95."""
    mixed_precision: MixedPrecision = field(default=False, converter=mixed_precision)
    """Compute in bfloat16 (true) or `float16`; weights, moments and sums stay float32."""


@frozen(kw_only=True, eq=False)
class Options(Essentials):
    """All that a training run is made of but its dataset and length; the keys of a run file.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
        LayoutError: the layout is not one.
    """

    output_dir: Path = field(
        default=Path("runs/train"), converter=as_path, validator=a_path(written="folder")
    )
    """Where shards, checkpoints, events and the trained model go. The same folder resumes."""
    cluster: Path | None = field(default=None, converter=as_path, validator=a_path(optional=True))
    """The cluster file for `parallel_config = "auto"`; None measures these machines."""
    model_config: dict[str, Any] = field(factory=dict, converter=_model_config)
    """Settings of the model to change, by the names of Hugging Face's config.json."""
    sequence_length: int = field(default=512, validator=whole(least=2))
    """Tokens in a sample."""
    batch_size: int = field(default=8, validator=whole(most=MOST_ROWS))
    """Samples in one update, over all processes."""
    microbatch_size: int | Literal["auto"] | None = field(default=None, validator=_microbatch)
    """Samples of one data rank that pass at once; None for all, or with a pipeline for the most
    that leave twice as many microbatches as ranks; `auto` for the most that fit into memory."""
    memory_gib: float | None = field(default=None, validator=number(least=1e-6, optional=True))
    """Most memory of a rank for `microbatch_size = "auto"`; None for what its device has free."""
    learning_rate: float = field(default=3e-4, validator=number())
    """The highest rate, after the warm-up."""
    warmup_steps: int | None = field(default=None, validator=whole(least=0, optional=True))
    """Updates over which the rate rises; None for a twentieth of all."""
    learning_rate_decay: str | Mapping[str, Any] = field(default="cosine", validator=decay)
    """How the rate falls to its end at the last update: `cosine`, `linear` or `wsd`, which falls
    over the last fifth; or a table of the `name` and its settings, such as share = 0.1."""
    final_learning_rate_ratio: float = field(default=0.1, validator=number(most=1.0))
    """Where the decay ends, as a share of learning_rate."""
    weight_decay: float = field(default=0.1, validator=number())
    """Decay of matrices; norms and biases are never decayed."""
    betas: tuple[float, float] = field(default=(0.9, 0.95), converter=betas)
    """Decay of the first and second moment of AdamW, also beside Muon."""
    epsilon: float = field(default=1e-8, validator=number(least=1e-30))
    """Guard of AdamW, also beside Muon, against division by zero."""
    max_grad_norm: float | None = field(default=1.0, validator=number(least=1e-30, optional=True))
    """Gradients of a greater norm are scaled down to it; None never scales."""
    loss_scale: Mapping[str, Any] | None = field(default=None, validator=_loss_scale)
    """How the loss is scaled in float16: a table of initial (65536), growth_interval (2000) and
    hysteresis (1)."""
    audit_every: int | None = field(default=None, validator=whole(optional=True))
    """Steps between audits: the same batch again in float32, compared; None for none."""
    on_nonfinite: Literal["skip", "roll_back", "stop"] = field(
        default="skip", validator=one_of("skip", "roll_back", "stop")
    )
    """What is done where a loss or gradient is not finite: `skip` the step, `roll_back` to the
    newest complete checkpoint and go on with the data that follow, or `stop`."""
    on_spike: Literal["ignore", "skip", "roll_back", "stop"] = field(
        default="ignore", validator=one_of("ignore", "skip", "roll_back", "stop")
    )
    """The same for a loss or gradient norm far above those before, and `ignore`."""
    spike_factor: float = field(default=12.0, validator=number(least=1.0))
    """A number is a spike that lies above the median by so many standard deviations, which are
    measured by the median distance."""
    spike_window: int = field(default=100, validator=whole(least=4, most=10_000))
    """Steps that the median is of; before there are so many nothing is a spike."""
    schedule: str | Path | Schedule = field(default="1f1b", validator=_schedule)
    """How microbatches pass through pipeline stages: a generator's name, a CSV file, a Schedule,
    or `search`, which measures this model on these processes and finds the best."""
    schedule_memory_gib: float | tuple[float, ...] | None = field(
        default=None, converter=as_tuple, validator=_of_each_rank
    )
    """Most memory of activations on a rank for `search`, or a list of that on each pipeline rank;
    None for as much as 1F1B takes."""
    record_every: int | None = field(default=None, validator=whole(optional=True))
    """Steps between recordings of what each pipeline rank computed when; None records nothing."""
    recompute: Recompute = field(default="none", validator=_recompute)
    """What blocks run again in the backward pass instead of keeping it: `none`, `selective` all but
    matrix products and attention, `attention`, `full`; or the most that a rank's blocks may keep,
    such as `8GiB`, by which each block's is chosen."""
    compile: bool = field(default=False, validator=flag)
    """Compile the training of each block with torch.compile; not with tensor, context or expert
    ranks, experts, other recompute than `full`, or schedules that split backwards."""
    sharding: Sharding = field(default="auto", validator=one_of(*SHARDINGS))
    """What data and context ranks share out: `replicate` nothing, `zero1` moments, `zero2` also
    gradients, `zero3` also weights; `auto` weights, or with a pipeline moments."""
    shares: Shares = field(default="equal", converter=as_tuple, validator=check_kind)
    """Rows of the batch that data ranks take: `equal`, `measured` by the speed of each, again and
    again, which needs sharding `replicate` or `zero1`, or the rows of each, such as [8, 4]."""
    offload: Offload = field(default="none", validator=one_of(*OFFLOADS))
    """What lies in the machine's memory and not its device's: `moments` of AdamW, which visit the
    device in an update, `activations` that forwards keep for their backward, or `all`."""
    context_attention: ContextKind = field(default="auto", validator=one_of(*KINDS))
    """How attention sees rows that context ranks share out: `all_gather` of keys and values,
    `ulysses`, `ring`, `ulysses_ring`, or `auto`, which sends least."""
    context_balance: ContextBalance = field(default="balanced", validator=one_of(*BALANCES))
    """How context ranks share out a row: `balanced` by the cost of attention, or `zig-zag`."""
    mtp_weight: float = field(default=0.3, validator=number())
    """Weight of the mean loss of the layers that predict further than the next token, where the
    model has any; 0 leaves them as they are."""
    z_coefficient: float = field(default=0.0, validator=number())
    """Weight of the mean square of the logits' logsumexp over the vocabulary, which is part of the
    loss in training and keeps logits from drifting; 1e-4 in PaLM."""
    balance: str | None = field(default=None, validator=method)
    """How the load of experts is balanced: `step`, a loss by the loads of the update before;
    `sequence`, by those of each document; `bias`, or `none`. None for the model's own way."""
    balance_coefficient: float | None = field(default=None, validator=number(optional=True))
    """Weight of the balance loss, E · sum of f · P; None for config.json's router_aux_loss_coef."""
    balance_bias_rate: float = field(default=1e-3, validator=number())
    """How far `bias` moves the bias of an expert in one update."""
    router_z_coefficient: float = field(default=0.0, validator=number())
    """Weight of the mean square of the routers' logsumexp, which keeps their logits small."""
    ops: str = field(default="torch", validator=one_of("torch", "ms_kernels"))
    """Whose operators the model uses; `ms_kernels` needs the extra `kernels`."""
    device: str | None = field(default=None, validator=_device)
    """`cpu` or an accelerator; None for the machine's best."""
    devices: Devices | None = field(default=None, converter=devices_of, validator=_devices)
    """Where ranks compute on unlike devices, the ranks of each: a table such as `cpu = "0-3"` and
    `"npu:0" = "4"`; `npu` alone numbers those of a machine. None for `device` on all."""
    reproducible: bool = field(default=False, validator=flag)
    """The same weights to the bit on any number of data ranks, however they share out weights and
    whichever stages there are: rows pass one at a time, and are added up in one order."""
    seed: int = field(default=0, validator=whole(least=0, most=2**63 - 1))
    """Seed of the fresh weights and of the order of samples."""
    evaluate_every: int | None = field(default=None, validator=whole(optional=True))
    """Steps between evaluations on held-out text; None for the first and last step alone."""
    evaluate_batches: int = field(default=8, validator=whole())
    """Batches of held-out text in one evaluation, at most."""
    checkpoint_every: int | None = field(default=100, validator=whole(optional=True))
    """Steps between checkpoints; None for the last step alone."""
    async_checkpoints: bool = field(default=False, validator=flag)
    """Write checkpoints in a process of each rank beside the training, which goes on once its part
    of the state is copied."""
    keep_checkpoints: int = field(default=3, validator=whole())
    """Checkpoints that are kept; more than one lets a damaged one be passed over."""
    resume: bool = field(default=True, validator=flag)
    """Go on from the last complete checkpoint of output_dir; False refuses if there is one."""
    hold_out: float = field(default=0.02, validator=number(below=1.0))
    """Share of documents kept for evaluation, when raw text is built into shards."""
    vocab_size: int = field(default=8192, validator=whole(least=257))
    """Tokens of the tokenizer that is trained, when raw text is built without one."""
    tokenizer: Path | None = field(default=None, converter=as_path, validator=a_path(optional=True))
    """A `tokenizer.json` for raw text; None trains one."""
    text_column: str = field(default="text", validator=text())
    """The member of a JSON line that holds the text."""
    sample_prompt: str | None = field(default=None, validator=text(optional=True))
    """Text that the trained model goes on writing at the end; None writes none."""
    sample_tokens: int = field(default=96, validator=whole())
    """Tokens of that sample, at most."""
    log_every: int = field(default=10, validator=whole())
    """Steps between lines of progress where there is no terminal."""
    progress: bool = field(default=True, validator=flag)
    """Show progress on standard output, on rank 0."""
    timeout_s: float = field(default=600.0, validator=number(least=1.0, most=1e7))
    """Seconds after which a silent process counts as lost."""
    on_event: OnEvent | None = field(default=None)
    """Called on rank 0 with each event; None writes JSON lines to output_dir/events.jsonl."""

    @property
    def wanted_device(self) -> Devices | str | None:
        """Where ranks compute, as `connect` takes it."""
        return self.devices or self.device

    @property
    def model_folder(self) -> Path | None:
        """The Hugging Face folder that `model_arch` names, if it is one."""
        folder = Path(self.model_arch)
        return folder if os.path.isfile(folder / "config.json") else None

    @property
    def raw_text_tokenizer(self) -> Path | None:
        """What encodes raw text: as asked for, or the model folder's; None trains one."""
        if self.tokenizer is not None or self.model_folder is None:
            return self.tokenizer
        own = self.model_folder / "tokenizer.json"
        return own if os.path.isfile(own) else None


@frozen(kw_only=True)
class Length:
    """How long a run trains: epochs or steps.

    Raises:
        ConfigError: not exactly one of them is given, or it is out of range.
    """

    epochs: float | None = field(
        default=None, validator=number(least=1e-9, most=MOST_EPOCHS, optional=True)
    )
    """Passes over the training text; batches straddle epochs without a seam."""
    steps: int | None = field(default=None, validator=whole(optional=True))
    """Updates."""

    def __attrs_post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            both = "both" if self.steps is not None else "neither"
            raise ConfigError(f"{both} of epochs and steps given; give one of them")

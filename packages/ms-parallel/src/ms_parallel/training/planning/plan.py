"""Plans a run: chooses the layout and its settings for a cluster."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from attrs import evolve, frozen

from ms_parallel.cluster.device import pick_device
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.errors import ConfigError
from ms_parallel.optim.optimizer import optimizer_of
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.fake_cluster import fake_world, in_process_group
from ms_parallel.planner.free_memory import free_bytes
from ms_parallel.planner.layouts.candidate import Candidate
from ms_parallel.planner.layouts.choice import (
    OBJECTIVES,
    FittingLayout,
    SearchProblem,
    SearchResult,
    choose,
)
from ms_parallel.planner.layouts.enumeration import divisors
from ms_parallel.planner.layouts.measured_times import MeasuredTimes, measurable
from ms_parallel.planner.layouts.passes import DatasheetTimes, TimeModel
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.layouts.variants import SettingChoices
from ms_parallel.planner.memory import predict_memory, row_bytes
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.planner.record.history import History, learn
from ms_parallel.planner.record.plan_file import (
    ExcludedCandidates,
    Objective,
    Plan,
    PlannedConstants,
    PlannedLayout,
    PlannedStep,
)
from ms_parallel.planner.roofline.calibrated import PASSES, Calibration, calibration_of
from ms_parallel.planner.roofline.model_sizes import decoder_sizes
from ms_parallel.planner.roofline.pass_times import RooflineTimes, at_achieved_bandwidth
from ms_parallel.planner.roofline.settings import StepSettings
from ms_parallel.settings import nearest
from ms_parallel.training.engine_setup import (
    check_fit,
    engine_settings,
    first_documents,
    fit_model,
    memory_arguments,
)
from ms_parallel.training.options import MAX_BATCH_ROWS, Options
from ms_parallel.training.planning.conditions import conditions_of, explicit_settings
from ms_parallel.training.planning.counting import (
    divisor_of_shards,
    kept_bytes,
    random_row,
    scale_to_all_shards,
    short_model,
    without_pipeline,
    working_bytes,
)
from ms_parallel.training.planning.subprocesses import (
    PlanArguments,
    RunRecord,
    ask_plan,
    decode_path,
    encode_path,
)

GIB = 1 << 30
MEASURED_WITH = (
    "optimizer",
    "ops",
    "mixed_precision",
    "float8",
    "context_attention",
    "context_balance",
)
"""Engine settings with which layers are measured."""
SET_CHIP = (
    "set chip in the cluster file to the known chip closest to these devices, whose figures are"
    " used where the file has none; or measure them with ms-profile doctor --measure"
)
MEASURED, DATASHEET = "layers measured here", "the cluster's figures"
STATE_BYTES = 16
"""Bytes per parameter of weight, gradient and two moments, in float32."""
HEADROOM = 3
"""Layers are measured on this machine if the model fits this many times into its free memory."""
MAX_SCALE = 1 << 12
"""Largest factor by which the cluster is scaled to find a sufficient size."""


def plan(
    options: Options,
    cluster: Cluster,
    *,
    objective: Objective = "fastest",
    best: int = 5,
    every: bool = False,
    shards: Path | None = None,
    history: History | None = None,
) -> Plan:
    """Find the best layouts of a run on a cluster and predict their step time and memory.

    The plan chooses the layout and the settings in `PLANNED`; those you set explicitly are kept.
    Nothing is started, and the cluster need not exist. A process that has joined a process group
    plans in a subprocess.

    Args:
        options: options of the run; its layout is ignored.
        cluster: cluster to plan for.
        objective: `fastest` step; `cheapest`, the fewest device hours per step; `least-memory` per
            device; or `largest-model`, the most layers that fit.
        best: number of layouts to list.
        every: list layouts that differ only in microbatch size separately.
        shards: dataset, if it exists already; its first rows give the document boundaries.
        history: earlier planned runs, whose errors are reported and used to correct times. None:
            runs in sibling folders of `output_dir`.

    Raises:
        ConfigError: no layout fits (the message names the smallest that would), or `best` is
            below 1.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective is {objective!r}; {nearest(objective, OBJECTIVES)}")
    if best < 1:
        raise ConfigError(f"best must be at least 1 (the number of layouts to list), got {best}")
    if history is None:
        history = learn(options.output_dir.parent)
    if in_process_group():
        return ask_plan(
            PlanArguments(
                run=RunRecord.of(options),
                cluster=cluster,
                objective=objective,
                best=best,
                every=every,
                shards=encode_path(shards),
                history=history,
            )
        )
    explicit = explicit_settings(options)
    size = explicit.get("microbatch_size")
    options = evolve(options, parallel_config=None, microbatch_size=size)
    request = _PlanRequest(options=options, cluster=cluster, shards=shards, explicit=explicit)
    with fake_world(cluster.devices):
        result = _plan(request, objective, best, every)
    if isinstance(result, Plan):
        return _apply_correction(result, history)
    # Searched only after a failure, for the remedy in the message.
    devices = _sufficient_devices(request)
    raise ConfigError(result if devices is None else f"{result}, or {devices} of these")


def plan_in_subprocess(arguments: PlanArguments) -> Plan:
    """Call `plan` with the arguments from `ask_plan`; runs in the subprocess."""
    return plan(
        arguments.run.options,
        arguments.cluster,
        objective=arguments.objective,
        best=arguments.best,
        every=arguments.every,
        shards=decode_path(arguments.shards),
        history=arguments.history,
    )


def _apply_correction(plan: Plan, history: History) -> Plan:
    """Scale the predicted times by the mean error of earlier plans."""
    factor = history.correction(plan.times)
    best = [
        msgspec.structs.replace(
            layout, step=layout.step.times(factor), tokens_per_s=layout.tokens_per_s / factor
        )
        for layout in plan.best
    ]
    errors = [run.error for run in history.of(plan.times)]
    return msgspec.structs.replace(plan, best=best, correction=factor, errors=errors)


def _plan(request: "_PlanRequest", objective: Objective, best: int, every: bool) -> Plan | str:
    """Return a plan, or a message that explains why nothing fits and what would."""
    layers = None
    if objective == "largest-model":
        layers = _most_layers(request)
        request = _with_layers(request, layers)
    options, cluster = request.options, request.cluster
    search_problem = evolve(request.search_problem(objective, best), every=every)
    result = choose(search_problem)
    if not result.best:
        return _too_large(request)
    return Plan(
        conditions=conditions_of(options, cluster.devices),
        objective=objective,
        devices=cluster.devices,
        limit_bytes=search_problem.limit,
        parameters=search_problem.sizes.parameters,
        times=MEASURED if isinstance(search_problem.times, MeasuredTimes) else DATASHEET,
        kept={name: _plain(value) for name, value in request.explicit.items()},
        best=[_planned(layout, options, cluster) for layout in result.best],
        fallen=_excluded(result),
        num_hidden_layers=layers,
        constants=None if cluster.measured else _constants(calibration_of(cluster)),
    )


def _constants(calibration: Calibration) -> PlannedConstants:
    """Describe the constants of a plan, with a remedy if they belong to another chip."""
    remedy = None if calibration.is_exact else SET_CHIP
    return PlannedConstants(chip=calibration.chip, known=calibration.is_exact, remedy=remedy)


@frozen(kw_only=True)
class _PlanRequest:
    """A run to be planned on a cluster."""

    options: Options
    cluster: Cluster
    shards: Path | None
    explicit: Mapping[str, Any]

    def search_problem(
        self, objective: Objective, best: int, limit_bytes: int | None = None
    ) -> SearchProblem:
        """Build the search problem for the layout search."""
        options, cluster = self.options, self.cluster
        if not cluster.measured:
            cluster = at_achieved_bandwidth(cluster, calibration_of(cluster).efficiency)
        config = fit_model(evolve(options, batch_size=MAX_BATCH_ROWS), Layout(), self.shards)
        sizes = ModelSizes.of(config)
        width = 2 if options.mixed_precision else 4
        saved_bytes = self._saved_bytes(config)
        devices = [cluster.devices]
        if objective == "cheapest":
            # Fewer devices may be cheaper; they fill whole nodes or an even part of one.
            devices = [n for n in divisors(cluster.devices) if _fills_nodes(n, cluster)]
        rows = self.explicit.get("microbatch_size")
        if limit_bytes is None and options.memory_gib is not None:
            limit_bytes = min(int(options.memory_gib * GIB), cluster.memory_bytes)
        return SearchProblem(
            sizes=sizes,
            cluster=cluster,
            devices=devices,
            batch_size=options.batch_size,
            width=width,
            moment_bytes=round(saved_bytes(Layout()).moments),
            choices=SettingChoices(fixed=self.explicit, offloads=self._offloads()),
            rows=None if rows is None else [rows],
            check=lambda layout: check_fit(options, layout, config),
            times=self._times(config, sizes),
            message_bytes=options.sequence_length * sizes.hidden * width,
            saved_bytes=lambda candidate: kept_bytes(
                saved_bytes(without_pipeline(candidate.layout))
            ),
            predict=self._predict,
            working=lambda split: working_bytes(split, sizes, options.sequence_length),
            objective=objective,
            best=best,
            limit_bytes=limit_bytes,
        )

    def _offloads(self) -> bool:
        return self.cluster.device != "cpu" and optimizer_of(self.options.optimizer).offloads

    def _times(self, config: Any, sizes: ModelSizes) -> TimeModel:
        options = self.options
        dtype = {True: "bfloat16", "float16": "float16"}.get(options.mixed_precision, "float32")
        datasheet = DatasheetTimes(sizes, self.cluster, options.sequence_length, dtype)
        if not self.cluster.measured:
            return self._calibrated(config, dtype) or datasheet
        small = measurable(config)
        if small is None or not self._can_measure(ModelSizes.of(small[-1])):
            return datasheet
        device = pick_device(self.cluster.device)
        settings = self._settings(evolve(options, microbatch_size=1), Layout())
        engine_options = {name: settings[name] for name in MEASURED_WITH}
        documents = first_documents(options, 1, self.shards)
        batch = random_row(config.vocab_size, options.sequence_length)
        batch |= {} if documents is None else {"documents": documents}
        return MeasuredTimes(small, datasheet, batch, device, engine_options)

    def _calibrated(self, config: Any, dtype: str) -> TimeModel | None:
        """Roofline times with constants calibrated on published runs; None for other models."""
        options = self.options
        try:
            decoder = decoder_sizes(config)
        except ConfigError:
            return None
        operators = "torch_npu" if self.cluster.device == "npu" else "eager"
        by_default = self.cluster.device == "cuda" and config.mixture is None
        if options.compile is True or (options.compile == "auto" and by_default):
            operators = "fused"
        return RooflineTimes(
            sizes=decoder,
            cluster=self.cluster,
            efficiency=calibration_of(self.cluster).efficiency,
            settings=StepSettings(
                sequence=options.sequence_length,
                dtype=dtype,
                # Other recipes are emulated.
                product_dtype="float8" if options.float8 == "rowwise" else None,
                passes=PASSES[operators],
            ),
            expert_layers=() if config.mixture is None else config.mixture.layers,
        )

    def _can_measure(self, sizes: ModelSizes) -> bool:
        """Return whether layers can be measured: the device is local and the model fits."""
        cluster = self.cluster
        is_local = cluster.device == "cpu" or (
            torch.accelerator.is_available()
            and cluster.device == str(torch.accelerator.current_accelerator())
        )
        if not (is_local and cluster.measured):
            return False
        return sizes.parameters * STATE_BYTES * HEADROOM < free_bytes(pick_device(cluster.device))

    def _settings(self, options: Options, layout: Layout) -> dict[str, Any]:
        """Engine settings for counting memory, without a device or compilation."""
        return {**engine_settings(options, layout, 2), "device": "cpu", "compile": False}

    def _saved_bytes(self, config: Any) -> Callable[[Layout], Any]:
        options = self.options
        loss = NextTokenLoss(
            mtp_weight=options.mtp_weight, z_loss_coefficient=options.z_loss_coefficient
        )
        documents = first_documents(options, 1, self.shards)
        small = short_model(config)

        @cache
        def saved_bytes(layout: Layout) -> Any:
            settings = self._settings(evolve(options, microbatch_size=1), layout)
            return row_bytes(
                small,
                layout,
                sequence_length=options.sequence_length,
                documents=documents,
                loss=loss,
                **{**settings, "sharding": "auto", "offload": "none"},
            )

        return saved_bytes

    def _predict(self, candidate: Candidate) -> list[RankMemory]:
        """Predict the memory of each pipeline rank from an engine built on meta tensors.

        Building takes longer with more FSDP shards, so it uses fewer data ranks; the bytes per
        rank are then scaled to all shards.
        """
        factor = divisor_of_shards(candidate)
        layout = evolve(candidate.layout, data=candidate.layout.data // factor)
        # Batch and data ranks shrink by the same factor, so the rows per rank stay the same.
        options = evolve(
            self.options,
            parallel_config=layout,
            batch_size=self.options.batch_size // factor,
            **candidate.settings(),
        )
        memory_settings = memory_arguments(options, layout, self.shards, candidate.split.rows)
        ranks = predict_memory(**{**memory_settings, "device": "cpu", "compile": False})
        return [scale_to_all_shards(rank, candidate, factor) for rank in ranks]


def _fills_nodes(devices: int, cluster: Cluster) -> bool:
    per_node = cluster.devices_per_node
    return devices % per_node == 0 or per_node % devices == 0


def _planned(layout: FittingLayout, options: Options, cluster: Cluster) -> PlannedLayout:
    seconds, devices = layout.seconds, layout.candidate.layout.world_size
    price = cluster.price_per_hour
    return PlannedLayout(
        layout=layout.candidate.axes(),
        settings=layout.candidate.settings(),
        devices=devices,
        step=PlannedStep(
            compute=seconds.compute,
            bubble=seconds.bubble,
            data=seconds.data,
            optimizer=seconds.optimizer,
            total=seconds.all,
        ),
        tokens_per_s=options.batch_size * options.sequence_length / seconds.all,
        memory=list(layout.memory),
        price_per_hour=None if price is None else price * devices,
    )


def _excluded(result: SearchResult) -> list[ExcludedCandidates]:
    reasons = sorted(result.reasons.items(), key=lambda item: -item[1].count)
    return [
        ExcludedCandidates(reason=reason, count=excluded.count, example=excluded.example)
        for reason, excluded in reasons
    ]


def _plain(value: Any) -> int | str:
    return value if isinstance(value, int) else str(value)


def _too_large(request: _PlanRequest) -> str:
    """Explain why nothing fits, with the memory that the smallest layout would need."""
    cluster = request.cluster
    # Without a memory limit, to find the smallest need.
    result = choose(request.search_problem("least-memory", 1, 1 << 60))
    limit = request.search_problem("least-memory", 1).limit
    if not result.best:
        reasons = "; ".join(
            f"{reason}: {excluded.example}" for reason, excluded in result.reasons.items()
        )
        return (
            f"no layout runs {request.options.model_arch} on {cluster.devices} devices: {reasons}"
        )
    smallest = result.best[0]
    needed = smallest.needed_bytes / GIB
    return (
        f"no layout of {request.options.model_arch} fits {cluster.devices} devices with"
        f" {limit / GIB:.3g} GiB usable each: the smallest, {smallest.candidate}, needs"
        f" {needed:.3g} GiB per device; use devices with more memory"
    )


def _sufficient_devices(request: _PlanRequest) -> int | None:
    """Number of devices of this type that suffices; None if none up to the limit does."""
    scale = 2
    while scale <= MAX_SCALE:
        try:
            larger = evolve(request.cluster, nodes=request.cluster.nodes * scale)
        except ConfigError:
            return None
        with fake_world(larger.devices):
            if choose(evolve(request, cluster=larger).search_problem("fastest", 1)).best:
                return larger.devices
        scale *= 2
    return None


def _with_layers(request: _PlanRequest, layers: int) -> _PlanRequest:
    """Return the request for the same model with another number of layers."""
    named = {**request.options.model_config, "num_hidden_layers": layers}
    return evolve(request, options=evolve(request.options, model_config=named))


def _most_layers(request: _PlanRequest) -> int:
    """Find the largest number of layers that fits, at least 1."""

    def fits(layers: int) -> bool:
        return bool(choose(_with_layers(request, layers).search_problem("fastest", 1)).best)

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    # Invariant: `low` layers fit (or `low` is 0), `high` do not.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(1, low)

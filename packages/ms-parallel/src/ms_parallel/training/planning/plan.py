"""Plans a run: chooses its layout and the settings that go with it, for a cluster."""

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
from ms_parallel.engine.optimizer import optimizer_of
from ms_parallel.errors import ConfigError
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.fake_cluster import fake_world, has_met_others
from ms_parallel.planner.free_memory import free_bytes
from ms_parallel.planner.layouts.candidate import Candidate
from ms_parallel.planner.layouts.choice import (
    OBJECTIVES,
    FittingLayout,
    FoundLayouts,
    Question,
    choose,
)
from ms_parallel.planner.layouts.enumeration import divisors
from ms_parallel.planner.layouts.here import HereTimes, measurable
from ms_parallel.planner.layouts.passes import PassTimes, SheetTimes
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.layouts.variants import Choices
from ms_parallel.planner.memory import predict_memory, row_bytes
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.planner.record.history import History, learn
from ms_parallel.planner.record.plan_file import (
    Objective,
    Plan,
    PlannedConstants,
    PlannedLayout,
    PlannedOut,
    PlannedStep,
)
from ms_parallel.planner.roofline.calibrated import PASSES, Calibration, calibration_of
from ms_parallel.planner.roofline.model_sizes import decoder_sizes
from ms_parallel.planner.roofline.pass_times import RooflineTimes, reached
from ms_parallel.planner.roofline.settings import StepSettings
from ms_parallel.settings import nearest
from ms_parallel.training.fitting import (
    check_fit,
    engine_settings,
    first_documents,
    fit_model,
    memory_question,
)
from ms_parallel.training.options import MOST_ROWS, Options
from ms_parallel.training.planning.conditions import conditions_of, kept_settings
from ms_parallel.training.planning.counting import (
    divisor_of_shards,
    kept_bytes,
    of_all_shards,
    rows_of_noise,
    short_model,
    without_pipeline,
    working_bytes,
)
from ms_parallel.training.planning.questions import (
    PlanQuestion,
    ToldRun,
    ask_plan,
    path_told,
    told_path,
)

GIB = 1 << 30
MEASURED_WITH = ("optimizer", "ops", "mixed_precision", "context_attention", "context_balance")
"""Settings of an engine that its layers are measured with."""
ANOTHER_CHIP = (
    "name in the cluster file the known chip that these devices are most like, whose figures count"
    " only where the file gives none; or measure them with ms-parallel doctor --measure"
)
MEASURED, FIGURES = "layers measured here", "the cluster's figures"
STATE_BYTES = 16
"""A weight, its gradient and its two moments."""
ROOM = 3
"""Times that the model has to fit into what is free here, so that its layers are measured."""
MOST_TIMES = 1 << 12
"""How many times the cluster is looked for whose devices would do."""


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
    """Find the best layouts of a run on a cluster, with what is predicted of each.

    A setting of `PLANNED` that the options give, and is not what it is by default, is kept; the
    others are chosen, and so is the layout. Nothing is started, and the cluster need not be there.
    A process that has met others asks another one.

    Args:
        options: of the run; its layout counts for nothing.
        cluster: which it is to run on.
        objective: `fastest` step; `cheapest`, the fewest device hours a step; `least-memory` of a
            device; or `largest-model`, the most layers that fit.
        best: how many layouts to find.
        every: find also those of one layout that differ in the size of microbatches.
        shards: the dataset, if it is there already; rows are packed as its first ones are.
        history: of runs that were planned before; by default those whose folders lie beside the
            run's. Their errors are stated, and times are corrected by them.

    Raises:
        ConfigError: no layout fits, which names the least that would; or `best` is below 1.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective is {objective!r}; {nearest(objective, OBJECTIVES)}")
    if best < 1:
        raise ConfigError(f"best is {best}; give the number of layouts to find, at least 1")
    if history is None:
        history = learn(options.output_dir.parent)
    if has_met_others():
        return ask_plan(
            PlanQuestion(
                run=ToldRun.of(options),
                cluster=cluster,
                objective=objective,
                best=best,
                every=every,
                shards=told_path(shards),
                history=history,
            )
        )
    given = kept_settings(options)
    size = given.get("microbatch_size")
    options = evolve(options, parallel_config=None, microbatch_size=size)
    asked = _Asked(options=options, cluster=cluster, shards=shards, given=given)
    with fake_world(cluster.devices):
        made = _plan(asked, objective, best, every)
    if isinstance(made, Plan):
        return _corrected(made, history)
    more = _more_nodes(asked)
    raise ConfigError(made if more is None else f"{made}, or {more} of these")


def answer(question: PlanQuestion) -> Plan:
    """Answer a question of `ask_plan`, in the other process."""
    return plan(
        question.run.options,
        question.cluster,
        objective=question.objective,
        best=question.best,
        every=question.every,
        shards=path_told(question.shards),
        history=question.history,
    )


def _corrected(plan: Plan, history: History) -> Plan:
    """Correct a plan's times by those of runs that were planned before."""
    factor = history.correction(plan.times)
    best = [
        msgspec.structs.replace(
            each, step=each.step.times(factor), tokens_per_s=each.tokens_per_s / factor
        )
        for each in plan.best
    ]
    errors = [run.error for run in history.of(plan.times)]
    return msgspec.structs.replace(plan, best=best, correction=factor, errors=errors)


def _plan(asked: "_Asked", objective: Objective, best: int, every: bool) -> Plan | str:
    """Make a plan, or say why nothing fits and what would be needed."""
    layers = None
    if objective == "largest-model":
        layers = _most_layers(asked)
        asked = _of_layers(asked, layers)
    options, cluster = asked.options, asked.cluster
    question = evolve(asked.question(objective, best), every=every)
    found = choose(question)
    if not found.best:
        return _too_large(asked)
    return Plan(
        conditions=conditions_of(options, cluster.devices),
        objective=objective,
        devices=cluster.devices,
        limit_bytes=question.limit,
        parameters=question.sizes.parameters,
        times=MEASURED if isinstance(question.times, HereTimes) else FIGURES,
        kept={name: _plain(value) for name, value in asked.given.items()},
        best=[_planned(each, options, cluster) for each in found.best],
        fallen=_fallen(found),
        num_hidden_layers=layers,
        constants=None if cluster.measured else _constants(calibration_of(cluster)),
    )


def _constants(found: Calibration) -> PlannedConstants:
    """Say whose constants a plan is made with, and what to give in place of another chip's."""
    remedy = None if found.known else ANOTHER_CHIP
    return PlannedConstants(chip=found.chip, known=found.known, remedy=remedy)


@frozen(kw_only=True)
class _Asked:
    """A run on a cluster."""

    options: Options
    cluster: Cluster
    shards: Path | None
    given: Mapping[str, Any]

    def question(self, objective: Objective, best: int, limit_bytes: int | None = None) -> Question:
        """Build the question that the search for layouts answers."""
        options, cluster = self.options, self.cluster
        if not cluster.measured:
            cluster = reached(cluster, calibration_of(cluster).efficiency)
        config = fit_model(evolve(options, batch_size=MOST_ROWS), Layout(), self.shards)
        sizes = ModelSizes.of(config)
        width = 2 if options.mixed_precision else 4
        keep = self._keeping(config)
        devices = [cluster.devices]
        if objective == "cheapest":
            devices = [n for n in divisors(cluster.devices) if _whole_nodes(n, cluster)]
        rows = self.given.get("microbatch_size")
        if limit_bytes is None and options.memory_gib is not None:
            limit_bytes = min(int(options.memory_gib * GIB), cluster.memory_bytes)
        return Question(
            sizes=sizes,
            cluster=cluster,
            devices=devices,
            batch_size=options.batch_size,
            width=width,
            moment_bytes=round(keep(Layout()).moments),
            choices=Choices(kept=self.given, offloads=self._offloads()),
            rows=None if rows is None else [rows],
            check=lambda layout: check_fit(options, layout, config),
            times=self._times(config, sizes),
            message_bytes=options.sequence_length * sizes.hidden * width,
            keep=lambda candidate: kept_bytes(keep(without_pipeline(candidate.layout))),
            predict=self._predict,
            working=lambda split: working_bytes(split, sizes, options.sequence_length),
            objective=objective,
            best=best,
            limit_bytes=limit_bytes,
        )

    def _offloads(self) -> bool:
        return self.cluster.device != "cpu" and optimizer_of(self.options.optimizer).offloads

    def _times(self, config: Any, sizes: ModelSizes) -> PassTimes:
        options = self.options
        dtype = {True: "bfloat16", "float16": "float16"}.get(options.mixed_precision, "float32")
        sheet = SheetTimes(sizes, self.cluster, options.sequence_length, dtype)
        if not self.cluster.measured:
            return self._calibrated(config, dtype) or sheet
        small = measurable(config)
        if small is None or not self._is_here(ModelSizes.of(small[-1])):
            return sheet
        device = pick_device(self.cluster.device)
        settings = self._settings(evolve(options, microbatch_size=1), Layout())
        kept = {name: settings[name] for name in MEASURED_WITH}
        documents = first_documents(options, 1, self.shards)
        batch = rows_of_noise(config.vocab_size, options.sequence_length)
        batch |= {} if documents is None else {"documents": documents}
        return HereTimes(small, sheet, batch, device, kept)

    def _calibrated(self, config: Any, dtype: str) -> PassTimes | None:
        """Return times by constants that published runs gave; None for a model of another kind."""
        options = self.options
        try:
            known = decoder_sizes(config)
        except ConfigError:
            return None
        operators = "torch_npu" if self.cluster.device == "npu" else "eager"
        return RooflineTimes(
            sizes=known,
            cluster=self.cluster,
            efficiency=calibration_of(self.cluster).efficiency,
            settings=StepSettings(
                sequence=options.sequence_length,
                dtype=dtype,
                passes=PASSES["fused" if options.compile else operators],
            ),
            expert_layers=() if config.mixture is None else config.mixture.layers,
        )

    def _is_here(self, sizes: ModelSizes) -> bool:
        """Return whether layers are measured: the device is here, and has room for such a model."""
        cluster = self.cluster
        here = cluster.device == "cpu" or (
            torch.accelerator.is_available()
            and cluster.device == str(torch.accelerator.current_accelerator())
        )
        if not (here and cluster.measured):
            return False
        return sizes.parameters * STATE_BYTES * ROOM < free_bytes(pick_device(cluster.device))

    def _settings(self, options: Options, layout: Layout) -> dict[str, Any]:
        """Collect the settings of an engine that is built without memory, on whatever device."""
        return {**engine_settings(options, layout, 2), "device": "cpu", "compile": False}

    def _keeping(self, config: Any) -> Callable[[Layout], Any]:
        options = self.options
        loss = NextTokenLoss(mtp_weight=options.mtp_weight, z_coefficient=options.z_coefficient)
        documents = first_documents(options, 1, self.shards)
        small = short_model(config)

        @cache
        def keep(layout: Layout) -> Any:
            settings = self._settings(evolve(options, microbatch_size=1), layout)
            return row_bytes(
                small,
                layout,
                sequence_length=options.sequence_length,
                documents=documents,
                loss=loss,
                **{**settings, "sharding": "auto", "offload": "none"},
            )

        return keep

    def _predict(self, candidate: Candidate) -> list[RankMemory]:
        """Predict what engines count, with fewer data ranks if very many, as FSDP's setup grows.

        Each rank's share of weights is then so many times larger, and is put right here.
        """
        fewer = divisor_of_shards(candidate)
        layout = evolve(candidate.layout, data=candidate.layout.data // fewer)
        options = evolve(
            self.options,
            parallel_config=layout,
            batch_size=self.options.batch_size // fewer,
            **candidate.settings(),
        )
        question = memory_question(options, layout, self.shards, candidate.split.rows)
        found = predict_memory(**{**question, "device": "cpu", "compile": False})
        return [of_all_shards(rank, candidate, fewer) for rank in found]


def _whole_nodes(devices: int, cluster: Cluster) -> bool:
    each = cluster.devices_per_node
    return devices % each == 0 or each % devices == 0


def _planned(chosen: FittingLayout, options: Options, cluster: Cluster) -> PlannedLayout:
    seconds, devices = chosen.seconds, chosen.candidate.layout.world_size
    price = cluster.price_per_hour
    return PlannedLayout(
        layout=chosen.candidate.axes(),
        settings=chosen.candidate.settings(),
        devices=devices,
        step=PlannedStep(
            compute=seconds.compute,
            bubble=seconds.bubble,
            data=seconds.data,
            optimizer=seconds.optimizer,
            total=seconds.all,
        ),
        tokens_per_s=options.batch_size * options.sequence_length / seconds.all,
        memory=list(chosen.memory),
        price_per_hour=None if price is None else price * devices,
    )


def _fallen(found: FoundLayouts) -> list[PlannedOut]:
    every = sorted(found.reasons.items(), key=lambda item: -item[1].count)
    return [
        PlannedOut(reason=reason, count=each.count, example=each.example) for reason, each in every
    ]


def _plain(value: Any) -> int | str:
    return value if isinstance(value, int) else str(value)


def _too_large(asked: _Asked) -> str:
    """Say why nothing fits, and what the least layout would need."""
    cluster = asked.cluster
    found = choose(asked.question("least-memory", 1, 1 << 60))
    limit = asked.question("least-memory", 1).limit
    if not found.best:
        why = "; ".join(f"{reason}: {each.example}" for reason, each in found.reasons.items())
        return f"no layout runs {asked.options.model_arch} on {cluster.devices} devices: {why}"
    least = found.best[0]
    needed = least.needed_bytes / GIB
    return (
        f"no layout of {asked.options.model_arch} fits {cluster.devices} devices of"
        f" {limit / GIB:.3g} GiB that may be taken: the least, {least.candidate}, needs"
        f" {needed:.3g} GiB a device; take devices of more memory"
    )


def _more_nodes(asked: _Asked) -> int | None:
    """Find how many devices of this kind would do; None if no number that is tried."""
    times = 2
    while times <= MOST_TIMES:
        try:
            larger = evolve(asked.cluster, nodes=asked.cluster.nodes * times)
        except ConfigError:
            return None
        with fake_world(larger.devices):
            if choose(evolve(asked, cluster=larger).question("fastest", 1)).best:
                return larger.devices
        times *= 2
    return None


def _of_layers(asked: _Asked, layers: int) -> _Asked:
    """Ask the same for a model of so many layers."""
    named = {**asked.options.model_config, "num_hidden_layers": layers}
    return evolve(asked, options=evolve(asked.options, model_config=named))


def _most_layers(asked: _Asked) -> int:
    """Find as many layers as fit, at least one."""

    def fits(layers: int) -> bool:
        return bool(choose(_of_layers(asked, layers).question("fastest", 1)).best)

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(1, low)

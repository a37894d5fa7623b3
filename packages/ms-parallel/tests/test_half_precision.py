"""float16 with a scale of the loss, and the audit of what a low precision computes."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from half_precision_runs import PLANTED, overflowing, plant
from processes import run_processes
from runs import FAMILIES, VARIANTS, build, global_batch, train

from ms_parallel import ConfigError, Engine, LossScale, NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.updates.audit import AlarmLevels, AuditResult, GroupComparison
from ms_parallel.engine.updates.auditor import group_of
from ms_parallel.engine.updates.loss_scale import LossScaler
from ms_parallel.training.audit_page import draw_audits
from ms_parallel.training.options import Options

RUNS = Path(__file__).parent / "half_precision_runs.py"
SETTINGS = VARIANTS["tied grouped"]
STEPS = 9
WIDER = VARIANTS["tied"] | {"num_hidden_layers": 4}
"""Heads and layers for four processes along either axis."""
TWO, FOUR = ("data=2", "tensor=2", "pipeline=2"), ("data=4", "tensor=4", "pipeline=4")


@pytest.fixture(scope="module")
def groups() -> Groups:
    """A group of this process alone."""
    return connect(Layout(), device="cpu")


def course(steps: int) -> list[tuple[float, bool]]:
    """The scale of each step, and whether it was skipped, as the rule has it."""
    scale, good, found = 4096.0, 0, []
    for step in range(steps):
        found.append((scale, step in PLANTED))
        good = 0 if step in PLANTED else good + 1
        if step in PLANTED:
            scale /= 2
        elif good == 3:
            scale, good = scale * 2, 0
    return found


@cache
def courses(count: int, wider: bool) -> dict[str, list[dict[str, Any]]]:
    """The courses of all layouts of so many processes, by layout and the process that overflows."""
    layouts = {1: ("data=1",), 2: TWO, 4: FOUR}[count]
    settings = WIDER if wider else SETTINGS
    jobs = [
        {"layout": layout, "settings": settings, "rank": rank, "steps": STEPS}
        for layout in layouts
        for rank in ({0, count - 1} if layout.startswith("pipeline") else {count - 1})
    ]
    of_ranks = run_processes(count, RUNS, "courses", jobs=jobs)
    return {
        f"{job['layout']} {job['rank']}": [found[index] for found in of_ranks]
        for index, job in enumerate(jobs)
    }


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_overflow_in_one_process_gives_the_same_course_under_every_layout(count: int) -> None:
    """Scale, skips, rate and moments are one process's, whichever stage or part overflows.

    Weights are one process's up to the order of sums in float16, 2^-11 of each step's update.
    """
    (one,) = courses(1, count == 4)["data=1 0"]
    assert [(scale, skipped == "overflow") for scale, skipped, _ in one["course"]] == course(STEPS)
    assert one["kept"] == [step in PLANTED for step in range(STEPS)]
    assert (one["taken"], one["skipped"]) == (STEPS - len(PLANTED), len(PLANTED))
    for name, of_ranks in courses(count, count == 4).items():
        for found in of_ranks:
            for what in ("course", "kept", "taken", "skipped"):
                assert found[what] == one[what], (name, what)
            assert found["losses"] == pytest.approx(one["losses"], rel=2e-3), name
            for weight, norm in found["weights"].items():
                assert norm == pytest.approx(one["weights"][weight], rel=2e-3), (name, weight)


def test_a_skipped_update_moves_neither_schedule_nor_moments(groups: Groups) -> None:
    """The rate of the next update is that which the skipped one would have had."""
    engine = build({}, groups, mixed_precision="float16")
    overflowing(engine, (1,))
    updates = [engine.step(global_batch(step), NextTokenLoss()) for step in range(3)]
    assert [update.skipped for update in updates] == [None, "overflow", None]
    assert updates[1].learning_rate == updates[2].learning_rate > updates[0].learning_rate
    assert updates[2].loss_scale == updates[1].loss_scale / 2  # type: ignore[operator]
    assert engine.step_count == 3


def test_the_scale_comes_back_from_a_checkpoint(groups: Groups) -> None:
    """Its factor and counts, exactly; a run without a scale leaves the first one as it is."""
    engine = build({}, groups, mixed_precision="float16", loss_scale={"growth_interval": 2})
    overflowing(engine, (1,))
    train(engine, 3)
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    other = build({}, groups, mixed_precision="float16", loss_scale={"growth_interval": 2}, seed=3)
    other.load_state_dict(state)
    for each in (engine, other):
        assert (each.scaler.factor, each.scaler.good, each.scaler.skipped) == (2.0**15, 1, 1)
    plain = build({}, groups)
    other.load_state_dict(plain.state_dict())
    assert other.scaler.factor == 2.0**15


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_every_gradient_carries_the_scale(groups: Groups, family: str) -> None:
    """Those of balance and z-losses too: the norm is float32's for a large scale and a small one.

    One rounding to float16 is 2^-11; a router that chooses otherwise moves a token's share.
    """
    options = {"router_z_loss_coefficient": 0.1, "balance_coefficient": 0.5, "balance": "sequence"}
    norms = [
        build(FAMILIES[family], groups, **options, **more)
        .step(global_batch(0), NextTokenLoss(z_loss_coefficient=0.01))
        .grad_norm
        for more in (
            {},
            {"mixed_precision": "float16", "loss_scale": {"initial": 16}},
            {"mixed_precision": "float16", "loss_scale": {"initial": 16384}},
        )
    ]
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=5e-3)


def test_float16_trains_as_float32(groups: Groups) -> None:
    """Twenty steps: losses within 1%, and they fall."""
    plain, _ = train(build(SETTINGS, groups), 20)
    half, _ = train(build(SETTINGS, groups, mixed_precision="float16"), 20)
    assert half == pytest.approx(plain, rel=0.01)
    assert half[-1] < 0.8 * half[0]


def test_the_scale_halves_doubles_and_waits() -> None:
    """After `hysteresis` overflows, after `growth_interval` good updates, never below 1."""
    scaler = LossScaler(LossScale(initial=4.0, growth_interval=2, hysteresis=2))
    factors = []
    for overflow in (True, True, False, False, True, True, True, True, True, True):
        scaler.adjust(overflow=overflow)
        factors.append(scaler.factor)
    assert factors == [4, 2, 2, 4, 4, 2, 2, 1, 1, 1]
    assert not scaler.may_overflow(1.0)
    assert not LossScaler(LossScale()).may_overflow(math.nan)
    assert scaler.skipped == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "float8"}, "mixed_precision must be true .bfloat16., false"),
        ({"mixed_precision": True, "loss_scale": {}}, "loss_scale is only used with float16"),
        (
            {"mixed_precision": "float16", "loss_scale": {"initial": 3}},
            "initial must be a power of two",
        ),
        ({"mixed_precision": "float16", "loss_scale": {"start": 4}}, "unknown setting 'start'"),
        ({"mixed_precision": "float16", "loss_scale": 4}, "loss_scale must be a table"),
        ({"audit_every": 0}, "audit_every must be an integer of at least 1, got 0"),
    ],
)
def test_settings_of_precision_that_cannot_be_used_are_named(
    groups: Groups, options: dict[str, Any], message: str
) -> None:
    """One line, from an engine and from a run."""
    with pytest.raises(ConfigError, match=message):
        build({}, groups, **options)
    with pytest.raises(ConfigError, match=message):
        Options(model_arch="llama", **options)


LAYOUTS = {1: ("data=1",), 2: TWO, 4: ("data=2,tensor=2", "data=2,pipeline=2")}


def test_gradients_that_are_put_off_are_summed_in_float32() -> None:
    """However weights are sharded, and where the first microbatch is the last."""
    jobs = [
        {
            "layout": "data=2,pipeline=2",
            "microbatch_size": size,
            "options": {"schedule": schedule, "sharding": sharding},
        }
        for sharding, size in (("zero1", 1), ("zero2", 2), ("zero3", 1), ("zero1", 4))
        for schedule in ("1f1b", "zb-h1")
    ]
    found = run_processes(4, RUNS, "norms", jobs=jobs)[0]
    for whole, split in zip(found[::2], found[1::2], strict=True):
        # bfloat16 has 8 bits: sums of products in another order differ in the last one.
        assert split == pytest.approx(whole, rel=2**-8)


@pytest.mark.parametrize("count", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_auditor_computes_what_float32_does(count: int) -> None:
    """Its loss is a float32 engine's on the same weights and batch, and raises no alarm."""
    jobs = [{"layout": layout, "settings": SETTINGS} for layout in LAYOUTS[count]]
    of_ranks = run_processes(count, RUNS, "audits", jobs=jobs)
    assert all(found == of_ranks[0] for found in of_ranks)
    for found in of_ranks[0]:
        assert found["loss_float32"] == pytest.approx(found["loss"], rel=1e-6)
        assert found["alarms"] == []
        assert 0 < found["difference"] < 1e-3


@pytest.mark.parametrize("count", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_a_matrix_that_is_wrong_by_one_percent_raises_the_alarm(count: int, factor: float) -> None:
    """In one process of two, or one data rank of two, where it moves half of the tokens.

    One process of `data=2,tensor=2` has half of a matrix and of the rows: 1% of a quarter of the
    tokens is a gain of 0.0025, below the level of float16.
    """
    shared = {"settings": SETTINGS, "factor": factor, "whole": count == 4}
    jobs = [{"layout": layout, **shared} for layout in LAYOUTS[count]]
    for found in run_processes(count, RUNS, "audits", jobs=jobs)[0]:
        assert found["alarms"], found


def test_an_audit_is_alarmed_by_what_is_wrong_and_not_by_what_is_small() -> None:
    """Error, gain and loss have a level each; a group that is nearly zero raises none."""
    levels = AlarmLevels(loss=1e-3, error=0.02, gain=0.003)
    fine = GroupComparison(error=0.01, gain=0.001, share=0.5)

    def alarms(loss: float = 2.0, **group: float) -> tuple[str, ...]:
        wrong = GroupComparison(**{"error": 0.0, "gain": 0.0, "share": 0.5, **group})
        groups = {"fine": fine, "wrong": wrong}
        return AuditResult(loss=loss, loss_float32=2.0, groups=groups, levels=levels).alarms

    assert alarms() == ()
    assert alarms(error=0.03) == alarms(gain=-0.004) == alarms(gain=math.nan) == ("wrong",)
    assert alarms(error=1.0, share=1e-4) == ()
    assert alarms(loss=2.01) == alarms(loss=math.nan) == ("loss",)


def test_groups_are_halves_of_layers_and_modules_outside_of_them() -> None:
    """Whatever stage holds them, and in a module of a user's own."""
    assert group_of("model.layers.3.mlp.experts.down_proj") == "model.layers.3.mlp"
    assert group_of("model.layers.3.input_layernorm.weight") == "model.layers.3.input_layernorm"
    assert group_of("model.embed_tokens.weight") == "model.embed_tokens"
    assert group_of("scale") == "scale"


def test_audits_are_drawn_with_their_alarms(groups: Groups, tmp_path: Path) -> None:
    """One page: a cell for each group and audit, the alarms in words, no script."""
    engine = build({}, groups, mixed_precision="float16", audit_every=1)
    audits = {1: engine.step(global_batch(0), NextTokenLoss()).audit}
    plant(engine, lambda stage: stage.model.layers["1"].mlp.up_proj, lambda output: output * 1.05)
    audits[2] = engine.step(global_batch(1), NextTokenLoss()).audit
    page = draw_audits({step: audit for step, audit in audits.items() if audit})
    assert "2 audits, 1 with an alarm" in page
    assert page.count("<rect") == 2 * len(audits[1].groups)  # type: ignore[union-attr]
    assert "model.layers.1.mlp" in page
    assert "<script" not in page


def test_what_cannot_be_audited_is_refused(groups: Groups) -> None:
    """A module of one's own, before it is taken over."""
    with pytest.raises(ConfigError, match="audit_every is not supported for a module of your own"):
        Engine(torch.nn.Linear(2, 2), groups=groups, audit_every=5)

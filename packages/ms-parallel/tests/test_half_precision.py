"""float16 with loss scaling, and audits of low-precision computations."""

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
from ms_parallel.engine.audit import AlarmLevels, AuditResult, GroupComparison
from ms_parallel.engine.auditor import group_of
from ms_parallel.optim.loss_scale import LossScaler
from ms_parallel.training.audit_page import draw_audits
from ms_parallel.training.options import Options

RUNS = Path(__file__).parent / "half_precision_runs.py"
SETTINGS = VARIANTS["tied grouped"]
STEPS = 9
WIDER = VARIANTS["tied"] | {"num_hidden_layers": 4}
"""Enough heads and layers for four processes along either axis."""
TWO, FOUR = ("data=2", "tensor=2", "pipeline=2"), ("data=4", "tensor=4", "pipeline=4")


@pytest.fixture(scope="module")
def groups() -> Groups:
    """Groups of a single process."""
    return connect(Layout(), device="cpu")


def course(steps: int) -> list[tuple[float, bool]]:
    """Expected loss scale of each step, and whether it is skipped."""
    scale, good_steps, expected = 4096.0, 0, []
    for step in range(steps):
        expected.append((scale, step in PLANTED))
        good_steps = 0 if step in PLANTED else good_steps + 1
        if step in PLANTED:
            scale /= 2
        elif good_steps == 3:
            scale, good_steps = scale * 2, 0
    return expected


@cache
def courses(count: int, wider: bool) -> dict[str, list[dict[str, Any]]]:
    """Results of all layouts of `count` processes, by layout and the rank that overflows."""
    layouts = {1: ("data=1",), 2: TWO, 4: FOUR}[count]
    settings = WIDER if wider else SETTINGS
    jobs = [
        {"layout": layout, "settings": settings, "rank": rank, "steps": STEPS}
        for layout in layouts
        for rank in ({0, count - 1} if layout.startswith("pipeline") else {count - 1})
    ]
    ranks = run_processes(count, RUNS, "courses", jobs=jobs)
    return {
        f"{job['layout']} {job['rank']}": [results[index] for results in ranks]
        for index, job in enumerate(jobs)
    }


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_overflow_in_one_process_has_the_same_effect_under_every_layout(count: int) -> None:
    """Scale, skips, rate and moments equal one process's for an overflow on any rank.

    Weights are equal up to the order of float16 sums, 2^-11 of each update.
    """
    (single,) = courses(1, count == 4)["data=1 0"]
    assert [(scale, skip == "overflow") for scale, skip, _ in single["course"]] == course(STEPS)
    assert single["unchanged"] == [step in PLANTED for step in range(STEPS)]
    assert (single["updates"], single["skipped"]) == (STEPS - len(PLANTED), len(PLANTED))
    for name, ranks in courses(count, count == 4).items():
        for result in ranks:
            for key in ("course", "unchanged", "updates", "skipped"):
                assert result[key] == single[key], (name, key)
            assert result["losses"] == pytest.approx(single["losses"], rel=2e-3), name
            for weight, norm in result["weights"].items():
                assert norm == pytest.approx(single["weights"][weight], rel=2e-3), (name, weight)


def test_a_skipped_update_changes_neither_schedule_nor_moments(groups: Groups) -> None:
    """The next update has the learning rate of the skipped one."""
    engine = build({}, groups, mixed_precision="float16")
    overflowing(engine, (1,))
    updates = [engine.step(global_batch(step), NextTokenLoss()) for step in range(3)]
    assert [update.skipped for update in updates] == [None, "overflow", None]
    assert updates[1].learning_rate == updates[2].learning_rate > updates[0].learning_rate
    assert updates[2].loss_scale == updates[1].loss_scale / 2  # type: ignore[operator]
    assert engine.step_count == 3


def test_the_loss_scale_is_restored_from_a_checkpoint(groups: Groups) -> None:
    """Factor and counters, exactly; a checkpoint without a scale leaves them unchanged."""
    engine = build({}, groups, mixed_precision="float16", loss_scale={"growth_interval": 2})
    overflowing(engine, (1,))
    train(engine, 3)
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    other = build({}, groups, mixed_precision="float16", loss_scale={"growth_interval": 2}, seed=3)
    other.load_state_dict(state)
    for scaled in (engine, other):
        assert (scaled.scaler.factor, scaled.scaler.good, scaled.scaler.skipped) == (2.0**15, 1, 1)
    plain = build({}, groups)
    other.load_state_dict(plain.state_dict())
    assert other.scaler.factor == 2.0**15


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_every_gradient_is_scaled(groups: Groups, family: str) -> None:
    """With balance and z-losses, norms for a large and a small scale equal float32's.

    One rounding to float16 is 2^-11; a router that chooses differently moves a token's share.
    """
    options = {"router_z_loss_coefficient": 0.1, "balance_coefficient": 0.5, "balance": "sequence"}
    norms = [
        build(FAMILIES[family], groups, **options, **precision)
        .step(global_batch(0), NextTokenLoss(z_loss_coefficient=0.01))
        .grad_norm
        for precision in (
            {},
            {"mixed_precision": "float16", "loss_scale": {"initial": 16}},
            {"mixed_precision": "float16", "loss_scale": {"initial": 16384}},
        )
    ]
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=5e-3)


def test_float16_trains_as_float32(groups: Groups) -> None:
    """Losses of twenty steps are within 1% and fall."""
    plain, _ = train(build(SETTINGS, groups), 20)
    half, _ = train(build(SETTINGS, groups, mixed_precision="float16"), 20)
    assert half == pytest.approx(plain, rel=0.01)
    assert half[-1] < 0.8 * half[0]


def test_the_scale_follows_overflows_and_good_updates() -> None:
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
def test_invalid_precision_settings_are_named(
    groups: Groups, options: dict[str, Any], message: str
) -> None:
    """With one line, from an engine and from run options."""
    with pytest.raises(ConfigError, match=message):
        build({}, groups, **options)
    with pytest.raises(ConfigError, match=message):
        Options(model_arch="llama", **options)


LAYOUTS = {1: ("data=1",), 2: TWO, 4: ("data=2,tensor=2", "data=2,pipeline=2")}


def test_deferred_weight_gradients_are_summed_in_float32() -> None:
    """For all shardings, and if the first microbatch is the last."""
    jobs = [
        {
            "layout": "data=2,pipeline=2",
            "microbatch_size": size,
            "options": {"schedule": schedule, "sharding": sharding},
        }
        for sharding, size in (("zero1", 1), ("zero2", 2), ("zero3", 1), ("zero1", 4))
        for schedule in ("1f1b", "zb-h1")
    ]
    norms = run_processes(4, RUNS, "norms", jobs=jobs)[0]
    for full_backward, split_backward in zip(norms[::2], norms[1::2], strict=True):
        # bfloat16 has 8 bits: sums of products in a different order differ in the last one.
        assert split_backward == pytest.approx(full_backward, rel=2**-8)


@pytest.mark.parametrize("count", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_audit_computes_the_float32_loss(count: int) -> None:
    """Its loss equals a float32 engine's for the same weights and batch, without an alarm."""
    jobs = [{"layout": layout, "settings": SETTINGS} for layout in LAYOUTS[count]]
    ranks = run_processes(count, RUNS, "audits", jobs=jobs)
    assert all(results == ranks[0] for results in ranks)
    for audit in ranks[0]:
        assert audit["loss_float32"] == pytest.approx(audit["loss"], rel=1e-6)
        assert audit["alarms"] == []
        assert 0 < audit["difference"] < 1e-3


@pytest.mark.parametrize("count", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("factor", [1.01, pytest.param(0.99, marks=pytest.mark.slow)])
def test_a_matrix_that_is_wrong_by_one_percent_raises_an_alarm(count: int, factor: float) -> None:
    """In a single process of two, or a single data rank of two, which affects half of the tokens.

    A process of `data=2,tensor=2` has half of a matrix and half of the rows: 1% of a quarter of the
    tokens is a gain of 0.0025, below the threshold of float16.
    """
    shared = {"settings": SETTINGS, "factor": factor, "whole": count == 4}
    jobs = [{"layout": layout, **shared} for layout in LAYOUTS[count]]
    for audit in run_processes(count, RUNS, "audits", jobs=jobs)[0]:
        assert audit["alarms"], audit


def test_an_audit_raises_alarms_above_its_thresholds() -> None:
    """Error, gain and loss have thresholds; a group with almost no gradient raises no alarm."""
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


def test_audit_groups_are_layer_halves_and_other_modules() -> None:
    """Independent of stages, also for a custom module."""
    assert group_of("model.layers.3.mlp.experts.down_proj") == "model.layers.3.mlp"
    assert group_of("model.layers.3.input_layernorm.weight") == "model.layers.3.input_layernorm"
    assert group_of("model.embed_tokens.weight") == "model.embed_tokens"
    assert group_of("scale") == "scale"


def test_audits_are_drawn_with_their_alarms(groups: Groups, tmp_path: Path) -> None:
    """A page with a cell per group and audit, the alarms as text, and no script."""
    engine = build({}, groups, mixed_precision="float16", audit_every=1)
    audits = {1: engine.step(global_batch(0), NextTokenLoss()).audit}
    plant(engine, lambda stage: stage.model.layers["1"].mlp.up_proj, lambda output: output * 1.05)
    audits[2] = engine.step(global_batch(1), NextTokenLoss()).audit
    page = draw_audits({step: audit for step, audit in audits.items() if audit})
    assert "2 audits, 1 with an alarm" in page
    assert page.count("<rect") == 2 * len(audits[1].groups)  # type: ignore[union-attr]
    assert "model.layers.1.mlp" in page
    assert "<script" not in page


def test_an_audit_of_a_custom_module_is_refused(groups: Groups) -> None:
    """A custom module, before it is modified."""
    with pytest.raises(ConfigError, match="audit_every is not supported for a module of your own"):
        Engine(torch.nn.Linear(2, 2), groups=groups, audit_every=5)

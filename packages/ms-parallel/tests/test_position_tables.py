"""Position tables stay float32 for any compute dtype, and rotations round once."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from runs import FAMILIES, VOCABULARY, build, global_batch, local_rows, tiny
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers_models import FAMILIES as HF_FAMILIES
from transformers_models import SIZES

import ms_kernels
from ms_parallel import Engine, NextTokenLoss, operators
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.models import TransformersModel
from ms_parallel.models.positions.tables import rotary_tables

FILE = Path(__file__)
OPS: dict[str, Any] = {"torch": operators, "ms_kernels": ms_kernels}
NATIVE = {
    "llama": {},
    "gemma3_text": {"model_type": "gemma3_text", "sliding_window": 5, "sliding_layers": [0]},
    **{name: FAMILIES[name] for name in ("qwen3", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe")},
}
TRANSFORMERS = ("llama", "qwen3_5_text", "gemma2", "glm4", "gpt_oss", "phi3", "olmo2", "smollm3")
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Maximum relative error of rounding to nearest: half a unit in the last place."""


class RecordingOps:
    """Operators that record the inputs of rotary and attention."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.tables: list[Tensor] = []
        self.rotated: list[tuple[Tensor, Tensor]] = []
        """Queries before and after each rotation, (B, S, heads, D)."""
        self.attended: list[tuple[Tensor, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
        """Record the tables, and the queries before and after rotation."""
        self.tables += [cos, sin]
        rotated = self.ops.rotary(q, k, cos, sin, **options)
        self.rotated.append((q.detach(), rotated[0].detach()))
        return rotated

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Record queries and keys."""
        self.attended.append((q.detach(), k.detach()))
        return self.ops.attention(q, k, v, **options)


def is_rounded(table: Tensor) -> bool:
    """Whether all float32 values fit bfloat16, which cosines of many positions do not."""
    return bool((table == table.bfloat16().float()).all())


def tables_of(engine: Engine, recorded: RecordingOps) -> list[Tensor]:
    """Tables in the next update, from the operator and from transformers' rotary modules."""
    tables = recorded.tables
    tables.clear()

    def record(_: Any, __: Any, output: Any) -> None:
        tables.extend(output if isinstance(output, tuple) else (output,))

    for stage in engine.stages.values():
        for name, module in stage.named_modules():
            if name.endswith("rotary_emb"):
                module.register_forward_hook(record)
    engine.step(local_rows(global_batch(0), engine.groups), NextTokenLoss())
    return tables


def document(family: str) -> dict[str, Any]:
    """Config of a tiny model that transformers builds."""
    config = CONFIG_MAPPING[family](**{**SIZES, **HF_FAMILIES.get(family, {})})
    return {**json.loads(config.to_json_string(use_diff=False)), "model_type": family}


EVERY_FAMILY = [*NATIVE, *(f"transformers {name}" for name in TRANSFORMERS)]
EVERY_CHOICE = list(itertools.product(OPS, (True, "float16")))
"""Operators and precisions: all in slow tests, and by default one with each family, in turn."""


@pytest.mark.parametrize(
    ("family", "ops", "precision"),
    [
        pytest.param(
            *(family, *choice),
            marks=() if position == index % len(EVERY_CHOICE) else pytest.mark.slow,
        )
        for index, family in enumerate(EVERY_FAMILY)
        for position, choice in enumerate(EVERY_CHOICE)
    ],
)
def test_tables_stay_float32_in_every_family(family: str, ops: str, precision: Any) -> None:
    """All tables are unrounded float32, and the loss is close to float32's.

    Logits are rounded sums of tens of terms, each within 2^-8: far below 1% of a loss near 4.
    """
    recorded = RecordingOps(OPS[ops])
    model_type = family.removeprefix("transformers ")
    is_foreign = model_type != family
    model = TransformersModel(document(model_type)) if is_foreign else tiny(**NATIVE[family])
    make = partial(Engine, model, device="cpu", seed=1, ops=recorded)
    tables = tables_of(make(mixed_precision=precision), recorded)
    assert len(tables) >= 2
    assert {table.dtype for table in tables} == {torch.float32}
    assert not any(map(is_rounded, tables))
    half, full = (
        make(mixed_precision=setting).step(global_batch(0), NextTokenLoss()).loss
        for setting in (precision, False)
    )
    assert half == pytest.approx(full, rel=0.01)
    assert half != full


def losses(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses of two updates of each job, and whether all tables were unrounded float32."""
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        recorded = RecordingOps(OPS[job["ops"]])
        engine = build(job["settings"], groups, ops=recorded, **job["options"])
        tables = tables_of(engine, recorded)
        exact = all(table.dtype == torch.float32 and not is_rounded(table) for table in tables)
        second = engine.step(local_rows(global_batch(1), groups), NextTokenLoss())
        results.append({"tables": len(tables), "exact": exact, "loss": second.loss})
    return results


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tables_stay_float32_under_every_layout(every: bool) -> None:
    """All axes, recomputation and sharding, with both operators and both dtypes.

    By default a third of the combinations, in which each layout occurs with both operators.
    """
    layouts = ("data=2", "tensor=2", "pipeline=2", "context=2")
    options: tuple[dict[str, Any], ...] = (
        {"mixed_precision": True},
        {"mixed_precision": "float16", "recompute": "full", "sharding": "zero3"},
        {"mixed_precision": True, "recompute": "selective", "sharding": "zero1"},
    )
    jobs = [
        {"layout": layout, "ops": ops, "settings": {}, "options": options[choice]}
        for row, (layout, ops) in enumerate(itertools.product(layouts, OPS))
        for choice in (range(len(options)) if every else [row % len(options)])
    ]
    plain = {"layout": "data=1", "ops": "torch", "settings": {}, "options": {}}
    ((full,),) = run_processes(1, FILE, "losses", jobs=[plain])
    for results in run_processes(2, FILE, "losses", jobs=jobs):
        for job, result in zip(jobs, results, strict=True):
            assert result["tables"] >= 2, job
            assert result["exact"], job
            assert result["loss"] == pytest.approx(full["loss"], rel=0.01), job


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ops", OPS)
def test_a_rotation_at_position_100_000_rounds_once(ops: str, dtype: torch.dtype) -> None:
    """Queries in attention are the exact rotation of the projection, rounded once.

    For y = a·cos - b·sin the result is within EPS·|y|, plus the float32 roundings of products and
    sum, 3·2^-24·(|a| + |b|). Rounded tables would add up to EPS·(|a| + |b|).
    """
    recorded = RecordingOps(OPS[ops])
    precision: Any = True if dtype == torch.bfloat16 else "float16"
    settings = {"max_position_embeddings": 100_001}
    engine = build(
        settings, connect(Layout(), device="cpu"), ops=recorded, mixed_precision=precision
    )
    batch = at_positions((0, 1, 4_095, 65_537, 99_999, 100_000))
    engine.step(batch, NextTokenLoss())
    compared = 0
    cos, sin = rotary_tables(engine.config.ropes[0], batch["positions"])
    for before, after in recorded.rotated:
        assert before.dtype == after.dtype == dtype
        compared += assert_rounded_once(before, after, cos, sin)
    assert compared > 500


def test_a_rotation_in_a_model_of_transformers_rounds_once() -> None:
    """The same for Llama built by transformers, which has its own rotation."""
    recorded = RecordingOps(operators)
    changed = {**document("llama"), "max_position_embeddings": 100_001}
    engine = Engine(
        TransformersModel(changed), device="cpu", seed=1, ops=recorded, mixed_precision=True
    )
    (stage,) = engine.stages.values()
    projected: list[Tensor] = []
    tables: list[tuple[Tensor, Tensor]] = []
    stage.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda _, __, output: projected.append(output.detach())
    )
    stage.model.rotary_emb.register_forward_hook(lambda _, __, output: tables.append(output))
    engine.step(at_positions((0, 1, 4_095, 65_537, 99_999, 100_000)), NextTokenLoss())
    (cos, sin), width = tables[0], 8
    before, after = projected[0].unflatten(-1, (-1, width)), recorded.attended[0][0]
    assert before.dtype == after.dtype == torch.bfloat16
    assert assert_rounded_once(before, after, cos[..., : width // 2], sin[..., : width // 2]) > 100


def at_positions(positions: tuple[int, ...]) -> dict[str, Tensor]:
    """Rows whose tokens are at these positions, in separate documents so that all count."""
    count = len(positions)
    tokens = torch.arange(2 * count).view(2, count) * 5 % VOCABULARY
    return {
        "tokens": tokens,
        "targets": tokens.roll(-1, 1),
        "positions": torch.tensor([positions, positions[::-1]]),
    }


def assert_rounded_once(before: Tensor, after: Tensor, cos: Tensor, sin: Tensor) -> int:
    """Compare a rotation with float64's; return the number of compared elements."""
    a, b = before.double().chunk(2, -1)
    cos64, sin64 = cos.double().unsqueeze(2), sin.double().unsqueeze(2)
    exact = torch.cat((a * cos64 - b * sin64, b * cos64 + a * sin64), -1)
    size = torch.cat((a.abs() + b.abs(),) * 2, -1)
    bound = EPS[after.dtype] * exact.abs() + 3 * 2.0**-24 * size
    bound += torch.finfo(after.dtype).smallest_normal * EPS[after.dtype] * 2  # subnormal results
    assert ((after.double() - exact).abs() <= bound).all()
    return after.numel()

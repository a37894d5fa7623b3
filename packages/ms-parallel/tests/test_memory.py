"""What blocks keep for their backward, and what they compute again instead."""

import random
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from attrs import evolve
from memory_runs import kept_by_blocks, kinds_of
from ms_rig import run_on_rig
from processes import run_processes
from runs import FAMILIES, build, global_batch
from torch._subclasses.fake_tensor import FakeTensorMode

import ms_data
from ms_parallel import DistributedTrainer, Engine, ModelPlan, NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.models.experts.router import Router
from ms_parallel.planner.largest_microbatch import largest_predicted, sizes_of
from ms_parallel.schedules.generators.registry import named_schedule
from ms_parallel.split.memory.block_costs import BlockCosts, storages
from ms_parallel.split.memory.budget import choose_modes, peak_bytes, peak_microbatches
from ms_parallel.split.memory.recompute_choice import RECOMPUTE_MODES, budget_bytes
from ms_parallel.training.memory import run_memory
from ms_parallel.training.options import Options

RUNS = Path(__file__).parent / "memory_runs.py"
WIDE = {"num_key_value_heads": 4, "hidden_size": 32, "intermediate_size": 96}
KIB = 1024


@pytest.fixture(scope="module")
def groups() -> Groups:
    """One process."""
    return connect(Layout(), device="cpu")


def trained(groups: Groups, settings: dict[str, Any], **options: Any) -> Engine:
    """An engine after two updates."""
    torch.set_num_threads(1)
    engine = build(settings, groups, **options)
    for step in range(2):
        engine.step(global_batch(step), NextTokenLoss())
    return engine


@pytest.mark.parametrize("family", ["biases", *FAMILIES])
def test_every_kind_gives_the_same_bits(family: str, groups: Groups) -> None:
    """Weights after two updates are those without recomputation, in every family."""
    plain = trained(groups, FAMILIES[family])
    for kind in (*RECOMPUTE_MODES[1:], "24KiB"):
        other = trained(groups, FAMILIES[family], recompute=kind)
        for name, weight in plain.parameters.items():
            assert torch.equal(weight, other.parameters[name]), (family, kind, name)


def test_kept_bytes_fall_as_the_measured_costs_say(groups: Groups) -> None:
    """What is alive behind each block's forward is what the budget counts, for each kind."""
    costs = trained(groups, WIDE, recompute="1GiB").runner.budget
    assert costs is not None
    (blocks,) = costs.blocks.values()
    measured = blocks[1].costs
    assert measured is not None
    batch = {name: each[:2] for name, each in global_batch(0).items()}
    alive = {}
    for number, kind in enumerate(RECOMPUTE_MODES):
        engine = build(WIDE, groups, recompute=kind)
        alive[kind] = kept_by_blocks(engine, batch)[1]
        assert alive[kind] == measured.kept_bytes[number], kind
    # 2 rows of 16 positions and 32 features in float32, and three such widths in the middle.
    state, middle = 2 * 16 * 32 * 4, 2 * 16 * 96 * 4
    sums = 2 * 16 * 4 * 4  # the logsumexp of each head
    assert alive["full"] == state
    # The input; queries, keys, values and attention's result; the first sum; gate and up.
    assert alive["selective"] == state + 4 * state + sums + state + 2 * middle
    # Input, its norm, the first sum, its norm; gate, its activation, up and their product.
    assert alive["attention"] == 4 * state + 4 * middle
    # Queries and keys as turned, values, result; the mask of 2 rows, and angles by cosine and sine.
    assert alive["none"] == alive["attention"] + 4 * state + sums + 2 * (16 * 16 * 4 + 16 * 8 * 8)


def test_a_budget_is_kept_and_used(groups: Groups) -> None:
    """Blocks keep no more than the budget, and more of them keep more where it is larger."""
    batch = {name: each[:2] for name, each in global_batch(0).items()}
    kept, work = [], []
    for kib in (13, 40, 60, 80, 100, 130, 1000):
        engine = trained(groups, WIDE, recompute=f"{kib}KiB")
        budget = engine.runner.budget
        assert budget is not None
        assert budget.peak_bytes <= kib * KIB
        kept.append(budget.peak_bytes)
        (blocks,) = budget.blocks.values()
        counted = [b.costs.kept_bytes[RECOMPUTE_MODES.index(b.mode)] for b in blocks if b.costs]
        assert sum(counted) == budget.peak_bytes
        # The first block also makes what all share: the signs of rotary positions.
        assert kept_by_blocks(engine, batch)[1:] == counted[1:]
        work.append(sum(b.costs.flops[RECOMPUTE_MODES.index(b.mode)] for b in blocks if b.costs))
    assert kept == sorted(kept)
    assert work == sorted(work, reverse=True)
    assert len(set(work)) > 4
    assert kinds_of(engine) == ["none"] * 3


def test_longer_batches_are_measured_anew(groups: Groups) -> None:
    """A budget holds for a longer batch that comes later, and a shorter one changes nothing."""
    engine = trained(groups, WIDE, recompute="100KiB")
    budget = engine.runner.budget
    assert budget is not None
    before = kinds_of(engine)
    assert set(before) != {"full"}
    engine.step(global_batch(2, length=8), NextTokenLoss())
    assert kinds_of(engine) == before
    engine.step(global_batch(2, length=64), NextTokenLoss())
    assert set(kinds_of(engine)) == {"full"}
    assert budget.peak_bytes <= 100 * KIB


def test_experts_are_chosen_once(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kind of recomputation, nor the measurement of a budget, routes a token twice."""
    calls = []
    choose = Router._select

    def counted(self: Router, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return choose(self, *args, **kwargs)

    monkeypatch.setattr(Router, "_select", counted)
    for kind in (*RECOMPUTE_MODES, "24KiB"):
        calls.clear()
        engine = trained(groups, FAMILIES["olmoe"], recompute=kind)
        assert len(calls) == 2 * 2 * 3, kind  # updates, microbatches, layers
        load = engine.step(global_batch(2), NextTokenLoss()).experts
        assert load is not None
        assert load.counts.sum(1).tolist() == [4 * 16 * 2] * 3


def costs_of(chance: random.Random) -> BlockCosts:
    """A block of drawn costs."""
    kept = sorted((chance.randint(1, 100) for _ in RECOMPUTE_MODES), reverse=True)
    return BlockCosts(
        kept_bytes=tuple(kept), flops=tuple(sorted(chance.randint(0, 100) for _ in RECOMPUTE_MODES))
    )


def test_an_ordinary_tensor_among_fake_ones_is_known_by_its_own_memory() -> None:
    """Such as numbers of documents, which are shared by all blocks and not counted for each."""
    documents = torch.zeros(2, 64, dtype=torch.int32)
    known = {documents.untyped_storage()._cdata: 512}
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert storages([documents]) == known


def test_a_choice_leaves_no_change_that_fits() -> None:
    """For drawn costs and schedules: the budget is kept where it can, and no change is spared."""
    chance = random.Random(0)
    for _ in range(200):
        schedule = named_schedule("interleaved-1f1b", 2, 4)
        held = peak_microbatches(schedule.actions[0])
        costs = {
            stage: [costs_of(chance) for _ in range(chance.randint(1, 4))]
            for stage in schedule.stages_of(0)
        }
        least = {s: [len(RECOMPUTE_MODES) - 1] * len(blocks) for s, blocks in costs.items()}
        budget = chance.randint(1, 5000)
        kinds = choose_modes(costs, held, budget)
        if peak_bytes(costs, least, held) > budget:
            continue
        assert peak_bytes(costs, kinds, held) <= budget
        for stage, blocks in costs.items():
            most = max(each.get(stage, 0) for each in held)
            for number, block in enumerate(blocks):
                now = kinds[stage][number]
                for kind in range(len(RECOMPUTE_MODES)):
                    more = (block.kept_bytes[kind] - block.kept_bytes[now]) * most
                    fits = peak_bytes(costs, kinds, held) + more <= budget
                    assert block.flops[kind] >= block.flops[now] or not fits


@pytest.mark.slow
def test_many_blocks_are_chosen_for_in_no_time() -> None:
    """A hundred layers take less than a second."""
    chance = random.Random(1)
    costs = {0: [costs_of(chance)] * 100}
    begun = time.process_time()
    choose_modes(costs, [{0: 8}], 8 * 4000)
    assert time.process_time() - begun < 1.0


def test_what_cannot_be_is_said(groups: Groups) -> None:
    """Unknown kinds, budgets that no kind keeps, and blocks without attention."""
    assert budget_bytes("1.5 GiB") == 3 << 29
    assert budget_bytes("8GB") == 8 * 10**9
    for wrong in ("atention", "8GiBs", "0B", "-1GiB", 0, True, 1.5, None):
        with pytest.raises(ConfigError, match=r"recompute is .*or a budget, such as '8GiB'"):
            build({}, groups, recompute=wrong)
    with pytest.raises(ConfigError, match="did you mean 'attention'"):
        build({}, groups, recompute="atention")
    with pytest.raises(ConfigError, match=r"must be at least the 0\.0 MiB .*; raise it, or lower"):
        trained(groups, WIDE, recompute="1KiB")
    own = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Sequential(torch.nn.Linear(4, 8)))
    with pytest.raises(ConfigError, match="needs an attention submodule in Sequential, got 0"):
        Engine(own, plan=ModelPlan(blocks="1"), device="cpu", recompute="attention")


LAYOUTS: list[dict[str, Any]] = [
    {"layout": "data=2,tensor=2", "settings": WIDE},
    {"layout": "pipeline=2,context=2", "settings": WIDE, "options": {"schedule": "zb-h1"}},
    {
        "layout": "data=2,expert=2,pipeline=2",
        "settings": FAMILIES["olmoe"] | {"num_experts": 6, "num_hidden_layers": 4},
        "options": {"schedule": "interleaved-1f1b", "microbatch_size": 1},
    },
    {
        "layout": "data=4",
        "settings": FAMILIES["qwen3_moe"],
        "options": {"mixed_precision": True, "sharding": "zero3"},
    },
]


def check_layouts(jobs: list[dict[str, Any]], kinds: list[str]) -> None:
    """Every kind gives the bits of `none`, and budgets are kept."""
    found = run_processes(4, RUNS, "states", jobs=[{"kinds": kinds, **job} for job in jobs])
    for rank in found:
        for job, same in zip(jobs, rank, strict=True):
            assert same.pop("40KiB kept", 0) <= 40 * KIB
            assert all(same.values()), (job, same)


def test_layouts_give_the_same_bits() -> None:
    """Under expert and pipeline parallelism, and with split backwards under context."""
    check_layouts([{**LAYOUTS[1], "kinds": ["selective"]}, LAYOUTS[2]], ["40KiB"])


@pytest.mark.slow
def test_all_kinds_give_the_same_bits_under_layouts() -> None:
    """Under every axis, schedules with split backwards, and bfloat16."""
    check_layouts(LAYOUTS, [*RECOMPUTE_MODES[1:], "40KiB"])


LARGER = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "vocab_size": 512,
}
OLMOE = {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2}
MEMORY: list[dict[str, Any]] = [
    {"layout": "data=2,tensor=2", "options": {"recompute": "attention"}},
    {
        "layout": "context=2,tensor=2",
        "options": {"recompute": "attention"},
        "lengths": [1, 20, 43],
    },
    {"layout": "pipeline=4", "options": {"recompute": "selective", "optimizer": "Muon"}},
    {
        "layout": "data=2,expert=2,pipeline=2",
        "settings": OLMOE,
        "options": {"schedule": "zb-h1"},
    },
    {  # whose gradients take more on their way between copies than activations
        "layout": "data=2,pipeline=2",
        "options": {"sharding": "replicate"},
        "length": 16,
        "rows": 1,
    },
]


def drawn_memory(count: int) -> list[dict[str, Any]]:
    """Layouts of 4 processes over every axis, with what else changes what they hold."""
    chance = random.Random(0)
    jobs: list[dict[str, Any]] = []
    while len(jobs) < count:
        axes = [chance.choice(("data", "tensor", "context", "pipeline")) for _ in range(2)]
        sizes = {axis: 2 ** axes.count(axis) for axis in axes}
        experts = chance.random() < 0.4
        if experts and sizes.get("data", 1) * sizes.get("context", 1) > 1:
            sizes["expert"] = 2
        piped = "pipeline" in sizes
        schedules = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b") if piped else ("1f1b",)
        job: dict[str, Any] = {
            "layout": ",".join(f"{axis}={size}" for axis, size in sizes.items()),
            "settings": OLMOE if experts else {},
            "options": {
                "schedule": chance.choice(schedules),
                "recompute": chance.choice((*RECOMPUTE_MODES, "600KiB")),
                "mixed_precision": chance.random() < 0.3,
                "sharding": chance.choice(("auto", "zero1", "zero2", "zero3")),
                "optimizer": chance.choice(("AdamW", "Muon", "SGD", "Adafactor")),
                "context_attention": chance.choice(("auto", "all_gather", "ulysses", "ring")),
            },
            "microbatches": 4 if piped else chance.choice((1, 2, 4)),
        }
        if chance.random() < 0.5:
            cuts = sorted(chance.sample(range(1, 64), chance.randint(1, 5)))
            job["lengths"] = [end - begin for begin, end in pairwise([0, *cuts, 64])]
        if sizes.get("pipeline") == 4 and job["options"]["schedule"] == "interleaved-1f1b":
            continue
        if job not in jobs:
            jobs.append(job)
    return jobs


PIPED_CONTEXT: list[dict[str, Any]] = [
    {
        "layout": "pipeline=2,context=2,expert=2",
        "settings": OLMOE,
        "options": {"schedule": "zb-h1", "mixed_precision": True, "optimizer": "Muon"},
    },
    {
        "layout": "pipeline=2,context=2",
        "options": {"schedule": "zb-h1", "recompute": "selective", "mixed_precision": True},
        "lengths": [1, 20, 43],
    },
]


def check_memory(jobs: list[dict[str, Any]]) -> None:
    """Predictions are within 5% of what is counted, by category."""
    common = {"rows": 2, "length": 64, "microbatches": 4}
    jobs = [{**common, **job, "settings": LARGER | job.get("settings", {})} for job in jobs]
    (foretold,) = run_processes(1, RUNS, "predicted", jobs=jobs)
    found = run_processes(4, RUNS, "counted", jobs=jobs, timeout_s=500)
    wrong: list[tuple[Any, ...]] = []
    shares: dict[str, list[float]] = {}
    for number, job in enumerate(jobs):
        for stage, ranks in enumerate(foretold[number]):
            alike = [rank[number] for rank in found if rank[number]["pipeline"] == stage]
            again = job["options"].get("recompute", "none") != "none"
            for category in ("weights", "gradients", "moments", "activations", "buffers"):
                count = alike[0][category]  # owners of whole matrices have other sizes each
                off = ranks[category] - count
                if category == "buffers" and again:  # what is computed again was not counted
                    off = min(off, 0)
                shares.setdefault(category, []).append(abs(off) / max(count, 1))
                if abs(off) > 0.05 * count + 8:
                    wrong.append((str(job), stage, category, ranks[category], count))
    for category, apart in shares.items():  # what benchmarks/README.md states, by `pytest -s`
        print(f"{category}: {max(apart):.4f} at most, {sum(apart) / len(apart):.4f} on average")  # noqa: T201
    assert not wrong, "\n".join(map(str, wrong))


def test_predicted_memory_is_what_is_counted() -> None:
    """For layouts with recomputation, packed rows, a split backward, experts, Muon and copies."""
    check_memory(MEMORY)


def test_a_process_that_has_met_others_has_it_predicted_by_another(groups: Groups) -> None:
    """Memory of thousands of ranks, packed as a dataset is, as the run's settings say."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256, "vocab_size": 4096}
    options = Options(
        "llama", model_config=LARGER | sizes, batch_size=1024, sequence_length=64, device="cpu"
    )
    first, *middle, last = run_memory(options, Layout(pipeline=4, tensor=4, data=256))
    parameters = 2 * 4096 * 1024 + 4 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
    whole = sum(each.weights for each in (first, *middle, last)) / 4
    # A process has whole rows of matrices, and one number at least of a norm.
    assert whole == pytest.approx(parameters * 4 / 4096, rel=0.05)
    assert first.activations > middle[0].activations > middle[1].activations
    assert first.total == sum(msgspec.structs.astuple(first)[1:])
    wrong = evolve(options, parallel_config=None, batch_size=1000)
    with pytest.raises(ConfigError, match="does not divide over data=256"):
        run_memory(wrong, Layout(pipeline=4, tensor=4, data=256))


@pytest.mark.slow
def test_the_largest_microbatch_is_found_by_prediction_and_trial(tmp_path: Path) -> None:
    """More memory fits more rows; the run is that of this size, and goes on with it."""
    (tmp_path / "text.txt").write_text("So many words, and so few of them new. " * 4000)
    model = LARGER | {"num_hidden_layers": 2}
    common = {"model_config": model, "batch_size": 8, "sequence_length": 128, "vocab_size": 512}
    common |= {"device": "cpu", "progress": False, "recompute": "none", "held_out_fraction": 0.1}
    options = Options("llama", **common)
    need = {rows: run_memory(options, Layout(), None, rows)[0].total for rows in (1, 2, 4, 8)}
    assert sorted(need.values()) == list(need.values())
    events: list[tuple[str, dict[str, Any]]] = []

    def train(folder: str, steps: int, **rest: Any) -> float:
        trainer = DistributedTrainer(
            "llama",
            output_dir=tmp_path / folder,
            on_event=lambda kind, fields: events.append((kind, dict(fields))),
            **common,
            **rest,
        )
        return trainer.train(tmp_path / "text.txt", steps=steps).loss

    gib = need[4] / (1 << 30) * 1.001
    auto = {"microbatch_size": "auto", "memory_gib": gib}
    found = train("auto", 2, **auto)
    (rows,) = (fields["rows"] for kind, fields in events if kind == "microbatch")
    assert rows in (1, 2, 4)  # the trial counts what the allocator takes besides
    assert train("plain", 2, microbatch_size=rows) == found
    assert train("auto", 2, **auto) == found
    assert sum(kind == "microbatch" for kind, _ in events) == 1
    with pytest.raises(ConfigError, match=r"1 sample\(s\) at once are predicted to need"):
        train("small", 2, microbatch_size="auto", memory_gib=need[1] / (1 << 31))
    with pytest.raises(ConfigError, match="use a named schedule"):
        Options("llama", **common, microbatch_size="auto", schedule="search")


WIDER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 2048,
}
ROOM: list[dict[str, Any]] = [
    {"layout": "data=2", "mib": 330},
    {"layout": "data=2", "mib": 520, "recompute": "full"},
    {"layout": "tensor=2", "mib": 420},
    {"layout": "pipeline=2", "mib": 600},
    {"layout": "data=2", "mib": 700, "sharding": "zero3", "optimizer": "Muon"},
]
"""Layouts, and how much more memory the last rank may take."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", ROOM, ids=lambda case: f"{case['layout']}-{case['mib']}")
def test_the_largest_microbatch_fits_the_tightest_rank(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    """All ranks take what the last one has room for, which `ulimit` bounds.

    It trains within its limit, and so does no size that is two divisors larger.
    """
    (tmp_path / "text.txt").write_text("So many words, and so few of them new. " * 9000)
    ms_data.build(
        tmp_path / "text.txt",
        tokenizer=ms_data.train_tokenizer(tmp_path / "text.txt", vocab_size=300),
        out=tmp_path / "shards",
    )
    room = case.pop("mib") << 20
    settings = {
        "model_arch": "llama",
        "model_config": WIDER,
        "batch_size": 24,
        "sequence_length": 512,
    }
    settings |= {"device": "cpu", "progress": False, **case}

    def rows_in(room_bytes: int, size: int | str) -> list[dict[str, Any]]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        given = {**settings, "microbatch_size": size}
        arguments = {"room_bytes": room_bytes, "folder": str(tmp_path), "settings": given}
        return run_processes(2, RUNS, "trained_in", check=False, **arguments)

    found = rows_in(room, "auto")
    print(case, room >> 20, found)  # noqa: T201
    assert all("loss" in rank for rank in found), found
    (rows,) = {rank["rows"][0] for rank in found if rank["rows"]}
    layout = Layout.parse(case["layout"])
    sizes = sizes_of(24 // layout.data_ranks, layout.pipeline)
    two_larger = sizes[sizes.index(rows) + 2 :][:1]
    for size in two_larger:
        tried = rows_in(room, size)
        print(size, tried)  # noqa: T201
        assert any("failed" in rank for rank in tried), (rows, size)


def check_offload(layout: str) -> None:
    """Bits stay, and a forward leaves a fifth of the bytes on the device at most."""
    sizes = {"settings": LARGER | {"num_hidden_layers": 2}, "layout": layout}
    kinds = ({"offload": name, "microbatch_size": 2} for name in ("none", "all"))
    jobs = [{**sizes, "options": options} for options in kinds]
    for here, there in run_on_rig(2, RUNS, "offloaded", jobs=jobs):
        assert (there["losses"], there["sums"]) == (here["losses"], here["sums"])
        assert there["on_device"] < here["on_device"] / 5


def test_activations_that_lie_in_the_machines_memory_change_no_bit() -> None:
    """On a device of its own, with FSDP."""
    check_offload("data=2")


@pytest.mark.slow
def test_activations_of_tensor_ranks_may_lie_in_the_machines_memory() -> None:
    """Those that DTensor saves too."""
    check_offload("tensor=2")


def test_on_a_cpu_activations_stay_and_it_is_said(
    groups: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    """They lie in the machine's memory already; bits are the same."""
    away = trained(groups, WIDE, offload="activations")
    assert "has no effect on activations on a CPU" in caplog.text
    here = trained(groups, WIDE)
    for name, weight in here.parameters.items():
        assert torch.equal(weight, away.parameters[name])
    with pytest.raises(ConfigError, match="set offload to activations, or use AdamW"):
        build(WIDE, groups, offload="all", optimizer="SGD")


@pytest.mark.slow
def test_compiled_blocks_train_as_they_are() -> None:
    """Recomputed, with packed documents."""
    jobs: list[dict[str, Any]] = [{"layout": "data=1", "options": {"recompute": "full"}}]
    ((here, there),) = run_processes(1, RUNS, "compiled", jobs=jobs, backend="aot_eager")[0]
    assert there == pytest.approx(here, rel=1e-5)  # sums of float32 in another order


@pytest.mark.slow
def test_compiled_blocks_train_as_they_are_under_layouts() -> None:
    """With FSDP and recomputation, and as stages of a pipeline."""
    jobs: list[dict[str, Any]] = [
        {"layout": "data=2", "options": {"recompute": "full"}},
        {"layout": "pipeline=2", "options": {}},
    ]
    for found in run_processes(2, RUNS, "compiled", jobs=jobs, backend="aot_eager"):
        for here, there in found:
            assert there == pytest.approx(here, rel=1e-5)  # sums of float32 in another order


@pytest.mark.slow
def test_blocks_compiled_to_machine_code_train_as_they_are() -> None:
    """By torch's own compiler, in each precision, and a family with windows."""
    jobs: list[dict[str, Any]] = [
        {"layout": "data=1", "options": {}},
        {"layout": "data=1", "options": {"recompute": "full"}},
        {"layout": "data=1", "options": {}, "settings": FAMILIES["qwen3"]},
    ]
    (found,) = run_processes(1, RUNS, "compiled", jobs=jobs, timeout_s=500)
    for here, there in found:
        assert there == pytest.approx(here, rel=1e-5)


def test_compiled_blocks_cast_their_own_weights() -> None:
    """In one process bfloat16 gives the bits of FSDP's casts, and weights are plain float32."""
    jobs: list[dict[str, Any]] = [
        {"layout": "data=1", "options": {"mixed_precision": True, "recompute": recompute}}
        for recompute in ("none", "full")
    ]
    (found,) = run_processes(1, RUNS, "compiled", jobs=jobs, backend="aot_eager")
    for here, there in found:
        assert here == there


def test_what_is_not_compiled_is_said(groups: Groups) -> None:
    """Experts, kinds of recomputation that need a block's operators, and split backwards."""
    for settings, options, said in (
        (FAMILIES["olmoe"], {}, "only the dense decoders"),
        ({}, {"recompute": "selective"}, "recompute='selective', which selects single"),
        ({}, {"recompute": "1GiB"}, "recompute='1GiB', which selects single"),
        ({}, {"schedule": "zb-h1"}, "splits the backward pass; use schedule 1f1b"),
    ):
        with pytest.raises(ConfigError, match=said):
            build(settings, groups, compile=True, **options)


def test_few_predictions_find_the_largest() -> None:
    """At most 5 of 12 divisors are asked for; pipelines keep twice as many as ranks."""
    asked: list[int] = []

    def predict(rows: int) -> int:
        asked.append(rows)
        return 100 + 7 * rows

    assert largest_predicted(sizes_of(60, 1), 100 + 7 * 19, predict) == (15, 205)
    assert len(asked) <= 5
    assert sizes_of(60, 4) == [1, 2, 3, 4, 5, 6]
    assert sizes_of(4, 4) == [1]


@pytest.mark.slow
def test_predicted_memory_of_drawn_layouts_is_what_is_counted() -> None:
    """For forty layouts, half with packed rows, and two of context with a pipeline."""
    check_memory([*drawn_memory(40), *PIPED_CONTEXT])

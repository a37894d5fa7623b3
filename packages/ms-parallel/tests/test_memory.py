"""Activation memory: saved bytes, recompute budgets, predictions, offload and compilation."""

import random
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from memory_runs import block_modes, saved_bytes_by_block
from ms_rig import run_on_rig
from processes import run_processes
from runs import FAMILIES, build, global_batch, tiny
from torch._subclasses.fake_tensor import FakeTensorMode

import ms_data
import ms_kernels
from ms_parallel import DistributedTrainer, Engine, ModelPlan, NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.memory.block_costs import BlockCosts, storages
from ms_parallel.memory.budget import choose_modes, peak_bytes, peak_microbatches
from ms_parallel.memory.modes import RECOMPUTE_MODES, budget_bytes
from ms_parallel.models.experts.router import Router
from ms_parallel.planner import memory
from ms_parallel.planner.largest_microbatch import largest_predicted, sizes_of
from ms_parallel.planner.memory import predict_memory
from ms_parallel.schedules.generators.registry import named_schedule
from ms_parallel.training.memory import run_memory
from ms_parallel.training.options import Options

RUNS = Path(__file__).parent / "memory_runs.py"
WIDE = {"num_key_value_heads": 4, "hidden_size": 32, "intermediate_size": 96}
KIB = 1024


@pytest.fixture(scope="module")
def groups() -> Groups:
    """Groups of a single process."""
    return connect(Layout(), device="cpu")


def trained_engine(groups: Groups, settings: dict[str, Any], **options: Any) -> Engine:
    """Engine after two updates."""
    torch.set_num_threads(1)
    engine = build(settings, groups, **options)
    for step in range(2):
        engine.step(global_batch(step), NextTokenLoss())
    return engine


@pytest.mark.parametrize("family", ["biases", *FAMILIES])
def test_every_recompute_mode_gives_the_same_bits(family: str, groups: Groups) -> None:
    """Weights after two updates equal those without recomputation, in every family."""
    plain = trained_engine(groups, FAMILIES[family])
    for mode in (*RECOMPUTE_MODES[1:], "24KiB"):
        recomputed = trained_engine(groups, FAMILIES[family], recompute=mode)
        for name, weight in plain.parameters.items():
            assert torch.equal(weight, recomputed.parameters[name]), (family, mode, name)


def test_saved_bytes_equal_the_measured_costs(groups: Groups) -> None:
    """Bytes alive after each block's forward equal the budget's measurement, in every mode."""
    costs = trained_engine(groups, WIDE, recompute="1GiB").runner.budget
    assert costs is not None
    (blocks,) = costs.blocks.values()
    measured = blocks[1].costs
    assert measured is not None
    batch = {name: tensor[:2] for name, tensor in global_batch(0).items()}
    saved_bytes = {}
    for index, mode in enumerate(RECOMPUTE_MODES):
        engine = build(WIDE, groups, recompute=mode)
        saved_bytes[mode] = saved_bytes_by_block(engine, batch)[1]
        assert saved_bytes[mode] == measured.kept_bytes[index], mode
    # 2 rows of 16 positions and 32 features in float32; the intermediate width is three times that.
    state, intermediate = 2 * 16 * 32 * 4, 2 * 16 * 96 * 4
    lse = 2 * 16 * 4 * 4  # the logsumexp of each head
    assert saved_bytes["full"] == state
    # The input; q, k, v and the attention output; the first residual sum; gate and up.
    assert saved_bytes["selective"] == state + 4 * state + lse + state + 2 * intermediate
    # The input, its norm, the first residual sum, its norm; gate, its activation, up, the product.
    assert saved_bytes["attention"] == 4 * state + 4 * intermediate
    # Rotated q and k, v, the output; the mask of 2 rows, and the cosines and sines of the angles.
    assert saved_bytes["none"] == saved_bytes["attention"] + 4 * state + lse + 2 * (
        16 * 16 * 4 + 16 * 8 * 8
    )


def test_blocks_stay_within_the_budget_and_use_it(groups: Groups) -> None:
    """Saved bytes stay within the budget, and a larger budget means less recomputation."""
    batch = {name: tensor[:2] for name, tensor in global_batch(0).items()}
    peaks, recompute_flops = [], []
    for kib in (13, 40, 60, 80, 100, 130, 1000):
        engine = trained_engine(groups, WIDE, recompute=f"{kib}KiB")
        budget = engine.runner.budget
        assert budget is not None
        assert budget.peak_bytes <= kib * KIB
        peaks.append(budget.peak_bytes)
        (blocks,) = budget.blocks.values()
        saved_bytes = [b.costs.kept_bytes[RECOMPUTE_MODES.index(b.mode)] for b in blocks if b.costs]
        assert sum(saved_bytes) == budget.peak_bytes
        # The first block also creates the signs of rotary positions, which all blocks share.
        assert saved_bytes_by_block(engine, batch)[1:] == saved_bytes[1:]
        recompute_flops.append(
            sum(b.costs.flops[RECOMPUTE_MODES.index(b.mode)] for b in blocks if b.costs)
        )
    assert peaks == sorted(peaks)
    assert recompute_flops == sorted(recompute_flops, reverse=True)
    assert len(set(recompute_flops)) > 4
    assert block_modes(engine) == ["none"] * 3


def test_longer_batches_are_measured_again(groups: Groups) -> None:
    """The budget also holds for a later, longer batch; a shorter one changes nothing."""
    engine = trained_engine(groups, WIDE, recompute="100KiB")
    budget = engine.runner.budget
    assert budget is not None
    before = block_modes(engine)
    assert set(before) != {"full"}
    engine.step(global_batch(2, length=8), NextTokenLoss())
    assert block_modes(engine) == before
    engine.step(global_batch(2, length=64), NextTokenLoss())
    assert set(block_modes(engine)) == {"full"}
    assert budget.peak_bytes <= 100 * KIB


def test_tokens_are_routed_once(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither recomputation nor the measurement of a budget routes a token twice."""
    calls = []
    select = Router._select

    def counted(self: Router, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return select(self, *args, **kwargs)

    monkeypatch.setattr(Router, "_select", counted)
    for mode in (*RECOMPUTE_MODES, "24KiB"):
        calls.clear()
        engine = trained_engine(groups, FAMILIES["olmoe"], recompute=mode)
        assert len(calls) == 2 * 2 * 3, mode  # updates, microbatches, layers
        load = engine.step(global_batch(2), NextTokenLoss()).experts
        assert load is not None
        assert load.counts.sum(1).tolist() == [4 * 16 * 2] * 3


def random_costs(rng: random.Random) -> BlockCosts:
    """Random costs of a block."""
    saved_bytes = sorted((rng.randint(1, 100) for _ in RECOMPUTE_MODES), reverse=True)
    return BlockCosts(
        kept_bytes=tuple(saved_bytes),
        flops=tuple(sorted(rng.randint(0, 100) for _ in RECOMPUTE_MODES)),
    )


def test_a_real_tensor_among_fake_ones_is_identified_by_its_storage() -> None:
    """Document ids are such a tensor: all blocks share them, so they count once."""
    documents = torch.zeros(2, 64, dtype=torch.int32)
    sizes = {documents.untyped_storage()._cdata: 512}
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert storages([documents]) == sizes


def test_chosen_modes_fit_the_budget_and_cannot_be_improved() -> None:
    """No block could switch to a mode with fewer FLOPs within the budget."""
    rng = random.Random(0)
    for _ in range(200):
        schedule = named_schedule("interleaved-1f1b", 2, 4)
        in_flight = peak_microbatches(schedule.actions[0])
        costs = {
            stage: [random_costs(rng) for _ in range(rng.randint(1, 4))]
            for stage in schedule.stages_of(0)
        }
        all_recomputed = {
            s: [len(RECOMPUTE_MODES) - 1] * len(blocks) for s, blocks in costs.items()
        }
        budget = rng.randint(1, 5000)
        modes = choose_modes(costs, in_flight, budget)
        if peak_bytes(costs, all_recomputed, in_flight) > budget:
            continue
        assert peak_bytes(costs, modes, in_flight) <= budget
        for stage, blocks in costs.items():
            max_in_flight = max(counts.get(stage, 0) for counts in in_flight)
            for index, block in enumerate(blocks):
                current = modes[stage][index]
                for mode in range(len(RECOMPUTE_MODES)):
                    extra_bytes = (
                        block.kept_bytes[mode] - block.kept_bytes[current]
                    ) * max_in_flight
                    fits = peak_bytes(costs, modes, in_flight) + extra_bytes <= budget
                    assert block.flops[mode] >= block.flops[current] or not fits


@pytest.mark.slow
def test_modes_of_a_hundred_blocks_are_chosen_within_a_second() -> None:
    """Measured in CPU time of this process."""
    rng = random.Random(1)
    costs = {0: [random_costs(rng)] * 100}
    start = time.process_time()
    choose_modes(costs, [{0: 8}], 8 * 4000)
    assert time.process_time() - start < 1.0


def test_invalid_recompute_settings_are_refused(groups: Groups) -> None:
    """Unknown modes, budgets that no mode meets, and blocks without attention."""
    assert budget_bytes("1.5 GiB") == 3 << 29
    assert budget_bytes("8GB") == 8 * 10**9
    for value in ("atention", "8GiBs", "0B", "-1GiB", 0, True, 1.5, None):
        with pytest.raises(ConfigError, match=r"recompute is .*or a budget, such as '8GiB'"):
            build({}, groups, recompute=value)
    with pytest.raises(ConfigError, match="did you mean 'attention'"):
        build({}, groups, recompute="atention")
    with pytest.raises(ConfigError, match=r"must be at least the 0\.0 MiB .*; raise it, or lower"):
        trained_engine(groups, WIDE, recompute="1KiB")
    model = torch.nn.Sequential(
        torch.nn.Embedding(8, 4), torch.nn.Sequential(torch.nn.Linear(4, 8))
    )
    with pytest.raises(ConfigError, match="needs an attention submodule in Sequential, got 0"):
        Engine(model, plan=ModelPlan(blocks="1"), device="cpu", recompute="attention")


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


def check_layouts(jobs: list[dict[str, Any]], modes: list[str]) -> None:
    """Check that every mode gives the bits of "none" and that budgets hold."""
    ranks = run_processes(4, RUNS, "states", jobs=[{"modes": modes, **job} for job in jobs])
    for results in ranks:
        for job, equal in zip(jobs, results, strict=True):
            assert equal.pop("40KiB peak", 0) <= 40 * KIB
            assert all(equal.values()), (job, equal)


def test_layouts_give_the_same_bits() -> None:
    """Expert and pipeline parallelism, and a split backward pass with context parallelism."""
    check_layouts([{**LAYOUTS[1], "modes": ["selective"]}, LAYOUTS[2]], ["40KiB"])


@pytest.mark.slow
def test_all_modes_give_the_same_bits_under_layouts() -> None:
    """Every axis, schedules with a split backward pass, and bfloat16."""
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
    {  # reducing gradients between replicas takes more memory than activations
        "layout": "data=2,pipeline=2",
        "options": {"sharding": "replicate"},
        "length": 16,
        "rows": 1,
    },
]


def random_memory_jobs(count: int) -> list[dict[str, Any]]:
    """Random layouts of 4 processes over all axes, with settings that affect memory."""
    rng = random.Random(0)
    jobs: list[dict[str, Any]] = []
    while len(jobs) < count:
        axes = [rng.choice(("data", "tensor", "context", "pipeline")) for _ in range(2)]
        sizes = {axis: 2 ** axes.count(axis) for axis in axes}
        experts = rng.random() < 0.4
        if experts and sizes.get("data", 1) * sizes.get("context", 1) > 1:
            sizes["expert"] = 2
        piped = "pipeline" in sizes
        schedules = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b") if piped else ("1f1b",)
        job: dict[str, Any] = {
            "layout": ",".join(f"{axis}={size}" for axis, size in sizes.items()),
            "settings": OLMOE if experts else {},
            "options": {
                "schedule": rng.choice(schedules),
                "recompute": rng.choice((*RECOMPUTE_MODES, "600KiB")),
                "mixed_precision": rng.random() < 0.3,
                "sharding": rng.choice(("auto", "zero1", "zero2", "zero3")),
                "optimizer": rng.choice(("AdamW", "Muon", "SGD", "Adafactor")),
                "context_attention": rng.choice(("auto", "all_gather", "ulysses", "ring")),
            },
            "microbatches": 4 if piped else rng.choice((1, 2, 4)),
        }
        if rng.random() < 0.5:
            cuts = sorted(rng.sample(range(1, 64), rng.randint(1, 5)))
            job["lengths"] = [end - start for start, end in pairwise([0, *cuts, 64])]
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
    """Check that predicted bytes are within 5% of the counted bytes in every category."""
    common = {"rows": 2, "length": 64, "microbatches": 4}
    jobs = [{**common, **job, "settings": LARGER | job.get("settings", {})} for job in jobs]
    (predictions,) = run_processes(1, RUNS, "predict_bytes", jobs=jobs)
    counts = run_processes(4, RUNS, "count_bytes", jobs=jobs, timeout_s=500)
    mismatches: list[tuple[Any, ...]] = []
    relative_errors: dict[str, list[float]] = {}
    for index, job in enumerate(jobs):
        for stage, predicted in enumerate(predictions[index]):
            same_stage = [rank[index] for rank in counts if rank[index]["pipeline"] == stage]
            recomputes = job["options"].get("recompute", "none") != "none"
            for category in ("weights", "gradients", "moments", "activations", "buffers"):
                count = same_stage[0][category]  # ranks that own whole matrices differ in size
                error = predicted[category] - count
                if category == "buffers" and recomputes:  # the count leaves out recomputed forwards
                    error = min(error, 0)
                relative_errors.setdefault(category, []).append(abs(error) / max(count, 1))
                if abs(error) > 0.05 * count + 8:
                    mismatches.append((str(job), stage, category, predicted[category], count))
    for (
        category,
        errors,
    ) in relative_errors.items():  # figures of benchmarks/README.md, shown by `pytest -s`
        print(f"{category}: {max(errors):.4f} at most, {sum(errors) / len(errors):.4f} on average")  # noqa: T201
    assert not mismatches, "\n".join(map(str, mismatches))


def test_predicted_memory_matches_the_counted_memory() -> None:
    """Recomputation, packed rows, a split backward pass, experts, Muon and replicas."""
    check_memory(MEMORY)


def test_memory_of_thousands_of_ranks_is_predicted_in_another_process(groups: Groups) -> None:
    """A connected process predicts 4,096 ranks by starting another process."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256, "vocab_size": 4096}
    options = Options(
        "llama", model_config=LARGER | sizes, batch_size=1024, sequence_length=64, device="cpu"
    )
    first, *middle, last = run_memory(options, Layout(pipeline=4, tensor=4, data=256))
    parameters = 2 * 4096 * 1024 + 4 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
    weight_bytes = sum(rank.weights for rank in (first, *middle, last)) / 4
    # FSDP splits matrices by rows, and each rank holds at least one number of a norm.
    assert weight_bytes == pytest.approx(parameters * 4 / 4096, rel=0.05)
    assert first.activations > middle[0].activations > middle[1].activations
    assert first.total == sum(msgspec.structs.astuple(first)[1:])


@pytest.mark.slow
def test_the_largest_microbatch_is_found_by_prediction_and_trial(tmp_path: Path) -> None:
    """The run equals one with that size given explicitly, and resumes with it."""
    (tmp_path / "text.txt").write_text("So many words, and so few of them new. " * 4000)
    model = LARGER | {"num_hidden_layers": 2}
    common = {"model_config": model, "batch_size": 8, "sequence_length": 128, "vocab_size": 512}
    common |= {"device": "cpu", "progress": False, "recompute": "none", "held_out_fraction": 0.1}
    options = Options("llama", **common)
    needed_bytes = {
        rows: run_memory(options, Layout(), None, rows)[0].total for rows in (1, 2, 4, 8)
    }
    assert sorted(needed_bytes.values()) == list(needed_bytes.values())
    events: list[tuple[str, dict[str, Any]]] = []

    def train(folder: str, steps: int, **overrides: Any) -> float:
        trainer = DistributedTrainer(
            "llama",
            output_dir=tmp_path / folder,
            on_event=lambda event, fields: events.append((event, dict(fields))),
            **common,
            **overrides,
        )
        return trainer.train(tmp_path / "text.txt", steps=steps).loss

    gib = needed_bytes[4] / (1 << 30) * 1.001
    auto_settings = {"microbatch_size": "auto", "memory_gib": gib}
    auto_loss = train("auto", 2, **auto_settings)
    (rows,) = (fields["rows"] for event, fields in events if event == "microbatch")
    assert rows in (1, 2, 4)  # the trial also counts the allocator's overhead
    assert train("plain", 2, microbatch_size=rows) == auto_loss
    assert train("auto", 2, **auto_settings) == auto_loss
    assert sum(event == "microbatch" for event, _ in events) == 1
    with pytest.raises(ConfigError, match=r"1 sample\(s\) at once are predicted to need"):
        train("small", 2, microbatch_size="auto", memory_gib=needed_bytes[1] / (1 << 31))
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
"""Layouts, and the memory in MiB that the last rank may allocate."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", ROOM, ids=lambda case: f"{case['layout']}-{case['mib']}")
def test_the_largest_microbatch_fits_the_tightest_rank(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    """All ranks use the size that fits the last one, whose memory `ulimit` limits.

    Training with it stays within the limit; with a size two divisors larger it does not.
    """
    (tmp_path / "text.txt").write_text("So many words, and so few of them new. " * 9000)
    ms_data.build(
        tmp_path / "text.txt",
        tokenizer=ms_data.train_tokenizer(tmp_path / "text.txt", vocab_size=300),
        out=tmp_path / "shards",
    )
    extra_bytes = case.pop("mib") << 20
    settings = {
        "model_arch": "llama",
        "model_config": WIDER,
        "batch_size": 24,
        "sequence_length": 512,
    }
    settings |= {"device": "cpu", "progress": False, **case}

    def train_within(room_bytes: int, size: int | str) -> list[dict[str, Any]]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        run_settings = {**settings, "microbatch_size": size}
        arguments = {"room_bytes": room_bytes, "folder": str(tmp_path), "settings": run_settings}
        return run_processes(2, RUNS, "trained_in", check=False, **arguments)

    auto_results = train_within(extra_bytes, "auto")
    print(case, extra_bytes >> 20, auto_results)  # noqa: T201
    assert all("loss" in rank for rank in auto_results), auto_results
    (rows,) = {rank["rows"][0] for rank in auto_results if rank["rows"]}
    layout = Layout.parse(case["layout"])
    sizes = sizes_of(24 // layout.data_ranks, layout.pipeline)
    two_larger = sizes[sizes.index(rows) + 2 :][:1]
    for size in two_larger:
        larger_results = train_within(extra_bytes, size)
        print(size, larger_results)  # noqa: T201
        assert any("failed" in rank for rank in larger_results), (rows, size)


def check_offload(layout: str) -> None:
    """Check that bits are equal and a forward leaves at most a fifth of the bytes on the device."""
    sizes = {"settings": LARGER | {"num_hidden_layers": 2}, "layout": layout}
    options_list = ({"offload": name, "microbatch_size": 2} for name in ("none", "all"))
    jobs = [{**sizes, "options": options} for options in options_list]
    for baseline, offloaded in run_on_rig(2, RUNS, "train_offloaded", jobs=jobs):
        assert (offloaded["losses"], offloaded["sums"]) == (baseline["losses"], baseline["sums"])
        assert offloaded["on_device"] < baseline["on_device"] / 5


def test_offloaded_activations_change_no_bits() -> None:
    """On an emulated accelerator, with FSDP."""
    check_offload("data=2")


@pytest.mark.slow
def test_activations_of_tensor_ranks_can_be_offloaded() -> None:
    """Including tensors saved by DTensor."""
    check_offload("tensor=2")


def test_offloading_activations_on_a_cpu_warns_and_does_nothing(
    groups: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    """They are in host memory already; the bits are equal."""
    offloaded = trained_engine(groups, WIDE, offload="activations")
    assert "has no effect on activations on a CPU" in caplog.text
    baseline = trained_engine(groups, WIDE)
    for name, weight in baseline.parameters.items():
        assert torch.equal(weight, offloaded.parameters[name])
    with pytest.raises(ConfigError, match="set offload to activations, or use AdamW"):
        build(WIDE, groups, offload="all", optimizer="SGD")


@pytest.mark.slow
def test_compiled_blocks_give_the_losses_of_eager_ones() -> None:
    """With recomputation and packed documents."""
    jobs: list[dict[str, Any]] = [{"layout": "data=1", "options": {"recompute": "full"}}]
    ((eager, compiled),) = run_processes(1, RUNS, "train_compiled", jobs=jobs, backend="aot_eager")[
        0
    ]
    assert compiled == pytest.approx(eager, rel=1e-5)  # float32 sums in a different order


@pytest.mark.slow
def test_compiled_blocks_give_the_losses_of_eager_ones_under_layouts() -> None:
    """FSDP with recomputation, and pipeline stages."""
    jobs: list[dict[str, Any]] = [
        {"layout": "data=2", "options": {"recompute": "full"}},
        {"layout": "pipeline=2", "options": {}},
    ]
    for results in run_processes(2, RUNS, "train_compiled", jobs=jobs, backend="aot_eager"):
        for eager, compiled in results:
            assert compiled == pytest.approx(eager, rel=1e-5)  # float32 sums in a different order


@pytest.mark.slow
def test_blocks_compiled_to_machine_code_give_the_losses_of_eager_ones() -> None:
    """With torch's default compiler."""
    jobs: list[dict[str, Any]] = [
        {"layout": "data=1", "options": {}},
        {"layout": "data=1", "options": {"recompute": "full"}},
        {"layout": "data=1", "options": {}, "settings": FAMILIES["qwen3"]},
    ]
    (results,) = run_processes(1, RUNS, "train_compiled", jobs=jobs, timeout_s=500)
    for eager, compiled in results:
        assert compiled == pytest.approx(eager, rel=1e-5)


def test_compiled_blocks_cast_their_own_weights() -> None:
    """In one process, bfloat16 gives the bits of FSDP's casts; parameters stay plain float32."""
    jobs: list[dict[str, Any]] = [
        {"layout": "data=1", "options": {"mixed_precision": True, "recompute": recompute}}
        for recompute in ("none", "full")
    ]
    (results,) = run_processes(1, RUNS, "train_compiled", jobs=jobs, backend="aot_eager")
    for eager, compiled in results:
        assert eager == compiled


def test_unsupported_settings_of_compile_are_refused(groups: Groups) -> None:
    """Experts, recomputation that selects operators, and split backward passes."""
    for settings, options, message in (
        (FAMILIES["olmoe"], {}, "only the dense decoders"),
        ({}, {"recompute": "selective"}, "recompute='selective', which selects single"),
        ({}, {"recompute": "1GiB"}, "recompute='1GiB', which selects single"),
        ({}, {"schedule": "zb-h1"}, "splits the backward pass; use schedule 1f1b"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(settings, groups, compile=True, **options)


def test_the_largest_microbatch_is_found_with_few_predictions() -> None:
    """At most 5 of 12 divisors are predicted; pipelines get at least two microbatches per rank."""
    predicted_rows: list[int] = []

    def predict(rows: int) -> int:
        predicted_rows.append(rows)
        return 100 + 7 * rows

    assert largest_predicted(sizes_of(60, 1), 100 + 7 * 19, predict) == (15, 205)
    assert len(predicted_rows) <= 5
    assert sizes_of(60, 4) == [1, 2, 3, 4, 5, 6]
    assert sizes_of(4, 4) == [1]


@pytest.mark.slow
def test_predicted_memory_of_random_layouts_matches_the_counted_memory() -> None:
    """Forty layouts, half with packed rows, and two with context and pipeline parallelism."""
    check_memory([*random_memory_jobs(40), *PIPED_CONTEXT])


@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize("options", [{}, {"mixed_precision": True}, {"ops": ms_kernels}])
def test_memory_of_a_gpu_is_predicted_with_fake_tensors_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """FSDP gathers weights on the CPU, and kernels for a GPU save what plain operators save."""
    settings = {"rows": 2, "sequence_length": 8, "microbatches": 2}
    plain = {name: value for name, value in options.items() if name != "ops"}
    on_cpu = predict_memory(tiny(), Layout(), device="cpu", **settings, **plain)
    monkeypatch.setattr(memory, "pick_device", lambda _: torch.device("cuda"))
    assert predict_memory(tiny(), Layout(), device="cuda", **settings, **options) == on_cpu

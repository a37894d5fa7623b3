"""Measurements of a plan on this machine: engine steps and their collectives."""

from typing import Any

import pytest
import torch
from attrs import evolve

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.models.registry import architecture
from ms_parallel.planner.cluster import Cluster, ClusterLinks, Collectives, Link
from ms_parallel.planner.fake_cluster import fake_groups, fake_world
from ms_parallel.planner.layouts.candidate import Candidate, Split
from ms_parallel.planner.layouts.measured_times import MeasuredTimes, _Measured, measurable
from ms_parallel.planner.layouts.messages import Message, MessageLog, seconds
from ms_parallel.planner.layouts.passes import DatasheetTimes, RankSeconds
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.layouts.stages import Stages
from ms_parallel.planner.layouts.step import StepTimePredictor
from ms_parallel.planner.roofline.collectives import collective_s

MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
LENGTH, ROWS = 16, 2
CLUSTER = Cluster(
    device="cpu",
    devices_per_node=4,
    memory_gib=1,
    memory_bandwidth_gb_per_s=10,
    peak_tflops={"float32": 0.1},
    measured=True,
    links=ClusterLinks(node=Link(latency_us=100, bandwidth_gb_per_s=1)),
)


pytestmark = pytest.mark.usefixtures("no_process_group")


def rows(count: int) -> dict[str, torch.Tensor]:
    """Rows that repeat one token."""
    tokens = torch.ones(count, LENGTH, dtype=torch.int64)
    return {
        "tokens": tokens,
        "targets": tokens,
        "positions": torch.arange(LENGTH).expand(count, -1),
    }


def collectives_of(layout: Layout, **settings: Any) -> dict[Message, int]:
    """Collectives of a step with two microbatches on the first rank."""
    with fake_groups(layout, torch.device("cpu")) as groups:
        engine = Engine(architecture("llama", MODEL), groups=groups, microbatch_size=1, **settings)
        with MessageLog() as log:
            engine.step(rows(2), NextTokenLoss())
    return log.messages


def sizes_of(messages: dict[Message, int], kind: str) -> dict[int, int]:
    """Number of messages of a kind by size in bytes."""
    return {m.size_bytes: count for m, count in messages.items() if m.kind == kind}


def test_replicas_reduce_their_gradients_once() -> None:
    """In one message, for any number of microbatches."""
    parameters = ModelSizes.of(architecture("llama", MODEL)).parameters
    sizes = sizes_of(collectives_of(Layout(data=2), sharding="replicate"), "all_reduce")
    assert sizes[4 * parameters] == 1


def test_shards_are_gathered_for_every_pass_of_a_block() -> None:
    """ZeRO-3 gathers twice per microbatch and reduces after each; ZeRO-1 does both once."""
    layers, passes = MODEL["num_hidden_layers"], 2
    (layer, *_) = ModelSizes.of(architecture("llama", MODEL)).layers
    layer_bytes = 4 * layer.all
    zero3 = collectives_of(Layout(data=2), sharding="zero3")
    assert sizes_of(zero3, "all_gather")[layer_bytes] == 2 * passes * layers
    assert sizes_of(zero3, "reduce_scatter")[layer_bytes] == passes * layers
    zero1 = collectives_of(Layout(data=2), sharding="zero1")
    assert sizes_of(zero1, "all_gather")[layer_bytes] == layers
    assert sizes_of(zero1, "reduce_scatter")[layer_bytes] == layers


def test_tensor_ranks_exchange_hidden_states_by_the_formula() -> None:
    """Two gathers and two scatters in a layer's forward and in its backward pass, by stride."""
    hidden_bytes = LENGTH * MODEL["hidden_size"] * 4
    layers, passes = MODEL["num_hidden_layers"], 2
    messages = collectives_of(Layout(tensor=2, data=2), sharding="zero1")
    for op in ("all_gather", "reduce_scatter"):
        matching = {m: count for m, count in messages.items() if m.kind == op and m.stride == 1}
        assert {m.ranks for m in matching} == {2}
        # The embedding scatters and the head gathers, in both directions.
        assert matching[Message(op, hidden_bytes, 2, 1)] == passes * (4 * layers + 2)  # type: ignore[arg-type]
    assert {m.stride for m in messages if m.ranks == 2} == {1, 2}


def test_measured_collectives_override_link_estimates() -> None:
    """Measured kinds use their own line; the others follow from point-to-point messages."""
    gather = Link(latency_us=10, bandwidth_gb_per_s=2)
    measured = evolve(CLUSTER, collectives=Collectives(all_gather=gather, all_reduce=gather))
    assert collective_s(measured, "all_gather", 1e9, 4) == pytest.approx(3 * 10e-6 + 0.75 / 2)
    assert collective_s(measured, "all_reduce", 1e9, 2) == pytest.approx(2 * (10e-6 + 0.5 / 2))
    for op in ("reduce_scatter", "all_to_all", "send"):
        assert collective_s(measured, op, 1e9, 4) == collective_s(CLUSTER, op, 1e9, 4)  # type: ignore[arg-type]
    messages = {Message("all_gather", 1 << 20, 4, 1): 3, Message("send", 8, 4, 1): 1}
    assert seconds(messages, measured) == pytest.approx(
        3 * collective_s(measured, "all_gather", 1 << 20, 4) + collective_s(measured, "send", 8, 4)
    )


@pytest.mark.parametrize(
    ("schedule", "sides"), [("1f1b", 1), ("interleaved-1f1b", 3), ("v-half", 2)]
)
def test_a_message_costs_its_sender_and_its_receiver(schedule: str, sides: int) -> None:
    """Per microbatch and side of a stage that borders on another rank's stage."""
    sizes = ModelSizes.of(architecture("llama", MODEL))
    split = Split(layout=Layout(pipeline=2), rows=1, microbatches=4)
    pipelined = evolve(candidate(split.layout, "auto"), split=split, schedule=schedule)
    compute = []
    for cluster in (CLUSTER, evolve(CLUSTER, message_us=500.0)):
        times = DatasheetTimes(sizes, cluster, LENGTH, "float32")
        steps = StepTimePredictor(
            stages=Stages(sizes), times=times, cluster=cluster, message_bytes=1.0, width=4
        )
        compute.append(steps.of(pipelined).compute)
    assert compute[1] - compute[0] == pytest.approx(4 * sides * 500e-6)


def measured_times() -> MeasuredTimes:
    """Times of the model measured on this machine."""
    config = architecture("llama", MODEL)
    configs = measurable(config)
    assert configs is not None
    assert [small.num_hidden_layers for small in configs] == [1, 4]
    sheet = DatasheetTimes(ModelSizes.of(config), CLUSTER, LENGTH, "float32")
    return MeasuredTimes(configs, sheet, rows(1), torch.device("cpu"), {})


def candidate(layout: Layout, sharding: Any) -> Candidate:
    """A candidate with two microbatches."""
    split = Split(layout=layout, rows=ROWS, microbatches=2)
    return Candidate(
        split=split, schedule="1f1b", sharding=sharding, recompute="none", offload="none"
    )


def test_the_cost_of_sharding_is_measured_per_block() -> None:
    """ZeRO-3 computes and communicates per block and microbatch, replicas once per step."""
    times = measured_times()
    with fake_world(4):
        single = times.step_costs(candidate(Layout(), "auto"))
        copies = times.step_costs(candidate(Layout(data=2), "replicate"))
        shards = times.step_costs(candidate(Layout(data=2), "zero3"))
    assert single is not None
    assert copies is not None
    assert shards is not None
    assert (
        single.pass_layer.compute
        == single.pass_layer.communication
        == single.step_layer.communication
        == 0.0
    )
    assert copies.pass_layer.communication == shards.step_layer.communication == 0.0
    assert copies.step_layer.communication > 0.0
    # FSDP's hooks take a few hundred microseconds per block; the other side is noise.
    assert shards.pass_layer.compute > max(1e-5, copies.pass_layer.compute)
    (layer, *_) = times.datasheet.sizes.layers
    gather, scatter = (
        collective_s(CLUSTER, op, 4 * layer.all, 2) for op in ("all_gather", "reduce_scatter")
    )
    assert shards.pass_layer.communication == pytest.approx(2 * gather + scatter)


def test_layers_of_a_measured_pass_are_equal_and_communicate() -> None:
    """Communication of a layer follows the formula, for measured and interpolated rows."""
    times = measured_times()
    for count in (1, 3):
        split = Split(layout=Layout(tensor=2), rows=count, microbatches=1)
        with fake_world(2):
            passes = times.passes(split, "none")
        assert len(passes.layers) == MODEL["num_hidden_layers"]
        assert len({*passes.layers}) == 1
        assert 0.0 < passes.layers[0].communication < passes.layers[0].all
        plain = times.datasheet.passes(split, "none")
        assert passes.layers[0].communication == pytest.approx(plain.layers[0].communication)


def test_recomputation_is_measured_with_its_collectives() -> None:
    """It adds to the input gradients of layers, not to weight gradients or the ends."""
    times = measured_times()
    split = Split(layout=Layout(tensor=2), rows=2, microbatches=1)
    with fake_world(2):
        plain, recomputed = (times.passes(split, mode) for mode in ("none", "full"))
    plain_layer, recomputed_layer = plain.layers[0], recomputed.layers[0]
    assert recomputed_layer.forward >= plain_layer.forward
    assert recomputed_layer.backward_input > plain_layer.backward_input
    assert recomputed_layer.backward_weight == plain_layer.backward_weight
    assert recomputed_layer.communication > plain_layer.communication
    assert recomputed.last == plain.last


def test_a_split_backward_pass_is_measured_with_its_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compared with a full backward pass with the same recomputation."""
    seconds = {
        ("1f1b", "none"): 1.0,
        ("zb-h1", "none"): 1.5,
        ("1f1b", "full"): 2.0,
        ("zb-h1", "full"): 4.0,
    }

    def measured(_: MeasuredTimes, config: Any, key: Any, rows: int) -> _Measured:
        compute = seconds[key.schedule, key.recompute] * config.num_hidden_layers * rows
        return _Measured(passes=RankSeconds(compute=compute), forward=0.3, step=RankSeconds())

    monkeypatch.setattr(MeasuredTimes, "_measure", measured)
    times = measured_times()
    plain = evolve(candidate(Layout(pipeline=2), "auto"), schedule="zb-h1")
    with fake_world(2):
        costs = [times.step_costs(evolve(plain, recompute=mode)) for mode in ("none", "full")]
    assert [cost.pass_layer.compute for cost in costs if cost is not None] == [0.5, 2.0]


def test_a_measured_model_has_fewer_large_layers() -> None:
    """Three layers with about a hundred million weights each."""
    large = {"hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 16}
    configs = measurable(architecture("llama", MODEL | large))
    assert configs is not None
    assert [config.num_hidden_layers for config in configs] == [1, 3]

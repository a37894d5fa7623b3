"""What a plan measures where the device is: whole steps of engines, and their collectives."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
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


@pytest.fixture(autouse=True)
def alone() -> None:
    """Leaves the group of one process that tests of engines before these have made."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rows(count: int) -> dict[str, torch.Tensor]:
    """Rows of the same token."""
    same = torch.ones(count, LENGTH, dtype=torch.int64)
    return {"tokens": same, "targets": same, "positions": torch.arange(LENGTH).expand(count, -1)}


def counted(layout: Layout, **settings: Any) -> dict[Message, int]:
    """The collectives of a step of two microbatches on the first rank."""
    with fake_groups(layout, torch.device("cpu")) as groups:
        engine = Engine(architecture("llama", MODEL), groups=groups, microbatch_size=1, **settings)
        with MessageLog() as log:
            engine.step(rows(2), NextTokenLoss())
    return log.messages


def sizes_of(messages: dict[Message, int], kind: str) -> dict[int, int]:
    """How often so many bytes travel."""
    return {one.size_bytes: count for one, count in messages.items() if one.kind == kind}


def test_copies_add_up_their_gradients_once() -> None:
    """All of them in one message, however many microbatches there are."""
    parameters = ModelSizes.of(architecture("llama", MODEL)).parameters
    found = sizes_of(counted(Layout(data=2), sharding="replicate"), "all_reduce")
    assert found[4 * parameters] == 1


def test_shards_are_gathered_for_every_pass_of_a_block() -> None:
    """ZeRO-3: twice a microbatch, and its gradients are summed after each; ZeRO-1: once."""
    layers, passes = MODEL["num_hidden_layers"], 2
    (layer, *_) = ModelSizes.of(architecture("llama", MODEL)).layers
    whole = 4 * layer.all
    often = counted(Layout(data=2), sharding="zero3")
    assert sizes_of(often, "all_gather")[whole] == 2 * passes * layers
    assert sizes_of(often, "reduce_scatter")[whole] == passes * layers
    once = counted(Layout(data=2), sharding="zero1")
    assert sizes_of(once, "all_gather")[whole] == layers
    assert sizes_of(once, "reduce_scatter")[whole] == layers


def test_tensor_ranks_exchange_hidden_states_as_the_formula_says() -> None:
    """Two gathers and two scatters in a layer's forward, as many in its backward; by the stride."""
    whole = LENGTH * MODEL["hidden_size"] * 4
    layers, passes = MODEL["num_hidden_layers"], 2
    found = counted(Layout(tensor=2, data=2), sharding="zero1")
    for kind in ("all_gather", "reduce_scatter"):
        each = {one: count for one, count in found.items() if one.kind == kind and one.stride == 1}
        assert {one.ranks for one in each} == {2}
        # The embedding scatters what the head gathers, there and back.
        assert each[Message(kind, whole, 2, 1)] == passes * (4 * layers + 2)  # type: ignore[arg-type]
    assert {one.stride for one in found if one.ranks == 2} == {1, 2}


def test_measured_collectives_count_more_than_links() -> None:
    """Each kind by its own line; what was not measured follows from messages between two."""
    gather = Link(latency_us=10, bandwidth_gb_per_s=2)
    here = evolve(CLUSTER, collectives=Collectives(all_gather=gather, all_reduce=gather))
    assert collective_s(here, "all_gather", 1e9, 4) == pytest.approx(3 * 10e-6 + 0.75 / 2)
    assert collective_s(here, "all_reduce", 1e9, 2) == pytest.approx(2 * (10e-6 + 0.5 / 2))
    for kind in ("reduce_scatter", "all_to_all", "send"):
        assert collective_s(here, kind, 1e9, 4) == collective_s(CLUSTER, kind, 1e9, 4)  # type: ignore[arg-type]
    both = {Message("all_gather", 1 << 20, 4, 1): 3, Message("send", 8, 4, 1): 1}
    assert seconds(both, here) == pytest.approx(
        3 * collective_s(here, "all_gather", 1 << 20, 4) + collective_s(here, "send", 8, 4)
    )


@pytest.mark.parametrize(
    ("schedule", "sides"), [("1f1b", 1), ("interleaved-1f1b", 3), ("v-half", 2)]
)
def test_a_message_costs_its_sender_and_its_taker(schedule: str, sides: int) -> None:
    """For each microbatch and each side of a stage that lies at another rank's stage."""
    sizes = ModelSizes.of(architecture("llama", MODEL))
    split = Split(layout=Layout(pipeline=2), rows=1, microbatches=4)
    asked = evolve(candidate(split.layout, "auto"), split=split, schedule=schedule)
    worked = []
    for cluster in (CLUSTER, evolve(CLUSTER, message_us=500.0)):
        times = DatasheetTimes(sizes, cluster, LENGTH, "float32")
        steps = StepTimePredictor(
            stages=Stages(sizes), times=times, cluster=cluster, message_bytes=1.0, width=4
        )
        worked.append(steps.of(asked).compute)
    assert worked[1] - worked[0] == pytest.approx(4 * sides * 500e-6)


def here_times() -> MeasuredTimes:
    """Times of the model by this machine's clock."""
    config = architecture("llama", MODEL)
    configs = measurable(config)
    assert configs is not None
    assert [each.num_hidden_layers for each in configs] == [1, 4]
    sheet = DatasheetTimes(ModelSizes.of(config), CLUSTER, LENGTH, "float32")
    return MeasuredTimes(configs, sheet, rows(1), torch.device("cpu"), {})


def candidate(layout: Layout, sharding: Any) -> Candidate:
    """A candidate of two microbatches."""
    split = Split(layout=layout, rows=ROWS, microbatches=2)
    return Candidate(
        split=split, schedule="1f1b", sharding=sharding, recompute="none", offload="none"
    )


def test_what_sharding_does_for_each_block_is_measured() -> None:
    """ZeRO-3 works for every block and microbatch, and sends; copies work once a step."""
    times = here_times()
    with fake_world(4):
        alone = times.step_costs(candidate(Layout(), "auto"))
        copies = times.step_costs(candidate(Layout(data=2), "replicate"))
        shards = times.step_costs(candidate(Layout(data=2), "zero3"))
    assert alone is not None
    assert copies is not None
    assert shards is not None
    assert (
        alone.pass_layer.compute
        == alone.pass_layer.communication
        == alone.step_layer.communication
        == 0.0
    )
    assert copies.pass_layer.communication == shards.step_layer.communication == 0.0
    assert copies.step_layer.communication > 0.0
    # Hooks of FSDP on a block take some hundred microseconds; what is compared is noise.
    assert shards.pass_layer.compute > max(1e-5, copies.pass_layer.compute)
    (layer, *_) = times.datasheet.sizes.layers
    gather, scatter = (
        collective_s(CLUSTER, kind, 4 * layer.all, 2) for kind in ("all_gather", "reduce_scatter")
    )
    assert shards.pass_layer.communication == pytest.approx(2 * gather + scatter)


def test_layers_of_a_measured_pass_are_alike_and_tensor_ranks_travel() -> None:
    """What travels in a layer is what the formula says, for rows that are measured or between."""
    times = here_times()
    for count in (1, 3):
        split = Split(layout=Layout(tensor=2), rows=count, microbatches=1)
        with fake_world(2):
            found = times.passes(split, "none")
        assert len(found.layers) == MODEL["num_hidden_layers"]
        assert len({*found.layers}) == 1
        assert 0.0 < found.layers[0].communication < found.layers[0].all
        plain = times.datasheet.passes(split, "none")
        assert found.layers[0].communication == pytest.approx(plain.layers[0].communication)


def test_what_is_computed_again_is_measured_with_its_collectives() -> None:
    """Backwards of a layer take longer by it; those of weights, and of the ends, do not."""
    times = here_times()
    split = Split(layout=Layout(tensor=2), rows=2, microbatches=1)
    with fake_world(2):
        plain, again = (times.passes(split, kind) for kind in ("none", "full"))
    one, other = plain.layers[0], again.layers[0]
    assert other.forward >= one.forward
    assert other.backward_input > one.backward_input
    assert other.backward_weight == one.backward_weight
    assert other.communication > one.communication
    assert again.last == plain.last


def test_a_split_backward_is_measured_with_what_it_computes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against a whole one that computes the same again, so that only the split counts."""
    seconds = {
        ("1f1b", "none"): 1.0,
        ("zb-h1", "none"): 1.5,
        ("1f1b", "full"): 2.0,
        ("zb-h1", "full"): 4.0,
    }

    def measured(_: MeasuredTimes, config: Any, key: Any, rows: int) -> _Measured:
        own = seconds[key.schedule, key.recompute] * config.num_hidden_layers * rows
        return _Measured(passes=RankSeconds(compute=own), forward=0.3, step=RankSeconds())

    monkeypatch.setattr(MeasuredTimes, "_measure", measured)
    times = here_times()
    plain = evolve(candidate(Layout(pipeline=2), "auto"), schedule="zb-h1")
    with fake_world(2):
        found = [times.step_costs(evolve(plain, recompute=kind)) for kind in ("none", "full")]
    assert [one.pass_layer.compute for one in found if one is not None] == [0.5, 2.0]


def test_a_measured_model_has_fewer_layers_where_they_are_large() -> None:
    """Three layers are built where each has some hundred million weights."""
    large = {"hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 16}
    configs = measurable(architecture("llama", MODEL | large))
    assert configs is not None
    assert [each.num_hidden_layers for each in configs] == [1, 3]

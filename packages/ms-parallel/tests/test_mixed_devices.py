"""A CPU and devices of another kind train one model together, as CPUs alone do.

The other kind is the tests' own device, which refuses tensors of the CPU as an accelerator does
(see `tests/rig/` at the repository's top): its collectives take its tensors alone, so what travels
between kinds goes through memory.
"""

from pathlib import Path
from typing import Any

import pytest
from launching import write_corpus, write_run
from ms_rig import run_on_rig
from processes import run_processes

from ms_parallel import ConfigError, LayoutError
from ms_parallel.cli import main
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.mixed.devices import Devices
from ms_parallel.cluster.mixed.kinds import check_mixed

RUNS = Path(__file__).with_name("mixed_runs.py")
# Four updates of at most 5e-3 each; gradients and moments differ by float32's rounding.
TOLERANCE = 1e-5


def assert_alike(layout: str, devices: dict[str, str], **options: Any) -> list[dict[str, Any]]:
    """Losses and all weights of unlike devices are those of CPUs; what the former found."""
    count = Layout.parse(layout).world_size
    cpus = {"cpu": f"0-{count - 1}"}
    alone = run_processes(count, RUNS, "weights", layout=layout, devices=cpus, **options)
    mixed = run_on_rig(count, RUNS, "weights", layout=layout, devices=devices, **options)
    for one, other in zip(alone, mixed, strict=True):
        assert other["where"] == [other["device"]]
        assert other["losses"] == pytest.approx(one["losses"], rel=TOLERANCE)
        for name, values in one["weights"].items():
            assert other["weights"][name] == pytest.approx(values, abs=TOLERANCE), name
    assert {each["device"].partition(":")[0] for each in mixed} == {"cpu", "rig"}
    return mixed


def test_a_cpu_and_a_device_train_one_model() -> None:
    """Each has all weights; gradients meet in memory."""
    assert_alike("data=2", {"cpu": "0", "rig:0": "1"})


def test_two_devices_add_up_natively_before_they_meet_the_cpu() -> None:
    """Their own collectives take no other tensors; the first speaks for both."""
    assert_alike("data=3", {"rig": "0,2", "cpu": "1"}, rows=6)


def test_stages_on_unlike_devices_are_one_model() -> None:
    """What a stage sends reaches the next one's device."""
    assert_alike("pipeline=2", {"rig": "0", "cpu": "1"}, microbatch_size=1)


def test_half_precision_is_that_of_each_device() -> None:
    """Both compute in bfloat16 and keep float32 weights, which stay those of each other."""
    given: dict[str, Any] = {"layout": "data=2", "mixed_precision": True}
    alone, _ = run_processes(2, RUNS, "weights", devices={"cpu": "0-1"}, **given)
    first, other = run_on_rig(2, RUNS, "weights", devices={"cpu": "0", "rig": "1"}, **given)
    # Attention is rounded otherwise on the device: to the 8 bits of bfloat16.
    assert first["losses"] == pytest.approx(alone["losses"], rel=2**-8)
    for name, values in first["weights"].items():
        assert other["weights"][name] == pytest.approx(values, abs=1e-6), name


@pytest.mark.parametrize(
    ("layout", "devices"),
    [("data=3", {"cpu": "0", "rig": "1-2"}), ("pipeline=2", {"cpu": "0", "rig": "1"})],
)
def test_copies_that_have_drifted_are_made_equal_where_a_checkpoint_is_made(
    layout: str, devices: dict[str, str]
) -> None:
    """Those of each kind, and of a weight that two stages tie: to the bit, as the first has."""
    ranks = Layout.parse(layout).world_size
    found = run_on_rig(
        ranks,
        RUNS,
        "weights",
        layout=layout,
        devices=devices,
        steps=0,
        drift=1e-6,
        model={"tie_word_embeddings": True},
    )
    first, *others = (each["weights"] for each in found)
    for other in others:
        shared = {
            name: "model.embed_tokens.weight" if "lm_head" in name else name for name in other
        }
        alike = {name for name in other if shared[name] in first}
        assert alike
        for name in alike:
            assert other[name] == first[shared[name]], name


def test_stages_of_one_kind_send_natively_and_those_of_two_through_memory() -> None:
    """The device's own messages take its tensors alone; what goes to the CPU is copied."""
    found = assert_alike("pipeline=3", {"rig": "0-1", "cpu": "2"}, microbatch_size=1)
    wires = [[wire.partition(":")[0] for wire in each["wires"]] for each in found]
    assert wires[0][1] == wires[1][0] == "rig"
    assert wires[1][2] == wires[2][1] == "cpu"


@pytest.mark.slow
def test_pipelines_of_unlike_devices_stand_side_by_side() -> None:
    """Stages of one kind add up natively, those of two kinds through memory."""
    devices = {"cpu": "0,3", "rig": "1-2"}
    assert_alike("data=2,pipeline=2", devices, microbatch_size=1)


def test_a_trainer_shares_out_rows_by_speed_and_goes_on(tmp_path: Path) -> None:
    """A slow CPU beside a device: it gets fewer rows, and a run in two parts is one run."""
    corpus = write_corpus(tmp_path / "corpus")
    given: dict[str, Any] = {
        "corpus": str(corpus),
        "output": str(tmp_path / "run"),
        "slow": {"0": 0.1, "1": 0.0},
        "devices": {"cpu": "0", "rig": "1"},
        "shares": "measured",
        "batch_size": 8,
        "sharding": "replicate",
        "mixed_precision": True,
        "device": None,
    }
    runs = Path(__file__).with_name("share_runs.py")
    first, _ = run_on_rig(2, runs, "trained", steps=6, **given)
    assert first["changes"][0]["rows.0"] < first["changes"][0]["rows.1"]
    assert first["slow"] == [0]
    again, _ = run_on_rig(2, runs, "trained", steps=8, **given)
    assert again["shares"] == first["shares"]
    assert len(again["losses"]) == 2


@pytest.mark.slow
def test_a_run_in_two_parts_is_one_run_to_the_bit(tmp_path: Path) -> None:
    """Losses after a checkpoint, written beside the training, are those of a run that did not stop.

    CPUs alone go on from it too, as near as float32 is.
    """
    corpus = write_corpus(tmp_path / "corpus")
    given: dict[str, Any] = {
        "corpus": str(corpus),
        "slow": {},
        "devices": {"cpu": "0", "rig": "1"},
        "sharding": "replicate",
        "device": None,
        "checkpoint_every": 4,
        "async_checkpoints": True,
        "warmup_steps": 0,
        "final_learning_rate_ratio": 1.0,
    }
    runs = Path(__file__).with_name("share_runs.py")
    whole, _ = run_on_rig(2, runs, "trained", output=str(tmp_path / "whole"), steps=8, **given)
    parts = [
        run_on_rig(2, runs, "trained", output=str(tmp_path / "parts"), steps=steps, **given)[0]
        for steps in (4, 8)
    ]
    assert parts[0]["losses"] + parts[1]["losses"] == whole["losses"]
    given |= {"devices": {"cpu": "0-1"}, "async_checkpoints": False}
    (tmp_path / "parts/checkpoints/step-00000008").rename(tmp_path / "away")
    cpus, _ = run_on_rig(2, runs, "trained", output=str(tmp_path / "parts"), steps=8, **given)
    assert cpus["losses"] == pytest.approx(whole["losses"][4:], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"cpu": "0-1", "npu:0": "1"}, "names rank 1 twice, under both 'cpu' and 'npu:0'"),
        ({"cpu": [0, 0]}, "names rank 0 twice, under cpu"),
        ({"cpu": "0", "npu:0": "2"}, "up to 2 but not rank 1"),
        ({"cpu": "0", "cudda": "1"}, "'cudda' is not a known kind of device; did you mean 'cuda'"),
        ({"cpu:1": "0"}, "a machine has one CPU"),
        (
            {"cpu": "zero"},
            r"ranks of 'cpu' must be numbers such as 0, '0-3' or \[0, 2\], got 'zero'",
        ),
        ({"cpu": "3-1"}, "must be numbers such as 0"),
        ({"cpu": ""}, "must be numbers such as 0"),
        ({}, "must be a table of devices and their ranks"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_name(table: dict[str, Any], said: str) -> None:
    """Twice, not at all, and unknown, each with the remedy."""
    with pytest.raises(ConfigError, match=said):
        Devices.of(table)


def test_numbers_are_those_of_a_machine() -> None:
    """`npu` without a number is the machine's first that no earlier rank of it has."""
    devices = Devices.of({"npu": "0,2-3,5", "cpu": [1, 4]})
    found = [devices.of_rank(rank, rank % 3) for rank in range(6)]
    assert found == ["npu:0", "cpu", "npu:1", "npu:0", "cpu", "npu:1"]


@pytest.mark.parametrize(
    "layout", [Layout(tensor=2), Layout(data=2), Layout(data=4, replicate=2), Layout(context=2)]
)
def test_layouts_whose_ranks_exchange_within_a_block_are_refused(layout: Layout) -> None:
    """By name, with what to set instead."""
    with pytest.raises(
        LayoutError, match=r"devices of several kinds (cannot|do not support) .*; set "
    ):
        check_mixed(layout)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('device = "cpu"\n[devices]\ncpu = "0"', "[devices] both set the ranks' devices"),
        ('[devices]\ncpu = "0-1"', "devices names 2 ranks but the layout has 1"),
        ('[devices]\ncpu = "0"\n"npu:0" = "0"', "names rank 0 twice"),
    ],
)
def test_a_run_file_of_impossible_devices_is_one_line(
    lines: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is built or started, and with 2."""
    run = write_run(tmp_path / "run.toml", tmp_path, device=None)
    text = run.read_text()
    at = text.index("[model_config]")
    run.write_text(f"{text[:at]}{lines}\n{text[at:]}")
    assert main(["train", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_run_on_other_devices_can_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`inspect` needs none of them: it says which rank stands where and what it will hold."""
    run = write_run(tmp_path / "run.toml", tmp_path, device=None, sharding="replicate")
    text = run.read_text()
    at = text.index("[model_config]")
    tables = '[parallel_config]\ndata = 2\n[devices]\ncpu = "0"\n"npu:0" = "1"\n'
    run.write_text(f"{text[:at]}{tables}{text[at:]}")
    assert main(["inspect", str(run)]) == 0
    assert "2 processes" in capsys.readouterr().out

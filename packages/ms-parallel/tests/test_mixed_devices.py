"""A CPU and devices of another type train one model together, with the results of CPUs alone.

The other type is the emulated accelerator in `tests/rig/` of the repository. Like a real one, it
refuses CPU tensors, also in its collectives, so messages between device types go through host
memory.
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
# Four updates of at most 5e-3 each; gradients and moments differ by float32 roundings.
TOLERANCE = 1e-5


def assert_equals_cpus(
    layout: str, devices: dict[str, str], **options: Any
) -> list[dict[str, Any]]:
    """Check that mixed devices give the losses and weights of CPUs; return their results."""
    count = Layout.parse(layout).world_size
    cpus = {"cpu": f"0-{count - 1}"}
    expected = run_processes(count, RUNS, "weights", layout=layout, devices=cpus, **options)
    mixed = run_on_rig(count, RUNS, "weights", layout=layout, devices=devices, **options)
    for cpu_rank, rank in zip(expected, mixed, strict=True):
        assert rank["weight_devices"] == [rank["device"]]
        assert rank["losses"] == pytest.approx(cpu_rank["losses"], rel=TOLERANCE)
        for name, values in cpu_rank["weights"].items():
            assert rank["weights"][name] == pytest.approx(values, abs=TOLERANCE), name
    assert {rank["device"].partition(":")[0] for rank in mixed} == {"cpu", "rig"}
    return mixed


def test_a_cpu_and_a_device_train_one_model() -> None:
    """Each has all weights; gradients are reduced in host memory."""
    assert_equals_cpus("data=2", {"cpu": "0", "rig:0": "1"})


def test_two_devices_reduce_natively_before_the_exchange_with_a_cpu() -> None:
    """Their collectives accept only their tensors; the first device then exchanges with the CPU."""
    assert_equals_cpus("data=3", {"rig": "0,2", "cpu": "1"}, rows=6)


def test_stages_on_different_devices_form_one_model() -> None:
    """Activations reach the device of the next stage."""
    assert_equals_cpus("pipeline=2", {"rig": "0", "cpu": "1"}, microbatch_size=1)


def test_mixed_precision_works_on_mixed_devices() -> None:
    """Both compute in bfloat16, and their float32 weights stay equal."""
    shared: dict[str, Any] = {"layout": "data=2", "mixed_precision": True}
    cpus, _ = run_processes(2, RUNS, "weights", devices={"cpu": "0-1"}, **shared)
    first, other = run_on_rig(2, RUNS, "weights", devices={"cpu": "0", "rig": "1"}, **shared)
    # Attention rounds differently on the device, to the 8 bits of bfloat16.
    assert first["losses"] == pytest.approx(cpus["losses"], rel=2**-8)
    for name, values in first["weights"].items():
        assert other["weights"][name] == pytest.approx(values, abs=1e-6), name


@pytest.mark.parametrize(
    ("layout", "devices"),
    [("data=3", {"cpu": "0", "rig": "1-2"}), ("pipeline=2", {"cpu": "0", "rig": "1"})],
)
def test_replicas_that_have_drifted_are_made_equal_by_a_checkpoint(
    layout: str, devices: dict[str, str]
) -> None:
    """Replicas on all device types and tied weights of two stages become the first rank's."""
    ranks = Layout.parse(layout).world_size
    results = run_on_rig(
        ranks,
        RUNS,
        "weights",
        layout=layout,
        devices=devices,
        steps=0,
        drift=1e-6,
        model={"tie_word_embeddings": True},
    )
    first, *others = (rank["weights"] for rank in results)
    for other in others:
        shared = {
            name: "model.embed_tokens.weight" if "lm_head" in name else name for name in other
        }
        common = {name for name in other if shared[name] in first}
        assert common
        for name in common:
            assert other[name] == first[shared[name]], name


def test_stages_of_one_device_type_send_natively_and_others_through_memory() -> None:
    """The device's own messages carry only its tensors; messages to the CPU are copied."""
    results = assert_equals_cpus("pipeline=3", {"rig": "0-1", "cpu": "2"}, microbatch_size=1)
    wires = [[wire.partition(":")[0] for wire in rank["wires"]] for rank in results]
    assert wires[0][1] == wires[1][0] == "rig"
    assert wires[1][2] == wires[2][1] == "cpu"


@pytest.mark.slow
def test_data_parallel_pipelines_run_on_mixed_devices() -> None:
    """Stages on one device type reduce natively, on two through host memory."""
    devices = {"cpu": "0,3", "rig": "1-2"}
    assert_equals_cpus("data=2,pipeline=2", devices, microbatch_size=1)


def test_a_trainer_assigns_rows_by_speed_and_resumes(tmp_path: Path) -> None:
    """A slow CPU gets fewer rows than the device, and a resumed run keeps the shares."""
    corpus = write_corpus(tmp_path / "corpus")
    shared: dict[str, Any] = {
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
    first, _ = run_on_rig(2, runs, "train_with_shares", steps=6, **shared)
    assert first["changes"][0]["rows.0"] < first["changes"][0]["rows.1"]
    assert first["slow"] == [0]
    resumed, _ = run_on_rig(2, runs, "train_with_shares", steps=8, **shared)
    assert resumed["shares"] == first["shares"]
    assert len(resumed["losses"]) == 2


@pytest.mark.slow
def test_a_resumed_run_on_mixed_devices_is_bit_identical(tmp_path: Path) -> None:
    """Losses after a background checkpoint equal those of an uninterrupted run.

    CPUs alone can resume from it too, within float32 rounding.
    """
    corpus = write_corpus(tmp_path / "corpus")
    shared: dict[str, Any] = {
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
    uninterrupted, _ = run_on_rig(
        2, runs, "train_with_shares", output=str(tmp_path / "whole"), steps=8, **shared
    )
    parts = [
        run_on_rig(
            2, runs, "train_with_shares", output=str(tmp_path / "parts"), steps=steps, **shared
        )[0]
        for steps in (4, 8)
    ]
    assert parts[0]["losses"] + parts[1]["losses"] == uninterrupted["losses"]
    shared |= {"devices": {"cpu": "0-1"}, "async_checkpoints": False}
    (tmp_path / "parts/checkpoints/step-00000008").rename(tmp_path / "away")
    cpus, _ = run_on_rig(
        2, runs, "train_with_shares", output=str(tmp_path / "parts"), steps=8, **shared
    )
    assert cpus["losses"] == pytest.approx(uninterrupted["losses"][4:], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("table", "message"),
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
def test_an_invalid_devices_table_is_refused(table: dict[str, Any], message: str) -> None:
    """Duplicate, missing and unknown entries, with the remedy."""
    with pytest.raises(ConfigError, match=message):
        Devices.of(table)


def test_device_indices_are_those_of_a_machine() -> None:
    """`npu` without an index is the machine's first unused one."""
    devices = Devices.of({"npu": "0,2-3,5", "cpu": [1, 4]})
    names = [devices.of_rank(rank, rank % 3) for rank in range(6)]
    assert names == ["npu:0", "cpu", "npu:1", "npu:0", "cpu", "npu:1"]


@pytest.mark.parametrize(
    "layout", [Layout(tensor=2), Layout(data=2), Layout(data=4, replicate=2), Layout(context=2)]
)
def test_layouts_with_exchanges_within_a_block_are_refused(layout: Layout) -> None:
    """By name, with the remedy."""
    with pytest.raises(
        LayoutError, match=r"devices of several kinds (cannot|do not support) .*; set "
    ):
        check_mixed(layout)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('device = "cpu"\n[devices]\ncpu = "0"', "[devices] both set the ranks' devices"),
        ('[devices]\ncpu = "0-1"', "devices names 2 ranks but the layout has 1"),
        ('[devices]\ncpu = "0"\n"npu:0" = "0"', "names rank 0 twice"),
    ],
)
def test_a_run_file_with_invalid_devices_gives_a_one_line_error(
    lines: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, before anything is built or started."""
    run = write_run(tmp_path / "run.toml", tmp_path, device=None)
    text = run.read_text()
    at = text.index("[model_config]")
    run.write_text(f"{text[:at]}{lines}\n{text[at:]}")
    assert main(["train", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.usefixtures("no_process_group")
def test_a_run_on_absent_devices_can_be_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`inspect` works without the devices."""
    run = write_run(tmp_path / "run.toml", tmp_path, device=None, sharding="replicate")
    text = run.read_text()
    at = text.index("[model_config]")
    tables = '[parallel_config]\ndata = 2\n[devices]\ncpu = "0"\n"npu:0" = "1"\n'
    run.write_text(f"{text[:at]}{tables}{text[at:]}")
    assert main(["inspect", str(run)]) == 0
    assert "2 processes" in capsys.readouterr().out

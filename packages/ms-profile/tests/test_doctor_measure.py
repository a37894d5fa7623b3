"""`doctor --measure` writes a cluster file that the planner of ms-parallel reads."""

import importlib.util
import json
import math
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import run_command, run_processes

pytest.importorskip("torch")

from ms_profile.cli import main
from ms_profile.doctor.cluster import LINK_BYTES, link_from_times, partner

HERE = Path(__file__).parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
IMPORTS = ("ms_profile.doctor.cluster", "ms_profile.doctor.report", "ms_profile.doctor.examine")
RUN = """model = "llama"
dataset = "{folder}"
output_dir = "{folder}/out"
sequence_length = 32
batch_size = {batch_size}
vocab_size = 320
steps = 12
device = "cpu"
[model_config]
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
"""


@given(
    latency_us=st.floats(min_value=0.5, max_value=1e4),
    bandwidth=st.floats(min_value=0.01, max_value=1e3),
)
def test_a_link_is_recovered_from_exact_times(latency_us: float, bandwidth: float) -> None:
    """Latency and bandwidth are recovered, up to the four digits of the cluster file."""
    times = [latency_us * 1e-6 + size / (bandwidth * 1e9) for size in LINK_BYTES]
    link = link_from_times(LINK_BYTES, times)
    assert math.isclose(link["latency_us"], latency_us, rel_tol=1e-3)
    assert math.isclose(link["bandwidth_gb_per_s"], bandwidth, rel_tol=1e-3)


@given(
    st.lists(
        st.floats(min_value=0.7, max_value=1.4),
        min_size=len(LINK_BYTES),
        max_size=len(LINK_BYTES),
    )
)
def test_a_noisy_link_is_fitted_at_least_as_well_as_the_true_line(noise: list[float]) -> None:
    """The fit minimizes squared logarithms of fitted / measured, so no other line is closer."""
    times = [factor * (30e-6 + size / 4e9) for size, factor in zip(LINK_BYTES, noise, strict=True)]
    link = link_from_times(LINK_BYTES, times)

    def loss(latency_s: float, bandwidth: float) -> float:
        pairs = zip(LINK_BYTES, times, strict=True)
        return sum(math.log((latency_s + size / bandwidth) / time) ** 2 for size, time in pairs)

    fitted = loss(link["latency_us"] * 1e-6, link["bandwidth_gb_per_s"] * 1e9)
    # 1% and 1e-6 for the rounding to four digits.
    assert fitted <= loss(30e-6, 4e9) * 1.01 + 1e-6


def test_ranks_exchange_messages_in_pairs_of_a_level() -> None:
    """Within a node and between nodes; partners are mutual, and the odd rank out waits."""
    levels = 0
    for ranks_per_node, nodes in ((2, 1), (4, 2), (3, 3), (1, 4), (8, 5)):
        world = ranks_per_node * nodes
        for span, step, count in (
            (ranks_per_node, 1, ranks_per_node),
            (world, ranks_per_node, nodes),
        ):
            if count < 2:
                continue
            levels += 1
            partners = [partner(rank, span, step, count) for rank in range(world)]
            assert partners.count(None) == (world // count if count % 2 else 0)
            for rank, peer in enumerate(partners):
                if peer is not None:
                    assert partners[peer] == rank
                    assert abs(peer - rank) == step
                    assert rank // span == peer // span
    assert levels == 8


def test_the_planner_reads_a_measured_cluster_file(tmp_path: Path) -> None:
    """Two real ranks measure rates, memory, links and collectives at small sizes."""
    out = tmp_path / "cluster.toml"
    report, _ = run_processes(2, HERE / "doctor_runs.py", "measure_small_sizes", out=str(out))
    assert report["ranks"] == 2
    check_cluster_file(out, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_command_measures_at_all_sizes(ranks: int, tmp_path: Path) -> None:
    """Under torchrun; three ranks do not divide the sizes."""
    out = tmp_path / "cluster.toml"
    words = [*TORCHRUN, "--nproc-per-node", str(ranks), "-m", "ms_profile", "doctor"]
    words += ["--device", "cpu", "--json", "--measure", "--out", str(out)]
    run = run_command(words, environment=os.environ | {"OMP_NUM_THREADS": "1"}, imports=IMPORTS)
    assert json.loads(run.stdout)["ranks"] == ranks, run.stderr
    check_cluster_file(out, ranks)


def check_cluster_file(path: Path, ranks: int) -> None:
    """Check the values of a measured file, and plan a run with it."""
    cluster = tomllib.loads(path.read_text())
    assert cluster["measured"] is True
    assert (cluster["device"], cluster["nodes"], cluster["devices_per_node"]) == ("cpu", 1, ranks)
    assert cluster["cores_per_node"] >= 1
    assert cluster["peak_tflops"]["float32"] > 1e-3  # any core does a billion operations a second
    assert 0.1 < cluster["memory_bandwidth_gb_per_s"] < 1e4
    assert 1 < cluster["links"]["node"]["latency_us"] < 1e5
    assert 1e-3 < cluster["links"]["node"]["bandwidth_gb_per_s"] < 1e3
    assert 1 < cluster["message_us"] < 1e5
    names = {"all_gather", "all_reduce", "all_to_all", "reduce_scatter"}
    assert set(cluster["collectives"]) == names
    if importlib.util.find_spec("ms_parallel") is None:
        pytest.skip("ms-parallel is not installed")
    run_file = path.with_name("run.toml")
    run_file.write_text(RUN.format(folder=path.parent, batch_size=2 * ranks))
    command = ["-m", "ms_parallel", "plan", str(run_file), "--cluster", str(path), "--json"]
    planned = run_command(command)
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["devices"] == ranks, planned.stderr
    assert plan["best"][0]["step"]["compute"] > 0


@pytest.mark.parametrize("words", [["--measure"], ["--out", "x.toml"]])
def test_measure_and_out_need_each_other(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The error line shows a complete command."""
    assert main(["doctor", *words]) == 2
    assert "doctor --measure --out CLUSTER.toml" in capsys.readouterr().err

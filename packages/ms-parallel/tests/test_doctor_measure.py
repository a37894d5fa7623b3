"""What the doctor measures becomes a cluster file that the planner reads."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import TORCHRUN, environment, write_run
from processes import run_command

from ms_parallel.cli import main
from ms_parallel.errors import ConfigError
from ms_parallel.planner.cluster import read_cluster
from ms_parallel.planner.measuring.fit import fit_link
from ms_parallel.planner.measuring.machines import SIZES_BYTES, partner

IMPORTS = ("ms_parallel.planner.measuring.machines", "ms_parallel.cluster.doctor.page")


@given(
    latency_us=st.floats(min_value=0.5, max_value=1e4),
    bandwidth=st.floats(min_value=0.01, max_value=1e3),
)
def test_a_link_is_found_again_from_its_times(latency_us: float, bandwidth: float) -> None:
    """Times of latency and bandwidth give these back, but for the four digits of the file.

    Where one of the two makes less than a hundred-thousandth of every time, rounding hides it.
    """
    times = [latency_us * 1e-6 + size / (bandwidth * 1e9) for size in SIZES_BYTES]
    link = fit_link(SIZES_BYTES, times)
    assert math.isclose(link.latency_us, latency_us, rel_tol=1e-3)
    assert math.isclose(link.bandwidth_gb_per_s, bandwidth, rel_tol=1e-3)


@given(
    st.lists(
        st.floats(min_value=0.7, max_value=1.4),
        min_size=len(SIZES_BYTES),
        max_size=len(SIZES_BYTES),
    )
)
def test_a_noisy_link_is_fitted_within_the_noise(noise: list[float]) -> None:
    """No size counts more than another: each of the times is met about as well as it was noisy."""
    times = [spread * (30e-6 + size / 4e9) for size, spread in zip(SIZES_BYTES, noise, strict=True)]
    link = fit_link(SIZES_BYTES, times)
    a_s, b = link.latency_us * 1e-6, link.bandwidth_gb_per_s * 1e9
    fitted, true = (
        sum(
            math.log((latency + size / bandwidth) / t) ** 2
            for size, t in zip(SIZES_BYTES, times, strict=True)
        )
        for latency, bandwidth in ((a_s, b), (30e-6, 4e9))
    )
    assert fitted <= true * 1.01 + 1e-6  # the line that the times were drawn around is one of all


@pytest.mark.parametrize("times", [[1.0], [1.0, 0.0]])
def test_too_little_tells_no_link(times: list[float]) -> None:
    """One size, or a time that is none."""
    with pytest.raises(ConfigError, match="do not tell a link"):
        fit_link(SIZES_BYTES[: len(times)], times)


def test_ranks_send_in_pairs_of_their_level() -> None:
    """Inside a node and between nodes; each is its partner's partner, and an odd one waits."""
    for each, nodes in ((2, 1), (4, 2), (3, 3), (1, 4), (8, 5)):
        world = each * nodes
        for span, step, count in ((each, 1, each), (world, each, nodes)):
            if count < 2:
                continue
            found = [partner(rank, span, step, count) for rank in range(world)]
            waits = found.count(None)
            assert waits == (world // count if count % 2 else 0)
            for rank, other in enumerate(found):
                if other is not None:
                    assert found[other] == rank
                    assert abs(other - rank) == step
                    assert rank // span == other // span


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_measured_file_is_one_that_plans_are_made_for(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes: rates, memory and the links between them; `plan` takes the file.

    Three ranks cannot share equally what two can.
    """
    out = tmp_path / "cluster.toml"
    words = [*TORCHRUN, "--nproc-per-node", str(ranks), "-m", "ms_parallel", "doctor"]
    words += ["--device", "cpu", "--json", "--measure", "--out", str(out)]
    run = run_command(words, environment=environment(), imports=IMPORTS)
    assert json.loads(run.stdout)["ranks"] == ranks, run.stderr
    cluster = read_cluster(out)
    assert (cluster.device, cluster.nodes, cluster.devices_per_node) == ("cpu", 1, ranks)
    assert cluster.measured
    assert cluster.cores_per_node >= 1
    assert cluster.tflops("float32") > 1e-3  # a core of any age does a billion a second
    assert 0.1 < cluster.memory_bandwidth_gb_per_s < 1e4
    link = cluster.link(2)
    assert 1 < link.latency_us < 1e5
    assert 1e-3 < link.bandwidth_gb_per_s < 1e3
    assert cluster.message_us is None or 1 < cluster.message_us < 1e5  # None: several threads
    asked = write_run(tmp_path / "run.toml", tmp_path, batch_size=2 * ranks)
    assert main(["plan", str(asked), "--cluster", str(out), "--best", "1", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["devices"] == ranks
    assert planned["best"][0]["step"]["compute"] > 0


@pytest.mark.parametrize("words", [["--measure"], ["--out", "x.toml"]])
def test_measuring_and_a_place_for_it_go_together(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says how."""
    assert main(["doctor", *words]) == 2
    assert "doctor --measure --out CLUSTER.toml" in capsys.readouterr().err

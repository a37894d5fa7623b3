"""Links: the fit against known lines, and real ping-pong over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_profile.errors import LinkError
from ms_profile.links.fit import fit_link
from ms_profile.links.matrix import LinkMatrix
from ms_profile.links.measure import SIZES, measure_links


@given(
    latency=st.floats(1e-6, 1e-2),
    bandwidth=st.floats(1e7, 1e12),
    seed=st.integers(0, 1000),
)
def test_a_line_is_fitted_within_10_percent_despite_noise(
    latency: float, bandwidth: float, seed: int
) -> None:
    """With 2% noise, latency and bandwidth are within 10% where the sizes reveal both."""
    sizes = np.array(SIZES, dtype=float)
    times = latency + sizes / bandwidth
    noisy = times * np.random.default_rng(seed).uniform(0.98, 1.02, len(sizes))
    fit = fit_link(sizes, noisy)
    if latency > sizes[0] / bandwidth * 10:
        assert fit.latency_s == pytest.approx(latency, rel=0.1)
    if sizes[-1] / bandwidth > latency:
        assert fit.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.1)
    assert fit.residual < 0.05


def test_a_flat_line_has_no_bandwidth() -> None:
    """An unmeasurable bandwidth is None, never infinite or negative."""
    assert fit_link([8, 1024], [2e-5, 1e-5]).bandwidth_bytes_per_s is None


@pytest.mark.parametrize(("sizes", "times"), [([8], [1.0]), ([8, 8], [1.0, 2.0]), ([8, 9], [1, 0])])
def test_times_that_do_not_determine_a_line_are_refused(
    sizes: list[int], times: list[float]
) -> None:
    """Fewer than two sizes, or a time of zero."""
    with pytest.raises(LinkError, match="do not determine a line"):
        fit_link(sizes, times)


def test_measuring_needs_ranks() -> None:
    """The message names the option."""
    pytest.importorskip("torch")
    with pytest.raises(LinkError, match="--nproc-per-node"):
        measure_links()


def test_three_real_ranks_have_three_links(tmp_path: Path) -> None:
    """Every pair once, with the fit of its times; durations depend on the host's load."""
    pytest.importorskip("torch")
    out = tmp_path / "links.json"
    command = [sys.executable, "-m", "ms_profile", "link", "--nproc-per-node", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [*command, "--repeats", "4", "--json", "--out", str(out)],
        capture_output=True, text=True, env=environment, timeout=180,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    matrix = msgspec.json.decode(out.read_bytes(), type=LinkMatrix)
    assert json.loads(process.stdout)["format"] == "ms-profile.links.1"
    assert [(pair.first, pair.second) for pair in matrix.pairs] == [(0, 1), (0, 2), (1, 2)]
    for pair in matrix.pairs:
        assert min(pair.times_s) > 0
        assert pair.fit == fit_link(pair.sizes_bytes, pair.times_s)

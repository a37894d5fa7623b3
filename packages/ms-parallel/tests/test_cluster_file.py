"""Cluster files: contents, refusals, and the links between ranks."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_parallel.errors import ConfigError
from ms_parallel.planner.cluster import Cluster, ClusterLinks, Link, read_cluster, write_cluster
from ms_parallel.planner.roofline.chips import chip_named

EXAMPLE = """
chip = "h100-sxm"
nodes = 16
devices_per_node = 8
memory_gib = 80
memory_bandwidth_gb_per_s = 3350
price_per_hour = 2.5

[peak_tflops]
bfloat16 = 989.4
float32 = 66.9

[links.node]
latency_us = 4
bandwidth_gb_per_s = 450

[links.network]
latency_us = 8
bandwidth_gb_per_s = 50
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "CLUSTER.toml"
    path.write_text(text)
    return path


def test_links_depend_on_the_distance_of_ranks(tmp_path: Path) -> None:
    """Ranks within a node use its link, others the network."""
    cluster = read_cluster(_file(tmp_path, EXAMPLE))
    assert cluster.devices == 128
    assert cluster.link(8) == Link(latency_us=4, bandwidth_gb_per_s=450)
    assert cluster.link(9) == cluster.links.network
    assert cluster.tflops("float16") == 989.4  # defaults to bfloat16's
    assert cluster.slowdown(8) == 1.0
    with pytest.raises(ConfigError, match="129 devices exceed the cluster's 128"):
        cluster.link(129)


@given(
    nodes=st.integers(1, 512),
    groups=st.integers(1, 8),
    group=st.integers(1, 8),
    rate=st.floats(1e-3, 1e5),
    latency=st.floats(0, 1e6),
    cores=st.none() | st.integers(1, 256),
)
def test_a_cluster_survives_a_write_and_a_read(
    tmp_path_factory: pytest.TempPathFactory,
    nodes: int,
    groups: int,
    group: int,
    rate: float,
    latency: float,
    cores: int | None,
) -> None:
    """A cluster equals its file's contents, to the last digit."""
    link = Link(latency_us=latency, bandwidth_gb_per_s=rate)
    cluster = Cluster(
        device="cpu",
        nodes=nodes,
        devices_per_node=groups * group,
        group_devices=group,
        cores_per_node=cores,
        memory_gib=rate,
        memory_bandwidth_gb_per_s=rate,
        peak_tflops={"float32": rate},
        measured=True,
        links=ClusterLinks(group=link, node=link, network=link),
    )
    path = tmp_path_factory.mktemp("cluster") / "CLUSTER.toml"
    write_cluster(path, cluster, title="a\nmachine")
    assert read_cluster(path) == cluster


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nodez = 1", "unknown key 'nodez'; did you mean 'nodes'"),
        ("links.network.latency_ms = 1", "unknown key 'latency_ms'; did you mean 'latency_us'"),
        ("links.netwrk.latency_us = 1", "unknown key 'netwrk'; did you mean 'network'"),
        ("links.node = 1", "node must be a table of settings, got 1"),
        ("peak_tflops.bf16 = 1", "unknown dtype 'bf16' in peak_tflops; did you mean 'bfloat16'"),
        ("peak_tflops.bfloat16 = 0", "peak_tflops.bfloat16 is 0; use a number above 0"),
        ("group_devices = 3", "does not divide devices_per_node=8"),
        ("group_devices = 4", r"links.group is missing; add a table \[links.group\]"),
        ("nodes = 1000000", "8000000 devices exceed"),
        ("memory_gib = 0", "memory_gib must be a number .*, got 0"),
        ("measured = 1", "measured must be true or false, got 1"),
    ],
)
def test_an_invalid_cluster_file_is_refused_in_one_line(
    tmp_path: Path, change: str, message: str
) -> None:
    """The line names the file, the key and valid values."""
    path = _file(tmp_path, EXAMPLE)
    with pytest.raises(ConfigError, match=message) as raised:
        read_cluster(path, [change])
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_number_is_named(tmp_path: Path) -> None:
    """Values without a default are required."""
    text = EXAMPLE.replace("memory_gib = 80\n", "").replace('chip = "h100-sxm"\n', "")
    with pytest.raises(ConfigError, match="'memory_gib' is missing; add it"):
        read_cluster(_file(tmp_path, text))


def test_processes_that_share_cores_are_slower() -> None:
    """Four processes on two cores take twice as long as two."""
    link = Link(latency_us=1, bandwidth_gb_per_s=1)
    cluster = Cluster(
        device="cpu",
        devices_per_node=4,
        cores_per_node=2,
        memory_gib=1,
        memory_bandwidth_gb_per_s=10,
        peak_tflops={"float32": 0.1},
        links=ClusterLinks(node=link),
    )
    assert [cluster.slowdown(n) for n in (1, 2, 3, 4)] == [1.0, 1.0, 1.5, 2.0]


def test_values_of_a_known_chip_are_optional(tmp_path: Path) -> None:
    """A file that names a chip has the chip's values, and overrides them."""
    network = Link(latency_us=8, bandwidth_gb_per_s=50)
    text = "[links.network]\nlatency_us = 8\nbandwidth_gb_per_s = 50\n"
    cluster = read_cluster(_file(tmp_path, f'chip = "mi300x"\nnodes = 2\nmemory_gib = 1\n{text}'))
    chip = chip_named("mi300x")
    assert cluster.memory_gib == 1
    assert cluster.devices == 2 * chip.node_devices
    assert cluster.peak_tflops == chip.peak_tflops
    assert cluster.links.network == network
    assert cluster.links.node is not None
    assert cluster.links.node.bandwidth_gb_per_s == chip.link_gb_per_s
    with pytest.raises(ConfigError, match=r"unknown chip .h1000."):
        read_cluster(_file(tmp_path, 'chip = "h1000"'))


def test_a_measured_file_may_have_the_drivers_chip_name(tmp_path: Path) -> None:
    """`ms-profile doctor --measure` writes the driver's name and all rates."""
    text = EXAMPLE.replace('"h100-sxm"', '"NVIDIA H100 80GB HBM3"')
    with pytest.raises(ConfigError, match="unknown chip"):
        read_cluster(_file(tmp_path, text))
    cluster = read_cluster(_file(tmp_path, f"measured = true\n{text}"))
    assert cluster.chip == "NVIDIA H100 80GB HBM3"
    assert cluster.memory_gib == 80

"""Cluster files: TOML tables with the settings of `Cluster`.

If `chip` is a known chip, its values need not be in the file.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import asdict

from ms_parallel.errors import ConfigError
from ms_parallel.files.durable import write_file, writing
from ms_parallel.files.toml_text import toml_text
from ms_parallel.planner.cluster.cluster import DTYPES, Cluster
from ms_parallel.planner.roofline.chips import Chip, chip_named
from ms_parallel.settings.run_file import build, read_settings

LATENCY_US = 5.0
"""Latency of a message within a node of a known chip: the launch latency of NCCL and HCCL."""


def read_cluster(path: str | Path, overrides: Sequence[str] = ()) -> Cluster:
    """Read a cluster file.

    Args:
        path: path of the file.
        overrides: `key=value` or `table.key=value`, as for run files.

    Raises:
        ConfigError: the file cannot be read, a key is missing or unknown (the nearest one is
            suggested), or a value is invalid.
    """
    settings = read_settings(path, overrides)
    # A measured file is complete, and its chip is the driver's name of the device.
    if isinstance(settings.get("chip"), str) and settings.get("measured") is not True:
        try:
            _fill(settings, chip_named(settings["chip"]))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    return build(Cluster, settings, where=str(path))


def parse_cluster(text: str, *, where: str) -> Cluster:
    """Parse the text of a measured cluster file.

    Args:
        text: TOML text.
        where: origin of the text, for error messages.

    Raises:
        ConfigError: a key or value is not that of a cluster.
    """
    return build(Cluster, tomllib.loads(text), where=where)


def _fill(settings: dict[str, Any], chip: Chip) -> None:
    """Fill in the known values of a chip that are not set."""
    settings.setdefault("device", "npu" if chip.name.startswith("ascend") else "cuda")
    settings.setdefault("devices_per_node", chip.node_devices)
    settings.setdefault("memory_gib", chip.memory_gib)
    settings.setdefault("memory_bandwidth_gb_per_s", chip.memory_gb_per_s)
    rates = {dtype: rate for dtype, rate in chip.peak_tflops.items() if dtype in DTYPES}
    settings.setdefault("peak_tflops", rates)
    settings.setdefault("mesh", chip.mesh)
    # The network between nodes does not depend on the chip, so it is never filled in.
    links = settings.setdefault("links", {})
    if isinstance(links, dict):
        link = {"latency_us": LATENCY_US, "bandwidth_gb_per_s": chip.link_gb_per_s}
        links.setdefault("node", link)


def cluster_text(cluster: Cluster, *, title: str = "a cluster") -> str:
    """Format a cluster as the text of a cluster file.

    Args:
        cluster: the cluster; None values are left out.
        title: one-line comment at the top.
    """
    return toml_text(asdict(cluster), title=title)


def write_cluster(path: Path, cluster: Cluster, *, title: str = "a cluster") -> None:
    """Write a cluster file, atomically.

    Raises:
        WriteError: it cannot be written.
    """
    with writing(path):
        write_file(path, cluster_text(cluster, title=title).encode())

"""Cluster files: a TOML table of exactly the settings of `Cluster`.

Where `chip` names a known one, what is known of it need not be given.
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
"""Latency of a message within a node whose chip is known: what NCCL and HCCL take to begin."""


def read_cluster(path: str | Path, overrides: Sequence[str] = ()) -> Cluster:
    """Read a cluster file.

    Args:
        path: the file.
        overrides: `key=value` or `table.key=value`, as of run files.

    Raises:
        ConfigError: the file cannot be read, a key is unknown (the nearest known one is named) or
            missing, or a value cannot be used.
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
    """Add what is known of a chip and not given."""
    settings.setdefault("device", "npu" if chip.name.startswith("ascend") else "cuda")
    settings.setdefault("devices_per_node", chip.node_devices)
    settings.setdefault("memory_gib", chip.memory_gib)
    settings.setdefault("memory_bandwidth_gb_per_s", chip.memory_gb_per_s)
    rates = {dtype: rate for dtype, rate in chip.peak_tflops.items() if dtype in DTYPES}
    settings.setdefault("peak_tflops", rates)
    settings.setdefault("mesh", chip.mesh)
    links = settings.setdefault("links", {})
    if isinstance(links, dict):
        known = {"latency_us": LATENCY_US, "bandwidth_gb_per_s": chip.link_gb_per_s}
        links.setdefault("node", known)


def cluster_text(cluster: Cluster, *, title: str = "a cluster") -> str:
    """Write a cluster as the text that `read_cluster` reads.

    Args:
        cluster: its values; what is None is left out.
        title: what it is, as a comment at the top; one line.
    """
    return toml_text(asdict(cluster), title=title)


def write_cluster(path: Path, cluster: Cluster, *, title: str = "a cluster") -> None:
    """Write a file that `read_cluster` reads, whole or not at all.

    Raises:
        WriteError: it cannot be written.
    """
    with writing(path):
        write_file(path, cluster_text(cluster, title=title).encode())

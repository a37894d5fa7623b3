"""Cluster files: devices, their rates and memory, and the links between them."""

from ms_parallel.planner.cluster.cluster import (
    DTYPES,
    LEVELS,
    Cluster,
    ClusterLinks,
    Collectives,
    Level,
    Link,
)
from ms_parallel.planner.cluster.file import (
    cluster_text,
    parse_cluster,
    read_cluster,
    write_cluster,
)

__all__ = [
    "DTYPES",
    "LEVELS",
    "Cluster",
    "ClusterLinks",
    "Collectives",
    "Level",
    "Link",
    "cluster_text",
    "parse_cluster",
    "read_cluster",
    "write_cluster",
]

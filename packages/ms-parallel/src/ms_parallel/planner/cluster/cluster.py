"""A cluster: nodes, devices with their rates and memory, and links by level.

Devices are numbered like ranks, first within a group of neighbors, then within a node, then across
nodes. Ranks that communicate most are neighbors (`ms_parallel.cluster.layout`), so the distance
between the ranks of an axis determines the link they use.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import Attribute, field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.settings import flag, integer, nearest, number, numbers, short_repr, text

DTYPES: Final = ("float32", "tf32", "bfloat16", "float16", "float8")
"""Dtypes with a peak rate."""
SUBSTITUTES: Final[Mapping[str, tuple[str, ...]]] = {
    "float32": ("float32",),
    "tf32": ("tf32", "float32"),
    "bfloat16": ("bfloat16", "float16", "float32"),
    "float16": ("float16", "bfloat16", "float32"),
    "float8": ("float8", "bfloat16", "float16", "float32"),
}
"""By dtype, the dtypes whose rate may be used for it, in order of preference."""
Level = Literal["group", "node", "network"]
LEVELS: Final[tuple[Level, ...]] = ("group", "node", "network")
"""Levels of links, from the nearest."""
MAX_DEVICES: Final = 1 << 20
MAX_RATE: Final = 1e9


def _rates(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    numbers()(instance, attribute, value)
    for dtype, rate in value.items():
        if dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r} in peak_tflops; {nearest(dtype, DTYPES)}")
        if not 0 < rate <= MAX_RATE:
            raise ConfigError(f"peak_tflops.{dtype} is {short_repr(rate)}; use a number above 0")


@frozen(kw_only=True)
class Link:
    """Cost of a message between two devices: latency plus size over bandwidth.

    Raises:
        ConfigError: a number is out of range.
    """

    latency_us: float = field(validator=number(maximum=1e9))
    """One-way latency of an empty message, in microseconds."""
    bandwidth_gb_per_s: float = field(validator=number(minimum=1e-9, maximum=MAX_RATE))
    """10⁹ bytes per second that a device sends while all others send too, one way."""


@frozen(kw_only=True)
class ClusterLinks:
    """Links of a cluster by the distance of two devices."""

    group: Link | None = field(default=None, metadata={"table": Link})
    """Between neighbors in a group of `group_devices`, such as those on one switch."""
    node: Link | None = field(default=None, metadata={"table": Link})
    """Between devices of one node."""
    network: Link | None = field(default=None, metadata={"table": Link})
    """Between nodes."""


@frozen(kw_only=True)
class Collectives:
    """Measured collectives within a node.

    Each is described as a ring: with n processes it takes n - 1 latencies, and (n - 1) / n of the
    total size over the bandwidth; `all_reduce` takes twice that.
    """

    all_gather: Link | None = field(default=None, metadata={"table": Link})
    """Gather each rank's part on all ranks."""
    reduce_scatter: Link | None = field(default=None, metadata={"table": Link})
    """Sum all ranks' tensors; each rank gets a part."""
    all_reduce: Link | None = field(default=None, metadata={"table": Link})
    """Sum the tensors of all ranks; every rank gets the result."""
    all_to_all: Link | None = field(default=None, metadata={"table": Link})
    """Send a part of each rank's tensor to every other rank."""


@frozen(kw_only=True)
class Cluster:
    """Machines for a run, existing or planned.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or a link is missing.
    """

    chip: str | None = field(default=None, validator=text(optional=True))
    """Chip, such as `h100-sxm`; known values of the chip need not be in the file."""
    device: str = field(default="cuda", validator=text())
    """Device type in torch: `cuda`, `npu`, or `cpu`, where each process counts as a device."""
    nodes: int = field(default=1, validator=integer(maximum=MAX_DEVICES))
    """Number of machines."""
    devices_per_node: int = field(default=1, validator=integer(maximum=MAX_DEVICES))
    """Devices per machine."""
    group_devices: int | None = field(default=None, validator=integer(optional=True))
    """Devices per group, which communicate over `links.group`; None without groups."""
    mesh: bool = field(default=False, validator=flag)
    """The devices of a node are connected pairwise, without a switch, so a subset of them
    has only its share of `links.node`."""
    cores_per_node: int | None = field(default=None, validator=integer(optional=True))
    """CPU cores per node that its processes share for computing; None for accelerators."""
    message_us: float | None = field(default=None, validator=number(optional=True, maximum=1e9))
    """CPU time in microseconds of a process to send and receive a message; None if not measured, or
    if messages overlap with the device's computation."""
    memory_gib: float = field(validator=number(minimum=1e-6, maximum=1e7))
    """Memory per device available to a run, in 2³⁰ bytes."""
    memory_bandwidth_gb_per_s: float = field(validator=number(minimum=1e-6, maximum=MAX_RATE))
    """Memory bandwidth of a device, in 10⁹ bytes per second."""
    peak_tflops: Mapping[str, float] = field(validator=_rates)
    """Peak rate of dense matrix products per device, in 10¹² operations per second, by dtype."""
    measured: bool = field(default=False, validator=flag)
    """Rates and links were measured; otherwise they are from data sheets, and only a fraction is
    achieved."""
    price_per_hour: float | None = field(default=None, validator=number(optional=True))
    """Price of one device per hour, in any currency."""
    links: ClusterLinks = field(factory=ClusterLinks, metadata={"table": ClusterLinks})
    """Latency and bandwidth of each level."""
    collectives: Collectives = field(factory=Collectives, metadata={"table": Collectives})
    """Measured collectives within a node; otherwise they are predicted from `links`."""

    def __attrs_post_init__(self) -> None:
        group = self.group_devices
        if not self.peak_tflops:
            raise ConfigError("peak_tflops has no rate; add one, such as bfloat16 = 100")
        if self.devices > MAX_DEVICES:
            raise ConfigError(f"{self.devices} devices exceed {MAX_DEVICES}; lower nodes")
        if group is not None and self.devices_per_node % group:
            raise ConfigError(
                f"group_devices={group} does not divide devices_per_node={self.devices_per_node};"
                " use a divisor"
            )
        # A level is needed if two devices exist whose nearest common level it is.
        needed = {
            "group": group is not None and group > 1,
            "node": self.devices_per_node > (group or 1),
            "network": self.nodes > 1,
        }
        for level, is_needed in needed.items():
            if is_needed and getattr(self.links, level) is None:
                raise ConfigError(
                    f"links.{level} is missing; add a table [links.{level}] with latency_us and"
                    " bandwidth_gb_per_s"
                )

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def memory_bytes(self) -> int:
        """Memory per device in bytes."""
        return int(self.memory_gib * (1 << 30))

    def level(self, span: int) -> Level:
        """Level of the slowest link among neighboring devices.

        Args:
            span: number of devices from the first to the last, inclusive.
        """
        if span <= (self.group_devices or 1):
            return "group"
        return "node" if span <= self.devices_per_node else "network"

    def link(self, span: int) -> Link:
        """Slowest link among neighboring devices.

        Args:
            span: as in `level`; at most all devices.

        Raises:
            ConfigError: the span exceeds the number of devices.
        """
        if span > self.devices:
            raise ConfigError(f"{span} devices exceed the cluster's {self.devices}; raise nodes")
        link: Link | None = getattr(self.links, self.level(span))
        # A level without a link connects no two devices, so its cost does not matter.
        return link or Link(latency_us=0.0, bandwidth_gb_per_s=MAX_RATE)

    def tflops(self, dtype: str) -> float:
        """Peak rate for a dtype, or for its nearest substitute, in 10¹² operations per second.

        Raises:
            ConfigError: the cluster has no rate for the dtype or a substitute.
        """
        for substitute in SUBSTITUTES.get(dtype, ()):
            if substitute in self.peak_tflops:
                return self.peak_tflops[substitute]
        raise ConfigError(f"peak_tflops has no {dtype}; add it to the cluster file")

    def slowdown(self, processes: int) -> float:
        """Factor by which processes slow down when this many share the cores of a node."""
        return 1.0 if self.cores_per_node is None else max(1.0, processes / self.cores_per_node)

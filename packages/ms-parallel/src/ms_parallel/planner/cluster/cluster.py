"""The values of a cluster: nodes, devices, what a device computes and holds, links by level.

Devices are numbered like ranks: those of a group of neighbors, of a node, of the cluster. Ranks
that talk most are neighbors (`ms_parallel.cluster.layout`), so how far apart the ranks of an axis
lie says which link they talk over.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import Attribute, field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.settings import flag, integer, nearest, number, numbers, short_repr, text

DTYPES: Final = ("float32", "tf32", "bfloat16", "float16", "float8")
"""What rates are given for."""
NEAREST: Final[Mapping[str, tuple[str, ...]]] = {
    "float32": ("float32",),
    "tf32": ("tf32", "float32"),
    "bfloat16": ("bfloat16", "float16", "float32"),
    "float16": ("float16", "bfloat16", "float32"),
    "float8": ("float8", "bfloat16", "float16", "float32"),
}
"""Dtypes whose rate stands for that of a dtype: the first that is given."""
Level = Literal["group", "node", "network"]
LEVELS: Final[tuple[Level, ...]] = ("group", "node", "network")
"""Levels of links, nearest first."""
MOST_DEVICES: Final = 1 << 20
MOST_RATE: Final = 1e9


def _rates(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    numbers()(instance, attribute, value)
    for dtype, rate in value.items():
        if dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r} in peak_tflops; {nearest(dtype, DTYPES)}")
        if not 0 < rate <= MOST_RATE:
            raise ConfigError(f"peak_tflops.{dtype} is {short_repr(rate)}; give a number above 0")


@frozen(kw_only=True)
class Link:
    """What a message between two devices takes: its latency, and its size by the bandwidth.

    Raises:
        ConfigError: a number is out of range.
    """

    latency_us: float = field(validator=number(maximum=1e9))
    """Microseconds that an empty message takes one way."""
    bandwidth_gb_per_s: float = field(validator=number(minimum=1e-9, maximum=MOST_RATE))
    """10⁹ bytes that a device sends in a second while all others send too, one way."""


@frozen(kw_only=True)
class Links:
    """The links of a cluster, by how far apart two devices lie."""

    group: Link | None = field(default=None, metadata={"table": Link})
    """Between neighbors of one group of `group_devices`, such as those of one switch."""
    node: Link | None = field(default=None, metadata={"table": Link})
    """Between devices of one node."""
    network: Link | None = field(default=None, metadata={"table": Link})
    """Between nodes."""


@frozen(kw_only=True)
class Collectives:
    """What collectives of a node's processes take, where they were measured.

    Each is a ring's: of n processes it takes n - 1 latencies, and the n - 1 parts of n that a rank
    sends of the whole by the bandwidth; twice as much for `all_reduce`.
    """

    all_gather: Link | None = field(default=None, metadata={"table": Link})
    """Each rank's part to all ranks."""
    reduce_scatter: Link | None = field(default=None, metadata={"table": Link})
    """The sum of all ranks' tensors, a part to each rank."""
    all_reduce: Link | None = field(default=None, metadata={"table": Link})
    """The sum of all ranks' tensors, whole to each rank."""
    all_to_all: Link | None = field(default=None, metadata={"table": Link})
    """A part of each rank's tensor to every other rank."""


@frozen(kw_only=True)
class Cluster:
    """Machines that a run could be on.

    Raises:
        ConfigError: a value is of the wrong kind or out of range, or a link is missing.
    """

    chip: str | None = field(default=None, validator=text(optional=True))
    """What the devices are, such as `h100-sxm`; a file need not give what is known of it."""
    device: str = field(default="cuda", validator=text())
    """What torch calls its devices: `cuda`, `npu`, or `cpu`, where a device is one process."""
    nodes: int = field(default=1, validator=integer(maximum=MOST_DEVICES))
    """Machines."""
    devices_per_node: int = field(default=1, validator=integer(maximum=MOST_DEVICES))
    """Devices of a machine."""
    group_devices: int | None = field(default=None, validator=integer(optional=True))
    """Neighbors in a node that talk over `links.group`; None where all of a node are equal."""
    mesh: bool = field(default=False, validator=flag)
    """Whether devices of a node are joined pair by pair, without a switch: some of them have only
    their share of `links.node`."""
    cores_per_node: int | None = field(default=None, validator=integer(optional=True))
    """Processor cores that the processes of a node share where they compute; None where each device
    computes by itself."""
    message_us: float | None = field(default=None, validator=number(optional=True, maximum=1e9))
    """Microseconds that a process works to send a message and take one; None where it was not
    measured, or where messages leave beside what a device computes."""
    memory_gib: float = field(validator=number(minimum=1e-6, maximum=1e7))
    """Memory of a device that a run may take, in 2³⁰ bytes."""
    memory_bandwidth_gb_per_s: float = field(validator=number(minimum=1e-6, maximum=MOST_RATE))
    """10⁹ bytes that a device reads or writes of its memory in a second."""
    peak_tflops: Mapping[str, float] = field(validator=_rates)
    """10¹² operations of a device in a second in dense matrix products, by dtype."""
    measured: bool = field(default=False, validator=flag)
    """Whether rates and links were measured; otherwise they are those of a data sheet, of which
    a run reaches a part."""
    price_per_hour: float | None = field(default=None, validator=number(optional=True))
    """Price of one device for an hour, in any currency."""
    links: Links = field(factory=Links, metadata={"table": Links})
    """Latency and bandwidth of each level."""
    collectives: Collectives = field(factory=Collectives, metadata={"table": Collectives})
    """What collectives within a node take, where they were measured; else `links` decide."""

    def __attrs_post_init__(self) -> None:
        group = self.group_devices
        if not self.peak_tflops:
            raise ConfigError("peak_tflops has no rate; add one, such as bfloat16 = 100")
        if self.devices > MOST_DEVICES:
            raise ConfigError(f"{self.devices} devices are above {MOST_DEVICES}; lower nodes")
        if group is not None and self.devices_per_node % group:
            raise ConfigError(
                f"group_devices={group} does not divide devices_per_node={self.devices_per_node};"
                " choose a divisor"
            )
        needed = {
            "group": group is not None and group > 1,
            "node": self.devices_per_node > (group or 1),
            "network": self.nodes > 1,
        }
        for level, talks in needed.items():
            if talks and getattr(self.links, level) is None:
                raise ConfigError(
                    f"links.{level} is missing; add a table [links.{level}] with latency_us and"
                    " bandwidth_gb_per_s"
                )

    @property
    def devices(self) -> int:
        """All of them."""
        return self.nodes * self.devices_per_node

    @property
    def memory_bytes(self) -> int:
        """Memory of a device."""
        return int(self.memory_gib * (1 << 30))

    def level(self, span: int) -> Level:
        """Return the level of the slowest link among so many neighboring devices.

        Args:
            span: how many devices lie between the first and the last of them, both counted.
        """
        if span <= (self.group_devices or 1):
            return "group"
        return "node" if span <= self.devices_per_node else "network"

    def link(self, span: int) -> Link:
        """Return what so many neighboring devices talk over: the slowest link among them.

        Args:
            span: as in `level`; at most all devices.

        Raises:
            ConfigError: more devices are asked for than there are.
        """
        if span > self.devices:
            raise ConfigError(f"{span} devices of {self.devices} are asked for; raise nodes")
        found: Link | None = getattr(self.links, self.level(span))
        return found or Link(latency_us=0.0, bandwidth_gb_per_s=MOST_RATE)

    def tflops(self, dtype: str) -> float:
        """Return the rate for a dtype, in 10¹² operations a second; if it has none, of the nearest.

        Raises:
            ConfigError: none is given that could stand for it.
        """
        for each in NEAREST.get(dtype, ()):
            if each in self.peak_tflops:
                return self.peak_tflops[each]
        raise ConfigError(f"peak_tflops has no {dtype}; add it to the cluster file")

    def slowdown(self, processes: int) -> float:
        """Return how many times longer a process takes, where so many of a node share its cores."""
        return 1.0 if self.cores_per_node is None else max(1.0, processes / self.cores_per_node)

"""Which device each rank of a run computes on, where they are not all of one kind."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from attrs import field, frozen

from ms_parallel.errors import ConfigError, LayoutError

KINDS = ("cpu", "cuda", "npu", "xpu", "hpu", "mtia", "mps", "maia")
NAME = re.compile(r"([a-z]{1,32})(:[0-9]{1,3})?")
RANGE = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7}))?")
MOST_RANKS = 1 << 20


@frozen
class Devices:
    """The name of each rank's device, such as `cpu`, `npu` or `cuda:1`, in the order of ranks.

    One without a number is the machine's first that no earlier rank of that machine has.
    """

    names: tuple[str, ...] = field()

    @classmethod
    def of(cls, table: Mapping[str, int | str | Sequence[int | str]]) -> "Devices":
        """Read a table of devices and the ranks that each has.

        Args:
            table: by a device's name a rank, several as in `"0-3,8"`, or a list of those.

        Raises:
            ConfigError: a device is none, or a rank is named twice or not at all.
        """
        if not isinstance(table, Mapping) or not table:
            raise ConfigError(
                f"devices is {_shown(table)}; give a table of devices and their ranks, such as"
                ' cpu = "0"'
            )
        found: dict[int, str] = {}
        for name, ranks in table.items():
            _check_name(name)
            for rank in _ranks(name, ranks):
                if rank in found:
                    first = f"both {found[rank]!r} and {name!r}" if found[rank] != name else name
                    raise ConfigError(
                        f"devices names rank {rank} twice, under {first}; name each rank once"
                    )
                found[rank] = name
        for rank in range(len(found)):
            if rank not in found:
                raise ConfigError(
                    f"devices names ranks up to {max(found)} and not rank {rank}; give rank {rank}"
                    " a device too"
                )
        return cls(tuple(found[rank] for rank in range(len(found))))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each rank's device."""
        return tuple(name.partition(":")[0] for name in self.names)

    @property
    def are_mixed(self) -> bool:
        """Whether there is more than one kind."""
        return len(set(self.kinds)) > 1

    def check_world(self, processes: int) -> None:
        """Check that each process of a run has a device.

        Raises:
            LayoutError: there are more or fewer.
        """
        if len(self.names) != processes:
            raise LayoutError(
                f"devices names {len(self.names)} ranks and the layout has {processes}; name ranks"
                f" 0 to {processes - 1}"
            )

    def of_rank(self, rank: int, local_rank: int) -> str:
        """Return the device of a rank, with its number.

        Args:
            rank: among all.
            local_rank: among those of its machine, which follow one another.
        """
        name = self.names[rank]
        if name == "cpu" or ":" in name:
            return name
        before = self.kinds[rank - local_rank : rank]
        return f"{name}:{before.count(name)}"


def devices_of(value: Any) -> Devices | None:
    """Make `Devices` of a table; return None and `Devices` as they are."""
    return value if value is None or isinstance(value, Devices) else Devices.of(value)


def _check_name(name: Any) -> None:
    from ms_parallel.torch_private import privateuse1_name  # here, as `--help` imports no torch

    known = (*KINDS, privateuse1_name())
    match = NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ConfigError(f"devices names {_shown(name)}, which is no device; such as 'npu:0'")
    kind, number = match.groups()
    if kind not in known:
        raise ConfigError(f"devices names {name!r}, a device of no known kind; {_nearest(kind)}")
    if kind == "cpu" and number is not None:
        raise ConfigError(f"devices names {name!r}, and a machine has one CPU; write 'cpu'")


def _ranks(name: str, given: int | str | Sequence[int | str]) -> list[int]:
    """List the ranks of one device, as given."""
    parts: list[Any] = (
        list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    )
    found: list[int] = []
    for part in [piece.strip() for each in parts for piece in str(each).split(",")]:
        match = RANGE.fullmatch(part)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if last < first or last >= MOST_RANKS:
            raise ConfigError(
                f"devices gives {name!r} the ranks {_shown(given)}; give numbers such as 0, '0-3'"
                " or [0, 2]"
            )
        found += range(first, last + 1)
    if not found:
        raise ConfigError(f"devices gives {name!r} no rank; give it one, or leave it out")
    return found


def _nearest(kind: str) -> str:
    near = get_close_matches(kind, KINDS, n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(KINDS)}"


def _shown(value: object) -> str:
    return repr(value)[:80]

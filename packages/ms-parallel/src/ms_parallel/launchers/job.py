"""Settings of a run on a cluster."""

import re
from pathlib import Path
from typing import Any

from attrs import Attribute, field, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.settings import integer, short_repr
from ms_parallel.settings.validators import Check

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,45}[a-z0-9])?")
"""Valid names of a Kubernetes Job, short enough for the suffixes of its pods."""
MODULES = re.compile(r"ms_[a-z]+( [a-z]+)?")
TIME = re.compile(r"([0-9]+-)?[0-9]{1,3}:[0-9]{2}:[0-9]{2}")
SAFE_PATH = re.compile(r"[\w./@%+=,-]+")
"""Paths that need no quoting in a shell or in YAML."""


def _matches(pattern: "re.Pattern[str]", expected: str) -> Check:
    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ConfigError(f"{attribute.name} must be {expected}, got {short_repr(value)}")

    return check


@frozen(kw_only=True)
class ClusterJob:
    """Run of a module on the machines of a cluster.

    Raises:
        ConfigError: a value is out of range.
    """

    run_file: str = field(validator=_matches(SAFE_PATH, "a path without spaces"))
    """Path of the run file on the machines."""
    nodes: int = field(validator=integer(maximum=100_000))
    """Number of machines."""
    devices: int = field(validator=integer(maximum=1024))
    """Number of processes per machine, one per device."""
    name: str = field(
        default="ms-train",
        validator=_matches(NAME, "at most 47 lower-case letters, digits and hyphens"),
    )
    module: str = field(
        default="ms_parallel train",
        validator=_matches(MODULES, "a module and its command, such as 'ms_align grpo'"),
    )
    """Module and command that take the run file."""
    time: str = field(
        default="24:00:00",
        validator=_matches(TIME, "a time limit such as 24:00:00 or 2-00:00:00"),
    )
    cpus: int = field(default=64, validator=integer(maximum=4096))
    """CPU cores per machine."""
    grace_s: int = field(default=180, validator=integer(minimum=30, maximum=3600))
    """Seconds between the stop signal and the kill, for writing a checkpoint."""

    @property
    def threads(self) -> int:
        """CPU threads per process."""
        return max(1, self.cpus // self.devices)

    def check_layout(self, layout: Layout) -> None:
        """Compare the number of processes with the layout of the run file.

        Raises:
            ConfigError: they differ.
        """
        processes = self.nodes * self.devices
        if layout.world_size != processes:
            raise ConfigError(
                f"nodes x devices must be {layout.world_size}, the processes of the layout"
                f" {layout}, got {self.nodes} x {self.devices} = {processes}; change one of them"
            )


def read_job_layout(run_file: Path) -> Layout | None:
    """Return the layout in a run file of `ms-parallel train`; None if it is chosen at startup.

    Raises:
        ConfigError: the run file is invalid.
    """
    from ms_parallel.run_file import read_run_file

    layout = read_run_file(run_file).options.parallel_config
    return layout if isinstance(layout, Layout) else None

"""Variables of the collective libraries, from the environment or NCCL's configuration files."""

from ms_parallel.cluster.doctor.recording.recording import Examined, Recording

FILES = ("home/.nccl.conf", "etc/nccl.conf")
"""Configuration files of NCCL for variables that are not set, the user's first."""
ON = ("1", "true", "yes")


def variable(recording: Recording, machine: Recording, name: str) -> tuple[str, str] | None:
    """Return the value of a variable and its source; None if it is not set.

    Args:
        recording: recording of the rank.
        machine: recording of its machine, with the files.
        name: name of the variable.
    """
    if name in recording.machine.environment:
        return recording.machine.environment[name].strip(), "the environment"
    for path in FILES if name.startswith("NCCL_") else ():
        for line in (machine.text(path) or "").splitlines():
            key, _, value = line.partition("#")[0].partition("=")
            if key.strip() == name:
                return value.strip(), f"/{path}" if path.startswith("etc") else f"~/{path[5:]}"
    return None


def value(examined: Examined, recording: Recording, name: str) -> str:
    """Value of a variable on a rank; empty if not set."""
    setting = variable(recording, examined.machine_of(recording.machine.rank), name)
    return setting[0] if setting else ""

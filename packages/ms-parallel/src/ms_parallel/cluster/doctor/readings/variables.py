"""Variables of the collective libraries: of the process, or else of NCCL's own files."""

from ms_parallel.cluster.doctor.recording.recording import Examined, Recording

FILES = ("home/.nccl.conf", "etc/nccl.conf")
"""What NCCL reads where a variable is not set, the user's own first."""
ON = ("1", "true", "yes")


def variable(at: Recording, machine: Recording, name: str) -> tuple[str, str] | None:
    """Find the value of a variable and where it is set; None where it is not.

    Args:
        at: the rank.
        machine: the recording of its machine, which has the files.
        name: of the variable.
    """
    if name in at.machine.environment:
        return at.machine.environment[name].strip(), "the environment"
    for path in FILES if name.startswith("NCCL_") else ():
        for line in (machine.text(path) or "").splitlines():
            key, _, value = line.partition("#")[0].partition("=")
            if key.strip() == name:
                return value.strip(), f"/{path}" if path.startswith("etc") else f"~/{path[5:]}"
    return None


def value(examined: Examined, at: Recording, name: str) -> str:
    """Return the value of a variable on a rank; empty where it is not set."""
    found = variable(at, examined.machine_of(at.machine.rank), name)
    return found[0] if found else ""

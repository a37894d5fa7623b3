"""`ms-parallel doctor`: say what this machine has."""

from argparse import ArgumentParser, Namespace

from ms_parallel.command_line import GIB, add_json, print_json

HELP = "say what this machine has"
EXAMPLE = "ms-parallel doctor --json"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    add_json(parser)


def run(options: Namespace) -> int:
    """Print the facts of this machine, and its problems."""
    from ms_parallel.cluster.doctor import examine

    machine = examine()
    if options.json:
        return print_json(machine)
    print(f"python       {machine.python} on {machine.system}")
    print(f"processor    {machine.cores} cores, {machine.memory_bytes / GIB:.1f} GiB memory")
    print(f"disk         {machine.free_disk_bytes / GIB:.1f} GiB free here")
    for index, one in enumerate(machine.accelerators):
        print(f"{machine.device}:{index:<8} {one.name}, {one.memory_bytes / GIB:.0f} GiB")
    print(f"a run takes  {machine.device}")
    print(f"backends     {', '.join(machine.backends) or 'none'}")
    print(f"torchrun     {machine.torchrun or 'not found'}")
    for name, version in machine.packages.items():
        print(f"{name:<12} {version or 'not installed'}")
    for problem in machine.problems:
        print(f"problem: {problem}")
    return 0

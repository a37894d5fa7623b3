"""torchrun, with a file of the exit code of each failed process: `launch` runs this module.

torchrun's own exit code is 1 however its processes end, and a process that dies by a signal or by
`os._exit` cannot report it itself. Needs torch.
"""

import sys
from pathlib import Path

import msgspec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import parse_args, run

from ms_profile.log.manifest import write_whole


@record
def main() -> None:
    """Run torchrun with the arguments after the first, which names the file for the exit codes."""
    file, *arguments = sys.argv[1:]
    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        write_whole(Path(file), msgspec.json.encode(codes))
        raise


if __name__ == "__main__":
    main()

"""Run torchrun and write the exit code of each failed process to a file; `launch` runs this module.

torchrun itself exits with 1 however its processes end, and a process that is killed or calls
`os._exit` cannot report its own code. Needs torch.
"""

import sys
from pathlib import Path

import msgspec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import parse_args, run

from ms_profile.log.manifest import write_atomically


@record
def main() -> None:
    """Run torchrun; the first argument is the exit-code file, the rest are torchrun's."""
    file, *arguments = sys.argv[1:]
    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        write_atomically(Path(file), msgspec.json.encode(codes))
        raise


if __name__ == "__main__":
    main()

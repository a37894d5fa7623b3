"""`ms_parallel.files.writing_process` with a planted failure at a write, sync or rename.

Arguments: the failure (`kill`, `kill both`, `full` or `nothing`), the number of the operation, a
file for the number of operations, and the module's own arguments.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ms_parallel.files import durable, writing_process

failure, point, counts, memory, parent = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
done = 0


def with_failure(act: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operation with the failure."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        global done
        done += 1
        Path(counts).write_text(str(done))
        if done == point and failure == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if done == point and failure == "kill both":
            os.kill(int(parent), signal.SIGKILL)
        if done == point and failure.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*args, **kwargs)

    return wrapper


write_all = with_failure(durable.write_all)
durable.write_all = writing_process.write_all = write_all
os.fsync = with_failure(os.fsync)
Path.rename = with_failure(Path.rename)  # type: ignore[method-assign]
writing_process.main(int(memory), int(parent))

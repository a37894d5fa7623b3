"""What runs in a process that works on batches: requests in, answers out, until the pipe closes.

It is started by its path. A request is bytes behind its length in eight; an answer is the same
with one byte before it, which says whether it is an answer or the trace of a failure.
"""

import json
import signal
import sys
import traceback
from importlib import import_module
from typing import BinaryIO

PREFIX_BYTES = 8
ANSWER, FAILURE = b"a", b"f"


def main() -> None:
    """Answer requests; the first one is what the work is prepared with."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks decides
    sys.path[:] = json.loads(sys.argv[2])
    module, _, name = sys.argv[1].partition(":")
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    setup = read(stdin)
    if setup is None:
        return
    try:
        work = getattr(import_module(module), name)(setup)
    except Exception:
        write(stdout, FAILURE, traceback.format_exc().encode())
        return
    while (request := read(stdin)) is not None:
        try:
            write(stdout, ANSWER, work(request))
        except BrokenPipeError:
            return
        except Exception:
            write(stdout, FAILURE, traceback.format_exc().encode())


def read(file: BinaryIO) -> bytes | None:
    """Read one request; None where the pipe is closed."""
    prefix = file.read(PREFIX_BYTES)
    size = int.from_bytes(prefix, "little")
    content = file.read(size)
    return content if len(prefix) == PREFIX_BYTES and len(content) == size else None


def write(file: BinaryIO, kind: bytes, content: bytes) -> None:
    """Write one answer."""
    file.write(kind + len(content).to_bytes(PREFIX_BYTES, "little") + content)
    file.flush()


if __name__ == "__main__":
    main()

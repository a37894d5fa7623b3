"""Main program of a worker process: reads requests and writes results until the pipe closes.

It is started by its path. A request is an 8-byte length and the content; a result is the same after
one byte that tells success from failure (a traceback).
"""

import json
import signal
import sys
import traceback
from importlib import import_module
from typing import BinaryIO

PREFIX_BYTES = 8
RESULT, FAILURE = b"a", b"f"


def main() -> None:
    """Process requests; the first message is the setup."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    sys.path[:] = json.loads(sys.argv[2])
    module, _, name = sys.argv[1].partition(":")
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    # Libraries must not print into the pipe.
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
            write(stdout, RESULT, work(request))
        except BrokenPipeError:
            return
        except Exception:
            write(stdout, FAILURE, traceback.format_exc().encode())


def read(file: BinaryIO) -> bytes | None:
    """Read one message; None if the pipe is closed."""
    prefix = file.read(PREFIX_BYTES)
    size = int.from_bytes(prefix, "little")
    content = file.read(size)
    return content if len(prefix) == PREFIX_BYTES and len(content) == size else None


def write(file: BinaryIO, status: bytes, content: bytes) -> None:
    """Write one result."""
    file.write(status + len(content).to_bytes(PREFIX_BYTES, "little") + content)
    file.flush()


if __name__ == "__main__":
    main()

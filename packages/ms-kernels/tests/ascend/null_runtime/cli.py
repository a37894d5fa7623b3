"""The null runtime's command: run a script and list its aclnn calls."""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ms_kernels.files.untrusted import decoding

from .bridge import Call, record
from .errors import NullRuntimeError
from .start import start

__all__ = ["format_calls", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 2 bad input."""
    options = _parser().parse_args(arguments)
    try:
        with decoding(options.script, error=NullRuntimeError):
            if not options.script.is_file():
                raise NullRuntimeError(f"there is no script {options.script}; name a Python file")
        start()
    except NullRuntimeError as error:
        return _refuse(str(error))
    sys.argv = [str(options.script), *options.arguments]
    with record() as calls:
        runpy.run_path(str(options.script), run_name="__main__")
    if options.calls is not None:
        options.calls.write_text("".join(f"{line}\n" for line in format_calls(calls)))
    return 0


def format_calls(calls: Sequence[Call]) -> list[str]:
    """Format calls, one per line: the name, then dtype and shape of each tensor."""
    lines = []
    for call in calls:
        tensors = [f"{dtype}{list(shape)}".replace(" ", "") for dtype, shape in call.tensors]
        lines.append(" ".join([call.name, *tensors]))
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m null_runtime",
        description="Run a script with torch_npu on a machine without an NPU and without CANN; "
        "set TORCH_DEVICE_BACKEND_AUTOLOAD=0, otherwise torch looks for CANN on import.",
        epilog="example: python -m null_runtime --calls calls.txt train.py",
    )
    parser.add_argument("--calls", type=Path, help="file to write the aclnn calls to, one per line")
    parser.add_argument("script", type=Path, help="a Python file that uses the device npu:0")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def _refuse(reason: str) -> int:
    print(f"null-runtime: {reason}", file=sys.stderr)
    return 2

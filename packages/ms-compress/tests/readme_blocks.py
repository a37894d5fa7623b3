"""The README's code that runs an exported folder, by the runtime that it is for."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```py\n(.*?)```", README.read_text(), flags=re.DOTALL)


def printed(runtime: str) -> str:
    """What the block that imports a runtime prints, in the current folder."""
    (block,) = [each for each in BLOCKS if f"import {runtime}" in each or f"from {runtime}" in each]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block, str(README), "exec"), {})
    return out.getvalue()

"""Run code blocks of docs/compress/runtimes.md, which load an exported folder in its runtime."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "compress" / "runtimes.md"
BLOCKS = re.findall(r"```py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def run_block(runtime: str) -> str:
    """Run the block that imports a runtime in the current folder; return its output."""
    imports = (f"import {runtime}", f"from {runtime}")
    (block,) = [code for code in BLOCKS if any(line in code for line in imports)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block, str(PAGE), "exec"), {})
    return out.getvalue()

"""The schemas of torch_npu's operators that the adapters call, as written down for review."""

import re
from pathlib import Path

import torch

from ms_kernels import operators


def test_the_schemas_are_as_written_down(golden):
    """A new torch_npu that changes one of them is seen here, before anything runs."""
    sources = [path.read_text() for path in Path(operators.__file__).parent.glob("*/ascend.py")]
    named = {name for text in sources for name in re.findall(r"torch\.ops\.npu\.(\w+)", text)}
    schemas = [str(getattr(torch.ops.npu, name).default._schema) for name in sorted(named)]
    golden("schemas.txt", "".join(f"{schema}\n" for schema in schemas))

"""Schemas of the torch_npu operators that the adapters call, stored in a golden file."""

import re
from pathlib import Path

import torch

from ms_kernels import operators


def test_the_schemas_match_the_golden_file(golden):
    """A torch_npu release that changes a schema fails here first."""
    sources = [path.read_text() for path in Path(operators.__file__).parent.glob("*/ascend.py")]
    named = {name for text in sources for name in re.findall(r"torch\.ops\.npu\.(\w+)", text)}
    schemas = [str(getattr(torch.ops.npu, name).default._schema) for name in sorted(named)]
    golden("schemas.txt", "".join(f"{schema}\n" for schema in schemas))

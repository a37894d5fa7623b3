"""The `float8` setting. Needs no torch."""

from typing import Literal, get_args

Float8 = Literal["none", "rowwise", "blockwise", "mxfp8"]
"""How the factors of matrix products are scaled before they are rounded to float8:

- `rowwise`: one scale per row, a power of two, as in torchao's recipe `rowwise`.
- `blockwise`: one scale per 128 elements of a row, and per 128 x 128 block of a weight
  (DeepSeek-V3, arXiv 2412.19437, section 3.3).
- `mxfp8`: one power of two per 32 elements of a row (OCP Microscaling Formats 1.0).
"""
FLOAT8 = get_args(Float8)

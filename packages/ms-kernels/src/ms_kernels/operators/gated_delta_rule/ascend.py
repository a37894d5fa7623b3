"""No adapter: torch_npu has no suitable gated delta rule."""

from ms_kernels.backends.ascend import refused
from ms_kernels.operators.gated_delta_rule.contract import CONTRACT

IMPLEMENTATION = refused(
    CONTRACT,
    "has no fitting kernel: npu_chunk_gated_delta_rule has no gradient and rounds the state to "
    "bfloat16",
)

"""No adapter: torch_npu has no suitable causal convolution."""

from ms_kernels.backends.ascend import refused
from ms_kernels.operators.causal_conv1d.contract import CONTRACT

IMPLEMENTATION = refused(
    CONTRACT,
    "has no fitting kernel: npu_masked_causal_conv1d supports 3 weights per channel, on Ascend 950 "
    "alone, and npu_fused_causal_conv1d has no gradient",
)

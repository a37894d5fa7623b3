"""Our own kernels in Triton: CUDA and AMD GPUs, and Ascend NPUs through triton-ascend.

An operator's `kernels` module holds device code in Triton's language and does not import torch.
Conventions:

1. Grids are one-dimensional, because chips limit the other axes. `first` is the index of a
   launch's first tile, for chips that allow at most 65,535 programs per launch.
2. Offsets that grow with a tensor are 64 bits wide; offsets within a tile are 32 bits wide.
3. Accumulation is in float32.
4. Loads and stores are masked, so sizes need not be multiples of the block size.
"""

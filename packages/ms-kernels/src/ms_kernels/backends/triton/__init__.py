"""Our own kernels in Triton: CUDA and AMD GPUs, and Ascend NPUs through triton-ascend.

An operator's `kernels` module holds device code in Triton's language and knows nothing of torch:

1. All grids have one axis, so that no chip's limit on the others is met; `first` is the tile that
   a launch begins with, for chips that take 65,535 programs at most.
2. Offsets that grow with a tensor are 64 bits wide; those within a tile are 32.
3. Sums are kept in float32.
4. Loads and stores stay within bounds whatever the sizes, so a size need not be a multiple of a
   block.
"""

"""Device code in Triton's language, one file an operator; nothing here knows torch.

All grids have one axis, so that no chip's limit on the others is met; `first` is the tile that a
launch begins with, for chips that take 65,535 programs at most. Offsets that grow with a tensor
are 64 bits wide; those within a tile are 32. Sums are kept in float32. Loads and stores stay
within bounds whatever the sizes, so a size need not be a multiple of a block.
"""

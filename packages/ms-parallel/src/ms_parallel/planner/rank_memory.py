"""What a process of a pipeline rank holds at its peak."""

import msgspec


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of one pipeline rank holds at its peak, in bytes."""

    pipeline: int
    weights: int
    """Its share of them, as the optimizer keeps them."""
    gradients: int
    """Gradients of that share, in float32."""
    moments: int
    """Moments of the optimizer; 0 where they are offloaded."""
    activations: int
    """What forwards keep for their backward, over all microbatches in flight."""
    buffers: int
    """Weights that are gathered, with the buffers that they pass through, gradients that are whole,
    and what the block keeps that is computed again; or gradients that are summed over copies,
    beyond what activations took before."""

    @property
    def total(self) -> int:
        """All of it; what lives for the length of one operator comes on top."""
        return self.weights + self.gradients + self.moments + self.activations + self.buffers

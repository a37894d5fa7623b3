"""Peak memory of a process, by category."""

import msgspec


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of a process of one pipeline rank, in bytes."""

    pipeline: int
    weights: int
    """Weights after sharding, in the optimizer's dtype."""
    gradients: int
    """Gradients of these weights, in float32."""
    moments: int
    """Optimizer state; 0 if offloaded."""
    activations: int
    """Saved activations of all live microbatches."""
    buffers: int
    """The larger of two peaks: in the backward, gathered weights with their communication buffers,
    unsharded gradients and the activations of the block that is being recomputed; or after it, the
    buckets that reduce gradients over replicas, minus the activations that are free by then."""

    @property
    def total(self) -> int:
        """Sum of all categories, without temporaries of single operators."""
        return self.weights + self.gradients + self.moments + self.activations + self.buffers

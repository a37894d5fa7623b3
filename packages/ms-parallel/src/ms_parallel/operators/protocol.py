"""Protocol of the operators that models call.

The modules `ms_parallel.operators` and `ms_kernels` both implement it; pass either as `ops=`.
"""

from typing import Literal, Protocol

from torch import Tensor

Reduction = Literal["mean", "sum", "none"]


class Ops(Protocol):
    """Operators that models call."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float = ...) -> Tensor:
        """Normalize as `ms_parallel.operators.rms_norm` does."""
        ...

    def rotary(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = ...
    ) -> tuple[Tensor, Tensor]:
        """Rotate as `ms_parallel.operators.rotary` does."""
        ...

    def geglu(
        self, gate: Tensor, up: Tensor, *, approximate: Literal["none", "tanh"] = ...
    ) -> Tensor:
        """Gate as `ms_parallel.operators.geglu` does."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Gate as `ms_parallel.operators.swiglu` does."""
        ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = ...,
        documents: Tensor | None = ...,
        window: int | None = ...,
        scale: float | None = ...,
        sinks: Tensor | None = ...,
    ) -> Tensor:
        """Compute attention as `ms_parallel.operators.attention` does."""
        ...

    def cross_entropy(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        z_loss: float = ...,
        reduction: Reduction = ...,
    ) -> Tensor:
        """Compute the loss as `ms_parallel.operators.cross_entropy` does."""
        ...

    def linear_cross_entropy(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = ...,
        reduction: Reduction = ...,
    ) -> Tensor:
        """Compute the loss as `ms_parallel.operators.linear_cross_entropy` does."""
        ...

    def causal_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = ...,
        *,
        documents: Tensor | None = ...,
        silu: bool = ...,
    ) -> Tensor:
        """Convolve as `ms_parallel.operators.causal_conv1d` does."""
        ...

    def gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        documents: Tensor | None = ...,
        scale: float | None = ...,
        normalize: bool = ...,
    ) -> Tensor:
        """Apply the rule as `ms_parallel.operators.gated_delta_rule` does."""
        ...

    def permute_tokens(
        self, x: Tensor, experts: Tensor, *, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sort by expert as `ms_parallel.operators.permute_tokens` does."""
        ...

    def grouped_matmul(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Multiply as `ms_parallel.operators.grouped_matmul` does."""
        ...

    def unpermute_tokens(
        self, rows: Tensor, places: Tensor, weights: Tensor | None = ...
    ) -> Tensor:
        """Combine rows per token as `ms_parallel.operators.unpermute_tokens` does."""
        ...

"""What a model asks of its operators: the seam's Protocol.

`ms_parallel.operators` fits it, and so does `ms_kernels`: pass either module as `ops=`.
"""

from typing import Literal, Protocol

from torch import Tensor

Reduction = Literal["mean", "sum", "none"]


class Ops(Protocol):
    """What a model asks of its operators."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float = ...) -> Tensor:
        """As `ms_parallel.operators.rms_norm`."""
        ...

    def rotary(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = ...
    ) -> tuple[Tensor, Tensor]:
        """As `ms_parallel.operators.rotary`."""
        ...

    def geglu(
        self, gate: Tensor, up: Tensor, *, approximate: Literal["none", "tanh"] = ...
    ) -> Tensor:
        """As `ms_parallel.operators.geglu`."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """As `ms_parallel.operators.swiglu`."""
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
        """As `ms_parallel.operators.attention`."""
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
        """As `ms_parallel.operators.linear_cross_entropy`."""
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
        """As `ms_parallel.operators.causal_conv1d`."""
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
        normalise: bool = ...,
    ) -> Tensor:
        """As `ms_parallel.operators.gated_delta_rule`."""
        ...

    def permute_tokens(
        self, x: Tensor, experts: Tensor, *, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `ms_parallel.operators.permute_tokens`."""
        ...

    def grouped_matmul(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """As `ms_parallel.operators.grouped_matmul`."""
        ...

    def unpermute_tokens(
        self, rows: Tensor, places: Tensor, weights: Tensor | None = ...
    ) -> Tensor:
        """As `ms_parallel.operators.unpermute_tokens`."""
        ...

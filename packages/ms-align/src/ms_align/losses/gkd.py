"""Generalized Jensen-Shannon divergence between student and teacher (Agarwal et al., 2024, "GKD").

With p the teacher's and q the student's distribution, and m = β·p + (1 - β)·q,

    D = β·KL(p ‖ m) + (1 - β)·KL(q ‖ m),    KL(p ‖ q) for β = 0,    KL(q ‖ p) for β = 1.

Logits are read in chunks of `CHUNK_BYTES`: besides the logits of student and teacher, at most six
tensors of that size exist at a time, and the backward pass adds the gradient of the student's
logits. Shapes: B rows, S positions, W columns with targets, V vocabulary, N tokens.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_align.losses.protocol import IGNORED, Batch, Output
from ms_align.losses.sft import token_weights

CHUNK_BYTES = 1 << 24
"""Size of a chunk of float32 logits."""


def divergences(
    student: Tensor, teacher: Tensor, tokens: Tensor, *, beta: float, temperature: float
) -> Tensor:
    """Compute the divergence at each token, in nats.

    Args:
        student: (M, V) logits, any float dtype; receives the gradient.
        teacher: (M, V') logits. If V' ≠ V, as embeddings are padded differently, both
            distributions are restricted to the first min(V, V') tokens.
        tokens: (N,) int64, the rows to compare.
        beta: β, 0 to 1.
        temperature: above 0.

    Returns:
        (N,) float32.
    """
    return cast(
        Tensor,
        _Divergence.apply(student, teacher, tokens, beta, temperature),  # type: ignore[no-untyped-call]
    )


@frozen(kw_only=True)
class GKDLoss:
    """Mean divergence over target tokens; with several teachers, the weighted sum Σ w·D.

    Reads `targets`, `teacher_logits` (B, W, T, V) of T teachers, and optionally `weights` (B, S).
    """

    beta: float
    temperature: float
    teacher_weights: tuple[float, ...] = (1.0,)
    """w of each teacher."""
    first: int = 0
    """First column with a target; `teacher_logits` starts there."""

    statistics: tuple[str, ...] = ()

    def weight(self, batch: Batch) -> float:
        """Sum the weights of the target tokens."""
        return float(token_weights(batch, per_row=False).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the tokens' divergences, and no statistics."""
        total = self.row_sums(output, batch).sum()
        return total, total.new_zeros(0)

    def row_sums(self, output: Output, batch: Batch) -> Tensor:
        """Sum the weighted divergences of each row, (B,)."""
        teacher = batch["teacher_logits"]
        # A microbatch may be narrower, as trailing columns without targets are dropped.
        stop = min(self.first + teacher.shape[1], batch["targets"].shape[1])
        columns = slice(self.first, stop)
        student, teacher = output.logits(columns), teacher[:, : stop - self.first]
        mask = batch["targets"][:, columns] != IGNORED  # (B, W)
        tokens = mask.flatten().nonzero()[:, 0]
        values = torch.zeros(len(tokens), device=student.device)
        for index, weight in enumerate(self.teacher_weights):
            values = values + weight * divergences(
                student.flatten(0, 1),
                teacher[:, :, index].flatten(0, 1),  # a view
                tokens,
                beta=self.beta,
                temperature=self.temperature,
            )
        per_token = torch.zeros_like(mask, dtype=values.dtype).masked_scatter(mask, values)
        return (per_token * token_weights(batch, per_row=False)[:, columns]).sum(1)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        tokens: Tensor,
        beta: float,
        temperature: float,
    ) -> Tensor:
        """Compute the divergences; save both logits."""
        values = student.new_empty(len(tokens), dtype=torch.float32)
        for part, log_q, log_p in _chunks(student, teacher, tokens, temperature):
            slope = _slope(log_q, log_p, beta)
            if beta == 1:
                values[part] = (log_q.exp() * slope).sum(1)
            elif beta == 0:
                values[part] = (log_p.exp() * (log_p - log_q)).sum(1)
            else:
                # slope = (1 - β)·(log q - log m)
                log_m = log_q - slope / (1 - beta)
                values[part] = beta * (log_p.exp() * (log_p - log_m)).sum(1)
                values[part] += (log_q.exp() * slope).sum(1)
        ctx.save_for_backward(student, teacher, tokens)
        ctx.beta, ctx.temperature = beta, temperature
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Compute the gradient of the student's logits, 0 at other rows.

        With z = logits / temperature, dD/dz = q·(g - Σ q·g), where g = dD/dq up to a constant.
        """
        student, teacher, tokens = ctx.saved_tensors
        delta = torch.zeros_like(student)
        for part, log_q, log_p in _chunks(student, teacher, tokens, ctx.temperature):
            q = log_q.exp()
            if ctx.beta == 0:  # g = -p / q, and Σ q·g = -1
                rows = q - log_p.exp()
            else:
                slope = _slope(log_q, log_p, ctx.beta)
                rows = q * (slope - (q * slope).sum(1, keepdim=True))
            rows *= grad[part, None] / ctx.temperature
            delta[tokens[part], : rows.shape[1]] = rows.to(delta.dtype)
        return delta, None, None, None, None


def _slope(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """Compute dD/dq up to a constant: (1 - β)·(log q - log m), or log q - log p for β = 1."""
    if beta in (0, 1):
        return log_q - log_p
    weight = log_q.new_tensor(beta)
    log_m = torch.logaddexp(log_p + weight.log(), log_q + torch.log1p(-weight))
    return (1 - beta) * (log_q - log_m)


def _chunks(
    student: Tensor, teacher: Tensor, tokens: Tensor, temperature: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield log q and log p, (n, V) float32 each, of successive chunks of the tokens."""
    vocabulary = min(student.shape[1], teacher.shape[1])
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    for start in range(0, len(tokens), size):
        part = slice(start, min(start + size, len(tokens)))
        log_q, log_p = (
            (logits[tokens[part], :vocabulary].float() / temperature).log_softmax(1)
            for logits in (student, teacher)
        )
        yield part, log_q, log_p

"""Last-stage output that a loss receives: logits, token losses, entropies and extra heads."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ms_parallel import operators
from ms_parallel.cluster.groups import Groups
from ms_parallel.errors import ModelError
from ms_parallel.models.batch import IGNORED
from ms_parallel.models.staged import RowSplit
from ms_parallel.operators.cpu import widen
from ms_parallel.operators.losses import capped
from ms_parallel.operators.protocol import Ops
from ms_parallel.operators.split_vocabulary import VocabularyParallelLoss
from ms_parallel.split.tensor_parallel import gather_sequence, gather_vocabulary, local_view

ALL_POSITIONS = slice(None)
MAX_SAVED_LOGITS_BYTES = 256 * 2**20
"""Logits up to this size are saved for the backward; larger ones are recomputed in chunks."""


class HeadOutput:
    """Final hidden states and output head, from which logits and losses are computed.

    Args:
        hidden: normalized hidden states (B, S, H); under tensor parallelism the local slice of the
            sequence, (B, S/t, H).
        weight: head weight (V, H); under tensor parallelism a DTensor split over the vocabulary.
        ops: operators of the model.
        groups: process groups of the layout.
        heads: weight and offset of each extra head, by name.
        softcap: soft cap on the logits; None for no cap.
        split: whether the tensor axis splits the sequence and the vocabulary.
        row_split: split of positions under context parallelism; `hidden` then has the local
            positions, while arguments and results of all methods have full rows.
        make_logits: computes logits from hidden states (B, S, H), for heads that are not a plain
            matrix product; the logits are then materialized.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        ops: Ops,
        groups: Groups,
        heads: Mapping[str, tuple[Tensor, Tensor]],
        *,
        softcap: float | None = None,
        split: bool,
        row_split: RowSplit | None = None,
        make_logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.ops = ops
        self.groups = groups
        self.heads = heads
        self.softcap = softcap
        self.split = split
        self.row_split = row_split
        self.make_logits = make_logits
        self.weight = local_view(weight)
        # (B, S/t, H) -> (B, S, H)
        self.hidden = gather_sequence(hidden, groups) if self.split else hidden

    def logits(self, positions: slice = ALL_POSITIONS) -> Tensor:
        """Compute logits (B, S, V) of these positions, gathered over all axes."""
        if self.row_split is None:
            return self._logits(positions)
        # These positions may be on any context rank, so gather before slicing.
        return self.row_split.gather(self._logits(ALL_POSITIONS))[:, positions]

    def _logits(self, positions: slice) -> Tensor:
        """Compute the logits of the local positions."""
        if self.make_logits is not None:
            return self.make_logits(self.hidden[:, positions])
        # (B, S, V/t), or (B, S, V) without tensor parallelism
        local = F.linear(self.hidden[:, positions], self.weight)
        local = local if self.softcap is None else capped(local, self.softcap)
        if not self.split:
            return local
        return gather_vocabulary(local, self.groups)

    def token_losses(
        self, targets: Tensor, *, temperature: float = 1.0, z_loss: float = 0.0
    ) -> Tensor:
        """Compute -log p(target), float32 (float64 for float64) (B, S), 0 for a target of -100."""
        if self.row_split is None:
            return self._token_losses(targets, temperature, z_loss)
        local_targets = self.row_split.select_local(targets)
        return self.row_split.gather(self._token_losses(local_targets, temperature, z_loss))

    def loss_sum(
        self, targets: Tensor, *, weights: Tensor | None = None, z_loss: float = 0.0
    ) -> Tensor:
        """Compute the sum of `token_losses`, weighted by `weights` (B, S); a scalar.

        In a single process this takes three matrix products with the head weight; `token_losses`
        takes four if the logits exceed 256 MiB.
        """
        if self.row_split is not None or self.split or self.make_logits is not None:
            options = {"z_loss": z_loss} if z_loss else {}
            return _weighted_sum(self.token_losses(targets, **options), weights)
        # Only our operators support weights, caps and z-loss; the gradient of each row is then
        # known in the forward pass, so the logits are computed once.
        is_plain = weights is None and self.softcap is None and not z_loss
        if is_plain and self.ops is not operators:
            return self.ops.linear_cross_entropy(self.hidden, self.weight, targets, reduction="sum")
        return operators.linear_cross_entropy(
            self.hidden,
            self.weight,
            targets,
            weights=weights,
            reduction="sum",
            softcap=self.softcap,
            z_loss=z_loss,
        )

    def _token_losses(self, targets: Tensor, temperature: float, z_loss: float) -> Tensor:
        """Compute the losses of the local positions."""
        if temperature != 1.0 and self._has_log_probs(z_loss):
            return -self._log_probs(targets, temperature, entropy=False)
        if temperature != 1.0 or self.make_logits is not None:
            logits = self._logits(ALL_POSITIONS)
            return _token_losses(self.ops, logits, targets, temperature, z_loss)
        if self.split:
            group = self.groups.group("tensor")
            flat, limit = self.hidden.flatten(0, 1), MAX_SAVED_LOGITS_BYTES  # (B·S, H)
            losses: Tensor = VocabularyParallelLoss.apply(  # type: ignore[no-untyped-call]
                flat, self.weight, targets.flatten(), group, limit, self.softcap, z_loss
            )
            return losses.view(targets.shape)
        if self.softcap is not None or z_loss:  # not in the `Ops` protocol
            return operators.linear_cross_entropy(
                self.hidden,
                self.weight,
                targets,
                reduction="none",
                softcap=self.softcap,
                z_loss=z_loss,
            )
        return self.ops.linear_cross_entropy(self.hidden, self.weight, targets, reduction="none")

    def entropies(self, counted: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Compute entropies of softmax(logits / temperature) in nats, float32 (B, S)."""
        if self.row_split is None:
            return self._entropies(counted, temperature)
        return self.row_split.gather(
            self._entropies(self.row_split.select_local(counted), temperature)
        )

    def _entropies(self, counted: Tensor, temperature: float) -> Tensor:
        """Compute the entropies of the local positions."""
        if not self._has_log_probs():
            return _entropies(self._logits(ALL_POSITIONS), counted, temperature)
        # Any token gives the entropy; -100 leaves a position out.
        tokens = torch.where(counted != 0, 0, IGNORED)
        return self._log_probs(tokens, temperature, entropy=True) * counted

    def _has_log_probs(self, z_loss: float = 0.0) -> bool:
        """Whether `ops` computes log-probabilities of this head without storing logits."""
        special = self.split or self.make_logits is not None or self.softcap is not None or z_loss
        return hasattr(self.ops, "token_log_probs") and not special

    def _log_probs(self, tokens: Tensor, temperature: float, *, entropy: bool) -> Tensor:
        """Compute log p(token), or the entropies, of the local positions by `ops`."""
        ops: Any = self.ops  # of `ms_kernels`, not of the protocol
        results = ops.token_log_probs(
            self.hidden, self.weight, tokens, temperature=temperature, entropy=entropy
        )
        log_probs: Tensor = results[1] if entropy else results
        return log_probs

    def head(self, name: str) -> Tensor:
        """Compute an extra head's output for the hidden states, float32 (B, S, width).

        Raises:
            ModelError: the engine was built without this head.
        """
        if name not in self.heads:
            raise ModelError(
                f"the engine has no head {name!r}; build it with heads={{{name!r}: 1}}, or use a"
                " separate model"
            )
        # All tensor ranks compute the same head, and their gradients are summed.
        parts = self.groups.layout.tensor if self.split else 1
        hidden, weight, offset = (
            _divide_gradient(widen(x), parts) for x in (self.hidden, *self.heads[name])
        )
        output = F.linear(hidden, weight, offset)
        return output if self.row_split is None else self.row_split.gather(output)


class LogitsOutput:
    """Output of a model whose forward returns logits.

    Args:
        logits: (B, S, V), the same on every tensor rank.
        ops: operators of the loss.
    """

    def __init__(self, logits: Tensor, ops: Ops = operators) -> None:
        self._logits, self._ops = logits, ops

    def logits(self, positions: slice = ALL_POSITIONS) -> Tensor:
        """Return the logits (B, S, V) of the given positions."""
        return self._logits[:, positions]

    def token_losses(
        self, targets: Tensor, *, temperature: float = 1.0, z_loss: float = 0.0
    ) -> Tensor:
        """Compute -log p(target), float32 (B, S), 0 where the target is -100."""
        return _token_losses(self._ops, self._logits, targets, temperature, z_loss)

    def loss_sum(
        self, targets: Tensor, *, weights: Tensor | None = None, z_loss: float = 0.0
    ) -> Tensor:
        """Compute the sum of `token_losses`, weighted by `weights` (B, S); a scalar."""
        return _weighted_sum(self.token_losses(targets, z_loss=z_loss), weights)

    def entropies(self, counted: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Compute entropies of softmax(logits / temperature) in nats, float32 (B, S)."""
        return _entropies(self._logits, counted, temperature)

    def head(self, name: str) -> Tensor:
        """Raise an error: a user's own module does not expose its hidden states.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            f"extra heads such as {name!r} are not supported for a module of your own; return their"
            " output from its forward"
        )


def _weighted_sum(losses: Tensor, weights: Tensor | None) -> Tensor:
    return losses.sum() if weights is None else (losses * weights).sum()


def _token_losses(
    ops: Ops, logits: Tensor, targets: Tensor, temperature: float, z_loss: float
) -> Tensor:
    """Compute -log p(target), float32 (B, S), from logits (B, S, V)."""
    scaled = logits if temperature == 1.0 else widen(logits) / temperature
    return ops.cross_entropy(scaled, targets, z_loss=z_loss, reduction="none")


def _entropies(logits: Tensor, counted: Tensor, temperature: float) -> Tensor:
    """Compute entropies in nats, float32 (B, S), from logits (B, S, V); 0 where not counted."""
    log_p = (widen(logits) / temperature).log_softmax(-1)  # (B, S, V)
    return -(log_p.exp() * log_p).sum(-1) * counted


def _divide_gradient(x: Tensor, parts: int) -> Tensor:
    """Return `x` unchanged, with its gradient divided by `parts`."""
    return x if parts == 1 else x.detach() + (x - x.detach()) / parts

"""The training loop, on one process: what compression needs of one, and no more.

Larger models train under any loop or engine; a prepared model is an ordinary one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ms_compress.errors import ConfigError, DataError, DivergedError
from ms_compress.files.untrusted import check_path
from ms_compress.models.logits import check_tokens, next_token_logits
from ms_compress.quantisation.layers import FACTOR
from ms_compress.training.checkpoint import TrainingCheckpoint
from ms_compress.training.distillation import distillation_loss
from ms_compress.training.hidden_states import HiddenStates
from ms_compress.training.identity import identity_of
from ms_compress.training.options import Tuning

IGNORED = -100
BATCH = ("tokens", "targets", "weights")
"""What training reads of a batch."""


def tune(
    model: nn.Module,
    text: Tensor | Mapping[str, Tensor],
    options: Tuning,
    *,
    teacher: nn.Module | None = None,
    before_step: Callable[[int], object] | None = None,
    after_step: Callable[[int], object] | None = None,
    on_loss: Callable[[int, float], object] | None = None,
    checkpoint: Path | None = None,
    checkpoint_identity: Mapping[str, str] | None = None,
    checkpoint_every_s: float = 60.0,
) -> list[float]:
    """Train a model on rows of text, in a shuffled order that the seed fixes.

    Args:
        model: of ms-parallel or transformers; changed in place.
        text: rows of tokens (R, L) int64, L more than `sequence_length`, the targets being the next
            ones; or `tokens` and `targets`, (R, L) int64, where targets of -100 do not count, and
            `weights`, (R, L) float32, what each target counts, if they differ. They may lie on
            another device than the model.
        options: the settings.
        teacher: gives the logits to distil; it is left in evaluation mode.
        before_step: called with the step's number, such as a schedule of pruning.
        after_step: likewise, such as `keep_zeros`.
        on_loss: called with the number of steps made and the last one's loss.
        checkpoint: a file that the state is written to while it trains and at its end, and gone on
            from if it is there, as by a run that was never stopped. It is left to the caller.
        checkpoint_identity: what else the run follows from, by name, such as the model's and the
            teacher's folders: a checkpoint with another one is refused, and what differs is named.
        checkpoint_every_s: seconds between two writes.

    Returns:
        The loss of each step.

    Raises:
        ConfigError: there are fewer rows than a batch takes, or the first loss is not finite.
        DataError: a row has nothing to learn, or the model's vocabulary does not hold a token.
        DivergedError: a later loss is not finite.
    """
    check_path("checkpoint", checkpoint, error=ConfigError, optional=True)
    batch = _as_batch(model, text, options)
    saved = None
    if checkpoint is not None:
        more = {**(checkpoint_identity or {}), "a teacher": str(teacher is not None)}
        identity = identity_of(model, batch, options, more)
        saved = TrainingCheckpoint(checkpoint, identity, every_s=checkpoint_every_s)
    with _watched(model, teacher, options) as states:
        losses = _train(
            model,
            batch,
            options,
            lambda part: _loss(model, part, options, teacher, states),
            saved,
            before_step=before_step or _nothing,
            after_step=after_step or _nothing,
            on_loss=on_loss or _nothing,
        )
    model.eval()
    return losses


def _nothing(*_: object) -> None:
    """Stand in for a callback that was not given."""


def _as_batch(
    model: nn.Module, text: Tensor | Mapping[str, Tensor], options: Tuning
) -> dict[str, Tensor]:
    """Return `tokens`, `targets` and `weights`, cut to `sequence_length`."""
    if isinstance(text, Tensor):
        text = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    tokens, length = text["tokens"], options.sequence_length
    if options.batch_size > len(tokens) > 0:
        raise ConfigError(
            f"batch_size is {options.batch_size}, and there are {len(tokens)} rows of tokens; give"
            " as many rows, or a smaller batch"
        )
    if not len(tokens) or tokens.shape[1] < length:
        raise ConfigError(
            f"rows of tokens with their targets are of shape {tuple(tokens.shape)}; give rows of at"
            f" least sequence_length={length}"
        )
    batch = {name: value[:, :length] for name, value in text.items() if name in BATCH}
    counts = batch["targets"] != IGNORED
    check_tokens(model, batch["tokens"], "the text")
    check_tokens(model, batch["targets"][counts], "the text's targets")
    if "weights" in batch:
        counts = counts & (batch["weights"] > 0)
    if not bool(counts.any(dim=1).all()):
        row = int((~counts.any(dim=1)).nonzero()[0])
        raise DataError(
            f"row {row} has no target among its first {length} tokens, so nothing is to be learnt"
            " of it; give a longer sequence_length, or leave the row out"
        )
    return batch


def _watched(
    model: nn.Module, teacher: nn.Module | None, options: Tuning
) -> AbstractContextManager[HiddenStates | None]:
    if teacher is None or options.hidden_weight == 0:
        return nullcontext()
    return HiddenStates.watched(model, teacher)


def _train(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    options: Tuning,
    loss_of: Callable[[Mapping[str, Tensor]], Tensor],
    checkpoint: TrainingCheckpoint | None,
    *,
    before_step: Callable[[int], object],
    after_step: Callable[[int], object],
    on_loss: Callable[[int, float], object],
) -> list[float]:
    optimizer = _optimizer(model, options)
    model.train()
    device = next(model.parameters()).device
    losses = [] if checkpoint is None else checkpoint.load(model, optimizer)
    done = len(losses)
    order = _batches(len(batch["tokens"]), options)
    for step, rows in zip(range(options.steps), order, strict=False):
        if step < done:
            continue
        before_step(step)
        loss = loss_of({name: value[rows].to(device) for name, value in batch.items()})
        if not bool(torch.isfinite(loss)):
            if not step:
                raise ConfigError(f"step 0: the loss is {loss.item()}; look at the model's weights")
            raise DivergedError(f"step {step}: the loss is {loss.item()}; lower learning_rate")
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        if not bool(torch.isfinite(norm)):  # the update would make every weight NaN
            raise DivergedError(
                f"step {step}: the gradient norm is {norm.item()}; lower learning_rate"
            )
        for group in optimizer.param_groups:
            group["lr"] = options.rate(step) * group["ratio"]
        optimizer.step()
        optimizer.zero_grad()
        after_step(step)
        losses.append(loss.item())
        on_loss(step + 1, losses[-1])
        if checkpoint is not None:
            checkpoint.save(model, optimizer, losses, last=step + 1 == options.steps)
    return losses


def _optimizer(model: nn.Module, options: Tuning) -> torch.optim.Optimizer:
    """Make AdamW, with `ratio` in each group: what its learning rate is multiplied by."""
    scales = [p for name, p in model.named_parameters() if name.endswith(FACTOR)]
    known = {id(p) for p in scales}
    groups = [
        {
            "params": [p for p in model.parameters() if id(p) not in known],
            "weight_decay": options.weight_decay,
            "ratio": 1.0,
        },
        {"params": scales, "weight_decay": 0.0, "ratio": options.scale_rate},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate)


def _loss(
    model: nn.Module,
    part: Mapping[str, Tensor],
    options: Tuning,
    teacher: nn.Module | None,
    states: HiddenStates | None,
) -> Tensor:
    """Return the loss of the text, of the teacher's logits and its hidden states, as weighed."""
    tokens, targets = part["tokens"], part["targets"]
    logits = next_token_logits(model, tokens)
    loss = _of_text(logits, targets, part.get("weights"))
    if teacher is None or (options.distil_weight == 0 and options.hidden_weight == 0):
        return loss
    with torch.no_grad():
        aim = next_token_logits(teacher.eval(), tokens)
    some = targets if bool((targets == IGNORED).any()) else None
    divergence = distillation_loss(logits, aim, kind=options.divergence, targets=some)
    loss = options.distil_weight * divergence + (1 - options.distil_weight) * loss
    return loss if states is None else loss + options.hidden_weight * states.distance()


def _of_text(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean loss of the targets that count, each as much as its weight."""
    flat = logits.float().flatten(0, 1), targets.flatten()
    if weights is None:
        return F.cross_entropy(*flat)
    each = F.cross_entropy(*flat, reduction="none")
    return (each * weights.flatten()).sum() / weights.sum()


def _batches(rows: int, options: Tuning) -> Iterator[Tensor]:
    """Yield row numbers of each batch; every row comes once before any comes again."""
    generator = torch.Generator().manual_seed(options.seed)
    waiting = torch.empty(0, dtype=torch.int64)
    while True:
        while len(waiting) < options.batch_size:
            waiting = torch.cat((waiting, torch.randperm(rows, generator=generator)))
        yield waiting[: options.batch_size]
        waiting = waiting[options.batch_size :]

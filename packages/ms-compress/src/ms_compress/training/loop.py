"""A minimal single-process training loop for compressed models.

Larger models can use any training loop or engine, as a prepared model is an ordinary module.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ms_compress.arguments import check_callable, check_number, check_type
from ms_compress.errors import ConfigError, DataError, DivergedError
from ms_compress.files.untrusted import check_path
from ms_compress.models.logits import IGNORED, as_columns, check_tokens, next_token_logits
from ms_compress.quantization.layers import FACTOR
from ms_compress.training.checkpoint import TrainingCheckpoint, identity_of
from ms_compress.training.distillation import HiddenStates, distillation_loss
from ms_compress.training.options import Tuning

BATCH = ("tokens", "targets", "weights")
"""Tensors that training reads from a batch."""


def tune(
    model: nn.Module,
    text: Tensor | Mapping[str, Tensor],
    options: Tuning,
    *,
    teacher: nn.Module | None = None,
    before_step: Callable[[int], object] | None = None,
    after_step: Callable[[int], object] | None = None,
    on_loss: Callable[[int, float], object] | None = None,
    stop: Callable[[], bool] | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_identity: Mapping[str, str] | None = None,
    checkpoint_every_s: float = 60.0,
) -> list[float]:
    """Train a model on rows of text, in an order determined by the seed.

    Args:
        model: model from ms-parallel or transformers; changed in place.
        text: tokens (R, L) int64 with L > `sequence_length`, whose targets are the next tokens; or
            `tokens` and `targets`, (R, L) int64, where targets of -100 are ignored, and optionally
            `weights`, (R, L) float32, of the targets. May be on another device than the model.
        options: training settings.
        teacher: model whose logits are distilled; left in evaluation mode.
        before_step: called with the step number before each step, such as a pruning schedule.
        after_step: called with the step number after each step, such as `keep_zeros`.
        on_loss: called with the number of finished steps and the last loss.
        stop: called after each step; True ends the training early, after its state is written.
        checkpoint: file to which the state is written during training and at its end. If it exists,
            training resumes from it exactly. The caller may delete it afterwards.
        checkpoint_identity: further settings that the run depends on, by name, such as the model's
            and teacher's folders; a checkpoint with other values is refused.
        checkpoint_every_s: seconds between checkpoints.

    Returns:
        The loss of each finished step.

    Raises:
        ConfigError: there are fewer rows than a batch, or the first loss is not finite.
        DataError: a row has no targets, or a token is outside the model's vocabulary.
        DivergedError: a later loss is not finite.
    """
    check_path("checkpoint", checkpoint, error=ConfigError, optional=True)
    check_type("model", model, nn.Module, "a torch.nn.Module", error=ConfigError)
    check_type("options", options, Tuning, "a Tuning", error=ConfigError)
    description = "a torch.nn.Module"
    check_type("teacher", teacher, nn.Module, description, error=ConfigError, optional=True)
    check_number("checkpoint_every_s", checkpoint_every_s, minimum=0, error=ConfigError)
    callbacks: dict[str, object] = {"before_step": before_step, "after_step": after_step}
    callbacks |= {"on_loss": on_loss, "stop": stop}
    for name, callback in callbacks.items():
        check_callable(name, callback, error=ConfigError, optional=True)
    batch = _as_batch(model, text, options)
    optimizer = _optimizer(model, options)
    saved, losses = None, list[float]()
    if checkpoint is not None:
        settings = {**(checkpoint_identity or {}), "a teacher": str(teacher is not None)}
        identity = identity_of(model, batch, options, settings)
        saved = TrainingCheckpoint(Path(checkpoint), identity, every_s=checkpoint_every_s)
        losses = saved.load(model, optimizer)
    model.train()
    device = next(model.parameters()).device
    # The order of the rows follows from the seed, so the finished steps only advance it.
    order = islice(_batches(len(batch["tokens"]), options), len(losses), options.steps)
    with _record_hidden(model, teacher, options) as states:
        for step, rows in enumerate(order, start=len(losses)):
            if before_step is not None:
                before_step(step)
            inputs = {name: value[rows].to(device) for name, value in batch.items()}
            loss = _loss(model, inputs, options, teacher, states)
            if not bool(torch.isfinite(loss)):
                if not step:
                    raise ConfigError(
                        f"step 0: the loss is {loss.item()}; check the model's weights"
                    )
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
            if after_step is not None:
                after_step(step)
            losses.append(loss.item())
            if on_loss is not None:
                on_loss(len(losses), losses[-1])
            last, stopped = len(losses) == options.steps, stop is not None and stop()
            if saved is not None and (last or stopped or saved.is_due()):
                saved.save(model, optimizer, losses, last=last)
            if stopped:
                break
    model.eval()
    return losses


def _as_batch(
    model: nn.Module, text: Tensor | Mapping[str, Tensor], options: Tuning
) -> dict[str, Tensor]:
    """Return `tokens`, `targets` and `weights`, truncated to `sequence_length`."""
    text = as_columns(text)
    tokens, length = text["tokens"], options.sequence_length
    if options.batch_size > len(tokens) > 0:
        raise ConfigError(
            f"batch_size must be at most the number of rows, {len(tokens)}, got"
            f" {options.batch_size}; use more rows, or a smaller batch"
        )
    if not len(tokens) or tokens.shape[1] < length:
        raise ConfigError(
            f"rows of tokens with targets must have at least sequence_length={length} tokens, got"
            f" shape {tuple(tokens.shape)}; use longer rows or a smaller sequence_length"
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
            f"row {row} has no target among its first {length} tokens, so there is nothing to learn"
            " from it; increase sequence_length, or drop the row"
        )
    return batch


def _record_hidden(
    model: nn.Module, teacher: nn.Module | None, options: Tuning
) -> AbstractContextManager[HiddenStates | None]:
    if teacher is None or options.hidden_weight == 0:
        return nullcontext()
    return HiddenStates.watched(model, teacher)


def _optimizer(model: nn.Module, options: Tuning) -> torch.optim.Optimizer:
    """Create AdamW with parameter groups whose `ratio` multiplies the learning rate."""
    scales = [param for name, param in model.named_parameters() if name.endswith(FACTOR)]
    scale_ids = {id(param) for param in scales}
    groups = [
        {
            "params": [param for param in model.parameters() if id(param) not in scale_ids],
            "weight_decay": options.weight_decay,
            "ratio": 1.0,
        },
        {"params": scales, "weight_decay": 0.0, "ratio": options.scale_rate},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate)


def _loss(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    options: Tuning,
    teacher: nn.Module | None,
    states: HiddenStates | None,
) -> Tensor:
    """Return the weighted loss of the text, the teacher's logits and its hidden states."""
    tokens, targets = batch["tokens"], batch["targets"]
    logits = next_token_logits(model, tokens)
    loss = _text_loss(logits, targets, batch.get("weights"))
    if teacher is None or (options.distill_weight == 0 and options.hidden_weight == 0):
        return loss
    with torch.no_grad():
        teacher_logits = next_token_logits(teacher.eval(), tokens)
    masked_targets = targets if bool((targets == IGNORED).any()) else None
    divergence = distillation_loss(
        logits, teacher_logits, kind=options.divergence, targets=masked_targets
    )
    # The hidden states have their own weight, added to this mean of two losses.
    loss = options.distill_weight * divergence + (1 - options.distill_weight) * loss
    return loss if states is None else loss + options.hidden_weight * states.distance()


def _text_loss(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the weighted mean cross-entropy of the targets that are not ignored."""
    flat_inputs = logits.float().flatten(0, 1), targets.flatten()
    if weights is None:
        return F.cross_entropy(*flat_inputs)
    losses = F.cross_entropy(*flat_inputs, reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def _batches(rows: int, options: Tuning) -> Iterator[Tensor]:
    """Yield the row indices of each batch; every row is used once before any is repeated."""
    generator = torch.Generator().manual_seed(options.seed)
    queue = torch.empty(0, dtype=torch.int64)
    while True:
        while len(queue) < options.batch_size:
            # A batch may span the end of one permutation and the start of the next.
            queue = torch.cat((queue, torch.randperm(rows, generator=generator)))
        yield queue[: options.batch_size]
        queue = queue[options.batch_size :]

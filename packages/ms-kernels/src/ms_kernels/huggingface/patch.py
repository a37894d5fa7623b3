"""Puts the operators of this package into a model of transformers."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ms_kernels.errors import KernelError, shown
from ms_kernels.huggingface.attention import NAME, register_attention
from ms_kernels.huggingface.loss import (
    causal_output_class,
    forward_without_logits,
    has_plain_logits,
    loss_without_logits,
)
from ms_kernels.huggingface.modules import replace_forward, replacement, restore_forward

ROWS, LENGTH = 2, 8
"""Size of the batch on which a patched model is compared with itself unpatched."""


class PatchError(KernelError, ValueError):
    """The model cannot be patched, or patching changed its results by more than rounding."""


@frozen(kw_only=True)
class PatchReport:
    """What `patch` did."""

    replaced: Mapping[str, int]
    """Number of replaced modules by class, such as ``{"LlamaRMSNorm": 33}``."""
    attention: bool
    """Whether the model's layers use this package's attention."""
    loss: bool
    """Whether the training loss is computed without logits."""
    max_difference: float | None
    """Largest change of a logit on a trial batch, relative to the largest logit; None if no batch
    was run."""
    skipped: tuple[str, ...] = ()
    """Parts that were not replaced, with the reason."""

    def __str__(self) -> str:
        modules = ", ".join(f"{count} {name}" for name, count in self.replaced.items()) or "none"
        lines = [
            f"modules: {modules}",
            f"attention: {'ms_kernels' if self.attention else 'unchanged'}",
            f"loss: {'without logits' if self.loss else 'unchanged'}",
        ]
        if self.max_difference is not None:
            lines.append(
                f"logits changed by at most {self.max_difference:.1e}, relative to the largest"
            )
        return "\n".join([*lines, *(f"left alone: {reason}" for reason in self.skipped)])


def patch(
    model: nn.Module, *, modules: bool = True, attention: bool = True, loss: bool = True
) -> PatchReport:
    """Put the operators of this package into a model of transformers.

    Norms, gated feed-forward units and rotary embeddings are replaced where ours give the same
    result on random input; attention runs through transformers' `AttentionInterface`, follows the
    documents of packed rows and builds no dense mask; the training loss is computed without
    logits. Weights, their names, and saved files do not change. Patch a model before it is
    sharded, wrapped or compiled. A model on the meta device is not run on a trial batch.

    Args:
        model: a transformers model, such as from `AutoModelForCausalLM.from_pretrained`.
        modules: replace norms, feed-forward units and rotations.
        attention: replace attention.
        loss: compute the loss of a causal language model without logits, when it is trained with
            labels. Its output then has no `logits`.

    Returns:
        The replaced parts, and the change of the logits on a trial batch.

    Raises:
        PatchError: the model is not a transformers model, or its logits or loss changed by more
            than rounding; the model is left unchanged.
        ImportError: transformers is not installed.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise PatchError(f"patch: model is {shown(type(model))}; it must be a transformers model")
    weight = next(model.parameters())
    batch = None if weight.is_meta else _trial_batch(model)
    expected = None if batch is None else _logits_before(model, batch)
    replaced: Counter[str] = Counter()
    skipped: list[str] = []
    try:
        if modules and not weight.is_meta:
            replaced = _replace_modules(model)
        elif modules:
            skipped.append("modules: the weights are on the meta device")
        with_attention = attention and _replace_attention(model, batch, skipped)
        output_class = causal_output_class(model) if loss and has_plain_logits(model) else None
        difference = None
        if batch is not None and expected is not None:
            difference = _difference(_logits(model, batch), expected)
            bound = _bound(model, weight.dtype)
            if not difference <= bound:
                raise PatchError(
                    f"patch: logits of {type(model).__name__} changed by {difference:.1e},"
                    f" relative to the largest; rounding explains {bound:.1e}. Set modules or"
                    " attention to False"
                )
            if output_class and not _loss_agrees(model, batch, expected, bound):
                output_class = None
        if output_class is not None:
            model_class: Any = type(model)
            replace_forward(model, forward_without_logits(model_class, output_class))
        elif loss:
            skipped.append("loss: the logits are not hidden states times an output matrix")
    except BaseException:
        unpatch(model)
        raise
    return PatchReport(
        replaced=dict(replaced),
        attention=with_attention,
        loss=output_class is not None,
        max_difference=difference,
        skipped=tuple(skipped),
    )


def unpatch(model: nn.Module) -> None:
    """Undo `patch`; attention becomes SDPA where this package computed it.

    Raises:
        PatchError: model is not a torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise PatchError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    for module in model.modules():
        restore_forward(module)
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME:
        model.set_attn_implementation("sdpa")  # type: ignore[operator]


def _replace_modules(model: nn.Module) -> "Counter[str]":
    count: Counter[str] = Counter()
    for module in model.modules():
        if module is not model and (forward := replacement(module)) is not None:
            count[type(module).__name__] += 1
            replace_forward(module, forward)
    return count


def _replace_attention(
    model: nn.Module, batch: dict[str, Tensor] | None, skipped: list[str]
) -> bool:
    """Switch the model to our attention; if that fails, record the reason and return False."""
    register_attention()
    before = model.config._attn_implementation  # type: ignore[union-attr]
    if before == NAME:
        return True
    if not getattr(model, "_supports_attention_backend", False):
        skipped.append("attention: the model does not support attention functions selected by name")
        return False
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    if batch is not None:
        try:
            _logits(model, batch)
        except KernelError as error:
            model.set_attn_implementation(before)  # type: ignore[operator]
            skipped.append(f"attention: {error}")
            return False
    return True


def _trial_batch(model: nn.Module) -> dict[str, Tensor] | None:
    """Return two packed rows for a language model; None for a model without input tokens."""
    config: Any = model.config
    with suppress(AttributeError):
        config = config.get_text_config()
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        return None
    device = next(model.parameters()).device
    tokens = torch.arange(1, ROWS * LENGTH + 1, device=device).remainder(vocabulary)
    starts = torch.arange(LENGTH, device=device)
    positions = torch.where(starts < LENGTH // 2 + 1, starts, starts - LENGTH // 2 - 1)
    return {
        "input_ids": tokens.view(ROWS, LENGTH),
        "position_ids": positions.expand(ROWS, LENGTH).contiguous(),
    }


def _logits_before(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits of the unpatched model; raise PatchError if it does not run."""
    try:
        return _logits(model, batch)
    except Exception as error:
        reason = shown(str(error)) if str(error) else type(error).__name__
        raise PatchError(
            f"patch: {type(model).__name__} must run on a batch of tokens; it failed before it was"
            f" patched: {reason}"
        ) from error


@torch.no_grad()
def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the model's first output in evaluation mode, float32."""
    was_training = model.training
    model.eval()
    try:
        outputs = model(**batch, use_cache=False)
    finally:
        model.train(was_training)
    return outputs[0].float()  # type: ignore[no-any-return]


def _difference(result: Tensor, expected: Tensor) -> float:
    scale = expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((result - expected).abs().max() / scale)


def _bound(model: nn.Module, dtype: torch.dtype) -> float:
    """Return the relative change that rounding explains, 8 units per layer as a random walk."""
    config: Any = model.config
    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    return float(8 * torch.finfo(dtype).eps * (2 * layers + 1) ** 0.5)


@torch.no_grad()
def _loss_agrees(model: nn.Module, batch: dict[str, Tensor], logits: Tensor, bound: float) -> bool:
    was_training = model.training
    model.eval()
    try:
        *_, loss = loss_without_logits(model, **batch, labels=batch["input_ids"], use_cache=False)
    finally:
        model.train(was_training)
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
    )
    return _difference(loss.float(), expected) <= bound

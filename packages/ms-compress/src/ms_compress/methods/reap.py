"""REAP: remove the experts that contribute least to their layer's output.

Lasby et al. 2025, arXiv:2510.13999: the score of an expert is the mean over its tokens of the
router's weight times the norm of the expert's output. Unlike merging, removal leaves the router in
control of each remaining expert. Difference from the paper: with group-limited routing, as in
DeepSeek-V3, every group keeps the same number of experts.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from ms_compress.arguments import check_items, check_type
from ms_compress.errors import CalibrationError, ConfigError, LayerError
from ms_compress.methods.calibration import check_calibration
from ms_compress.methods.pattern import Unstructured
from ms_compress.models.experts import is_fused
from ms_compress.models.logits import evaluating, next_token_logits

M = TypeVar("M", bound=nn.Module)
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Configuration fields with the number of experts."""

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True, eq=False)
class ExpertScores:
    """Scores of the experts of one layer."""

    total: Tensor
    """(E,) float64, sum over an expert's tokens of router weight times output norm."""
    tokens: Tensor
    """(E,) int64, number of tokens of each expert."""

    @property
    def mean(self) -> Tensor:
        """REAP scores, (E,) float64; 0 for an expert without tokens."""
        return self.total / self.tokens.clamp(min=1)


@torch.no_grad()
def reap_scores(
    model: nn.Module,
    batches: Sequence[Tensor],
    *,
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, ExpertScores]:
    """Return the scores of each layer's experts on calibration tokens, by name of the experts.

    Args:
        model: a complete model of ms-parallel or transformers with fused experts.
        batches: calibration tokens, (B, S) int64 each.
        progress: called with the number of finished batches, from 0, and their total.

    Raises:
        LayerError: the model has no experts.
        CalibrationError: no tokens are given, or a score is NaN or infinite.
        DataError: a token is outside the model's vocabulary.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module", error=LayerError)
    check_items("batches", batches, Tensor, "tensors of tokens", error=CalibrationError)
    layers = dict(_fused_experts(model))
    check_calibration(model, batches, ())
    scores: dict[str, ExpertScores] = {}

    def observe(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
            # `forward`, as calling the module would run this hook again.
            scores[name] = _add_tokens(scores[name], module.forward, *inputs)

        return hook

    device = next(model.parameters()).device
    with ExitStack() as hooks, evaluating(model):
        for name, module in layers.items():
            count = _count(module)
            scores[name] = ExpertScores(
                total=torch.zeros(count, dtype=torch.float64, device=device),
                tokens=torch.zeros(count, dtype=torch.int64, device=device),
            )
            hooks.enter_context(module.register_forward_pre_hook(observe(name)))
        for number, batch in enumerate(batches):
            if progress is not None:
                progress(number, len(batches))
            next_token_logits(model, batch.to(device))
    if progress is not None:
        progress(len(batches), len(batches))
    for name, layer in scores.items():
        if not bool(layer.total.isfinite().all()):
            raise CalibrationError(
                f"{name}: the outputs of its experts are NaN or infinite; check the weights, and"
                " the tokens"
            )
        if unseen := int((layer.tokens == 0).sum()):
            logger.warning(
                "%s: %d of %d experts saw no calibration token and are removed first; use more"
                " rows",
                name,
                unseen,
                len(layer.tokens),
            )
    return scores


@torch.no_grad()
def remove_experts(model: M, scores: Mapping[str, ExpertScores], sparsity: float) -> M:
    """Build a model without the lowest-scoring experts of each layer.

    Args:
        model: the model that was scored, not modified.
        scores: scores of each layer's experts, from `reap_scores`.
        sparsity: fraction of the experts to remove, at least 0 and below 1.

    Raises:
        ConfigError: fewer experts would remain than a token uses, or the remaining number is not a
            multiple of the router's groups.
        LayerError: the layers have different numbers of experts.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module", error=LayerError)
    check_type("scores", scores, Mapping, "scores by layer, from reap_scores", error=ConfigError)
    check_items("scores", scores.values(), ExpertScores, "ExpertScores", error=ConfigError)
    Unstructured(sparsity)  # validates 0 <= sparsity < 1
    counts = {len(layer.tokens) for layer in scores.values()}
    if len(counts) != 1:
        raise LayerError(
            f"all layers must have the same number of experts, got {sorted(counts)}; prune a model"
            " with one number"
        )
    (count,) = counts
    config: Any = model.config
    groups = int(getattr(config, "n_group", None) or 1)
    per_token = int(config.num_experts_per_tok)
    # The router picks `topk_group` groups per token, and experts only from these.
    groups_per_token = int(getattr(config, "topk_group", None) or groups)
    remaining = count - round(sparsity * count)
    if remaining % groups or remaining // groups * groups_per_token < per_token:
        smallest = -(-per_token // groups_per_token) * groups
        raise ConfigError(
            f"pattern must leave at least {smallest} of {count} experts, in multiples of {groups}"
            f" (the router's groups), got {sparsity}, which leaves {remaining}; use"
            f" {1 - max(smallest, count // 2 // groups * groups) / count:g}"
        )
    selected = {}
    for name, layer in scores.items():
        # (groups, remaining per group), indices within the group
        by_group = layer.mean.view(groups, -1).topk(remaining // groups, -1).indices
        first = torch.arange(groups, device=by_group.device)[:, None] * (count // groups)
        selected[name] = (by_group + first).flatten().sort().values  # in their original order
    weights = model.state_dict()
    for name, experts in selected.items():
        for key in _tensors_by_expert(model, name, count):
            weights[key] = weights[key][experts]
    weight = next(model.parameters())
    smaller = _build(model, _with_experts(config, count, remaining))
    smaller.to(device=weight.device, dtype=weight.dtype)
    smaller.load_state_dict(weights)
    return smaller.train(model.training)


def _add_tokens(
    scores: ExpertScores,
    forward: Callable[..., Tensor],
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
) -> ExpertScores:
    """Add the scores of one forward's tokens.

    Args:
        scores: sums so far.
        forward: forward of the fused experts.
        hidden: (..., H).
        experts: (..., k) int64 indices.
        weights: (..., k).
    """
    rows, indices = hidden.flatten(0, -2), experts.flatten(0, -2)
    total, tokens = scores.total.clone(), scores.tokens.clone()
    leading = (1,) * (hidden.ndim - 2)  # ms-parallel's experts take (B, S, H)
    for index in indices.unique().tolist():  # type: ignore[no-untyped-call]
        if not 0 <= index < len(tokens):  # a dropped token
            continue
        token, slot = torch.where(indices == index)  # (n,) each: this expert's tokens
        # Run the tokens through this expert alone, with weight 1, to get its unweighted output.
        inputs = rows[token].view(*leading, len(token), -1)
        only = torch.full((*leading, len(token), 1), index, device=rows.device)
        outputs = forward(inputs, only, torch.ones_like(only, dtype=weights.dtype))
        norms = outputs.flatten(0, -2).double().norm(dim=-1)
        total[index] += (weights.flatten(0, -2)[token, slot].double() * norms).sum()
        tokens[index] += len(token)
    return ExpertScores(total=total, tokens=tokens)


def _fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    layers = [(name, module) for name, module in model.named_modules() if is_fused(module)]
    if not layers:
        raise LayerError(
            f"reap removes experts, and {type(model).__name__} has none; use method='wanda' or"
            " 'magnitude'"
        )
    yield from layers


def expert_count(model: nn.Module) -> int:
    """Return the number of experts per layer."""
    return next(_count(module) for _, module in _fused_experts(model))


def _count(module: nn.Module) -> int:
    """Return the number of experts of fused experts."""
    return next(len(parameter) for parameter in module.parameters())


def _tensors_by_expert(model: nn.Module, name: str, count: int) -> Iterator[str]:
    """Yield the names of the expert and router tensors of a layer that have E as first dim."""
    parent = name.rpartition(".")[0]
    prefixes = tuple(f"{parent}.{child}." for child in (name.rpartition(".")[2], "gate", "router"))
    for key, value in model.state_dict().items():
        if key.startswith(prefixes) and value.ndim and len(value) == count:
            yield key


def _build(model: M, config: Any) -> M:
    if hasattr(config, "to_dict"):
        return type(model)(config)
    from ms_parallel.models import build_model

    return build_model(config)  # type: ignore[return-value]


def _with_experts(config: Any, count: int, remaining: int) -> Any:
    """Return a configuration with another number of experts."""
    if hasattr(config, "to_dict"):
        smaller = copy.deepcopy(config)
        for name in COUNTS:
            if getattr(config, name, None) == count:
                setattr(smaller, name, remaining)
        return smaller
    fields = {field.name for field in attrs.fields(type(config)) if field.init}
    return attrs.evolve(config, **{name: remaining for name in COUNTS if name in fields})

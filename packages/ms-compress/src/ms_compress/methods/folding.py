"""Scales folded into a decoder layer's weights without changing its output.

If only linear layers read the output of a norm or linear layer, its features can be divided by
scales, and the readers' columns multiplied by the same scales. This moves the range of features
between weights and inputs, as AWQ and SmoothQuant need, at no cost at run time.

The readers of a norm are detected by running the decoder layer and comparing tensors, so no family
needs a list of names. Each fold is then tested with powers of two, which must leave the output
bit-identical. A fold that changes the output has other readers and is skipped.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

logger = logging.getLogger(__name__)

LINEAR_PAIRS = (
    ("v_proj", "o_proj"),
    ("qkv_proj", "o_proj"),
    ("up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("w3", "w2"),
)
"""Linear layers of one module whose output and input features differ by an elementwise product or
by averages over positions only; the last rows of fused layers are the values or the up projection.
"""
TOLERANCE = 16
"""Tolerance of the test, relative to float32's epsilon times the largest output: a norm that adds 1
to its weight rounds the test scales."""


@frozen(kw_only=True, eq=False)
class Fold:
    """A norm or linear layer with the linear layers that read its output."""

    name: str
    """Name of the producer in the model."""
    producer: nn.Module
    consumers: Mapping[str, nn.Linear]
    """Readers by their name in the model."""
    rows: slice
    """Output features of the producer that are scaled, one scale per feature."""
    scale_of: Tensor
    """(K,) int64, index of the scale for each input feature of the consumers."""
    offset: float = 0.0
    """Constant that the producer adds to its weight: 1 for Gemma's norms."""

    @property
    def count(self) -> int:
        """Number of scales."""
        return int(self.rows.stop - self.rows.start)

    @property
    def is_norm(self) -> bool:
        """Whether the producer is a norm."""
        return not isinstance(self.producer, nn.Linear)

    def tensors(self) -> list[Tensor]:
        """Return the parameters that a fold modifies."""
        bias: Any = getattr(self.producer, "bias", None)
        biases = [bias] if isinstance(bias, Tensor) else []
        weights: list[Any] = [layer.weight for layer in self.consumers.values()]
        return [self.producer.weight, *biases, *weights]

    @torch.no_grad()
    def apply(self, scales: Tensor) -> None:
        """Divide the producer's features by scales (count,), and multiply the readers' columns."""
        weight: Any = self.producer.weight
        divisor = scales.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
        part = weight[self.rows]  # (count,) of a norm, (count, features) of a linear layer
        columns = divisor if part.ndim == 1 else divisor.unsqueeze(1)
        part.copy_((part + self.offset) / columns - self.offset)
        bias: Any = getattr(self.producer, "bias", None)
        if bias is not None:
            bias[self.rows] = (bias[self.rows] / divisor).to(bias.dtype)
        for layer in self.consumers.values():
            layer.weight.copy_(layer.weight * divisor[self.scale_of])

    def reduce(self, values: Tensor, how: str) -> Tensor:
        """Reduce values of the consumers' features (K,) to one per scale (count,)."""
        start = values.new_zeros(self.count)
        return start.scatter_reduce(0, self.scale_of, values, how, include_self=False)


@torch.no_grad()
def find_folds(
    name: str, block: nn.Module, run: Callable[[], Tensor], *, norms_only: bool = False
) -> list[Fold]:
    """Return the folds of a decoder layer that leave its output unchanged, norms first.

    Args:
        name: name of the decoder layer in the model.
        block: decoder layer whose linear layers compute in float.
        run: runs the decoder layer on some input and returns its output.
        norms_only: skip folds into linear layers.
    """
    folds = [*_norm_folds(name, block, run)]
    if not norms_only:
        folds += _linear_folds(name, block)
    expected = run()
    valid = [fold for fold in folds if _is_exact(fold, run, expected)]
    skipped = [fold.name for fold in folds if fold not in valid]
    if skipped:
        logger.warning(
            "%s: no scales are folded into %s, whose output is not only read by linear layers",
            name,
            ", ".join(skipped),
        )
    return valid


def _norm_folds(name: str, block: nn.Module, run: Callable[[], Tensor]) -> Iterator[Fold]:
    """Yield a fold for each norm whose output is the input of linear layers."""
    outputs: list[tuple[str, nn.Module, Tensor]] = []
    inputs: list[tuple[str, nn.Linear, Tensor]] = []
    with ExitStack() as hooks:
        for key, module in block.named_modules():
            if isinstance(module, nn.Linear):
                hooks.enter_context(
                    module.register_forward_pre_hook(
                        lambda layer, args, key=key: inputs.append((key, layer, args[0]))
                    )
                )
            elif _is_norm(module):
                hooks.enter_context(
                    module.register_forward_hook(
                        lambda norm, args, out, key=key: outputs.append((key, norm, out))
                    )
                )
        run()
    for key, norm, out in outputs:
        # Compare addresses, as views such as flatten() share storage. `outputs` and `inputs` keep
        # all tensors alive, so no address is reused.
        readers = {
            f"{name}.{reader}": layer
            for reader, layer, x in inputs
            if x.data_ptr() == out.data_ptr() and x.numel() == out.numel()
        }
        width = out.shape[-1]
        if readers and all(layer.in_features == width for layer in readers.values()):
            device = out.device
            yield Fold(
                name=f"{name}.{key}",
                producer=norm,
                consumers=readers,
                rows=slice(0, width),
                scale_of=torch.arange(width, device=device),
                offset=_offset(norm, out),
            )


def _is_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and not list(module.children())


def _offset(norm: nn.Module, out: Tensor) -> float:
    """Return the constant that a norm adds to its weight: 0 or 1."""
    weight: Any = norm.weight
    saved = weight.clone()
    weight.zero_()
    x = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype, device=out.device)
    bias = norm._parameters.get("bias")
    response = norm(x.unsqueeze(0)) - (0 if bias is None else bias)
    weight.copy_(saved)
    # With a weight of zero, a plain norm outputs zero; a norm that adds 1 does not.
    return 0.0 if bool((response == 0).all()) else 1.0


def _linear_folds(name: str, block: nn.Module) -> Iterator[Fold]:
    """Yield a fold for each value projection with its output projection, and up with down."""
    for key, module in block.named_modules():
        for first, second in LINEAR_PAIRS:
            producer, consumer = getattr(module, first, None), getattr(module, second, None)
            if not isinstance(producer, nn.Linear) or not isinstance(consumer, nn.Linear):
                continue
            prefix = ".".join(filter(None, (name, key)))
            # Number of the producer's last rows that the consumer reads: values or up projection.
            rows = producer.out_features
            if first == "qkv_proj":
                rows = (rows - consumer.in_features) // 2  # keys and values have equal sizes
            elif first == "gate_up_proj":
                rows //= 2
            scale_of = _scale_of(module, rows, consumer.in_features)
            if scale_of is not None:
                yield Fold(
                    name=f"{prefix}.{first}",
                    producer=producer,
                    consumers={f"{prefix}.{second}": consumer},
                    rows=slice(producer.out_features - rows, producer.out_features),
                    scale_of=scale_of.to(consumer.weight.device),
                )


def _scale_of(module: nn.Module, rows: int, features: int) -> Tensor | None:
    """Return the index of each input feature's scale, (K,); None without a correspondence."""
    if rows == features:
        return torch.arange(rows)
    width = getattr(module, "head_dim", None)
    if not isinstance(width, int) or rows < 1 or rows % width or features % rows:
        return None
    # Grouped-query attention: successive query heads read the same value head.
    heads = torch.arange(rows).view(-1, width)  # (value heads, head_dim)
    return heads.repeat_interleave(features // rows, dim=0).flatten()


def _is_exact(fold: Fold, run: Callable[[], Tensor], expected: Tensor) -> bool:
    """Return whether a fold of powers of two leaves the decoder layer's output unchanged."""
    saved = [tensor.detach().clone() for tensor in fold.tensors()]
    # Factors 1/2, 1 and 2 are exact in every float format, and differ between neighbors.
    exponents = torch.arange(fold.count) % 3 - 1
    fold.apply(torch.exp2(exponents.float()))
    out = run()
    for tensor, value in zip(fold.tensors(), saved, strict=True):
        tensor.detach().copy_(value)
    if torch.equal(out, expected):
        return True
    largest = TOLERANCE * torch.finfo(torch.float32).eps * expected.abs().max()
    return bool((out - expected).abs().max() <= largest)

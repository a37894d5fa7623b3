"""The operators once more, one number at a time, in float64: what the reference must equal."""

import itertools
import math

import torch
from torch import Tensor

__all__ = ["TRUTHS"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = torch.empty_like(x)
    for place in _places(x.shape[:-1]):
        root = math.sqrt(sum(value * value for value in x[place].tolist()) / x.shape[-1] + eps)
        result[place] = x[place] / root * weight
    return result


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool):
    def turn(x: Tensor) -> Tensor:
        result = x.clone()
        half = cos.shape[-1]
        for b, s, h in _places(x.shape[:-1]):
            for i in range(half):
                one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                angle = b if len(cos) > 1 else 0, s, i
                number = complex(x[b, s, h, one], x[b, s, h, two])
                number *= complex(cos[angle], sin[angle])
                result[b, s, h, one], result[b, s, h, two] = number.real, number.imag
        return result

    return turn(q), turn(k)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    result = torch.empty_like(gate)
    for place in _places(gate.shape):
        value = gate[place].item()
        result[place] = value / (1 + math.exp(-value)) * up[place]
    return result


def attention(q, k, v, documents, causal, window, scale) -> Tensor:
    result = torch.zeros_like(q)
    share = q.shape[2] // k.shape[2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    for b, s, h in _places(q.shape[:-1]):
        own = k.shape[1] - q.shape[1] + s
        seen = [
            other
            for other in range(k.shape[1])
            if not (causal and other > own)
            and not (window is not None and abs(own - other) >= window)
            and not (documents is not None and documents[b, own] != documents[b, other])
        ]
        scores = [math.exp(scale * (q[b, s, h] @ k[b, other, h // share])) for other in seen]
        for score, other in zip(scores, seen, strict=True):
            result[b, s, h] += score / sum(scores) * v[b, other, h // share]
    return result


def cross_entropy(logits, targets, ignore_index, label_smoothing, z_loss, reduction) -> Tensor:
    losses = logits.new_zeros(targets.shape)
    for place in _places(targets.shape):
        if targets[place] == ignore_index:
            continue
        log_norm = math.log(sum(math.exp(value) for value in logits[place].tolist()))
        log_shares = [value - log_norm for value in logits[place].tolist()]
        hit = log_shares[targets[place]]
        smooth = sum(log_shares) / len(log_shares)
        losses[place] = -(1 - label_smoothing) * hit - label_smoothing * smooth
        losses[place] += z_loss * log_norm**2
    if reduction == "none":
        return losses
    counted = int((targets != ignore_index).sum()) if reduction == "mean" else 1
    return losses.sum() / counted


def linear_cross_entropy(hidden, weight, targets, *options) -> Tensor:
    return cross_entropy(hidden @ weight.T, targets, *options)


def _places(shape) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in shape)))


TRUTHS = {
    "rms_norm": rms_norm,
    "rotary": rotary,
    "swiglu": swiglu,
    "attention": attention,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
}

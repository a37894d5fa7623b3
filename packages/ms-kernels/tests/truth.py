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


def attention(q, k, v, documents, sinks, causal, window, scale) -> Tensor:
    result = q.new_zeros(*q.shape[:3], v.shape[3])
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
        total = sum(scores) + (0 if sinks is None else math.exp(sinks[h]))
        for score, other in zip(scores, seen, strict=True):
            result[b, s, h] += score / total * v[b, other, h // share]
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
    return losses.sum() / max(counted, 1)


def linear_cross_entropy(hidden, weight, targets, *options) -> Tensor:
    return cross_entropy(hidden @ weight.T, targets, *options)


def add_rms_norm(x, residual, weight, eps):
    summed = x + residual
    return rms_norm(summed, weight, eps), summed


def layer_norm(x, weight, bias, eps) -> Tensor:
    result = torch.empty_like(x)
    for place in _places(x.shape[:-1]):
        values = x[place].tolist()
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        result[place] = (x[place] - mean) / math.sqrt(variance + eps) * weight
        if bias is not None:
            result[place] += bias
    return result


def geglu(gate, up, approximate) -> Tensor:
    result = torch.empty_like(gate)
    for place in _places(gate.shape):
        value = gate[place].item()
        if approximate == "tanh":
            inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
            share = (1 + math.tanh(inner)) / 2
        else:
            share = (1 + math.erf(value / math.sqrt(2))) / 2
        result[place] = value * share * up[place]
    return result


def decode_attention(q, key_pages, value_pages, page_table, lengths, window, scale) -> Tensor:
    result = torch.zeros_like(q)
    page = key_pages.shape[1]
    share = q.shape[1] // key_pages.shape[2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    for b, h in _places(q.shape[:-1]):
        length = int(lengths[b])
        seen = [
            (int(page_table[b, place // page]), place % page)
            for place in range(length)
            if window is None or place >= length - window
        ]
        scores = [math.exp(scale * (q[b, h] @ key_pages[p, i, h // share])) for p, i in seen]
        for score, (p, i) in zip(scores, seen, strict=True):
            result[b, h] += score / sum(scores) * value_pages[p, i, h // share]
    return result


def token_log_probs(hidden, weight, tokens, temperature, ignore_index, entropy):
    chosen = hidden.new_zeros(tokens.shape)
    spread = hidden.new_zeros(tokens.shape)
    for place in _places(tokens.shape):
        if tokens[place] == ignore_index:
            continue
        values = [value / temperature for value in (weight @ hidden[place]).tolist()]
        log_norm = math.log(sum(math.exp(value) for value in values))
        chosen[place] = values[tokens[place]] - log_norm
        spread[place] = -sum(math.exp(each - log_norm) * (each - log_norm) for each in values)
    return (chosen, spread) if entropy else chosen


def permute_tokens(x, experts, count):
    rows, counts, places = [], [0] * count, torch.zeros(experts.shape, dtype=torch.int64)
    for expert in range(count):
        for t, c in _places(experts.shape):
            if experts[t, c] == expert:
                places[t, c] = len(rows)
                rows.append(x[t])
                counts[expert] += 1
    stacked = torch.stack(rows) if rows else x.new_zeros(0, x.shape[-1])
    return stacked, torch.tensor(counts), places


def unpermute_tokens(rows, places, weights) -> Tensor:
    result = rows.new_zeros(places.shape[0], rows.shape[-1])
    for t, c in _places(places.shape):
        result[t] += (1 if weights is None else weights[t, c]) * rows[places[t, c]]
    return result


def grouped_matmul(x, weights, counts) -> Tensor:
    experts = [expert for expert, count in enumerate(counts.tolist()) for _ in range(count)]
    result = x.new_zeros(x.shape[0], weights.shape[-1])
    for row, expert in enumerate(experts):
        for out in range(weights.shape[-1]):
            result[row, out] = (x[row] * weights[expert, :, out]).sum()
    return result


def quantized_linear(x, packed, scales, zeros, bits, group_size) -> Tensor:
    result = x.new_zeros(*x.shape[:-1], packed.shape[0])
    for *place, n in _places(result.shape):
        for k in range(x.shape[-1]):
            byte = int(packed[n, k * bits // 8])
            code = byte if bits == 8 else (byte // 16 if k % 2 else byte % 16)
            zero = 2 ** (bits - 1) if zeros is None else zeros[n, k // group_size]
            weight = (code - zero) * scales[n, k // group_size]
            result[(*place, n)] += x[(*place, k)] * weight
    return result


def adamw_step(weights, gradient, mean, square, step, learning_rate, betas, eps, weight_decay):
    for place in _places(weights.shape):
        slope = gradient[place].item()
        mean[place] = betas[0] * mean[place].item() + (1 - betas[0]) * slope
        square[place] = betas[1] * square[place].item() + (1 - betas[1]) * slope**2
        first = mean[place].item() / (1 - betas[0] ** step)
        second = square[place].item() / (1 - betas[1] ** step)
        change = first / (math.sqrt(second) + eps) + weight_decay * weights[place].item()
        weights[place] -= learning_rate * change


def causal_conv1d(x, weight, bias, documents, state, silu, final_state):
    width, result = weight.shape[1], torch.zeros_like(x)
    last = x.new_zeros(x.shape[0], width, x.shape[2])
    for b, s, c in _places(x.shape):
        for distance, value in _before(x[b], None if state is None else state[b], documents, b, s):
            if distance < width:
                result[b, s, c] += weight[c, width - 1 - distance] * value[c]
            if s == x.shape[1] - 1 and distance < width:
                last[b, width - 1 - distance] = value
        result[b, s, c] += 0 if bias is None else bias[c]
        if silu:
            result[b, s, c] /= 1 + math.exp(-result[b, s, c])
    return (result, last) if final_state else result


def _before(x, state, documents, b, s):
    """Yield each input of a position's document, itself first, with its distance."""
    for distance in range(s + 1):
        yield distance, x[s - distance]
        at = s - distance
        if documents is not None and at > 0 and documents[b, at] != documents[b, at - 1]:
            return
    for more in range(0 if state is None else len(state)):
        yield s + 1 + more, state[len(state) - 1 - more]


def gated_delta_rule(q, k, v, g, beta, documents, state, scale, normalize, final_state):
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    result, heads = torch.zeros_like(v), v.shape[2]
    final = q.new_zeros(q.shape[0], heads, q.shape[3], v.shape[3])
    for b, h in _places((q.shape[0], heads)):
        held = final[b, h]
        if state is not None:
            held += state[b, h]
        for s in range(q.shape[1]):
            query, key = (each[b, s, h // (heads // q.shape[2])] for each in (q, k))
            if normalize:
                query, key = (each / math.sqrt(each @ each + 1e-6) for each in (query, key))
            if documents is not None and s > 0 and documents[b, s] != documents[b, s - 1]:
                held.zero_()
            held *= math.exp(g[b, s, h])
            change = beta[b, s, h] * (v[b, s, h] - key @ held)
            for place in range(len(key)):
                held[place] += key[place] * change
            result[b, s, h] = scale * (query @ held)
    return (result, final) if final_state else result


def _places(shape) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in shape)))


TRUTHS = {
    function.__name__: function
    for function in (
        rms_norm,
        add_rms_norm,
        layer_norm,
        rotary,
        swiglu,
        geglu,
        attention,
        decode_attention,
        cross_entropy,
        linear_cross_entropy,
        token_log_probs,
        permute_tokens,
        unpermute_tokens,
        grouped_matmul,
        quantized_linear,
        adamw_step,
        causal_conv1d,
        gated_delta_rule,
    )
}

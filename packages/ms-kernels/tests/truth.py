"""Slow float64 loops for every operator, one number at a time, which the reference must equal."""

import itertools
import math

import torch
from torch import Tensor

__all__ = ["TRUTHS"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    result = torch.empty_like(x)
    for index in _indices(x.shape[:-1]):
        root = math.sqrt(sum(value * value for value in x[index].tolist()) / x.shape[-1] + eps)
        result[index] = x[index] / root * weight
    return result


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool):
    def turn(x: Tensor) -> Tensor:
        result = x.clone()
        half = cos.shape[-1]
        for b, s, h in _indices(x.shape[:-1]):
            for i in range(half):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                angle = b if len(cos) > 1 else 0, s, i
                number = complex(x[b, s, h, first], x[b, s, h, second])
                number *= complex(cos[angle], sin[angle])
                result[b, s, h, first], result[b, s, h, second] = number.real, number.imag
        return result

    return turn(q), turn(k)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    result = torch.empty_like(gate)
    for index in _indices(gate.shape):
        value = gate[index].item()
        result[index] = value / (1 + math.exp(-value)) * up[index]
    return result


def attention(q, k, v, documents, sinks, causal, window, scale) -> Tensor:
    result = q.new_zeros(*q.shape[:3], v.shape[3])
    group_size = q.shape[2] // k.shape[2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    for b, s, h in _indices(q.shape[:-1]):
        q_pos = k.shape[1] - q.shape[1] + s
        visible = [
            k_pos
            for k_pos in range(k.shape[1])
            if not (causal and k_pos > q_pos)
            and not (window is not None and abs(q_pos - k_pos) >= window)
            and not (documents is not None and documents[b, q_pos] != documents[b, k_pos])
        ]
        scores = [
            math.exp(scale * (q[b, s, h] @ k[b, k_pos, h // group_size])) for k_pos in visible
        ]
        denominator = sum(scores) + (0 if sinks is None else math.exp(sinks[h]))
        for score, k_pos in zip(scores, visible, strict=True):
            result[b, s, h] += score / denominator * v[b, k_pos, h // group_size]
    return result


def cross_entropy(logits, targets, ignore_index, label_smoothing, z_loss, reduction) -> Tensor:
    losses = logits.new_zeros(targets.shape)
    for index in _indices(targets.shape):
        if targets[index] == ignore_index:
            continue
        log_norm = math.log(sum(math.exp(value) for value in logits[index].tolist()))
        log_probs = [value - log_norm for value in logits[index].tolist()]
        target_log_prob = log_probs[targets[index]]
        mean_log_prob = sum(log_probs) / len(log_probs)
        losses[index] = -(1 - label_smoothing) * target_log_prob - label_smoothing * mean_log_prob
        losses[index] += z_loss * log_norm**2
    if reduction == "none":
        return losses
    count = int((targets != ignore_index).sum()) if reduction == "mean" else 1
    return losses.sum() / max(count, 1)


def linear_cross_entropy(hidden, weight, targets, *options) -> Tensor:
    return cross_entropy(hidden @ weight.T, targets, *options)


def add_rms_norm(x, residual, weight, eps):
    summed = x + residual
    return rms_norm(summed, weight, eps), summed


def layer_norm(x, weight, bias, eps) -> Tensor:
    result = torch.empty_like(x)
    for index in _indices(x.shape[:-1]):
        values = x[index].tolist()
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        result[index] = (x[index] - mean) / math.sqrt(variance + eps) * weight
        if bias is not None:
            result[index] += bias
    return result


def geglu(gate, up, approximate) -> Tensor:
    result = torch.empty_like(gate)
    for index in _indices(gate.shape):
        value = gate[index].item()
        if approximate == "tanh":
            inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
            gate_factor = (1 + math.tanh(inner)) / 2
        else:
            gate_factor = (1 + math.erf(value / math.sqrt(2))) / 2
        result[index] = value * gate_factor * up[index]
    return result


def decode_attention(q, key_pages, value_pages, page_table, lengths, window, scale) -> Tensor:
    result = torch.zeros_like(q)
    page = key_pages.shape[1]
    group_size = q.shape[1] // key_pages.shape[2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    for b, h in _indices(q.shape[:-1]):
        length = int(lengths[b])
        visible = [
            (int(page_table[b, position // page]), position % page)
            for position in range(length)
            if window is None or position >= length - window
        ]
        scores = [
            math.exp(scale * (q[b, h] @ key_pages[p, i, h // group_size])) for p, i in visible
        ]
        for score, (p, i) in zip(scores, visible, strict=True):
            result[b, h] += score / sum(scores) * value_pages[p, i, h // group_size]
    return result


def token_log_probs(hidden, weight, tokens, temperature, ignore_index, entropy):
    log_probs = hidden.new_zeros(tokens.shape)
    entropies = hidden.new_zeros(tokens.shape)
    for index in _indices(tokens.shape):
        if tokens[index] == ignore_index:
            continue
        values = [value / temperature for value in (weight @ hidden[index]).tolist()]
        log_norm = math.log(sum(math.exp(value) for value in values))
        log_probs[index] = values[tokens[index]] - log_norm
        entropies[index] = -sum(math.exp(v - log_norm) * (v - log_norm) for v in values)
    return (log_probs, entropies) if entropy else log_probs


def permute_tokens(x, experts, count):
    rows, counts, places = [], [0] * count, torch.zeros(experts.shape, dtype=torch.int64)
    for expert in range(count):
        for t, c in _indices(experts.shape):
            if experts[t, c] == expert:
                places[t, c] = len(rows)
                rows.append(x[t])
                counts[expert] += 1
    stacked = torch.stack(rows) if rows else x.new_zeros(0, x.shape[-1])
    return stacked, torch.tensor(counts), places


def unpermute_tokens(rows, places, weights) -> Tensor:
    result = rows.new_zeros(places.shape[0], rows.shape[-1])
    for t, c in _indices(places.shape):
        result[t] += (1 if weights is None else weights[t, c]) * rows[places[t, c]]
    return result


def grouped_matmul(x, weights, counts) -> Tensor:
    experts = [expert for expert, count in enumerate(counts.tolist()) for _ in range(count)]
    result = x.new_zeros(x.shape[0], weights.shape[-1])
    for row, expert in enumerate(experts):
        for out in range(weights.shape[-1]):
            result[row, out] = (x[row] * weights[expert, :, out]).sum()
    return result


def causal_conv1d(x, weight, bias, documents, state, silu, final_state):
    width, result = weight.shape[1], torch.zeros_like(x)
    last = x.new_zeros(x.shape[0], width, x.shape[2])
    for b, s, c in _indices(x.shape):
        for distance, value in _inputs_before(
            x[b], None if state is None else state[b], documents, b, s
        ):
            if distance < width:
                result[b, s, c] += weight[c, width - 1 - distance] * value[c]
            if s == x.shape[1] - 1 and distance < width:
                last[b, width - 1 - distance] = value
        result[b, s, c] += 0 if bias is None else bias[c]
        if silu:
            result[b, s, c] /= 1 + math.exp(-result[b, s, c])
    return (result, last) if final_state else result


def _inputs_before(x, state, documents, b, s):
    """Yield (distance, input) for the position's document, starting with the position itself."""
    for distance in range(s + 1):
        yield distance, x[s - distance]
        position = s - distance
        if (
            documents is not None
            and position > 0
            and documents[b, position] != documents[b, position - 1]
        ):
            return
    for offset in range(0 if state is None else len(state)):
        yield s + 1 + offset, state[len(state) - 1 - offset]


def gated_delta_rule(q, k, v, g, beta, documents, state, scale, normalize, final_state):
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    result, heads = torch.zeros_like(v), v.shape[2]
    final = q.new_zeros(q.shape[0], heads, q.shape[3], v.shape[3])
    for b, h in _indices((q.shape[0], heads)):
        memory = final[b, h]
        if state is not None:
            memory += state[b, h]
        for s in range(q.shape[1]):
            query, key = (tensor[b, s, h // (heads // q.shape[2])] for tensor in (q, k))
            if normalize:
                query, key = (vector / math.sqrt(vector @ vector + 1e-6) for vector in (query, key))
            if documents is not None and s > 0 and documents[b, s] != documents[b, s - 1]:
                memory.zero_()
            memory *= math.exp(g[b, s, h])
            change = beta[b, s, h] * (v[b, s, h] - key @ memory)
            for row in range(len(key)):
                memory[row] += key[row] * change
            result[b, s, h] = scale * (query @ memory)
    return (result, final) if final_state else result


def _indices(shape) -> list[tuple[int, ...]]:
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
        causal_conv1d,
        gated_delta_rule,
    )
}

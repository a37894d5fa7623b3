"""Transformer-XL against a slow implementation of its paper's equations."""

import math

import pytest
import torch
from attrs import asdict
from torch import Tensor

from ms_parallel.models import TransformerXL, TransformerXLConfig
from ms_parallel.weights import initialize

CONFIG = TransformerXLConfig(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=2,
    head_dim=6,
    segment_length=4,
    memory_length=6,
    initializer_range=0.3,
)
# About 100 roundings of 6e-8 on values of order 1.
TOLERANCE = 1e-5


def model_of(config: TransformerXLConfig) -> TransformerXL:
    """A model with random weights, including biases and norms that start at zero and one."""
    model = TransformerXL(config)
    initialize(model, 0)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def naive(model: TransformerXL, tokens: Tensor) -> Tensor:
    """Logits (S, V) of tokens (S,), in loops over segments, layers and queries."""
    config, p = model.config, dict(model.named_parameters())
    embedding = p["model.embed_tokens.weight"]
    memories = [torch.zeros(0, config.hidden_size)] * config.num_hidden_layers
    logits = []
    for segment in tokens.split(config.segment_length):
        hidden = embedding[segment] * math.sqrt(config.hidden_size)
        for layer in range(config.num_hidden_layers):
            memory = memories[layer]
            new_memory = torch.cat((memory, hidden.detach()))[-config.memory_length :]
            hidden = naive_layer(config, p, f"model.layers.{layer}.", hidden, memory)
            memories[layer] = new_memory
        logits.append(hidden @ p["lm_head.weight"].T)
    return torch.cat(logits)


def naive_layer(
    config: TransformerXLConfig, p: dict[str, Tensor], prefix: str, hidden: Tensor, memory: Tensor
) -> Tensor:
    """One layer on a segment (N, H) with its memory (M, H)."""
    width, attn = config.head_dim, f"{prefix}self_attn."
    context = torch.cat((memory, hidden))
    rows = []
    for i in range(len(hidden)):
        last = len(memory) + i
        heads = []
        for h in range(config.num_attention_heads):
            at_head = slice(h * width, (h + 1) * width)
            w = {n: p[f"{attn}{n}_proj.weight"][at_head] for n in "qkvr"}
            u, v = (p[f"{attn}{n}_bias.weight"][h] for n in ("content", "position"))
            query = w["q"] @ hidden[i]
            scores = torch.stack(
                [
                    (query + u) @ (w["k"] @ context[j])
                    + (query + v) @ (w["r"] @ naive_sinusoid(last - j, config.hidden_size))
                    for j in range(last + 1)
                ]
            )
            weights = (scores / math.sqrt(width)).softmax(0)
            heads.append(sum(weights[j] * (w["v"] @ context[j]) for j in range(last + 1)))
        rows.append(p[f"{attn}o_proj.weight"] @ torch.cat(heads))  # type: ignore[arg-type]
    hidden = naive_norm(config, p, f"{prefix}attention_norm.", hidden + torch.stack(rows))
    inner = (hidden @ p[f"{prefix}mlp.up_proj.weight"].T + p[f"{prefix}mlp.up_proj.bias"]).relu()
    outer = inner @ p[f"{prefix}mlp.down_proj.weight"].T + p[f"{prefix}mlp.down_proj.bias"]
    return naive_norm(config, p, f"{prefix}mlp_norm.", hidden + outer)


def naive_norm(config: TransformerXLConfig, p: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """Layer norm by its formula."""
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    scaled = centered / (variance + config.layer_norm_eps).sqrt()
    return scaled * p[f"{prefix}weight"] + p[f"{prefix}bias"]


def naive_sinusoid(distance: int, width: int) -> Tensor:
    """Row `distance` of the encoding matrix R."""
    rates = [1 / 10000 ** (2 * i / width) for i in range(width // 2)]
    sines = [math.sin(distance * rate) for rate in rates]
    return torch.tensor(sines + [math.cos(distance * rate) for rate in rates])


@pytest.mark.parametrize(("segment", "memory"), [(4, 6), (3, 1), (5, 5), (32, 8), (1, 2)])
def test_logits_follow_the_equations_of_the_paper(segment: int, memory: int) -> None:
    """Logits equal the naive recurrence's, for memories shorter and longer than a segment."""
    config = TransformerXLConfig(
        **{**asdict(CONFIG), "segment_length": segment, "memory_length": memory}
    )
    model = model_of(config)
    tokens = torch.randint(23, (14,), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model(tokens[None])[0], naive(model, tokens), atol=TOLERANCE, rtol=0)


def test_gradients_equal_those_of_the_naive_recurrence() -> None:
    """All parameters' gradients equal the naive version's, which detaches the memory."""
    model = model_of(CONFIG)
    tokens = torch.randint(23, (14,), generator=torch.Generator().manual_seed(2))
    probe = torch.randn(14, 23, generator=torch.Generator().manual_seed(3))
    names, parameters = zip(*model.named_parameters(), strict=True)
    ours = torch.autograd.grad((model(tokens[None])[0] * probe).sum(), parameters)
    naive_grads = torch.autograd.grad((naive(model, tokens) * probe).sum(), parameters)
    for name, a, b in zip(names, ours, naive_grads, strict=True):
        # Gradients are sums over 14 positions of values up to a few tens.
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_no_gradient_flows_through_memory() -> None:
    """A loss in the second segment does not affect the first segment's embeddings."""
    model = model_of(CONFIG)
    hidden = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(4), requires_grad=True)
    model.first = model.last = False  # called as a stage between others
    model(hidden)[:, 4:].square().sum().backward()
    assert hidden.grad is not None
    assert hidden.grad[:, :4].count_nonzero() == 0
    assert hidden.grad[:, 4:].count_nonzero() == 4 * 16


@torch.no_grad()
def test_memory_never_crosses_a_document() -> None:
    """Documents that start at segment boundaries give the logits of separate ones."""
    model = model_of(CONFIG)
    row = torch.randint(23, (1, 21), generator=torch.Generator().manual_seed(5))
    lengths = (8, 4, 9)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].int()
    packed = model(row, documents=documents)
    separate = [model(part) for part in torch.split(row, lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(separate, 1), atol=TOLERANCE, rtol=0)

"""A mixture of experts against a loop over experts that follows the formulas."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor
from torch.distributed._composable.checkpoint_activation import checkpoint

from ms_parallel import operators
from ms_parallel.errors import ConfigError
from ms_parallel.models.experts.mixture import MixtureOfExperts
from ms_parallel.models.experts.replay import record_and_replay
from ms_parallel.models.experts.router import Router
from ms_parallel.models.experts.router_config import RouterConfig
from ms_parallel.models.experts.router_stats import DocumentNumbers, RouterStats
from ms_parallel.models.staged import Context
from ms_parallel.operators.experts import swiglu_of_pairs

E, K, H, INNER = 6, 3, 8, 5
CHOICES = {
    "softmax": RouterConfig(num_experts=E, num_experts_per_tok=K),
    "not normalized": RouterConfig(num_experts=E, num_experts_per_tok=K, normalized=False),
    "one of one": RouterConfig(num_experts=1, num_experts_per_tok=1),
    "all": RouterConfig(num_experts=E, num_experts_per_tok=E),
    "sigmoid": RouterConfig(num_experts=E, num_experts_per_tok=K, scores="sigmoid", corrected=True),
    "groups": RouterConfig(
        num_experts=E,
        num_experts_per_tok=K,
        scores="sigmoid",
        corrected=True,
        groups=3,
        topk_groups=2,
        factor=2.5,
    ),
    "over the top-k": RouterConfig(
        num_experts=E, num_experts_per_tok=K, scores="softmax_of_topk", bias=True
    ),
}


def mixture(choice: RouterConfig, *, bias: bool = False) -> MixtureOfExperts:
    """A float64 mixture with random weights and a random correction bias."""
    module = MixtureOfExperts(choice, H, INNER, operators, bias=bias).double()
    generator = torch.Generator().manual_seed(3)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 2)
    return module


def tokens(count: int = 20) -> Tensor:
    """Two rows of hidden states."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(2, count // 2, H, generator=generator, dtype=torch.float64)


def reference_routing(choice: RouterConfig, router: Router, x: Tensor) -> list[tuple[int, Tensor]]:
    """Experts and weights of one token (H,)."""
    logits = router.weight @ x + (0 if router.bias is None else router.bias)
    scores = logits.sigmoid() if choice.scores == "sigmoid" else logits.softmax(0)
    corrected = scores.detach()
    if choice.corrected:
        corrected = corrected + router.e_score_correction_bias
    candidates = range(choice.num_experts)
    if choice.groups > 1:
        size = choice.num_experts // choice.groups
        top_two = [sorted(corrected[g * size :][:size].tolist())[-2:] for g in range(choice.groups)]
        top_groups = sorted(range(choice.groups), key=lambda g: -sum(top_two[g]))[
            : choice.topk_groups
        ]
        candidates = [e for e in candidates if e // size in top_groups]  # type: ignore[assignment]
    best_experts = sorted(candidates, key=lambda e: -float(corrected[e]))[
        : choice.num_experts_per_tok
    ]
    weights = torch.stack([scores[e] for e in best_experts])
    if choice.scores == "softmax_of_topk":
        weights = torch.stack([logits[e] for e in best_experts]).softmax(0)
    elif choice.normalized:
        weights = weights / weights.sum()
    return [(e, weights[i] * choice.factor) for i, e in enumerate(best_experts)]


def reference_mixture(module: MixtureOfExperts, hidden: Tensor) -> Tensor:
    """Output of a mixture, in a loop over tokens and experts."""
    up, down = module.experts.gate_up_proj, module.experts.down_proj
    rows = []
    for x in hidden.flatten(0, 1):
        total = torch.zeros(H, dtype=x.dtype)
        for e, weight in reference_routing(module.gate.choice, module.gate, x):
            gate, value = (
                up.weight[e, half] @ x + (0 if up.bias is None else up.bias[e, half])
                for half in range(2)
            )
            out = down.weight[e] @ (F.silu(gate) * value)
            total = total + weight * (out if down.bias is None else out + down.bias[e])
        rows.append(total)
    return torch.stack(rows).view_as(hidden)


def gradients(module: MixtureOfExperts, out: Tensor, hidden: Tensor) -> list[Tensor]:
    """Gradients for hidden states and parameters, of a sum that weights all outputs differently."""
    scale = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
    inputs = [hidden, *module.parameters()]
    grads = torch.autograd.grad((out * scale).sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_a_mixture_equals_a_loop_over_tokens_and_experts(name: str, bias: bool) -> None:
    """Outputs and all gradients within 1e-12 relative in float64; experts may have no tokens."""
    module, hidden = mixture(CHOICES[name], bias=bias), tokens().requires_grad_()
    fast, slow = module(hidden), reference_mixture(module, hidden)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-13)
    for grad, expected in zip(
        gradients(module, fast, hidden), gradients(module, slow, hidden), strict=True
    ):
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-13)


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    """Not None, which would leave other processes waiting."""
    module = mixture(CHOICES["softmax"]).float()
    module(tokens(2)[:, :1].float()).sum().backward()
    grad = module.experts.down_proj.weight.grad
    assert grad is not None
    idle = grad.flatten(1).count_nonzero(1) == 0
    assert 0 < idle.sum() < E


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_is_float32_in_any_model(dtype: torch.dtype) -> None:
    """Weights are float32, and the correction bias is not rounded with the model."""
    router = Router(H, CHOICES["sigmoid"])
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias.fill_(0.001)
    router = router.to(dtype)
    experts, weights = router(tokens().to(dtype))
    assert weights.dtype == torch.float32
    assert experts.dtype == torch.int64
    assert torch.equal(router.e_score_correction_bias, torch.full((E,), 0.001))


@pytest.mark.parametrize("changes_bias", [False, True])
def test_a_recomputation_does_not_route_again(changes_bias: bool) -> None:
    """Gradients are the forward's, even if the bias changes before the backward pass."""
    expected = mixture(CHOICES["groups"])
    hidden = tokens()
    expected(hidden).square().sum().backward()
    module = mixture(CHOICES["groups"])
    checkpoint(module, preserve_rng_state=False, context_fn=record_and_replay)
    stats = module.gate.stats = RouterStats(E, DocumentNumbers())
    loss = module(hidden).square().sum()
    if changes_bias:
        module.gate.e_score_correction_bias.copy_(torch.randn(E) * 10)
        module.gate.stats = stats
    loss.backward()
    for param, expected_param in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(param.grad, expected_param.grad)
    assert int(stats.counts.sum()) == 20 * K, "each choice is counted once"


DOCUMENTS = torch.tensor([[0] * 4 + [1] * 6, [7] * 3 + [2] * 2 + [7] * 5]).int()


def balance_loss(router: Router, hidden: Tensor, groups: list[Tensor]) -> Tensor:
    """E · sum of f · P for each group of tokens, weighted by its size; f has no gradient."""
    total = torch.zeros((), dtype=hidden.dtype)
    flat = hidden.flatten(0, 1)
    for group in groups:
        rows = [reference_routing(router.choice, router, flat[i]) for i in group]
        f = torch.zeros(E, dtype=hidden.dtype)
        for e in (e for row in rows for e, _ in row):
            f[e] += 1 / len(group)
        logits = flat[group] @ router.weight.T
        scores = logits.sigmoid() if router.choice.scores == "sigmoid" else logits.softmax(-1)
        p = (scores / scores.sum(-1, keepdim=True)).mean(0)
        total = total + E * (f * p).sum() * len(group)
    return total / len(flat)


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_the_sequence_balance_loss_follows_its_formula(name: str) -> None:
    """Value and gradient, also for a document that recurs later in its row."""
    router, hidden = mixture(CHOICES[name]).gate, tokens()
    key = DOCUMENTS.long().flatten() + 10 * torch.arange(2).repeat_interleave(10)
    groups = [(key == value).nonzero()[:, 0] for value in key.unique()]
    slow = 0.01 * balance_loss(router, hidden, groups)
    (expected,) = torch.autograd.grad(slow, router.weight)
    stats = router.stats = RouterStats(E, DocumentNumbers(), rate=0.01 * E / 20)
    context = Context(documents=DOCUMENTS, cache=None)
    _, weights = router(hidden, context=context)
    (grad,) = torch.autograd.grad((weights * 0).sum(), router.weight)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-15)
    assert float(stats.sums[1]) == pytest.approx(slow.item(), rel=1e-6)


def test_the_step_balance_loss_and_the_z_loss_follow_their_formulas() -> None:
    """With a given load; the z-loss is the mean square of the logsumexp."""
    router, hidden = mixture(CHOICES["softmax"]).gate, tokens()
    load = torch.rand(E, dtype=torch.float64)
    logits = (hidden @ router.weight.T).flatten(0, 1)
    slow = 0.01 * E * (load * logits.softmax(-1).mean(0)).sum()
    slow = slow + 0.1 * logits.logsumexp(-1).square().mean()
    (expected,) = torch.autograd.grad(slow, router.weight)
    stats = RouterStats(E, DocumentNumbers(), rate=0.01 * E / 20, z_rate=0.1 / 20, load=load)
    router.stats = stats
    (grad,) = torch.autograd.grad((router(hidden)[1] * 0).sum(), router.weight)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-15)
    assert stats.sums[1:].sum().item() == pytest.approx(slow.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be at most 6"),
        ({"groups": 4}, "divide the 6 experts, .* got n_group=4"),
        ({"groups": 6, "topk_groups": 2}, "must be at most 2 .the experts in 2 of 6 groups"),
        ({"scores": "relu"}, "known: sigmoid, softmax"),
    ],
)
def test_invalid_router_settings_are_refused(change: dict[str, Any], message: str) -> None:
    """The one-line error names the setting and valid values."""
    with pytest.raises(ConfigError, match=message):
        evolve(CHOICES["softmax"], **change)


@pytest.mark.parametrize(("count", "choices"), [*product([0, 1, 33], [1, 4])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tokens_are_permuted_to_their_experts_and_back(
    count: int, choices: int, dtype: torch.dtype
) -> None:
    """Sorted by expert, then by token; on the way back each token's rows are summed."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 16, generator=generator).to(dtype)
    experts = torch.rand(count, 5, generator=generator).argsort(1)[:, :choices]
    rows, counts, positions = operators.permute_tokens(x, experts, count=5)
    assert counts.tolist() == [int((experts == e).sum()) for e in range(5)]
    pairs = sorted((int(e), t) for t, row in enumerate(experts) for e in row)
    assert torch.equal(rows, x[[t for _, t in pairs]])
    assert torch.equal(operators.unpermute_tokens(rows, positions), choices * x)
    weights = torch.randn(5, 16, 24, generator=generator).to(dtype)
    outputs = operators.grouped_matmul(rows, weights, counts)
    products = [row @ weights[e] for row, (e, _) in zip(rows, pairs, strict=True)]
    expected = torch.stack(products) if products else rows.new_empty(0, 24)
    # Sums of 16 products of order one, in a different order in float32, or rounded to bfloat16.
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(outputs, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_swiglu_of_pairs_equals_swiglu_to_the_bit(dtype: torch.dtype, rows: int) -> None:
    """Outputs and gradients equal `swiglu`'s, also for strided rows."""
    wide = torch.randn(rows, 2, 48, generator=torch.Generator().manual_seed(rows)).to(dtype)
    gradient = torch.randn(24, rows).to(dtype).t()
    pairs, reference = (wide[..., ::2].detach().requires_grad_() for _ in range(2))
    output, expected = swiglu_of_pairs(pairs), operators.swiglu(*reference.unbind(1))
    assert torch.equal(output, expected)
    output.backward(gradient)
    expected.backward(gradient)
    assert pairs.grad is not None
    assert reference.grad is not None
    assert torch.equal(pairs.grad, reference.grad)

"""A mixture of experts against a loop over experts, written as the formulas say."""

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
    """One with random weights and correction, in float64."""
    module = MixtureOfExperts(choice, H, INNER, operators, bias=bias).double()
    generator = torch.Generator().manual_seed(3)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 2)
    return module


def tokens(count: int = 20) -> Tensor:
    """Two rows of hidden states."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(2, count // 2, H, generator=generator, dtype=torch.float64)


def chosen_slowly(choice: RouterConfig, router: Router, x: Tensor) -> list[tuple[int, Tensor]]:
    """Experts and weights of one token (H,)."""
    logits = router.weight @ x + (0 if router.bias is None else router.bias)
    scores = logits.sigmoid() if choice.scores == "sigmoid" else logits.softmax(0)
    ranked = scores.detach()
    if choice.corrected:
        ranked = ranked + router.e_score_correction_bias
    open_ = range(choice.num_experts)
    if choice.groups > 1:
        size = choice.num_experts // choice.groups
        best = [sorted(ranked[g * size :][:size].tolist())[-2:] for g in range(choice.groups)]
        kept = sorted(range(choice.groups), key=lambda g: -sum(best[g]))[: choice.topk_groups]
        open_ = [e for e in open_ if e // size in kept]  # type: ignore[assignment]
    best_experts = sorted(open_, key=lambda e: -float(ranked[e]))[: choice.num_experts_per_tok]
    weights = torch.stack([scores[e] for e in best_experts])
    if choice.scores == "softmax_of_topk":
        weights = torch.stack([logits[e] for e in best_experts]).softmax(0)
    elif choice.normalized:
        weights = weights / weights.sum()
    return [(e, weights[i] * choice.factor) for i, e in enumerate(best_experts)]


def slowly(module: MixtureOfExperts, hidden: Tensor) -> Tensor:
    """What a mixture gives, a token and an expert at a time."""
    up, down = module.experts.gate_up_proj, module.experts.down_proj
    rows = []
    for x in hidden.flatten(0, 1):
        total = torch.zeros(H, dtype=x.dtype)
        for e, weight in chosen_slowly(module.gate.choice, module.gate, x):
            gate, value = (
                up.weight[e, half] @ x + (0 if up.bias is None else up.bias[e, half])
                for half in range(2)
            )
            out = down.weight[e] @ (F.silu(gate) * value)
            total = total + weight * (out if down.bias is None else out + down.bias[e])
        rows.append(total)
    return torch.stack(rows).view_as(hidden)


def gradients(module: MixtureOfExperts, out: Tensor, hidden: Tensor) -> list[Tensor]:
    """Gradients of a sum that tells all results apart, for hidden states and parameters."""
    scale = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
    wanted = [hidden, *module.parameters()]
    found = torch.autograd.grad((out * scale).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_a_mixture_equals_a_loop_over_tokens_and_experts(name: str, bias: bool) -> None:
    """Results and every gradient within 1e-12 relative in float64, experts without tokens too."""
    module, hidden = mixture(CHOICES[name], bias=bias), tokens().requires_grad_()
    fast, slow = module(hidden), slowly(module, hidden)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(
        gradients(module, fast, hidden), gradients(module, slow, hidden), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    """Not none at all, for which an other process would wait."""
    module = mixture(CHOICES["softmax"]).float()
    module(tokens(2)[:, :1].float()).sum().backward()
    of_experts = module.experts.down_proj.weight.grad
    assert of_experts is not None
    idle = of_experts.flatten(1).count_nonzero(1) == 0
    assert 0 < idle.sum() < E


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_is_float32_whatever_the_model_is(dtype: torch.dtype) -> None:
    """Weights come out in float32; a correction is not rounded with the model."""
    router = Router(H, CHOICES["sigmoid"])
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias.fill_(0.001)
    router = router.to(dtype)
    experts, weights = router(tokens().to(dtype))
    assert weights.dtype == torch.float32
    assert experts.dtype == torch.int64
    assert torch.equal(router.e_score_correction_bias, torch.full((E,), 0.001))


@pytest.mark.parametrize("moves", [False, True])
def test_a_recomputation_never_chooses_again(moves: bool) -> None:
    """Though the bias moves between forward and backward, gradients are those of the forward."""
    expected = mixture(CHOICES["groups"])
    hidden = tokens()
    expected(hidden).square().sum().backward()
    module = mixture(CHOICES["groups"])
    checkpoint(module, preserve_rng_state=False, context_fn=record_and_replay)
    stats = module.gate.stats = RouterStats(E, DocumentNumbers())
    loss = module(hidden).square().sum()
    if moves:
        module.gate.e_score_correction_bias.copy_(torch.randn(E) * 10)
        module.gate.stats = stats
    loss.backward()
    for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert int(stats.counts.sum()) == 20 * K, "each choice is counted once"


DOCUMENTS = torch.tensor([[0] * 4 + [1] * 6, [7] * 3 + [2] * 2 + [7] * 5]).int()


def balance_loss(router: Router, hidden: Tensor, groups: list[Tensor]) -> Tensor:
    """E · sum of f · P over each group of tokens, by its size; f has no gradient."""
    total = torch.zeros((), dtype=hidden.dtype)
    flat = hidden.flatten(0, 1)
    for group in groups:
        rows = [chosen_slowly(router.choice, router, flat[i]) for i in group]
        f = torch.zeros(E, dtype=hidden.dtype)
        for e in (e for row in rows for e, _ in row):
            f[e] += 1 / len(group)
        logits = flat[group] @ router.weight.T
        scores = logits.sigmoid() if router.choice.scores == "sigmoid" else logits.softmax(-1)
        p = (scores / scores.sum(-1, keepdim=True)).mean(0)
        total = total + E * (f * p).sum() * len(group)
    return total / len(flat)


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_the_loss_of_a_sequence_is_that_of_its_formula(name: str) -> None:
    """Value and gradient, where a document comes back later in its row."""
    router, hidden = mixture(CHOICES[name]).gate, tokens()
    key = DOCUMENTS.long().flatten() + 10 * torch.arange(2).repeat_interleave(10)
    groups = [(key == one).nonzero()[:, 0] for one in key.unique()]
    slow = 0.01 * balance_loss(router, hidden, groups)
    (expected,) = torch.autograd.grad(slow, router.weight)
    stats = router.stats = RouterStats(E, DocumentNumbers(), rate=0.01 * E / 20)
    context = Context(documents=DOCUMENTS, cache=None)
    _, weights = router(hidden, context=context)
    (found,) = torch.autograd.grad((weights * 0).sum(), router.weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert float(stats.sums[1]) == pytest.approx(slow.item(), rel=1e-6)


def test_the_loss_of_a_step_and_the_z_loss_are_those_of_their_formulas() -> None:
    """The load is given; z is the mean square of the logsumexp."""
    router, hidden = mixture(CHOICES["softmax"]).gate, tokens()
    load = torch.rand(E, dtype=torch.float64)
    logits = (hidden @ router.weight.T).flatten(0, 1)
    slow = 0.01 * E * (load * logits.softmax(-1).mean(0)).sum()
    slow = slow + 0.1 * logits.logsumexp(-1).square().mean()
    (expected,) = torch.autograd.grad(slow, router.weight)
    stats = RouterStats(E, DocumentNumbers(), rate=0.01 * E / 20, z_rate=0.1 / 20, load=load)
    router.stats = stats
    (found,) = torch.autograd.grad((router(hidden)[1] * 0).sum(), router.weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert stats.sums[1:].sum().item() == pytest.approx(slow.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be at most 6"),
        ({"groups": 4}, "divide the 6 experts, .* got n_group=4"),
        ({"groups": 6, "topk_groups": 2}, "must be at most 2 .the experts in 2 of 6 groups"),
        ({"scores": "relu"}, "known: sigmoid, softmax"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(change: dict[str, Any], says: str) -> None:
    """One line says which setting, and what fits."""
    with pytest.raises(ConfigError, match=says):
        evolve(CHOICES["softmax"], **change)


@pytest.mark.parametrize(("count", "choices"), [*product([0, 1, 33], [1, 4])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_go_to_their_experts_and_back(count: int, choices: int, dtype: torch.dtype) -> None:
    """Sorted by expert, in the order of tokens; the way back sums each token's rows."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 16, generator=generator).to(dtype)
    experts = torch.rand(count, 5, generator=generator).argsort(1)[:, :choices]
    rows, counts, places = operators.permute_tokens(x, experts, count=5)
    assert counts.tolist() == [int((experts == e).sum()) for e in range(5)]
    pairs = sorted((int(e), t) for t, row in enumerate(experts) for e in row)
    assert torch.equal(rows, x[[t for _, t in pairs]])
    assert torch.equal(operators.unpermute_tokens(rows, places), choices * x)
    weights = torch.randn(5, 16, 24, generator=generator).to(dtype)
    made = operators.grouped_matmul(rows, weights, counts)
    each = [row @ weights[e] for row, (e, _) in zip(rows, pairs, strict=True)]
    expected = torch.stack(each) if each else rows.new_empty(0, 24)
    # Sums of 16 products of order one, in float32 in another order, or rounded to bfloat16.
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(made, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_pairs_pass_their_gate_to_the_bit(dtype: torch.dtype, rows: int) -> None:
    """Numbers and gradients are those of `swiglu`, also for rows that lie apart."""
    wide = torch.randn(rows, 2, 48, generator=torch.Generator().manual_seed(rows)).to(dtype)
    gradient = torch.randn(24, rows).to(dtype).t()
    pairs, again = (wide[..., ::2].detach().requires_grad_() for _ in range(2))
    made, expected = swiglu_of_pairs(pairs), operators.swiglu(*again.unbind(1))
    assert torch.equal(made, expected)
    made.backward(gradient)
    expected.backward(gradient)
    assert pairs.grad is not None
    assert again.grad is not None
    assert torch.equal(pairs.grad, again.grad)

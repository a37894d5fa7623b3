"""Divergences from a teacher, and students cut from one."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import transformers
from models import (
    FULL,
    SLIDING,
    WINDOWED,
    decoder,
    enlarge,
    gemma3,
    llama,
    qwen2_windowed,
    tokens,
)
from torch import nn
from torch.distributions import Categorical, kl_divergence

from ms_compress import ConfigError, LayerError, qat
from ms_compress.methods.student import cut_student, kept_layers
from ms_compress.models.selection import blocks_of
from ms_compress.training.distillation import HiddenStates, distillation_loss, hidden_distance
from ms_compress.training.loop import tune
from ms_compress.training.options import Divergence, Tuning
from ms_parallel.models import Decoder, DecoderConfig
from ms_parallel.weights import initialize


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_divergences_match_torch_distributions(kind: str) -> None:
    """With a temperature and ignored positions."""
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 11), torch.randn(2, 5, 11)
    targets = torch.zeros(2, 5, dtype=torch.int64)
    targets[0, 2:] = -100
    p, q = Categorical(logits=teacher / 2), Categorical(logits=student / 2)
    mixed = Categorical(probs=0.1 * p.probs + 0.9 * q.probs)
    divergences = {
        "forward": kl_divergence(p, q),
        "reverse": kl_divergence(q, p),
        "skewed": kl_divergence(p, mixed),
    }[kind]
    expected = 4 * divergences[targets != -100].mean()
    loss = distillation_loss(student, teacher, kind=kind, temperature=2.0, targets=targets)  # type: ignore[arg-type]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_a_student_equal_to_its_teacher_has_zero_loss(kind: str) -> None:
    """Loss and gradient are zero; the teacher gets no gradient."""
    student = torch.randn(3, 7, requires_grad=True)
    teacher = student.detach().clone().requires_grad_()
    loss = distillation_loss(student, teacher, kind=kind)  # type: ignore[arg-type]
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert student.grad is not None
    assert float(student.grad.abs().max()) < 1e-6
    assert teacher.grad is None


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_ignored_positions_do_not_matter(kind: Divergence) -> None:
    """NaN and infinity there leave loss and gradient unchanged."""
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 11), torch.randn(2, 5, 11)
    targets = torch.zeros(2, 5, dtype=torch.int64)
    targets[0, 2:] = -100
    outcomes = []
    for bad in (0.0, float("nan"), float("inf")):
        student[0, 3, 4], teacher[0, 2] = bad, bad
        leaf = student.clone().requires_grad_()
        loss = distillation_loss(leaf, teacher, kind=kind, targets=targets)
        loss.backward()
        assert leaf.grad is not None
        outcomes.append((loss.detach(), leaf.grad))
    for loss, gradient in outcomes:
        assert torch.equal(loss, outcomes[0][0])
        assert torch.equal(gradient, outcomes[0][1])
    assert not bool(outcomes[0][1][0, 2:].any())


@pytest.mark.parametrize("skew", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_entries_masked_in_both_models_are_ignored(kind: Divergence, skew: float) -> None:
    """Vocabulary entries masked with -inf: the loss of the others, and no gradient there."""
    torch.manual_seed(0)
    student, teacher = torch.randn(3, 11), torch.randn(3, 11)
    student[:, 8:], teacher[:, 8:] = -torch.inf, -torch.inf
    full, unmasked = (student[:, :end].clone().requires_grad_() for end in (11, 8))
    loss = distillation_loss(full, teacher, kind=kind, temperature=0.7, skew=skew)
    expected = distillation_loss(unmasked, teacher[:, :8], kind=kind, temperature=0.7, skew=skew)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    assert full.grad is not None
    torch.testing.assert_close(full.grad[:, :8], unmasked.grad, rtol=1e-5, atol=1e-7)
    assert not bool(full.grad[:, 8:].any())


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_entries_masked_in_one_model_cost_nothing_or_infinity(kind: Divergence) -> None:
    """Nothing if the weighting distribution has no mass there, infinity if it has."""
    torch.manual_seed(0)
    unmasked, masked = torch.randn(3, 7), torch.randn(3, 7)
    masked[:, 5:] = -torch.inf
    full_probs, masked_probs = unmasked.double().softmax(-1), masked.double().softmax(-1)
    mixture = 0.1 * masked_probs + 0.9 * full_probs if kind == "skewed" else full_probs
    expected = (
        (torch.xlogy(masked_probs, masked_probs) - torch.xlogy(masked_probs, mixture))
        .sum(-1)
        .mean()
        .float()
    )
    costs_nothing = {"teacher": masked, "student": unmasked}
    if kind == "reverse":
        costs_nothing = {"teacher": unmasked, "student": masked}
    leaf = costs_nothing["student"].clone().requires_grad_()
    loss = distillation_loss(leaf, costs_nothing["teacher"], kind=kind)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())
    swapped = distillation_loss(costs_nothing["teacher"], costs_nothing["student"], kind=kind)
    assert bool(swapped.isinf()) == (kind != "skewed")


def test_a_different_vocabulary_is_refused() -> None:
    """The message has both sizes."""
    with pytest.raises(ConfigError, match=r"must have one shape, got \(1, 5\) and \(1, 6\)"):
        distillation_loss(torch.zeros(1, 5), torch.zeros(1, 6))


@pytest.mark.parametrize("build", [decoder, llama])
def test_a_full_size_student_equals_its_teacher(build: type[nn.Module]) -> None:
    """Nothing is cut, so nothing changes."""
    teacher = build()
    student = cut_student(teacher)
    difference = logits(student) - logits(teacher)
    assert float(difference.abs().max()) == 0.0


@pytest.mark.parametrize("build", [decoder, llama])
def test_neurons_without_effect_are_cut_first(build: type[nn.Module]) -> None:
    """Neurons with zero output weights go first, so the student computes the same."""
    teacher = build()
    with torch.no_grad():
        for name, layer in teacher.named_modules():
            if name.endswith("down_proj"):
                layer.weight[:, ::2] = 0
    student = cut_student(teacher, inner=128)
    torch.testing.assert_close(logits(student), logits(teacher), rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in student.parameters()) < sum(
        p.numel() for p in teacher.parameters()
    )


def test_kept_layers_are_evenly_spaced() -> None:
    """Always including first and last; half the depth keeps every other block."""
    assert kept_layers(12, 6) == [0, 2, 4, 7, 9, 11]
    assert kept_layers(6, 2) == [0, 5]
    teacher = decoder(4)
    student = cut_student(teacher, layers=2)
    parameter = "mlp.up_proj.weight"
    assert torch.equal(
        student.get_parameter(f"model.layers.1.{parameter}"),
        teacher.get_parameter(f"model.layers.3.{parameter}"),
    )
    with pytest.raises(ConfigError, match="layers must be 1 to 4"):
        cut_student(teacher, layers=9)
    with pytest.raises(LayerError, match=r"has no model\.layers"):
        cut_student(nn.Linear(2, 2))


def mostly_windowed() -> nn.Module:
    """Three layers with a window and one with full attention."""
    return gemma3(*[SLIDING] * 3, FULL)


def half_windowed() -> nn.Module:
    """Two layers with full attention and two with a window."""
    return qwen2_windowed(4, 2)


def smollm3() -> nn.Module:
    """A model whose third layer has no rotary embedding."""
    torch.manual_seed(0)
    sizes = {**WINDOWED, "sliding_window": None}
    config = transformers.SmolLM3Config(
        num_hidden_layers=4, no_rope_layers=[1, 1, 0, 1], pad_token_id=0, **sizes
    )
    return enlarge(transformers.SmolLM3ForCausalLM(config))


def windowed() -> nn.Module:
    """A model whose last two layers have a window."""
    sizes = {key: size for key, size in WINDOWED.items() if key != "sliding_window"}
    config = DecoderConfig(
        model_type="qwen2",
        num_hidden_layers=4,
        max_position_embeddings=128,
        attention_bias=True,
        sliding_window=8,
        sliding_layers=(2, 3),
        **sizes,
    )
    model = Decoder(config)
    initialize(model, 0)
    return enlarge(model)


@pytest.mark.parametrize("keep", [2, 3])
@pytest.mark.parametrize("build", [mostly_windowed, half_windowed, smollm3, windowed])
def test_kept_layers_keep_their_attention_kind(build: Callable[[], nn.Module], keep: int) -> None:
    """If the cut layers do nothing, the student computes the same as its teacher."""
    teacher = build()
    with torch.no_grad():
        for number, (_, block) in enumerate(blocks_of(teacher)):
            if number not in kept_layers(4, keep):
                block.get_parameter("self_attn.o_proj.weight").zero_()
                block.get_parameter("mlp.down_proj.weight").zero_()
    student = cut_student(teacher, layers=keep)
    torch.testing.assert_close(logits(student), logits(teacher), rtol=1e-4, atol=1e-5)


def test_a_qwen2_student_has_its_own_max_window_layers() -> None:
    """Readers of its config.json derive the attention kind of layers from it."""
    student: Any = cut_student(half_windowed(), layers=3)
    assert kept_layers(4, 3) == [0, 2, 3]
    assert student.config.max_window_layers == 1


def test_a_student_of_a_prepared_teacher_is_a_plain_model() -> None:
    """Learned scales are not copied."""
    plain, teacher = llama(4), llama(4)
    qat(teacher, "ct.int4_g32", learned_scales=True)
    student = cut_student(teacher, layers=2, inner=128)
    expected = cut_student(plain, layers=2, inner=128)
    for name, value in expected.state_dict().items():
        assert torch.equal(student.state_dict()[name], value), name
    assert len(student.state_dict()) == len(expected.state_dict())


@pytest.mark.parametrize("build", [decoder, llama])
def test_hidden_weight_brings_layers_closer_to_their_teacher(build: type[nn.Module]) -> None:
    """Closer than with logits alone, and all hooks are removed."""
    teacher = build(4)
    text = torch.cat([tokens(16, seed=seed) for seed in range(4)])

    def distance(student: nn.Module) -> float:
        with HiddenStates.watched(student, teacher) as states, torch.no_grad():
            student(text[:16])
            teacher(text[:16])
            return float(states.distance())

    assert distance(cut_student(teacher)) == 0.0
    tuning = Tuning(steps=30, batch_size=16, sequence_length=text.shape[1] - 1, learning_rate=1e-3)
    distances = []
    for weight in (0.0, 20.0):
        student = cut_student(teacher, layers=2)
        tune(student, text, attrs.evolve(tuning, hidden_weight=weight), teacher=teacher)
        distances.append(distance(student))
        blocks = [block for model in (student, teacher) for block in model.modules()]
        assert not any(block._forward_hooks for block in blocks)
    assert distances[1] < 0.9 * distances[0]


def test_hidden_distance_is_relative_to_the_teachers_variance() -> None:
    """One for a student that predicts only the mean; the teacher gets no gradient."""
    torch.manual_seed(0)
    raw = [torch.randn(4, 9, 16) * scale + 3 for scale in (0.1, 50.0)]
    teacher = [state.requires_grad_() for state in raw]
    mean = [state.mean().expand_as(state).detach().requires_grad_() for state in teacher]
    distance = hidden_distance(mean, teacher)
    torch.testing.assert_close(distance, torch.tensor(1.0), rtol=5e-3, atol=0)
    distance.backward()
    assert all(state.grad is not None for state in mean)
    assert all(state.grad is None for state in teacher)


def logits(model: nn.Module) -> torch.Tensor:
    """Return the logits for the tests' tokens."""
    out = model.eval()(tokens())
    output: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
    return output.detach()

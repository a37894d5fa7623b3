"""Divergences from a teacher, and students that are cut from one."""

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
    enlarged,
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
from ms_compress.training.distillation import distillation_loss
from ms_compress.training.hidden_states import HiddenStates, hidden_distance
from ms_compress.training.loop import tune
from ms_compress.training.options import Divergence, Tuning
from ms_parallel.models import Decoder, DecoderConfig
from ms_parallel.weights import initialize


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_divergences_are_those_of_their_definitions(kind: str) -> None:
    """Against torch.distributions, with a temperature and positions that do not count."""
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 11), torch.randn(2, 5, 11)
    targets = torch.zeros(2, 5, dtype=torch.int64)
    targets[0, 2:] = -100
    p, q = Categorical(logits=teacher / 2), Categorical(logits=student / 2)
    mixed = Categorical(probs=0.1 * p.probs + 0.9 * q.probs)
    each = {
        "forward": kl_divergence(p, q),
        "reverse": kl_divergence(q, p),
        "skewed": kl_divergence(p, mixed),
    }[kind]
    expected = 4 * each[targets != -100].mean()
    found = distillation_loss(student, teacher, kind=kind, temperature=2.0, targets=targets)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(kind: str) -> None:
    """Loss and gradient are zero at equality; the teacher gets no gradient."""
    student = torch.randn(3, 7, requires_grad=True)
    teacher = student.detach().clone().requires_grad_()
    loss = distillation_loss(student, teacher, kind=kind)  # type: ignore[arg-type]
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert student.grad is not None
    assert float(student.grad.abs().max()) < 1e-6
    assert teacher.grad is None


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_what_stands_at_a_position_that_does_not_count_is_not_looked_at(kind: Divergence) -> None:
    """NaN and infinity of either model there leave loss and gradient as they are."""
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 11), torch.randn(2, 5, 11)
    targets = torch.zeros(2, 5, dtype=torch.int64)
    targets[0, 2:] = -100
    ends = []
    for bad in (0.0, float("nan"), float("inf")):
        student[0, 3, 4], teacher[0, 2] = bad, bad
        leaf = student.clone().requires_grad_()
        loss = distillation_loss(leaf, teacher, kind=kind, targets=targets)
        loss.backward()
        assert leaf.grad is not None
        ends.append((loss.detach(), leaf.grad))
    for loss, gradient in ends:
        assert torch.equal(loss, ends[0][0])
        assert torch.equal(gradient, ends[0][1])
    assert not bool(ends[0][1][0, 2:].any())


@pytest.mark.parametrize("skew", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_an_entry_that_neither_model_gives_is_as_if_it_were_not_there(
    kind: Divergence, skew: float
) -> None:
    """A vocabulary that is masked with -inf: the loss of the rest, and no gradient there."""
    torch.manual_seed(0)
    student, teacher = torch.randn(3, 11), torch.randn(3, 11)
    student[:, 8:], teacher[:, 8:] = -torch.inf, -torch.inf
    of_all, of_rest = (student[:, :end].clone().requires_grad_() for end in (11, 8))
    found = distillation_loss(of_all, teacher, kind=kind, temperature=0.7, skew=skew)
    expected = distillation_loss(of_rest, teacher[:, :8], kind=kind, temperature=0.7, skew=skew)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert of_all.grad is not None
    torch.testing.assert_close(of_all.grad[:, :8], of_rest.grad, rtol=1e-5, atol=1e-7)
    assert not bool(of_all.grad[:, 8:].any())


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_what_one_model_alone_leaves_out_costs_nothing_or_everything(kind: Divergence) -> None:
    """Nothing where the distribution that weighs has none of it, infinity where it has."""
    torch.manual_seed(0)
    full, lacking = torch.randn(3, 7), torch.randn(3, 7)
    lacking[:, 5:] = -torch.inf
    rest, part = full.double().softmax(-1), lacking.double().softmax(-1)
    mixed = 0.1 * part + 0.9 * rest if kind == "skewed" else rest
    truth = (torch.xlogy(part, part) - torch.xlogy(part, mixed)).sum(-1).mean().float()
    costs_nothing = {"teacher": lacking, "student": full}
    if kind == "reverse":
        costs_nothing = {"teacher": full, "student": lacking}
    leaf = costs_nothing["student"].clone().requires_grad_()
    found = distillation_loss(leaf, costs_nothing["teacher"], kind=kind)
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)
    found.backward()
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())
    turned = distillation_loss(costs_nothing["teacher"], costs_nothing["student"], kind=kind)
    assert bool(turned.isinf()) == (kind != "skewed")


def test_other_vocabularies_are_refused() -> None:
    """With both sizes."""
    with pytest.raises(ConfigError, match=r"must have one shape, got \(1, 5\) and \(1, 6\)"):
        distillation_loss(torch.zeros(1, 5), torch.zeros(1, 6))


@pytest.mark.parametrize("build", [decoder, llama])
def test_a_student_of_full_size_is_its_teacher(build: type[nn.Module]) -> None:
    """Nothing is lost where nothing is cut."""
    teacher = build()
    student = cut_student(teacher)
    difference = logits(student) - logits(teacher)
    assert float(difference.abs().max()) == 0.0


@pytest.mark.parametrize("build", [decoder, llama])
def test_neurons_of_no_effect_are_cut_without_loss(build: type[nn.Module]) -> None:
    """Neurons whose output weights are zero go first, and the student computes the same."""
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


def test_layers_stay_at_even_distances() -> None:
    """First and last always; a student of half the depth takes every other block."""
    assert kept_layers(12, 6) == [0, 2, 4, 7, 9, 11]
    assert kept_layers(6, 2) == [0, 5]
    teacher = decoder(4)
    student = cut_student(teacher, layers=2)
    last = "mlp.up_proj.weight"
    assert torch.equal(
        student.get_parameter(f"model.layers.1.{last}"),
        teacher.get_parameter(f"model.layers.3.{last}"),
    )
    with pytest.raises(ConfigError, match="layers must be 1 to 4"):
        cut_student(teacher, layers=9)
    with pytest.raises(LayerError, match=r"has no model\.layers"):
        cut_student(nn.Linear(2, 2))


def mostly_windowed() -> nn.Module:
    """Three layers with a window, and one that sees all."""
    return gemma3(*[SLIDING] * 3, FULL)


def half_windowed() -> nn.Module:
    """Two layers that see all, and two with a window."""
    return qwen2_windowed(4, 2)


def smollm3() -> nn.Module:
    """The third layer has no rotary positions."""
    torch.manual_seed(0)
    sizes = {**WINDOWED, "sliding_window": None}
    config = transformers.SmolLM3Config(
        num_hidden_layers=4, no_rope_layers=[1, 1, 0, 1], pad_token_id=0, **sizes
    )
    return enlarged(transformers.SmolLM3ForCausalLM(config))


def windowed() -> nn.Module:
    """The last two layers have a window."""
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
    return enlarged(model)


@pytest.mark.parametrize("keep", [2, 3])
@pytest.mark.parametrize("build", [mostly_windowed, half_windowed, smollm3, windowed])
def test_a_kept_layer_sees_as_far_as_in_its_teacher(
    build: Callable[[], nn.Module], keep: int
) -> None:
    """Where the layers that are cut do nothing, the student computes what its teacher does."""
    teacher = build()
    with torch.no_grad():
        for number, (_, block) in enumerate(blocks_of(teacher)):
            if number not in kept_layers(4, keep):
                block.get_parameter("self_attn.o_proj.weight").zero_()
                block.get_parameter("mlp.down_proj.weight").zero_()
    student = cut_student(teacher, layers=keep)
    torch.testing.assert_close(logits(student), logits(teacher), rtol=1e-4, atol=1e-5)


def test_a_student_of_qwen2_counts_its_own_layers_before_the_window() -> None:
    """Which readers of its config.json take the layers' kinds from."""
    student: Any = cut_student(half_windowed(), layers=3)
    assert kept_layers(4, 3) == [0, 2, 3]
    assert student.config.max_window_layers == 1


def test_a_student_of_a_prepared_teacher_is_cut_from_its_weights_alone() -> None:
    """Learned scales stay behind; the student is a plain model."""
    plain, teacher = llama(4), llama(4)
    qat(teacher, "ct.int4_g32", learned_scales=True)
    student = cut_student(teacher, layers=2, inner=128)
    expected = cut_student(plain, layers=2, inner=128)
    for name, value in expected.state_dict().items():
        assert torch.equal(student.state_dict()[name], value), name
    assert len(student.state_dict()) == len(expected.state_dict())


@pytest.mark.parametrize("build", [decoder, llama])
def test_layers_are_drawn_to_those_they_were_cut_from(build: type[nn.Module]) -> None:
    """With `hidden_weight` they end nearer than by logits alone, and nothing is watched on."""
    teacher = build(4)
    text = torch.cat([tokens(16, seed=seed) for seed in range(4)])

    def distance(student: nn.Module) -> float:
        with HiddenStates.watched(student, teacher) as states, torch.no_grad():
            student(text[:16])
            teacher(text[:16])
            return float(states.distance())

    assert distance(cut_student(teacher)) == 0.0
    how = Tuning(steps=30, batch_size=16, sequence_length=text.shape[1] - 1, learning_rate=1e-3)
    ends = []
    for weight in (0.0, 20.0):
        student = cut_student(teacher, layers=2)
        tune(student, text, attrs.evolve(how, hidden_weight=weight), teacher=teacher)
        ends.append(distance(student))
        blocks = [block for model in (student, teacher) for block in model.modules()]
        assert not any(block._forward_hooks for block in blocks)
    assert ends[1] < 0.9 * ends[0]


def test_the_distance_of_hidden_states_is_a_share_of_the_teachers_variance() -> None:
    """One where a student knows the mean alone; the teacher gets no gradient."""
    torch.manual_seed(0)
    drawn = [torch.randn(4, 9, 16) * scale + 3 for scale in (0.1, 50.0)]
    teacher = [each.requires_grad_() for each in drawn]
    mean = [each.mean().expand_as(each).detach().requires_grad_() for each in teacher]
    found = hidden_distance(mean, teacher)
    torch.testing.assert_close(found, torch.tensor(1.0), rtol=5e-3, atol=0)
    found.backward()
    assert all(each.grad is not None for each in mean)
    assert all(each.grad is None for each in teacher)


def logits(model: nn.Module) -> torch.Tensor:
    """Logits of the tests' tokens."""
    out = model.eval()(tokens())
    found: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
    return found.detach()

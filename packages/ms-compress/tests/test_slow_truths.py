"""Calibrated rounding and pruning, divergences and masks, each against the slow truth."""

from pathlib import Path
from typing import Any

import pytest
import torch
from folders import model, write_model
from torch import Tensor, nn

from ms_compress import export, qat
from ms_compress.methods.gptq import gptq_weight
from ms_compress.methods.gptq_by_loss import output_squares, round_by_loss
from ms_compress.methods.pattern import NOfM
from ms_compress.methods.pruning import masks, prune, set_masks
from ms_compress.methods.wanda import wanda
from ms_compress.quantization.layers import prepared_layers
from ms_compress.quantization.rounding import compute_scales, quantize_weight, round_with_scales
from ms_compress.quantization.scheme import Scheme
from ms_compress.targets.rules import scheme
from ms_compress.targets.target import open_runtime
from ms_compress.training.distillation import distillation_loss
from ms_compress.training.engine_distillation import DistillationLoss, engine_teacher
from ms_compress.training.options import Divergence
from ms_parallel import Engine
from ms_parallel.engine.optimizers.adamw import AdamWConfig


def naive_gptq(
    weight: Tensor, hessian: Tensor, how: Scheme, damping: float, mask: Tensor
) -> Tensor:
    """Optimal brain quantization in order, equation 2 of the paper: the inverse anew each column.

    No Cholesky factor, no blocks: after a column is fixed, the Hessian of those that are left is
    inverted from its own entries, in float64. A pruned weight is fixed at zero, and what the errors
    before have made of it is an error like any other (SparseGPT, arXiv:2301.00774).
    """
    left = (weight * mask).double()
    damped = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(
        len(hessian), dtype=torch.float64
    )
    group = how.group_of(left.shape[1])
    out = torch.zeros_like(left)
    for column in range(left.shape[1]):
        if column % group == 0:
            part = slice(column, column + group)
            scale = compute_scales(left[:, part].float() * mask[:, part], how)
        out[:, column] = round_with_scales(left[:, column : column + 1].float(), scale, how)[
            :, 0
        ].double()
        out[:, column] *= mask[:, column]
        inverse = torch.linalg.inv(damped[column:, column:])
        error = (left[:, column] - out[:, column]) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
    return out


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["ct.int4_g32", "ct.int3_g32", "ort.matmulnbits"])
def test_gptq_is_optimal_brain_quantization(name: str, sparse: bool) -> None:
    """Across a boundary of its blocks too: 160 columns are more than one block of 128.

    Float32 may round a weight that lies on the border of two codes the other way, and what follows
    in its row then differs: rows that never met a border are equal, and they are nearly all.
    """
    torch.manual_seed(0)
    inputs = torch.randn(700, 160) @ torch.randn(160, 160)
    weight, how = torch.randn(48, 160), scheme(name)
    hessian = inputs.t() @ inputs
    mask = NOfM(2, 4).keep(weight.abs()) if sparse else torch.ones_like(weight, dtype=torch.bool)
    found, _ = gptq_weight("layer", weight, hessian, how, mask=mask if sparse else None)
    truth = naive_gptq(weight, hessian, how, 0.01, mask).float()
    same = torch.isclose(found, truth, rtol=1e-3, atol=1e-5).all(1)
    assert float(same.float().mean()) >= 0.9
    assert not bool(found[~mask].any())
    plain = quantize_weight(weight * mask, how).weight()
    assert not torch.isclose(plain, truth, rtol=1e-3, atol=1e-5).all(1).any()


@pytest.mark.parametrize("name", ["ct.int4_g32", "gguf.q4_0", "ct.w8a8"])
def test_gptq_act_order_rounds_on_the_scales_that_the_weight_had(name: str) -> None:
    """Each weight is a code times its own group's scale, whatever the order it was met in."""
    torch.manual_seed(0)
    inputs = torch.randn(500, 160) * torch.linspace(0.1, 3, 160)[torch.randperm(160)]
    inputs = inputs @ (torch.eye(160) + 0.2 * torch.randn(160, 160))
    weight, how = torch.randn(24, 160), scheme(name)
    found, scales = gptq_weight("layer", weight, inputs.t() @ inputs, how, act_order=True)
    plain = quantize_weight(weight, how)
    assert torch.equal(scales.to(how.dtype), plain.scales)
    codes = found / scales.repeat_interleave(how.group_of(160), 1)
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
    assert float(codes.round().min()) >= how.low
    assert float(codes.round().max()) <= how.high
    error = (inputs @ (weight - found).t()).square().mean()
    assert error < 0.8 * (inputs @ (weight - plain.weight()).t()).square().mean()


def given_earlier(square: Tensor) -> Tensor:
    """Row j: what earlier errors are multiplied by; the best j-th error is minus their sum.

    Later errors are free: they are done away with by inverting what is left of the inverse.
    """
    inverse = torch.linalg.inv(square.double())
    rows = torch.zeros_like(inverse)
    for j in range(len(square)):
        left = torch.linalg.inv(inverse[: j + 1, : j + 1])
        rows[j, : j + 1] = left[j] / left[j, j]
    return rows


def features(count: int, rank: int) -> Tensor:
    """Square of features that hang together, sorted by use."""
    values = torch.randn(4 * count, rank) @ torch.randn(rank, count) + torch.randn(4 * count, count)
    values = values * torch.linspace(2, 0.5, count)
    square = values.t() @ values
    order = square.diagonal().argsort(descending=True)
    return square[order][:, order]


@pytest.mark.parametrize("name", ["ct.int4_g32", "ct.int3_g32", "ort.matmulnbits", "ct.w8a8"])
@pytest.mark.parametrize("sparse", [False, True])
def test_rounding_by_loss_makes_up_for_every_error_above_and_to_the_left(
    name: str, sparse: bool
) -> None:
    """Each entry is what its definition rounds, given all others; 150 x 160 are four tiles."""
    torch.manual_seed(0)
    how = scheme(name)
    weight, inputs, outputs = torch.randn(150, 160), features(160, 40), features(150, 30)
    mask = torch.rand(150, 160) > 0.5 if sparse else None
    found, scales = round_by_loss("layer", weight, inputs, outputs, how, mask=mask, damping=1e-6)
    kept = weight if mask is None else weight * mask
    error = (found - kept).double()
    felt = given_earlier(outputs) @ error @ given_earlier(inputs).t()
    aim = (kept - (felt - error)).float()
    steps = scales.repeat_interleave(how.group_of(160), 1)
    expected = round_with_scales(aim.view(-1, 1), steps.view(-1, 1), how).view_as(aim)
    expected = expected if mask is None else expected * mask
    same = torch.isclose(found, expected, rtol=1e-5, atol=1e-6)
    assert float(same.float().mean()) > 0.998
    on_a_border = ((aim / steps).frac().abs() - 0.5).abs() < 0.02
    assert bool((same | on_a_border).all())
    assert bool((found[:, :32] != quantize_weight(kept, how).weight()[:, :32]).any())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["ct.int4_g32", "gguf.q4_0"])
def test_where_outputs_are_alike_rounding_by_loss_is_gptq(name: str, sparse: bool) -> None:
    """Two derivations of one rounding, by the Hessian and by its inverse, meet."""
    torch.manual_seed(0)
    weight, inputs, how = torch.randn(40, 160), features(160, 40), scheme(name)
    mask = NOfM(2, 4).keep(weight.abs()) if sparse else None
    theirs, scales = gptq_weight("layer", weight, inputs, how, mask=mask, act_order=True)
    found, same_scales = round_by_loss("layer", weight, inputs, torch.eye(40), how, mask=mask)
    assert torch.equal(scales, same_scales)
    equal = torch.isclose(found, theirs, rtol=1e-5, atol=1e-6).all(1)
    assert float(equal.float().mean()) >= 0.9


def test_features_that_are_never_used_leave_the_rounding_of_others_alone() -> None:
    """An output that the loss does not see, and an input that is always zero."""
    torch.manual_seed(0)
    weight, how = torch.randn(24, 64), scheme("ct.int4_g32")
    inputs, outputs = features(64, 20), 1e-9 * features(24, 8)
    inputs[63], inputs[:, 63], outputs[23], outputs[:, 23] = 0, 0, 0, 0
    found, _ = round_by_loss("layer", weight, inputs, outputs, how)
    alone, _ = round_by_loss("layer", weight[:23], inputs, outputs[:23, :23].clone(), how)
    assert bool(found.isfinite().all())
    assert float(torch.isclose(found[:23], alone).float().mean()) > 0.98

    def cost(rounded: Tensor) -> float:
        error = rounded - weight
        return float((outputs @ error @ inputs * error).sum())

    assert cost(found) < 0.6 * cost(quantize_weight(weight, how).weight())


def test_squares_of_outputs_are_the_curvature_of_the_divergence() -> None:
    """One token met 4,000 times: ½ Σ O·(Ex)(Ex)ᵀ is how far the model goes from itself.

    For one token the Kronecker product is exact, and what is left is the noise of drawn targets.
    """
    made = model(layers=1).double()
    text = torch.tensor([[7]]).expand(4000, 1)
    name = "model.layers.0.self_attn.o_proj"
    layer = made.get_submodule(name)
    flags = {key: parameter.requires_grad for key, parameter in made.named_parameters()}
    with torch.no_grad():
        square = output_squares(made, {name: layer}, text.split(1000))[name] / 4000
    assert flags == {key: parameter.requires_grad for key, parameter in made.named_parameters()}
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda m, args: seen.append(args[0].flatten()))
    with torch.no_grad():
        truth = made(text[:1]).log_softmax(-1)
        handle.remove()
        for seed in range(3):
            torch.manual_seed(seed)
            step = 1e-3 * torch.randn_like(layer.weight)
            felt = step @ seen[0]
            layer.weight += step
            moved = made(text[:1]).log_softmax(-1)
            layer.weight -= step
            apart = float((truth.exp() * (truth - moved)).sum())
            assert float(0.5 * felt @ square.double() @ felt) == pytest.approx(apart, rel=0.1)


def test_a_feature_that_is_never_used_does_not_spoil_the_others() -> None:
    """A dead column leaves a Hessian without inverse; the rest is rounded as without it."""
    torch.manual_seed(0)
    inputs = torch.randn(300, 64)
    inputs[:, 40] = 0
    weight, how = torch.randn(8, 64), scheme("ct.int4_g32")
    found, _ = gptq_weight("layer", weight, inputs.t() @ inputs, how)
    assert bool(found.isfinite().all())
    error = (inputs @ (weight - found).t()).square().mean()
    assert error < (inputs @ (weight - quantize_weight(weight, how).weight()).t()).square().mean()


@pytest.mark.parametrize("wanted", [0.5, "2:4", "1:4"])
def test_wanda_is_its_definition_in_loops(wanted: float | str) -> None:
    """|W| times the norm of its input, compared in a row or in each group of a row."""
    made = model(layers=1)
    text = torch.randint(0, 256, (4, 24))
    layer = made.get_submodule("model.layers.0.self_attn.q_proj")
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda m, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        made(text)
    handle.remove()
    weight = layer.get_parameter("weight").detach().clone()
    norms = [float(torch.linalg.vector_norm(seen[0][:, k].double())) for k in range(64)]
    wanda(made, wanted, list(text.split(2)))
    kept = masks(made)["model.layers.0.self_attn.q_proj"]
    width, stay = {0.5: (64, 32), "2:4": (4, 2), "1:4": (4, 1)}[wanted]
    for row in range(len(weight)):
        for first in range(0, 64, width):
            scores = [
                (abs(float(weight[row, k])) * norms[k], k) for k in range(first, first + width)
            ]
            best = {k for _, k in sorted(scores)[-stay:]}
            assert best == {k for k in range(first, first + width) if kept[row, k]}


def definition(student: Tensor, teacher: Tensor, kind: Divergence, heat: float) -> Tensor:
    """Divergence by probabilities, in the dtype that it is given."""
    p, q = (teacher / heat).softmax(-1), (student / heat).softmax(-1)
    if kind == "reverse":
        each = q * (q.log() - p.log())
    else:
        other = 0.1 * p + 0.9 * q if kind == "skewed" else q
        each = p * (p.log() - other.log())
    return each.sum(-1).mean() * heat**2


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_gradients_of_divergences_are_those_of_finite_differences(kind: Divergence) -> None:
    """The definition passes gradcheck in float64; the loss has its gradient, to float32."""
    torch.manual_seed(0)
    teacher = torch.randn(3, 7, dtype=torch.float64)
    student = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: definition(s, teacher, kind, 1.7), (student,))
    (truth,) = torch.autograd.grad(definition(student, teacher, kind, 1.7), student)
    single = student.detach().float().requires_grad_()
    distillation_loss(single, teacher.float(), kind=kind, temperature=1.7).backward()
    assert single.grad is not None
    torch.testing.assert_close(single.grad.double(), truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_chunks_of_positions_give_the_loss_and_gradient_of_the_whole(kind: Divergence) -> None:
    """And no call of the student's head ever sees more than a chunk."""
    student, teacher = model(1), model(2)
    batch = some_batch(3, 20)
    batch["targets"][0, 5:9] = -100
    asked: list[int] = []

    class Last:
        def __init__(self) -> None:
            self.hidden = student(batch["tokens"], logits=False)

        def logits(self, positions: slice) -> Tensor:
            part = self.hidden[:, positions]
            asked.append(part.shape[1])
            return student.head(part)

    loss = DistillationLoss(teacher=engine_teacher(teacher), kind=kind, chunk=7)
    value = loss(Last(), batch) / loss.weight(batch)
    value.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    assert max(asked) == 7
    assert len(asked) == 2 * 3  # each of three chunks, forward and again backward
    student.zero_grad()
    with torch.no_grad():
        aim = teacher(batch["tokens"])
    whole = distillation_loss(student(batch["tokens"]), aim, kind=kind, targets=batch["targets"])
    whole.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(value, whole, rtol=1e-5, atol=1e-6)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_an_engine_learns_its_teacher(tmp_path: Path) -> None:
    """The divergence falls to a fraction; the first loss is that of one plain forward."""
    teacher = model(3)
    with torch.no_grad():
        for parameter in teacher.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    engine = Engine(
        write_model(tmp_path / "student"),
        optimizer=AdamWConfig(learning_rate=5e-3, warmup_steps=1, decay_steps=60),
    )
    batch = some_batch(4, 16)
    loss: Any = DistillationLoss(teacher=engine_teacher(teacher), chunk=5)
    with torch.no_grad():
        first = distillation_loss(model()(batch["tokens"]), teacher(batch["tokens"]))
    losses = [engine.step(batch, loss).loss for _ in range(60)]
    assert losses[0] == pytest.approx(float(first), rel=1e-4)
    assert losses[-1] < 0.5 * losses[0]


def some_batch(rows: int, positions: int) -> dict[str, Tensor]:
    """Any tokens."""
    text = torch.randint(0, 256, (rows, positions + 1), generator=torch.Generator().manual_seed(5))
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


@pytest.mark.parametrize("optimizer", ["torch", "ms_parallel"])
def test_masks_are_exact_after_fifty_steps_and_in_the_runtime(
    optimizer: str, tmp_path: Path
) -> None:
    """2:4 and four bits together: with decay and momentum, what was pruned stays exactly zero."""
    plain = model(4)
    prune(plain, "2:4")
    wanted = {name: mask.clone() for name, mask in masks(plain).items()}
    batch = some_batch(2, 16)
    if optimizer == "torch":
        trained: nn.Module = qat(plain, "ct.int4_g32", learned_scales=True)
        steps = torch.optim.AdamW(trained.parameters(), lr=3e-3, weight_decay=0.1)
        for _ in range(50):
            logits = trained(batch["tokens"]).flatten(0, 1)
            nn.functional.cross_entropy(logits, batch["targets"].flatten()).backward()
            steps.step()
            steps.zero_grad()
    else:
        trained = with_the_engine(write_model(tmp_path / "plain", seed=4), wanted, batch)
    layers = dict(prepared_layers(trained))
    for name, mask in wanted.items():
        assert not bool(layers[name].effective_weight()[~mask].any())
        assert bool(layers[name].effective_weight()[mask].any())
    runtime: Any = open_runtime(export(trained, tmp_path / "out", verify=True), "ct")
    runtime.logits(batch["tokens"])  # codes become weights at the first forward
    there = dict(runtime.model.named_modules())
    for name, mask in wanted.items():
        assert not bool(there[name].weight[~mask].any())


def with_the_engine(folder: Path, wanted: dict[str, Tensor], batch: dict[str, Tensor]) -> nn.Module:
    """Fifty updates of ms-parallel's engine and its own AdamW."""
    from ms_parallel.engine.loss import NextTokenLoss

    def prepare(stage: nn.Module) -> None:
        set_masks(stage, wanted)
        qat(stage, "ct.int4_g32", learned_scales=True)

    settings = AdamWConfig(learning_rate=3e-3, weight_decay=0.1, warmup_steps=1, decay_steps=50)
    engine = Engine(folder, optimizer=settings, prepare=prepare)
    for _ in range(50):
        engine.step(batch, NextTokenLoss())
    return engine.stages[0]

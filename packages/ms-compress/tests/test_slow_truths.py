"""Calibrated rounding, pruning, divergences and masks, each against a slow reference."""

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
from ms_compress.training.distillation import DistillationLoss, distillation_loss, engine_teacher
from ms_compress.training.options import Divergence
from ms_parallel import Engine
from ms_parallel.optim.optimizers.adamw import AdamWConfig


def naive_gptq(
    weight: Tensor, hessian: Tensor, quant_scheme: Scheme, damping: float, mask: Tensor
) -> Tensor:
    """Optimal brain quantization in column order (equation 2), inverting the Hessian per column.

    No Cholesky factor and no blocks: after a column is fixed, the Hessian of the remaining columns
    is inverted directly, in float64. A pruned weight is fixed at zero, and the resulting error is
    propagated like any other (SparseGPT, arXiv:2301.00774).
    """
    remaining = (weight * mask).double()
    damped = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(
        len(hessian), dtype=torch.float64
    )
    group = quant_scheme.group_of(remaining.shape[1])
    out = torch.zeros_like(remaining)
    for column in range(remaining.shape[1]):
        if column % group == 0:
            group_columns = slice(column, column + group)
            scale = compute_scales(
                remaining[:, group_columns].float() * mask[:, group_columns], quant_scheme
            )
        out[:, column] = round_with_scales(
            remaining[:, column : column + 1].float(), scale, quant_scheme
        )[:, 0].double()
        out[:, column] *= mask[:, column]
        hessian_inverse = torch.linalg.inv(damped[column:, column:])
        error = (remaining[:, column] - out[:, column]) / hessian_inverse[0, 0]
        remaining[:, column:] -= error[:, None] * hessian_inverse[0]
    return out


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["ct.int4_g32", "ct.int3_g32", "ort.matmulnbits"])
def test_gptq_equals_optimal_brain_quantization(name: str, sparse: bool) -> None:
    """Also across block boundaries: 160 columns are more than one block of 128.

    Float32 may round a weight on the border of two codes the other way, which changes the rest of
    its row. At least 90% of the rows never meet a border and are equal.
    """
    torch.manual_seed(0)
    inputs = torch.randn(700, 160) @ torch.randn(160, 160)
    weight, quant_scheme = torch.randn(48, 160), scheme(name)
    hessian = inputs.t() @ inputs
    mask = NOfM(2, 4).keep(weight.abs()) if sparse else torch.ones_like(weight, dtype=torch.bool)
    rounded, _ = gptq_weight("layer", weight, hessian, quant_scheme, mask=mask if sparse else None)
    expected = naive_gptq(weight, hessian, quant_scheme, 0.01, mask).float()
    equal_rows = torch.isclose(rounded, expected, rtol=1e-3, atol=1e-5).all(1)
    assert float(equal_rows.float().mean()) >= 0.9
    assert not bool(rounded[~mask].any())
    rtn = quantize_weight(weight * mask, quant_scheme).weight()
    assert not torch.isclose(rtn, expected, rtol=1e-3, atol=1e-5).all(1).any()


@pytest.mark.parametrize("name", ["ct.int4_g32", "gguf.q4_0", "ct.w8a8"])
def test_gptq_act_order_keeps_the_original_scales(name: str) -> None:
    """Every weight is a code times its own group's scale, for any order of columns."""
    torch.manual_seed(0)
    inputs = torch.randn(500, 160) * torch.linspace(0.1, 3, 160)[torch.randperm(160)]
    inputs = inputs @ (torch.eye(160) + 0.2 * torch.randn(160, 160))
    weight, quant_scheme = torch.randn(24, 160), scheme(name)
    rounded, scales = gptq_weight(
        "layer", weight, inputs.t() @ inputs, quant_scheme, act_order=True
    )
    rtn = quantize_weight(weight, quant_scheme)
    assert torch.equal(scales.to(quant_scheme.dtype), rtn.scales)
    codes = rounded / scales.repeat_interleave(quant_scheme.group_of(160), 1)
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
    assert float(codes.round().min()) >= quant_scheme.low
    assert float(codes.round().max()) <= quant_scheme.high
    error = (inputs @ (weight - rounded).t()).square().mean()
    assert error < 0.8 * (inputs @ (weight - rtn.weight()).t()).square().mean()


def error_propagation(hessian: Tensor) -> Tensor:
    """Row j: factors of earlier errors; the optimal j-th error is minus their weighted sum.

    Later errors are free, so they are eliminated by inverting the leading block of the inverse.
    """
    inverse = torch.linalg.inv(hessian.double())
    rows = torch.zeros_like(inverse)
    for j in range(len(hessian)):
        block_inverse = torch.linalg.inv(inverse[: j + 1, : j + 1])
        rows[j, : j + 1] = block_inverse[j] / block_inverse[j, j]
    return rows


def correlated_hessian(count: int, rank: int) -> Tensor:
    """Return the Hessian of correlated features, sorted by magnitude."""
    values = torch.randn(4 * count, rank) @ torch.randn(rank, count) + torch.randn(4 * count, count)
    values = values * torch.linspace(2, 0.5, count)
    square = values.t() @ values
    order = square.diagonal().argsort(descending=True)
    return square[order][:, order]


@pytest.mark.parametrize("name", ["ct.int4_g32", "ct.int3_g32", "ort.matmulnbits", "ct.w8a8"])
@pytest.mark.parametrize("sparse", [False, True])
def test_rounding_by_loss_compensates_errors_above_and_to_the_left(name: str, sparse: bool) -> None:
    """Every entry satisfies its definition given all others; 150 x 160 spans four tiles."""
    torch.manual_seed(0)
    quant_scheme = scheme(name)
    weight, inputs, outputs = (
        torch.randn(150, 160),
        correlated_hessian(160, 40),
        correlated_hessian(150, 30),
    )
    mask = torch.rand(150, 160) > 0.5 if sparse else None
    rounded, scales = round_by_loss(
        "layer", weight, inputs, outputs, quant_scheme, mask=mask, damping=1e-6
    )
    masked_weight = weight if mask is None else weight * mask
    error = (rounded - masked_weight).double()
    propagated = error_propagation(outputs) @ error @ error_propagation(inputs).t()
    target = (masked_weight - (propagated - error)).float()
    steps = scales.repeat_interleave(quant_scheme.group_of(160), 1)
    expected = round_with_scales(target.view(-1, 1), steps.view(-1, 1), quant_scheme).view_as(
        target
    )
    expected = expected if mask is None else expected * mask
    equal = torch.isclose(rounded, expected, rtol=1e-5, atol=1e-6)
    assert float(equal.float().mean()) > 0.998
    on_a_border = ((target / steps).frac().abs() - 0.5).abs() < 0.02
    assert bool((equal | on_a_border).all())
    assert bool(
        (rounded[:, :32] != quantize_weight(masked_weight, quant_scheme).weight()[:, :32]).any()
    )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["ct.int4_g32", "gguf.q4_0"])
def test_rounding_by_loss_with_uniform_outputs_equals_gptq(name: str, sparse: bool) -> None:
    """Two derivations of the same rounding, from the Hessian and from its inverse."""
    torch.manual_seed(0)
    weight, inputs, quant_scheme = torch.randn(40, 160), correlated_hessian(160, 40), scheme(name)
    mask = NOfM(2, 4).keep(weight.abs()) if sparse else None
    gptq_rounded, scales = gptq_weight(
        "layer", weight, inputs, quant_scheme, mask=mask, act_order=True
    )
    rounded, same_scales = round_by_loss(
        "layer", weight, inputs, torch.eye(40), quant_scheme, mask=mask
    )
    assert torch.equal(scales, same_scales)
    equal = torch.isclose(rounded, gptq_rounded, rtol=1e-5, atol=1e-6).all(1)
    assert float(equal.float().mean()) >= 0.9


def test_unused_features_do_not_change_the_rounding_of_others() -> None:
    """An output that the loss ignores, and an input that is always zero."""
    torch.manual_seed(0)
    weight, quant_scheme = torch.randn(24, 64), scheme("ct.int4_g32")
    inputs, outputs = correlated_hessian(64, 20), 1e-9 * correlated_hessian(24, 8)
    inputs[63], inputs[:, 63], outputs[23], outputs[:, 23] = 0, 0, 0, 0
    rounded, _ = round_by_loss("layer", weight, inputs, outputs, quant_scheme)
    rounded_without_unused, _ = round_by_loss(
        "layer", weight[:23], inputs, outputs[:23, :23].clone(), quant_scheme
    )
    assert bool(rounded.isfinite().all())
    assert float(torch.isclose(rounded[:23], rounded_without_unused).float().mean()) > 0.98

    def cost(candidate: Tensor) -> float:
        error = candidate - weight
        return float((outputs @ error @ inputs * error).sum())

    assert cost(rounded) < 0.6 * cost(quantize_weight(weight, quant_scheme).weight())


def test_output_squares_are_the_curvature_of_the_divergence() -> None:
    """For one token seen 4,000 times, half of O . (Ex)(Ex)^T equals the KL from the original model.

    For a single token the Kronecker product is exact, so only sampling noise of targets remains.
    """
    small = model(layers=1).double()
    text = torch.tensor([[7]]).expand(4000, 1)
    name = "model.layers.0.self_attn.o_proj"
    layer = small.get_submodule(name)
    flags = {key: parameter.requires_grad for key, parameter in small.named_parameters()}
    with torch.no_grad():
        square = output_squares(small, {name: layer}, text.split(1000))[name] / 4000
    assert flags == {key: parameter.requires_grad for key, parameter in small.named_parameters()}
    inputs: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda m, args: inputs.append(args[0].flatten()))
    with torch.no_grad():
        log_probs = small(text[:1]).log_softmax(-1)
        handle.remove()
        for seed in range(3):
            torch.manual_seed(seed)
            step = 1e-3 * torch.randn_like(layer.weight)
            output_change = step @ inputs[0]
            layer.weight += step
            changed_log_probs = small(text[:1]).log_softmax(-1)
            layer.weight -= step
            divergence = float((log_probs.exp() * (log_probs - changed_log_probs)).sum())
            assert float(0.5 * output_change @ square.double() @ output_change) == pytest.approx(
                divergence, rel=0.1
            )


def test_a_dead_feature_does_not_spoil_gptq() -> None:
    """A dead column makes the Hessian singular; the other columns are still rounded well."""
    torch.manual_seed(0)
    inputs = torch.randn(300, 64)
    inputs[:, 40] = 0
    weight, quant_scheme = torch.randn(8, 64), scheme("ct.int4_g32")
    rounded, _ = gptq_weight("layer", weight, inputs.t() @ inputs, quant_scheme)
    assert bool(rounded.isfinite().all())
    error = (inputs @ (weight - rounded).t()).square().mean()
    assert (
        error
        < (inputs @ (weight - quantize_weight(weight, quant_scheme).weight()).t()).square().mean()
    )


@pytest.mark.parametrize("pattern", [0.5, "2:4", "1:4"])
def test_wanda_equals_its_definition_in_loops(pattern: float | str) -> None:
    """Weights are scored by |W| times input norm and compared within a row or a group of a row."""
    small = model(layers=1)
    text = torch.randint(0, 256, (4, 24))
    layer = small.get_submodule("model.layers.0.self_attn.q_proj")
    inputs: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda m, args: inputs.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        small(text)
    handle.remove()
    weight = layer.get_parameter("weight").detach().clone()
    norms = [float(torch.linalg.vector_norm(inputs[0][:, k].double())) for k in range(64)]
    wanda(small, pattern, list(text.split(2)))
    mask = masks(small)["model.layers.0.self_attn.q_proj"]
    group_size, keep = {0.5: (64, 32), "2:4": (4, 2), "1:4": (4, 1)}[pattern]
    for row in range(len(weight)):
        for start in range(0, 64, group_size):
            scores = [
                (abs(float(weight[row, k])) * norms[k], k) for k in range(start, start + group_size)
            ]
            best = {k for _, k in sorted(scores)[-keep:]}
            assert best == {k for k in range(start, start + group_size) if mask[row, k]}


def reference_divergence(student: Tensor, teacher: Tensor, kind: Divergence, heat: float) -> Tensor:
    """Divergence from probabilities, in the input dtype."""
    p, q = (teacher / heat).softmax(-1), (student / heat).softmax(-1)
    if kind == "reverse":
        terms = q * (q.log() - p.log())
    else:
        mixture = 0.1 * p + 0.9 * q if kind == "skewed" else q
        terms = p * (p.log() - mixture.log())
    return terms.sum(-1).mean() * heat**2


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_divergence_gradients_match_the_reference(kind: Divergence) -> None:
    """The reference passes gradcheck in float64; the loss has the same gradient up to float32."""
    torch.manual_seed(0)
    teacher = torch.randn(3, 7, dtype=torch.float64)
    student = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda s: reference_divergence(s, teacher, kind, 1.7), (student,)
    )
    (expected,) = torch.autograd.grad(reference_divergence(student, teacher, kind, 1.7), student)
    float32_student = student.detach().float().requires_grad_()
    distillation_loss(float32_student, teacher.float(), kind=kind, temperature=1.7).backward()
    assert float32_student.grad is not None
    torch.testing.assert_close(float32_student.grad.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["forward", "reverse", "skewed"])
def test_chunked_distillation_equals_unchunked(kind: Divergence) -> None:
    """The student's head never gets more than one chunk of positions."""
    student, teacher = model(1), model(2)
    batch = random_batch(3, 20)
    batch["targets"][0, 5:9] = -100
    chunk_sizes: list[int] = []

    class LastStage:
        def __init__(self) -> None:
            self.hidden = student(batch["tokens"], logits=False)

        def logits(self, positions: slice) -> Tensor:
            part = self.hidden[:, positions]
            chunk_sizes.append(part.shape[1])
            return student.head(part)

    loss = DistillationLoss(teacher=engine_teacher(teacher), kind=kind, chunk=7)
    value = loss(LastStage(), batch) / loss.weight(batch)
    value.backward()  # type: ignore[no-untyped-call]
    grads = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    assert max(chunk_sizes) == 7
    assert len(chunk_sizes) == 2 * 3  # three chunks, in forward and again in backward
    student.zero_grad()
    with torch.no_grad():
        teacher_logits = teacher(batch["tokens"])
    unchunked = distillation_loss(
        student(batch["tokens"]), teacher_logits, kind=kind, targets=batch["targets"]
    )
    unchunked.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(value, unchunked, rtol=1e-5, atol=1e-6)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-6)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_an_engine_learns_from_its_teacher(tmp_path: Path) -> None:
    """The divergence halves at least, and the first loss matches a plain forward pass."""
    teacher = model(3)
    with torch.no_grad():
        for parameter in teacher.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    engine = Engine(
        write_model(tmp_path / "student"),
        optimizer=AdamWConfig(learning_rate=5e-3, warmup_steps=1, decay_steps=60),
    )
    batch = random_batch(4, 16)
    loss: Any = DistillationLoss(teacher=engine_teacher(teacher), chunk=5)
    with torch.no_grad():
        expected_first = distillation_loss(model()(batch["tokens"]), teacher(batch["tokens"]))
    losses = [engine.step(batch, loss).loss for _ in range(60)]
    assert losses[0] == pytest.approx(float(expected_first), rel=1e-4)
    assert losses[-1] < 0.5 * losses[0]


def random_batch(rows: int, positions: int) -> dict[str, Tensor]:
    """Return a batch of random tokens."""
    text = torch.randint(0, 256, (rows, positions + 1), generator=torch.Generator().manual_seed(5))
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


@pytest.mark.parametrize("optimizer", ["torch", "ms_parallel"])
def test_masks_are_exact_after_fifty_steps_and_in_the_runtime(
    optimizer: str, tmp_path: Path
) -> None:
    """With 2:4 and four bits, pruned weights stay exactly zero despite decay and momentum."""
    plain = model(4)
    prune(plain, "2:4")
    expected_masks = {name: mask.clone() for name, mask in masks(plain).items()}
    batch = random_batch(2, 16)
    if optimizer == "torch":
        trained: nn.Module = qat(plain, "ct.int4_g32", learned_scales=True)
        adamw = torch.optim.AdamW(trained.parameters(), lr=3e-3, weight_decay=0.1)
        for _ in range(50):
            logits = trained(batch["tokens"]).flatten(0, 1)
            nn.functional.cross_entropy(logits, batch["targets"].flatten()).backward()
            adamw.step()
            adamw.zero_grad()
    else:
        trained = train_with_engine(write_model(tmp_path / "plain", seed=4), expected_masks, batch)
    layers = dict(prepared_layers(trained))
    for name, mask in expected_masks.items():
        assert not bool(layers[name].effective_weight()[~mask].any())
        assert bool(layers[name].effective_weight()[mask].any())
    runtime: Any = open_runtime(export(trained, tmp_path / "out", verify=True), "ct")
    runtime.logits(batch["tokens"])  # the first forward pass unpacks the codes
    runtime_modules = dict(runtime.model.named_modules())
    for name, mask in expected_masks.items():
        assert not bool(runtime_modules[name].weight[~mask].any())


def train_with_engine(
    folder: Path, expected_masks: dict[str, Tensor], batch: dict[str, Tensor]
) -> nn.Module:
    """Run fifty updates with ms-parallel's engine and AdamW."""
    from ms_parallel.engine.loss import NextTokenLoss

    def prepare(stage: nn.Module) -> None:
        set_masks(stage, expected_masks)
        qat(stage, "ct.int4_g32", learned_scales=True)

    settings = AdamWConfig(learning_rate=3e-3, weight_decay=0.1, warmup_steps=1, decay_steps=50)
    engine = Engine(folder, optimizer=settings, prepare=prepare)
    for _ in range(50):
        engine.step(batch, NextTokenLoss())
    return engine.stages[0]

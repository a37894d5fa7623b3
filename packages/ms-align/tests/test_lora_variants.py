"""DoRA, rsLoRA, PiSSA, OLoRA and dropout, each against peft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ms_align import LoraOptions, add_lora, load_lora
from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.losses.sft import SFTLoss

from .small_models import decoder, llama
from .test_lora import TOKENS, logits

TARGETS = ("q_proj", "o_proj", "down_proj")
slow = pytest.mark.slow


def loss_of(model: nn.Module) -> Tensor:
    """Cross-entropy of the next token."""
    out: Any = model(TOKENS)
    out = getattr(out, "logits", out)[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(out, TOKENS[:, 1:].flatten())


def tensors_of(peft_layer: Any, layer: Any) -> list[tuple[Tensor, Tensor]]:
    """Pair the trained tensors of a layer of peft with ours."""
    pairs = [
        (peft_layer.lora_A["default"].weight, layer.lora_A),
        (peft_layer.lora_B["default"].weight, layer.lora_B),
    ]
    if layer.lora_magnitude_vector is not None:
        magnitude = peft_layer.lora_magnitude_vector["default"].weight
        pairs.append((magnitude, layer.lora_magnitude_vector))
    return pairs


def pair_with_peft(**options: Any) -> tuple[Any, Any]:
    """Adapt a model with peft and with ours, with equal adapters that are not zero."""
    peft = pytest.importorskip("peft")
    settings = {**options, "lora_dropout": options.get("dropout", 0.0)}
    settings.pop("dropout", None)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=[*TARGETS], **settings)
    theirs = peft.get_peft_model(llama(), config)
    ours = add_lora(llama(), LoraOptions(rank=4, alpha=6.0, target_modules=TARGETS, **options))
    generator = torch.Generator().manual_seed(0)
    for name, layer in ours.adapters().items():
        pairs = tensors_of(theirs.base_model.model.get_submodule(name), layer)
        for index, (their_tensor, our_tensor) in enumerate(pairs):
            if index > 0 and "init_lora_weights" not in options:
                # A is random and B zero; B's first values and the magnitudes are equal.
                torch.testing.assert_close(our_tensor, their_tensor, rtol=0.0, atol=1e-6)
            elif "init_lora_weights" in options:
                torch.testing.assert_close(our_tensor, their_tensor, rtol=0.0, atol=1e-6)
            with torch.no_grad():
                our_tensor += torch.randn(our_tensor.shape, generator=generator) * 0.05
                their_tensor.copy_(our_tensor)
    return theirs, ours


VARIANTS: list[dict[str, Any]] = [
    {"use_dora": True, "use_rslora": True},
    {"init_lora_weights": "pissa"},
    {"use_rslora": True},
    {"use_dora": True},
    {"init_lora_weights": "olora"},
    {"init_lora_weights": "pissa", "use_dora": True},
    {"init_lora_weights": "pissa", "use_rslora": True},
]


@pytest.mark.parametrize(
    "options", [*VARIANTS[:2], *(pytest.param(v, marks=slow) for v in VARIANTS[2:])], ids=str
)
def test_values_gradients_and_files_are_those_of_peft(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Losses and gradients within 1e-6; files load both ways; without adapters, the base model."""
    theirs, ours = pair_with_peft(**options)
    losses = loss_of(theirs), loss_of(ours)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    for loss in losses:
        loss.backward()
    for name, layer in ours.adapters().items():
        pairs = tensors_of(theirs.base_model.model.get_submodule(name), layer)
        for their_tensor, our_tensor in pairs:
            largest = float(their_tensor.grad.abs().max())  # type: ignore[union-attr]
            # Sums of some 20 products of float32 numbers in another order.
            close = {"rtol": 0.0, "atol": 2e-6 * max(largest, 0.5)}
            torch.testing.assert_close(our_tensor.grad, their_tensor.grad, **close)
    expected = logits(ours)
    with ours.disable_adapter():
        assert torch.equal(logits(ours), logits(llama()))
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    peft = pytest.importorskip("peft")
    reloaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "ours")
    torch.testing.assert_close(logits(reloaded), expected, rtol=0.0, atol=1e-5)
    for folder in ("ours", "theirs"):
        loaded = load_lora(llama(), tmp_path / folder)
        torch.testing.assert_close(logits(loaded), expected, rtol=0.0, atol=1e-5)
        merged = logits(loaded.merged_model())
        torch.testing.assert_close(merged, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("use_dora", [False, pytest.param(True, marks=slow)])
def test_dropout_is_that_of_peft_with_the_same_masks(use_dora: bool) -> None:
    """Peft's dropout modules are replaced by ones that apply our masks."""
    theirs, ours = pair_with_peft(dropout=0.25, use_dora=use_dora)

    class Dropout(nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = [layer]

        def forward(self, x: Tensor) -> Tensor:
            dropped: Tensor = self.layer[0]._dropout(x)
            return dropped

    for name, layer in ours.adapters().items():
        peft_layer = theirs.base_model.model.get_submodule(name)
        peft_layer.lora_dropout["default"] = Dropout(layer)
    theirs.train()
    losses = []
    for model in (theirs, ours):
        with ours.dropout(7):
            losses.append(loss_of(model))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    assert abs(losses[1] - loss_of(ours)) > 1e-4
    for name, layer in ours.adapters().items():
        pairs = tensors_of(theirs.base_model.model.get_submodule(name), layer)
        for their_tensor, our_tensor in pairs:
            torch.testing.assert_close(our_tensor.grad, their_tensor.grad, rtol=1e-4, atol=2e-6)


def test_dropout_masks_depend_on_the_step_only() -> None:
    """A resumed engine repeats the masks of the step; other passes have no dropout."""
    batch = {"tokens": TOKENS, "targets": TOKENS.roll(-1, 1)}

    def engine() -> LocalEngine:
        model = add_lora(decoder(), LoraOptions(rank=2, dropout=0.5))
        return LocalEngine(model, OptimizerOptions(learning_rate=1e-2), microbatch_size=1)

    first, resumed = engine(), engine()
    losses = [first.step(batch, SFTLoss()).loss for _ in range(3)]
    for _ in range(2):
        resumed.step(batch, SFTLoss())
    state = {name: tensor.clone() for name, tensor in resumed.state_dict().items()}
    fresh = engine()
    fresh.load_state_dict(state)
    torch.manual_seed(5)
    assert fresh.step(batch, SFTLoss()).loss == losses[2]
    outputs = [logits(fresh.module) for _ in range(2)]
    assert torch.equal(*outputs)

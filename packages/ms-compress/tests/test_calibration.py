"""Calibration: each layer's inputs are those of a plain forward, and what cannot be is refused."""

from collections.abc import Callable

import pytest
import torch
import transformers
from models import FULL, SLIDING, decoder, gemma3, llama, qwen2_windowed, tokens
from torch import Tensor, nn

from ms_compress import (
    CalibrationError,
    CompressError,
    DataError,
    Tuning,
    gptq,
    perplexity,
    tune,
    wanda,
)
from ms_compress.methods.calibration import walk
from ms_compress.methods.pruning import masks
from ms_compress.models.logits import model_logits
from ms_compress.quantization.layers import prepared_layers


def by_turns() -> nn.Module:
    """Layers of two kinds."""
    return gemma3(*[SLIDING, FULL] * 2)


def windowed() -> nn.Module:
    """The first layer sees all keys, the others a window."""
    return qwen2_windowed(3, 1)


class Named(nn.Module):
    """A block that is called by names alone."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(32, 32)

    def forward(self, hidden_states: Tensor, power: int) -> tuple[Tensor]:
        """(B, S, H) to the same, in a tuple."""
        return (hidden_states + self.o_proj(hidden_states**power),)


class ByName(nn.Module):
    """A decoder whose layers take other arguments each; it may leave the last ones out."""

    def __init__(self, called: int = 3) -> None:
        super().__init__()
        self.config, self.called = object(), called
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(192, 32)
        self.model.layers = nn.ModuleList([Named() for _ in range(3)])

    def forward(self, text: Tensor) -> Tensor:
        """Hidden states (B, S, H)."""
        hidden = self.model.embed_tokens(text)
        for number, block in enumerate(self.model.layers[: self.called]):
            (hidden,) = block(hidden_states=hidden, power=number + 1)
        return hidden


def by_name() -> nn.Module:
    """Small enough for powers not to run away."""
    torch.manual_seed(0)
    return ByName()


@pytest.mark.parametrize("build", [by_turns, windowed, llama, decoder, by_name])
def test_each_layer_is_calibrated_with_what_a_plain_forward_gives_it(
    build: Callable[[], nn.Module],
) -> None:
    """Masks and rotary tables are the layer's own, not the first one's; two batches of two sizes.

    Bit for bit: the same operations meet the same values.
    """
    model, batches = build().eval(), [tokens(2, 40), tokens(1, 24, seed=1)]
    names = {name for name, _ in model.named_modules() if name.endswith("o_proj")}
    expected: dict[str, list[Tensor]] = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda layer, inputs, name=name: expected[name].append(inputs[0].flatten(0, -2))
        )
        for name in names
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    found: dict[str, Tensor] = {}
    walk(
        model,
        batches,
        lambda held, inputs: inputs if held is None else torch.cat((held, inputs)),
        lambda name, layer, inputs: found.update({name: inputs}),
        names,
    )
    assert len(found) == len(names) > 1
    for name, inputs in found.items():
        assert torch.equal(inputs, torch.cat(expected[name])), name


def test_a_layer_that_a_forward_leaves_out_is_named() -> None:
    """It has no inputs to be calibrated with."""
    with pytest.raises(CalibrationError, match=r"model\.layers\.2 is called 0 times per batch"):
        wanda(ByName(called=2), 0.5, [tokens()])


def two_of_four(model: nn.Module, batches: list[Tensor]) -> None:
    """By Wanda."""
    wanda(model, "2:4", batches)


def int4(model: nn.Module, batches: list[Tensor]) -> None:
    """By GPTQ."""
    gptq(model, "ct.int4_g32", batches)


def int4_by_loss(model: nn.Module, batches: list[Tensor]) -> None:
    """Predictions are computed before a layer is looked at."""
    gptq(model, "ct.int4_g32", batches, by_loss=True)


@pytest.mark.parametrize("method", [two_of_four, int4, int4_by_loss])
def test_a_weight_that_is_not_finite_is_named_before_anything_is_changed(
    method: Callable[[nn.Module, list[Tensor]], None],
) -> None:
    """The last product of all, whose outputs no layer has for inputs."""
    model = llama()
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[3, 5] = float("nan")
    with pytest.raises(
        CalibrationError, match=r"model\.layers\.1\.mlp\.down_proj: 1 of its 32768 weights"
    ):
        method(model, [tokens()])
    assert not list(prepared_layers(model))
    assert masks(model) == {}


@pytest.mark.parametrize("batches", [[], [torch.zeros(0, 8, dtype=torch.int64)]])
def test_without_tokens_a_model_stays_as_it_was(batches: list[Tensor]) -> None:
    """No layer is prepared."""
    model = decoder(1)
    with pytest.raises(CalibrationError, match="calibration needs tokens"):
        gptq(model, "ct.int4_g32", batches)
    assert not list(prepared_layers(model))


@pytest.mark.parametrize("number", [192, -1, 2**40])
def test_text_of_another_vocabulary_leaves_a_model_as_it_was(number: int) -> None:
    """Whatever reads it: calibration, pruning, training, its targets too, and evaluation."""
    model = decoder(1)
    text = tokens()
    text[-1, -1] = number
    options = Tuning(steps=1, batch_size=1, sequence_length=text.shape[1] - 1)
    uses: dict[str, Callable[[], object]] = {
        "gptq": lambda: gptq(model, "ct.int4_g32", [text]),
        "wanda": lambda: wanda(model, "2:4", [text]),
        "tune": lambda: tune(model, text, options),
        "perplexity": lambda: perplexity(model, text),
    }
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for use in uses.values():
        with pytest.raises(DataError, match=f"must be 0 to 191 .*{number}"):
            use()
    assert not list(prepared_layers(model))
    assert masks(model) == {}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_decoder_of_another_kind_stays_as_it_was() -> None:
    """OPT has its layers elsewhere."""
    config = transformers.OPTConfig(
        hidden_size=64, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=192
    )
    model = transformers.OPTForCausalLM(config)
    with pytest.raises(CompressError, match=r"has no model\.layers"):
        gptq(model, "ct.int4_g32", [tokens()])
    assert not list(prepared_layers(model))


@pytest.mark.parametrize("look", ["walk", "model_logits"])
def test_every_module_is_left_in_the_mode_it_was_in(look: str) -> None:
    """A part that is held in evaluation mode while the rest trains stays so; errors too."""
    model = decoder().train()
    held = model.get_submodule("model.layers.0")
    held.eval()
    before = {name: module.training for name, module in model.named_modules()}

    def see(name: str, layer: nn.Linear, statistic: Tensor) -> None:
        assert not any(module.training for module in model.modules())
        raise KeyError(name)

    if look == "walk":
        with pytest.raises(KeyError):
            walk(model, [tokens()], lambda held, x: x, see, {"model.layers.1.mlp.up_proj"})
    else:
        model_logits(model, tokens())
        with pytest.raises(IndexError):
            model_logits(model, tokens() + 1000)
    assert {name: module.training for name, module in model.named_modules()} == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator here")
@pytest.mark.parametrize("how", [{}, {"act_order": True, "fit_scales": True}, {"by_loss": True}])
def test_on_an_accelerator_a_pruned_model_is_rounded_where_it_lies(how: dict[str, bool]) -> None:
    """Tokens come from the CPU; weights are finite, on the accelerator, and zero where masked."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    model = llama().to(device)
    wanda(model, "2:4", [tokens()])
    gptq(model, "ct.int4_g32", [tokens()], **how)
    for _, layer in prepared_layers(model):
        assert layer.weight.device.type == device.type
        assert bool(layer.weight.isfinite().all())
        assert not bool(layer.weight[~layer.mask].any())

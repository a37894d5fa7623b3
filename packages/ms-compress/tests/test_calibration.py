"""Calibration gives each layer the inputs of a plain forward pass, and refuses bad input."""

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
from ms_compress.methods.calibration import CalibratedBlock, walk
from ms_compress.methods.pruning import masks
from ms_compress.models.logits import model_logits
from ms_compress.quantization.layers import prepared_layers


def alternating() -> nn.Module:
    """Layers alternate between sliding and full attention."""
    return gemma3(*[SLIDING, FULL] * 2)


def windowed() -> nn.Module:
    """The first layer has full attention, the others a window."""
    return qwen2_windowed(3, 1)


class KeywordBlock(nn.Module):
    """A block that takes only keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(32, 32)

    def forward(self, hidden_states: Tensor, power: int) -> tuple[Tensor]:
        """Map (B, S, H) to a tuple with (B, S, H)."""
        return (hidden_states + self.o_proj(hidden_states**power),)


class KeywordDecoder(nn.Module):
    """A decoder whose layers get different keyword arguments; it may skip the last layers."""

    def __init__(self, call_count: int = 3) -> None:
        super().__init__()
        self.config, self.call_count = object(), call_count
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(192, 32)
        self.model.layers = nn.ModuleList([KeywordBlock() for _ in range(3)])

    def forward(self, text: Tensor) -> Tensor:
        """Return hidden states (B, S, H)."""
        hidden = self.model.embed_tokens(text)
        for number, block in enumerate(self.model.layers[: self.call_count]):
            (hidden,) = block(hidden_states=hidden, power=number + 1)
        return hidden


def keyword_decoder() -> nn.Module:
    """Small weights, so that powers stay bounded."""
    torch.manual_seed(0)
    return KeywordDecoder()


@pytest.mark.parametrize("build", [alternating, windowed, llama, decoder, keyword_decoder])
def test_each_layer_is_calibrated_with_the_inputs_of_a_plain_forward(
    build: Callable[[], nn.Module],
) -> None:
    """Every layer has its own masks and rotary tables; two batches of two sizes.

    Bit for bit: the same operations on the same values.
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
    recorded: dict[str, Tensor] = {}
    walk(
        model,
        batches,
        lambda previous, inputs: inputs if previous is None else torch.cat((previous, inputs)),
        lambda block: recorded.update(block.statistics),
        names,
    )
    assert len(recorded) == len(names) > 1
    for name, inputs in recorded.items():
        assert torch.equal(inputs, torch.cat(expected[name])), name


def test_a_layer_that_the_forward_skips_is_named() -> None:
    """It has no inputs to calibrate with."""
    with pytest.raises(CalibrationError, match=r"model\.layers\.2 is called 0 times per batch"):
        wanda(KeywordDecoder(call_count=2), 0.5, [tokens()])


def prune_2_4(model: nn.Module, batches: list[Tensor]) -> None:
    """Prune with Wanda."""
    wanda(model, "2:4", batches)


def int4(model: nn.Module, batches: list[Tensor]) -> None:
    """Quantize with GPTQ."""
    gptq(model, "ct.int4_g32", batches)


def int4_by_loss(model: nn.Module, batches: list[Tensor]) -> None:
    """Quantize by loss, which computes predictions before it looks at a layer."""
    gptq(model, "ct.int4_g32", batches, by_loss=True)


@pytest.mark.parametrize("method", [prune_2_4, int4, int4_by_loss])
def test_a_nonfinite_weight_is_named_before_anything_is_changed(
    method: Callable[[nn.Module, list[Tensor]], None],
) -> None:
    """Also in the very last product, whose outputs are not another layer's inputs."""
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
def test_calibration_without_tokens_leaves_the_model_unchanged(batches: list[Tensor]) -> None:
    """No layer is prepared."""
    model = decoder(1)
    with pytest.raises(CalibrationError, match="calibration needs tokens"):
        gptq(model, "ct.int4_g32", batches)
    assert not list(prepared_layers(model))


@pytest.mark.parametrize("number", [192, -1, 2**40])
def test_out_of_range_tokens_leave_the_model_unchanged(number: int) -> None:
    """In calibration, pruning, training (targets included) and evaluation."""
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
    state_before = {name: value.clone() for name, value in model.state_dict().items()}
    for use in uses.values():
        with pytest.raises(DataError, match=f"must be 0 to 191 .*{number}"):
            use()
    assert not list(prepared_layers(model))
    assert masks(model) == {}
    assert all(torch.equal(state_before[name], value) for name, value in model.state_dict().items())


def test_an_unsupported_decoder_stays_unchanged() -> None:
    """OPT stores its layers elsewhere."""
    config = transformers.OPTConfig(
        hidden_size=64, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=192
    )
    model = transformers.OPTForCausalLM(config)
    with pytest.raises(CompressError, match=r"has no model\.layers"):
        gptq(model, "ct.int4_g32", [tokens()])
    assert not list(prepared_layers(model))


@pytest.mark.parametrize("look", ["walk", "model_logits"])
def test_train_and_eval_modes_are_restored(look: str) -> None:
    """A block in eval mode inside a training model stays so, also after an error."""
    model = decoder().train()
    frozen_block = model.get_submodule("model.layers.0")
    frozen_block.eval()
    modes = {name: module.training for name, module in model.named_modules()}

    def fail_on_block(block: CalibratedBlock[Tensor]) -> None:
        assert not any(module.training for module in model.modules())
        raise KeyError(block.name)

    if look == "walk":
        with pytest.raises(KeyError):
            walk(
                model,
                [tokens()],
                lambda previous, x: x,
                fail_on_block,
                {"model.layers.1.mlp.up_proj"},
            )
    else:
        model_logits(model, tokens())
        with pytest.raises(IndexError):
            model_logits(model, tokens() + 1000)
    assert {name: module.training for name, module in model.named_modules()} == modes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize(
    "options", [{}, {"act_order": True, "fit_scales": True}, {"by_loss": True}]
)
def test_a_pruned_model_is_quantized_on_its_accelerator(options: dict[str, bool]) -> None:
    """Tokens come from the CPU; weights stay on the accelerator, finite, and zero where masked."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    model = llama().to(device)
    wanda(model, "2:4", [tokens()])
    gptq(model, "ct.int4_g32", [tokens()], **options)
    for _, layer in prepared_layers(model):
        assert layer.weight.device.type == device.type
        assert bool(layer.weight.isfinite().all())
        assert not bool(layer.weight[~layer.mask].any())

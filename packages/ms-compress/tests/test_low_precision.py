"""FP8, MX, NVFP4 and asymmetric schemes: codes, scales and logits equal compressed-tensors' own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from attrs import evolve
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from models import decoder, llama, qwen3, tokens
from torch import Tensor, nn

from ms_compress import (
    ExportError,
    LayerError,
    SchemeError,
    calibrate_inputs,
    export,
    gptq,
    qat,
    verify,
)
from ms_compress.models.logits import model_logits
from ms_compress.quantization.layers import FACTOR, prepared_layers
from ms_compress.quantization.rounding import (
    calibrated_scale,
    quantize_weight,
    round_activations,
)
from ms_compress.quantization.scheme import Activations, Scheme
from ms_compress.targets.ct.write import _arguments as library_arguments
from ms_compress.targets.rules import scheme
from ms_compress.targets.target import open_runtime
from ms_parallel.models import architecture, build_model
from ms_parallel.weights import initialize

NAMES = (
    "ct.w4a16_asym_g32",
    "ct.w4a16_asym_g128",
    "ct.w4a8_g128",
    "ct.w4afp8_g128",
    "ct.fp8",
    "ct.fp8_dynamic",
    "ct.fp8_block",
    "ct.mxfp8",
    "ct.mxfp8a16",
    "ct.mxfp4",
    "ct.mxfp4a16",
    "ct.nvfp4",
    "ct.nvfp4a16",
)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "ms_parallel": decoder,
    "llama tied": lambda: llama(tied=True),
    "qwen3": qwen3,
}
ROWS, FEATURES = 160, 256


def weights(size: float) -> Tensor:
    """Random rows with zero groups, ties, large outliers and subnormal values."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, FEATURES, generator=generator)
    weight[3, :128] = 0
    weight[5, 0], weight[5, 7] = 90.0, -90.0
    weight[8] = weight[8].abs()  # one-sided groups, which have their zero point at the end
    weight[9] = -weight[9].abs()
    weight[10:20] = torch.randint(-8, 8, (10, FEATURES), generator=generator) * 0.25
    weight[20] *= 2.0**-130
    return weight * size


def library_parameters(weight: Tensor, rule: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scales, zero points and global scale from the library, with our global scale."""
    arguments = QuantizationArgs(**library_arguments(rule))
    if rule.strategy == "tensor":
        low, high = weight.min().view(1, 1), weight.max().view(1, 1)
    elif rule.block_structure is not None:
        height, width = rule.block_structure
        padded = nn.functional.pad(weight, (0, -FEATURES % width, 0, -ROWS % height))
        cells = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2)
        low, high = cells.amin((2, 3)), cells.amax((2, 3))
    else:
        cells = weight.view(ROWS, -1, rule.group_of(FEATURES))
        low, high = cells.amin(-1), cells.amax(-1)
    global_scale = quantize_weight(weight, rule).global_scale
    return *calculate_qparams(low, high, arguments, global_scale=global_scale), global_scale


@pytest.mark.parametrize("size", [1.0, 0.02, 3000.0])
@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_of_weights_equal_the_library(name: str, size: float) -> None:
    """`calculate_qparams` and `quantize`, bit for bit.

    A symmetric integer code may differ where the library's quotient of a group's lowest weight
    happens to round to the wrong side of -7.5: there ours is -8.
    """
    weight, rule = weights(size), scheme(name)
    scales, zeros, global_scale = library_parameters(weight, rule)
    codes = quantize(
        x=weight,
        scale=scales,
        zero_point=zeros.to(torch.float32),
        args=QuantizationArgs(**library_arguments(rule)),
        global_scale=global_scale,
    )
    ours = quantize_weight(weight, rule)
    assert torch.equal(ours.scales.float(), scales)
    if ours.zeros is not None:
        # The library divides zero by zero for groups of zeros, which have no zero point.
        has_values = scales > torch.finfo(torch.float32).eps
        assert torch.equal(ours.zeros[has_values], zeros[has_values])
    differs = (ours.codes.float() != codes) & (weight != 0)
    if name in ("ct.w4a8_g128", "ct.w4afp8_g128"):
        assert bool((ours.codes[differs] == -8).all())
        assert float(differs.float().mean()) < 0.02
    else:
        assert not bool(differs.any())


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4])
@pytest.mark.parametrize(
    "rule",
    [
        Activations(num_bits=8, type="float"),
        Activations(num_bits=8, type="float", group_size=128),
        Activations(num_bits=8, type="float", group_size=32, scale_dtype="float8_e8m0fnu"),
        Activations(num_bits=4, type="float", group_size=32, scale_dtype="float8_e8m0fnu"),
        *(rule for name in ("ct.fp8", "ct.nvfp4") if (rule := scheme(name).activations)),
    ],
    ids=["fp8 token", "fp8 group", "mxfp8", "mxfp4", "fp8", "nvfp4"],
)
def test_inputs_are_rounded_as_in_the_library(rule: Activations, size: float) -> None:
    """`compute_dynamic_scales_and_zp` and `fake_quantize`, bit for bit; a zero token too.

    The calibration saw half of the largest input, so that static scales saturate.
    """
    x = weights(size).view(4, 40, FEATURES)
    peak = x.abs().max() / 2
    stored = calibrated_scale(peak, rule) if rule.is_calibrated else None
    global_scale = stored if rule.dynamic == "local" else None
    arguments = QuantizationArgs(**library_arguments(rule))
    if rule.dynamic is False:
        assert stored is not None
        scales, zeros = stored, torch.zeros(1)
    else:
        scales, zeros = compute_dynamic_scales_and_zp(
            x, arguments, nn.Linear(1, 1), global_scale=global_scale
        )
    expected = fake_quantize(
        x=x, scale=scales, zero_point=zeros, args=arguments, global_scale=global_scale
    )
    assert torch.equal(round_activations(x, rule, None, peak), expected)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((name, "ms_parallel") for name in NAMES),
        *((name, "llama tied") for name in ("ct.fp8", "ct.mxfp4", "ct.w4a16_asym_g128")),
        *((name, "qwen3") for name in ("ct.fp8_dynamic", "ct.nvfp4")),
    ],
)
def test_transformers_computes_the_same_logits(name: str, model: str, tmp_path: Path) -> None:
    """With learned scales after training, in float32: the difference is 0.0."""
    torch.manual_seed(1)
    prepared = qat(MODELS[model](), name, learned_scales=True)
    for parameter_name, parameter in prepared.named_parameters():
        if parameter_name.endswith(FACTOR):
            parameter.data.normal_(0, 0.05)
    calibrate_inputs(prepared, [tokens(seed=3)])
    folder = export(prepared, tmp_path / "out", target=name, verify=True)
    expected = model_logits(prepared, tokens())
    assert torch.equal(open_runtime(folder, "ct").logits(tokens()), expected)


def test_training_raises_calibrated_input_scales_and_evaluation_does_not() -> None:
    """Inputs beyond the scale saturate in evaluation; those of training are observed."""
    layer = qat(nn.Sequential(nn.Linear(128, 8)), "ct.fp8")
    prepared = layer[0]
    x = torch.randn(2, 3, 128)
    layer.train()
    layer(x)
    assert float(prepared.input_peak) == float(x.abs().max())
    layer.eval()
    larger = layer(4 * x)
    assert float(prepared.input_peak) == float(x.abs().max())
    layer.train()
    assert not torch.equal(layer(4 * x), larger)
    assert float(prepared.input_peak) == float(4 * x.abs().max())


def test_export_without_calibrated_inputs_is_rejected_in_one_line(tmp_path: Path) -> None:
    """The message names the layer and the function that is missing; no folder is left."""
    with pytest.raises(LayerError, match=r"ct\.fp8 needs a calibrated.*calibrate_inputs") as error:
        export(qat(decoder(1), "ct.fp8"), tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["ct.fp8_dynamic", "ct.mxfp8", "ct.nvfp4a16"])
def test_transformers_opens_the_folder_without_settings(name: str, tmp_path: Path) -> None:
    """In the dtype of config.json, with logits within the rounding of bfloat16 of ours."""
    prepared = qat(llama(), name)
    folder = export(prepared, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        logits = model(tokens()).logits.float()
    expected = model_logits(prepared, tokens())
    exact = name == "ct.fp8_dynamic"
    assert model.dtype == (torch.float32 if exact else torch.bfloat16)
    # Inputs on the border of two codes may round either way after bfloat16 sums.
    limit = {"ct.fp8_dynamic": 0.0, "ct.mxfp8": 0.1, "ct.nvfp4a16": 0.02}[name]
    assert float((logits - expected).abs().mean()) <= limit * float(expected.std())


@pytest.mark.parametrize("name", NAMES)
def test_gptq_rounds_to_the_grid_that_is_exported(name: str) -> None:
    """Quantizing the rounded weight again changes it by a scale's last bit at most."""
    model = decoder(1)
    gptq(model, name, [tokens(4)], act_order=True)
    checked = 0
    for _, layer in prepared_layers(model):
        assert layer.scheme is not None
        stored = quantize_weight(layer.weight, layer.scheme, layer.factor).weight()
        torch.testing.assert_close(stored, layer.weight.detach(), rtol=1e-6, atol=1e-9)
        checked += 1
    assert checked == 7


@pytest.mark.parametrize("name", ["ct.mxfp4a16", "ct.nvfp4a16"])
def test_four_bit_weights_are_exact_in_bfloat16(name: str) -> None:
    """Scales are powers of two, or have 4 significant bits times one: no runtime rounds again."""
    weight = quantize_weight(weights(0.05), scheme(name)).weight()
    assert torch.equal(weight.bfloat16().float(), weight)


def test_a_layer_that_does_not_fit_is_rejected_in_one_line() -> None:
    """The message has the layer, the group and the row size, and the model is unchanged."""
    model = nn.Sequential(nn.Linear(48, 8))
    for name, group in (("ct.mxfp4", 32), ("ct.fp8_block", 128), ("ct.w4a16_asym_g128", 128)):
        with pytest.raises(LayerError, match=f"groups of {group} weights.*rows of 48") as error:
            qat(model, name)
        assert "\n" not in str(error.value)
        assert type(model[0]) is nn.Linear
    with pytest.raises(SchemeError, match=r"unknown scheme 'ct\.fp8_dinamic'.*ct\.fp8_dynamic"):
        scheme("ct.fp8_dinamic")


@pytest.mark.parametrize("name", ["ct.fp8", "ct.fp8_block", "ct.nvfp4a16"])
def test_scales_over_rows_cannot_be_stored_for_fused_matrices(name: str, tmp_path: Path) -> None:
    """Phi-3's folder has q, k and v in one tensor, whose scales would have to be common."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 64}
    model = build_model(architecture("phi3", {**sizes, **heads}))
    initialize(model, 0)
    prepared = qat(model, name)
    with pytest.raises(ExportError, match=r"common scales.*ct\.fp8_dynamic") as error:
        export(prepared, tmp_path / "out")
    assert "\n" not in str(error.value)


def test_a_scheme_whose_fields_contradict_each_other_is_rejected() -> None:
    """Strategy, group size and block structure must agree, and a float has 4 or 8 bits."""
    fp8 = scheme("ct.fp8_dynamic")
    for changes, message in (
        ({"strategy": "group"}, "strategy must be 'group'"),
        ({"block_structure": (128, 128)}, "strategy must be 'block'"),
        ({"num_bits": 3}, "must be 4 or 8, got 3"),
    ):
        with pytest.raises(SchemeError, match=message):
            evolve(fp8, **changes)


def test_verify_rejects_a_changed_scale(tmp_path: Path) -> None:
    """One bit in one E8M0 scale of a folder is a different model."""
    from safetensors.torch import load_file, save_file

    from ms_compress import VerifyError

    prepared = qat(decoder(1), "ct.mxfp8")
    folder = export(prepared, tmp_path / "out")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    stored[name][0, 0] ^= 1
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerifyError, match="up_proj"):
        verify(prepared, folder, "ct")

"""Folders with FP8 blocks and MXFP4 weights are dequantized as in transformers.

The folders are written here from random numbers; the reference is transformers' dequantization.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ms_parallel.errors import ModelError
from ms_parallel.models.registry import from_document
from ms_parallel.weights import load_model, save_model
from ms_parallel.weights.quantized import open_weights

transformers.utils.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def in_blocks(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to FP8 with a factor per block; blocks at the edge may be smaller."""
    height, width = weight.shape
    padded = torch.zeros(-(-height // rows) * rows, -(-width // columns) * columns)
    padded[:height, :width] = weight
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
    factors = blocks.abs().amax((2, 3)).clamp(min=1e-9) / 448
    quantized = (blocks / factors[..., None, None]).to(torch.float8_e4m3fn)
    return quantized.transpose(1, 2).flatten(2).flatten(0, 1)[:height, :width].contiguous(), factors


def fp8_folder(folder: Path, block: tuple[int, int]) -> dict[str, Tensor]:
    """Write a Qwen 3 folder with FP8 projections; return all stored tensors."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**SIZES)
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, values in tensors.items():
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale_inv"] = in_blocks(values, *block)
        else:
            stored[name] = values
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = {**FP8, "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(document))
    return stored


@pytest.mark.parametrize("block", [(16, 16), (8, 16), (4, 4)])
def test_an_fp8_folder_is_dequantized_as_in_transformers(
    tmp_path: Path, block: tuple[int, int]
) -> None:
    """Weights equal FP8 value times factor, bit for bit; a saved copy is a plain folder."""
    stored = fp8_folder(tmp_path, block)
    model = load_model(tmp_path)
    dequantize: Any = Fp8Dequantize(None)
    loaded = dict(model.named_parameters())
    for name, values in stored.items():
        if f"{name}_scale_inv" in stored:
            values = dequantize._dequantize_one(values, stored[f"{name}_scale_inv"], torch.float32)
        if not name.endswith("_scale_inv"):
            assert torch.equal(loaded[name], values), name
    save_model(model, tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    reloaded = load_model(tmp_path / "plain")
    assert all(torch.equal(loaded[name], values) for name, values in reloaded.named_parameters())


def test_blocks_at_the_edge_are_smaller(tmp_path: Path) -> None:
    """48 rows in blocks of 20 are two full blocks and one of 8; any part can be read."""
    stored = fp8_folder(tmp_path, (20, 12))
    weights, name = open_weights(tmp_path), "model.layers.0.mlp.gate_proj.weight"
    assert weights.shape(name) == (48, 32)
    rows, columns = torch.arange(48) // 20, torch.arange(32) // 12
    truth = stored[name].float() * stored[f"{name}_scale_inv"][rows[:, None], columns]
    for box in ((slice(0, 48), slice(0, 32)), (slice(19, 41), slice(11, 25)), (slice(47, 48),) * 2):
        box = (box[0], slice(box[1].start % 32, min(box[1].stop, 32)))
        assert torch.equal(weights.read(name, box), truth[box])


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_mxfp4_is_unpacked_as_in_transformers(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A full tensor and any part of it, transposed, with steps of one and two."""
    folder = tmp_path_factory.mktemp("mxfp4")
    experts, rows, groups = (data.draw(st.integers(1, limit)) for limit in (3, 6, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    blocks = torch.randint(256, (experts, rows, groups, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(97, 158, (experts, rows, groups), generator=generator).to(torch.uint8)
    save_file({"x_blocks": blocks, "x_scales": scales}, folder / "model.safetensors")
    document = {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(document))
    weights = open_weights(folder)
    truth = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert weights.names == {"x"}
    assert weights.shape("x") == tuple(truth.shape) == (experts, 32 * groups, rows)
    box = []
    for size in truth.shape:
        start = data.draw(st.integers(0, size - 1))
        box.append(slice(start, data.draw(st.integers(start + 1, size)), None))
    box[2] = slice(box[2].start, box[2].stop, data.draw(st.sampled_from([None, 2])))
    for part in (tuple(slice(0, size) for size in truth.shape), tuple(box)):
        assert torch.equal(weights.read("x", part), truth[part])
    # bfloat16, which transformers uses, represents all of these numbers exactly.
    half = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(half.float(), truth)


def faulty(stored: dict[str, Tensor], fault: str) -> dict[str, Tensor]:
    """Tensors of an FP8 folder with one fault."""
    name = "model.layers.0.self_attn.q_proj.weight"
    scales = f"{name}_scale_inv"
    match fault:
        case "no scales":
            return {key: values for key, values in stored.items() if key != scales}
        case "few scales":
            return stored | {scales: stored[scales][:1]}
        case "other floats":
            return stored | {name: stored[name].float().to(torch.float8_e5m2)}
        case "scales of bytes":
            return stored | {scales: stored[scales].to(torch.uint8)}
        case "lonely scales":
            return stored | {"model.norm.weight_scale": stored[scales].clone()}
        case _:
            return stored | {scales: stored[scales] * torch.nan}


FAULTS = {
    "no scales": r"q_proj.weight' in FP8 without its .*weight_scale_inv'",
    "few scales": r"q_proj.weight' as F8_E4M3 of shape .* with factors of shape \(1, 2\)",
    "other floats": r"q_proj.weight' as F8_E5M2",
    "scales of bytes": r"weight_scale_inv' as U8, which is not supported",
    "lonely scales": r"has 'model.norm.weight_scale', which the model .* does not have",
    "not finite": r"q_proj.weight' with a NaN or an infinity",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_fp8_folder_is_refused_in_one_line(tmp_path: Path, fault: str) -> None:
    """The message names the tensor and the problem."""
    stored = fp8_folder(tmp_path, (16, 16))
    save_file(faulty(stored, fault), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=FAULTS[fault]) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


UNKNOWN: list[tuple[Any, str]] = [
    ({"quant_method": "gptq", "bits": 4}, "quant_method must be fp8 or mxfp4"),
    ({"quant_method": ["fp8"]}, "quant_method must be fp8 or mxfp4"),
    ("fp8", "quant_method must be fp8 or mxfp4"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "must be .rows, columns."),
    ({"quant_method": "fp8", "weight_block_size": None}, "must be .rows, columns."),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "must be .rows, columns."),
    ({**FP8, "activation_scheme": "static"}, "only 'dynamic' is supported"),
    ({**FP8, "fmt": "e5m2"}, "only 'e4m3' is supported"),
    ({**FP8, "rotated": True}, "has 'rotated', which is not supported for fp8"),
    ({"quant_method": "mxfp4", "fmt": "e4m3"}, "has 'fmt', which is not supported for mxfp4"),
]


@pytest.mark.parametrize(("value", "message"), UNKNOWN)
def test_an_unknown_quantization_is_refused_by_name(value: Any, message: str) -> None:
    """Before any weight is read and misinterpreted."""
    document = {**transformers.Qwen3Config(**SIZES).to_dict(), "quantization_config": value}
    with pytest.raises(ModelError, match=message) as caught:
        from_document(document)
    assert "\n" not in str(caught.value)

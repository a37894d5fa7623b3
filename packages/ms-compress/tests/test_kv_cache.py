"""Scales of an FP8 key-value cache: calibrated, exported and refused."""

import json
from pathlib import Path

import pytest
import torch
from folders import write_run
from models import decoder, llama, tokens
from safetensors.torch import load_file
from torch import Tensor, nn

from ms_compress import (
    CalibrationError,
    ConfigError,
    LayerError,
    calibrate_kv_cache,
    export,
    qat,
)
from ms_compress.cli import main
from ms_compress.options import QuantizeRun
from ms_compress.targets.footprint import footprint
from ms_parallel import load_model


def rotated_keys_and_values(model: nn.Module, text: Tensor) -> list[tuple[float, float]]:
    """Return the largest cached key and value of each layer, from transformers' own cache."""
    with torch.no_grad():
        cache = model(text, use_cache=True).past_key_values
    return [
        (float(layer.keys.abs().max()), float(layer.values.abs().max())) for layer in cache.layers
    ]


def test_scales_are_the_largest_cached_keys_and_values() -> None:
    """Over 448; transformers and ms-parallel compute the same model."""
    text = tokens(4, 32)
    model = llama()
    expected = rotated_keys_and_values(model, text)
    calibrate_kv_cache(model, torch.split(text, 2))
    assert len(expected) == len(model.model.layers)
    for layer, peaks in zip(model.model.layers, expected, strict=True):
        scales = layer.self_attn.k_scale, layer.self_attn.v_scale
        assert [float(scale) for scale in scales] == pytest.approx(
            [peak / 448 for peak in peaks], rel=1e-6
        )
        assert all(scale.shape == (1,) for scale in scales)


def test_the_folder_has_scales_and_their_scheme(tmp_path: Path) -> None:
    """As compressed-tensors reads them; its configuration class checks the scheme."""
    config_class = pytest.importorskip("compressed_tensors.quantization").QuantizationConfig
    file = str(write_run(tmp_path))
    settings = ["scheme=ct.int4_g32", "kv_cache=fp8", "verify=true"]
    assert main(["quantize", file, *settings]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    names = {name for name in tensors if name.endswith(("k_scale", "v_scale"))}
    assert names == {
        f"model.layers.{layer}.self_attn.{name}_scale" for layer in (0, 1) for name in "kv"
    }
    assert all(tensors[name].shape == (1,) and tensors[name] > 0 for name in names)
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    cache = config_class.model_validate(document["quantization_config"]).kv_cache_scheme
    assert (cache.num_bits, cache.type, cache.strategy) == (8, "float", "tensor")
    assert (cache.dynamic, cache.symmetric) == (False, True)
    parameters = load_model(tmp_path / "model").parameters()
    assert footprint(tmp_path / "out").weights == sum(value.numel() for value in parameters)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["scheme=gguf.q8_0"], "kv_cache='fp8' needs a ct.* scheme, which vLLM reads, got gguf"),
        (["scheme=ct.w8a8", "kv_cache=int8"], "kv_cache is 'int8'; "),
    ],
)
def test_impossible_caches_are_refused_in_one_line(
    settings: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, before anything is computed."""
    file = str(write_run(tmp_path))
    assert main(["quantize", file, "kv_cache=fp8", *settings]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


def test_models_and_targets_without_such_a_cache_are_refused(tmp_path: Path) -> None:
    """The message names the layer or the runtime; the model is unchanged."""
    model = decoder(1)
    del model.get_submodule("model.layers.0.self_attn").k_proj
    with pytest.raises(LayerError, match=r"model\.layers\.0: kv_cache needs an attention with"):
        calibrate_kv_cache(model, [tokens()])
    with pytest.raises(CalibrationError, match="calibration needs tokens"):
        calibrate_kv_cache(decoder(1), [])
    with pytest.raises(ConfigError, match="kv_cache='fp8' needs calibration tokens"):
        QuantizeRun(model=tmp_path, output_dir="out", scheme="ct.w8a8", kv_cache="fp8")
    prepared = qat(decoder(1), "ort.matmulnbits")
    calibrate_kv_cache(prepared, [tokens()])
    with pytest.raises(LayerError, match="onnxruntime does not read key-value cache scales"):
        export(prepared, tmp_path / "out")
    assert not (tmp_path / "out").exists()

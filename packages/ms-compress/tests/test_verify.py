"""`verify` refuses files that a faulty writer would produce, and names the difference."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import attrs
import numpy as np
import pytest
import torch
import transformers
from models import VOCABULARY, decoder, deepseek, llama, qwen3
from mutants import GGUF, mutate_gguf, mutate_onnx, mutate_safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ms_compress import ExportError, LayerError, VerifyError, export, qat, verify
from ms_compress.deployment.export import check_export
from ms_compress.deployment.verification import check_weights, compare, model_logits, probe
from ms_compress.quantization.layers import PreparedLinear
from ms_compress.targets.ct import cpu
from ms_compress.targets.target import find_target, open_runtime

UNPROBED = (2, 5)
"""Tokens that do not occur in the probe."""


def nibbles(name: str, tensor: Tensor) -> Tensor:
    """Swap the halves of each byte of packed codes."""
    if not name.endswith("weight_packed"):
        return tensor
    raw = tensor.view(torch.uint8)
    return ((raw >> 4) | (raw << 4)).view(torch.int32)


def shifted(name: str, tensor: Tensor) -> Tensor:
    """Give every group its neighbor's scale."""
    return tensor.roll(1, dims=1).contiguous() if name.endswith("weight_scale") else tensor


def dropped(name: str, tensor: Tensor) -> Tensor:
    """Set all scales to 1."""
    return torch.ones_like(tensor) if name.endswith("weight_scale") else tensor


def turned(name: str, tensor: Tensor) -> Tensor:
    """Rows of q in llama.cpp's order, which transformers does not expect."""
    if ".q_proj." not in name or tensor.shape[0] == 2:
        return tensor
    return tensor.reshape(4, 2, 16, -1).transpose(1, 2).reshape(tensor.shape).contiguous()


def swapped(name: str, tensor: Tensor) -> Tensor:
    """Swap two rows of a late layer with their scales, which hardly changes the logits."""
    return _swap_rows(tensor) if name.startswith("model.layers.1.mlp.up_proj.weight_") else tensor


def unprobed(name: str, tensor: Tensor) -> Tensor:
    """Swap the embeddings of two tokens that are not in the probe."""
    return _swap_rows(tensor, *UNPROBED) if "embed_tokens" in name else tensor


@pytest.mark.parametrize("change", [nibbles, shifted, dropped, turned, swapped, unprobed])
def test_a_wrong_compressed_tensors_folder_is_refused(
    change: Callable[[str, Tensor], Tensor], tmp_path: Path
) -> None:
    """Transformers reads each of these without complaint."""
    model = qat(decoder(tied=False), "ct.int4_g32")
    folder = export(model, tmp_path / "out")
    verify(model, folder, "ct")
    mutate_safetensors(str(folder / "model.safetensors"), change)
    with pytest.raises(VerifyError, match="differs from the model"):
        verify(model, folder, "ct")


@pytest.mark.parametrize(
    "change", ["nibbles", "shifted", "dropped", "turned", "swapped", "unasked"]
)
def test_a_wrong_onnx_file_is_refused(change: str, tmp_path: Path) -> None:
    """Onnxruntime reads each of these without complaint."""
    model = qat(decoder(tied=False), "ort.matmulnbits")
    folder = export(model, tmp_path / "out")
    verify(model, folder, "ort")

    def apply(name: str, array: np.ndarray) -> np.ndarray:
        if change == "nibbles" and name.endswith(".codes"):
            return (array >> 4) | (array << 4)
        if change == "shifted" and name.endswith(".scales"):
            return np.roll(array, 1, axis=1)
        if change == "dropped" and name.endswith(".scales"):
            return np.ones_like(array)
        if change == "turned" and "q_proj" in name:
            return array.reshape(4, 2, 16, -1).swapaxes(1, 2).reshape(array.shape)
        if change == "swapped" and "layers.1.mlp.up_proj." in name:
            array[[0, 1]] = array[[1, 0]]
        if change == "unasked" and name == "model.embed_tokens.rows":
            array[list(UNPROBED)] = array[list(reversed(UNPROBED))]
        return array

    mutate_onnx(str(folder / "model.onnx"), apply)
    with pytest.raises(VerifyError, match="differs from the model"):
        verify(model, folder, "ort")


@pytest.mark.parametrize("name", ["gguf.q4_0", "gguf.q8_0"])
@pytest.mark.parametrize("model", [decoder, lambda: llama(tied=True), qwen3])
def test_a_gguf_file_has_identical_weights(
    name: str, model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """As read by gguf's own library, in any row order."""
    prepared = qat(model(), name, embeddings=True, head=True)
    check_weights(prepared, export(prepared, tmp_path / "out"), "gguf")


@pytest.mark.parametrize("mutant", GGUF)
def test_a_gguf_file_with_other_weights_is_refused(mutant: str, tmp_path: Path) -> None:
    """The error names the tensor; llama.cpp is not needed."""
    prepared = qat(decoder(), "gguf.q4_0")
    folder = export(prepared, tmp_path / "out")
    mutate_gguf(str(folder / "model.gguf"), GGUF[mutant])
    with pytest.raises(VerifyError, match=r"layers\.\d\.[a-z_.]+\.weight differs from the model"):
        check_weights(prepared, folder, "gguf")


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    """It is named, even if the runtime could do without it."""
    prepared = qat(decoder(), "gguf.q4_0")
    folder = export(qat(decoder(1), "gguf.q4_0"), tmp_path / "out")
    with pytest.raises(VerifyError, match=r"model\.layers\.1\.\S+ is not in it"):
        check_weights(prepared, folder, "gguf")


def test_tensors_that_the_runtime_ignores_do_not_fail_verification(tmp_path: Path) -> None:
    """Such as a custom buffer: only tensors used in the computation are compared."""
    model = qat(decoder(), "ct.int4_g32")
    folder = export(model, tmp_path / "out")
    path = folder / "model.safetensors"
    save_file({**load_file(path), "seen": torch.ones(1)}, path, metadata={"format": "pt"})
    verify(model, folder, "ct")
    with pytest.raises(ExportError, match="seen is unexpected"):
        open_runtime(folder, "ct")


def turned(model: Any) -> nn.Module:
    """The model with frequencies that differ in their last bits, as another library's may."""
    model.ropes = tuple(attrs.evolve(rope, theta=rope.theta * (1 + 1e-6)) for rope in model.ropes)
    return cast(nn.Module, model)


@pytest.mark.parametrize("name", ["ct.int4_g32", "ct.w8a8"])
def test_rounded_inputs_may_differ_by_one_code(name: str, tmp_path: Path) -> None:
    """One bit of a frequency moves a few codes under w8a8, and logits by about 0.1%."""
    model = qat(decoder(4), name)
    folder = export(model, tmp_path / "out")
    comparison = verify(turned(model), folder, "ct")
    rounded = name == "ct.w8a8"
    assert (comparison.mean > 1e-4 * comparison.spread) == rounded


@pytest.mark.parametrize("guarded", [True, False])
def test_layers_whose_inputs_transformers_rounds_differently_are_refused(
    guarded: bool, tmp_path: Path
) -> None:
    """Shared experts get (B * S, K), for which compressed-tensors uses a single scale."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
    inner = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    torch.manual_seed(5)
    config = transformers.Qwen2MoeConfig(**sizes, **heads, **inner, num_experts_per_tok=2)
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    qat(model, "ct.w8a8", ignore=["*.mlp.gate", "*.mlp.experts"])
    if guarded:
        with pytest.raises(LayerError, match=r"shared_expert\S+: ct\.w8a8 .*as an exception"):
            export(model, tmp_path / "out")
        return
    for layer in model.modules():
        if isinstance(layer, PreparedLinear):
            layer.input_ndim = None  # verification alone must notice
    with pytest.raises(VerifyError, match=r"shared_expert\S+ differently from training"):
        export(model, tmp_path / "out", verify=True)


def test_a_layer_with_an_unusual_input_shape_is_refused() -> None:
    """`kv_b_proj` of DeepSeek V3 gets (B, 1, S, K)."""
    model = qat(deepseek(), "ct.w8a8", ignore=["*.mlp.gate", "*.mlp.experts*"])
    with pytest.raises(LayerError, match=r"kv_b_proj: its input .*as an exception"):
        check_export(model, "ct.w8a8")


def test_llama_4_experts_are_exported_as_separate_layers(tmp_path: Path) -> None:
    """Transformers replaces fused experts by a list of layers if a quantization_config exists."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {"intermediate_size_mlp": 96, "num_local_experts": 3, "interleave_moe_layer_step": 2}
    torch.manual_seed(5)
    config = transformers.Llama4TextConfig(**sizes, **heads, **experts, pad_token_id=None)
    model = transformers.Llama4ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    qat(model, "ct.int4_g32", ignore=["*.experts", "*.router"])
    folder = export(model, tmp_path / "out", verify=True)
    tokens = torch.arange(20)[None]
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(reloaded(tokens).logits, model(tokens).logits)


def test_a_cpu_on_which_vllm_is_wrong_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning only if inputs are rounded to 8 bits and the CPU has no VNNI."""
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu, "CPUINFO", info)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for number, (flags, scheme) in enumerate(
        [("fpu avx2", "ct.w8a8"), ("fpu avx2", "ct.int4_g32"), ("fpu avx_vnni", "ct.w8a8")]
    ):
        info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        cpu.warn_without_vnni.cache_clear()
        caplog.clear()
        model = qat(decoder(), scheme)
        folder = export(model, tmp_path / f"{number}")
        verify(model, folder, "ct")
        assert caplog.text.count("AVX512-VNNI") == (number == 0)


def round_to_255_codes(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Round inputs as MatMulNBits does at accuracy_level=4: 255 codes per block of 32."""
    blocks = inputs[0].unflatten(-1, (-1, 32))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return ((blocks / scale).round() * scale).flatten(-2)


def test_verify_allows_the_input_rounding_of_an_accuracy_level(tmp_path: Path) -> None:
    """At accuracy_level=4 onnxruntime rounds inputs to 8 bits, which training did not.

    The same rounding in torch changes the logits as much, which sets the limit here. The remaining
    difference comes from inputs within a float32 rounding error of a border between codes: each
    moves by a full step, and so do a few in later layers. That is at most 20% of the effect of the
    rounding itself; different arithmetic, such as codes for full rows, would change all of it.
    """
    model = qat(decoder(), "ort.matmulnbits")
    folder, tokens = export(model, tmp_path / "out", accuracy_level=4), probe(VOCABULARY)
    comparison = verify(model, folder, "ort", tokens=tokens)
    exact = model_logits(model, tokens)
    layers = [module for module in model.modules() if isinstance(module, PreparedLinear)]
    hooks = [layer.register_forward_pre_hook(round_to_255_codes) for layer in layers]
    rounded = model_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    rounding = compare(exact, rounded).mean
    assert comparison.rounds_inputs
    assert comparison.mean == pytest.approx(rounding, rel=0.1)
    runtime_logits = find_target("ort").opens(folder, threads=1, strict=False).logits(tokens)
    assert compare(rounded, runtime_logits).mean <= 0.2 * rounding


def test_an_export_that_fails_verification_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer packs wrongly, so the folder never appears."""
    from ms_compress.targets.ct import write as compressed_tensors

    original = compressed_tensors.pack
    monkeypatch.setattr(compressed_tensors, "pack", lambda codes, bits: original(-codes - 1, bits))
    with pytest.raises(VerifyError):
        export(qat(decoder(), "ct.int4_g32"), tmp_path / "out", verify=True)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_is_spread_over_the_vocabulary() -> None:
    """The probe's tokens are valid and distinct."""
    probe_tokens = probe(5000)
    assert int(probe_tokens.max()) < 5000
    assert probe_tokens.unique().numel() > 90
    assert not set(UNPROBED) & set(probe(VOCABULARY).flatten().tolist())


def _swap_rows(tensor: Tensor, first: int = 0, second: int = 1) -> Tensor:
    """Swap two rows."""
    tensor[[first, second]] = tensor[[second, first]]
    return tensor

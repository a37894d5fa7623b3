"""Exported folders computed by their own runtimes match the computation in training."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from attrs import evolve
from models import decoder, deepseek, llama, qwen2, qwen3, tokens
from safetensors.torch import load_file
from torch import nn

import ms_compress
from ms_compress import ExportError, LayerError, SchemeError, export, prune, qat, verify
from ms_compress.deployment.verification import compare
from ms_compress.models.decoder_config import decoder_config
from ms_compress.models.logits import model_logits
from ms_compress.quantization.layers import FACTOR
from ms_compress.quantization.rounding import quantize_weight
from ms_compress.targets.ct.write import pack
from ms_compress.targets.rules import scheme
from ms_compress.targets.target import open_runtime
from ms_parallel import AdamWConfig, Engine, NextTokenLoss, load_model, save_model
from ms_parallel.models import TransformerXL, TransformerXLConfig, architecture, build_model
from ms_parallel.weights import initialize

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ms_parallel": decoder,
    "llama": llama,
    "llama tied": lambda: llama(tied=True),
    "qwen3": qwen3,
}


def with_random_factors(model: nn.Module) -> nn.Module:
    """Replace learned scale factors with random values, as after training."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(FACTOR):
            parameter.data.normal_(0, 0.05)
    return model


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["ct.int4_g32", "ct.int3_g64", "ct.w8a8"])
def test_transformers_computes_identical_logits(name: str, model: str, tmp_path: Path) -> None:
    """Compressed-tensors folders, unpacked by its own library: the difference is 0.0."""
    prepared = with_random_factors(qat(MODELS[model](), name, learned_scales=True))
    folder = export(prepared, tmp_path / "out", target=name, verify=True)
    expected = model_logits(prepared, tokens())
    assert torch.equal(open_runtime(folder, "ct").logits(tokens()), expected)


@pytest.mark.parametrize("model", MODELS)
def test_onnxruntime_computes_the_logits(model: str, tmp_path: Path) -> None:
    """MatMulNBits at accuracy level 1 sums in another order: at most 1e-5 off for logits near 1."""
    quantize_embeddings = model in ("ms_parallel", "llama tied", "qwen3")
    prepared = qat(MODELS[model](), "ort.matmulnbits", head=True, embeddings=quantize_embeddings)
    folder = export(with_random_factors(prepared), tmp_path / "out", verify=True)
    comparison = compare(
        model_logits(prepared, tokens()), open_runtime(folder, "ort").logits(tokens())
    )
    assert comparison.largest <= 1e-5
    assert comparison.argmax == 1.0


@pytest.mark.parametrize(
    "layer_types", [("full_attention", "sliding_attention"), ("sliding_attention",)]
)
def test_onnxruntime_applies_sliding_windows(layer_types: tuple[str, ...], tmp_path: Path) -> None:
    """A window of 8 keys over 48 tokens, in half of the layers and in all: at most 1e-5 off."""
    prepared = qat(qwen2(*layer_types), "ort.matmulnbits")
    folder = export(prepared, tmp_path / "out")
    comparison = compare(
        model_logits(prepared, tokens()), open_runtime(folder, "ort").logits(tokens())
    )
    assert comparison.largest <= 1e-5


def test_each_family_has_its_windows() -> None:
    """Llama has none, Mistral in all layers, Qwen in the layers that its config.json names."""
    sizes = llama(4).config.to_dict()  # type: ignore[operator,union-attr]

    def windows(**settings: object) -> tuple[int | None, ...]:
        return decoder_config(sizes | {"sliding_window": 8} | settings, "ONNX").windows

    no_windows, all_windows = (None,) * 4, (8,) * 4
    layer_types = ["sliding_attention", "full_attention"] * 2
    qwen3 = {"model_type": "qwen3", "use_sliding_window": True}
    assert windows() == no_windows
    assert windows(model_type="mistral") == all_windows
    assert windows(model_type="mistral", sliding_window=None) == no_windows
    assert (
        windows(model_type="mistral", sliding_window=128) == no_windows
    )  # no effect at max length
    assert (
        windows(model_type="qwen2", use_sliding_window=False, layer_types=layer_types) == no_windows
    )
    assert windows(**qwen3, layer_types=layer_types) == (8, None, 8, None)
    assert windows(**qwen3, max_window_layers=3) == (None, None, None, 8)
    with pytest.raises(ExportError, match="layer_types"):
        windows(**qwen3, layer_types=["linear_attention"] * 4)


def test_gguf_refuses_a_window_in_any_layer(tmp_path: Path) -> None:
    """Graphs of these families in llama.cpp have no window, so a sliding layer is refused."""
    prepared = qat(qwen2("full_attention", "sliding_attention"), "gguf.q4_0")
    with pytest.raises(
        ExportError,
        match=r"sliding_window must be null, as llama\.cpp does not apply it to \w+, got 8",
    ):
        export(prepared, tmp_path / "out")


def test_the_runtime_rounds_inputs_exactly_as_training_did(tmp_path: Path) -> None:
    """With weight-only `ct.w8a8`, transformers rounds no inputs, and the difference is 0.0."""
    prepared = qat(decoder(), "ct.w8a8", activations=False)
    folder = export(prepared, tmp_path / "out")
    expected = model_logits(prepared, tokens())
    assert torch.equal(open_runtime(folder, "ct").logits(tokens()), expected)
    mixed = qat(decoder(), "ct.w8a8", activations=False, ignore=["*.down_proj"])
    qat(mixed, "ct.w8a8", ignore=["*.self_attn.*", "*.gate_proj", "*.up_proj"])
    with pytest.raises(LayerError, match=r"mlp\.down_proj rounds its input and .*_proj does not"):
        export(mixed, tmp_path / "mixed")


def test_decoding_with_a_kv_cache_works(tmp_path: Path) -> None:
    """Decoding in onnxruntime token by token runs and is timed."""
    prepared = qat(decoder(), "ort.matmulnbits")
    runtime = open_runtime(export(prepared, tmp_path / "out"), "ort")
    text = tokens(1, 8)
    prefill_s, decode_s = runtime.decode(text[0].tolist(), 4)
    assert prefill_s > 0
    assert decode_s > 0


def small_model(name: str, **settings: Any) -> nn.Module:
    """Return a small model of one of ms-parallel's families."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 192}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    model = build_model(architecture(name, {**sizes, **heads, **settings}))
    initialize(model, 0)
    return model


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "ct.int4_g32") for name in ("gemma2", "gemma3_text", "granite", "olmo2")),
        *((name, "ct.int4_g32") for name in ("smollm3", "glm4", "phi3")),
        ("phi3", "ct.w8a8"),
    ],
)
def test_families_are_exported_for_transformers(name: str, target: str, tmp_path: Path) -> None:
    """Logits near 1 are summed in other orders: at most 1e-4 off.

    GLM-4's and Phi-3's folders fuse matrices whose rows were quantized separately.
    """
    prepared = qat(small_model(name), target)
    folder = export(prepared, tmp_path / "out")
    comparison = compare(
        model_logits(prepared, tokens()), open_runtime(folder, "ct").logits(tokens())
    )
    assert comparison.largest <= 1e-4
    assert comparison.argmax == 1.0


def test_fused_matrices_are_all_quantized_or_none(tmp_path: Path) -> None:
    """A folder cannot store a fused tensor that is only partly quantized."""
    with pytest.raises(
        ExportError, match=r"q_proj and .*v_proj are one tensor, .*qkv_proj"
    ) as caught:
        export(qat(small_model("phi3"), "ct.int4_g32", ignore=["*.v_proj"]), tmp_path / "out")
    assert "\n" not in str(caught.value)
    excluded = ["*.q_proj", "*.k_proj", "*.v_proj"]
    prepared = qat(small_model("phi3"), "ct.int4_g32", ignore=excluded)
    folder = export(prepared, tmp_path / "out")
    comparison = compare(
        model_logits(prepared, tokens()), open_runtime(folder, "ct").logits(tokens())
    )
    assert comparison.largest <= 1e-4


def test_families_with_separate_expert_tensors_are_refused_by_name(tmp_path: Path) -> None:
    """The folder would have names that no reader knows; the message says to save and load first."""
    prepared = qat(small_model("mixtral", num_local_experts=2), "ct.int4_g32", ignore=["*.mlp.*"])
    with pytest.raises(ExportError, match=r"cannot export 'mixtral': .* is a slice of") as caught:
        export(prepared, tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", ["gguf.q4_0", "ort.matmulnbits"])
def test_runtimes_refuse_unsupported_families_and_scalings(target: str, tmp_path: Path) -> None:
    """One line names the family or the scaling."""
    gemma = qat(small_model("gemma2"), target)
    with pytest.raises(ExportError, match=r"supports the families llama, .*, got 'gemma2'"):
        export(gemma, tmp_path / "out")
    rope_scaling = {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    llama = qat(small_model("llama", rope_scaling=rope_scaling), target)
    with pytest.raises(ExportError, match="must be default, linear or llama3, got 'yarn'"):
        export(llama, tmp_path / "out")


def test_unsupported_exports_are_refused(tmp_path: Path) -> None:
    """The error names the problem, and no files are left."""
    with pytest.raises(LayerError, match=r"call qat\(model, 'ct\.int4_g32'\)"):
        export(decoder(), tmp_path / "out")
    with pytest.raises(SchemeError, match=r"did you mean 'gguf\.q4_0'"):
        qat(decoder(), "gguf.q40")
    prepared = qat(decoder(), "gguf.q4_0")
    with pytest.raises(LayerError, match=r"prepared for gguf\.q4_0, not for ct\.w8a8"):
        export(prepared, tmp_path / "out", target="ct.w8a8")
    unconfigured = qat(nn.Sequential(nn.Linear(32, 32)), "gguf.q4_0")
    with pytest.raises(ExportError, match="no configuration"):
        export(unconfigured, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", [8, 48, 512])
def test_unsupported_group_sizes_are_refused(group: int) -> None:
    """Onnxruntime and llama.cpp would refuse to read them; compressed-tensors takes any size."""
    name = f"ort.matmulnbits_g{group}"
    with pytest.raises(SchemeError, match=f"{name}: group must be one of 16, 32, 64, 128, 256"):
        scheme(name)
    with pytest.raises(SchemeError, match=r"gguf\.q4_0: group must be one of 32 for gguf"):
        evolve(scheme("gguf.q4_0"), group_size=group)
    assert scheme(f"ct.int4_g{group}").group_size == group


@pytest.mark.parametrize(
    ("name", "tensor", "value"),
    [("gguf.q4_0", "weight", 1e6), ("ct.int4_g32", FACTOR, 100.0), ("ct.w8a8", FACTOR, torch.nan)],
)
def test_nonfinite_scales_are_refused(name: str, tensor: str, value: float, tmp_path: Path) -> None:
    """Beyond float16, or beyond float32 after the learned factor: the error names the layer."""
    prepared = qat(decoder(), name, learned_scales=True)
    layer = "model.layers.1.mlp.up_proj"
    prepared.get_submodule(layer).get_parameter(tensor).data[3, 0] = value
    with pytest.raises(ExportError, match=rf"{layer}\.weight: 1 of its scales"):
        export(prepared, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_adapters_must_be_merged_before_an_export(tmp_path: Path) -> None:
    """No target reads PEFT adapters; the merged model is exported like any other."""
    lora_config = peft.LoraConfig(r=8, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(qat(llama(1), "ct.int4_g32"), lora_config)
    with pytest.raises(ExportError, match=r"export the result of model\.merge_and_unload\(\)"):
        export(adapted, tmp_path / "out")
    export(adapted.merge_and_unload(), tmp_path / "out", verify=True)


def test_persistent_buffers_are_exported(tmp_path: Path) -> None:
    """DeepSeek's routing bias is stored as transformers reads it; other buffers are left out."""
    model = deepseek()
    model.register_buffer("seen", torch.tensor(True))
    model.register_buffer("table", torch.ones(2), persistent=False)
    qat(model, "ct.int4_g32", ignore=["*.gate", "*.experts"])
    folder = export(model, tmp_path / "out")
    stored = load_file(folder / "model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(stored[bias], model.get_buffer(bias))
    assert torch.equal(stored["seen"], torch.tensor(True))
    assert "table" not in stored
    verify(model, folder, "ct")


@pytest.mark.parametrize("name", ["gguf.q4_0", "ort.matmulnbits"])
def test_an_unknown_buffer_is_refused(name: str, tmp_path: Path) -> None:
    """As for parameters, since its effect on the model is unknown."""
    model = qat(decoder(), name)
    model.get_submodule("model.layers.1.mlp").register_buffer("limit", torch.ones(2))
    with pytest.raises(LayerError, match=r"support the tensor 'model\.layers\.1\.mlp\.limit'"):
        export(model, tmp_path / "out")


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    """It is replaced only with overwrite=True, and then completely."""
    prepared = qat(decoder(), "ct.int4_g32")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "mine.txt").write_text("unchanged")
    with pytest.raises(ExportError, match="exists"):
        export(prepared, folder)
    assert (folder / "mine.txt").read_text() == "unchanged"
    export(prepared, folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    verify(prepared, folder, "ct")


@pytest.mark.parametrize("name", ["ct.int4_g32", "ct.w8a8", "ort.matmulnbits"])
def test_bfloat16_weights_are_exported_with_float32_compute(name: str, tmp_path: Path) -> None:
    """Codes and scales come from the bfloat16 weights; runtimes compute with them in float32."""
    prepared = with_random_factors(qat(decoder().bfloat16(), name, learned_scales=True))
    folder = export(prepared, tmp_path / "out", verify=True)
    runtime_logits = open_runtime(folder, scheme(name).target).logits(tokens())
    in_bfloat16 = compare(model_logits(prepared, tokens()), runtime_logits)
    assert 1e-3 < in_bfloat16.mean < 0.05 * in_bfloat16.spread  # seven bits per product
    in_float32 = compare(model_logits(prepared.float(), tokens()), runtime_logits)
    assert in_float32.largest <= 1e-5


def test_mixed_precision_exports_the_codes_used_in_training(tmp_path: Path) -> None:
    """The forward pass and the file use weights rounded to bfloat16, not the float32 masters."""
    engine = Engine(
        decoder().config,
        optimizer=AdamWConfig(learning_rate=1e-2, warmup_steps=0),
        mixed_precision=True,
        prepare=lambda stage: qat(stage, "ct.int4_g32"),
    )
    text = tokens()
    engine.step({"tokens": text[:, :-1], "targets": text[:, 1:]}, NextTokenLoss())
    engine.step({"tokens": text[:, :-1], "targets": text[:, 1:]}, NextTokenLoss())
    folder = export(list(engine.stages.values()), tmp_path / "out")
    stored = load_file(folder / "model.safetensors")
    name, quant_scheme = "model.layers.1.mlp.up_proj", scheme("ct.int4_g32")
    master = engine.parameters[f"{name}.weight"].full_tensor()  # type: ignore[attr-defined]
    assert master.dtype == torch.float32
    from_bfloat16, from_float32 = (
        quantize_weight(master.bfloat16(), quant_scheme),
        quantize_weight(master, quant_scheme),
    )
    assert torch.equal(stored[f"{name}.weight_packed"], pack(from_bfloat16.codes, 4))
    assert torch.equal(stored[f"{name}.weight_scale"], from_bfloat16.scales)
    assert not torch.equal(stored[f"{name}.weight_packed"], pack(from_float32.codes, 4))


@pytest.mark.parametrize("name", ["ct.int4_g32", "ort.matmulnbits"])
def test_a_manually_untied_head_is_exported(name: str, tmp_path: Path) -> None:
    """The model was built with a tied head; config.json then describes the file."""
    model = llama(tied=True)
    head = model.get_submodule("lm_head")
    head.weight = nn.Parameter(head.weight.detach().roll(1, dims=0))
    prepared = qat(model, name, head=True)
    folder = export(prepared, tmp_path / "out", verify=True)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("quantized", [False, True])
def test_onnx_stores_a_tied_weight_once(quantized: bool, tmp_path: Path) -> None:
    """Embedding and head read the same constant, in float32 or in four bits."""
    onnx = pytest.importorskip("onnx")
    model = qat(decoder(), "ort.matmulnbits", head=quantized, embeddings=quantized)
    graph = onnx.load(export(model, tmp_path / "out", verify=True) / "model.onnx").graph
    sizes = {constant.name: len(constant.raw_data) for constant in graph.initializer}
    table = 192 * 128 * (0.5 if quantized else 4)
    assert sizes["model.embed_tokens.rows"] == table
    assert not any(size >= table for name, size in sizes.items() if "head" in name)
    assert sum("embed_tokens" in name for name, size in sizes.items() if size >= table) == 1


@pytest.mark.parametrize("name", ["gguf.q4_0", "ort.matmulnbits", "ct.int4_g32"])
def test_the_remedy_for_transformer_xl_works(name: str, tmp_path: Path) -> None:
    """No runtime supports it, so the message names no other scheme, and its remedy works."""
    config = TransformerXLConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=32,
        segment_length=16,
        memory_length=16,
    )
    model = TransformerXL(config)
    initialize(model, 0)
    save_model(model, tmp_path / "model")
    with pytest.raises(ExportError, match=r"run it with ms_parallel\.load_model, or train a"):
        export(qat(model, name, ignore=["*_bias"]), tmp_path / "out")
    load_model(tmp_path / "model")
    with pytest.raises(LayerError, match="add it to the exceptions"):
        prune(load_model(tmp_path / "model"), 0.5)
    prune(load_model(tmp_path / "model"), 0.5, ignore=["*_bias"])


def test_the_remedy_for_a_plain_model_names_functions_that_exist(tmp_path: Path) -> None:
    """Exporting an unprepared model gives an error that names the functions to call first."""
    with pytest.raises(LayerError, match="no layer is prepared") as caught:
        export(decoder(), tmp_path / "out", target="ct.int4_g32")
    functions = re.findall(r"(\w+)\(", str(caught.value))
    assert len(functions) == 2
    assert set(functions) <= set(ms_compress.__all__)

"""What an exported folder's own runtime computes is what training computed."""

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


def trained(model: nn.Module) -> nn.Module:
    """With learned scales that are no longer the scheme's own."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(FACTOR):
            parameter.data.normal_(0, 0.05)
    return model


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["ct.int4_g32", "ct.int3_g64", "ct.w8a8"])
def test_transformers_computes_the_very_logits(name: str, model: str, tmp_path: Path) -> None:
    """compressed-tensors, packed and read by its own library: the difference is 0.0."""
    prepared = trained(qat(MODELS[model](), name, learned_scales=True))
    folder = export(prepared, tmp_path / "out", target=name, verify=True)
    expected = model_logits(prepared, tokens())
    assert torch.equal(open_runtime(folder, "ct").logits(tokens()), expected)


@pytest.mark.parametrize("model", MODELS)
def test_onnxruntime_computes_the_logits(model: str, tmp_path: Path) -> None:
    """MatMulNBits at accuracy level 1 sums in another order: at most 1e-5 of logits of about 1."""
    both = model in ("ms_parallel", "llama tied", "qwen3")
    prepared = qat(MODELS[model](), "ort.matmulnbits", head=True, embeddings=both)
    folder = export(trained(prepared), tmp_path / "out", verify=True)
    found = compare(model_logits(prepared, tokens()), open_runtime(folder, "ort").logits(tokens()))
    assert found.largest <= 1e-5
    assert found.argmax == 1.0


@pytest.mark.parametrize("kinds", [("full_attention", "sliding_attention"), ("sliding_attention",)])
def test_onnxruntime_slides_the_layers_that_slide(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """A window of 8 keys over texts of 48, in one layer of two and in all: at most 1e-5 off."""
    prepared = qat(qwen2(*kinds), "ort.matmulnbits")
    folder = export(prepared, tmp_path / "out")
    found = compare(model_logits(prepared, tokens()), open_runtime(folder, "ort").logits(tokens()))
    assert found.largest <= 1e-5


def test_windows_are_those_of_each_family() -> None:
    """Llama has none, Mistral's are of all layers, Qwen's of those that its config.json names."""
    sizes = llama(4).config.to_dict()  # type: ignore[operator,union-attr]

    def windows(**settings: object) -> tuple[int | None, ...]:
        return decoder_config(sizes | {"sliding_window": 8} | settings, "ONNX").windows

    none, every = (None,) * 4, (8,) * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    used = {"model_type": "qwen3", "use_sliding_window": True}
    assert windows() == none
    assert windows(model_type="mistral") == every
    assert windows(model_type="mistral", sliding_window=None) == none
    assert windows(model_type="mistral", sliding_window=128) == none  # as long as texts may be
    assert windows(model_type="qwen2", use_sliding_window=False, layer_types=kinds) == none
    assert windows(**used, layer_types=kinds) == (8, None, 8, None)
    assert windows(**used, max_window_layers=3) == (None, None, None, 8)
    with pytest.raises(ExportError, match="layer_types"):
        windows(**used, layer_types=["linear_attention"] * 4)


def test_gguf_refuses_a_window_in_any_layer(tmp_path: Path) -> None:
    """llama.cpp's graphs of these families have none; no layer may slide unseen."""
    prepared = qat(qwen2("full_attention", "sliding_attention"), "gguf.q4_0")
    with pytest.raises(
        ExportError,
        match=r"sliding_window must be null, as llama\.cpp does not apply it to \w+, got 8",
    ):
        export(prepared, tmp_path / "out")


def test_inputs_are_rounded_there_where_they_were_in_training(tmp_path: Path) -> None:
    """`ct.w8a8` of weights alone: transformers rounds no input, and the difference is 0.0."""
    prepared = qat(decoder(), "ct.w8a8", activations=False)
    folder = export(prepared, tmp_path / "out")
    expected = model_logits(prepared, tokens())
    assert torch.equal(open_runtime(folder, "ct").logits(tokens()), expected)
    mixed = qat(decoder(), "ct.w8a8", activations=False, ignore=["*.down_proj"])
    qat(mixed, "ct.w8a8", ignore=["*.self_attn.*", "*.gate_proj", "*.up_proj"])
    with pytest.raises(LayerError, match=r"mlp\.down_proj rounds its input and .*_proj does not"):
        export(mixed, tmp_path / "mixed")


def test_a_cache_of_keys_gives_the_same_tokens(tmp_path: Path) -> None:
    """Decoding in onnxruntime token by token finds what the model finds over the whole text."""
    prepared = qat(decoder(), "ort.matmulnbits")
    runtime = open_runtime(export(prepared, tmp_path / "out"), "ort")
    text = tokens(1, 8)
    prefill_s, decode_s = runtime.decode(text[0].tolist(), 4)
    assert prefill_s > 0
    assert decode_s > 0


def family(name: str, **settings: Any) -> nn.Module:
    """A small model of a family of ms-parallel's."""
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
    """Logits of about 1 that pass other orders of summing: at most 1e-4 apart.

    GLM-4's and Phi-3's folders fuse matrices, whose rows are rounded as they were apart.
    """
    prepared = qat(family(name), target)
    folder = export(prepared, tmp_path / "out")
    found = compare(model_logits(prepared, tokens()), open_runtime(folder, "ct").logits(tokens()))
    assert found.largest <= 1e-4
    assert found.argmax == 1.0


def test_matrices_that_a_folder_fuses_are_rounded_alike_or_not_at_all(tmp_path: Path) -> None:
    """A part left as it is has no place in the folder; all of them have."""
    with pytest.raises(ExportError, match=r"q_proj and .*v_proj are one tensor, .*qkv_proj") as e:
        export(qat(family("phi3"), "ct.int4_g32", ignore=["*.v_proj"]), tmp_path / "out")
    assert "\n" not in str(e.value)
    plain = ["*.q_proj", "*.k_proj", "*.v_proj"]
    prepared = qat(family("phi3"), "ct.int4_g32", ignore=plain)
    folder = export(prepared, tmp_path / "out")
    found = compare(model_logits(prepared, tokens()), open_runtime(folder, "ct").logits(tokens()))
    assert found.largest <= 1e-4


def test_families_whose_folders_hold_experts_apart_are_refused_by_name(tmp_path: Path) -> None:
    """Rather than written under names that no reader knows; save and load them first."""
    prepared = qat(family("mixtral", num_local_experts=2), "ct.int4_g32", ignore=["*.mlp.*"])
    with pytest.raises(ExportError, match=r"cannot export 'mixtral': .* is a slice of") as e:
        export(prepared, tmp_path / "out")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("target", ["gguf.q4_0", "ort.matmulnbits"])
def test_runtimes_refuse_families_and_scalings_that_they_do_not_know(
    target: str, tmp_path: Path
) -> None:
    """By name, in one line."""
    gemma = qat(family("gemma2"), target)
    with pytest.raises(ExportError, match=r"supports the families llama, .*, got 'gemma2'"):
        export(gemma, tmp_path / "out")
    how = {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    llama = qat(family("llama", rope_scaling=how), target)
    with pytest.raises(ExportError, match="must be default, linear or llama3, got 'yarn'"):
        export(llama, tmp_path / "out")


def test_an_export_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    """Each refusal names what is wrong, and leaves nothing behind."""
    with pytest.raises(LayerError, match=r"call qat\(model, 'ct\.int4_g32'\)"):
        export(decoder(), tmp_path / "out")
    with pytest.raises(SchemeError, match=r"did you mean 'gguf\.q4_0'"):
        qat(decoder(), "gguf.q4_1")
    prepared = qat(decoder(), "gguf.q4_0")
    with pytest.raises(LayerError, match=r"prepared for gguf\.q4_0, not for ct\.w8a8"):
        export(prepared, tmp_path / "out", target="ct.w8a8")
    strange = qat(nn.Sequential(nn.Linear(32, 32)), "gguf.q4_0")
    with pytest.raises(ExportError, match="no configuration"):
        export(strange, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", [8, 48, 512])
def test_groups_that_a_target_does_not_take_are_refused(group: int) -> None:
    """As onnxruntime and llama.cpp would when they read the file; compressed-tensors takes any."""
    name = f"ort.matmulnbits_g{group}"
    with pytest.raises(SchemeError, match=f"{name}: group must be one of 16, 32, 64, 128, 256"):
        scheme(name)
    with pytest.raises(SchemeError, match=r"gguf\.q4_0: group must be one of 32 for gguf"):
        evolve(scheme("gguf.q4_0"), group=group)
    assert scheme(f"ct.int4_g{group}").group == group


@pytest.mark.parametrize(
    ("name", "tensor", "value"),
    [("gguf.q4_0", "weight", 1e6), ("ct.int4_g32", FACTOR, 100.0), ("ct.w8a8", FACTOR, torch.nan)],
)
def test_scales_that_are_not_finite_are_refused(
    name: str, tensor: str, value: float, tmp_path: Path
) -> None:
    """Beyond float16, or beyond float32 once a learned factor is applied: the layer is named."""
    prepared = qat(decoder(), name, learned_scales=True)
    layer = "model.layers.1.mlp.up_proj"
    prepared.get_submodule(layer).get_parameter(tensor).data[3, 0] = value
    with pytest.raises(ExportError, match=rf"{layer}\.weight: 1 of its scales"):
        export(prepared, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_adapters_are_merged_before_an_export(tmp_path: Path) -> None:
    """Those of PEFT, which no target reads beside codes; the merged model is exported as any."""
    how = peft.LoraConfig(r=8, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(qat(llama(1), "ct.int4_g32"), how)
    with pytest.raises(ExportError, match=r"export the result of model\.merge_and_unload\(\)"):
        export(adapted, tmp_path / "out")
    export(adapted.merge_and_unload(), tmp_path / "out", verify=True)


def test_buffers_that_a_model_keeps_are_in_the_file(tmp_path: Path) -> None:
    """DeepSeek's routing as transformers reads it back; those that it makes anew are not."""
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
def test_a_buffer_that_the_target_does_not_know_is_refused(name: str, tmp_path: Path) -> None:
    """As a parameter is: what it does to the model is not known either."""
    model = qat(decoder(), name)
    model.get_submodule("model.layers.1.mlp").register_buffer("limit", torch.ones(2))
    with pytest.raises(LayerError, match=r"support the tensor 'model\.layers\.1\.mlp\.limit'"):
        export(model, tmp_path / "out")


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    """It is replaced only when asked, and then as a whole."""
    prepared = qat(decoder(), "ct.int4_g32")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "mine.txt").write_text("kept")
    with pytest.raises(ExportError, match="exists"):
        export(prepared, folder)
    assert (folder / "mine.txt").read_text() == "kept"
    export(prepared, folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    verify(prepared, folder, "ct")


@pytest.mark.parametrize("name", ["ct.int4_g32", "ct.w8a8", "ort.matmulnbits"])
def test_bfloat16_weights_are_deployed_as_float32_has_them(name: str, tmp_path: Path) -> None:
    """Codes and scales are those of the bfloat16 weights; runtimes compute in float32 with them."""
    prepared = trained(qat(decoder().bfloat16(), name, learned_scales=True))
    folder = export(prepared, tmp_path / "out", verify=True)
    there = open_runtime(folder, scheme(name).target).logits(tokens())
    narrow = compare(model_logits(prepared, tokens()), there)
    assert 1e-3 < narrow.mean < 0.05 * narrow.spread  # seven bits of each product
    wide = compare(model_logits(prepared.float(), tokens()), there)
    assert wide.largest <= 1e-5


def test_mixed_precision_is_deployed_with_the_codes_it_trained(tmp_path: Path) -> None:
    """Forwards have weights rounded to bfloat16; so has the file, though float32 is kept."""
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
    name, how = "model.layers.1.mlp.up_proj", scheme("ct.int4_g32")
    kept = engine.parameters[f"{name}.weight"].full_tensor()  # type: ignore[attr-defined]
    assert kept.dtype == torch.float32
    computed, unrounded = quantize_weight(kept.bfloat16(), how), quantize_weight(kept, how)
    assert torch.equal(stored[f"{name}.weight_packed"], pack(computed.codes, 4))
    assert torch.equal(stored[f"{name}.weight_scale"], computed.scales)
    assert not torch.equal(stored[f"{name}.weight_packed"], pack(unrounded.codes, 4))


@pytest.mark.parametrize("name", ["ct.int4_g32", "ort.matmulnbits"])
def test_a_head_untied_by_hand_is_in_the_file(name: str, tmp_path: Path) -> None:
    """Though the model was built with a tied one; config.json then says what the file holds."""
    model = llama(tied=True)
    head = model.get_submodule("lm_head")
    head.weight = nn.Parameter(head.weight.detach().roll(1, dims=0))
    prepared = qat(model, name, head=True)
    folder = export(prepared, tmp_path / "out", verify=True)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("quantized", [False, True])
def test_onnx_stores_a_tied_weight_once(quantized: bool, tmp_path: Path) -> None:
    """Embedding and head read the same constant, of float32 or of four bits."""
    onnx = pytest.importorskip("onnx")
    model = qat(decoder(), "ort.matmulnbits", head=quantized, embeddings=quantized)
    graph = onnx.load(export(model, tmp_path / "out", verify=True) / "model.onnx").graph
    sizes = {each.name: len(each.raw_data) for each in graph.initializer}
    table = 192 * 128 * (0.5 if quantized else 4)
    assert sizes["model.embed_tokens.rows"] == table
    assert not any(size >= table for name, size in sizes.items() if "head" in name)
    assert sum("embed_tokens" in name for name, size in sizes.items() if size >= table) == 1


@pytest.mark.parametrize("name", ["gguf.q4_0", "ort.matmulnbits", "ct.int4_g32"])
def test_transformer_xl_is_refused_without_a_remedy_that_fails(name: str, tmp_path: Path) -> None:
    """No runtime computes it, so no other scheme is named; what is named works."""
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
    """An export of a model that nobody prepared says what to call first."""
    with pytest.raises(LayerError, match="no layer is prepared") as refused:
        export(decoder(), tmp_path / "out", target="ct.int4_g32")
    named = re.findall(r"(\w+)\(", str(refused.value))
    assert len(named) == 2
    assert set(named) <= set(ms_compress.__all__)

"""Models built by transformers compute the same as transformers, or are refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_command, run_processes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers_models import SIZES

from ms_parallel import ConfigError, Engine, LayoutError, ModelError, NextTokenLoss, load_model
from ms_parallel.cluster.layout import Layout
from ms_parallel.models import TransformersModel
from ms_parallel.models.family import family_of
from ms_parallel.models.huggingface.attention import registered
from ms_parallel.models.huggingface.small import small_model
from ms_parallel.models.registry import architecture, architectures
from ms_parallel.proof.subject import open_subject

CHILD = Path(__file__).with_name("transformers_models.py")
TOKENS = torch.arange(3, 27)[None]
BATCH = {"tokens": TOKENS, "targets": TOKENS.roll(-1, 1)}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def saved_model(model_type: str, folder: Path, **settings: Any) -> Any:
    """A transformers model with random weights, saved to a folder."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn(value.shape))
    model.save_pretrained(folder)
    return model


def test_an_unsupported_layer_type_is_refused() -> None:
    """Sparse layers of MiniMax M3 attend to selected key blocks, which we do not support."""
    document = {
        "model_type": "minimax_m3_vl_text",
        **SIZES,
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
    }
    with pytest.raises(ConfigError, match="layers of type 'minimax_m3_sparse', which are not"):
        TransformersModel(document)


@pytest.mark.parametrize("name", ["block_indices", "position_bias", "never_heard_of"])
def test_an_unknown_argument_of_an_attention_call_is_refused(name: str) -> None:
    """It may change the result; None and arguments without effect are accepted."""
    from ms_parallel import operators

    attend: Any = ALL_ATTENTION_FUNCTIONS[registered(operators)]
    x = torch.randn(1, 2, 4, 8)
    attend(torch.nn.Module(), x, x, x, None, dropout=0.1, **{name: None}, sliding_window=None)
    with pytest.raises(ModelError, match=f"Module passes '{name}' to its attention"):
        attend(torch.nn.Module(), x, x, x, None, **{name: x}, sliding_window=None)


def test_a_parameter_between_split_layers_is_summed_over_the_tensor_axis(tmp_path: Path) -> None:
    """Apertus's activation has parameters that the published plan omits."""
    saved_model("apertus", tmp_path, num_hidden_layers=2)
    name = "model.layers.0.mlp.act_fn.alpha_p"
    arguments = {"folder": str(tmp_path), "name": name}
    (expected,) = run_processes(1, CHILD, "gradient_of", layout="", **arguments)
    for rank in run_processes(2, CHILD, "gradient_of", layout="tensor=2", **arguments):
        assert rank == pytest.approx(expected, abs=1e-5)
    assert abs(expected[1]) > 1e-3


def test_an_unnamed_parameter_next_to_split_layers_is_refused_under_tensor() -> None:
    """Its gradient may be partial or complete."""
    config = small_model(TransformersModel({"model_type": "doge"}))
    with pytest.raises(LayoutError, match=r"omits model\.layers\.\*\.self_attn\.A"):
        family_of(config).check_layout(config, Layout.parse("tensor=2"))


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("ctrl", {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 64}),
        ("phi", {"tie_word_embeddings": True}),
    ],
)
def test_a_tied_head_keeps_its_bias(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """In logits, gradients and the saved folder."""
    model = saved_model(model_type, tmp_path / "begin", **settings)
    engine = Engine(TransformersModel(tmp_path / "begin"), device="cpu")
    logits = engine.evaluate(BATCH, lambda output, _: output.logits())
    with torch.no_grad():
        assert torch.allclose(logits, model(TOKENS).logits, atol=1e-5)
    assert engine.step(BATCH, NextTokenLoss()).grad_norm > 0
    engine.save(tmp_path / "saved")
    before, after = (load_file(tmp_path / at / "model.safetensors") for at in ("begin", "saved"))
    assert before.keys() == after.keys()
    assert not torch.equal(before["lm_head.bias"], after["lm_head.bias"])


def test_initial_weights_of_gemma4_have_gradients() -> None:
    """Its persistent buffer `layer_scalar` is 1, not 0, which would disable every layer."""
    config = small_model(TransformersModel({"model_type": "gemma4_text"}))
    engine = Engine(config, device="cpu")
    assert engine.step(BATCH, NextTokenLoss()).grad_norm > 0.1
    scalars = [
        value
        for stage in engine.stages.values()
        for name, value in stage.named_buffers()  # type: ignore[attr-defined]
        if name.endswith("layer_scalar")
    ]
    assert len(scalars) == 4
    assert all(torch.equal(value, torch.ones_like(value)) for value in scalars)


def test_a_folder_of_experts_loads_in_a_new_process(tmp_path: Path) -> None:
    """`load_model` builds on the meta device, where a router cannot be run."""
    settings = {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS}
    model = saved_model("qwen2_moe", tmp_path, **settings)
    ((total,),) = run_processes(1, CHILD, "logit_sum_of_loaded", folder=str(tmp_path))
    with torch.no_grad():
        expected = float(model(TOKENS).logits.double().sum())
    assert total == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("model_type", ["minimax_m2", "exaone_moe"])
def test_buffers_have_their_names_on_disk(model_type: str, tmp_path: Path) -> None:
    """The correction bias of a router has different names in the folder and in memory."""
    config = small_model(TransformersModel({"model_type": model_type})).settings
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    engine = Engine(TransformersModel(tmp_path), device="cpu")
    logits = engine.evaluate(BATCH, lambda output, _: output.logits())
    with torch.no_grad():
        assert torch.allclose(logits, model(TOKENS).logits, atol=1e-5)


def test_commands_take_a_family_with_per_layer_head_sizes(tmp_path: Path) -> None:
    """`prove` and `explain` for Gemma 4, whose `head_dim` has no single value."""
    prove = ["-m", "ms_parallel", "prove", "gemma4_text", "--processes", "1", "--cases", "1"]
    ended = run_command(prove, folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    saved_config = small_model(TransformersModel({"model_type": "gemma4_text"})).settings
    AutoModelForCausalLM.from_config(saved_config).save_pretrained(tmp_path / "gemma")
    command = ["-m", "ms_parallel", "explain", "data=2", str(tmp_path / "gemma")]
    ended = run_command(command, folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("model_type", "setting", "expected"),
    [
        ("laguna", "num_attention_heads_per_layer", [4, 4, 4, 4]),
        ("gemma4_text", "num_hidden_layers", 4),
        ("exaone_moe", "mlp_layer_types", ["dense", "sparse", "sparse", "sparse"]),
    ],
)
def test_a_proof_cuts_per_layer_settings(model_type: str, setting: str, expected: object) -> None:
    """To the number of layers that it keeps, with each kind of layer."""
    config: Any = open_subject(model_type).model
    assert getattr(config.settings, setting) == expected


@pytest.mark.skipif("dory" not in CONFIG_MAPPING, reason="needs a newer transformers")
def test_a_head_that_scales_its_logits_is_applied_completely(tmp_path: Path) -> None:
    """Dory's head is a subclass of a linear layer with a scale per token."""
    config = small_model(TransformersModel({"model_type": "dory"})).settings
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        model.lm_head.logit_scale.mul_(1 + torch.rand(config.vocab_size))
    model.save_pretrained(tmp_path)
    engine = Engine(TransformersModel(tmp_path), device="cpu")
    logits = engine.evaluate(BATCH, lambda output, _: output.logits())
    with torch.no_grad():
        assert torch.allclose(logits, model(TOKENS, use_cache=False).logits, atol=1e-5)


@pytest.mark.parametrize("model_type", ["gpt2", "phi", "gpt_neox", "stablelm"])
def test_extra_heads_find_the_final_norm(model_type: str) -> None:
    """Such as `transformer.ln_f` or `model.final_layernorm`; a value head has parameters."""
    config = small_model(TransformersModel({"model_type": model_type}))
    engine = Engine(config, device="cpu", heads={"value": 1})
    assert any(name.endswith("value_matrix") for name in engine.parameters)


def test_a_model_without_a_weighted_final_norm_has_no_extra_heads() -> None:
    """Norms of OLMo have no weight; the message gives the remedy."""
    config = small_model(TransformersModel({"model_type": "olmo"}))
    with pytest.raises(ModelError, match="use a separate value model"):
        Engine(config, device="cpu", heads={"value": 1})


def test_a_first_gradient_of_zero_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """With all weights 0, all logits are 0 and so is the gradient."""
    config = small_model(TransformersModel({"model_type": "llama"}))
    engine = Engine(config, device="cpu")
    with torch.no_grad():
        for value in engine.parameters.values():
            value.zero_()
    assert engine.step(BATCH, NextTokenLoss()).grad_norm == 0
    assert "the first gradient is exactly 0" in caplog.text


@pytest.mark.parametrize(
    "model_type", ["musicgen", "reformer", "dots3_note", "zamba", "inkling_text"]
)
def test_models_that_cannot_be_built_are_refused_in_one_line(model_type: str) -> None:
    """Errors of transformers are converted."""
    with pytest.raises((ModelError, ConfigError)) as error:
        Engine(small_model(TransformersModel({"model_type": model_type})), device="cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_a_folder_without_its_mtp_layers_loads_with_one_warning(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A save by transformers drops them but keeps their number in config.json; ours writes 0."""
    small = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    latent |= {"qk_rope_head_dim": 4, "head_dim": 4}
    widths = latent if model_type == "deepseek_v3" else {}
    widths |= {"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_shared_experts": 1}
    saved_model(model_type, tmp_path / "begin", **small, **widths, num_nextn_predict_layers=1)
    config = json.loads((tmp_path / "begin" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    engine = Engine(tmp_path / "begin", device="cpu")
    load_model(tmp_path / "begin")
    assert caplog.text.count("multi-token-prediction") == 1
    engine.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("depth", [1, 2, 4, 7])
def test_every_family_supports_any_depth(depth: int) -> None:
    """Defaults that depend on the number of layers are derived from it."""
    for name in architectures():
        assert architecture(name, {"num_hidden_layers": depth}).num_hidden_layers == depth
    layers: Any = architecture("gpt_oss", {"num_hidden_layers": depth})
    assert layers.sliding_layers == tuple(range(0, depth, 2))

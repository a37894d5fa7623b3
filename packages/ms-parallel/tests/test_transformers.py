"""Models built by transformers train under every layout as in plain torch."""

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from runs import VOCABULARY, global_batch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.codegen import modeling_codegen
from transformers_models import FAMILIES, MORE, SIZES, hf_model, plain_torch_losses, separate_logits

import ms_kernels
from ms_parallel import (
    ConfigError,
    DistributedTrainer,
    Engine,
    LayoutError,
    ModelError,
    NextTokenLoss,
    operators,
)
from ms_parallel.cluster.layout import Layout
from ms_parallel.models import ModelConfig, TransformersModel, architecture
from ms_parallel.models.family import family_of

CHILD = Path(__file__).with_name("transformers_models.py")
STEPS, MANY = 4, 10
# Ten steps with float32 sums over rows and ranks in a different order.
TOLERANCE = 1e-5
LAYOUTS = {"data=2": 2, "tensor=2": 2, "pipeline=2": 2, "data=2,pipeline=2": 4}
FEW = [
    ("qwen3_moe", "tensor=2"),
    ("qwen3_5_text", "pipeline=2"),
    ("gemma2", "data=2,pipeline=2"),
    ("gpt_neox", "tensor=2"),
]
"""Experts; a recurrent state; scaled embeddings, windows and capped logits; fused
heads and a table named by a plan."""
UNPLANNED = {("gpt_oss", "tensor=2")}
"""Families without a tensor plan in transformers."""
ALL = [
    pytest.param(family, layout, MANY, marks=pytest.mark.slow)
    for family in FAMILIES
    for layout in LAYOUTS
    if (family, layout) not in UNPLANNED
]


@pytest.mark.parametrize(("family", "layout", "steps"), [*((*case, STEPS) for case in FEW), *ALL])
def test_some_steps_under_a_layout_equal_plain_torch(
    tmp_path: Path, family: str, layout: str, steps: int
) -> None:
    """Rows are packed; plain torch runs documents separately. transformers loads the result."""
    expected = plain_torch_losses(family, tmp_path / "begin", steps)
    job = {"layout": layout, "steps": steps, "folder": str(tmp_path / "begin")}
    options = {"microbatch_size": 1} if "pipeline" in layout else {}
    jobs = [{**job, "options": options, "save": str(tmp_path / "saved")}]
    for (result,) in run_processes(LAYOUTS[layout], CHILD, "train_jobs", jobs=jobs):
        assert result["losses"] == pytest.approx(expected, abs=TOLERANCE)
    batch = global_batch(0)
    # Some versions of transformers run Gemma 2 with an attention that ignores its soft cap.
    attention = "eager" if family == "gemma2" else None
    reloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", attn_implementation=attention
    )
    ours = Engine(TransformersModel(tmp_path / "saved"), device="cpu")
    logits = ours.evaluate(batch, lambda output, _: output.logits())
    with torch.no_grad():
        assert torch.allclose(logits, separate_logits(reloaded, batch), atol=1e-5)
        assert not torch.allclose(logits, separate_logits(hf_model(family), batch), atol=1e-2)


SHOWN = ["qwen3_5_text", "gpt_oss", "gemma3_text", *MORE]
"""A recurrent state and a convolution; sinks; windows; a state that positions reset; and windows
that appear only in a model's mask, in some layers or in all."""


def engine_of(family: str, folder: Path, **options: Any) -> tuple[Any, Engine]:
    """A transformers model, and an engine of the folder it was saved to."""
    model = hf_model(family).eval()
    model.save_pretrained(folder)
    return model, Engine(TransformersModel(folder), device="cpu", **options)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in SHOWN else (pytest.mark.slow,))
        for name in (*FAMILIES, *MORE)
        # Only newer versions of its code call the attention interface.
        if name != "codegen" or hasattr(modeling_codegen, "ALL_ATTENTION_FUNCTIONS")
    ],
)
def test_documents_do_not_attend_to_one_another(tmp_path: Path, family: str) -> None:
    """Changing a token changes no bit of the other document, and packed equals separate."""
    model, engine = engine_of(family, tmp_path)
    batch = global_batch(0)

    def logits(position: int | None = None) -> torch.Tensor:
        tokens = batch["tokens"].clone()
        if position is not None:
            tokens[:, position] = (tokens[:, position] + 7) % VOCABULARY
        return engine.evaluate({**batch, "tokens": tokens}, lambda output, _: output.logits())

    packed, second = logits(), batch["documents"] == 1
    with torch.no_grad():
        assert torch.allclose(packed, separate_logits(model, batch), atol=1e-5)
    for position, other_document in ((1, second), (-1, ~second)):
        changed_logits = logits(position)
        assert torch.equal(changed_logits[other_document], packed[other_document])
        assert not torch.equal(changed_logits[~other_document], packed[~other_document])


@pytest.mark.parametrize("family", ["qwen3_5_text", "gemma2"])
def test_cached_generation_equals_a_full_forward_per_token(tmp_path: Path, family: str) -> None:
    """With a key-value cache, and with a recurrent state in addition."""
    model, engine = engine_of(family, tmp_path)
    prompts, expected = [[3, 4, 5, 6, 9, 11, 12], [7, 8]], []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        expected.append(text[len(prompt) :])
    assert engine.generate(prompts, max_new_tokens=6, temperature=0, stop_token=None) == expected


def test_recomputed_blocks_give_the_same_gradients(tmp_path: Path) -> None:
    """A recomputed block gets its rows' documents again."""
    hf_model("qwen3_5_text").save_pretrained(tmp_path)
    grads_by_mode = []
    for recompute in ("none", "full"):
        engine = Engine(TransformersModel(tmp_path), device="cpu", recompute=recompute)
        engine.runner.forward_backward([global_batch(0)], NextTokenLoss(), 1.0, engine.reduction)
        grads_by_mode.append({name: param.grad for name, param in engine.parameters.items()})
    for name, gradient in grads_by_mode[0].items():
        assert torch.equal(gradient, grads_by_mode[1][name]), name


GATED = ("causal_conv1d", "gated_delta_rule")


class CountingOps:
    """The operators in plain torch, with a count of the calls of recurrent ones."""

    def __init__(self) -> None:
        self.calls = dict.fromkeys(GATED, 0)

    def __getattr__(self, name: str) -> Any:
        if name in GATED:
            self.calls[name] += 1
        return getattr(operators, name)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_recurrent_layers_use_the_given_operators(tmp_path: Path, family: str) -> None:
    """Each gated delta net calls both operators of `ops=`; fused ones agree."""
    counting, batch = CountingOps(), global_batch(0)
    _, engine = engine_of(family, tmp_path, ops=counting)
    plain = engine.evaluate(batch, lambda output, _: output.logits())
    layers = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family]}).layer_types
    assert counting.calls == dict.fromkeys(GATED, layers.count("linear_attention"))
    fused = Engine(TransformersModel(tmp_path), device="cpu", ops=ms_kernels)
    fused_logits = fused.evaluate(batch, lambda output, _: output.logits())
    assert torch.allclose(fused_logits, plain, atol=1e-5)
    assert not torch.equal(fused_logits, plain)


@pytest.mark.parametrize("family", ["bloom", "mpt", "xglm"])
def test_attention_that_cannot_be_replaced_is_refused_by_name(family: str) -> None:
    """With one line when the model is built, not by a random failure of its forward."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CONFIG_MAPPING[family](vocab_size=VOCABULARY)
    for name, value in small.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match="does not use transformers' attention interface"):
        Engine(TransformersModel(config), device="cpu")


def test_a_deep_copy_keeps_documents_separate(tmp_path: Path) -> None:
    """A deep copy, as of a reference policy, has no attention between documents either."""
    _, engine = engine_of("qwen3_5_text", tmp_path)
    batch = {key: global_batch(0)[key] for key in ("tokens", "positions", "documents")}
    tokens = batch.pop("tokens")
    with torch.no_grad():
        assert torch.equal(deepcopy(engine.module)(tokens, **batch), engine.module(tokens, **batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_equals_that_of_transformers(tmp_path: Path, family: str) -> None:
    """Same names, shapes and values: separate experts, tied weights once, persistent buffers."""
    _, engine = engine_of(family, tmp_path / "theirs")
    engine.save(tmp_path / "ours")
    expected, ours = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours")
    )
    assert expected.keys() == ours.keys()
    assert all(torch.equal(expected[name], ours[name]) for name in ours)


def test_initial_weights_are_equal_under_every_layout_and_follow_transformers() -> None:
    """Norms that add one start at zero, and a seed gives the same values on every rank."""
    document = {**SIZES, "query_pre_attn_scalar": 8, "model_type": "gemma2"}
    jobs = [{"layout": layout, "document": document} for layout in ("data=2", "pipeline=2")]
    ranks = run_processes(
        2, CHILD, "initial_weights", jobs=[*jobs, {**jobs[0], "layout": "tensor=2"}]
    )
    expected = run_processes(
        1, CHILD, "initial_weights", jobs=[{"layout": "", "document": document}]
    )[0][0]
    assert expected["model.norm.weight"] == [0.0, 0.0]
    assert expected["model.embed_tokens.weight"][1] == pytest.approx(0.1, rel=0.1)
    for layouts in zip(*ranks, strict=True):
        merged = {name: value for rank in layouts for name, value in rank.items()}
        assert {name: merged.get(name) for name in expected} == expected


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
def test_routers_are_initialized_by_their_own_rule(family: str) -> None:
    """Qwen3-Next uses the rule of the enclosing block, Qwen3-MoE the router's; seeds repeat."""
    config = TransformersModel(CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family]}))
    first, second, third = (
        Engine(config, device="cpu", seed=seed).parameters for seed in (3, 3, 4)
    )
    name = "model.layers.1.mlp.gate.weight"
    assert float(first[name].detach().std()) == pytest.approx(0.1, rel=0.3)
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert not torch.equal(first[name], third[name])


def test_unsupported_layouts_are_refused_with_the_reason() -> None:
    """No published plan, heads that do not divide, more stages than layers."""

    def refusal(family: str, layout: str, **settings: Any) -> str:
        config = TransformersModel(
            CONFIG_MAPPING[family](**{**SIZES, **FAMILIES.get(family, {}), **settings})
        )
        with pytest.raises(LayoutError) as error:
            family_of(config).check_layout(config, Layout.parse(layout))
        return str(error.value)

    assert "transformers has no tensor plan" in refusal("gpt_oss", "tensor=2")
    assert "must divide dim 0 of" in refusal("llama", "tensor=3")
    odd = refusal("llama", "tensor=2", num_key_value_heads=1)
    assert odd == "tensor=2 must divide the 1 key-value heads of llama"
    assert "must not exceed the 3 layers" in refusal("llama", "pipeline=4")
    assert "transformers has no pipeline plan" in refusal("gpt2", "pipeline=2", head_dim=None)


@pytest.mark.parametrize(("width", "refused"), [(8, True), (0, False)])
def test_stages_that_need_more_than_hidden_states_are_refused(width: int, refused: bool) -> None:
    """Blocks of Gemma 4 take per-layer inputs that weights of the first stage compute."""
    sizes = {
        "vocab_size_per_layer_input": VOCABULARY,
        "global_head_dim": 8,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": width,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }
    config = TransformersModel(CONFIG_MAPPING["gemma4_text"](**{**SIZES, **sizes}))
    if not refused:
        family_of(config).check_layout(config, Layout(pipeline=2))
        return
    with pytest.raises(ModelError, match=r"computed by weights of another stage; set pipeline=1"):
        family_of(config).check_layout(config, Layout(pipeline=2))


def test_a_transformers_config_has_all_attributes_of_a_native_one() -> None:
    """Except for the sizes that only our own blocks use."""
    built_from = {"head_dim", "intermediate_size", "key_value_heads", "num_attention_heads"}
    names = {name for name in dir(architecture("llama")) if not name.startswith("_")}
    ours = {name for name in names if hasattr(ModelConfig, name)} - built_from
    config = TransformersModel({"model_type": "llama", **SIZES})
    assert [name for name in sorted(ours) if not hasattr(config, name)] == []


def test_models_that_would_compute_something_else_are_refused(tmp_path: Path) -> None:
    """Balance losses of microbatches, unknown attention, unknown types, unknown settings."""
    with pytest.raises(
        ConfigError, match="output_router_logits=true requests a load-balancing loss"
    ):
        TransformersModel({"model_type": "ernie4_5_moe", **SIZES, "output_router_logits": True})
    with pytest.raises(ConfigError, match="layers of type 'chunked_attention', which are not"):
        TransformersModel({"model_type": "llama4_text", **SIZES})
    with pytest.raises(ModelError, match="model_type 'no such' is not supported: neither"):
        TransformersModel({"model_type": "no such"})
    with pytest.raises(ModelError, match=r"model_type .* is not supported"):
        TransformersModel({"model_type": ["llama"]})
    with pytest.raises(ConfigError, match=r"num_hidden_layers of llama must be .*, got 0"):
        TransformersModel({"model_type": "llama", **SIZES, "num_hidden_layers": 0})
    with pytest.raises(ConfigError, match=r"unknown model setting 'hiden_size'.*'hidden_size'"):
        TransformersModel({"model_type": "llama"}).with_settings({"hiden_size": 4})
    with pytest.raises(ModelError, match="does not use transformers' attention interface"):
        Engine(TransformersModel({"model_type": "minimax", **SIZES}), device="cpu")


def test_a_folder_of_an_unsupported_family_is_built_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Engine(FOLDER)` accepts it; without transformers the error says what to install."""
    hf_model("stablelm").save_pretrained(tmp_path)
    engine = Engine(tmp_path, device="cpu")
    assert isinstance(engine.config, TransformersModel)
    assert engine.step(global_batch(0), NextTokenLoss()).loss > 0
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.models.auto.modeling_auto", None)
    with pytest.raises(ModelError, match="and all causal models of transformers if installed"):
        Engine(tmp_path, device="cpu")
    with pytest.raises(ModelError, match=r"which is not installed.*ms-parallel\[hf\]"):
        TransformersModel({"model_type": "stablelm"})


def test_the_text_model_of_a_vision_language_folder_is_trained_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen3.5 as published: its text tensors are loaded, and a warning reports the others."""
    vision_sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision_config = {**vision_sizes, "out_hidden_size": 32, "num_position_embeddings": 16}
    token_names = (
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    )
    config = Qwen3_5Config(
        text_config={**SIZES, **FAMILIES["qwen3_5_text"]},
        vision_config=vision_config,
        **{name: 40 + index for index, name in enumerate(token_names)},
    )
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "whole")
    engine = Engine(tmp_path / "whole", device="cpu")
    assert "do not belong to its text model and are skipped" in caplog.text
    engine.save(tmp_path / "text")
    batch = global_batch(0)
    logits = engine.evaluate(batch, lambda output, _: output.logits())
    with torch.no_grad():
        for folder in ("whole", "text"):
            reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            assert torch.allclose(logits, separate_logits(reloaded, batch), atol=1e-4)


def test_the_trainer_trains_a_folder_built_by_transformers(tmp_path: Path) -> None:
    """It trains on raw text from the folder's weights, saves a tokenizer too, and resumes."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("\n\n".join(f"the cat {n} sat on the mat" for n in range(300)))
    hf_model("stablelm", vocab_size=320).save_pretrained(tmp_path / "begin")
    settings: dict[str, Any] = {
        "sequence_length": 32,
        "batch_size": 4,
        "vocab_size": 300,
        "device": "cpu",
        "progress": False,
    }
    first = DistributedTrainer(tmp_path / "begin", output_dir=tmp_path / "run", **settings)
    result = first.train(dataset_path=corpus, steps=3)
    assert result.model_folder is not None
    reloaded = AutoModelForCausalLM.from_pretrained(result.model_folder)
    assert type(reloaded).__name__ == "StableLmForCausalLM"
    assert len(AutoTokenizer.from_pretrained(result.model_folder)("the cat")["input_ids"]) > 1
    del settings["vocab_size"]  # refused, as the folder has a tokenizer
    second = DistributedTrainer(result.model_folder, output_dir=tmp_path / "more", **settings)
    second_result = second.train(dataset_path=tmp_path / "run" / "shards", steps=2)
    assert second_result.loss is not None
    assert result.loss is not None
    assert abs(second_result.loss - result.loss) < 0.5

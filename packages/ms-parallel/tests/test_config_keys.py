"""Every key of config.json is computed as transformers computes it, or refused by name."""

import json
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from ms_parallel import Engine
from ms_parallel.errors import ConfigError, ModelError, ParallelError
from ms_parallel.models import architecture, build_model
from ms_parallel.models.registry import from_document, read_config
from ms_parallel.models.tokenizer_files import read_tokenizer
from ms_parallel.weights import initialize, load_model, save_model

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

DENSE = [
    *("gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral"),
    *("olmo2", "phi3", "qwen2", "qwen3", "smollm3"),
]
ROUTED: dict[str, object] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 2,
    "topk_group": 1,
}
WITH_EXPERTS: dict[str, dict[str, object]] = {
    "deepseek_v3": {**ROUTED, **LATENT},
    "glm4_moe": ROUTED,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}
"""Small sizes of the families with experts."""
FAMILIES = [*DENSE, *WITH_EXPERTS]
MIN_COMPARED = 0.05
"""Minimum share of random settings that both sides compute."""
NO_WINDOW = ("deepseek_v3", "glm4", "glm4_moe", "granite", "llama", "olmo2", "olmoe")
SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FOREIGN = [
    "attention_bias",
    "attn_logit_softcapping",
    "embedding_multiplier",
    "head_dim",
    "is_causal",
    "layer_types",
    "mlp_bias",
    "never_heard_of",
    "num_experts",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "per_layer_config",
    "rope_interleaved",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
]
MIXED = ["sliding_attention", "full_attention"]
VALUES: list[object] = [
    None,
    False,
    True,
    0,
    1,
    2,
    3,
    8,
    0.5,
    1e-2,
    500.0,
    "silu",
    "gelu",
    "x",
    [],
    [1, 2],
    MIXED,
    ["full_attention"] * 2,
    {},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    {"rope_type": "yarn", "factor": 2.0},
    {"0": {"num_key_value_heads": 1}},
]
LAYER_TYPES = ("full_attention", "sliding_attention")
NULL_ACCEPTED = {
    ("mistral", "num_key_value_heads"),  # transformers before 5 read null as num_attention_heads
    *product(FAMILIES, ["use_cache", "attention_dropout"]),  # these do not affect logits
}
# Logits reach about 10 here, so one rounding is 1e-6; the two implementations differ by a few.
TOLERANCE = 1e-5


def base(family: str) -> dict[str, Any]:
    """Complete config.json of a small model of a family, as transformers writes it."""
    sizes = {k: v for k, v in SIZES.items() if k != "sliding_window" or family not in NO_WINDOW}
    sizes |= WITH_EXPERTS.get(family, {})
    if family in ("qwen2", "qwen3"):
        sizes |= {"use_sliding_window": True, "max_window_layers": 1}
    if family == "smollm3":
        sizes |= {"use_sliding_window": True}
    return dict(transformers.AutoConfig.for_model(family, **sizes).to_dict())


def keys(family: str) -> list[str]:
    """Keys of a family in transformers, and keys that it accepts from any file."""
    return sorted({*base(family), *FOREIGN} - {"model_type"})


def tokens() -> Tensor:
    """Rows longer than any sliding window here."""
    return torch.randint(48, (2, 20), generator=torch.Generator().manual_seed(1))


def hf_model(folder: Path) -> Any:
    """The transformers model of a folder's config.json, with random weights saved in the folder."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        # Some versions of transformers run Gemma 2 with an attention that ignores its soft cap.
        attention = "eager" if config.model_type == "gemma2" else None
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention
        ).eval()
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    if config.model_type in WITH_EXPERTS:  # saved files have separate tensors per expert
        model.save_pretrained(folder / "theirs")
        (folder / "theirs" / "model.safetensors").rename(folder / "model.safetensors")
        return model
    save_file(
        {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        folder / "model.safetensors",
    )
    return model


@torch.no_grad()
def check(family: str, key: str, value: object) -> str:
    """Check that logits agree or the key is refused, and that we refuse null where they do.

    Returns:
        "compared", "refused" (by ms-parallel) or "rejected" (by transformers, so not compared).
    """
    document = base(family) | {key: value}
    if key in ("rope_theta", "rope_scaling"):
        document.pop("rope_parameters", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(document))
        expected = None
        try:
            expected = hf_model(folder)(tokens(), return_dict=True).logits
        except Exception:  # transformers raises many types of errors
            if value is None and (family, key) not in NULL_ACCEPTED:
                with pytest.raises(ParallelError):
                    read_config(folder)
            return "rejected"
        try:
            ours = load_model(folder)(tokens())
        except ParallelError:
            return "refused"
    # Some keys make logits larger, and their rounding errors as well. Experts add about ten sums; a
    # norm after sums that nearly cancel keeps their full error.
    tolerance = 10 * TOLERANCE if family in WITH_EXPERTS else TOLERANCE
    atol = tolerance * max(1.0, expected.abs().max().item() / 10)
    torch.testing.assert_close(ours, expected, atol=atol, rtol=0)
    return "compared"


def test_a_random_key_and_value_computes_as_in_transformers_or_is_refused() -> None:
    """One key of one family has a random value; a minimum share is compared."""
    outcomes = Counter[str]()

    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def draw(data: st.DataObject) -> None:
        family = data.draw(st.sampled_from(FAMILIES))
        key = data.draw(st.sampled_from(keys(family)))
        outcomes[check(family, key, data.draw(st.sampled_from(VALUES)))] += 1

    draw()
    assert outcomes["compared"] >= MIN_COMPARED * outcomes.total(), outcomes


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_key_is_refused_by_name(family: str) -> None:
    """It might change the model's output; keys that do not are allowed."""
    document = base(family)
    from_document(document)
    with pytest.raises(ModelError, match="never_heard_of=1 is not supported"):
        from_document(document | {"never_heard_of": 1})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_and_value_computes_as_in_transformers_or_is_refused(family: str) -> None:
    """The full grid that the test above samples."""
    outcomes = Counter(check(family, key, value) for key, value in product(keys(family), VALUES))
    assert outcomes["compared"] >= MIN_COMPARED * outcomes.total(), outcomes


NULL_REFUSED = ("gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("family", NULL_REFUSED)
def test_null_key_value_heads_are_refused_where_transformers_refuses_them(family: str) -> None:
    """These families have no default."""
    with pytest.raises(ParallelError, match="num_key_value_heads must be an integer"):
        from_document(base(family) | {"num_key_value_heads": None})


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NULL_REFUSED])
def test_null_key_value_heads_mean_the_number_of_attention_heads(
    family: str, tmp_path: Path
) -> None:
    """The default is not 8 or 32."""
    document = base(family) | {"num_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(document))
    config: Any = read_config(tmp_path)
    assert config.num_key_value_heads == 4


@pytest.mark.parametrize("layers", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_sliding_layers_survive_a_saved_folder_or_are_refused(
    family: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    """If config.json has layer types, transformers computes the same from the saved folder."""
    document = {**base(family), "layer_types": [LAYER_TYPES[layer in layers] for layer in range(2)]}
    try:
        ours = build_model(from_document(document))
    except ParallelError:
        assert family in (*NO_WINDOW, "mixtral", "phi3", "qwen3_moe")
        return
    initialize(ours, seed=0)
    save_model(ours, tmp_path)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = reloaded(tokens()).logits
    torch.testing.assert_close(ours(tokens()), expected, atol=10 * TOLERANCE, rtol=0)
    assert load_model(tmp_path).config == ours.config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("setting", [{"sliding_window": 5}, {"sliding_layers": (1,)}])
def test_a_window_that_config_json_cannot_express_is_refused(
    family: str, setting: dict[str, Any], tmp_path: Path
) -> None:
    """Otherwise a save would lose it silently."""
    try:
        all_settings = {
            "num_hidden_layers": 2,
            "sliding_window": 5,
            "sliding_layers": None,
            **setting,
        }
        config: Any = architecture(family, all_settings)
    except ConfigError:
        assert family in (*NO_WINDOW, "mixtral", "phi3", "qwen3_moe")
        return
    document = config.family.write(config, torch.float32)
    reloaded: Any = from_document(json.loads(json.dumps(document)))
    assert [reloaded.window(layer) for layer in range(2)] == [
        config.window(layer) for layer in range(2)
    ]


@torch.no_grad()
def test_a_mistral_with_layer_types_has_windows_only_in_those_layers(tmp_path: Path) -> None:
    """Logits equal transformers', before and after we save the model."""
    document = base("mistral") | {"layer_types": MIXED}
    (tmp_path / "config.json").write_text(json.dumps(document))
    expected = hf_model(tmp_path)(tokens()).logits
    ours = load_model(tmp_path)
    torch.testing.assert_close(ours(tokens()), expected, atol=TOLERANCE, rtol=0)
    save_model(ours, tmp_path / "ours")
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(reloaded(tokens()).logits, expected)
    assert load_model(tmp_path / "ours").config == ours.config


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    """Its attention mask is not supported."""
    (tmp_path / "config.json").write_text(json.dumps(base("llama") | {"is_causal": False}))
    with pytest.raises(ModelError, match="is_causal=False is not supported; only True is"):
        read_config(tmp_path)


def test_a_tied_model_with_a_different_head_in_the_file_is_refused(tmp_path: Path) -> None:
    """Some readers would use the head, others the embedding; equal tensors are accepted."""
    document = base("llama") | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(document))
    weights = {n: p.detach().clone() for n, p in hf_model(tmp_path).named_parameters()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    load_model(tmp_path)
    weights["lm_head.weight"][3, 3] += 1e-3
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"'lm_head.weight' that differs .* set it to false"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_hidden_layers", 1 << 32), ("num_hidden_layers", 10**11), ("vocab_size", 10**38)],
)
def test_an_absurd_size_is_refused_before_allocation(name: str, value: int, tmp_path: Path) -> None:
    """The error names the limit, and nothing of that size is allocated."""
    (tmp_path / "config.json").write_text(json.dumps(base("qwen3") | {name: value}))
    with pytest.raises(ModelError, match=f"{name} must be at most .*, got"):
        read_config(tmp_path)


def test_a_model_larger_than_this_machine_is_refused_before_allocation() -> None:
    """Each size alone is valid; the error gives the memory that the model needs."""
    sizes = {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "num_hidden_layers": 2000}
    with pytest.raises(ConfigError, match=r"parameters needs .* GiB here in training"):
        Engine(architecture("llama", sizes), device="cpu")


def test_a_broken_transformers_installation_is_not_reported_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message quotes the import error; if transformers is absent, it says so."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers.models.auto.modeling_auto", None)
        with pytest.raises(ModelError, match=r"cannot be imported .*modeling_auto"):
            from_document({"model_type": "never-heard-of"})
    for name in [module for module in sys.modules if module.startswith("transformers.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match="all causal models of transformers if installed"):
        from_document({"model_type": "never-heard-of"})


@pytest.mark.parametrize("name", ["Transformer-XL", "transformer_xl", "TransformerXL"])
def test_architecture_names_ignore_case_hyphens_and_underscores(name: str) -> None:
    """Case, hyphens and underscores are ignored."""
    assert architecture(name) == architecture("transformer-xl")
    assert architecture("LLaMA") == architecture("llama")


def replace_by_damaged_file(folder: Path, damage: str, file: str) -> None:
    """Replace a file of a folder by a damaged one."""
    path = folder / file
    content = path.read_bytes() if path.exists() else b"{}"
    path.unlink(missing_ok=True)
    match damage:
        case "nested":
            path.write_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
        case "not UTF-8":
            path.write_bytes(b'{"\xff\xfe": 1}')
        case "cut":
            path.write_bytes(content[:-2])
        case "huge number":
            path.write_bytes(b'{"eos_token_id": ' + b"9" * 100_000 + b"}")
        case "circular link":
            path.symlink_to(file)
        case "folder":
            path.mkdir()
        case _:
            path.write_bytes(b"[1]")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "index", "tokenizer"])
@pytest.mark.parametrize(
    "damage", ["nested", "not UTF-8", "cut", "huge number", "circular link", "folder", "a list"]
)
def test_a_damaged_file_gives_a_one_line_error(damage: str, file: str, tmp_path: Path) -> None:
    """The message stays short, however long the file is."""
    model = build_model(architecture("llama", {"num_hidden_layers": 1}))
    save_model(model, tmp_path, file_size_bytes=1 << 20)
    names = {"index": "model.safetensors.index.json", "tokenizer": "tokenizer.json"}
    replace_by_damaged_file(tmp_path, damage, names.get(file, file))
    load: Any = read_tokenizer if file == "tokenizer" else load_model
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("name", ["a\0b", "x" * 1_000_000])
def test_an_impossible_path_gives_a_one_line_error(name: str) -> None:
    """As an architecture name and as a folder."""
    for load in (architecture, load_model):
        with pytest.raises(ParallelError) as caught:
            load(name)
        assert len(str(caught.value)) < 700


def test_an_index_with_an_impossible_file_name_is_refused(tmp_path: Path) -> None:
    """A NUL, or a name of a million characters."""
    save_model(
        build_model(architecture("llama", {"num_hidden_layers": 1})), tmp_path, file_size_bytes=1
    )
    path = tmp_path / "model.safetensors.index.json"
    for name in ("a\0.safetensors", "x" * 1_000_000 + ".safetensors"):
        document = json.loads(path.read_text())
        document["weight_map"]["model.norm.weight"] = name
        path.write_text(json.dumps(document))
        with pytest.raises(ModelError, match="not a safetensors file in the folder itself"):
            load_model(tmp_path)

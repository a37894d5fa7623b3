"""Every key of a config.json is computed as transformers computes it, or refused by name."""

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
"""Families with experts, and their small sizes."""
FAMILIES = [*DENSE, *WITH_EXPERTS]
LEAST_COMPARED = 0.05
"""Least share of drawn settings that both sides compute."""
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
KINDS = ("full_attention", "sliding_attention")
NULL_HERE_ALONE = {
    ("mistral", "num_key_value_heads"),  # transformers before 5 took it for as many as heads
    *product(FAMILIES, ["use_cache", "attention_dropout"]),  # no logits depend on them
}
# Logits reach about 10 here, so one rounding is 1e-6; transformers' and ours differ by a few.
TOLERANCE = 1e-5


def base(family: str) -> dict[str, Any]:
    """A whole config.json of a family, as transformers writes it, small."""
    sizes = {k: v for k, v in SIZES.items() if k != "sliding_window" or family not in NO_WINDOW}
    sizes |= WITH_EXPERTS.get(family, {})
    if family in ("qwen2", "qwen3"):
        sizes |= {"use_sliding_window": True, "max_window_layers": 1}
    if family == "smollm3":
        sizes |= {"use_sliding_window": True}
    return dict(transformers.AutoConfig.for_model(family, **sizes).to_dict())


def keys(family: str) -> list[str]:
    """The keys that transformers knows of a family, and some that it takes from any file."""
    return sorted({*base(family), *FOREIGN} - {"model_type"})


def tokens() -> Tensor:
    """A row longer than any window here."""
    return torch.randint(48, (2, 20), generator=torch.Generator().manual_seed(1))


def theirs(folder: Path) -> Any:
    """What transformers builds of a folder's config.json, with random weights, saved beside it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    if config.model_type in WITH_EXPERTS:  # in a folder each has tensors of its own
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
    """Logits agree, or the key is refused; where transformers refuses null, so do we.

    Returns:
        `compared`, `refused` (by ms-parallel) or `rejected` (by transformers, so not compared).
    """
    document = base(family) | {key: value}
    if key in ("rope_theta", "rope_scaling"):
        document.pop("rope_parameters", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(document))
        expected = None
        try:
            expected = theirs(folder)(tokens(), return_dict=True).logits
        except Exception:  # transformers refuses in many ways
            if value is None and (family, key) not in NULL_HERE_ALONE:
                with pytest.raises(ParallelError):
                    read_config(folder)
            return "rejected"
        try:
            ours = load_model(folder)(tokens())
        except ParallelError:
            return "refused"
    # Some keys make logits greater, and their roundings with them; experts add some ten more sums,
    # of which a norm behind them keeps the whole error where they nearly cancel.
    most = 10 * TOLERANCE if family in WITH_EXPERTS else TOLERANCE
    atol = most * max(1.0, expected.abs().max().item() / 10)
    torch.testing.assert_close(ours, expected, atol=atol, rtol=0)
    return "compared"


def test_a_key_away_from_its_default_computes_alike_or_is_refused() -> None:
    """One key of one family at a value drawn from many kinds; enough of them are compared."""
    ended = Counter[str]()

    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def draw(data: st.DataObject) -> None:
        family = data.draw(st.sampled_from(FAMILIES))
        key = data.draw(st.sampled_from(keys(family)))
        ended[check(family, key, data.draw(st.sampled_from(VALUES)))] += 1

    draw()
    assert ended["compared"] >= LEAST_COMPARED * ended.total(), ended


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_no_table_holds_is_refused_by_name(family: str) -> None:
    """It might change what the model computes; what changes nothing stays allowed."""
    document = base(family)
    from_document(document)
    with pytest.raises(ModelError, match="never_heard_of=1 is not supported"):
        from_document(document | {"never_heard_of": 1})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_at_every_kind_of_value_computes_alike_or_is_refused(family: str) -> None:
    """The whole grid of what the test above samples."""
    ended = Counter(check(family, key, value) for key, value in product(keys(family), VALUES))
    assert ended["compared"] >= LEAST_COMPARED * ended.total(), ended


NULL_REFUSED = ("gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("family", NULL_REFUSED)
def test_no_number_of_key_heads_is_refused_where_transformers_refuses_it(family: str) -> None:
    """Null is no number there."""
    with pytest.raises(ParallelError, match="num_key_value_heads must be an integer"):
        from_document(base(family) | {"num_key_value_heads": None})


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in NULL_REFUSED])
def test_as_many_key_heads_as_heads_is_what_null_means(family: str, tmp_path: Path) -> None:
    """`num_key_value_heads: null` is no default of eight or thirty-two."""
    document = base(family) | {"num_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(document))
    config: Any = read_config(tmp_path)
    assert config.num_key_value_heads == 4


@pytest.mark.parametrize("layers", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_layers_that_slide_survive_a_folder_or_are_refused(
    family: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    """Any of them, where config.json names layers; transformers then computes what we do."""
    given = {**base(family), "layer_types": [KINDS[layer in layers] for layer in range(2)]}
    try:
        ours = build_model(from_document(given))
    except ParallelError:
        assert family in (*NO_WINDOW, "mixtral", "phi3", "qwen3_moe")
        return
    initialize(ours, seed=0)
    save_model(ours, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = again(tokens()).logits
    torch.testing.assert_close(ours(tokens()), expected, atol=10 * TOLERANCE, rtol=0)
    assert load_model(tmp_path).config == ours.config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("setting", [{"sliding_window": 5}, {"sliding_layers": (1,)}])
def test_a_window_that_a_folder_cannot_hold_is_refused(
    family: str, setting: dict[str, Any], tmp_path: Path
) -> None:
    """It would be lost without a word when the model is saved."""
    try:
        given = {"num_hidden_layers": 2, "sliding_window": 5, "sliding_layers": None, **setting}
        config: Any = architecture(family, given)
    except ConfigError:
        assert family in (*NO_WINDOW, "mixtral", "phi3", "qwen3_moe")
        return
    document = config.family.write(config, torch.float32)
    again: Any = from_document(json.loads(json.dumps(document)))
    assert [again.window(layer) for layer in range(2)] == [config.window(i) for i in range(2)]


@torch.no_grad()
def test_a_mistral_with_layer_types_slides_in_those_layers_alone(tmp_path: Path) -> None:
    """Logits are those of transformers, also after we have saved the model."""
    document = base("mistral") | {"layer_types": MIXED}
    (tmp_path / "config.json").write_text(json.dumps(document))
    expected = theirs(tmp_path)(tokens()).logits
    ours = load_model(tmp_path)
    torch.testing.assert_close(ours(tokens()), expected, atol=TOLERANCE, rtol=0)
    save_model(ours, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(tokens()).logits, expected)
    assert load_model(tmp_path / "ours").config == ours.config


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    """Its logits would be those of another mask."""
    (tmp_path / "config.json").write_text(json.dumps(base("llama") | {"is_causal": False}))
    with pytest.raises(ModelError, match="is_causal=False is not supported; only True is"):
        read_config(tmp_path)


def test_a_tied_model_with_a_head_of_its_own_in_the_file_is_refused(tmp_path: Path) -> None:
    """A reader takes the file's head, others the embedding; equal ones are one weight."""
    document = base("llama") | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(document))
    weights = {n: p.detach().clone() for n, p in theirs(tmp_path).named_parameters()}
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
def test_a_size_beyond_reason_is_refused_at_once(name: str, value: int, tmp_path: Path) -> None:
    """The limit is named, before a list or a tensor of that size is made."""
    (tmp_path / "config.json").write_text(json.dumps(base("qwen3") | {name: value}))
    with pytest.raises(ModelError, match=f"{name} must be at most .*, got"):
        read_config(tmp_path)


def test_a_model_that_no_machine_holds_is_refused_before_memory_is_taken() -> None:
    """Each size alone is reasonable; in a moment, and with what it would need."""
    sizes = {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "num_hidden_layers": 2000}
    with pytest.raises(ConfigError, match=r"parameters needs .* GiB here in training"):
        Engine(architecture("llama", sizes), device="cpu")


def test_a_transformers_that_is_broken_is_not_called_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its import says stands in the line; where it is not installed, that is said."""
    with monkeypatch.context() as within:
        within.setitem(sys.modules, "transformers.models.auto.modeling_auto", None)
        with pytest.raises(ModelError, match=r"cannot be imported .*modeling_auto"):
            from_document({"model_type": "never-heard-of"})
    for name in [each for each in sys.modules if each.startswith("transformers.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match="all causal models of transformers if installed"):
        from_document({"model_type": "never-heard-of"})


@pytest.mark.parametrize("name", ["Transformer-XL", "transformer_xl", "TransformerXL"])
def test_an_architecture_is_known_by_its_name_in_any_spelling(name: str) -> None:
    """Case, hyphens and underscores do not count."""
    assert architecture(name) == architecture("transformer-xl")
    assert architecture("LLaMA") == architecture("llama")


def damaged(folder: Path, kind: str, file: str) -> None:
    """Make a file of a folder such as nobody saves."""
    path = folder / file
    good = path.read_bytes() if path.exists() else b"{}"
    path.unlink(missing_ok=True)
    match kind:
        case "nested":
            path.write_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
        case "no UTF-8":
            path.write_bytes(b'{"\xff\xfe": 1}')
        case "cut":
            path.write_bytes(good[:-2])
        case "huge number":
            path.write_bytes(b'{"eos_token_id": ' + b"9" * 100_000 + b"}")
        case "link in a circle":
            path.symlink_to(file)
        case "folder":
            path.mkdir()
        case _:
            path.write_bytes(b"[1]")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "index", "tokenizer"])
@pytest.mark.parametrize(
    "kind", ["nested", "no UTF-8", "cut", "huge number", "link in a circle", "folder", "a list"]
)
def test_a_damaged_file_is_one_line(kind: str, file: str, tmp_path: Path) -> None:
    """Whatever lies in place of a file that we read, and of whatever length."""
    model = build_model(architecture("llama", {"num_hidden_layers": 1}))
    save_model(model, tmp_path, file_size_bytes=1 << 20)
    names = {"index": "model.safetensors.index.json", "tokenizer": "tokenizer.json"}
    damaged(tmp_path, kind, names.get(file, file))
    read: Any = read_tokenizer if file == "tokenizer" else load_model
    with pytest.raises(ModelError) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("name", ["a\0b", "x" * 1_000_000])
def test_a_path_that_no_system_takes_is_one_line(name: str) -> None:
    """As the name of an architecture, and as a folder."""
    for read in (architecture, load_model):
        with pytest.raises(ParallelError) as caught:
            read(name)
        assert len(str(caught.value)) < 700


def test_an_index_that_names_a_file_of_no_system_is_refused(tmp_path: Path) -> None:
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

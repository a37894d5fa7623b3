"""LoRA adapters: results, peft's format in both directions, merging, and disabling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.errors import ConfigError, ModelError
from ms_align.lora.adapters import add_lora
from ms_align.lora.layers import LoraLinear
from ms_align.lora.loading import load_lora
from ms_align.lora.options import LoraOptions
from ms_align.losses.sft import SFTLoss
from ms_parallel import save_model

from .small_models import decoder, gpt2, llama

TOKENS = torch.arange(24).view(2, 12) % 257


def with_random_adapters(model: nn.Module, options: LoraOptions | None = None) -> nn.Module:
    """Return an adapted model whose adapters are not zero."""
    adapted = add_lora(model, options, base_name="base")
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in adapted.adapters().values():
            layer.lora_B.normal_(std=0.2)
    return adapted


def logits(model: nn.Module) -> torch.Tensor:
    """Return the logits of the test's tokens."""
    with torch.no_grad():
        out = model(TOKENS)
    return getattr(out, "logits", out)


@pytest.mark.parametrize("build", [decoder, llama])
def test_an_adapter_starts_at_zero_and_adds_a_low_rank_matrix(build: object) -> None:
    """B = 0 changes nothing; a nonzero B gives the layer the weight W + s·B·A."""
    model = build()  # type: ignore[operator]
    before = logits(model)
    adapted = add_lora(model, LoraOptions(rank=3, alpha=7, use_rslora=True))
    assert torch.equal(logits(adapted), before)
    adapted = with_random_adapters(build())  # type: ignore[operator]
    layer = next(iter(adapted.adapters().values()))
    assert isinstance(layer, LoraLinear)
    x = torch.randn(4, layer.in_features)
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), plain, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(adapted), before, atol=1e-3)


def test_disabling_merging_and_unmerging_are_exact() -> None:
    """Disabled: the base model bit for bit. Merged: the same logits. Unmerged: the same bits."""
    adapted = with_random_adapters(decoder())
    adapted_logits = logits(adapted)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), logits(decoder()))
    assert torch.equal(logits(adapted), adapted_logits)
    adapted.merge()
    # W + s·B·A rounds once more: a few parts in 1e6 of logits of size 10.
    torch.testing.assert_close(logits(adapted), adapted_logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ModelError, match="call unmerge"), adapted.disable_adapter():
        pass
    adapted.unmerge()
    assert torch.equal(logits(adapted), adapted_logits)
    plain = adapted.merged_model()
    assert not any(isinstance(module, LoraLinear) for module in plain.modules())
    torch.testing.assert_close(logits(plain), adapted_logits, rtol=1e-4, atol=1e-4)


def test_only_adapters_are_trained() -> None:
    """The engine's state holds only adapter weights, and the base weights do not change."""
    model = decoder()
    adapted = add_lora(model)
    before = {name: value.clone() for name, value in model.named_parameters()}
    engine = LocalEngine(adapted, OptimizerOptions(learning_rate=1e-2))
    batch = {"tokens": TOKENS, "targets": TOKENS.roll(-1, 1)}
    losses = [engine.step(batch, SFTLoss()).loss for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all("lora_" in name for name in engine.parameters)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) != ("lora_" in name)


def test_peft_reads_our_adapters(tmp_path: Path) -> None:
    """In peft, the transformers model with the same weights gives the same logits."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    save_model(decoder(), tmp_path / "base")  # type: ignore[arg-type]
    adapted = with_random_adapters(
        decoder(), LoraOptions(rank=4, alpha=9.0, target_modules=("q_proj", "down_proj"))
    )
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft_model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(peft_model), logits(adapted), rtol=1e-4, atol=1e-4)
    reloaded = load_lora(decoder(), tmp_path / "adapter")
    assert torch.equal(logits(reloaded), logits(adapted))


@pytest.mark.parametrize("use_rslora", [False, True])
def test_adapters_of_peft_are_read(tmp_path: Path, use_rslora: bool) -> None:
    """Into the transformers model and into our decoder with the same weights."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    save_model(decoder(), tmp_path / "base")  # type: ignore[arg-type]
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", use_rslora=use_rslora, task_type="CAUSAL_LM"
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft_model = peft.get_peft_model(base, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    peft_model.eval().save_pretrained(tmp_path / "adapter")
    expected = logits(peft_model)
    adapted = load_lora(decoder(), tmp_path / "adapter")
    torch.testing.assert_close(logits(adapted), expected, rtol=1e-4, atol=1e-4)
    reloaded_base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    torch.testing.assert_close(
        logits(load_lora(reloaded_base, tmp_path / "adapter")), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "must have .*lora_magnitude_vector of .*use_dora=True, got"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": "many"}, "as a LoRA configuration of peft"),
        ({"target_modules": ["q_proj"]}, "which target_modules excludes"),
        ({"target_modules": ["q_proj", "another"]}, "which target_modules excludes"),
        ({"r": 5}, r"must have the rank 5 of adapter_config.json, got shape"),
    ],
)
def test_an_adapter_that_does_not_match_is_rejected(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    """One line with the problem and the remedy."""
    with_random_adapters(decoder()).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelError, match=message):
        load_lora(decoder(), tmp_path)


def test_an_adapter_of_another_model_is_rejected(tmp_path: Path) -> None:
    """Extra layers, missing layers, or other shapes."""
    with_random_adapters(decoder()).save_pretrained(tmp_path)
    for sizes, message in (
        ({"num_hidden_layers": 1}, "the model has no linear layer"),
        ({"num_hidden_layers": 3}, "it lacks the adapter of"),
        ({"intermediate_size": 128}, "has shapes"),
    ):
        with pytest.raises(ModelError, match=message):
            load_lora(decoder(**sizes), tmp_path)


def test_layers_are_selected_by_name_expression_or_all() -> None:
    """GPT-2 has no nn.Linear layers, so adding LoRA to it is rejected."""
    assert len(add_lora(decoder(), LoraOptions(target_modules=("q_proj",))).adapters()) == 2
    assert (
        len(add_lora(decoder(), LoraOptions(target_modules=r".*layers\.1\..*proj")).adapters()) == 7
    )
    everything = add_lora(llama(), LoraOptions(target_modules="all-linear")).adapters()
    assert len(everything) == 14
    with pytest.raises(ConfigError, match=r"built from transformers' Conv1D"):
        add_lora(gpt2())
    with pytest.raises(ConfigError, match="already has adapters"):
        add_lora(add_lora(decoder()))


def peft_adapter(folder: Path, **settings: Any) -> torch.Tensor:
    """Write a base model and an adapter trained with peft; return the logits that peft loads."""
    import peft
    from transformers import AutoModelForCausalLM

    save_model(decoder(), folder / "base")  # type: ignore[arg-type]
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **settings},
        task_type="CAUSAL_LM",
    )
    peft_model = peft.get_peft_model(base, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    peft_model.eval().save_pretrained(folder / "adapter")
    reloaded = AutoModelForCausalLM.from_pretrained(folder / "base")
    return logits(peft.PeftModel.from_pretrained(reloaded, folder / "adapter").eval())


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize(
    "initialization", [True, False, "gaussian", "orthogonal", "mica", "eva", "pissa", "olora"]
)
def test_adapters_of_all_peft_initializations_give_the_same_logits(
    tmp_path: Path, initialization: bool | str, use_rslora: bool
) -> None:
    """PiSSA and OLoRA also change the base weights."""
    pytest.importorskip("peft")
    expected = peft_adapter(tmp_path, init_lora_weights=initialization, use_rslora=use_rslora)
    adapted = load_lora(decoder(), tmp_path / "adapter")
    # W - s·B₀·A₀ rounds once more in peft: a few parts in 1e6 of logits of size 10.
    torch.testing.assert_close(logits(adapted), expected, rtol=1e-4, atol=1e-4)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), logits(decoder()))
    adapted.save_pretrained(tmp_path / "again")
    again = load_lora(decoder(), tmp_path / "again")
    assert torch.equal(logits(again), logits(adapted))
    plain = adapted.merged_model()
    torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "lora_ga"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "another"},
        {"alora_invocation_tokens": [5, 6]},
        {"layers_to_transform": 0},
        {"exclude_modules": ["q_proj"]},
        {"target_parameters": ["w"]},
        {"layer_replication": [[0, 1]]},
        {"kasa_config": {"beta": 1.0}},
        {"trainable_token_indices": [1]},
        {"ensure_weight_tying": True},
        {"task_type": "SEQ_CLS"},
        {"a_key_of_next_year": 1},
    ],
)
def test_an_unsupported_peft_key_is_rejected_by_name(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """Any key that could change the logits but is not supported."""
    with_random_adapters(decoder()).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelError, match=f"{next(iter(change))}="):
        load_lora(decoder(), tmp_path)


def test_a_plain_peft_adapter_with_unused_configuration_tables_loads(tmp_path: Path) -> None:
    """Tables of other initializations and unknown keys with null values are ignored."""
    pytest.importorskip("peft")
    expected = peft_adapter(tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    unused = {"eva_config": {"rho": 2.0}, "corda_config": {"x": 1}, "a_key_of_next_year": None}
    path.write_text(json.dumps({**json.loads(path.read_text()), **unused}))
    actual = logits(load_lora(decoder(), tmp_path / "adapter"))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


HOSTILE = {
    "deep": b'{"r": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no utf-8": b'{"r": 8, "lora_alpha": 16, "target_modules": ["\xff\xfe"]}',
    "surrogate": b'{"r": 8, "lora_alpha": 16, "target_modules": ["\\ud800"]}',
    "huge rank": b'{"r": 1000000000, "lora_alpha": 16, "target_modules": ["q_proj"]}',
    "huge number": b'{"r": 8, "lora_alpha": 1e999, "target_modules": ["q_proj"]}',
    "huge integer": b'{"r": 1' + b"0" * 5000 + b', "lora_alpha": 1, "target_modules": []}',
    "no object": b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_damaged_adapter_configuration_is_rejected_in_one_line(
    tmp_path: Path, content: bytes
) -> None:
    """Before memory is allocated for its values."""
    with_random_adapters(decoder()).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(ModelError) as error:
        load_lora(decoder(), tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_rank_beyond_every_layer_is_rejected_before_allocation() -> None:
    """10⁹ rows for a matrix of 32 rows would take 128 GB."""
    with pytest.raises(ConfigError, match=r"rank must be at most 32, .*got 1000000000"):
        add_lora(decoder(), LoraOptions(rank=10**9, target_modules=("q_proj",)))

"""A model folder has the end-of-text tokens, and generation stops at them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from launching import MODEL, RUN

from ms_parallel import (
    DistributedTrainer,
    Engine,
    ModelError,
    NonFiniteError,
    load_model,
)
from ms_parallel.cluster import error_report as exits
from ms_parallel.models import StagedModel, architecture, build_model
from ms_parallel.training.tokenizer import run_tokenizer, with_ends
from ms_parallel.weights import initialize, save_model

transformers.utils.logging.set_verbosity_error()

SIZES = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def tokenizer_file(folder: Path, *special: str) -> Path:
    """A tokenizer of all bytes followed by some special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def ends_after(count: int, end: int, name: str = "llama") -> StagedModel:
    """A model that generates tokens 0, 1, 2, ..., and `end` after token `count`."""
    config = architecture(name, {**SIZES, "hidden_size": 320, "intermediate_size": 16})
    model = build_model(config)
    initialize(model, 0)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():  # type: ignore[union-attr]
            parameter.zero_()
        embed, head = model.get_parameter("model.embed_tokens.weight"), model.head_weight
        embed.copy_(torch.eye(300, 320))
        head.zero_()
        for token in range(count):
            head[token + 1, token] = 9.0
        head[end, count] = 9.0
    return model


def test_generation_from_a_saved_folder_stops_at_its_end_token(tmp_path: Path) -> None:
    """Greedy generation stops at the tokenizer's end token, long before the limit."""
    tokenizer_path = tokenizer_file(tmp_path / "made", "<pad>", "<|endoftext|>")
    save_model(ends_after(5, 257), tmp_path / "model", tokenizer=tokenizer_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 257)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<pad>", 256)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    generated = hf_model.generate(torch.tensor([[2]]), max_new_tokens=50, do_sample=False)
    assert generated.tolist() == [[2, 3, 4, 5, 257]]
    engine = Engine(tmp_path / "model", device="cpu")
    assert engine.generate([[2]], max_new_tokens=50, temperature=0.0) == [[3, 4, 5, 257]]
    unstopped = engine.generate([[2]], max_new_tokens=9, temperature=0.0, stop_token=None)
    assert len(unstopped[0]) == 9
    assert engine.generate([[2]], max_new_tokens=9, temperature=0.0, stop_token={4}) == [[3, 4]]
    config = load_model(tmp_path / "model").config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (257, 257, 256)


def test_generation_config_takes_precedence_for_end_tokens(tmp_path: Path) -> None:
    """As in transformers; chat models have more end tokens there than in config.json."""
    save_model(
        ends_after(5, 257),
        tmp_path,
        tokenizer=tokenizer_file(tmp_path / "made", "<|x|>", "<|endoftext|>"),
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 4]}')
    assert load_model(tmp_path).config.eos_token_id == (256, 4)
    engine = Engine(tmp_path, device="cpu")
    assert engine.generate([[2]], max_new_tokens=50, temperature=0.0) == [[3, 4]]


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """Its end token exceeds the vocabulary."""
    tokenizer_path = tokenizer_file(
        tmp_path / "made", *(f"<{i}>" for i in range(60)), "<|endoftext|>"
    )
    with pytest.raises(
        ModelError, match=r"token_id of the tokenizer must be below .* of 300, got 316"
    ):
        save_model(ends_after(5, 257), tmp_path / "model", tokenizer=tokenizer_path)


def test_a_trained_model_has_the_tokenizers_end_token(corpus: Path, tmp_path: Path) -> None:
    """`model/` has the ids of the tokenizer of the shards and is self-contained."""
    defaults = {name: value for name, value in RUN.items() if name != "steps"}
    run = DistributedTrainer(**{**defaults, "model_config": MODEL, "output_dir": tmp_path})
    folder = run.train(corpus, steps=1).model_folder
    assert folder is not None
    end = json.loads((tmp_path / "shards/index.json").read_text())["end_of_text"]
    for name in ("config.json", "generation_config.json"):
        document = json.loads((folder / name).read_text())
        ids = [document[f"{role}_token_id"] for role in ("bos", "eos", "pad")]
        assert ids == [end] * 3
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", end)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert hf_model.generation_config.eos_token_id == end
    assert "do_sample" not in json.loads((folder / "generation_config.json").read_text())


def test_with_another_tokenizer_only_the_shards_end_token_is_used(tmp_path: Path) -> None:
    """Its ids are not valid there; with the same tokenizer they and its template stay."""
    shards, folder = tmp_path / "shards", tmp_path / "folder"
    tokenizer_file(shards, "<|im_end|>", "<|endoftext|>")
    (shards / "index.json").write_text('{"end_of_text": 257}')
    tokenizer_file(folder, "<|im_end|>", "<|endoftext|>")
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config: Any = architecture("llama", SIZES | {"eos_token_id": 2})
    assert with_ends(config, shards, folder).eos_token_id == (257, 256, 2)
    tokenizer_config = json.loads(run_tokenizer(shards, folder).files["tokenizer_config.json"])
    assert (tokenizer_config["eos_token"], tokenizer_config["chat_template"]) == (
        "<|im_end|>",
        TEMPLATE,
    )
    tokenizer_file(folder, "<other>", "<|endoftext|>")
    (folder / "tokenizer_config.json").unlink()
    assert with_ends(config, shards, folder).eos_token_id == 257
    assert with_ends(config, shards, None).eos_token_id == 257


def test_the_tokenizer_of_a_transformer_xl_folder_loads(tmp_path: Path) -> None:
    """Its model does not load, as transformers has dropped that architecture."""
    model = build_model(architecture("transformer-xl", SIZES))
    initialize(model, 0)
    tokenizer_path = tokenizer_file(tmp_path / "made", "<|endoftext|>")
    save_model(model, tmp_path / "model", tokenizer=tokenizer_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.eos_token_id == 256
    assert load_model(tmp_path / "model").config.eos_token_id == 256


def test_nonfinite_weights_are_neither_saved_nor_loaded(tmp_path: Path) -> None:
    """A NaN in a row that no batch reads is named, and the folder is unchanged."""
    model = ends_after(5, 257)
    save_model(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    weight = model.get_parameter("model.embed_tokens.weight")
    with torch.no_grad():
        weight[299, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"'model.embed_tokens.weight' has a NaN"):
        save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    with torch.no_grad():
        weight[299, 0] = 1e5
    with pytest.raises(NonFiniteError, match=r"'model.embed_tokens.weight' has a NaN"):
        save_model(model, tmp_path, dtype=torch.float16)  # out of range

    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][7, 7] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has 'lm_head.weight' with a NaN or an infinity"):
        Engine(tmp_path, device="cpu")


def test_a_run_with_nonfinite_weights_exits_1(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 for a NaN that appears during training in a row that nothing reads."""
    defaults = {name: value for name, value in RUN.items() if name != "steps"}
    settings = {**defaults, "model_config": {**MODEL, "vocab_size": 4096}, "output_dir": tmp_path}
    run = DistributedTrainer(**settings, on_event=lambda event, fields: spoil(event))

    @torch.no_grad()
    def spoil(event: str) -> None:
        if event == "step" and run._run is not None:
            run._run.engine.parameters["model.embed_tokens.weight"][4095, 0] = torch.nan

    with pytest.raises(NonFiniteError) as caught:
        run.train(corpus, steps=2)
    assert exits.report_error(caught.value) == 1
    assert "'model.embed_tokens.weight' has a NaN" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()

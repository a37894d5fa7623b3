"""A model's folder says where texts end, and whoever opens it ends them there."""

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
from ms_parallel.cluster import endings as exits
from ms_parallel.models import StagedModel, architecture, build_model
from ms_parallel.training.tokenizer import run_tokenizer, with_ends
from ms_parallel.weights import initialize, save_model

transformers.utils.logging.set_verbosity_error()

SIZES = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def tokenizer_file(folder: Path, *special: str) -> Path:
    """A tokenizer of all bytes and some special tokens after them."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(special))
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def ends_after(count: int, end: int, name: str = "llama") -> StagedModel:
    """A model that says tokens 0, 1, 2, ... after one another, and `end` after token `count`."""
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


def test_a_saved_folder_ends_texts_in_transformers_and_here(tmp_path: Path) -> None:
    """Greedy text stops at the tokenizer's end, long before its limit."""
    made = tokenizer_file(tmp_path / "made", "<pad>", "<|endoftext|>")
    save_model(ends_after(5, 257), tmp_path / "model", tokenizer=made)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 257)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<pad>", 256)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    written = theirs.generate(torch.tensor([[2]]), max_new_tokens=50, do_sample=False)
    assert written.tolist() == [[2, 3, 4, 5, 257]]
    engine = Engine(tmp_path / "model", device="cpu")
    assert engine.generate([[2]], max_new_tokens=50, temperature=0.0) == [[3, 4, 5, 257]]
    on = engine.generate([[2]], max_new_tokens=9, temperature=0.0, stop_token=None)
    assert len(on[0]) == 9
    assert engine.generate([[2]], max_new_tokens=9, temperature=0.0, stop_token={4}) == [[3, 4]]
    again = load_model(tmp_path / "model").config
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id) == (257, 257, 256)


def test_generation_config_says_first_what_ends_a_text(tmp_path: Path) -> None:
    """As transformers asks it, where a chat model has more ends than config.json tells."""
    save_model(
        ends_after(5, 257),
        tmp_path,
        tokenizer=tokenizer_file(tmp_path / "made", "<|x|>", "<|endoftext|>"),
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 4]}')
    assert load_model(tmp_path).config.eos_token_id == (256, 4)
    engine = Engine(tmp_path, device="cpu")
    assert engine.generate([[2]], max_new_tokens=50, temperature=0.0) == [[3, 4]]


def test_a_tokenizer_that_the_model_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Its end is beyond the vocabulary."""
    made = tokenizer_file(tmp_path / "made", *(f"<{i}>" for i in range(60)), "<|endoftext|>")
    with pytest.raises(
        ModelError, match=r"token_id of the tokenizer must be below .* of 300, got 316"
    ):
        save_model(ends_after(5, 257), tmp_path / "model", tokenizer=made)


def test_a_trained_model_ends_its_texts(corpus: Path, tmp_path: Path) -> None:
    """`model/` holds the ids of the tokenizer that built the shards, and opens by itself."""
    kept = {name: value for name, value in RUN.items() if name != "steps"}
    run = DistributedTrainer(**{**kept, "model_config": MODEL, "output_dir": tmp_path})
    folder = run.train(corpus, steps=1).model_folder
    assert folder is not None
    end = json.loads((tmp_path / "shards/index.json").read_text())["end_of_text"]
    for name in ("config.json", "generation_config.json"):
        document = json.loads((folder / name).read_text())
        ids = [document[f"{what}_token_id"] for what in ("bos", "eos", "pad")]
        assert ids == [end] * 3
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", end)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.generation_config.eos_token_id == end
    assert "do_sample" not in json.loads((folder / "generation_config.json").read_text())


def test_a_folder_of_another_tokenizer_gives_the_shards_end_alone(tmp_path: Path) -> None:
    """Its ids mean nothing there; with the same tokenizer they stay, and so does its template."""
    shards, folder = tmp_path / "shards", tmp_path / "folder"
    tokenizer_file(shards, "<|im_end|>", "<|endoftext|>")
    (shards / "index.json").write_text('{"end_of_text": 257}')
    tokenizer_file(folder, "<|im_end|>", "<|endoftext|>")
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config: Any = architecture("llama", SIZES | {"eos_token_id": 2})
    assert with_ends(config, shards, folder).eos_token_id == (257, 256, 2)
    kept = json.loads(run_tokenizer(shards, folder).files["tokenizer_config.json"])
    assert (kept["eos_token"], kept["chat_template"]) == ("<|im_end|>", TEMPLATE)
    tokenizer_file(folder, "<other>", "<|endoftext|>")
    (folder / "tokenizer_config.json").unlink()
    assert with_ends(config, shards, folder).eos_token_id == 257
    assert with_ends(config, shards, None).eos_token_id == 257


def test_the_folder_of_a_transformer_xl_opens_its_tokenizer(tmp_path: Path) -> None:
    """Its model does not open in transformers, which has dropped that architecture."""
    model = build_model(architecture("transformer-xl", SIZES))
    initialize(model, 0)
    made = tokenizer_file(tmp_path / "made", "<|endoftext|>")
    save_model(model, tmp_path / "model", tokenizer=made)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.eos_token_id == 256
    assert load_model(tmp_path / "model").config.eos_token_id == 256


def test_weights_that_are_not_finite_are_neither_saved_nor_read(tmp_path: Path) -> None:
    """A NaN in a row that no batch reads is named, and the folder keeps what it held."""
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
        save_model(model, tmp_path, dtype=torch.float16)  # beyond its range

    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][7, 7] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has 'lm_head.weight' with a NaN or an infinity"):
        Engine(tmp_path, device="cpu")


def test_a_run_whose_weights_go_wrong_ends_with_one(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A NaN that comes on the way, in a row that nothing reads, is told by name."""
    kept = {name: value for name, value in RUN.items() if name != "steps"}
    settings = {**kept, "model_config": {**MODEL, "vocab_size": 4096}, "output_dir": tmp_path}
    run = DistributedTrainer(**settings, on_event=lambda kind, fields: spoil(kind))

    @torch.no_grad()
    def spoil(kind: str) -> None:
        if kind == "step" and run._run is not None:
            run._run.engine.parameters["model.embed_tokens.weight"][4095, 0] = torch.nan

    with pytest.raises(NonFiniteError) as caught:
        run.train(corpus, steps=2)
    assert exits.report_error(caught.value) == 1
    assert "'model.embed_tokens.weight' has a NaN" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()

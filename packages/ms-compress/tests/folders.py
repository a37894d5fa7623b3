"""A small plain model and a small text, as folders that commands read."""

import json
from pathlib import Path

from models import decoder, tokens

import ms_data
from ms_parallel.models import Decoder, DecoderConfig
from ms_parallel.weights import initialize, save_model

VOCABULARY = 288


def model(seed: int = 0, *, layers: int = 2) -> Decoder:
    """Return an ms-parallel model with a vocabulary for any bytes."""
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = Decoder(config)
    initialize(model, seed)
    return model


def write_model(folder: Path, seed: int = 0, *, layers: int = 2) -> Path:
    """Write a plain folder with config.json and safetensors."""
    save_model(model(seed, layers=layers), folder)
    return folder


def write_shards(folder: Path) -> Path:
    """Write shards of counting sentences, with a fifth of the documents held out."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for i in range(40):
        line = f"the number {i} comes after {i - 1} and before {i + 1}. "
        (texts / f"{i}.txt").write_text(line * 20)
    tokenizer = folder / "tokenizer.json"
    ms_data.train_tokenizer(texts, vocab_size=VOCABULARY, out=tokenizer)
    ms_data.build(texts, tokenizer=tokenizer, out=folder / "shards", held_out_fraction=0.2)
    return folder / "shards"


def write_run(folder: Path) -> Path:
    """Write a saved model, tokens, and a run file for both."""
    save_model(decoder(), folder / "model")
    (folder / "tokens.json").write_text(json.dumps(tokens(16, 33).tolist()))
    file = folder / "run.toml"
    file.write_text(
        f'model = "{folder}/model"\noutput_dir = "{folder}/out"\n'
        f'dataset = "{folder}/tokens.json"\nrows = 16\n'
        "[tuning]\nsteps = 3\nbatch_size = 4\nsequence_length = 32\n"
    )
    return file

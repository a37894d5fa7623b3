"""Model folders as vLLM reloads them."""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from ms_align.errors import ModelError
from ms_align.files.durable import write_file
from ms_align.files.tokenizer_source import json_text
from ms_align.files.untrusted import read_json

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SINGLE_FILE = "model.safetensors"
FIRST_FILE, HEAD_FILE = "model-00001-of-00002.safetensors", "lm_head.safetensors"
INDEX = "model.safetensors.index.json"


def untie_head(folder: Path) -> None:
    """Store the head of a model with tied embeddings as a second matrix.

    On a CPU, vLLM 0.32 keeps a packed copy of a tied head, and `reload_weights` only updates it if
    the folder has a matrix for it. Models that name their embeddings in another way are left
    unchanged.
    """
    config = read_json(folder / "config.json", dict[str, Any], error=ModelError)
    if not config.get("tie_word_embeddings"):
        return
    weight_map: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weight_map |= dict.fromkeys(file.keys(), path.name)
    if EMBEDDING not in weight_map or HEAD in weight_map:
        return
    with safe_open(folder / weight_map[EMBEDDING], framework="pt") as file:
        save_file({HEAD: file.get_tensor(EMBEDDING)}, folder / HEAD_FILE, metadata={"format": "pt"})
    if (folder / SINGLE_FILE).exists():  # under this name, loaders would ignore the index
        (folder / SINGLE_FILE).rename(folder / FIRST_FILE)
        weight_map = dict.fromkeys(weight_map, FIRST_FILE)
    index = {"metadata": {}, "weight_map": {**weight_map, HEAD: HEAD_FILE}}
    write_file(folder / INDEX, json_text(index))
    config["tie_word_embeddings"] = False
    write_file(folder / "config.json", json_text(config))

"""The tokenizer beside a model: its files, and the ids with which texts begin, end and are padded.

Readers of a model's folder stop at the `eos_token_id` that they find there. Where nobody writes it,
a trained model's text goes on to the limit, through one end of a document after another.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from attrs import frozen

from ms_parallel.errors import ModelError
from ms_parallel.files.untrusted import check_path, decode_json, read_bytes, read_json

__all__ = ["TOKENIZER", "TokenizerFiles", "read_tokenizer"]

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SHARDS = "index.json"
"""Which lies in a folder of shards alone, and says which token ends a document."""

_USUAL: Mapping[str, tuple[str, ...]] = {
    "eos_token": (
        "<|endoftext|>",
        "<|end_of_text|>",
        "</s>",
        "<eos>",
        "<|im_end|>",
        "<|eot_id|>",
        "[SEP]",
    ),
    "bos_token": ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[CLS]"),
    "pad_token": ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"),
}
"""Names that published tokenizers give to these tokens, most telling first."""


@frozen(kw_only=True)
class TokenizerFiles:
    """What goes beside a model's weights so that its folder reads and ends texts alone."""

    files: Mapping[str, bytes]
    """Content by name."""
    end_token_ids: tuple[int, ...]
    """Any of them ends a text; empty where the tokenizer has none that is known."""
    begin_token_id: int | None
    pad_token_id: int | None

    @property
    def eos_token_id(self) -> int | tuple[int, ...] | None:
        """The ids that end a text as config.json spells them."""
        return self.end_token_ids[0] if len(self.end_token_ids) == 1 else self.end_token_ids or None


def read_tokenizer(source: str | Path, *, end_of_text: int | None = None) -> TokenizerFiles:
    """The tokenizer of a folder of shards, of a model's folder, or of a `tokenizer.json`.

    Args:
        source: the folder or file. What a `tokenizer_config.json` there says is kept.
        end_of_text: the id that ended each document in training, if it is known; a folder of
            shards says it itself.

    Raises:
        ModelError: a file is missing or damaged, or a special token is not in the vocabulary.
    """
    check_path("tokenizer", source, error=ModelError)
    path = Path(source)
    folder = path if os.path.isdir(path) else path.parent
    content = read_bytes(folder / TOKENIZER if folder == path else path, error=ModelError)
    document = decode_json(content, dict[str, Any], where=path, error=ModelError)
    if end_of_text is None and folder == path:
        end_of_text = _end_of_shards(folder)
    settings = _settings(folder)
    ids = _ids_by_token(document, path)
    tokens = {i: token for token, i in ids.items()}
    named = {name: _special(name, settings, ids, path) for name in _USUAL}
    if end_of_text is not None and end_of_text not in tokens:
        raise ModelError(
            f"{path}: has no token {end_of_text}, which ends the documents of its shards"
        )
    ends = dict.fromkeys(i for i in (end_of_text, named["eos_token"]) if i is not None)
    # A text begins where the one before ended, as documents lie in shards; pads are never read.
    first = next(iter(ends), None)
    begin, pad = (first if named[n] is None else named[n] for n in ("bos_token", "pad_token"))
    for name, token_id in (("eos_token", first), ("bos_token", begin), ("pad_token", pad)):
        if token_id is not None and settings.get(name) is None:
            settings[name] = tokens[token_id]
    files = {TOKENIZER: content, CONFIG: _text(settings)}
    if os.path.isfile(folder / TEMPLATE):
        files[TEMPLATE] = read_bytes(folder / TEMPLATE, error=ModelError)
    return TokenizerFiles(
        files=files, end_token_ids=tuple(ends), begin_token_id=begin, pad_token_id=pad
    )


def _settings(folder: Path) -> dict[str, Any]:
    """The tokenizer_config.json of a folder, or a new one."""
    settings: dict[str, Any] = {}
    if os.path.isfile(folder / CONFIG):
        settings = read_json(folder / CONFIG, dict[str, Any], error=ModelError)
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    # Else readers take a space before punctuation for one that the tokenizer put there.
    settings.setdefault("clean_up_tokenization_spaces", False)
    return settings


def _end_of_shards(folder: Path) -> int | None:
    if not os.path.isfile(folder / SHARDS):
        return None
    end = read_json(folder / SHARDS, dict[str, Any], error=ModelError).get("end_of_text")
    return end if type(end) is int else None


def _ids_by_token(document: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The vocabulary; added tokens, among them the special ones, go before those of the model."""
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram's: pairs of a token and its score
        vocabulary = {pair[0]: i for i, pair in enumerate(vocabulary) if isinstance(pair, list)}
    added = document.get("added_tokens") or []
    try:
        ids = {**(vocabulary or {}), **{token["content"]: token["id"] for token in added}}
    except (TypeError, KeyError) as error:
        raise ModelError(f"{path}: is no tokenizer; give a tokenizer.json") from error
    if not ids or any(type(i) is not int for i in ids.values()):
        raise ModelError(f"{path}: is no tokenizer; give a tokenizer.json")
    return ids


def _special(
    name: str, settings: Mapping[str, Any], ids: Mapping[str, int], path: Path
) -> int | None:
    """The id of a special token: as tokenizer_config.json says, or by a usual name."""
    said = settings.get(name)
    token = said.get("content") if isinstance(said, dict) else said
    if token is None:
        return next((ids[usual] for usual in _USUAL[name] if usual in ids), None)
    if not isinstance(token, str) or token not in ids:
        raise ModelError(f"{path}: has no token {str(token)[:60]!r}, its {name}; mend {CONFIG}")
    return ids[token]


def _text(document: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"

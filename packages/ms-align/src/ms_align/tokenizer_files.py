"""Tokenizer files of a model folder, including its end-of-text tokens.

transformers reads the end of a text from three files: `eos_token` in tokenizer_config.json,
`eos_token_id` in config.json, and `eos_token_id` in generation_config.json, which `generate` uses.
All three are written consistently.
"""

import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
from attrs import evolve, field, frozen

from ms_align.errors import DataError, ModelError
from ms_align.files.durable import write_file
from ms_align.files.tokenizer_source import (
    DEFAULT,
    KNOWN_ENDS,
    ROLES,
    SETTINGS,
    TEMPLATE,
    TOKENIZER,
    decode_source,
    end_of_documents,
    json_text,
    read_optional_json,
    read_templates,
    source_difference,
    template_files,
    token_text,
)
from ms_align.files.untrusted import decode_json, decoding, read_bytes, read_json
from ms_align.settings import short_repr
from ms_align.tokenizer import ByteTokenizer, HuggingFaceTokenizer

COPIED = (
    TOKENIZER,
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
"""Files of transformers tokenizers that are copied unchanged; tokenizer_config.json and
chat_template.jinja are rewritten."""
PAD = "<|pad|>"
GENERATION = "generation_config.json"
LICENSES = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY|COPYING)([-_.].*)?", re.IGNORECASE)
"""License files of a base model, copied to models trained from it."""


@frozen(kw_only=True)
class TokenizerFiles:
    """Tokenizer files to write with a model."""

    files: Mapping[str, bytes]
    """Contents of files to copy unchanged, by name."""
    config: Mapping[str, Any] = field(factory=dict)
    """Original tokenizer_config.json."""
    chat_template: str | None = None
    ids: Mapping[str, int] = field(factory=dict)
    """Ids of the added tokens by text."""
    roles: Mapping[str, str] = field(factory=dict)
    """Texts of `bos_token`, `eos_token` and `pad_token`, where defined."""
    size: int = 0
    """Largest token id plus 1; 0 if unknown."""
    ends: tuple[int, ...] = ()
    """Tokens that end a text or a turn; the first is `eos_token`."""

    def id_of(self, role: str) -> int | None:
        """Return the id of a special token, such as `eos_token`."""
        return self.ids.get(self.roles.get(role, ""))

    def with_ends(self, tokens: Collection[int]) -> "TokenizerFiles":
        """Return a copy with the added tokens among `tokens` as further end-of-text tokens."""
        added = [token for token in self.ids.values() if token in tokens]
        return evolve(self, ends=tuple(dict.fromkeys([*self.ends, *added])))

    def with_pad_token(self, token_id: int) -> "TokenizerFiles":
        """Return a copy that pads with `token_id`, added to the tokenizer if it is missing."""
        if token_id in self.ids.values():
            return self
        document = decode_json(
            self.files[TOKENIZER], dict[str, Any], where=TOKENIZER, error=DataError
        )
        document["added_tokens"] = [
            *document.get("added_tokens", []),
            _special_token(token_id, PAD),
        ]
        return evolve(
            self,
            files={**self.files, TOKENIZER: msgspec.json.encode(document)},
            ids={**self.ids, PAD: token_id},
            roles={**self.roles, "pad_token": PAD},
            size=token_id + 1,
        )

    def contents(self) -> dict[str, bytes]:
        """Return the contents of all files to write, by name."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.config,
            **self.roles,
        }
        if "eos_token" in self.roles:
            config.setdefault("pad_token", self.roles["eos_token"])
        files = dict(self.files)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
            files[TEMPLATE] = self.chat_template.encode()
        return {**files, SETTINGS: json_text(config)}


def merge_tokenizers(
    base: TokenizerFiles | None, data: TokenizerFiles | None
) -> TokenizerFiles | None:
    """Combine the base model's tokenizer with the dataset's tokenizer, for saving.

    Files and settings of the base (padding side, model_max_length, ...) are kept. The dataset adds
    its chat template, missing tokens and the special tokens named in its settings.
    """
    if base is None or data is None:
        return data if base is None else base
    # The base's tokenizer.json is replaced only if the data has tokens that it lacks.
    adds_tokens = bool(data.ids.keys() - base.ids.keys())
    dataset_roles = {role: data.roles[role] for role in ROLES if data.config.get(role) is not None}
    config = {**data.config, **base.config}  # the base's settings take precedence
    base_decoder, data_decoder = (
        settings.get("added_tokens_decoder") for settings in (base.config, data.config)
    )
    if isinstance(base_decoder, dict) and isinstance(data_decoder, dict):
        config["added_tokens_decoder"] = {**base_decoder, **data_decoder}
    return evolve(
        base,
        files={**base.files, **({TOKENIZER: data.files[TOKENIZER]} if adds_tokens else {})},
        config=config,
        chat_template=base.chat_template if data.chat_template is None else data.chat_template,
        ids={**base.ids, **data.ids},
        roles={**data.roles, **base.roles, **dataset_roles},
        size=max(base.size, data.size),
        ends=tuple(dict.fromkeys((*base.ends, *data.ends))),
    )


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder contains tokenizer files of any kind."""
    with decoding(folder, error=DataError):
        return any((folder / name).is_file() for name in (TOKENIZER, "tokenizer.model", SETTINGS))


def files_of(source: Any, tokenizer: Any = None) -> TokenizerFiles | None:
    """Collect the files of a tokenizer or of a model folder; None if it has none.

    Args:
        source: a folder, or a tokenizer of ms-align, ms-data, transformers or any other type.
        tokenizer: tokenizer to use if `source` is not a folder.

    Raises:
        DataError: the files cannot be read.
    """
    if isinstance(source, str | Path) and has_tokenizer(Path(source)):
        return _read(Path(source))
    tokenizer = source if tokenizer is None else tokenizer
    if isinstance(tokenizer, ByteTokenizer):
        return _from_json(_byte_tokenizer(), end_of_text=tokenizer.end_of_text)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer = tokenizer.tokenizer
    if hasattr(tokenizer, "save_pretrained"):
        return _from_transformers(tokenizer)
    content = getattr(tokenizer, "content", None)
    if not isinstance(content, bytes):
        return None
    folder = getattr(tokenizer, "folder", None)
    files = _from_json(content, end_of_text=getattr(tokenizer, "end_of_text", None))
    folder_files = None if folder is None else _read(Path(folder))
    return (
        files if folder_files is None else evolve(files, chat_template=folder_files.chat_template)
    )


def check_same_tokenizer(
    files: TokenizerFiles | None,
    name: str,
    other: TokenizerFiles | None,
    other_name: str,
    *,
    remedy: str,
) -> None:
    """Check that two tokenizers have the same token ids; see `tokenizer_difference`.

    Args:
        files: first tokenizer. The check passes if either is None or lacks a tokenizer.json.
        name: its name in the message.
        other: second tokenizer.
        other_name: its name in the message.
        remedy: end of the message, such as "build the data with the model's tokenizer".

    Raises:
        ModelError: they differ.
        DataError: a tokenizer.json is damaged.
    """
    contents = [
        tokenizer.files.get(TOKENIZER) for tokenizer in (files, other) if tokenizer is not None
    ]
    if len(contents) < 2 or None in contents or contents[0] == contents[1]:
        return
    first, second = (
        decode_source(content or b"", Path(where, TOKENIZER), error=DataError)
        for content, where in zip(contents, (name, other_name), strict=True)
    )
    difference = source_difference(first, second, names=(name, other_name))
    if difference is not None:
        raise ModelError(
            f"{name} and {other_name} must have the same tokenizer: {difference}; {remedy}"
        )


def write_tokenizer_files(
    folder: Path, tokenizer: TokenizerFiles | None, *, base: Path | None = None
) -> None:
    """Write tokenizer files and end-of-text settings into a model folder.

    Args:
        folder: model folder; its `config.json` is updated if present.
        tokenizer: None writes no tokenizer files and keeps the model's end-of-text settings.
        base: folder of the base model, whose generation settings and license files are copied.

    Raises:
        ModelError: config.json cannot be read.
        WriteError: the folder cannot be written.
    """
    files = tokenizer.contents() if tokenizer else {}
    config = folder / "config.json"
    if config.is_file():
        model_config = read_json(config, dict[str, Any], error=ModelError)
        token_ids = _special_token_ids(model_config, tokenizer)
        files["config.json"] = json_text({**model_config, **token_ids})
        files[GENERATION] = json_text(_generation_config(folder, token_ids, tokenizer, base))
    if base is not None and base.is_dir():
        for path in sorted(base.iterdir()):
            if LICENSES.fullmatch(path.name) and path.is_file():
                files[path.name] = read_bytes(path, error=ModelError)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_file(folder / name, content)


def _special_token_ids(
    model_config: Mapping[str, Any], tokenizer: TokenizerFiles | None
) -> dict[str, Any]:
    """Return `bos_token_id`, `eos_token_id` and `pad_token_id` for a model's config.json."""
    token_ids = {f"{role}_id": model_config.get(f"{role}_id") for role in ROLES}
    if tokenizer is None:
        return token_ids
    from_tokenizer = {f"{role}_id": tokenizer.id_of(role) for role in ROLES}
    # The tokenizer's ids take precedence over the model's.
    token_ids |= {
        name: token_id for name, token_id in from_tokenizer.items() if token_id is not None
    }
    if token_ids["pad_token_id"] is None:
        # transformers pads with an end-of-text token by default as well.
        token_ids["pad_token_id"] = next(iter(_as_list(token_ids["eos_token_id"])), None)
    return token_ids


def _generation_config(
    folder: Path, token_ids: Mapping[str, Any], tokenizer: TokenizerFiles | None, base: Path | None
) -> dict[str, Any]:
    settings = {} if base is None else read_optional_json(base, GENERATION, error=ModelError)
    settings |= read_optional_json(folder, GENERATION, error=ModelError)
    ends = list(tokenizer.ends) if tokenizer else _as_list(token_ids["eos_token_id"])
    if ends:
        settings["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    padding = {name: token_ids[name] for name in ("bos_token_id", "pad_token_id")}
    return {**settings, **{name: value for name, value in padding.items() if value is not None}}


def _read(folder: Path) -> TokenizerFiles:
    """Read the tokenizer files of a folder."""
    files = {
        name: read_bytes(folder / name, error=DataError)
        for name in COPIED
        if (folder / name).is_file()
    }
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", SETTINGS):
        config |= read_optional_json(folder, name, error=DataError)
    templates = read_templates(folder, config, error=DataError)
    config.pop("chat_template", None)
    template = templates.pop(DEFAULT, None)
    files |= template_files(templates)
    ends = (*_end_tokens(folder, "config.json"), *_end_tokens(folder, GENERATION))
    tokenizer = TokenizerFiles(files=files, config=config)
    if TOKENIZER in files:
        end = end_of_documents(folder, error=DataError)
        tokenizer = _from_json(
            files[TOKENIZER], config=config, end_of_text=end, where=folder / TOKENIZER
        )
    all_ends = tuple(dict.fromkeys((*tokenizer.ends, *ends)))
    return evolve(tokenizer, files=files, chat_template=template, ends=all_ends)


def _end_tokens(folder: Path, name: str) -> list[int]:
    """Read the end-of-text tokens from config.json or generation_config.json."""
    ends = _as_list(read_optional_json(folder, name, error=DataError).get("eos_token_id"))
    for end in ends:
        if not -(2**31) <= end < 2**31:  # some models use -1 for "none"
            raise DataError(
                f"{folder / name}: eos_token_id must be a token id, got {short_repr(end)};"
                " correct it"
            )
    return ends


def _from_json(
    content: bytes,
    *,
    config: Mapping[str, Any] | None = None,
    end_of_text: int | None = None,
    where: Path = Path(TOKENIZER),
) -> TokenizerFiles:
    """Build from a tokenizer.json and its settings; guess the end of text if neither names it."""
    source = decode_source(content, where, error=DataError)
    ids = {token.content: token.id for token in source.added.values()}
    roles = {role: token_text((config or {}).get(role)) for role in ROLES}
    if roles["eos_token"] is None:
        # Without settings, the end of text is a token of a common name or the one that is passed.
        guess = next((name for name in KNOWN_ENDS if name in ids), None)
        with_ends = source.added.get(-1 if end_of_text is None else end_of_text)
        roles["eos_token"] = guess if with_ends is None else with_ends.content
    defined = {role: text for role, text in roles.items() if text is not None}
    end = ids.get(defined.get("eos_token", ""))
    return TokenizerFiles(
        files={TOKENIZER: content},
        config=dict(config or {}),
        ids=ids,
        roles=defined,
        size=1 + max(source.texts, default=-1),
        ends=() if end is None else (end,),
    )


def _special_token(token_id: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": True, **flags}


def _from_transformers(tokenizer: Any) -> TokenizerFiles:
    with tempfile.TemporaryDirectory(prefix="ms-align-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        return _read(Path(folder))


def _as_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _byte_tokenizer() -> bytes:
    """Build a tokenizer.json with one token per byte, and token 256 as end of text."""
    # GPT-2's byte alphabet: printable bytes map to themselves, the others to U+0100 and up.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    unprintable = (byte for byte in range(256) if byte not in letters)
    letters |= {byte: chr(256 + number) for number, byte in enumerate(unprintable)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = _special_token(ByteTokenizer.end_of_text, KNOWN_ENDS[0])
    return msgspec.json.encode(
        {
            "version": "1.0",
            "added_tokens": [end],
            "normalizer": None,
            "pre_tokenizer": {**level, "use_regex": False},  # no splitting into words
            "post_processor": None,
            "decoder": {**level, "use_regex": True},
            "model": {
                "type": "BPE",
                "vocab": {letters[byte]: byte for byte in range(256)},
                "merges": [],
            },
        }
    )

"""Reads, validates and copies a tokenizer.json and its sibling files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from attrs import field, frozen

from .untrusted import decode_json, read_bytes, read_json, read_text

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
NAMED_TEMPLATES, LEGACY_TEMPLATE = "additional_chat_templates", "chat_template.json"
DEFAULT = "default"
"""Name of the chat template that is used unless another one is requested."""
ROLES = ("bos_token", "eos_token", "pad_token")
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")
"""Usual end-of-text tokens, most likely first, for tokenizers that do not declare theirs."""

Document = dict[str, Any]


class AddedToken(msgspec.Struct, frozen=True):
    """A token added to a vocabulary, such as a special token."""

    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """Token ids by text; Unigram models have (text, score) pairs instead."""


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[AddedToken] | None = None


@frozen(kw_only=True, eq=False)
class TokenizerSource:
    """A tokenizer.json with its sibling files."""

    path: Path
    """Path of the tokenizer.json."""
    content: bytes
    """Raw bytes of the tokenizer.json."""
    document: Document
    """Decoded tokenizer.json."""
    added: dict[int, AddedToken]
    """Added tokens by id."""
    texts: dict[int, str]
    """Text of every token by id, including added tokens."""
    settings: Document = field(factory=dict)
    """Decoded tokenizer_config.json; empty if the file is missing."""
    templates: Mapping[str, str] = field(factory=dict)
    """Chat templates by name; see `read_templates`."""

    def files(self, roles: Mapping[str, int | None]) -> dict[str, bytes]:
        """Return the files that store this tokenizer in a folder, by name.

        Args:
            roles: ids of `bos_token` etc., for settings that do not define them.
        """
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.settings}
        for role, token in roles.items():
            if settings.get(role) is None and token in self.texts:
                settings[role] = self.texts[token]
        return {
            TOKENIZER: self.content,
            SETTINGS: json_text(settings),
            **template_files(self.templates),
        }


def read_templates(folder: Path, settings: Document, *, error: type[Exception]) -> dict[str, str]:
    """Read the chat templates of a folder by name, in the order of precedence of transformers.

    chat_template.jinja is named `default`, and additional_chat_templates/NAME.jinja have their own
    names. Without these files, tokenizer_config.json is used (one template or a list of named
    ones), and finally chat_template.json, the legacy file of processors.

    Args:
        folder: the tokenizer's folder.
        settings: decoded tokenizer_config.json.
        error: exception class to raise for damaged files.
    """
    paths = {path.stem: path for path in sorted(folder.glob(f"{NAMED_TEMPLATES}/*.jinja"))}
    if os.path.isfile(folder / TEMPLATE):
        paths = {DEFAULT: folder / TEMPLATE, **paths}
    if paths:
        return {name: read_text(path, error=error) for name, path in paths.items()}
    where, value = SETTINGS, settings.get("chat_template")
    if value is None:
        where, value = LEGACY_TEMPLATE, read_optional_json(folder, LEGACY_TEMPLATE, error=error)
        value = value.get("chat_template")
    templates = value if isinstance(value, dict) else {} if value is None else {DEFAULT: value}
    if isinstance(value, list):
        try:
            templates = {entry["name"]: entry["template"] for entry in value}
        except (TypeError, KeyError):
            templates = {DEFAULT: value}
    if not all(isinstance(text, str) for text in (*templates, *templates.values())):
        raise error(
            f"{folder / where}: chat_template must be a string or a list of `name` and `template`; "
            "fetch it again"
        )
    return templates


def template_files(templates: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files that `read_templates` reads, by path relative to the folder."""
    return {
        TEMPLATE if name == DEFAULT else f"{NAMED_TEMPLATES}/{name}.jinja": text.encode()
        for name, text in templates.items()
    }


def read_source(source: str | Path, *, error: type[Exception]) -> TokenizerSource:
    """Read a tokenizer.json and its sibling files, from the file's path or its folder.

    Raises:
        error: tokenizer.json is missing, or a file is damaged.
    """
    path = _tokenizer_file(source)
    if not os.path.isfile(path):
        raise error(f"{str(path)[-200:]} does not exist; a tokenizer is a tokenizer.json file")
    settings = read_optional_json(path.parent, SETTINGS, error=error)
    return decode_source(
        read_bytes(path, error=error),
        path,
        error=error,
        settings=settings,
        templates=read_templates(path.parent, settings, error=error),
    )


def decode_source(
    content: bytes, path: Path, *, error: type[Exception], **siblings: Any
) -> TokenizerSource:
    """Decode and validate a tokenizer.json; `siblings` are the remaining fields of the result."""
    document = decode_json(content, Document, where=path, error=error)
    model = document.get("model")
    if not (isinstance(model, dict) and isinstance(model.get("vocab"), dict | list)):
        raise error(f"{path} is not a tokenizer.json: it has no vocabulary")
    try:
        tokenizer = msgspec.convert(document, _Tokenizer)
    except msgspec.ValidationError as raised:
        raise error(f"{path}: its vocabulary is damaged ({raised}); fetch it again") from raised
    vocabulary = tokenizer.model.vocab
    if isinstance(vocabulary, dict):
        texts = {token: text for text, token in vocabulary.items()}
    else:
        texts = dict(enumerate(text for text, _ in vocabulary))
    added = {entry.id: entry for entry in tokenizer.added_tokens or []}
    texts |= {token: entry.content for token, entry in added.items()}
    return TokenizerSource(
        path=path, content=content, document=document, added=added, texts=texts, **siblings
    )


def tokenizer_difference(
    first: str | Path, second: str | Path, *, error: type[Exception]
) -> str | None:
    """Compare the tokenizers of two folders (models or shards) or of two tokenizer.json files.

    They agree if vocabularies and merges are equal, so that ids mean the same and texts are split
    the same way. Added tokens of only one tokenizer are ignored, since padding tokens and chat
    markers are often added later. Formatting, padding and truncation settings are ignored too.

    Returns:
        The first difference, such as "token 17 is 'a' in base and 'b' in shards"; None if they
        agree, or if either has no tokenizer.json.

    Raises:
        error: either tokenizer.json is damaged.
    """
    paths = [_tokenizer_file(source) for source in (first, second)]
    if not all(path.is_file() for path in paths):
        return None
    contents = [read_bytes(path, error=error) for path in paths]
    if contents[0] == contents[1]:
        return None
    first_source, second_source = (
        decode_source(content, path, error=error)
        for content, path in zip(contents, paths, strict=True)
    )
    return source_difference(first_source, second_source, names=(str(first), str(second)))


def source_difference(
    first: TokenizerSource, second: TokenizerSource, *, names: tuple[str, str]
) -> str | None:
    """Compare two tokenizers like `tokenizer_difference`; `names` appear in the result."""
    for token in sorted(first.texts.keys() & second.texts.keys()):
        text, second_text = first.texts[token], second.texts[token]
        if text != second_text:
            return f"token {token} is {text!r} in {names[0]} and {second_text!r} in {names[1]}"
    for source, lacking, labels in ((first, second, names), (second, first, names[::-1])):
        for token in sorted(source.texts.keys() - lacking.texts.keys()):
            text = source.texts[token]
            if token not in source.added:
                return f"{labels[0]} has a token {token} ({text!r}), which {labels[1]} lacks"
            other_id = next((key for key, value in lacking.texts.items() if value == text), None)
            if other_id is not None:
                return f"{text!r} is token {token} in {labels[0]} and {other_id} in {labels[1]}"
    if _merges(first) != _merges(second):
        return f"{names[0]} and {names[1]} have the same vocabulary and different merges"
    return None


def _tokenizer_file(source: str | Path) -> Path:
    return Path(source, TOKENIZER) if os.path.isdir(source) else Path(source)


def _merges(source: TokenizerSource) -> list[tuple[str, ...]]:
    """Return the BPE merges, stored as "a b" or ["a", "b"]; empty for other models."""
    merges = source.document["model"].get("merges") or []
    return [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]


def read_optional_json(folder: Path, name: str, *, error: type[Exception]) -> Document:
    """Read the JSON object in a file of `folder`; empty if the file is missing."""
    path = folder / name
    return read_json(path, Document, error=error) if os.path.isfile(path) else {}


def end_of_documents(folder: Path, *, error: type[Exception]) -> int | None:
    """Return the end-of-document token id from the index of a folder of shards."""
    end = read_optional_json(folder, "index.json", error=error).get("end_of_text")
    return end if type(end) is int else None


def token_text(setting: Any) -> str | None:
    """Return a token's text from settings, which store a string or an object with `content`."""
    text = setting.get("content") if isinstance(setting, dict) else setting
    return text if isinstance(text, str) else None


def json_text(document: Mapping[str, Any]) -> bytes:
    """Encode JSON with indentation."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"

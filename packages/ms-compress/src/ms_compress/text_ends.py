"""Tokens that begin, end and pad a model's text, read from its files and written to exports.

The end-of-text token may be defined in four places: generation_config.json, which `generate` uses,
config.json, the tokenizer's settings, and the name of a token in the tokenizer. The first of these
that defines it is used, and every export writes it where its runtime reads it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from ms_compress.errors import ConfigError, ExportError
from ms_compress.files.tokenizer_source import (
    KNOWN_ENDS,
    ROLES,
    TOKENIZER,
    TokenizerSource,
    json_text,
    read_optional_json,
    read_source,
    token_text,
    tokenizer_difference,
)

GENERATION = "generation_config.json"
COPIED = "special_tokens_map.json"


@frozen(kw_only=True)
class TextEnds:
    """Ids of the tokens that begin, end and pad a text."""

    begin: int | None
    ends: tuple[int, ...]
    """Tokens that end a text, the end-of-document token first; empty if unknown."""
    pad: int | None

    def ids(self) -> dict[str, int | list[int]]:
        """Return the known ones of `bos_token_id`, `eos_token_id` and `pad_token_id`."""
        ends = self.ends[0] if len(self.ends) == 1 else list(self.ends)
        by_name = {"bos_token_id": self.begin, "eos_token_id": ends, "pad_token_id": self.pad}
        return {name: value for name, value in by_name.items() if value not in (None, [])}


def read_tokenizer(path: str | Path) -> TokenizerSource:
    """Read a tokenizer.json, given as a file or its folder, and the files next to it.

    Raises:
        ExportError: it does not exist, or a file is damaged.
    """
    return read_source(path, error=ExportError)


def text_ends(
    files: TokenizerSource | None, config: Mapping[str, Any], vocabulary: int
) -> TextEnds:
    """Determine the begin, end and padding tokens from a model's tokenizer files and config.json.

    Args:
        files: tokenizer files, or None.
        config: contents of the model's config.json.
        vocabulary: vocabulary size of the model.

    Raises:
        ExportError: an id is not in the vocabulary, or generation_config.json is damaged.
    """
    by_role: dict[str, int | None] = {}
    sources: list[Mapping[str, Any]] = [config]
    if files is not None:
        # Reversed, so that the first of several tokens with one text is used.
        ids = {text: token for token, text in reversed(files.texts.items())}
        by_role = {
            f"{role}_id": ids.get(token_text(files.settings.get(role)) or "") for role in ROLES
        }
        special = {token.content: token.id for token in files.added.values() if token.special}
        known_end = next((special[text] for text in KNOWN_ENDS if text in special), None)
        generation = read_optional_json(files.path.parent, GENERATION, error=ExportError)
        # In order of precedence; see the top of this file.
        sources = [generation, config, by_role, {"eos_token_id": known_end}]

    def token_ids(key: str) -> tuple[int, ...]:
        value = next((source[key] for source in sources if source.get(key) not in (None, [])), ())
        tokens = value if isinstance(value, list | tuple) else (value,)
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ExportError(f"{key} must be a token id, got {value!r}; correct config.json")
            if not 0 <= token < vocabulary and key == "eos_token_id":
                raise ExportError(
                    f"{key} must be a token of the model's vocabulary of {vocabulary}, got {token};"
                    " correct config.json, or generation_config.json"
                )
        return tuple(token for token in tokens if 0 <= token < vocabulary)

    ends = token_ids("eos_token_id")
    last = by_role.get("eos_token_id")
    if last is not None and last in ends:  # put the tokenizer's own end token first
        ends = tuple(dict.fromkeys((last, *ends)))
    # Without a padding token, the end token pads, as in transformers' `generate`.
    pads = token_ids("pad_token_id") or ends
    return TextEnds(
        begin=next(iter(token_ids("bos_token_id")), None), ends=ends, pad=next(iter(pads), None)
    )


def check_tokenizer_fits(files: TokenizerSource, vocabulary: int) -> None:
    """Check that the tokenizer belongs to a model with this vocabulary size.

    Raises:
        ExportError: it has tokens outside the model's vocabulary.
    """
    last = max(files.texts, default=-1)
    if last >= vocabulary:
        raise ExportError(
            f"{files.path}: token {last} is beyond the model's vocabulary of {vocabulary}; is it"
            " this model's tokenizer?"
        )


def check_same_tokenizer(folders: Mapping[str, str | Path | None], *, remedy: str) -> None:
    """Check that token ids have the same meaning in all folders; see `tokenizer_difference`.

    Args:
        folders: folders of models or shards, or tokenizer.json files, by the name of their setting.
            None, or one without a tokenizer.json, is not compared.
        remedy: end of the message, such as "build the data with the model's tokenizer".

    Raises:
        ConfigError: a tokenizer differs from the first one.
        ExportError: a tokenizer.json is damaged.
    """
    first = None
    for name, folder in folders.items():
        if folder is None or not (Path(folder, TOKENIZER).is_file() or Path(folder).is_file()):
            continue
        if first is None:
            first = (name, folder)
            continue
        difference = tokenizer_difference(first[1], folder, error=ExportError)
        if difference is not None:
            raise ConfigError(
                f"{first[0]} and {name} must have the same tokenizer: {difference}; {remedy}"
            )


def text_files(files: TokenizerSource | None, ends: TextEnds) -> dict[str, bytes]:
    """Return the tokenizer files and generation_config.json of an exported folder, by name."""
    contents: dict[str, bytes] = {}
    generation: dict[str, Any] = {}
    if files is not None:
        tokens = (ends.begin, next(iter(ends.ends), None), ends.pad)
        contents = files.files(dict(zip(ROLES, tokens, strict=True)))
        generation = read_optional_json(files.path.parent, GENERATION, error=ExportError)
        copied = files.path.with_name(COPIED)
        if copied.is_file():
            contents[COPIED] = copied.read_bytes()
    if ends.ends or generation:
        contents[GENERATION] = json_text({**generation, **ends.ids()})
    return contents

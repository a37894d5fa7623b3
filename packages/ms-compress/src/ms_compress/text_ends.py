"""The tokens that begin, end and pad a model's texts, read from its files and written to others.

Where a text ends is said in up to four places: generation_config.json, which `generate` heeds, the
config.json, the tokenizer's settings, and the name of a token of the tokenizer. The first of them
that says anything holds, and every export says it in each place that its runtime looks at.
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
    read_beside,
    read_source,
    token_text,
    tokenizer_difference,
)

GENERATION = "generation_config.json"
COPIED = "special_tokens_map.json"


@frozen(kw_only=True)
class TextEnds:
    """The ids of the tokens that begin, end and pad a text."""

    begin: int | None
    ends: tuple[int, ...]
    """Each of them ends a text; the one that ends a document comes first. Empty: none is known."""
    pad: int | None

    def ids(self) -> dict[str, int | list[int]]:
        """Return `bos_token_id`, `eos_token_id` and `pad_token_id`, those that are known."""
        ends = self.ends[0] if len(self.ends) == 1 else list(self.ends)
        found = {"bos_token_id": self.begin, "eos_token_id": ends, "pad_token_id": self.pad}
        return {name: value for name, value in found.items() if value not in (None, [])}


def read_tokenizer(given: str | Path) -> TokenizerSource:
    """Read a tokenizer.json, or a folder's, with the files beside it.

    Raises:
        ExportError: there is none, or one of the files is damaged.
    """
    return read_source(given, error=ExportError)


def text_ends(
    files: TokenizerSource | None, config: Mapping[str, Any], vocabulary: int
) -> TextEnds:
    """Find out how a model's texts begin and end, from its tokenizer's files and its config.json.

    Raises:
        ExportError: a number is no token of the vocabulary, or generation_config.json is damaged.
    """
    named: dict[str, int | None] = {}
    places: list[Mapping[str, Any]] = [config]
    if files is not None:
        ids = {text: token for token, text in reversed(files.texts.items())}
        named = {
            f"{role}_id": ids.get(token_text(files.settings.get(role)) or "") for role in ROLES
        }
        special = {each.content: each.id for each in files.added.values() if each.special}
        known = next((special[text] for text in KNOWN_ENDS if text in special), None)
        generation = read_beside(files.path.parent, GENERATION, error=ExportError)
        places = [generation, config, named, {"eos_token_id": known}]

    def said(key: str) -> tuple[int, ...]:
        found = next((place[key] for place in places if place.get(key) not in (None, [])), ())
        numbers = found if isinstance(found, list | tuple) else (found,)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int):
                raise ExportError(f"{key} is {found!r}; give the number of a token")
            if not 0 <= number < vocabulary and key == "eos_token_id":
                raise ExportError(
                    f"{key} is {number}, which is no token of the model's vocabulary of"
                    f" {vocabulary}; correct config.json, or generation_config.json"
                )
        return tuple(number for number in numbers if 0 <= number < vocabulary)

    ends = said("eos_token_id")
    last = named.get("eos_token_id")
    if last is not None and last in ends:  # of several, the tokenizer's own comes first
        ends = tuple(dict.fromkeys((last, *ends)))
    pads = said("pad_token_id") or ends
    return TextEnds(
        begin=next(iter(said("bos_token_id")), None), ends=ends, pad=next(iter(pads), None)
    )


def check_fits(files: TokenizerSource, vocabulary: int) -> None:
    """Refuse a tokenizer of another model.

    Raises:
        ExportError: it has tokens that the model's vocabulary has not.
    """
    last = max(files.texts, default=-1)
    if last >= vocabulary:
        raise ExportError(
            f"{files.path}: token {last} is beyond the model's vocabulary of {vocabulary}; is it"
            " this model's tokenizer?"
        )


def check_same_tokenizer(folders: Mapping[str, str | Path | None], *, remedy: str) -> None:
    """Refuse folders whose token ids do not mean the same; see `tokenizer_difference`.

    Args:
        folders: folders of models or shards, or tokenizer.json files, by the name of their setting.
            None, or one without a tokenizer.json, is not compared.
        remedy: end of the message, such as "build the data with the model's tokenizer".

    Raises:
        ConfigError: one of them differs from the first that has a tokenizer.json.
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
    """Return what an exported folder holds of a tokenizer, by name, and says of a text's end."""
    found: dict[str, bytes] = {}
    generation: dict[str, Any] = {}
    if files is not None:
        tokens = (ends.begin, next(iter(ends.ends), None), ends.pad)
        found = files.files(dict(zip(ROLES, tokens, strict=True)))
        generation = read_beside(files.path.parent, GENERATION, error=ExportError)
        copied = files.path.with_name(COPIED)
        if copied.is_file():
            found[COPIED] = copied.read_bytes()
    if ends.ends or generation:
        found[GENERATION] = json_text({**generation, **ends.ids()})
    return found

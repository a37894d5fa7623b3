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
    read_beside,
    read_templates,
    source_difference,
    template_files,
    token_text,
)
from ms_align.files.untrusted import decode_json, decoding, read_bytes, read_json
from ms_align.settings import shown
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
"""Files of transformers' tokenizers that are copied unchanged; two others are rewritten."""
PAD = "<|pad|>"
GENERATION = "generation_config.json"
LICENSES = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY|COPYING)([-_.].*)?", re.IGNORECASE)
"""License files of a base model, which are copied to models trained from it."""


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

    def ending(self, tokens: Collection[int]) -> "TokenizerFiles":
        """Add those of `tokens` that are added tokens to the end-of-text tokens."""
        more = [token for token in self.ids.values() if token in tokens]
        return evolve(self, ends=tuple(dict.fromkeys([*self.ends, *more])))

    def padded(self, number: int) -> "TokenizerFiles":
        """Use token `number` for padding, and add it to the tokenizer if it is missing."""
        if number in self.ids.values():
            return self
        document = decode_json(
            self.files[TOKENIZER], dict[str, Any], where=TOKENIZER, error=DataError
        )
        document["added_tokens"] = [*document.get("added_tokens", []), _special(number, PAD)]
        return evolve(
            self,
            files={**self.files, TOKENIZER: msgspec.json.encode(document)},
            ids={**self.ids, PAD: number},
            roles={**self.roles, "pad_token": PAD},
            size=number + 1,
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


def carried(base: TokenizerFiles | None, data: TokenizerFiles | None) -> TokenizerFiles | None:
    """Combine the base model's tokenizer with the dataset's tokenizer, for saving.

    Files and settings of the base (padding side, model_max_length, ...) are kept. The dataset adds
    its chat template, missing tokens and the special tokens named in its settings.
    """
    if base is None or data is None:
        return data if base is None else base
    added = bool(data.ids.keys() - base.ids.keys())
    named = {role: data.roles[role] for role in ROLES if data.config.get(role) is not None}
    config = {**data.config, **base.config}
    known, more = (one.get("added_tokens_decoder") for one in (base.config, data.config))
    if isinstance(known, dict) and isinstance(more, dict):
        config["added_tokens_decoder"] = {**known, **more}
    return evolve(
        base,
        files={**base.files, **({TOKENIZER: data.files[TOKENIZER]} if added else {})},
        config=config,
        chat_template=base.chat_template if data.chat_template is None else data.chat_template,
        ids={**base.ids, **data.ids},
        roles={**data.roles, **base.roles, **named},
        size=max(base.size, data.size),
        ends=tuple(dict.fromkeys((*base.ends, *data.ends))),
    )


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer of any kind."""
    with decoding(folder, error=DataError):
        return any((folder / name).is_file() for name in (TOKENIZER, "tokenizer.model", SETTINGS))


def files_of(place: Any, tokenizer: Any = None) -> TokenizerFiles | None:
    """Collect the files of a tokenizer or of a folder; None if it has none.

    Args:
        place: a folder, or a tokenizer of ms-align, ms-data, transformers or any other kind.
        tokenizer: tokenizer to use if `place` is not a folder.

    Raises:
        DataError: the files cannot be read.
    """
    if isinstance(place, str | Path) and has_tokenizer(Path(place)):
        return _read(Path(place))
    tokenizer = place if tokenizer is None else tokenizer
    if isinstance(tokenizer, ByteTokenizer):
        return _from_json(_byte_tokenizer(), end_of_text=tokenizer.end_of_text)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer = tokenizer.tokenizer
    if hasattr(tokenizer, "save_pretrained"):
        return _of_transformers(tokenizer)
    content = getattr(tokenizer, "content", None)
    if not isinstance(content, bytes):
        return None
    folder = getattr(tokenizer, "folder", None)
    found = _from_json(content, end_of_text=getattr(tokenizer, "end_of_text", None))
    beside = None if folder is None else _read(Path(folder))
    return found if beside is None else evolve(found, chat_template=beside.chat_template)


def check_same_tokenizer(
    files: TokenizerFiles | None,
    name: str,
    other: TokenizerFiles | None,
    other_name: str,
    *,
    remedy: str,
) -> None:
    """Check that token ids mean the same in two tokenizers; see `tokenizer_difference`.

    Args:
        files: one tokenizer; not compared if it is None or has no tokenizer.json.
        name: its name in the message.
        other: the other tokenizer.
        other_name: its name in the message.
        remedy: end of the message, such as "build the data with the model's tokenizer".

    Raises:
        ModelError: they differ.
        DataError: one of them is damaged.
    """
    contents = [one.files.get(TOKENIZER) for one in (files, other) if one is not None]
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


def complete(folder: Path, tokenizer: TokenizerFiles | None, *, base: Path | None = None) -> None:
    """Put a tokenizer into a model's folder, and say in its configurations how a text ends.

    Args:
        folder: with `config.json`, where the model has one.
        tokenizer: None leaves the folder without one, and what its model says of ends as it is.
        base: folder of the model that was trained; its generation settings and license files are
            carried over.

    Raises:
        ModelError: config.json cannot be read.
        WriteError: the place cannot be written.
    """
    files = tokenizer.contents() if tokenizer else {}
    config = folder / "config.json"
    if config.is_file():
        known = read_json(config, dict[str, Any], error=ModelError)
        numbers = _numbers(known, tokenizer)
        files["config.json"] = json_text({**known, **numbers})
        files[GENERATION] = json_text(_generation(folder, numbers, tokenizer, base))
    if base is not None and base.is_dir():
        for path in sorted(base.iterdir()):
            if LICENSES.fullmatch(path.name) and path.is_file():
                files[path.name] = read_bytes(path, error=ModelError)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_file(folder / name, content)


def _numbers(known: Mapping[str, Any], tokenizer: TokenizerFiles | None) -> dict[str, Any]:
    """Find `bos_token_id`, `eos_token_id` and `pad_token_id` of a model's configuration."""
    numbers = {f"{role}_id": known.get(f"{role}_id") for role in ROLES}
    if tokenizer is None:
        return numbers
    found = {f"{role}_id": tokenizer.id_of(role) for role in ROLES}
    numbers |= {name: number for name, number in found.items() if number is not None}
    if numbers["pad_token_id"] is None:
        numbers["pad_token_id"] = next(iter(_as_list(numbers["eos_token_id"])), None)
    return numbers


def _generation(
    folder: Path, numbers: Mapping[str, Any], tokenizer: TokenizerFiles | None, base: Path | None
) -> dict[str, Any]:
    known = {} if base is None else read_beside(base, GENERATION, error=ModelError)
    known |= read_beside(folder, GENERATION, error=ModelError)
    ends = list(tokenizer.ends) if tokenizer else _as_list(numbers["eos_token_id"])
    if ends:
        known["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    rest = {name: numbers[name] for name in ("bos_token_id", "pad_token_id")}
    return {**known, **{name: one for name, one in rest.items() if one is not None}}


def _read(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a folder."""
    files = {
        name: read_bytes(folder / name, error=DataError)
        for name in COPIED
        if (folder / name).is_file()
    }
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", SETTINGS):
        config |= read_beside(folder, name, error=DataError)
    templates = read_templates(folder, config, error=DataError)
    config.pop("chat_template", None)
    template = templates.pop(DEFAULT, None)
    files |= template_files(templates)
    ends = (*_ends_in(folder, "config.json"), *_ends_in(folder, GENERATION))
    found = TokenizerFiles(files=files, config=config)
    if TOKENIZER in files:
        end = end_of_documents(folder, error=DataError)
        found = _from_json(
            files[TOKENIZER], config=config, end_of_text=end, where=folder / TOKENIZER
        )
    every = tuple(dict.fromkeys((*found.ends, *ends)))
    return evolve(found, files=files, chat_template=template, ends=every)


def _ends_in(folder: Path, name: str) -> list[int]:
    """Read the tokens that a model's configuration ends a text with."""
    ends = _as_list(read_beside(folder, name, error=DataError).get("eos_token_id"))
    for end in ends:
        if not -(2**31) <= end < 2**31:  # some models say -1 where they have none
            raise DataError(
                f"{folder / name}: eos_token_id is {shown(end)}; give the number of a token"
            )
    return ends


def _from_json(
    content: bytes,
    *,
    config: Mapping[str, Any] | None = None,
    end_of_text: int | None = None,
    where: Path = Path(TOKENIZER),
) -> TokenizerFiles:
    """Take a tokenizer.json, the settings beside it, and the end of a text if nobody names it."""
    source = decode_source(content, where, error=DataError)
    ids = {token.content: token.id for token in source.added.values()}
    roles = {role: token_text((config or {}).get(role)) for role in ROLES}
    if roles["eos_token"] is None:
        likely = next((name for name in KNOWN_ENDS if name in ids), None)
        ending = source.added.get(-1 if end_of_text is None else end_of_text)
        roles["eos_token"] = likely if ending is None else ending.content
    found = {role: text for role, text in roles.items() if text is not None}
    end = ids.get(found.get("eos_token", ""))
    return TokenizerFiles(
        files={TOKENIZER: content},
        config=dict(config or {}),
        ids=ids,
        roles=found,
        size=1 + max(source.texts, default=-1),
        ends=() if end is None else (end,),
    )


def _special(number: int, text: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": True, **plain}


def _of_transformers(tokenizer: Any) -> TokenizerFiles:
    with tempfile.TemporaryDirectory(prefix="ms-align-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        return _read(Path(folder))


def _as_list(value: Any) -> list[int]:
    given = value if isinstance(value, list) else [value]
    return [one for one in given if isinstance(one, int) and not isinstance(one, bool)]


def _byte_tokenizer() -> bytes:
    """Write a tokenizer.json that gives each byte its own number, and 256 to the end of a text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in letters)
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = _special(ByteTokenizer.end_of_text, KNOWN_ENDS[0])
    return msgspec.json.encode(
        {
            "version": "1.0",
            "added_tokens": [end],
            "normalizer": None,
            "pre_tokenizer": {**level, "use_regex": False},
            "post_processor": None,
            "decoder": {**level, "use_regex": True},
            "model": {
                "type": "BPE",
                "vocab": {letters[byte]: byte for byte in range(256)},
                "merges": [],
            },
        }
    )

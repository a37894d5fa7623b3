"""Reads the files next to a tokenizer.json, which name special tokens and may add tokens."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from attrs import frozen

from ms_data.errors import TokenizerError
from ms_data.files.untrusted import read_json

TOKENIZER = "tokenizer.json"
CONFIG, TOKENS_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Token roles of transformers, in the order in which it adds their tokens."""
_UNUSED = frozenset(("unk_token", "pad_token", "cls_token", "mask_token"))
"""Roles whose tokens occur in no document unless tokenizer.json has them."""


@frozen(kw_only=True)
class TokenizerFolder:
    """Settings of a tokenizer folder, merged like in transformers."""

    settings: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "TokenizerFolder":
        """Read the files of a folder; each may be missing.

        Raises:
            TokenizerError: a file cannot be read, or is not a JSON object.
        """
        settings = dict(_read(folder / CONFIG))
        # transformers reads the two older files only where this key is missing.
        if "added_tokens_decoder" not in settings:
            settings |= _read(folder / TOKENS_MAP)
            special = set(_role_tokens(settings).values()) | set(_extra_tokens(settings))
            settings["added_tokens_decoder"] = {
                number: {"content": token, "special": token in special, "normalized": False}
                for token, number in _read(folder / ADDED).items()
            }
        return cls(settings=settings)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by role, such as `bos_token`."""
        return _role_tokens(self.settings)

    def complete(self, content: bytes, added: Mapping[str, bool]) -> bytes:
        """Add the tokens that only the other files name, with the IDs that transformers assigns.

        Args:
            content: content of a tokenizer.json.
            added: its added tokens; the values tell whether a token is special.
        """
        new_tokens: list[tokenizers.AddedToken] = []
        numbered = self.settings["added_tokens_decoder"]
        if not isinstance(numbered, Mapping):
            raise TokenizerError(f"{CONFIG}: added_tokens_decoder must be an object")
        try:
            # In the order of their ids, as the library numbers new tokens in the order of addition.
            for _, fields in sorted(numbered.items(), key=lambda item: int(item[0])):
                if fields["content"] not in added:
                    new_tokens.append(tokenizers.AddedToken(**fields))
        except (TypeError, ValueError, KeyError) as error:
            raise TokenizerError(
                f"{CONFIG}: added_tokens_decoder must map ids to tokens: {error}; download it again"
            ) from error
        roles = dict(self.special_tokens)
        # A separate padding token occurs in no document and would only enlarge the vocabulary.
        while roles and next(reversed(roles)) in _UNUSED:
            roles.popitem()
        names = {token.content for token in new_tokens}
        # transformers adds the tokens of roles first, then the others.
        names_in_order = dict.fromkeys([*roles.values(), *_extra_tokens(self.settings)])
        new_tokens += [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token in names_in_order
            if token and token not in names and not added.get(token)
        ]
        if not new_tokens:
            return content
        model = tokenizers.Tokenizer.from_str(content.decode())
        model.add_tokens(new_tokens)
        # Adding again marks tokens that exist already as special.
        model.add_special_tokens([token for token in new_tokens if token.special])
        return model.to_str().encode()


def set_begin_tokens(content: bytes, begin: tuple[tuple[str, int], ...]) -> bytes:
    """Set the tokens (name, ID) that a tokenizer.json adds before a text; it adds none after it.

    Post-processors that add no tokens (such as offset trimming) are kept.
    """
    document = json.loads(content)
    old_processor = document.get("post_processor")
    parts = (
        old_processor["processors"]
        if old_processor and old_processor["type"] == "Sequence"
        else [old_processor]
        if old_processor
        else []
    )
    # ByteLevel only trims offsets; templates add tokens and are replaced.
    processors = [part for part in parts if part["type"] == "ByteLevel"]
    if begin:
        single_begin = [{"SpecialToken": {"id": name, "type_id": 0}} for name, _ in begin]
        pair_begin = [{"SpecialToken": {"id": name, "type_id": 1}} for name, _ in begin]
        single = [*single_begin, {"Sequence": {"id": "A", "type_id": 0}}]
        processors.append(
            {
                "type": "TemplateProcessing",
                "single": single,
                "pair": [*single, *pair_begin, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {
                    name: {"id": name, "ids": [number], "tokens": [name]} for name, number in begin
                },
            }
        )
    sequence = {"type": "Sequence", "processors": processors}
    document["post_processor"] = (
        sequence if len(processors) > 1 else processors[0] if processors else None
    )
    return json.dumps(document, ensure_ascii=False).encode()


def _read(path: Path) -> dict[str, Any]:
    if not os.path.exists(path):
        return {}
    try:
        return read_json(path, dict[str, Any], error=TokenizerError)
    except TokenizerError as error:
        raise TokenizerError(f"{error}; download the tokenizer folder again") from error


def _role_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens in the settings by role, the roles in `_ROLES` first."""
    extra_tokens = settings.get("extra_special_tokens")
    values_by_role = {key: settings[key] for key in _ROLES if key in settings}
    values_by_role |= {key: value for key, value in settings.items() if key.endswith("_token")}
    values_by_role |= extra_tokens if isinstance(extra_tokens, Mapping) else {}
    texts = {key: token_text(value) for key, value in values_by_role.items()}
    return {key: text for key, text in texts.items() if text is not None}


def _extra_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Return the special tokens without a role."""
    tokens: list[str] = []
    for key in ("extra_special_tokens", "additional_special_tokens"):
        values = settings.get(key)
        texts = map(token_text, values) if isinstance(values, list) else ()
        tokens += [text for text in texts if text is not None]
    return tokens


def token_text(value: Any) -> str | None:
    """Return the text of a token, which settings give as a string or an object with `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None

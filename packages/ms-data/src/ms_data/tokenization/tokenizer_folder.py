"""Reads the files next to a tokenizer.json, which name its special tokens and may add tokens."""

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
"""The roles that transformers knows, in the order in which it adds tokens for them."""
_UNUSED = frozenset(("unk_token", "pad_token", "cls_token", "mask_token"))
"""Roles of tokens that no document holds unless tokenizer.json has them."""


@frozen(kw_only=True)
class TokenizerFolder:
    """The settings of a tokenizer's folder, merged as transformers merges them."""

    settings: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "TokenizerFolder":
        """Read the files that are there; each may be missing.

        Raises:
            TokenizerError: one cannot be read or is not a JSON object.
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
        """Add the tokens that only the other files name, with the ids that transformers gives.

        Args:
            content: a tokenizer.json.
            added: its added tokens, and whether each is special.
        """
        wanted: list[tokenizers.AddedToken] = []
        numbered = self.settings["added_tokens_decoder"]
        if not isinstance(numbered, Mapping):
            raise TokenizerError(f"{CONFIG}: added_tokens_decoder must be an object")
        try:
            for _, facts in sorted(numbered.items(), key=lambda item: int(item[0])):
                if facts["content"] not in added:
                    wanted.append(tokenizers.AddedToken(**facts))
        except (TypeError, ValueError, KeyError) as error:
            raise TokenizerError(
                f"{CONFIG}: added_tokens_decoder must map ids to tokens: {error}; fetch it again"
            ) from error
        roles = dict(self.special_tokens)
        # A padding token of its own is never read, and would only widen the vocabulary.
        while roles and next(reversed(roles)) in _UNUSED:
            roles.popitem()
        names = {token.content for token in wanted}
        named = dict.fromkeys([*roles.values(), *_extra_tokens(self.settings)])
        wanted += [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token in named
            if token and token not in names and not added.get(token)
        ]
        if not wanted:
            return content
        model = tokenizers.Tokenizer.from_str(content.decode())
        model.add_tokens(wanted)
        model.add_special_tokens([token for token in wanted if token.special])
        return model.to_str().encode()


def with_begin(content: bytes, begin: tuple[tuple[str, int], ...]) -> bytes:
    """Make a tokenizer.json put these tokens, by name and id, before each text and none after it.

    What its post-processor does besides adding tokens (trimming offsets) is kept.
    """
    document = json.loads(content)
    now = document.get("post_processor")
    parts = now["processors"] if now and now["type"] == "Sequence" else [now] if now else []
    kept = [part for part in parts if part["type"] == "ByteLevel"]
    if begin:
        first = [{"SpecialToken": {"id": name, "type_id": 0}} for name, _ in begin]
        second = [{"SpecialToken": {"id": name, "type_id": 1}} for name, _ in begin]
        single = [*first, {"Sequence": {"id": "A", "type_id": 0}}]
        kept.append(
            {
                "type": "TemplateProcessing",
                "single": single,
                "pair": [*single, *second, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {
                    name: {"id": name, "ids": [number], "tokens": [name]} for name, number in begin
                },
            }
        )
    sequence = {"type": "Sequence", "processors": kept}
    document["post_processor"] = sequence if len(kept) > 1 else kept[0] if kept else None
    return json.dumps(document, ensure_ascii=False).encode()


def _read(path: Path) -> dict[str, Any]:
    if not os.path.exists(path):
        return {}
    try:
        return read_json(path, dict[str, Any], error=TokenizerError)
    except TokenizerError as error:
        raise TokenizerError(f"{error}; fetch the tokenizer's folder again") from error


def _role_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that settings name, transformers' own roles first."""
    further = settings.get("extra_special_tokens")
    named = {key: settings[key] for key in _ROLES if key in settings}
    named |= {key: value for key, value in settings.items() if key.endswith("_token")}
    named |= further if isinstance(further, Mapping) else {}
    texts = {key: token_text(value) for key, value in named.items()}
    return {key: text for key, text in texts.items() if text is not None}


def _extra_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Return the special tokens without a role."""
    found: list[str] = []
    for key in ("extra_special_tokens", "additional_special_tokens"):
        values = settings.get(key)
        texts = map(token_text, values) if isinstance(values, list) else ()
        found += [text for text in texts if text is not None]
    return found


def token_text(value: Any) -> str | None:
    """Return the text of a token as settings name it: itself, or an object with its `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None

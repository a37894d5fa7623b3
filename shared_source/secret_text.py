"""Masks secrets in texts and command lines that are printed or stored.

A secret is recognized by its name (`--api-key X`, `HF_TOKEN=X`, `"password": "X"`), by its place
(user and password of a URL, an Authorization header) or by its own form (`hf_...`, `sk-...`).
"""

import re
from collections.abc import Sequence
from typing import Final

MASK: Final = "***"
LAST_WORDS: Final = frozenset(
    {"key", "keys", "token", "tokens", "auth", "authorization", "pat", "sig", "signature"}
)
"""Words that mark a secret where a name ends in them: `api-key`, but not `num-key-value-heads`."""
ANY_WORDS: Final = frozenset(
    {"apikey", "password", "passwords", "passwd", "passphrase", "pwd", "secret", "secrets",
     "credential", "credentials"}
)  # fmt: skip
"""Words that mark a secret anywhere in a name."""
COUNTS: Final = frozenset({"max", "min", "num", "n", "new", "total", "batch", "number"})
"""Words that make a name that ends in `tokens` or `keys` a count: `max-new-tokens`."""
ROLES: Final = frozenset(
    {"eos", "bos", "pad", "unk", "sep", "cls", "mask", "special", "image", "end", "stop", "begin"}
)
"""Words that make a name that ends in `token` one of a tokenizer: `eos_token`."""

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_OPTION: Final = re.compile(r"[-+~]{0,2}[A-Za-z][\w.\-/]*")
_USER: Final = re.compile(r"(?<=://)[^/?#@\s'\"]+(?=@)")
_PARAMETER: Final = re.compile(r"(?P<name>(?<=[?&;])[^=&;?#\s]+)=[^&;#\s'\")]*")
_SETTING: Final = re.compile(
    r"""(?<![\w\-.?&;])(?P<name>[A-Za-z][\w\-.]*)=(?:"[^"]*"|'[^']*'|[^\s,;)&]+)"""
)
# JSON, a dictionary or a header: `"api_key": "X"`, `api-key: X`.
_MEMBER: Final = re.compile(
    r"""(?P<quote>["']?)(?<![\w\-])(?P<name>[A-Za-z][\w\-]*)(?P=quote)"""
    r"""(?P<colon>\s*:\s*["']?)(?P<value>[^\s"',}]+)"""
)
_AUTHORIZATION: Final = re.compile(
    r"(?i)(?P<kept>\bauthorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic)\s+)?)[^\s'\",}&)]+"
)
_BEARER: Final = re.compile(r"(?i)(?P<kept>\bbearer\s+)[\w.~+/=-]{8,}")
_KNOWN: Final = re.compile(
    r"\b(?:sk-[\w-]{20,}|hf_[A-Za-z0-9]{30,}|gh[pousr]_\w{30,}|github_pat_\w{30,}"
    r"|glpat-[\w-]{20,}|xox[a-z]-[\w-]{20,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]+\.eyJ[\w.-]{8,})"
)
"""Tokens that show by their form what they are."""


def is_secret_name(name: str) -> bool:
    """Return whether a name such as `--api-key`, `HF_TOKEN` or `wandb.apiKey` names a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    if ANY_WORDS.intersection(words):
        return True
    if not words or words[-1] not in LAST_WORDS or ROLES.intersection(words):
        return False
    is_count = len(words) == 1 or COUNTS.intersection(words)
    return not (words[-1] in ("tokens", "keys") and is_count)


def without_secrets(text: str) -> str:
    """Return a text, such as an error message, with passwords, keys and tokens masked."""
    text = _USER.sub(MASK, text)
    for pattern in (_PARAMETER, _SETTING):
        text = pattern.sub(_masked_value, text)
    text = _AUTHORIZATION.sub(rf"\g<kept>{MASK}", text)
    text = _BEARER.sub(rf"\g<kept>{MASK}", text)
    text = _MEMBER.sub(_masked_member, text)
    return _KNOWN.sub(MASK, text)


def without_secret(name: str, value: str) -> str:
    """Return a setting's value without secrets; masked as a whole if the name is a secret's."""
    return MASK if value and is_secret_name(name) else without_secrets(value)


def mask_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return command-line arguments with the values of secrets masked.

    Besides what `without_secrets` masks, that is the argument after an option that is named like a
    secret: `--api-key X`.
    """
    masked: list[str] = []
    pending = False
    for argument in arguments:
        if pending and not argument.startswith("--"):
            masked.append(MASK)
            pending = False
            continue
        name, separator, _ = argument.partition("=")
        if separator and _OPTION.fullmatch(name) and is_secret_name(name):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(without_secrets(argument))
        named = argument.startswith("-") and not separator and _OPTION.fullmatch(argument)
        pending = bool(named) and is_secret_name(argument)
    return tuple(masked)


def _masked_value(match: re.Match[str]) -> str:
    return f"{match['name']}={MASK}" if is_secret_name(match["name"]) else match[0]


def _masked_member(match: re.Match[str]) -> str:
    name, quote = match["name"], match["quote"]
    # In prose, `unknown key: x` and `unexpected token: x` show no secret.
    in_prose = not quote and name.lower() in LAST_WORDS
    if in_prose or not is_secret_name(name) or match["value"].lower() in ("bearer", "basic"):
        return match[0]
    return f"{quote}{name}{quote}{match['colon']}{MASK}"

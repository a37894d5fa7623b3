# A copy of shared_source/secret_text.py, made by `nox -s copies`; change it there.
"""Masks secrets in texts that are printed or stored, such as errors of other libraries."""

import re
from typing import Final

MASK: Final = "***"
_NAME = r"(?:api[-_]?key|access[-_]?key|token|passw(?:or)?d|passphrase|secret|signature|sig|auth)"
_SECRETS: Final = (
    # User and password of a URL.
    re.compile(r"(?P<kept>://)[^/?#@\s'\"]+(?=@)"),
    # Parameters of a URL or form that are named like a secret: `?api_key=X`, `&X-Amz-Signature=X`.
    re.compile(rf"(?i)(?P<kept>[?&;][^=&;?#\s]*{_NAME}[^=&;?#\s]*=)[^&;#\s'\")]+"),
    # Headers: `Authorization: Basic X`, `'x-api-key': 'X'`, `Bearer X`.
    re.compile(
        r"(?i)(?P<kept>\b(?:authorization|x-api-key|api[-_]?key|password|client[-_]secret)"
        r"['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic)\s+)?)[^\s'\",}&)]+"
    ),
    re.compile(r"(?i)(?P<kept>\bbearer\s+)[\w.~+/=-]{8,}"),
    # Tokens that show by their form what they are.
    re.compile(
        r"(?P<kept>\b)(?:sk-[\w-]{20,}|hf_[A-Za-z0-9]{30,}|gh[pousr]_\w{30,}|github_pat_\w{30,}"
        r"|glpat-[\w-]{20,}|xox[a-z]-[\w-]{20,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}"
        r"|eyJ[\w-]+\.eyJ[\w.-]{8,})"
    ),
)


def without_secrets(text: str) -> str:
    """Return a text with passwords, keys and tokens replaced by `***`."""
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<kept>{MASK}", text)
    return text

"""An mkdocs hook that puts a package's README on its page of the site, with working links.

A README links to pages of the documentation by their path in the repository, so that they can be
followed there. On the site the same links have to be relative to `docs/`; links to files that are
not part of the site become plain text.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^--8<-- "(packages/[\w-]+/README\.md)"$', re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
DOCS = "../../docs/"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each include of a README by its text."""
    return INCLUDE.sub(
        lambda match: for_site((ROOT / match[1]).read_text(encoding="utf-8")), markdown
    )


def for_site(readme: str) -> str:
    """Rewrite the links of a README for a page that is directly in `docs/`."""
    return LINK.sub(_link_for_site, readme)


def _link_for_site(match: re.Match[str]) -> str:
    bang, text, target = match.groups()
    if target.startswith(("https://", "#")):
        return match[0]
    if target.startswith(DOCS):
        return f"{bang}[{text}]({target.removeprefix(DOCS)})"
    return text

"""An mkdocs hook that builds each language's site with its own headings and its own search.

Docstrings are English on both sites. mkdocs writes one search index for both languages, which
shows English readers Chinese pages and the reverse; it is split, and Chinese pages load theirs.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

CHINESE = "zh/"
INDEX = Path("search") / "search_index.json"
BASE = re.compile(r'("base": ")\.\./?([^"]*")')


@event_priority(100)
def on_config(config: Any, **_: Any) -> None:
    """Pass the language that is being built to mkdocstrings before it starts."""
    config.plugins["mkdocstrings"].config.locale = config.plugins["i18n"].current_language or "en"


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Make the script of a Chinese page look for the index, and for pages, below `zh/`."""
    if not page.url.startswith(CHINESE):
        return output
    return BASE.sub(lambda base: base[1] + (base[2] if base[2] != '"' else '."'), output, count=1)


@event_priority(-200)
def on_post_build(config: Any, **_: Any) -> None:
    """Split the index once the last language is built. API pages are in both."""
    site = Path(config.site_dir)
    if config.plugins["i18n"].building or not (site / CHINESE).is_dir():
        return
    index = json.loads((site / INDEX).read_text(encoding="utf-8"))
    chinese, english = [], []
    for entry in index["docs"]:
        location = entry["location"].removeprefix(CHINESE)
        if location != entry["location"]:
            chinese.append({**entry, "location": location})
        else:
            english.append(entry)
            if location.startswith("api/"):
                chinese.append(entry)
    (site / CHINESE / INDEX).parent.mkdir(exist_ok=True)
    for folder, entries in ((site, english), (site / CHINESE, chinese)):
        text = json.dumps({**index, "docs": entries}, separators=(",", ":"))
        (folder / INDEX).write_text(text, encoding="utf-8")

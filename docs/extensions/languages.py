"""An mkdocs hook that gives the API pages of each site mkdocstrings' headings in its language.

The docstrings themselves are English on both sites.
"""

from typing import Any

from mkdocs.plugins import event_priority


@event_priority(100)
def on_config(config: Any, **_: Any) -> None:
    """Pass the language that is being built to mkdocstrings before it starts."""
    config.plugins["mkdocstrings"].config.locale = config.plugins["i18n"].current_language or "en"

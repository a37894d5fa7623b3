"""A hook of mkdocs that gives the API pages the language of the site that is being built.

The pages of both languages are made of the same docstrings; those of the Chinese site are read
through `chinese_docstrings.py`, and their titles and heads of tables are mkdocstrings' Chinese.
"""

from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

EXTENSION = str(Path(__file__).with_name("chinese_docstrings.py"))


@event_priority(100)
def on_config(config: Any, **_: Any) -> None:
    """Tell mkdocstrings, before it begins, which language comes now."""
    language = config.plugins["i18n"].current_language or "en"
    settings = config.plugins["mkdocstrings"].config
    settings.locale = language
    extensions = settings.handlers["python"]["options"]["extensions"]
    if language == "zh" and EXTENSION not in extensions:
        extensions.append(EXTENSION)  # behind those that write docstrings
    elif language != "zh" and EXTENSION in extensions:
        extensions.remove(EXTENSION)

"""Checks of model names and folders in settings that run before any heavy import."""

import os
import re

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MAX_CHARACTERS = 4096


def missing_model(name: str) -> str | None:
    """Return an error message if a setting is the path of a missing model folder.

    Args:
        name: value of the setting. Without a path separator it may be an architecture's name and
            is accepted.

    Returns:
        Description of the value and the remedy; None if the value is acceptable.
    """
    if len(name) > MAX_CHARACTERS or not name.isprintable():
        return None  # reported by the general path checks
    if os.path.exists(name) or not (os.sep in name or name.startswith("~")):
        return None
    if HUB_NAME.fullmatch(name):
        return (
            f"{name!r} is not a local folder, and names of the Hugging Face Hub are not downloaded;"
            f" run `hf download {name} --local-dir FOLDER` and use that folder"
        )
    return f"{name!r} does not exist; set it to a local folder with a config.json"


def missing_dataset(name: str, expected: str) -> str | None:
    """Return an error message if a setting is the path of a missing dataset.

    Args:
        name: value of the setting; a URL such as s3://bucket/shards is not checked.
        expected: kind of input for the message, such as "a folder of shards".

    Returns:
        Description of the value and the remedy; None if the value is acceptable.
    """
    if (
        len(name) > MAX_CHARACTERS
        or not name.isprintable()
        or "://" in name
        or os.path.lexists(name)
    ):
        return None
    return f"{name!r} does not exist; set it to the path of {expected}"

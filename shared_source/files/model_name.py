"""Model names and folders in settings, checked before anything heavy is imported."""

import os
import re

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
LONGEST = 4096


def missing_model(name: str) -> str | None:
    """Say what is wrong with the path of a model folder that does not exist.

    Args:
        name: the setting; a text without a separator may be an architecture's name and passes.

    Returns:
        What was got and how to fix it, or None where nothing is wrong with it.
    """
    if len(name) > LONGEST or not name.isprintable():
        return None  # other checks of paths say what is wrong
    if os.path.exists(name) or not (os.sep in name or name.startswith("~")):
        return None
    if HUB_NAME.fullmatch(name):
        return (
            f"{name!r} is not a local folder, and names of the Hugging Face Hub are not downloaded;"
            f" run `hf download {name} --local-dir FOLDER` and give that folder"
        )
    return f"{name!r} does not exist; give a local folder with a config.json"


def missing_dataset(name: str, what: str) -> str | None:
    """Say why a dataset cannot be read, where that shows without reading it.

    Args:
        name: the setting; an address such as s3://bucket/shards is not looked up.
        what: a path of what to give, such as "a folder of shards".

    Returns:
        What was got and how to fix it, or None where nothing is wrong with it.
    """
    if len(name) > LONGEST or not name.isprintable() or "://" in name or os.path.lexists(name):
        return None
    return f"{name!r} does not exist; give the path of {what}"

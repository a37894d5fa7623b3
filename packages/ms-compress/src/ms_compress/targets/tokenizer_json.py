"""A folder's tokenizer.json, read by the library that defines it."""

from collections.abc import Callable
from pathlib import Path

from ms_compress.entry import one_line
from ms_compress.errors import ExportError

__all__ = ["encoder"]


def encoder(folder: Path) -> Callable[[str], list[int]]:
    """What gives the tokens of a text, in which special tokens are what they spell.

    Raises:
        ExportError: the library is not installed, or cannot read the file.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ExportError(
            "reading a tokenizer.json needs tokenizers: pip install 'ms-compress[ort]'"
        ) from error
    path = folder / "tokenizer.json"
    try:
        model = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises nothing narrower
        raise ExportError(
            f"{path}: the tokenizers library cannot read it: {one_line(str(error))}"
        ) from error
    model.no_truncation()
    model.no_padding()
    return lambda text: list(model.encode(text, add_special_tokens=False).ids)

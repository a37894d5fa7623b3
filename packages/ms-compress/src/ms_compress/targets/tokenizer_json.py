"""Read a folder's tokenizer.json with the tokenizers library."""

from collections.abc import Callable
from pathlib import Path

from ms_compress.targets.libraries import import_library, library_errors


def encoder(folder: Path) -> Callable[[str], list[int]]:
    """Return a function that tokenizes text, recognizing special tokens but adding none.

    Raises:
        ExportError: the library is not installed, or cannot read the file.
    """
    tokenizers = import_library(
        "tokenizers", extra="ort", purpose="reading a tokenizer.json needs tokenizers"
    )
    path = folder / "tokenizer.json"
    with library_errors(path, "the tokenizers library"):
        model = tokenizers.Tokenizer.from_file(str(path))
    # The file may turn on the truncation and padding that its training used.
    model.no_truncation()
    model.no_padding()
    return lambda text: list(model.encode(text, add_special_tokens=False).ids)

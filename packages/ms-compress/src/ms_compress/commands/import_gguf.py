"""`ms-compress import`: convert a GGUF file to a Hugging Face folder."""

from pathlib import Path

import torch

from ms_compress.figures import figure
from ms_compress.run.outcome import Outcome
from ms_compress.run.progress import ProgressDisplay
from ms_compress.targets.gguf.convert import import_gguf


def run(file: Path, folder: Path, dtype: str) -> Outcome:
    """Convert and report the size."""
    with ProgressDisplay("tensor") as display:
        import_gguf(file, folder, dtype=getattr(torch, dtype), progress=display.update)
    size = sum(path.stat().st_size for path in folder.iterdir())
    has_tokenizer = (folder / "tokenizer.json").is_file()
    line = f"{folder}: {dtype}, {figure(size / 1e6, 3)} MB"
    note = "with its tokenizer" if has_tokenizer else "without a tokenizer"
    return Outcome(
        lines=(f"{line}, {note}",),
        facts={
            "folder": str(folder),
            "dtype": dtype,
            "size_bytes": size,
            "tokenizer": has_tokenizer,
        },
    )

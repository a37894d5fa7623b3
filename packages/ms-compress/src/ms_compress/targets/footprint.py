"""What an exported folder is: whose runtime reads it, its bytes on disk, its number of weights."""

from pathlib import Path

from attrs import asdict, frozen

from ms_compress.errors import ExportError
from ms_compress.files.untrusted import decoding
from ms_compress.targets.target import Contents, Target, all_formats


@frozen(kw_only=True)
class Footprint(Contents):
    """What is known of a folder without running it."""

    folder: Path
    target: str
    """`float`, `ct`, `ort` or `gguf`, as `open_runtime` takes it."""
    is_plain: bool
    """The model is not exported for a target, but as it was trained."""
    size_bytes: int
    """Bytes of the files that hold weights."""

    @property
    def bits_a_weight(self) -> float:
        """All bytes, in bits, over the number of weights."""
        return 8 * self.size_bytes / self.weights


def footprint(folder: str | Path) -> Footprint:
    """Look at a folder's files.

    Raises:
        ExportError: it is no exported model, or a file of it cannot be read.
    """
    folder = Path(folder)
    with decoding(folder, error=ExportError):
        found = next((each for each in all_formats() if each.holds(folder)), None)
        if found is None:
            raise ExportError(
                f"{folder}: no model is in it; give a folder with model.gguf, model.onnx, or config"
                ".json and safetensors"
            )
        files = [path for each in found.weight_files for path in folder.glob(each)]
        size = sum(path.stat().st_size for path in files)
    contents = found.contents(folder)
    if not contents.weights:
        raise ExportError(f"{folder}: its files hold no weights; export it again")
    return Footprint(
        **asdict(contents),
        folder=folder,
        target=found.name,
        is_plain=not isinstance(found, Target),
        size_bytes=size,
    )

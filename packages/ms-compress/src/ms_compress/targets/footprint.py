"""Format, size and number of weights of an exported folder."""

from pathlib import Path

from attrs import asdict, frozen

from ms_compress.errors import ExportError
from ms_compress.files.untrusted import decoding
from ms_compress.targets.target import Contents, Target, all_formats


@frozen(kw_only=True)
class Footprint(Contents):
    """Properties of a folder that are known without running its model."""

    folder: Path
    target: str
    """`float`, `ct`, `ort` or `gguf`, as accepted by `open_runtime`."""
    is_plain: bool
    """Whether the folder has a model for training, not one exported for a target."""
    size_bytes: int
    """Total size of the weight files."""

    @property
    def bits_a_weight(self) -> float:
        """Total size in bits divided by the number of weights."""
        return 8 * self.size_bytes / self.weights


def footprint(folder: str | Path) -> Footprint:
    """Inspect a folder's files.

    Raises:
        ExportError: it has no exported model, or a file cannot be read.
    """
    folder = Path(folder)
    with decoding(folder, error=ExportError):
        # Formats with a unique file come first, as such a folder has a config.json too.
        model_format = next((item for item in all_formats() if item.holds(folder)), None)
        if model_format is None:
            raise ExportError(
                f"{folder} has no model; use a folder with model.gguf, model.onnx, or config.json"
                " and safetensors"
            )
        files = [path for pattern in model_format.weight_files for path in folder.glob(pattern)]
        size = sum(path.stat().st_size for path in files)
    contents = model_format.contents(folder)
    if not contents.weights:
        raise ExportError(f"{folder} has no weights in its files; export it again")
    return Footprint(
        **asdict(contents),
        folder=folder,
        target=model_format.name,
        is_plain=not isinstance(model_format, Target),
        size_bytes=size,
    )

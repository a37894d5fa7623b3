"""Plain folders as a format: the baseline for compressed models, not an export target."""

from ms_compress.models.config_file import quantization
from ms_compress.targets.float.runtime import TorchRuntime
from ms_compress.targets.safetensors_folder import WEIGHT_FILES, contents, holds_safetensors
from ms_compress.targets.target import Format

TARGET = Format(
    name="float",
    one_file=False,
    holds=lambda folder: holds_safetensors(folder) and quantization(folder) is None,
    weight_files=WEIGHT_FILES,
    contents=contents,
    opens=lambda folder, *, threads, strict: TorchRuntime(folder),
)

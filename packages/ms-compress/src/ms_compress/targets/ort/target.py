"""ONNX files as a target, for onnxruntime."""

from ms_compress.targets.ort.read import contents, reader
from ms_compress.targets.ort.runtime import OnnxRuntime
from ms_compress.targets.ort.write import FILE, check, write
from ms_compress.targets.target import Target

TARGET = Target(
    name="ort",
    one_file=True,
    holds=lambda folder: (folder / FILE).is_file(),
    weight_files=("*.onnx", "*.onnx.data"),
    contents=contents,
    check=check,
    write=write,
    reader=reader,
    opens=lambda folder, *, threads, strict: OnnxRuntime(folder, threads=threads),
    runtime=OnnxRuntime.name,
    libraries=("onnxruntime",),
    extra="ort",
)

"""GGUF files as a target, for llama.cpp."""

from ms_compress.targets.gguf.read import contents, reader
from ms_compress.targets.gguf.runtime import LlamaRuntime
from ms_compress.targets.gguf.write import FILE, check, write
from ms_compress.targets.target import Target

TARGET = Target(
    name="gguf",
    one_file=True,
    holds=lambda folder: (folder / FILE).is_file(),
    weight_files=("*.gguf",),
    contents=contents,
    check=check,
    write=write,
    reader=reader,
    opens=lambda folder, *, threads, strict: LlamaRuntime(folder, threads=threads),
    runtime=LlamaRuntime.name,
    libraries=("llama_cpp",),
    extra="llama",
    serve="llama-server -m {folder}/model.gguf",
    example="""\
from llama_cpp import Llama

model = Llama("{folder}/model.gguf")
print(model("Hello", max_tokens=50)["choices"][0]["text"])""",
    needs_tokenizer=True,
    tolerance=0.02,  # its kernels round the input of every quantized matmul
)

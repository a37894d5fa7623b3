"""compressed-tensors as a target, for transformers and vLLM."""

from ms_compress.models.config_file import quantization
from ms_compress.targets.ct.read import contents, reader
from ms_compress.targets.ct.runtime import TransformersRuntime
from ms_compress.targets.ct.write import check, write
from ms_compress.targets.safetensors_folder import WEIGHT_FILES, holds_safetensors
from ms_compress.targets.target import Target

TARGET = Target(
    name="ct",
    one_file=False,
    holds=lambda folder: holds_safetensors(folder) and quantization(folder) is not None,
    weight_files=WEIGHT_FILES,
    contents=contents,
    check=check,
    write=write,
    reader=reader,
    opens=lambda folder, *, threads, strict: TransformersRuntime(folder, strict=strict),
    runtime=TransformersRuntime.name,
    libraries=("transformers", "compressed_tensors"),
    extra="ct",
    serve="vllm serve {folder}",
    example="""\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto")  # needs compressed-tensors
tokenizer = AutoTokenizer.from_pretrained("{folder}")
inputs = tokenizer("Hello", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))""",
    keeps_stored_dtypes=True,
    fuses_experts=True,
    reads_kv_cache_scales=True,
    opens_cheaply=False,  # transformers loads the whole model into memory
)

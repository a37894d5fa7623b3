"""Convert GGUF files to Hugging Face folders, to train, distill from or quantize again.

Weights are dequantized by the gguf library, one tensor at a time. A file is untrusted input: every
tensor must be known and have the shape that the file's metadata implies.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ms_compress.arguments import check_type
from ms_compress.errors import ExportError
from ms_compress.files.durable import sync_folder, write_synced, writing
from ms_compress.files.safetensors_file import TensorEntry, WeightFile
from ms_compress.files.untrusted import check_file, check_path
from ms_compress.models.decoder_config import llama3_divisors
from ms_compress.output_lock import new_folder
from ms_compress.targets.gguf.read import LIBRARY, halves
from ms_compress.targets.gguf.write import LAYER_TENSORS, MODEL_TENSORS, library
from ms_compress.targets.libraries import library_errors

MODEL_FILE = "model.safetensors"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Model class of each supported family; Mistral's files declare the architecture llama."""
LLAMA_3_FACTORS = (8.0, 32.0)
"""Rotary scaling factors of Llama 3.1 and Llama 3.2; their other constants are equal."""
MAX_LAYERS, MAX_EXPERTS = 1024, 4096

logger = logging.getLogger(__name__)


@frozen(kw_only=True, eq=False)
class _Source:
    """Parameters of a Hugging Face folder that are stored in one tensor of the file."""

    names: tuple[str, ...]
    """One name, or a name per expert."""
    shape: tuple[int, ...]
    """Shape of each parameter."""
    heads: int | None = None
    """Number of heads whose rows llama.cpp stores in another order; None if it does not."""


def import_gguf(
    path: str | Path,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Path:
    """Write a GGUF file's model as a Hugging Face folder, which appears complete or not at all.

    Args:
        path: GGUF file of a Llama, Mistral, Mixtral, Qwen 2, Qwen 3 or Qwen 3 MoE model.
        folder: output folder; must not exist.
        dtype: dtype of the weights; float32 holds the values of every GGUF type exactly.
        progress: called with the number of written tensors, and their total.

    Raises:
        ExportError: the file is damaged or not of these families, a value is NaN or infinite or
            too large for the dtype.
        WriteError: the folder exists, or cannot be written.
    """
    check_path("path", path, error=ExportError)
    check_path("folder", folder, error=ExportError, written="folder")
    check_type("dtype", dtype, torch.dtype, "a torch.dtype", error=ExportError)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ExportError(f"dtype must be float32, float16 or bfloat16, got {dtype}; use float32")
    path, folder = Path(path), Path(folder)
    if not path.is_file():
        raise ExportError(f"{path} must be a GGUF file, but it does not exist; correct the path")
    check_file(path, error=ExportError)
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ExportError(f"{path} must be a GGUF file, but does not start with GGUF")
    gguf = library()
    with library_errors(path, LIBRARY):
        file = gguf.GGUFReader(path)
    # Config first: it defines the tensors to expect, and their shapes.
    config = _config(path, file)
    sources = dict(_sources(config))
    tensors = _checked_tensors(path, file, sources)
    with new_folder(folder) as partial, writing(folder):
        entries = [
            TensorEntry(name=name, shape=source.shape, dtype=dtype)
            for source in sources.values()
            for name in source.names
        ]
        with WeightFile(partial / MODEL_FILE, entries) as output:
            for number, (name, source) in enumerate(sources.items()):
                for parameter, value in zip(
                    source.names, _values(path, gguf, tensors[name], source, dtype), strict=True
                ):
                    output.write(parameter, value)
                progress(number + 1, len(sources))
        document = {**config, "dtype": str(dtype).removeprefix("torch.")}
        text = json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"
        write_synced(partial / "config.json", text)
        _write_tokenizer(path, file, partial)
        sync_folder(partial)
    return folder


def _config(path: Path, file: Any) -> dict[str, Any]:
    """Build config.json from the file's metadata."""
    architecture = str(_field(path, file, "general.architecture", str))

    def number(key: str, kind: type = int, default: Any = None) -> Any:
        return _field(path, file, f"{architecture}.{key}", kind, default)

    experts = number("expert_count", default=0)
    family = {"qwen3moe": "qwen3_moe"}.get(architecture, architecture)
    if architecture == "llama" and experts:
        family = "mixtral"
    if family not in ARCHITECTURES:
        raise ExportError(
            f"{path}: its architecture must be llama, qwen2, qwen3 or qwen3moe, got"
            f" {architecture!r}; get the model's Hugging Face folder instead"
        )
    layers, hidden, heads = (
        number(key) for key in ("block_count", "embedding_length", "attention.head_count")
    )
    # A damaged file could otherwise ask for millions of layers.
    if not 0 < layers <= MAX_LAYERS or not 0 < heads <= hidden or not 0 <= experts <= MAX_EXPERTS:
        raise ExportError(
            f"{path}: its sizes must be plausible, got {layers} layers, {heads} heads, hidden size"
            f" {hidden} and {experts} experts; fetch it again"
        )
    # GGUF dims are innermost first, so the last one is the number of rows.
    vocabulary = next(
        (int(tensor.shape[-1]) for tensor in file.tensors if tensor.name == "token_embd.weight"), 0
    )
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", default=heads),
        "head_dim": number("attention.key_length", default=hidden // heads),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon", float),
        "hidden_act": "silu",
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in file.tensors),
        "rope_parameters": _rope(path, file, number),
    }
    if experts:
        config["num_experts_per_tok"] = number("expert_used_count")
        config["num_local_experts" if family == "mixtral" else "num_experts"] = experts
    if family == "qwen3_moe":
        config["moe_intermediate_size"] = number("expert_feed_forward_length")
        config["norm_topk_prob"] = True
    names = {tensor.name for tensor in file.tensors}
    if "blk.0.attn_q.bias" in names and family == "llama":
        config["attention_bias"] = True
    for key in ("bos", "eos"):
        token = _field(path, file, f"tokenizer.ggml.{key}_token_id", int, -1)
        if 0 <= token < vocabulary:
            config[f"{key}_token_id"] = token
    return config


def _rope(path: Path, file: Any, number: Callable[..., Any]) -> dict[str, Any]:
    """Return the rotary settings.

    Raises:
        ExportError: the scaling of the frequencies is neither Llama 3's nor linear.
    """
    theta = number("rope.freq_base", float, 10000.0)
    scaling = number("rope.scaling.type", str, "none")
    # llama.cpp stores only Llama 3's divisors, not the constants. Recompute them with the known
    # constants and compare.
    divisors = next((tensor for tensor in file.tensors if tensor.name == "rope_freqs.weight"), None)
    if divisors is not None:
        stored = torch.from_numpy(divisors.data.copy()).float()
        for factor in LLAMA_3_FACTORS:
            rope: dict[str, Any] = {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
            expected = torch.tensor(llama3_divisors(rope, theta, 2 * stored.numel()))
            if torch.allclose(stored, expected.float(), rtol=1e-5):
                return rope
        raise ExportError(
            f"{path}: its rope_freqs must match Llama 3.1 or 3.2, got other values; get the model's"
            " Hugging Face folder instead"
        )
    if scaling == "linear":
        factor = number("rope.scaling.factor", float)
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if scaling != "none":
        raise ExportError(
            f"{path}: rope.scaling.type must be none or linear, got {scaling!r}; get the model's"
            " Hugging Face folder instead"
        )
    return {"rope_type": "default", "rope_theta": theta}


def _sources(config: dict[str, Any]) -> Iterator[tuple[str, _Source]]:
    """Yield the tensors that a model of these sizes has, with their parameters."""
    family, hidden = config["model_type"], config["hidden_size"]
    heads, key_heads, width = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    experts = config.get("num_local_experts", config.get("num_experts", 0))
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    # llama.cpp interleaves the two halves of each head's rotary features for these families.
    permuted = family in ("llama", "mixtral")

    def source(*names: str, shape: tuple[int, ...], heads: int | None = None) -> _Source:
        return _Source(names=names, shape=shape, heads=heads if permuted else None)

    for module, stored in MODEL_TENSORS.items():
        if module == "lm_head" and config["tie_word_embeddings"]:
            continue
        rows = () if module == "model.norm" else (config["vocab_size"],)
        yield f"{stored}.weight", source(f"{module}.weight", shape=(*rows, hidden))
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (key_heads * width, hidden),
        "self_attn.v_proj": (key_heads * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
    }
    if family in ("qwen3", "qwen3_moe"):
        shapes |= {"self_attn.q_norm": (width,), "self_attn.k_norm": (width,)}
    if not experts:
        shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
        shapes["mlp.down_proj"] = (hidden, inner)
    order = {"self_attn.q_proj": heads, "self_attn.k_proj": key_heads}
    has_bias = family == "qwen2" or bool(config.get("attention_bias"))
    mixture = "block_sparse_moe" if family == "mixtral" else "mlp"
    matrices = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for layer in range(config["num_hidden_layers"]):
        block, prefix = f"blk.{layer}", f"model.layers.{layer}"
        for part, shape in shapes.items():
            name = f"{block}.{LAYER_TENSORS[part]}"
            yield (
                f"{name}.weight",
                source(f"{prefix}.{part}.weight", shape=shape, heads=order.get(part)),
            )
            # Qwen 2 has biases on q, k and v only; Llama's attention_bias includes the output.
            is_biased = part[-6:] in ("q_proj", "k_proj", "v_proj") or family == "llama"
            if has_bias and part.startswith("self_attn.") and part.endswith("proj") and is_biased:
                yield (
                    f"{name}.bias",
                    source(f"{prefix}.{part}.bias", shape=shape[:1], heads=order.get(part)),
                )
        if experts:
            router = f"{prefix}.{mixture}.gate.weight"
            yield f"{block}.ffn_gate_inp.weight", source(router, shape=(experts, hidden))
            for matrix, stored in zip(matrices, ("gate", "up", "down"), strict=True):
                names = [
                    f"{prefix}.{mixture}.experts.{index}.{matrix}.weight"
                    for index in range(experts)
                ]
                shape = (hidden, inner) if stored == "down" else (inner, hidden)
                yield f"{block}.ffn_{stored}_exps.weight", source(*names, shape=shape)


def _checked_tensors(path: Path, file: Any, sources: dict[str, _Source]) -> dict[str, Any]:
    """Return the file's tensors by name.

    Raises:
        ExportError: a tensor is missing, unknown or of the wrong shape.
    """
    tensors = {tensor.name: tensor for tensor in file.tensors}
    expected = {*sources, "rope_freqs.weight"}
    if unknown := sorted(tensors.keys() - expected):
        raise ExportError(
            f"{path}: its tensors must match its architecture, but it has {unknown[0]!r}; get"
            " the model's Hugging Face folder instead"
        )
    for name, source in sources.items():
        if name not in tensors:
            raise ExportError(f"{path} must have the tensor {name!r}; fetch it again")
        stacked = (len(source.names),) if len(source.names) > 1 else ()
        # GGUF lists the innermost dim first.
        shape = tuple(int(size) for size in reversed(tensors[name].shape))
        if shape != (*stacked, *source.shape):
            raise ExportError(
                f"{path}: {name} must have the shape {(*stacked, *source.shape)} implied by the "
                f"file's sizes, got {shape}; fetch it again"
            )
    return tensors


def _values(
    path: Path, gguf: Any, tensor: Any, source: _Source, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield the dequantized parameters of one tensor."""
    # Expert by expert, so that a stacked tensor is never dequantized at once.
    for index, name in enumerate(source.names):
        with library_errors(path, LIBRARY):
            data = tensor.data if len(source.names) == 1 else tensor.data[index]
            values = torch.from_numpy(gguf.dequantize(data, tensor.tensor_type).copy())
            values = values.view(source.shape)
        if source.heads is not None:
            values = values[halves(len(values), source.heads)]
        values = values.to(dtype)
        if nonfinite := int((~values.isfinite()).sum()):
            raise ExportError(
                f"{path}: {nonfinite} values of {name} are NaN, infinite or too large for {dtype};"
                " fetch it again, or use float32"
            )
        yield values


def _field(path: Path, file: Any, name: str, kind: type, default: Any = None) -> Any:
    """Return a value of the file's metadata.

    Raises:
        ExportError: the value is missing without a default, or has the wrong type.
    """
    field = file.fields.get(name)
    if field is None and default is not None:
        return default
    with library_errors(path, LIBRARY):
        value = None if field is None else field.contents()
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    # bool is a subclass of int, and no field here is a bool.
    if not isinstance(value, kind) or isinstance(value, bool):
        problem = "lacks it" if value is None else f"has {value!r:.80}"
        raise ExportError(f"{path}: {name} must be {kind.__name__}, but the file {problem}")
    return value


def _write_tokenizer(path: Path, file: Any, folder: Path) -> None:
    """Convert the file's tokenizer with transformers; skip a placeholder tokenizer."""
    field = file.fields.get("tokenizer.ggml.tokens")
    with library_errors(path, LIBRARY):
        texts = [] if field is None else field.contents(slice(0, 2))
    if not texts or texts == ["[0]", "[1]"]:
        logger.warning("%s has no tokenizer; copy the model's tokenizer.json to %s", path, folder)
        return
    if find_spec("transformers") is None:
        logger.warning("the tokenizer of %s needs transformers: pip install transformers", path)
        return
    import transformers

    # Hide transformers' progress bars and warnings.
    level = logging.getLogger("transformers").level
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        with library_errors(path, "transformers", "convert its tokenizer"), ExitStack() as stack:
            stack.enter_context(redirect_stderr(StringIO()))
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
            tokenizer.save_pretrained(folder)
    finally:
        logging.getLogger("transformers").setLevel(level)

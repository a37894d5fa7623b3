"""Exported files with a single fault, as from a faulty writer."""

from collections.abc import Callable

import gguf
import numpy as np
import torch
from torch import Tensor

from ms_compress.targets.gguf.write import permuted

__all__ = ["GGUF", "mutate_gguf", "mutate_onnx", "mutate_safetensors"]

HEADS, KEY_HEADS = 4, 2
Mutant = Callable[[str, np.ndarray], np.ndarray]


def swapped_nibbles(name: str, raw: np.ndarray) -> np.ndarray:
    """Swap the halves of each byte of codes; raw (N, G, 18)."""
    raw[..., 2:] = (raw[..., 2:] >> 4) | (raw[..., 2:] << 4)
    return raw


def shifted_scales(name: str, raw: np.ndarray) -> np.ndarray:
    """Give every group its neighbor's scale."""
    raw[..., :2] = np.roll(raw[..., :2], 1, axis=1)
    return raw


def dropped_scales(name: str, raw: np.ndarray) -> np.ndarray:
    """Set all scales to 1."""
    raw[..., :2] = np.array([1.0], dtype=np.float16).view(np.uint8)
    return raw


def unpermuted(name: str, raw: np.ndarray) -> np.ndarray:
    """Put rows of q and k into Hugging Face's order."""
    heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return raw
    rows = torch.from_numpy(raw)
    half = rows.shape[0] // heads // 2
    split = rows.reshape(heads, half, 2, *rows.shape[1:])
    return split.transpose(1, 2).reshape(rows.shape).numpy()


def permuted_twice(name: str, raw: np.ndarray) -> np.ndarray:
    """Permute rows of q and k once more."""
    heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(name.split(".")[-2])
    return raw if heads is None else permuted(torch.from_numpy(raw), heads).numpy()


def swapped_rows(name: str, raw: np.ndarray) -> np.ndarray:
    """Swap two rows of a late layer with their scales, which hardly changes the logits."""
    if name == "blk.1.attn_q.weight":
        raw[[0, 1]] = raw[[1, 0]]
    return raw


GGUF: dict[str, Mutant] = {
    "swapped nibbles": swapped_nibbles,
    "shifted scales": shifted_scales,
    "dropped scales": dropped_scales,
    "unpermuted": unpermuted,
    "permuted twice": permuted_twice,
    "swapped rows": swapped_rows,
}


def mutate_gguf(path: str, mutant: Mutant, only: str = "") -> None:
    """Change the Q4_0 tensors whose name contains `only`, in place."""
    reader = gguf.GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0 and only in tensor.name:
            raw = tensor.data.reshape(tensor.data.shape[0], -1, 18)
            tensor.data[:] = mutant(tensor.name, raw.copy()).reshape(tensor.data.shape)
    reader.data.flush()


def mutate_safetensors(path: str, change: Callable[[str, Tensor], Tensor]) -> None:
    """Rewrite a file with `change(name, tensor)` for every tensor."""
    from safetensors.torch import load_file, save_file

    tensors = {name: change(name, tensor) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def mutate_onnx(path: str, change: Callable[[str, np.ndarray], np.ndarray]) -> None:
    """Rewrite a model with `change(name, array)` for every constant."""
    import onnx

    model = onnx.load(path)
    for constant in model.graph.initializer:
        array = onnx.numpy_helper.to_array(constant).copy()
        new = np.ascontiguousarray(change(constant.name, array))
        constant.CopyFrom(onnx.numpy_helper.from_array(new, constant.name))
    onnx.save(model, path)

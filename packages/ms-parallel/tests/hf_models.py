"""Random small transformers models as references, computing in float64 throughout."""

from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ms_parallel.models.registry import weight_slices

__all__ = ["InFloat64", "expected_gradient", "folder_gradients", "random_model"]

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CORRECTION = "e_score_correction_bias"
"""Correction of expert scores in routing; a buffer that is saved."""


def random_model(family: Any, seed: int) -> Any:
    """A transformers model with random weights, biases and norms.

    Args:
        family: module of `families/` with a MODEL_TYPE and a `draw` function for its settings.
        seed: seed of settings and weights.
    """
    settings = {**SIZES, **family.draw(Random(seed))}
    config = transformers.AutoConfig.for_model(family.MODEL_TYPE, **settings)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        auto_class: Any = transformers.AutoModelForCausalLM
        model = auto_class.from_config(config, attn_implementation="eager").eval()
        model.set_experts_implementation("eager")
        corrections = (value for name, value in model.named_buffers() if name.endswith(CORRECTION))
        for value in (*model.parameters(), *corrections):
            value.add_(0.1 * torch.randn(value.shape))
    return model


class InFloat64(TorchFunctionMode):
    """Compute in float64 where a model asks for float32, except for rotary angles.

    Args:
        model: model that is already in float64.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.in_rotary = False
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.register_forward_pre_hook(lambda *_: self._set_in_rotary(True))
                module.register_forward_hook(lambda *_: self._set_in_rotary(False))
            if hasattr(module, "scalar_embed_scale"):  # rounded to float32 in the constructor
                module.embed_scale.fill_(module.scalar_embed_scale)  # type: ignore[operator,union-attr]

    def _set_in_rotary(self, in_rotary: bool) -> None:
        self.in_rotary = in_rotary

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not self.in_rotary:
            if func is Tensor.float:
                func = Tensor.double
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def folder_gradients(model: Any, folder: Path) -> dict[str, Tensor]:
    """Gradients of a model by tensor name of its folder, where experts are separate."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def expected_gradient(
    config: Any, name: str, like: Tensor, folder_grads: dict[str, Tensor]
) -> Tensor:
    """Gradient of a native parameter, assembled from gradients of the folder's tensors."""
    grad = torch.zeros_like(like)
    for piece in weight_slices(config)[name]:
        grad[piece.box] = piece.to_parameter(folder_grads[piece.tensor][piece.part])
    return grad

"""Models of transformers as references: drawn small, and computing in float64 throughout."""

from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ms_parallel.models.registry import weight_slices

__all__ = ["InFloat64", "drawn_model", "expected_gradient", "folder_gradients"]

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
"""What experts' scores are corrected by when they are chosen: in the folder, and no parameter."""


def drawn_model(family: Any, seed: int) -> Any:
    """A model of transformers with random weights, biases and norms included.

    Args:
        family: a module of `families/`: a MODEL_TYPE, and `draw` of its settings.
        seed: of settings and weights.
    """
    settings = {**SIZES, **family.draw(Random(seed))}
    config = transformers.AutoConfig.for_model(family.MODEL_TYPE, **settings)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        made: Any = transformers.AutoModelForCausalLM
        model = made.from_config(config, attn_implementation="eager").eval()
        model.set_experts_implementation("eager")
        corrections = (each for name, each in model.named_buffers() if name.endswith(CORRECTION))
        for value in (*model.parameters(), *corrections):
            value.add_(0.1 * torch.randn(value.shape))
    return model


class InFloat64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32, but for its angles.

    Args:
        model: in float64 already.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.turning = False
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.register_forward_pre_hook(lambda *_: self._turn(True))
                module.register_forward_hook(lambda *_: self._turn(False))
            if hasattr(module, "scalar_embed_scale"):  # which was rounded to float32 when built
                module.embed_scale.fill_(module.scalar_embed_scale)  # type: ignore[operator,union-attr]

    def _turn(self, turning: bool) -> None:
        self.turning = turning

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not self.turning:
            if func is Tensor.float:
                func = Tensor.double
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def folder_gradients(model: Any, folder: Path) -> dict[str, Tensor]:
    """The gradients of a model by names of its folder, where experts have tensors of their own."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def expected_gradient(config: Any, name: str, like: Tensor, theirs: dict[str, Tensor]) -> Tensor:
    """The gradient of one of our parameters from those of the tensors that it is made of."""
    whole = torch.zeros_like(like)
    for piece in weight_slices(config)[name]:
        whole[piece.box] = piece.to_parameter(theirs[piece.tensor][piece.part])
    return whole

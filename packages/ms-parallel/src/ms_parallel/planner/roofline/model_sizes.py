"""Sizes of a model for the roofline, from its configuration and its parameter shapes."""

from typing import Any, Final

from ms_parallel.errors import ConfigError
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.registry import parameter_shapes
from ms_parallel.planner.roofline.shape import DecoderSizes, ExpertSizes, LatentSizes
from ms_parallel.split.context.kinds import HeadSizes

TOLERANCE: Final = 0.03
"""Relative error in the number of weights above which a model is rejected."""


def decoder_sizes(config: ModelConfig) -> DecoderSizes:
    """Derive the sizes of a model, and check them against its number of weights.

    Args:
        config: configuration of any family whose layers are attention and an MLP.

    Raises:
        ConfigError: the sizes imply another number of weights than the model has.
    """
    heads = HeadSizes.of(config, 1)
    experts, latents = _experts(config), _latents(config)
    candidates = {  # configurations do not say if the MLP is gated
        gated: DecoderSizes(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads.queries,
            key_value_heads=heads.keys,
            head_dim=heads.width,
            value_dim=heads.value_width,
            inner=config.intermediate_size,
            gated=gated,
            vocabulary=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            experts=experts,
            latents=latents,
            window=_window(config),
            mtp_layers=config.mtp_layers,
        )
        for gated in (True, False)
    }
    shapes = parameter_shapes(config).values()
    matrix_weights = sum(shape.numel() for shape in shapes if len(shape) > 1)
    nearest = min(candidates.values(), key=lambda sizes: abs(sizes.weights - matrix_weights))
    if abs(nearest.weights - matrix_weights) > TOLERANCE * matrix_weights:
        raise ConfigError(
            f"{config.model_type} has {matrix_weights} weights in matrices, but its sizes imply"
            f" {nearest.weights}; measure its layers instead"
        )
    return nearest


def _experts(config: Any) -> ExpertSizes | None:
    mixture = config.mixture
    if mixture is None or not mixture.layers:
        return None
    width = int(getattr(config, "moe_intermediate_size", config.intermediate_size))
    return ExpertSizes(
        count=mixture.choice.num_experts,
        chosen=mixture.choice.num_experts_per_tok,
        width=width,
        shared_width=width * int(getattr(config, "n_shared_experts", 0) or 0),
        first_layer=config.num_hidden_layers - len(mixture.layers),
    )


def _latents(config: Any) -> LatentSizes | None:
    if getattr(config, "kv_lora_rank", None) is None:
        return None
    return LatentSizes(
        query=config.q_lora_rank,
        key=config.kv_lora_rank,
        rotary=config.qk_rope_head_dim,
    )


def _window(config: Any) -> int | None:
    """Sliding window of all layers; None, as for full attention, if layers differ."""
    if not hasattr(config, "window"):
        return None
    windows = {config.window(layer) for layer in range(config.num_hidden_layers)}
    return windows.pop() if len(windows) == 1 else None

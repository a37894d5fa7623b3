"""Sizes of a model that determine its memory and time."""

from typing import Any

from attrs import frozen

from ms_parallel.models.config import ModelConfig
from ms_parallel.models.registry import model_plan, parameter_shapes
from ms_parallel.split.context.kinds import HeadSizes


@frozen(kw_only=True)
class LayerSizes:
    """Parameters of a layer, or of the embedding or head."""

    split: int = 0
    """Parameters that tensor parallelism splits, without experts."""
    replicated: int = 0
    """Parameters that are replicated on all tensor ranks."""
    experts: int = 0
    """Parameters of all routed experts, which tensor parallelism also splits."""

    @property
    def all(self) -> int:
        """Total number of parameters."""
        return self.split + self.replicated + self.experts

    def rank_parameters(self, tensor: int, expert: int) -> int:
        """Number of parameters on a rank before sharding."""
        return -(-self.split // tensor) + self.replicated + -(-self.experts // (tensor * expert))


@frozen(kw_only=True)
class ModelSizes:
    """Sizes of a model for the planner."""

    layers: tuple[LayerSizes, ...]
    first: LayerSizes
    """Embedding, and everything else before the layers."""
    last: LayerSizes
    """Head, which may be the embedding."""
    cuts: tuple[int, ...]
    """Layers at which a stage may start."""
    hidden: int
    vocabulary: int
    attention: int
    """Width of the queries of a layer: heads times head dimension."""
    keys: int
    """Width of keys and values together."""
    experts: int
    """Routed experts per layer; 0 without experts."""
    experts_per_token: int
    """Experts per token."""
    tied: bool

    @property
    def parameters(self) -> int:
        """Total number of parameters; tied ones count once."""
        ends = self.first.all + (0 if self.tied else self.last.all)
        return sum(layer.all for layer in self.layers) + ends

    @classmethod
    def of(cls, config: ModelConfig) -> "ModelSizes":
        """Compute the sizes from the shapes of the parameters and the model's plan."""
        plan = model_plan(config)
        layers: list[dict[str, int]] = [{} for _ in range(config.num_hidden_layers)]
        ends: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for name, shape in parameter_shapes(config).items():
            # Parameters outside of `layers.N` belong to the embedding or the head.
            parts = name.split(".")
            counts = layers[int(parts[parts.index("layers") + 1])] if "layers" in parts else None
            if counts is None:
                counts = ends[0 if "embed" in name else 1]
            # Without a tensor-parallel plan, all parameters are replicated.
            category = "replicated"
            if plan.tensor:
                style, split = plan.style(name), plan.split_dim(name) is not None
                category = "replicated"
                if style.startswith("expert"):
                    category = "experts"
                elif split:
                    category = "split"
            counts[category] = counts.get(category, 0) + shape.numel()
        first, last = (LayerSizes(**end) for end in ends)
        sizes = HeadSizes.of(config, 1)
        experts, experts_per_token = _experts(config)
        return cls(
            layers=tuple(LayerSizes(**layer) for layer in layers),
            first=first,
            last=first if config.tie_word_embeddings else last,
            cuts=tuple(plan.cuts),
            hidden=config.hidden_size,
            vocabulary=config.vocab_size,
            attention=sizes.queries * sizes.width,
            keys=sizes.key_size,
            experts=experts,
            experts_per_token=experts_per_token,
            tied=bool(config.tie_word_embeddings),
        )


def _experts(config: Any) -> tuple[int, int]:
    mixture = getattr(config, "mixture", None)
    if mixture is None or not mixture.layers:
        return 0, 0
    return int(mixture.choice.num_experts), int(mixture.choice.num_experts_per_tok)

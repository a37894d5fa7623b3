"""A model in the numbers that its memory and its time follow from."""

from typing import Any

from attrs import frozen

from ms_parallel.models.config import ModelConfig
from ms_parallel.models.registry import model_plan, parameter_shapes
from ms_parallel.split.context.kinds import HeadSizes


@frozen(kw_only=True)
class LayerSizes:
    """Parameters of one layer, or of what lies at an end of the model."""

    split: int = 0
    """Parameters that the tensor axis shares out, experts apart."""
    whole: int = 0
    """Parameters that each tensor rank has all of."""
    experts: int = 0
    """Parameters of all routed experts, which the tensor axis shares out too."""

    @property
    def all(self) -> int:
        """All of them."""
        return self.split + self.whole + self.experts

    def held(self, tensor: int, expert: int) -> int:
        """Count the parameters that a rank has before they are sharded."""
        return -(-self.split // tensor) + self.whole + -(-self.experts // (tensor * expert))


@frozen(kw_only=True)
class ModelSizes:
    """What a planner has to know of a model."""

    layers: tuple[LayerSizes, ...]
    first: LayerSizes
    """Sizes of the embedding, and whatever else lies before the layers."""
    last: LayerSizes
    """Sizes of the head, which may be the embedding."""
    cuts: tuple[int, ...]
    """Layers at which a stage may begin."""
    hidden: int
    vocabulary: int
    attention: int
    """Numbers of a position's queries and results in one layer: heads times their width."""
    keys: int
    """Numbers of its keys and values."""
    experts: int
    """Routed ones of a layer; 0 if there are none."""
    chosen: int
    """Experts that a token passes."""
    tied: bool

    @property
    def parameters(self) -> int:
        """All of them; tied ones count once."""
        ends = self.first.all + (0 if self.tied else self.last.all)
        return sum(layer.all for layer in self.layers) + ends

    @classmethod
    def of(cls, config: ModelConfig) -> "ModelSizes":
        """Count the sizes of a model, from the shapes of its parameters and its plan."""
        plan = model_plan(config)
        layers: list[dict[str, int]] = [{} for _ in range(config.num_hidden_layers)]
        ends: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for name, shape in parameter_shapes(config).items():
            parts = name.split(".")
            place = layers[int(parts[parts.index("layers") + 1])] if "layers" in parts else None
            if place is None:
                place = ends[0 if "embed" in name else 1]
            kind = "whole"
            if plan.tensor:
                style, split = plan.style(name), plan.split_dim(name) is not None
                kind = "experts" if style.startswith("expert") else "split" if split else "whole"
            place[kind] = place.get(kind, 0) + shape.numel()
        first, last = (LayerSizes(**end) for end in ends)
        sizes = HeadSizes.of(config, 1)
        experts, chosen = _experts(config)
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
            chosen=chosen,
            tied=bool(config.tie_word_embeddings),
        )


def _experts(config: Any) -> tuple[int, int]:
    mixture = getattr(config, "mixture", None)
    if mixture is None or not mixture.layers:
        return 0, 0
    return int(mixture.choice.num_experts), int(mixture.choice.num_experts_per_tok)

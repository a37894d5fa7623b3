"""Records the experts selected for each token during generation, for replay in training.

Shapes: N responses, B rows of a forward pass, S positions of prompt and response without the last
token, L layers with experts, k experts per token.
"""

from contextlib import ExitStack
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ms_align.errors import ConfigError, ModelError

FREE = -1
"""Expert index at positions where the router selects the experts."""


@frozen(kw_only=True)
class RoutedLayers:
    """MoE layers of a model."""

    layers: tuple[int, ...]
    """Indices of the MoE layers."""
    depth: int
    """Total number of layers."""
    experts: int
    """Number of experts per layer."""
    experts_per_token: int
    """k."""

    @classmethod
    def of(cls, engine: Any) -> "RoutedLayers":
        """Return the MoE layers of an engine's model.

        Raises:
            ConfigError: the model is dense, or not a decoder of ms-parallel.
        """
        module: Any = getattr(engine, "module", None)
        base: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
        # Engines with a layout have a config, and no complete module.
        config: Any = getattr(engine if base is None else base, "config", None)
        mixture = getattr(config, "mixture", None)
        if mixture is None or not mixture.layers:
            name = getattr(config, "model_type", type(base or engine).__name__)
            raise ConfigError(
                f"router_replay needs a model of ms-parallel with experts, and {name} has none; "
                "remove router_replay"
            )
        return cls(
            layers=tuple(sorted(mixture.layers)),
            depth=config.num_hidden_layers,
            experts=mixture.choice.num_experts,
            experts_per_token=mixture.choice.num_experts_per_tok,
        )


class ExpertRecorder:
    """Collects the selected experts of all responses from the forward passes of a generator.

    Args:
        module: model of ms-parallel with experts.
        rows: number of responses N.
        positions: maximum S.

    Raises:
        ModelError: the model has no experts that can be recorded.
    """

    def __init__(self, module: nn.Module, *, rows: int, positions: int) -> None:
        self._shape = rows, positions
        self._context = ExitStack()
        self._experts: Tensor | None = None
        """(N, S, L, k) int16; None before the first forward pass."""
        try:
            from ms_parallel.models import record_experts

            self._latest = self._context.enter_context(record_experts(module))
        except (ImportError, ValueError) as error:
            raise ModelError(
                f"router_replay needs a model of ms-parallel with experts ({error}); remove "
                "router_replay"
            ) from error

    def close(self) -> None:
        """Stop recording."""
        self._context.close()

    def add_prompts(self, rows: Tensor, copies: Tensor) -> None:
        """Store the experts of prompts, given the prompt index (B,) of each response (B,)."""
        latest = self._latest().to(torch.int16)  # (distinct prompts, prompt length, L, k)
        self._columns(latest)[rows, : latest.shape[1]] = latest[copies.to(latest.device)]

    def add_step(self, rows: Tensor, positions: Tensor) -> None:
        """Store the experts of one more token per response, at positions (B,)."""
        latest = self._latest().to(torch.int16)  # (B, 1, L, k)
        columns = self._columns(latest)
        # Finished rows may run beyond the last position.
        columns[rows, positions.clamp(max=columns.shape[1] - 1)] = latest[:, 0]

    def _columns(self, latest: Tensor) -> Tensor:
        if self._experts is None:
            self._experts = latest.new_full((*self._shape, *latest.shape[2:]), FREE)
        return self._experts

    def result(self, lengths: Tensor) -> Tensor:
        """Return the experts (N, S, L, k) int16 of rows with `lengths` (N,) tokens each."""
        assert self._experts is not None
        experts = self._experts[:, : int(lengths.max()) - 1].cpu()
        # The last token of a row is only a target.
        padding = torch.arange(experts.shape[1]) >= lengths[:, None] - 1
        return experts.masked_fill(padding[..., None, None], FREE)

"""`ms_parallel.Engine` as an engine of ours: any layout, with the figures of our losses.

What differs from an engine that is not split: temperatures and entropies take the whole logits.
Learning rates are those of `OptimizerOptions`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from ms_align.engines.optimizer import OptimizerOptions
from ms_align.errors import ConfigError, ModelError
from ms_align.losses.logprob import entropies, token_logprobs
from ms_align.losses.protocol import Batch, Loss, Output

if TYPE_CHECKING:
    from ms_align.engines.parallel_adapters import ParallelAdapters
    from ms_align.lora.adapters import LoraOptions
    from ms_parallel import Engine, Layout

__all__ = ["ParallelEngine", "ParallelUpdate"]

EVERYWHERE = slice(None)


@frozen(kw_only=True)
class ParallelUpdate:
    """What one update did; the same on every process."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    skipped: Literal["no_targets", "nonfinite"] | None
    statistics: Mapping[str, float]


class _Output:
    """Our view of what the last stage gives."""

    def __init__(self, output: Any, engine: "Engine") -> None:
        self._output = output
        self._engine = engine

    def logits(self, positions: slice = EVERYWHERE) -> Tensor:
        logits: Tensor = self._output.logits(positions)
        return logits

    def token_losses(self, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
        if temperature == 1.0:
            losses: Tensor = self._output.token_losses(targets)
            return losses
        return -token_logprobs(self.logits(), targets, temperature=temperature)

    def entropies(self, counted: Tensor, *, temperature: float = 1.0) -> Tensor:
        return entropies(self.logits(), temperature=temperature) * counted

    def head(self, name: str) -> Tensor:
        norm: Any = self._engine.stages[len(self._engine.placement) - 1].model.norm
        if not hasattr(norm, f"{name}_matrix"):
            raise ModelError(
                f"the engine has no head {name!r}; start it with heads={{{name!r}: 1}}, or give a "
                "model of its own for it"
            )
        parts = self._engine.groups.layout.tensor
        matrix = _share(getattr(norm, f"{name}_matrix").float(), parts)
        offset = _share(getattr(norm, f"{name}_offset").float(), parts)
        return torch.nn.functional.linear(
            _share(self._output.hidden.float(), parts), matrix, offset
        )


def _share(x: Tensor, parts: int) -> Tensor:
    """`x`, of whose gradient only one part in `parts` flows: each tensor rank has a share of it."""
    return x if parts == 1 else x.detach() + (x - x.detach()) / parts


def _adding(
    heads: Mapping[str, int], more: Callable[[Any], object] | None
) -> Callable[[Any], object]:
    """What adds linear heads beside the final norm, which every layout keeps whole."""

    def prepare(stage: Any) -> None:
        if more is not None:
            more(stage)
        if not stage.last:
            return
        norm = stage.model.norm
        for name, width in heads.items():
            matrix = torch.empty(width, norm.weight.shape[0], device=norm.weight.device)
            norm.register_parameter(f"{name}_matrix", torch.nn.Parameter(matrix))
            norm.register_parameter(f"{name}_offset", torch.nn.Parameter(matrix[:, 0].clone()))

    return prepare


class _Told:
    """One of our losses, as ms_parallel calls it; keeps the figures of the microbatches."""

    def __init__(self, loss: Loss, engine: "Engine") -> None:
        self.loss = loss
        self.engine = engine
        self.figures: list[Tensor] = []
        """Of each microbatch: the loss's figures, and its weight."""

    def weight(self, batch: Batch) -> float:
        return self.loss.weight(batch)

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        total, figures = self.loss(_Output(output, self.engine), batch)
        weight = figures.new_tensor([self.loss.weight(batch)])
        self.figures.append(torch.cat((figures.detach(), weight)))
        return total


class ParallelEngine:
    """Runs a decoder of ms-parallel under a layout.

    Args:
        engine: the engine; its optimizer's settings are replaced by `optimizer`.
        optimizer: AdamW's settings.

    Raises:
        ConfigError: the layout splits the sequence, which losses over whole rows cannot follow.
    """

    def __init__(self, engine: "Engine", optimizer: OptimizerOptions | None = None) -> None:
        self.engine = engine
        self.options = optimizer or OptimizerOptions()
        self.adapters: ParallelAdapters | None = None
        if engine.groups.layout.context > 1:
            raise ConfigError(
                "context is above 1 in the layout, and rows are judged whole; use data, tensor or "
                "pipeline"
            )

    @classmethod
    def start(
        cls,
        model: str | Path,
        layout: "Layout",
        *,
        optimizer: OptimizerOptions | None = None,
        heads: Mapping[str, int] | None = None,
        **settings: Any,
    ) -> "ParallelEngine":
        """Connects the layout's processes and reads each its part of a model's folder.

        Args:
            model: a folder with config.json and weights.
            layout: how the processes split the work.
            optimizer: AdamW's settings.
            heads: width of each extra linear head on the final hidden states, by name, such as
                `{"value": 1}`; they begin at zero.
            settings: further arguments of `ms_parallel.Engine`.

        Raises:
            ConfigError: ms-parallel is not installed.
        """
        try:
            from ms_parallel import AdamWConfig, Engine
        except ImportError as error:
            raise ConfigError(
                "a layout needs ms-parallel; install it with `pip install ms-align[parallel]`"
            ) from error
        options = optimizer or OptimizerOptions()
        config = AdamWConfig(
            learning_rate=options.learning_rate,
            betas=options.betas,  # type: ignore[arg-type]
            epsilon=options.epsilon,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
        )
        if heads:
            settings["prepare"] = _adding(heads, settings.get("prepare"))
        return cls(Engine(model, layout, optimizer=config, **settings), options)

    def adapt(self, options: "LoraOptions", *, seed: int = 0, base_name: str = "") -> None:
        """Train adapters alone, over data and pipeline; see `ParallelAdapters`."""
        from ms_align.engines.parallel_adapters import ParallelAdapters

        self.adapters = ParallelAdapters(self.engine, options, seed=seed, base_name=base_name)

    module = None

    @property
    def vocabulary_size(self) -> int | None:
        """Tokens that the model knows."""
        return int(self.engine.config.vocab_size)

    @property
    def context(self) -> int | None:
        """Longest row that it takes."""
        return getattr(self.engine.config, "max_position_embeddings", None)

    @property
    def data_rank(self) -> int:
        """Which group of processes that read different rows this one is in."""
        return self.engine.groups.place.data

    @property
    def data_ranks(self) -> int:
        """How many such groups there are."""
        return self.engine.groups.layout.data

    def update(self, batch: Mapping[str, Any], loss: Loss) -> ParallelUpdate:
        """One step of the optimizer on the global batch, of which `batch` is this rank's rows."""
        rate = self.options.rate(self.engine.step)
        self.engine.optimizer.config = evolve(self.engine.optimizer.config, learning_rate=rate)
        told = _Told(loss, self.engine)
        update = self.engine.update(batch, told)
        names = loss.statistics
        figures = torch.zeros(len(names) + 1, device=self.engine.device)
        if told.figures and self.engine.groups.place.tensor == 0:
            figures += torch.stack(told.figures).sum(0)
        *sums, weight = self.engine.groups.all_reduce(figures).tolist()
        empty = update.skipped and update.loss == 0.0 and update.grad_norm == 0.0
        skipped: Any = ("no_targets" if empty else "nonfinite") if update.skipped else None
        return ParallelUpdate(
            loss=math.nan if empty else update.loss,
            grad_norm=math.nan if empty else update.grad_norm,
            learning_rate=rate,
            tokens=update.tokens,
            skipped=skipped,
            statistics={
                name: one / weight if weight else 0.0 for name, one in zip(names, sums, strict=True)
            },
        )

    def evaluate(
        self, batch: Mapping[str, Any], function: Callable[[Output, Batch], Tensor]
    ) -> Tensor:
        """`function(output, batch)` of each microbatch, put together, without gradient."""
        return self.engine.evaluate(
            batch, lambda output, part: function(_Output(output, self.engine), part)
        )

    def generate(self, prompts: Sequence[Sequence[int]], **settings: Any) -> list[list[int]]:
        """The new tokens of each of this data rank's prompts; see `ms_parallel.Engine.generate`."""
        return self.engine.generate(prompts, **settings)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all data ranks, in their order, where these lie."""
        if self.data_ranks == 1:
            return rows
        mine = rows.contiguous().to(self.engine.device)
        parts = [torch.empty_like(mine) for _ in range(self.data_ranks)]
        dist.all_gather(parts, mine, group=self.engine.groups.group("data"))
        return torch.cat(parts).to(rows.device)

    def state_dict(self) -> dict[str, Tensor]:
        """This process's part of weights, moments and counters, by name."""
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, under the same layout."""
        self.engine.load_state_dict(state)

    def save(self, folder: Path) -> None:
        """Write the whole model to a folder that `load_model` and transformers read."""
        from ms_parallel import save_model

        save_model(list(self.engine.stages.values()), folder)

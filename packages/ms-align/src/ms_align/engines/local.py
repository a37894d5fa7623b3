"""The engine of a single process: any causal language model, an optimizer, and extra heads."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from attrs import frozen
from torch import Tensor, nn

from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.output import LocalOutput
from ms_align.engines.protocol import Adapters
from ms_align.errors import CheckpointError, ModelError, NonFiniteError, WriteError
from ms_align.files.untrusted import check_path
from ms_align.generation.generator import LocalGenerator
from ms_align.generation.sampling import Sampling
from ms_align.lora.adapters import plain_model
from ms_align.losses.protocol import IGNORED, Batch, Loss, Output
from ms_align.losses.token_statistics import Scratch
from ms_align.models.folder import save_model
from ms_align.models.language_model import check_tokens, language_model


@frozen(kw_only=True)
class LocalStepReport:
    """Result of one optimizer step."""

    loss: float = math.nan
    grad_norm: float = math.nan
    learning_rate: float
    tokens: int
    skipped: Literal["no_targets", "nonfinite"] | None
    statistics: Mapping[str, float]


class LocalEngine:
    """A model, its optimizer and extra heads in this process.

    The model runs in evaluation mode, without dropout, so that a response has one probability.

    Args:
        model: of the seam, of transformers, or any module from tokens (B, S) to logits (B, S, V).
        optimizer: AdamW's settings; weights that need no gradient are left alone.
        heads: width of each extra linear head on the final hidden states, by name; they begin at
            zero, so that nothing is expected before anything was seen.
        head_offsets: whether they add a learnt number to their product.
        microbatch_size: rows that pass at once, the last time perhaps fewer; None for all.
        on_nonfinite: what a gradient with an infinity or NaN does: `"skip"` the update and say so,
            or `"raise"`. Weights are never touched by it.

    Raises:
        ModelError: heads are asked for and the model shows no hidden states, or none of its
            weights takes a gradient.
    """

    data_rank = 0
    data_ranks = 1
    row_parts = 1

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerOptions | None = None,
        *,
        heads: Mapping[str, int] | None = None,
        head_offsets: bool = True,
        microbatch_size: int | None = None,
        on_nonfinite: Literal["skip", "raise"] = "skip",
    ) -> None:
        self.model = language_model(model)
        self.module = model
        self.vocabulary_size = self.model.vocabulary_size
        self.context = self.model.context
        adapted = hasattr(model, "disable_adapter") and hasattr(model, "save_pretrained")
        self.adapters: Adapters | None = cast(Adapters, model) if adapted else None
        """The model itself, where its adapters can be switched off and saved, as peft's can."""
        self.options = optimizer or OptimizerOptions()
        self.microbatch_size = microbatch_size
        self.on_nonfinite = on_nonfinite
        self.step_count = 0
        """Updates asked for so far, skipped ones included."""
        self.device = next(model.parameters()).device
        self.heads = nn.ModuleDict(self._build(dict(heads or {}), head_offsets))
        self.parameters = {
            **{name: p for name, p in model.named_parameters() if p.requires_grad},
            **{f"heads.{name}": p for name, p in self.heads.named_parameters()},
        }
        self._optimizer: torch.optim.AdamW | None = None
        self._scratch = Scratch()
        model.eval()

    def _build(self, widths: dict[str, int], offsets: bool) -> dict[str, nn.Module]:
        if widths and self.model.hidden_size is None:
            raise ModelError(
                f"{type(self.module).__name__} shows no hidden states for the head "
                f"{next(iter(widths))!r} to work on; give a model of its own for it"
            )
        built: dict[str, nn.Module] = {}
        for name, width in widths.items():
            size = self.model.hidden_size or 0
            head = nn.Linear(size, width, bias=offsets, device=self.device)
            for parameter in head.parameters():
                nn.init.zeros_(parameter)
            built[name] = head
        return built

    @property
    def optimizer(self) -> torch.optim.AdamW:
        """AdamW over the weights that take a gradient; made when it is first asked for."""
        if self._optimizer is None:
            if not self.parameters:
                raise ModelError("no weight takes a gradient; thaw some, or add an adapter")
            matrices = [p for p in self.parameters.values() if p.ndim > 1]
            vectors = [p for p in self.parameters.values() if p.ndim <= 1]
            groups = [
                {"params": matrices, "weight_decay": self.options.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ]
            self._optimizer = torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=self.options.learning_rate,
                betas=self.options.betas,
                eps=self.options.epsilon,
                fused=self.device.type in ("cpu", "cuda"),
            )
            for parameter in self.parameters.values():
                state = self._optimizer.state[parameter]
                state["step"] = torch.zeros((), dtype=torch.float32)
                if self.device.type == "cuda":
                    state["step"] = state["step"].to(self.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        return self._optimizer

    def step(self, batch: Mapping[str, Any], loss: Loss) -> LocalStepReport:
        """Take one step of the optimizer on a batch.

        Raises:
            DataError: a token or target is none of the model's vocabulary.
            NonFiniteError: the gradient is not finite and `on_nonfinite="raise"`.
        """
        microbatches = self._microbatches(batch)
        weight = sum(loss.weight(microbatch) for microbatch in microbatches)
        tokens = int(torch.as_tensor(batch["tokens"]).numel())
        rate = self.options.rate(self.step_count)
        self.step_count += 1
        names = loss.statistics
        if weight <= 0.0:
            return LocalStepReport(
                learning_rate=rate,
                tokens=tokens,
                skipped="no_targets",
                statistics=dict.fromkeys(names, math.nan),
            )
        optimizer = self.optimizer
        optimizer.zero_grad(set_to_none=True)
        total, statistics = 0.0, torch.zeros(len(names), device=self.device)
        for microbatch in map(_trim, microbatches):
            value, sums = loss(self._forward(microbatch), microbatch)
            (value / weight).backward()  # type: ignore[no-untyped-call]
            total += value.item()
            statistics += sums
        norm = self._clip()
        finite = bool(torch.isfinite(torch.tensor([total, norm])).all())
        if finite:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not finite and self.on_nonfinite == "raise":
            raise NonFiniteError(
                f"update {self.step_count - 1}: loss {total / weight}, gradient norm {norm}: not"
                " finite; weights are unchanged; lower learning_rate or look at this batch"
            )
        return LocalStepReport(
            loss=total / weight,
            grad_norm=norm,
            learning_rate=rate,
            tokens=tokens,
            skipped=None if finite else "nonfinite",
            statistics=dict(zip(names, (statistics / weight).tolist(), strict=True)),
        )

    @torch.no_grad()
    def evaluate(
        self, batch: Mapping[str, Any], function: Callable[[Output, Batch], Tensor]
    ) -> Tensor:
        """Apply `function(output, batch)` to each microbatch and join the results, (b, ...).

        Columns at the end without a target in any row are not run; a result (b, S) is 0 there.
        """
        parts = []
        for microbatch in self._microbatches(batch):
            trimmed, width = _trim(microbatch), microbatch["tokens"].shape[1]
            part = function(self._forward(trimmed), trimmed)
            left_out = width - trimmed["tokens"].shape[1]
            if left_out and part.ndim == 2 and part.shape[1] == width - left_out:
                part = torch.nn.functional.pad(part, (0, left_out))
            parts.append(part)
        return torch.cat(parts)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int = 0,
        stop_token: Sequence[int] | None = None,
        **sampling: Any,
    ) -> list[list[int]]:
        """Give the new tokens of each prompt; `LocalGenerator` keeps log-probabilities too.

        Args:
            prompts: tokens of each.
            seed: of the random numbers.
            stop_token: each of these ends a response.
            sampling: other settings of `Sampling`.

        Raises:
            ModelError: the model takes no cache.
        """
        how = Sampling(**sampling, stop_tokens=stop_token or ())
        responses = LocalGenerator(self.module)(prompts, how, count=1, seed=seed)
        return [responses.row(index) for index in range(len(prompts))]

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows as they are: no other process has any."""
        return rows

    def save(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write the model as its library does, adapters merged; the module is left as it is.

        Args:
            folder: to write.
            dtype: of the parameters in the files; by default their own.

        Raises:
            CheckpointError: the place cannot be written.
            NonFiniteError: a weight does not fit into `dtype`.
        """
        check_path("folder", folder, error=WriteError, written="folder")
        with plain_model(self.module) as model:
            save_model(model, folder, dtype=dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights, moments under `optimizer.exp_avg.NAME` and the like, and the counter.

        Weights that take no gradient are the model's own and are not in it.
        """
        state: dict[str, Tensor] = {"engine.step": torch.tensor(self.step_count)}
        held = self.optimizer.state
        for name, parameter in self.parameters.items():
            state[name] = parameter.detach()
            for kind in ("exp_avg", "exp_avg_sq", "step"):
                state[f"optimizer.{kind}.{name}"] = held[parameter][kind]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            CheckpointError: names or shapes are not this engine's.
        """
        own = self.state_dict()
        for name in own.keys() | state.keys():
            if name not in own or name not in state or own[name].shape != state[name].shape:
                raise CheckpointError(
                    f"the state of {name!r} is missing or does not fit; it is of another model"
                )
        for name, tensor in own.items():
            if name != "engine.step":
                tensor.copy_(state[name])
        self.step_count = int(state["engine.step"])

    def _forward(self, batch: Batch) -> LocalOutput:
        hidden = self.model.hidden(batch["tokens"], batch.get("positions"), batch.get("documents"))
        heads = {name: self.heads[name] for name in self.heads}
        return LocalOutput(hidden, self.model, heads, self._scratch)

    def _microbatches(self, batch: Mapping[str, Any]) -> list[Batch]:
        tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
        for name, ignored in (("tokens", None), ("targets", IGNORED)):
            if name in tensors:
                what = f"a batch's {name}"
                check_tokens(tensors[name], self.vocabulary_size, what, ignored=ignored)
        count = tensors["tokens"].shape[0]
        size = self.microbatch_size or count
        return [
            {
                name: value[start : start + size].to(self.device, non_blocking=True)
                for name, value in tensors.items()
            }
            for start in range(0, count, size)
        ]

    def _clip(self) -> float:
        """Scale the gradient down to the limit where its norm is greater, and return that norm."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not gradients:
            return 0.0
        norms = torch.stack(torch._foreach_norm(gradients)).float()
        norm = float(torch.linalg.vector_norm(norms))
        limit = self.options.max_grad_norm
        if limit is not None and norm > limit:
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        return norm


def _trim(batch: Batch) -> Batch:
    """Cut off the columns behind every row's last target and first document.

    In a causal model they change nothing. A document's last token has no target, and a score is
    read there.
    """
    targets = batch.get("targets")
    if targets is None:
        return batch
    live = targets != IGNORED
    if "documents" in batch:
        live |= batch["documents"] == 0
    columns = live.any(0).nonzero()
    width, whole = (int(columns[-1]) + 1 if len(columns) else 1), targets.shape[1]
    if width == whole:
        return batch
    return {
        name: value[:, :width] if value.ndim > 1 and value.shape[1] == whole else value
        for name, value in batch.items()
    }

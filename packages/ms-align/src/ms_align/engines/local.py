"""Engine for a single process: a causal language model with optimizer and extra heads."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import torch
from attrs import frozen
from torch import Tensor, nn

from ms_align.arguments import check_callable, check_integer, check_type, shown
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.output import LocalOutput
from ms_align.engines.protocol import Adapters
from ms_align.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    NonFiniteError,
    WriteError,
)
from ms_align.files.untrusted import check_path
from ms_align.generation.generator import LocalGenerator
from ms_align.generation.sampling import Sampling
from ms_align.lora.adapters import AdaptedModel, plain_model
from ms_align.losses.protocol import IGNORED, Batch, Loss, Output
from ms_align.losses.token_statistics import Scratch
from ms_align.models.folder import save_model
from ms_align.models.language_model import check_tokens, language_model

MEDIA_PLACES = ("image_places", "video_places", "audio_places")
"""Batch keys that a batch with images, videos or audio has, even if its rows have none."""


def check_heads(heads: Mapping[str, int] | None) -> None:
    """Check the widths of extra heads.

    Raises:
        ConfigError: `heads` is not a dict of positive integers.
    """
    check_type("heads", heads, Mapping, "a dict of widths", error=ConfigError, optional=True)
    for name, width in (heads or {}).items():
        check_integer(f"heads[{name!r}]", width, minimum=1, error=ConfigError)


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

    The model runs in evaluation mode, so that log-probabilities are reproducible; only the dropout
    of LoRA adapters is applied, in `step`.

    Args:
        model: model of ms-parallel or transformers, or a module from tokens (B, S) to logits
            (B, S, V).
        optimizer: AdamW settings; parameters without gradient stay unchanged.
        heads: width of each extra linear head on the final hidden states, by name; initialized to
            zero, so that initial value estimates are 0.
        head_bias: give the heads a bias.
        microbatch_size: rows per forward pass; the last may have fewer. None: all rows.
        on_nonfinite: response to an infinite or NaN gradient: `"skip"` the update and report it,
            or `"raise"`. Weights are unchanged in both cases.

    Raises:
        ModelError: heads are requested and the model does not expose hidden states, or no
            parameter requires a gradient.
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
        head_bias: bool = True,
        microbatch_size: int | None = None,
        on_nonfinite: Literal["skip", "raise"] = "skip",
    ) -> None:
        self.model = language_model(model)
        check_heads(heads)
        check_integer(
            "microbatch_size", microbatch_size, minimum=1, error=ConfigError, optional=True
        )
        description = "OptimizerOptions"
        check_type(
            "optimizer", optimizer, OptimizerOptions, description, error=ConfigError, optional=True
        )
        if on_nonfinite not in ("skip", "raise"):
            raise ConfigError(f"on_nonfinite must be 'skip' or 'raise', got {shown(on_nonfinite)}")
        self.module = model
        self.vocabulary_size = self.model.vocabulary_size
        self.context = self.model.context
        adapted = hasattr(model, "disable_adapter") and hasattr(model, "save_pretrained")
        self.adapters: Adapters | None = cast(Adapters, model) if adapted else None
        """The model itself, if it has methods to disable and save adapters, as peft models do."""
        self.options = optimizer or OptimizerOptions()
        self.microbatch_size = microbatch_size
        self.on_nonfinite = on_nonfinite
        self.step_count = 0
        """Number of `step` calls, including skipped updates."""
        self.device = next(model.parameters()).device
        self.heads = nn.ModuleDict(self._build_heads(dict(heads or {}), head_bias))
        self.parameters = {
            **{name: p for name, p in model.named_parameters() if p.requires_grad},
            **{f"heads.{name}": p for name, p in self.heads.named_parameters()},
        }
        self._optimizer: torch.optim.AdamW | None = None
        self._scratch = Scratch()
        self._replayed = self._differing = 0
        """Replayed expert selections in the current step, and how many differ from the router's."""
        model.eval()

    def _build_heads(self, widths: dict[str, int], bias: bool) -> dict[str, nn.Module]:
        if widths and self.model.hidden_size is None:
            raise ModelError(
                f"the head {next(iter(widths))!r} needs hidden states, which "
                f"{type(self.module).__name__} does not expose; use a separate model for it"
            )
        heads: dict[str, nn.Module] = {}
        for name, width in widths.items():
            size = self.model.hidden_size or 0
            head = nn.Linear(size, width, bias=bias, device=self.device)
            for parameter in head.parameters():
                nn.init.zeros_(parameter)
            heads[name] = head
        return heads

    @property
    def optimizer(self) -> torch.optim.AdamW:
        """AdamW over the trainable parameters; created on first use."""
        if self._optimizer is None:
            if not self.parameters:
                raise ModelError(
                    "no parameter requires a gradient; unfreeze some, or add an adapter"
                )
            # Norms and biases are not decayed.
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
                eps=self.options.eps,
                fused=self.device.type in ("cpu", "cuda"),
            )
            for parameter in self.parameters.values():
                # Created now, so that a checkpoint before the first step has the same tensors.
                state = self._optimizer.state[parameter]
                state["step"] = torch.zeros((), dtype=torch.float32)
                # The fused CUDA kernel reads the step count on the device.
                if self.device.type == "cuda":
                    state["step"] = state["step"].to(self.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        return self._optimizer

    def step(self, batch: Mapping[str, Any], loss: Loss) -> LocalStepReport:
        """Run one optimizer step on a batch.

        Raises:
            DataError: a token or target is outside the model's vocabulary.
            NonFiniteError: the gradient is not finite and `on_nonfinite="raise"`.
        """
        if not hasattr(loss, "weight"):
            raise ConfigError(f"loss must be a Loss, got {shown(loss)}")
        microbatches = self._microbatches(batch)
        # The divisor covers the global batch, so it is computed before the first backward pass.
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
        self._replayed = self._differing = 0
        with self._dropout():
            for microbatch in map(_trim, microbatches):
                value, sums = loss(self._forward(microbatch), microbatch)
                # Gradients accumulate over microbatches.
                (value / weight).backward()  # type: ignore[no-untyped-call]
                total += value.item()
                statistics += sums
        norm = self._clip()
        # total and norm are Python floats, so the check does not synchronize again.
        finite = bool(torch.isfinite(torch.tensor([total, norm])).all())
        if finite:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not finite and self.on_nonfinite == "raise":
            raise NonFiniteError(
                f"update {self.step_count - 1}: loss {total / weight} or gradient norm {norm} is "
                "not finite; weights are unchanged; lower learning_rate or check this batch"
            )
        return LocalStepReport(
            loss=total / weight,
            grad_norm=norm,
            learning_rate=rate,
            tokens=tokens,
            skipped=None if finite else "nonfinite",
            statistics={
                **dict(zip(names, (statistics / weight).tolist(), strict=True)),
                **(
                    {"router_difference": self._differing / self._replayed}
                    if self._replayed
                    else {}
                ),
            },
        )

    @torch.no_grad()
    def evaluate(
        self, batch: Mapping[str, Any], function: Callable[[Output, Batch], Tensor]
    ) -> Tensor:
        """Apply `function(output, batch)` to each microbatch and concatenate the results, (B, ...).

        Trailing columns without targets are not computed; a result (b, S) is padded with 0 there.
        """
        check_callable("function", function, error=ConfigError)
        parts = []
        for microbatch in self._microbatches(batch):
            trimmed, width = _trim(microbatch), microbatch["tokens"].shape[1]
            part = function(self._forward(trimmed), trimmed)
            # Only results with one value per position are padded back to the full width.
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
        """Generate new tokens for each prompt; `LocalGenerator` also returns log-probabilities.

        Args:
            prompts: token ids per prompt.
            seed: random seed.
            stop_token: token ids that end a response.
            sampling: other settings of `Sampling`.

        Raises:
            ModelError: the model does not support a KV cache.
        """
        stops = () if stop_token is None else stop_token
        settings = Sampling(**sampling, stop_token_ids=stops)
        responses = LocalGenerator(self.module)(prompts, settings, count=1, seed=seed)
        return [responses.row(index) for index in range(len(prompts))]

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows unchanged, as there is only one data rank."""
        return rows

    def save(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write the model in its library's format, with adapters merged; the module is unchanged.

        Args:
            folder: folder to create.
            dtype: dtype of the saved parameters. None: their own.

        Raises:
            CheckpointError: the folder cannot be written.
            NonFiniteError: a weight overflows in `dtype`.
        """
        check_path("folder", folder, error=WriteError, written="folder")
        with plain_model(self.module) as model:
            save_model(model, folder, dtype=dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """Return trainable weights, optimizer state and step count; tensors are not copied.

        Frozen weights are not included.
        """
        state: dict[str, Tensor] = {"engine.step": torch.tensor(self.step_count)}
        optimizer_state = self.optimizer.state
        for name, parameter in self.parameters.items():
            state[name] = parameter.detach()
            for key in ("exp_avg", "exp_avg_sq", "step"):
                state[f"optimizer.{key}.{name}"] = optimizer_state[parameter][key]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            CheckpointError: names or shapes differ.
        """
        check_type("state", state, Mapping, "a result of state_dict()", error=CheckpointError)
        # All names and shapes are checked before the first tensor is changed.
        current = self.state_dict()
        for name in current.keys() | state.keys():
            if name not in current or name not in state or current[name].shape != state[name].shape:
                raise CheckpointError(
                    f"the state of {name!r} is missing or has another shape; load a state of this "
                    "model"
                )
        for name, tensor in current.items():
            if name != "engine.step":
                tensor.copy_(state[name])
        self.step_count = int(state["engine.step"])

    def _forward(self, batch: Batch) -> LocalOutput:
        with self._replay(batch.get("routed_experts")):
            hidden = self.model.hidden(
                batch["tokens"], batch.get("positions"), batch.get("documents")
            )
        heads = {name: self.heads[name] for name in self.heads}
        return LocalOutput(hidden, self.model, heads, self._scratch)

    def _dropout(self) -> AbstractContextManager[None]:
        """Dropout of adapters; its masks depend on the step only, so a resumed run repeats them."""
        if isinstance(self.module, AdaptedModel):
            return self.module.dropout(self.step_count)
        return nullcontext()

    @contextmanager
    def _replay(self, experts: Tensor | None) -> Iterator[None]:
        """Route tokens to recorded experts (B, S, L, k), and count differing selections."""
        if experts is None:
            yield
            return
        from ms_parallel.models import replay_experts

        with replay_experts(self.module, experts) as counts:
            yield
        count, differing = counts()
        self._replayed += count
        self._differing += differing

    def _microbatches(self, batch: Mapping[str, Any]) -> list[Batch]:
        check_type("batch", batch, Mapping, "columns by name", error=DataError)
        if "tokens" not in batch:
            raise DataError(f"a batch must have tokens, got {shown(sorted(map(str, batch)))}")
        if media := sorted(name for name in batch if name in MEDIA_PLACES):
            raise DataError(
                f"the batch has {media[0]}, and this engine reads text only; train the folder of a "
                "multimodal model with `layout = { data = 1 }`, or remove the media"
            )
        tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
        for name, ignored in (("tokens", None), ("targets", IGNORED)):
            if name in tensors:
                label = f"a batch's {name}"
                check_tokens(tensors[name], self.vocabulary_size, label, ignored=ignored)
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
        """Clip the gradient to the maximum norm and return the norm before clipping."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not grads:
            return 0.0
        # The norm of the per-tensor norms is the global norm, with a single synchronization.
        norms = torch.stack(torch._foreach_norm(grads)).float()
        norm = float(torch.linalg.vector_norm(norms))
        limit = self.options.max_grad_norm
        if limit is not None and norm > limit:
            torch._foreach_mul_(grads, limit / (norm + 1e-6))  # as clip_grad_norm_ does
        return norm


def _trim(batch: Batch) -> Batch:
    """Drop trailing columns after the last target and the end of the first document.

    In a causal model they do not influence earlier columns. The last token of a document has no
    target, but rewards and values are read there.
    """
    targets = batch.get("targets")
    if targets is None:
        return batch
    needed = targets != IGNORED  # (B, S)
    if "documents" in batch:
        needed |= batch["documents"] == 0
    columns = needed.any(0).nonzero()  # columns that any row needs
    width, full_width = (int(columns[-1]) + 1 if len(columns) else 1), targets.shape[1]
    if width == full_width:
        return batch
    return {
        name: value[:, :width] if value.ndim > 1 and value.shape[1] == full_width else value
        for name, value in batch.items()
    }

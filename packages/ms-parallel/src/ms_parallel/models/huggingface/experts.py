"""Expert layers of transformers: tensor-parallel weights, router statistics, load balancing."""

import re
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ms_parallel.models.experts.replay import is_recomputing
from ms_parallel.models.experts.router_config import Mixture, RouterConfig
from ms_parallel.models.experts.router_stats import RouterWithStats
from ms_parallel.models.huggingface.module_wrapper import ModuleWrapper
from ms_parallel.operators.cpu import widen

LAYER = re.compile(r"\blayers\.(\d+)\.")
MATRICES = 2
"""Matrices per parameter: gate and up."""


class PairedExperts(ModuleWrapper):
    """Experts whose gate and up matrices are one parameter (E, 2, I, H).

    transformers stacks them as (E, 2·I, H), so splitting dim 1 in half would put gate on one rank
    and up on the other. With a separate dim both are split over I, and checkpoints are the same
    under every layout. The inner forward receives the local shards in transformers' shape.

    Args:
        inner: transformers' expert module.
        packed: names of its stacked parameters.
    """

    def __init__(self, inner: nn.Module, packed: tuple[str, ...]) -> None:
        super().__init__(inner)
        self.__dict__["packed"] = packed
        for name in packed:
            stacked = inner._parameters[name]
            assert stacked is not None
            # (E, 2·I, H) -> (E, 2, I, H), a view.
            pairs = stacked.detach().view(stacked.shape[0], MATRICES, -1, stacked.shape[2])
            inner._parameters[name] = nn.Parameter(pairs, requires_grad=stacked.requires_grad)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the inner module with its parameters in transformers' shapes."""
        views = {name: self._view(name, value) for name, value in self.named_parameters()}
        return torch.func.functional_call(self.inner, views, args, named)

    def _view(self, name: str, value: Any) -> Tensor:
        local: Tensor = value.to_local() if hasattr(value, "to_local") else value
        return local.flatten(1, 2) if name in self.packed else local


def pair_expert_matrices(model: Any, published: Mapping[str, str] | None) -> None:
    """Wrap expert modules with packed gate-up parameters in `PairedExperts`, in place.

    Args:
        model: transformers model.
        published: transformers' tensor-parallel plan; its `packed_colwise` style marks them.
    """
    prefix = f"{model.base_model_prefix}."
    for name, module in list(model.named_modules()):
        # Indices become `*`, as in transformers' plan.
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name).removeprefix(prefix)
        styles = {
            param_name: (published or {}).get(f"{pattern}.{param_name}")
            for param_name in module._parameters
        }
        packed = tuple(
            param_name for param_name, style in styles.items() if style == "packed_colwise"
        )
        if packed and all(module._parameters[param_name].ndim == 3 for param_name in packed):
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent)._modules[last] = PairedExperts(module, packed)


class CountedRouter(ModuleWrapper, RouterWithStats):
    """Router of transformers with expert counts and a load-balancing loss.

    Args:
        inner: router that returns logits (T, E), weights (T, k) and experts (T, k).
    """

    sees_all_positions = True
    rows = 1
    """Number of rows in the current microbatch."""
    documents: Tensor | None = None
    """(B, S) int32 document numbers of the microbatch."""

    def forward(self, *args: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Run the inner router; the backward of its weights adds the balance-loss gradient."""
        logits, weights, experts = self.inner(*args, **named)
        stats = self.stats
        if stats is None or not torch.is_grad_enabled():
            return logits, weights, experts
        # Unflatten tokens: (T, E) -> (B, S, E) and (T, k) -> (B, S, k).
        logits_BSE, experts_BSk = (
            values.reshape(self.rows, -1, values.shape[-1]) for values in (widen(logits), experts)
        )
        scores, load = logits_BSE.softmax(-1), stats.load
        if not is_recomputing():
            stats.record(experts_BSk, scores.detach())
        if not stats.rate and not stats.z_rate:
            return logits, weights, experts
        if load is None:
            numbers = stats.documents.numbers(self.documents, experts_BSk)
            # Routers see all positions, so the local numbers are all numbers.
            load = stats.load_of_documents(experts_BSk, numbers, numbers)
        weights = stats.add_losses(weights, logits_BSE, scores, experts_BSk, load)
        return logits, weights, experts


def count_routers(model: Any) -> None:
    """Wrap all routers of a model in `CountedRouter`, in place."""
    for name, router in _routers(model).items():
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._modules[last] = CountedRouter(router)


@lru_cache(maxsize=16)
def mixture_of(config: Any) -> Mixture | None:
    """Expert settings of a transformers model; None if its routers cannot be balanced.

    transformers must declare the router class, with one router per layer, and a trial run must
    confirm that routers pick the top-k logits. `output_router_logits` in the config enables the
    loss.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    settings = config.settings
    model_class = auto._model_mapping[type(settings)]
    if _published(model_class) is None:
        return None
    with torch.device("meta"):
        routers = _routers(auto.from_config(settings))
    matches = [LAYER.search(name) for name in routers]
    layers = [int(match[1]) for match in matches if match]
    choices = {_choice(router) for router in routers.values()}
    choice = choices.pop() if len(choices) == 1 else None
    if choice is None or len(set(layers)) < len(routers):
        return None
    wants_loss = getattr(settings, "output_router_logits", False)
    coefficient = getattr(settings, "router_aux_loss_coef", None) if wants_loss else None
    return Mixture(layers=tuple(sorted(layers)), choice=choice, coefficient=coefficient or 0.0)


def _published(model: Any) -> type[nn.Module] | None:
    """Router class of a model, if transformers can record its logits; else None."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    first = getattr(recorded, "index", None) == 0
    router_class = getattr(recorded, "target_class", None) if first else None
    return router_class if isinstance(router_class, type) else None


def _routers(model: Any) -> dict[str, nn.Module]:
    router_class = _published(model)
    modules = model.named_modules() if router_class is not None else ()
    return {name: module for name, module in modules if isinstance(module, router_class or ())}


def _choice(router: nn.Module) -> RouterConfig | None:
    """Settings of a router, found by running a copy with random weights; None if not top-k."""
    weight = router._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        return None
    # Callers build models under an ambient meta device, where values cannot be compared.
    with torch.device("cpu"), torch.no_grad():
        trial: Any = deepcopy(router).to_empty(device="cpu").float().eval()
        generator = torch.Generator().manual_seed(0)
        for value in (*trial.parameters(), *trial.buffers()):
            if value.is_floating_point():
                value.normal_(generator=generator)
            else:
                value.zero_()
        hidden = torch.randn(3, weight.shape[1], generator=generator, dtype=torch.float32)
        try:
            logits, weights, experts = trial(hidden)
            best = logits.topk(experts.shape[-1], -1).indices
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return None  # another signature
        # The trial confirms the formula of the logits and the choice of the top k.
        expected = F.linear(hidden, trial.weight, trial._parameters.get("bias"))
        matches = torch.equal(logits, expected) and weights.shape == experts.shape
        if not matches or not torch.equal(experts.sort(-1).values, best.sort(-1).values):
            return None
    return RouterConfig(num_experts=logits.shape[-1], num_experts_per_tok=experts.shape[-1])

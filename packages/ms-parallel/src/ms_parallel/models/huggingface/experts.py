"""Experts of transformers split over tensor ranks, and their routers, counted and balanced."""

import re
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ms_parallel.models.experts.account import Accounted
from ms_parallel.models.experts.choice import Choice, Mixture
from ms_parallel.models.experts.kept import recomputes
from ms_parallel.models.huggingface.around import Around
from ms_parallel.operators.cpu import widen

LAYER = re.compile(r"\blayers\.(\d+)\.")
MATRICES = 2
"""Matrices per parameter: gate and up."""


class PairedExperts(Around):
    """Experts whose gate and up matrices are one parameter (E, 2, I, H).

    transformers stacks them as (E, 2·I, H), where a split into halves separates gate from up. Here
    both are split over I like other matrices, and files and checkpoints are the same under every
    layout. The inner forward receives the local parts in transformers' shape.

    Args:
        inner: transformers' experts.
        packed: names of those parameters.
    """

    def __init__(self, inner: nn.Module, packed: tuple[str, ...]) -> None:
        super().__init__(inner)
        self.__dict__["packed"] = packed
        for name in packed:
            stacked = inner._parameters[name]
            assert stacked is not None
            pairs = stacked.detach().view(stacked.shape[0], MATRICES, -1, stacked.shape[2])
            inner._parameters[name] = nn.Parameter(pairs, requires_grad=stacked.requires_grad)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the inner module with its parameters in transformers' shapes."""
        views = {name: self._view(name, value) for name, value in self.named_parameters()}
        return torch.func.functional_call(self.inner, views, args, named)

    def _view(self, name: str, value: Any) -> Tensor:
        local: Tensor = value.to_local() if hasattr(value, "to_local") else value
        return local.flatten(1, 2) if name in self.packed else local


def unpack(model: Any, published: Mapping[str, str] | None) -> None:
    """Replace the experts whose parameters are packed according to the published plan, in place."""
    prefix = f"{model.base_model_prefix}."
    for name, module in list(model.named_modules()):
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


class CountedRouter(Around, Accounted):
    """Router of transformers whose choices are counted and balanced.

    Args:
        inner: returns logits (T, E), weights and experts (T, k).
    """

    everywhere = True
    rows = 1
    """Number of rows in the current forward of the block."""
    documents: Tensor | None = None
    """(B, S) int32, documents of these rows."""

    def forward(self, *args: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Run the inner router; its weights also carry the gradient of the balance loss."""
        logits, weights, experts = self.inner(*args, **named)
        account = self.account
        if account is None or not torch.is_grad_enabled():
            return logits, weights, experts
        wide, chosen = (
            values.reshape(self.rows, -1, values.shape[-1]) for values in (widen(logits), experts)
        )
        shares, load = wide.softmax(-1), account.load
        if not recomputes():
            account.note(chosen, shares.detach())
        if not account.rate and not account.z_rate:
            return logits, weights, experts
        if load is None:
            numbers = account.documents.numbers(self.documents, chosen)
            load = account.load_of_documents(chosen, numbers, numbers)
        weights = account.charge(weights, wide, shares, chosen, load)
        return logits, weights, experts


def count_routers(model: Any) -> None:
    """Replace a model's routers by routers whose choices are counted, in place."""
    for name, router in _routers(model).items():
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._modules[last] = CountedRouter(router)


@lru_cache(maxsize=16)
def mixture_of(config: Any) -> Mixture | None:
    """Return the experts of a transformers model; None if its routers cannot be balanced.

    transformers must publish the routers, one per layer, and they must choose the experts with the
    highest logits, which is tested. `output_router_logits` in the configuration requests the loss.
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


def _published(kind: Any) -> type[nn.Module] | None:
    """Return the class of a model's routers, if transformers records their logits."""
    recorded = (getattr(kind, "_can_record_outputs", None) or {}).get("router_logits")
    first = getattr(recorded, "index", None) == 0
    router_class = getattr(recorded, "target_class", None) if first else None
    return router_class if isinstance(router_class, type) else None


def _routers(model: Any) -> dict[str, nn.Module]:
    router_class = _published(model)
    modules = model.named_modules() if router_class is not None else ()
    return {name: module for name, module in modules if isinstance(module, router_class or ())}


def _choice(router: nn.Module) -> Choice | None:
    """Return how a router chooses, by running a copy with random weights; None if not by logits."""
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
        expected = F.linear(hidden, trial.weight, trial._parameters.get("bias"))
        matches = torch.equal(logits, expected) and weights.shape == experts.shape
        if not matches or not torch.equal(experts.sort(-1).values, best.sort(-1).values):
            return None
    return Choice(num_experts=logits.shape[-1], num_experts_per_tok=experts.shape[-1])

"""Experts of transformers, split over tensor ranks, and their routers, counted and balanced."""

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
from ms_parallel.models.foreign.around import Around
from ms_parallel.operators.cpu import widen

LAYER = re.compile(r"\blayers\.(\d+)\.")
MATRICES = 2
"""Gate and up, side by side in one parameter."""


class PairedExperts(Around):
    """Experts whose gate and up are two matrices of one parameter (E, 2, I, H).

    Transformers has them one below the other, (E, 2·I, H), half of which is not half of each. Held
    apart, either is split over I as any other matrix, and files and checkpoints are the same under
    every layout. The inner forward is given them as it knows them, this process's part of each.

    Args:
        inner: transformers' experts.
        packed: names of those parameters.
    """

    def __init__(self, inner: nn.Module, packed: tuple[str, ...]) -> None:
        super().__init__(inner)
        self.__dict__["packed"] = packed
        for name in packed:
            whole = inner._parameters[name]
            assert whole is not None
            apart = whole.detach().view(whole.shape[0], MATRICES, -1, whole.shape[2])
            inner._parameters[name] = nn.Parameter(apart, requires_grad=whole.requires_grad)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the inner module, giving it its parameters in the shapes that it knows."""
        views = {name: self._view(name, value) for name, value in self.named_parameters()}
        return torch.func.functional_call(self.inner, views, args, named)

    def _view(self, name: str, value: Any) -> Tensor:
        local: Tensor = value.to_local() if hasattr(value, "to_local") else value
        return local.flatten(1, 2) if name in self.packed else local


def unpack(model: Any, published: Mapping[str, str] | None) -> None:
    """Replace the experts of a model whose published plan packs their parameters, in place."""
    prefix = f"{model.base_model_prefix}."
    for name, module in list(model.named_modules()):
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name).removeprefix(prefix)
        styles = {own: (published or {}).get(f"{pattern}.{own}") for own in module._parameters}
        packed = tuple(own for own, style in styles.items() if style == "packed_colwise")
        if packed and all(module._parameters[own].ndim == 3 for own in packed):
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent)._modules[last] = PairedExperts(module, packed)


class CountedRouter(Around, Accounted):
    """A router of transformers, of which an update counts what it chooses, and balances it.

    Args:
        inner: gives logits (T, E), and weights and experts (T, k).
    """

    everywhere = True
    rows = 1
    """Rows in the forward of the block that runs."""
    documents: Tensor | None = None
    """(B, S) int32, its rows' documents."""

    def forward(self, *args: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Run the inner router; its weights bring the gradient of the balance loss along."""
        logits, weights, experts = self.inner(*args, **named)
        account = self.account
        if account is None or not torch.is_grad_enabled():
            return logits, weights, experts
        wide, chosen = (
            each.reshape(self.rows, -1, each.shape[-1]) for each in (widen(logits), experts)
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
    """Let what the routers of a model choose be counted, in place."""
    for name, router in _routers(model).items():
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._modules[last] = CountedRouter(router)


@lru_cache(maxsize=16)
def mixture_of(config: Any) -> Mixture | None:
    """Find the experts of a model of transformers; None if its routers cannot be balanced.

    They have to be published as the model's, one a layer, and to choose the best of their logits,
    which is tried. Transformers asks for the balance loss by `output_router_logits`.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    settings = config.settings
    kind = auto._model_mapping[type(settings)]
    if _published(kind) is None:
        return None
    with torch.device("meta"):
        routers = _routers(auto.from_config(settings))
    found = [LAYER.search(name) for name in routers]
    layers = [int(match[1]) for match in found if match]
    chosen = {_choice(router) for router in routers.values()}
    choice = chosen.pop() if len(chosen) == 1 else None
    if choice is None or len(set(layers)) < len(routers):
        return None
    asked = getattr(settings, "output_router_logits", False)
    coefficient = getattr(settings, "router_aux_loss_coef", None) if asked else None
    return Mixture(layers=tuple(sorted(layers)), choice=choice, coefficient=coefficient or 0.0)


def _published(kind: Any) -> type[nn.Module] | None:
    """Find the class of a model's routers, if transformers records their logits."""
    recorded = (getattr(kind, "_can_record_outputs", None) or {}).get("router_logits")
    first = getattr(recorded, "index", None) == 0
    found = getattr(recorded, "target_class", None) if first else None
    return found if isinstance(found, type) else None


def _routers(model: Any) -> dict[str, nn.Module]:
    kind = _published(model)
    named = model.named_modules() if kind is not None else ()
    return {name: module for name, module in named if isinstance(module, kind or ())}


def _choice(router: nn.Module) -> Choice | None:
    """Find how a router chooses, by trying a copy with drawn weights; None if not by its logits."""
    weight = router._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        return None
    # Callers build models under an ambient meta device, where values cannot be compared.
    with torch.device("cpu"), torch.no_grad():
        tried: Any = deepcopy(router).to_empty(device="cpu").float().eval()
        generator = torch.Generator().manual_seed(0)
        for value in (*tried.parameters(), *tried.buffers()):
            if value.is_floating_point():
                value.normal_(generator=generator)
            else:
                value.zero_()
        hidden = torch.randn(3, weight.shape[1], generator=generator, dtype=torch.float32)
        try:
            logits, weights, experts = tried(hidden)
            best = logits.topk(experts.shape[-1], -1).indices
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return None  # another signature
        whole = F.linear(hidden, tried.weight, tried._parameters.get("bias"))
        alike = torch.equal(logits, whole) and weights.shape == experts.shape
        if not alike or not torch.equal(experts.sort(-1).values, best.sort(-1).values):
            return None
    return Choice(num_experts=logits.shape[-1], num_experts_per_tok=experts.shape[-1])

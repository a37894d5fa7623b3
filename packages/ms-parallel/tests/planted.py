"""Faults planted in the engine or in a model, which a proof must find; run by `run_processes`."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Place
from ms_parallel.engine import gradients as engine_gradients
from ms_parallel.engine import output, reduction
from ms_parallel.engine.reduction import SummedReduction
from ms_parallel.models import ModelConfig, architecture
from ms_parallel.models.decoder import Decoder
from ms_parallel.models.parts import attention as parts
from ms_parallel.models.parts.attention import Attention, RotaryContext
from ms_parallel.operators import split_vocabulary
from ms_parallel.proof.records import Case, Job
from ms_parallel.proof.worker import run_case
from ms_parallel.split import expert_parallel
from ms_parallel.split.context import rows
from ms_parallel.weights import save

SEED, TOLERANCE = 0, 1e-12


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and the case in which it shows."""

    case: Case
    plant: Callable[[], AbstractContextManager[Any]]
    check: str
    """What must be found not to hold."""
    subject: str = "llama"
    ratio: str = ""
    """What a gradient must be found to be of the right one."""
    parameter: str = ""
    """Part of the name of a weight that must be named."""


def tied() -> ModelConfig:
    """A model whose head is its embedding."""
    return architecture("llama", {"tie_word_embeddings": True})


ALONE = Case(layout="data=1", processes=1)
BY_ROWS = Case(layout="data=1", processes=1, microbatch_size=1)
AGAIN = Case(layout="data=1", processes=1, recompute="full")
DATA = Case(layout="data=2", processes=2)
TENSOR = Case(layout="tensor=2", processes=2)
PIPELINE = Case(layout="pipeline=2", processes=2, microbatch_size=1)
CONTEXT = Case(layout="context=2", processes=2, context_attention="all_gather")
EXPERT = Case(layout="data=2,expert=2", processes=2)


def no_sum(*_: Any, **__: Any) -> None:
    """What should add up over processes does not."""


def scaled(part: str, factor: float) -> Callable[[], Any]:
    """The gradient of weights whose name has this part is multiplied."""
    right = SummedReduction.gradients

    def wrong(self: SummedReduction) -> dict[str, Tensor]:
        found = right(self)
        return {name: g * factor if part in name else g for name, g in found.items()}

    return lambda: patch.object(SummedReduction, "gradients", wrong)


def lost(part: str) -> Callable[[], Any]:
    """No gradient comes to weights whose name has this part."""
    return scaled(part, 0.0)


def lost_expert() -> Any:
    """No gradient comes to one expert of each layer."""
    right = SummedReduction.gradients

    def wrong(self: SummedReduction) -> dict[str, Tensor]:
        found = right(self)
        for name, gradient in found.items():
            if "experts" in name:
                gradient[1] = 0.0
        return found

    return patch.object(SummedReduction, "gradients", wrong)


def moved(change: Callable[[Tensor], Tensor], *, where: str = "everywhere") -> Callable[[], Any]:
    """Positions are changed: everywhere, or on later stages alone, or on rank 1 alone."""
    right = Decoder.context

    def wrong(self: Decoder, positions: Tensor, *rest: Any) -> Any:
        hit = {"everywhere": True, "later": not self.first, "rank 1": dist.get_rank() == 1}
        return right(self, change(positions) if hit[where] else positions, *rest)

    return lambda: patch.object(Decoder, "context", wrong)


def uneven(positions: Tensor) -> Tensor:
    """Odd positions one too high."""
    return positions + positions % 2


def leaking(
    change: Callable[[Tensor], Tensor | None], layers: tuple[int, ...] = (0, 1, 2, 3)
) -> Callable[[], Any]:
    """Attention of some layers is given other documents than there are."""
    right = Attention.forward

    def wrong(self: Attention, hidden: Tensor, *, context: RotaryContext) -> Tensor:
        if self.layer in layers and context.documents is not None:
            context = replace(context, documents=change(context.documents), lengths=None)
        return right(self, hidden, context=context)

    return lambda: patch.object(Attention, "forward", wrong)


def one_late(documents: Tensor) -> Tensor:
    """Each document begins a token later than it does."""
    return torch.cat((documents[:, :1], documents[:, :-1]), 1)


def looking_ahead(layer: int) -> Callable[[], Any]:
    """A layer sees what comes after."""
    right = Attention.forward

    def wrong(self: Attention, hidden: Tensor, *, context: RotaryContext) -> Tensor:
        if self.layer != layer:
            return right(self, hidden, context=context)
        with patch.object(parts, "attend", everything):
            return right(self, hidden, context=context)

    return lambda: patch.object(Attention, "forward", wrong)


def everything(
    ops: Any, q: Tensor, k: Tensor, v: Tensor, context: RotaryContext, **_: Any
) -> Tensor:
    """Attention to all of a document, what comes after included."""
    out: Tensor = ops.attention(q, k, v, causal=False, documents=context.documents)
    return out


def unreduced_rows() -> Any:
    """Sums over the processes that read other rows are left out."""
    return patch.object(reduction, "gather_over_rows", lambda numbers, groups: numbers[None])


def unsummed_keys() -> Any:
    """Each context rank keeps its own share of the gradients of keys and values."""
    right = rows.all_gather_positions
    return patch.object(
        rows,
        "all_gather_positions",
        lambda local, mesh, sum_grads: right(local, mesh, sum_grads=False),
    )


def summed_losses() -> Any:
    """Losses that every context rank has alike give it a gradient for each of them."""
    right = rows.all_gather_positions
    return patch.object(
        rows,
        "all_gather_positions",
        lambda local, mesh, sum_grads: right(local, mesh, sum_grads=True),
    )


def cut_documents() -> Any:
    """Attention sees a document from where a rank's piece of it begins."""
    right = rows.query_ranges
    return patch.object(
        rows,
        "query_ranges",
        lambda *given: [evolve(each, first_key=each.start) for each in right(*given)],
    )


def unordered_rows() -> Any:
    """Rows for experts stay in the order of the processes that sent them."""
    right = expert_parallel._dispatch

    def wrong(*given: Any) -> Any:
        with patch.object(Tensor, "argsort", lambda key, **_: torch.arange(len(key))):
            return right(*given)

    return patch.object(expert_parallel, "_dispatch", wrong)


def kept_gradients() -> Any:
    """Gradients of tokens do not come back from the processes that have their experts."""
    return patch.object(
        expert_parallel._Exchange,
        "backward",
        lambda ctx, gradient: (
            torch.zeros(
                sum(ctx.route.received_counts if ctx.reverse else ctx.route.sent_counts),
                gradient.shape[1],
            ),
            None,
            None,
        ),
    )


def divided() -> Any:
    """FSDP averages over the data ranks where it should add up."""
    right = FSDPModule.set_gradient_divide_factor
    return patch.object(
        FSDPModule, "set_gradient_divide_factor", lambda self, factor: right(self, 2.0 * factor)
    )


def unsettled(what: str) -> Callable[[], Any]:
    """The loss of a split vocabulary is settled without one of its collectives."""
    right = dist.all_reduce

    def wrong(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
        skipped = (op == dist.ReduceOp.MAX) == (what == "max")
        return None if skipped else right(tensor, op=op, group=group)

    return lambda: patch.object(split_vocabulary.dist, "all_reduce", wrong)


def unsummed(keep: slice) -> Callable[[], Any]:
    """Only some of the weights that each tensor rank has a share of are added up."""
    right = engine_gradients.sum_over_tensor

    def wrong(gradients: list[Tensor], groups: Groups) -> None:
        right(list(gradients)[keep], groups)

    return lambda: patch.object(engine_gradients, "sum_over_tensor", wrong)


def saved(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[], Any]:
    """Other weights are saved than those that there are."""
    right = save.named_weights

    def wrong(stage: Any) -> Any:
        return change(dict(right(stage))).items()

    return lambda: patch.object(save, "named_weights", wrong)


def turned(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One weight's rows in another order."""
    return {
        name: weight.detach().flip(0) if name.endswith("0.self_attn.o_proj.weight") else weight
        for name, weight in weights.items()
    }


FAULTS: dict[str, Fault] = {
    # A missing sum
    "norms unsummed": Fault(
        case=TENSOR, plant=unsummed(slice(0)), check="gradients", parameter="norm"
    ),
    "last norm unsummed": Fault(
        case=TENSOR, plant=unsummed(slice(-1)), check="gradients", parameter="model.norm"
    ),
    "first norm unsummed": Fault(
        case=TENSOR, plant=unsummed(slice(1, None)), check="gradients", parameter="norm"
    ),
    "head norms unsummed": Fault(
        case=TENSOR, plant=unsummed(slice(0)), check="gradients", subject="qwen3", parameter="norm"
    ),
    "ties unsummed": Fault(
        case=PIPELINE,
        plant=lambda: patch.object(engine_gradients, "sum_tied", no_sum),
        check="gradients",
        subject="planted:tied",
        parameter="embed_tokens",
    ),
    "maxima unsettled": Fault(case=TENSOR, plant=unsettled("max"), check="loss"),
    "sums unsettled": Fault(case=TENSOR, plant=unsettled("sum"), check="loss"),
    "weights of losses unsummed": Fault(case=DATA, plant=unreduced_rows, check="gradients"),
    "keys unsummed over context": Fault(case=CONTEXT, plant=unsummed_keys, check="gradients"),
    "losses summed over context": Fault(
        case=CONTEXT, plant=summed_losses, check="gradients", ratio="context"
    ),
    "losses counted by each context rank": Fault(
        case=CONTEXT,
        plant=lambda: patch.object(Place, "is_loss_rank", True),
        check="loss",
    ),
    "rows of experts unordered": Fault(
        case=EXPERT, plant=unordered_rows, check="logits", subject="qwen3_moe"
    ),
    "gradients of experts' tokens kept": Fault(
        case=EXPERT, plant=kept_gradients, check="gradients", subject="qwen3_moe"
    ),
    "documents cut between context ranks": Fault(case=CONTEXT, plant=cut_documents, check="logits"),
    "logits ungathered": Fault(
        case=TENSOR,
        plant=lambda: patch.object(
            output, "gather_vocabulary", lambda local, groups: torch.cat((local, local), -1)
        ),
        check="logits",
    ),
    # A share
    "averaged over data": Fault(case=DATA, plant=divided, check="gradients", ratio="1/data"),
    "embedding halved": Fault(
        case=DATA, plant=scaled("embed", 0.5), check="gradients", ratio="1/data", parameter="embed"
    ),
    "head doubled": Fault(
        case=TENSOR, plant=scaled("lm_head", 2.0), check="gradients", ratio="tensor"
    ),
    "queries halved": Fault(
        case=TENSOR,
        plant=scaled("1.self_attn.q_proj", 0.5),
        check="gradients",
        ratio="1/tensor",
        parameter="layers.1",
    ),
    "keys doubled": Fault(
        case=PIPELINE, plant=scaled("k_proj", 2.0), check="gradients", ratio="pipeline"
    ),
    "a microbatch's share": Fault(
        case=BY_ROWS, plant=scaled("down_proj", 0.25), check="gradients", ratio="1/microbatches"
    ),
    "recomputed twice": Fault(
        case=AGAIN, plant=scaled("up_proj", 2.0), check="gradients", ratio="2"
    ),
    "a sign": Fault(case=DATA, plant=scaled("gate_proj", -1.0), check="gradients", ratio="-1"),
    "a tenth too much": Fault(
        case=PIPELINE, plant=scaled("v_proj", 1.1), check="gradients", ratio="1.1"
    ),
    "one part in 10^11": Fault(
        case=TENSOR, plant=scaled("o_proj", 1 + 1e-11), check="gradients", parameter="o_proj"
    ),
    # A shifted position
    "positions of stages": Fault(
        case=PIPELINE, plant=moved(uneven, where="later"), check="gradients"
    ),
    "positions of a rank": Fault(
        case=TENSOR, plant=moved(uneven, where="rank 1"), check="gradients"
    ),
    "positions of data": Fault(case=DATA, plant=moved(uneven, where="rank 1"), check="gradients"),
    "positions of microbatches": Fault(case=BY_ROWS, plant=moved(uneven), check="gradients"),
    "positions of recompute": Fault(
        case=AGAIN, plant=moved(lambda p: p.clamp(max=3)), check="gradients"
    ),
    "positions doubled": Fault(
        case=PIPELINE, plant=moved(lambda p: 2 * p, where="later"), check="gradients"
    ),
    "positions reversed": Fault(
        case=DATA, plant=moved(lambda p: -p, where="rank 1"), check="gradients"
    ),
    "positions of the first": Fault(
        case=TENSOR, plant=moved(torch.zeros_like, where="rank 1"), check="gradients"
    ),
    # A leak
    "no documents": Fault(case=ALONE, plant=leaking(lambda d: None), check="leak"),
    "no documents in one layer": Fault(
        case=ALONE, plant=leaking(lambda d: None, (2,)), check="leak"
    ),
    "documents a token late": Fault(case=ALONE, plant=leaking(one_late), check="leak"),
    "documents in pairs": Fault(case=ALONE, plant=leaking(lambda d: d // 2), check="leak"),
    "documents of a rank": Fault(case=TENSOR, plant=leaking(lambda d: d * 0), check="leak"),
    "documents of a stage": Fault(
        case=PIPELINE, plant=leaking(lambda d: d * 0, (3,)), check="leak"
    ),
    "a layer looks ahead": Fault(case=ALONE, plant=looking_ahead(0), check="causality"),
    "a late layer looks ahead": Fault(case=DATA, plant=looking_ahead(3), check="causality"),
    # What is lost
    "a lost layer": Fault(
        case=PIPELINE, plant=lost("layers.3.mlp"), check="gradients", ratio="0", parameter="3.mlp"
    ),
    "a lost bias of a norm": Fault(
        case=DATA, plant=lost("layers.0.input_layernorm"), check="gradients", ratio="0"
    ),
    "a lost expert": Fault(
        case=TENSOR,
        plant=lost_expert,
        check="gradients",
        subject="qwen3_moe",
        parameter="experts",
    ),
    "an expert saved as another": Fault(
        case=PIPELINE,
        plant=saved(
            lambda w: {n: v.detach().flip(0) if "1.mlp.experts" in n else v for n, v in w.items()}
        ),
        check="folder",
        subject="qwen3_moe",
    ),
    "not saved": Fault(
        case=TENSOR,
        plant=saved(lambda w: {n: v for n, v in w.items() if "layers.2.mlp.up" not in n}),
        check="folder",
    ),
    "saved in another order": Fault(case=PIPELINE, plant=saved(turned), check="folder"),
    "saved with another's values": Fault(
        case=DATA,
        plant=saved(
            lambda w: {**w, "model.norm.weight": w["model.layers.0.input_layernorm.weight"] * 2}
        ),
        check="folder",
    ),
}


def reference(subjects: list[str], folder: str) -> list[list[str]]:
    """What does not hold of each subject without a fault, in one process; keeps the references."""
    return [_run(subject, 0, ALONE, folder) for subject in subjects]


def find(names: list[str], folder: str) -> list[list[str]]:
    """What each fault is found to break: `check|parameter|ratio|what` of each counterexample."""
    found = []
    for name in names:
        fault = FAULTS[name]
        with fault.plant():
            found.append(_run(fault.subject, 1 + list(FAULTS).index(name), fault.case, folder))
    return found


def _run(subject: str, number: int, case: Case, folder: str) -> list[str]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    own = Path(folder) / subject.replace(":", "-")
    own.mkdir(exist_ok=True)
    job = Job(subject=subject, seed=SEED, tolerance=TOLERANCE, cases={number: case})
    outcome = run_case(job, number, case, own)
    assert not outcome.refused, outcome.refused
    return ["|".join((e.check, e.parameter, e.ratio, e.what)) for e in outcome.found]

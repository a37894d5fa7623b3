"""Faults planted in the engine or a model that a proof must find; runs of `test_prove.py`."""

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
    """A fault and the case that reveals it."""

    case: Case
    plant: Callable[[], AbstractContextManager[Any]]
    check: str
    """Check that must fail."""
    subject: str = "llama"
    ratio: str = ""
    """Expected ratio of the wrong gradient to the right one."""
    parameter: str = ""
    """Part of the parameter name that must be reported."""


def tied_config() -> ModelConfig:
    """Config of a model with tied embeddings."""
    return architecture("llama", {"tie_word_embeddings": True})


SINGLE = Case(layout="data=1", processes=1)
BY_ROWS = Case(layout="data=1", processes=1, microbatch_size=1)
RECOMPUTED = Case(layout="data=1", processes=1, recompute="full")
DATA = Case(layout="data=2", processes=2)
TENSOR = Case(layout="tensor=2", processes=2)
PIPELINE = Case(layout="pipeline=2", processes=2, microbatch_size=1)
CONTEXT = Case(layout="context=2", processes=2, context_attention="all_gather")
EXPERT = Case(layout="data=2,expert=2", processes=2)


def no_reduction(*_: Any, **__: Any) -> None:
    """Replaces a reduction over processes by nothing."""


def scale_gradients(part: str, factor: float) -> Callable[[], Any]:
    """Multiply the gradients of parameters whose name contains `part`."""
    original = SummedReduction.gradients

    def faulty(self: SummedReduction) -> dict[str, Tensor]:
        grads = original(self)
        return {name: g * factor if part in name else g for name, g in grads.items()}

    return lambda: patch.object(SummedReduction, "gradients", faulty)


def zero_gradients(part: str) -> Callable[[], Any]:
    """Zero the gradients of parameters whose name contains `part`."""
    return scale_gradients(part, 0.0)


def zeroed_expert() -> Any:
    """Zero the gradient of one expert in each layer."""
    original = SummedReduction.gradients

    def faulty(self: SummedReduction) -> dict[str, Tensor]:
        grads = original(self)
        for name, gradient in grads.items():
            if "experts" in name:
                gradient[1] = 0.0
        return grads

    return patch.object(SummedReduction, "gradients", faulty)


def shifted_positions(
    change: Callable[[Tensor], Tensor], *, where: str = "everywhere"
) -> Callable[[], Any]:
    """Change positions: everywhere, only on later stages, or only on rank 1."""
    original = Decoder.context

    def faulty(self: Decoder, positions: Tensor, *args: Any) -> Any:
        affected = {"everywhere": True, "later": not self.first, "rank 1": dist.get_rank() == 1}
        return original(self, change(positions) if affected[where] else positions, *args)

    return lambda: patch.object(Decoder, "context", faulty)


def shift_odd_positions(positions: Tensor) -> Tensor:
    """Increase odd positions by one."""
    return positions + positions % 2


def leaking(
    change: Callable[[Tensor], Tensor | None], layers: tuple[int, ...] = (0, 1, 2, 3)
) -> Callable[[], Any]:
    """Change the document ids that attention sees in some layers."""
    original = Attention.forward

    def faulty(self: Attention, hidden: Tensor, *, context: RotaryContext) -> Tensor:
        if self.layer in layers and context.documents is not None:
            context = replace(context, documents=change(context.documents), lengths=None)
        return original(self, hidden, context=context)

    return lambda: patch.object(Attention, "forward", faulty)


def shift_documents(documents: Tensor) -> Tensor:
    """Start each document one token late."""
    return torch.cat((documents[:, :1], documents[:, :-1]), 1)


def looking_ahead(layer: int) -> Callable[[], Any]:
    """Make attention of one layer non-causal."""
    original = Attention.forward

    def faulty(self: Attention, hidden: Tensor, *, context: RotaryContext) -> Tensor:
        if self.layer != layer:
            return original(self, hidden, context=context)
        with patch.object(parts, "attend", attend_without_mask):
            return original(self, hidden, context=context)

    return lambda: patch.object(Attention, "forward", faulty)


def attend_without_mask(
    ops: Any, q: Tensor, k: Tensor, v: Tensor, context: RotaryContext, **_: Any
) -> Tensor:
    """Non-causal attention within documents."""
    out: Tensor = ops.attention(q, k, v, causal=False, documents=context.documents)
    return out


def unreduced_rows() -> Any:
    """Skip the sum over processes that read different rows."""
    return patch.object(reduction, "gather_over_rows", lambda numbers, groups: numbers[None])


def unsummed_keys() -> Any:
    """Keep the gradients of keys and values unsummed over context ranks."""
    original = rows.all_gather_positions
    return patch.object(
        rows,
        "all_gather_positions",
        lambda local, mesh, sum_grads: original(local, mesh, sum_grads=False),
    )


def summed_losses() -> Any:
    """Sum gradients of losses that are equal on all context ranks."""
    original = rows.all_gather_positions
    return patch.object(
        rows,
        "all_gather_positions",
        lambda local, mesh, sum_grads: original(local, mesh, sum_grads=True),
    )


def cut_documents() -> Any:
    """Make a document start at the beginning of a rank's chunk."""
    original = rows.query_ranges
    return patch.object(
        rows,
        "query_ranges",
        lambda *args: [evolve(chunk, first_key=chunk.start) for chunk in original(*args)],
    )


def unordered_rows() -> Any:
    """Leave the rows of experts in the order of the sending processes."""
    original = expert_parallel._dispatch

    def faulty(*args: Any) -> Any:
        with patch.object(Tensor, "argsort", lambda key, **_: torch.arange(len(key))):
            return original(*args)

    return patch.object(expert_parallel, "_dispatch", faulty)


def dropped_expert_gradients() -> Any:
    """Drop the gradients of tokens that other processes' experts send back."""
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


def average_over_data() -> Any:
    """Make FSDP average over data ranks instead of summing."""
    original = FSDPModule.set_gradient_divide_factor
    return patch.object(
        FSDPModule, "set_gradient_divide_factor", lambda self, factor: original(self, 2.0 * factor)
    )


def unreduced_loss(op_name: str) -> Callable[[], Any]:
    """Skip one all-reduce of the vocabulary-parallel loss."""
    original = dist.all_reduce

    def faulty(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
        skipped = (op == dist.ReduceOp.MAX) == (op_name == "max")
        return None if skipped else original(tensor, op=op, group=group)

    return lambda: patch.object(split_vocabulary.dist, "all_reduce", faulty)


def skip_sums(keep: slice) -> Callable[[], Any]:
    """Sum only some of the gradients that tensor ranks must sum."""
    original = engine_gradients.sum_over_tensor

    def faulty(gradients: list[Tensor], groups: Groups) -> None:
        original(list(gradients)[keep], groups)

    return lambda: patch.object(engine_gradients, "sum_over_tensor", faulty)


def change_saved_weights(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[], Any]:
    """Change the weights that are saved."""
    original = save.named_weights

    def faulty(stage: Any) -> Any:
        return change(dict(original(stage))).items()

    return lambda: patch.object(save, "named_weights", faulty)


def reverse_rows(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reverse the rows of one weight."""
    return {
        name: weight.detach().flip(0) if name.endswith("0.self_attn.o_proj.weight") else weight
        for name, weight in weights.items()
    }


FAULTS: dict[str, Fault] = {
    # A missing sum
    "norms unsummed": Fault(
        case=TENSOR, plant=skip_sums(slice(0)), check="gradients", parameter="norm"
    ),
    "last norm unsummed": Fault(
        case=TENSOR, plant=skip_sums(slice(-1)), check="gradients", parameter="model.norm"
    ),
    "first norm unsummed": Fault(
        case=TENSOR, plant=skip_sums(slice(1, None)), check="gradients", parameter="norm"
    ),
    "head norms unsummed": Fault(
        case=TENSOR, plant=skip_sums(slice(0)), check="gradients", subject="qwen3", parameter="norm"
    ),
    "ties unsummed": Fault(
        case=PIPELINE,
        plant=lambda: patch.object(engine_gradients, "sum_tied", no_reduction),
        check="gradients",
        subject="planted:tied_config",
        parameter="embed_tokens",
    ),
    "maxima unsettled": Fault(case=TENSOR, plant=unreduced_loss("max"), check="loss"),
    "sums unsettled": Fault(case=TENSOR, plant=unreduced_loss("sum"), check="loss"),
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
        case=EXPERT, plant=dropped_expert_gradients, check="gradients", subject="qwen3_moe"
    ),
    "documents cut between context ranks": Fault(case=CONTEXT, plant=cut_documents, check="logits"),
    "logits ungathered": Fault(
        case=TENSOR,
        plant=lambda: patch.object(
            output, "gather_vocabulary", lambda local, groups: torch.cat((local, local), -1)
        ),
        check="logits",
    ),
    # A wrong factor
    "averaged over data": Fault(
        case=DATA, plant=average_over_data, check="gradients", ratio="1/data"
    ),
    "embedding halved": Fault(
        case=DATA,
        plant=scale_gradients("embed", 0.5),
        check="gradients",
        ratio="1/data",
        parameter="embed",
    ),
    "head doubled": Fault(
        case=TENSOR, plant=scale_gradients("lm_head", 2.0), check="gradients", ratio="tensor"
    ),
    "queries halved": Fault(
        case=TENSOR,
        plant=scale_gradients("1.self_attn.q_proj", 0.5),
        check="gradients",
        ratio="1/tensor",
        parameter="layers.1",
    ),
    "keys doubled": Fault(
        case=PIPELINE, plant=scale_gradients("k_proj", 2.0), check="gradients", ratio="pipeline"
    ),
    "a microbatch's share": Fault(
        case=BY_ROWS,
        plant=scale_gradients("down_proj", 0.25),
        check="gradients",
        ratio="1/microbatches",
    ),
    "recomputed twice": Fault(
        case=RECOMPUTED, plant=scale_gradients("up_proj", 2.0), check="gradients", ratio="2"
    ),
    "a sign": Fault(
        case=DATA, plant=scale_gradients("gate_proj", -1.0), check="gradients", ratio="-1"
    ),
    "a tenth too much": Fault(
        case=PIPELINE, plant=scale_gradients("v_proj", 1.1), check="gradients", ratio="1.1"
    ),
    "one part in 10^11": Fault(
        case=TENSOR,
        plant=scale_gradients("o_proj", 1 + 1e-11),
        check="gradients",
        parameter="o_proj",
    ),
    # A shifted position
    "positions of stages": Fault(
        case=PIPELINE,
        plant=shifted_positions(shift_odd_positions, where="later"),
        check="gradients",
    ),
    "positions of a rank": Fault(
        case=TENSOR, plant=shifted_positions(shift_odd_positions, where="rank 1"), check="gradients"
    ),
    "positions of data": Fault(
        case=DATA, plant=shifted_positions(shift_odd_positions, where="rank 1"), check="gradients"
    ),
    "positions of microbatches": Fault(
        case=BY_ROWS, plant=shifted_positions(shift_odd_positions), check="gradients"
    ),
    "positions of recompute": Fault(
        case=RECOMPUTED, plant=shifted_positions(lambda p: p.clamp(max=3)), check="gradients"
    ),
    "positions doubled": Fault(
        case=PIPELINE, plant=shifted_positions(lambda p: 2 * p, where="later"), check="gradients"
    ),
    "positions reversed": Fault(
        case=DATA, plant=shifted_positions(lambda p: -p, where="rank 1"), check="gradients"
    ),
    "positions of the first": Fault(
        case=TENSOR, plant=shifted_positions(torch.zeros_like, where="rank 1"), check="gradients"
    ),
    # A leak between documents or from later tokens
    "no documents": Fault(case=SINGLE, plant=leaking(lambda d: None), check="leak"),
    "no documents in one layer": Fault(
        case=SINGLE, plant=leaking(lambda d: None, (2,)), check="leak"
    ),
    "documents a token late": Fault(case=SINGLE, plant=leaking(shift_documents), check="leak"),
    "documents in pairs": Fault(case=SINGLE, plant=leaking(lambda d: d // 2), check="leak"),
    "documents of a rank": Fault(case=TENSOR, plant=leaking(lambda d: d * 0), check="leak"),
    "documents of a stage": Fault(
        case=PIPELINE, plant=leaking(lambda d: d * 0, (3,)), check="leak"
    ),
    "a layer looks ahead": Fault(case=SINGLE, plant=looking_ahead(0), check="causality"),
    "a late layer looks ahead": Fault(case=DATA, plant=looking_ahead(3), check="causality"),
    # Something lost
    "a lost layer": Fault(
        case=PIPELINE,
        plant=zero_gradients("layers.3.mlp"),
        check="gradients",
        ratio="0",
        parameter="3.mlp",
    ),
    "a lost bias of a norm": Fault(
        case=DATA, plant=zero_gradients("layers.0.input_layernorm"), check="gradients", ratio="0"
    ),
    "a lost expert": Fault(
        case=TENSOR,
        plant=zeroed_expert,
        check="gradients",
        subject="qwen3_moe",
        parameter="experts",
    ),
    "an expert saved as another": Fault(
        case=PIPELINE,
        plant=change_saved_weights(
            lambda w: {n: v.detach().flip(0) if "1.mlp.experts" in n else v for n, v in w.items()}
        ),
        check="folder",
        subject="qwen3_moe",
    ),
    "not saved": Fault(
        case=TENSOR,
        plant=change_saved_weights(
            lambda w: {n: v for n, v in w.items() if "layers.2.mlp.up" not in n}
        ),
        check="folder",
    ),
    "saved in another order": Fault(
        case=PIPELINE, plant=change_saved_weights(reverse_rows), check="folder"
    ),
    "saved with another's values": Fault(
        case=DATA,
        plant=change_saved_weights(
            lambda w: {**w, "model.norm.weight": w["model.layers.0.input_layernorm.weight"] * 2}
        ),
        check="folder",
    ),
}


def reference(subjects: list[str], folder: str) -> list[list[str]]:
    """Failed checks of each subject without a fault, in one process; stores the references."""
    return [_run(subject, 0, SINGLE, folder) for subject in subjects]


def find(names: list[str], folder: str) -> list[list[str]]:
    """Failed checks of each fault, as `check|parameter|ratio|what` per counterexample."""
    failures = []
    for name in names:
        fault = FAULTS[name]
        with fault.plant():
            failures.append(_run(fault.subject, 1 + list(FAULTS).index(name), fault.case, folder))
    return failures


def _run(subject: str, number: int, case: Case, folder: str) -> list[str]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    subject_folder = Path(folder) / subject.replace(":", "-")
    subject_folder.mkdir(exist_ok=True)
    job = Job(subject=subject, seed=SEED, tolerance=TOLERANCE, cases={number: case})
    outcome = run_case(job, number, case, subject_folder)
    assert not outcome.refused, outcome.refused
    return ["|".join((e.check, e.parameter, e.ratio, e.what)) for e in outcome.found]

"""Compare our preference and policy losses with TRL's.

Preference losses: loss and gradient of all weights of a small Llama on the same pairs, or on the
same labeled responses, with the KL of mismatched ones.
Policy losses of GRPO: loss and gradient of random log-probabilities.

    nox -s "peers(ms-align)"      or, with TRL installed,  python peers_losses.py

Prints the largest relative difference of each loss, and exits with 1 if one exceeds 1e-5.
"""

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig
from trl import KTOTrainer as TRLKTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDTrainer

from ms_align import KTOTrainer
from ms_align.engines.local import LocalEngine
from ms_align.losses.dpo import DPOLoss
from ms_align.losses.gkd import GKDLoss
from ms_align.losses.policy import PolicyLoss
from ms_align.losses.preference import F_DIVERGENCES, LOSSES, WITHOUT_REFERENCE
from ms_align.losses.surrogates import LOSS_TYPES, SurrogateOptions, at_level
from ms_align.streams.text_ends import TextEnds
from ms_align.trainers.base.offline import TrainingData

TOLERANCE = 1e-5
"""Relative; both sides compute in float32 and sum in another order."""
DPO_CASES: list[dict[str, Any]] = [
    *({"loss_type": name} for name in LOSSES if name not in {*WITHOUT_REFERENCE, "exo_pair"}),
    {"loss_type": "exo_pair", "label_smoothing": 1e-3},
    {"loss_type": "robust", "label_smoothing": 0.1},
    {"loss_type": "discopop", "discopop_tau": 0.2},
    {"loss_type": "sigmoid", "ld_alpha": 0.3},
    {"loss_type": "apo_zero", "ld_alpha": 0.0},
    {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2]},
    *(
        {"loss_type": name, "f_divergence_type": divergence}
        for name in ("sigmoid", "ipo", "exo_pair", "hinge")
        for divergence in F_DIVERGENCES[1:]
    ),
]
CPO_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss_type": "simpo", "cpo_alpha": 0.0}, {"loss_type": "simpo"}),
    (
        {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.2},
        {"loss_type": "simpo", "simpo_gamma": 1.2},
    ),
    ({"loss_type": "sigmoid", "cpo_alpha": 0.0}, {"loss_type": "cpo", "cpo_alpha": 0.0}),
    ({"loss_type": "hinge", "cpo_alpha": 0.0}, {"loss_type": "hinge", "reference_free": True}),
]
"""TRL's settings and ours."""
KTO_CASES: list[dict[str, Any]] = [
    {"loss_type": "kto"},
    {"loss_type": "kto", "desirable_weight": 1.33, "undesirable_weight": 0.5},
    {"loss_type": "apo_zero_unpaired"},
    {"loss_type": "apo_zero_unpaired", "desirable_weight": 0.25},
]
GKD_CASES: list[dict[str, Any]] = [
    {"beta": beta, "temperature": temperature}
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0)
    for temperature in (1.0, 0.9)
]
GRPO_CASES: list[dict[str, Any]] = [
    *({"loss_type": name} for name in LOSS_TYPES),
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "dapo", "delta": 1.5},
    {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
]
MAX_TOKENS = 7
COMMON: dict[str, Any] = {
    "beta": 0.3,
    "per_device_train_batch_size": 8,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": [],
}


class LogitsOutput:
    """Token losses from logits, as our engines compute them."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def logits(self, positions: slice) -> Tensor:
        """Return logits of some columns, (B, W, V)."""
        return self._logits[:, positions]

    def token_losses(self, targets: Tensor, **_: float) -> Tensor:
        """Return -log p(target), (B, S), 0 where the target is -100."""
        return nn.functional.cross_entropy(
            self._logits.float().transpose(1, 2), targets, reduction="none"
        )


def small_model(seed: int) -> LlamaForCausalLM:
    """Build a Llama with large random weights, so that log-ratios are not near 0."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).float()


def tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of 64 words, `w2` to `w61`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", *(f"w{index}" for index in range(2, 63)), "<unk>"]
    model = models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def dataset() -> Dataset:
    """Return eight pairs of random answers that differ in length."""
    generator = torch.Generator().manual_seed(0)

    def text(count: int) -> str:
        return " ".join(
            f"w{int(token)}" for token in torch.randint(2, 62, (count,), generator=generator)
        )

    return Dataset.from_list(
        [
            {"prompt": text(4) + " ", "chosen": text(3 + index), "rejected": text(9 - index)}
            for index in range(8)
        ]
    )


def gradients(model: nn.Module) -> Tensor:
    """Concatenate and clear all gradients."""
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(parts)


def difference(theirs: tuple[float, Tensor], ours: tuple[float, Tensor]) -> float:
    """Return the largest relative difference of loss and gradient."""
    loss = abs(theirs[0] - ours[0]) / max(abs(theirs[0]), 1e-12)
    gradient = float((theirs[1] - ours[1]).norm() / theirs[1].norm().clamp(min=1e-12))
    return max(loss, gradient)


def interleaved(first: Tensor, second: Tensor) -> Tensor:
    """Put the rows of pairs next to each other: chosen, rejected, chosen, ..."""
    return torch.stack((first, second), 1).flatten(0, 1)


def our_result(
    model: nn.Module,
    reference: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    mask: Tensor,
    loss: DPOLoss,
) -> tuple[float, Tensor]:
    """Return our loss and gradient; tokens, targets and attention mask are (B, S)."""
    batch = {"tokens": tokens, "targets": targets}
    with torch.no_grad():
        output: Any = LogitsOutput(reference(input_ids=tokens, attention_mask=mask).logits)
        batch["reference_logprobs"] = loss.row_logprobs(output, batch)
    output = LogitsOutput(model(input_ids=tokens, attention_mask=mask).logits)
    total, _ = loss(output, batch)
    value = total / loss.weight(batch)
    value.backward()
    return value.item(), gradients(model)


def targets_of(tokens: Tensor, completion: Tensor) -> Tensor:
    """Shift tokens by one and ignore all but completions, (B, S)."""
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = torch.where(completion[:, 1:].bool(), tokens[:, 1:], -100)
    return targets


def compare_dpo(case: dict[str, Any], folder: str) -> float:
    """Compare one setting of TRL's DPOTrainer."""
    model, reference = small_model(0), small_model(1)
    names = case["loss_type"] if isinstance(case["loss_type"], list) else [case["loss_type"]]
    config = DPOConfig(output_dir=folder, **COMMON, **{**case, "loss_type": names})
    trainer = DPOTrainer(
        model, reference, args=config, train_dataset=dataset(), processing_class=tokenizer()
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    model.eval()
    loss = trainer.compute_loss(model, dict(inputs))
    loss.backward()
    theirs = (loss.item(), gradients(model))
    tokens = interleaved(*inputs["input_ids"].chunk(2))
    completion = interleaved(*inputs["completion_mask"].chunk(2))
    mask = interleaved(*inputs["attention_mask"].chunk(2))
    targets = targets_of(tokens, completion)
    ours = our_result(model, reference, tokens, targets, mask, DPOLoss(beta=0.3, **case))
    return difference(theirs, ours)


def compare_cpo(case: dict[str, Any], our_case: dict[str, Any], folder: str) -> float:
    """Compare one setting of TRL's CPOTrainer, which has no reference."""
    model = small_model(0)
    config = CPOConfig(output_dir=folder, remove_unused_columns=False, **COMMON, **case)
    trainer = CPOTrainer(model, args=config, train_dataset=dataset(), processing_class=tokenizer())
    inputs = next(iter(trainer.get_train_dataloader()))
    model.eval()
    loss, _ = trainer.get_batch_loss_metrics(model, dict(inputs))
    loss.backward()
    theirs = (loss.item(), gradients(model))
    joint = trainer.concatenated_inputs(inputs)
    tokens = interleaved(*joint["concatenated_input_ids"].chunk(2))
    mask = interleaved(*joint["concatenated_attention_mask"].chunk(2))
    completion = interleaved(*(joint["concatenated_labels"] != -100).chunk(2))
    targets = targets_of(tokens, completion)
    ours = our_result(model, model, tokens, targets, mask, DPOLoss(beta=0.3, **our_case))
    return difference(theirs, ours)


def compare_kto(case: dict[str, Any], folder: str) -> float:
    """Compare one setting of TRL's KTOTrainer, with a policy that starts far from the reference."""
    model, reference = small_model(0), small_model(1)
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": index % 3 != 0}
        for index, row in enumerate(dataset())
    ]
    trainer = TRLKTOTrainer(
        model,
        reference,
        args=KTOConfig(output_dir=folder, **COMMON, **case),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    model.eval()
    loss = trainer.compute_loss(model, dict(inputs))
    loss.backward()
    theirs = (loss.item(), gradients(model))
    batch = {"label": inputs["label"].float()}
    for prefix in ("", "KL_"):
        if f"{prefix}input_ids" in inputs:
            tokens, mask = inputs[f"{prefix}input_ids"], inputs[f"{prefix}completion_mask"]
            batch[f"{prefix.lower()}tokens"] = tokens
            batch[f"{prefix.lower()}targets"] = targets_of(tokens, mask)
    ours = KTOTrainer(model=model, reference_model=reference, steps=1, beta=0.3, **case)
    stream: Any = iter([batch])
    learner = ours.learner(LocalEngine(model), TrainingData(stream=stream), TextEnds.of(None))
    columns = learner.next_batch()
    model.requires_grad_()
    output: Any = LogitsOutput(model(columns["tokens"]).logits)
    total, _ = learner.loss()(output, columns)
    value = total / learner.loss().weight(columns)
    value.backward()
    return difference(theirs, (value.item(), gradients(model)))


def compare_gkd(case: dict[str, Any]) -> float:
    """Compare one setting of TRL's generalized_jsd_loss on the logits of two models."""
    model, teacher = small_model(0), small_model(1)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 62, (6, 14), generator=draw)
    lengths = torch.randint(2, 10, (6,), generator=draw)
    completion = (torch.arange(14) >= 4) & (torch.arange(14) < 4 + lengths[:, None])
    targets = targets_of(tokens, completion)
    with torch.no_grad():
        teacher_logits = teacher(tokens).logits
    loss = GKDTrainer.generalized_jsd_loss(model(tokens).logits, teacher_logits, targets, **case)
    loss.backward()
    theirs = (loss.item(), gradients(model))
    ours = GKDLoss(**case, first=3)
    batch = {"targets": targets, "teacher_logits": teacher_logits[:, 3:13, None]}
    output: Any = LogitsOutput(model(tokens).logits)
    value = ours(output, batch)[0] / ours.weight(batch)
    value.backward()
    return difference(theirs, (value.item(), gradients(model)))


class FixedLogprobs(GRPOTrainer):
    """TRL's trainer on given log-probabilities (B, S) instead of a model's."""

    logprobs: Tensor

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.logprobs, torch.zeros_like(self.logprobs), None


class FixedOutput:
    """Our view of the same log-probabilities."""

    def __init__(self, logprobs: Tensor) -> None:
        self.logprobs = logprobs

    def token_losses(self, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Return -log p at targets."""
        return -self.logprobs * (targets != -100)

    def entropies(self, counted: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(self.logprobs)


def compare_grpo(case: dict[str, Any], folder: str) -> float:
    """Compare one setting of TRL's GRPOTrainer on 8 responses of 1 to 7 tokens."""
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(8, MAX_TOKENS, generator=generator) * 3 - 0.1
    logprobs = old + torch.randn(8, MAX_TOKENS, generator=generator) * 0.4
    lengths = torch.randint(1, MAX_TOKENS + 1, (8,), generator=generator)
    mask = (torch.arange(MAX_TOKENS) < lengths[:, None]).long()
    advantages = torch.randn(8, generator=generator)
    bounds = {"epsilon": 0.2, "epsilon_high": 1.28 if case["loss_type"] == "cispo" else 0.28}
    config = GRPOConfig(
        output_dir=folder,
        max_completion_length=MAX_TOKENS,
        num_generations=8,
        **{**COMMON, "beta": 0.0},
        **bounds,
        **case,
    )
    trainer = FixedLogprobs(
        small_model(0),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "w2 w3"}] * 8),
        processing_class=tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.eval()
    values = logprobs.clone().requires_grad_()
    trainer.logprobs = values
    inputs = {
        "prompt_ids": torch.full((8, 2), 2),
        "prompt_mask": torch.ones(8, 2, dtype=torch.long),
        "completion_ids": torch.full((8, MAX_TOKENS), 3),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    theirs = (loss.item(), values.grad.flatten())
    options = SurrogateOptions(**case)
    function, aggregation = LOSS_TYPES[options.loss_type]
    ours = PolicyLoss(
        clip_low=0.2,
        clip_high=0.28,
        aggregation=aggregation,
        max_response_tokens=MAX_TOKENS,
        ratio=lambda ratios, at: at_level(ratios, at, options.importance_sampling_level),
        function=function,
        options=options,
    )
    values = logprobs.clone().requires_grad_()
    batch = {
        "targets": torch.where(mask.bool(), 3, -100),
        "old_logprobs": old,
        "advantages": advantages[:, None].expand_as(old) * mask,
    }
    output: Any = FixedOutput(values)
    total, _ = ours(output, batch)
    value = total / ours.weight(batch)
    value.backward()
    return difference(theirs, (value.item(), values.grad.flatten()))


def main() -> int:
    """Print a line per setting; return 1 if any difference exceeds the tolerance."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for case in DPO_CASES:
            if case["loss_type"] == "exo_pair":
                case = {"label_smoothing": 1e-3, **case}
            value = compare_dpo(case, folder)
            worst = max(worst, value)
            print(f"{value:8.1e}  DPOTrainer {case}", flush=True)
        for case, our_case in CPO_CASES:
            value = compare_cpo(case, our_case, folder)
            worst = max(worst, value)
            print(f"{value:8.1e}  CPOTrainer {case}", flush=True)
        for case in KTO_CASES:
            value = compare_kto(case, folder)
            worst = max(worst, value)
            print(f"{value:8.1e}  KTOTrainer {case}", flush=True)
        for case in GKD_CASES:
            value = compare_gkd(case)
            worst = max(worst, value)
            print(f"{value:8.1e}  GKDTrainer {case}", flush=True)
        for case in GRPO_CASES:
            value = compare_grpo(case, folder)
            worst = max(worst, value)
            print(f"{value:8.1e}  GRPOTrainer {case}", flush=True)
    cases = (DPO_CASES, CPO_CASES, KTO_CASES, GKD_CASES, GRPO_CASES)
    count = sum(map(len, cases))
    print(f"largest relative difference of {count} settings: {worst:.1e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())

"""`patch` on small models of transformers: same results, no dense masks, no logits in training."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ms_kernels
from ms_kernels import PatchError, patch, unpatch

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 4},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 4},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4},
    "phi3": {},
    "olmo2": {},
    "glm": {"head_dim": 16},
    "granite": {"logits_scaling": 4.0},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
    },
    "gpt_neox": {},
    "starcoder2": {},
}
OWN_ATTENTION = {"gemma2"}
"""Families that cap their attention scores, so they keep their own attention."""
OWN_LOSS = {"gemma2", "gemma3_text", "granite"}
"""Families whose code caps or scales logits, so they keep their own loss."""
ROTATED_BY_OURS = set(FAMILIES) - {"gpt_oss"}


def build(family: str, **settings: Any) -> Any:
    """Return a model with random weights, norms included, and no dropout."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family], **settings)
    for name in ("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens(rows: int = 2, length: int = 24) -> Tensor:
    """Return random tokens, (rows, length)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 128, (rows, length), generator=generator)


def gradients(model: nn.Module, **batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the training loss and all gradients, flattened."""
    model.train()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(grads)


QUICK = ("llama", "mistral", "gemma2", "glm", "qwen3_moe", "gpt_oss")
"""Families of the default tests; the others are alike, and are tried by `-m slow`."""


@pytest.fixture(
    params=[
        family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
        for family in FAMILIES
    ]
)
def pair(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    """A family, its model, and a patched copy."""
    model = build(request.param)
    patched = copy.deepcopy(model)
    report = patch(patched)
    assert report.attention == (request.param not in OWN_ATTENTION)
    assert report.loss == (request.param not in OWN_LOSS)
    is_rotated = any("Attention" in name for name in report.replaced)
    assert is_rotated == (request.param in ROTATED_BY_OURS)
    assert report.max_difference is not None
    assert report.max_difference < 1e-5
    return request.param, model, patched


def test_a_patched_model_trains_and_generates_as_before(pair: tuple[str, Any, Any]) -> None:
    """Loss, gradients, logits of padded rows, and greedy generation with and without padding."""
    _, model, patched = pair
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :5] = 0  # padding on the left, as in generation
    loss, grads = gradients(model, input_ids=ids, labels=ids)
    new_loss, new_grads = gradients(patched, input_ids=ids, labels=ids)
    torch.testing.assert_close(new_loss, loss, rtol=1e-6, atol=0)
    assert (new_grads - grads).abs().max() <= 1e-5 * grads.abs().max()
    model.eval()
    patched.eval()
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        logits = patched(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    assert torch.equal(patched.generate(ids, **options), model.generate(ids, **options))


class LargestMask(TorchDispatchMode):
    """Records whether a step made a tensor (..., S, S)."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.is_square = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and look at its result."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape[-2:] == (self.length, self.length):
            self.is_square = result.dtype in (torch.bool, torch.float32) or self.is_square
        return result


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_packed_rows_follow_their_documents(family: str) -> None:
    """A document's logits in a packed row equal those of the document alone."""
    model = build(family)
    patch(model)
    model.eval()
    ids = tokens(1, 50)
    lengths = (17, 3, 30)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [model(input_ids=part).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


def test_a_patched_layer_gets_documents_instead_of_a_dense_mask() -> None:
    """The unpatched model builds (1, 1, S, S) for the same packed row."""
    model = build("llama").eval()
    ids = tokens(1, 50)
    batch = {"input_ids": ids, "position_ids": torch.arange(50)[None] % 25, "use_cache": False}

    def masks_are_square() -> bool:
        seen: list[Any] = []
        hook = model.model.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
        with LargestMask(50) as largest, torch.no_grad():
            model(**batch)
        hook.remove()
        return largest.is_square and isinstance(seen[0], Tensor)

    assert masks_are_square()
    patch(model)
    assert not masks_are_square()


def test_a_static_cache_generates_the_same() -> None:
    """Its empty positions follow the query, which our mask by documents does not describe."""
    model = build("llama").eval()
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(tokens(), **options)
    patch(model)
    assert torch.equal(model.generate(tokens(), **options), expected)


def test_saved_files_and_names_do_not_change(tmp_path: Path) -> None:
    """Also after `unpatch`, which restores classes and attention."""
    model = build("llama")
    classes = [type(module) for module in model.modules()]
    names = list(model.state_dict())
    patch(model)
    assert [type(module).__name__ for module in model.modules()] == [
        each.__name__ for each in classes
    ]
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is classes[0]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens()).logits, model.eval()(tokens()).logits)
    unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert model.config._attn_implementation == "sdpa"


def test_a_second_patch_changes_nothing() -> None:
    """Nor does it count modules again."""
    model = build("llama")
    patch(model)
    again = patch(model)
    assert again.replaced == {}
    assert type(model).__mro__[1].__mro__[1] is not type(model).__mro__[1]
    unpatch(model)
    assert type(model).__module__.startswith("transformers")


def test_a_norm_that_computes_something_else_is_left_alone() -> None:
    """Though its name and its attributes are those of RMSNorm."""
    model = build("llama")
    norm = model.model.norm

    class DoubledRMSNorm(type(norm)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)  # type: ignore[no-any-return]

    norm.__class__ = DoubledRMSNorm
    expected = model.eval()(tokens()).logits
    report = patch(model)
    assert report.replaced["LlamaRMSNorm"] == 4
    torch.testing.assert_close(model(tokens()).logits, expected)


def test_training_leaves_out_the_logits_and_evaluation_keeps_them() -> None:
    """The Trainer divides by its own count of labels under gradient accumulation."""
    model = build("llama")
    patch(model)
    ids = tokens()
    labels = ids.masked_fill(ids < 40, -100)
    output = model.train()(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(100))
    assert output.logits is None
    kept = model.eval()(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(100))
    assert kept.logits.shape == (2, 24, 128)
    torch.testing.assert_close(output.loss, kept.loss)


def test_bfloat16_agrees_within_its_rounding() -> None:
    """The report states the measured change."""
    model = build("llama").to(torch.bfloat16)
    report = patch(model)
    assert report.loss
    assert report.max_difference is not None
    assert report.max_difference <= 0.05


def test_parts_can_be_left_out() -> None:
    """Each by its own argument."""
    model = build("llama")
    report = patch(model, modules=False, attention=False, loss=True)
    assert (report.replaced, report.attention, report.loss) == ({}, False, True)
    assert model.config._attn_implementation == "sdpa"
    assert str(report).splitlines() == [
        "modules: none",
        "attention: unchanged",
        "loss: without logits",
        "logits changed by at most 0.0e+00, relative to the largest",
    ]


def test_a_model_on_the_meta_device_is_patched_untried() -> None:
    """Its modules wait for weights; attention and loss need none."""
    with torch.device("meta"):
        model = build("llama")
    report = patch(model)
    assert (report.replaced, report.attention, report.loss) == ({}, True, True)
    assert report.max_difference is None
    assert report.skipped == ("modules: the weights are on the meta device",)


def test_other_models_are_refused() -> None:
    """A plain module, and a model that fails before it is patched."""
    with pytest.raises(PatchError, match=r"model is <class .*Linear'>; it must be a transf"):
        patch(nn.Linear(2, 2))
    model = build("llama")
    model.model.layers[1].mlp.up_proj = nn.Linear(64, 7)
    with pytest.raises(PatchError, match="LlamaForCausalLM must run on a batch of tokens; it fai"):
        patch(model)


def test_a_capped_attention_is_refused_by_name() -> None:
    """When the implementation is chosen by name, without `patch`."""
    ms_kernels.register_attention()
    model = build("gemma2", attn_implementation="ms_kernels")
    with pytest.raises(ms_kernels.ArgumentError, match=r"softcap is 50\.0; it must be None"):
        model(tokens())


def test_attention_by_name_needs_no_patch() -> None:
    """`attn_implementation="ms_kernels"` gives SDPA's logits."""
    ms_kernels.register_attention()
    named = build("mistral", attn_implementation="ms_kernels").eval()
    torch.testing.assert_close(named(tokens()).logits, build("mistral").eval()(tokens()).logits)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_patched_model_compiles_as_one_graph(is_packed: bool) -> None:
    """Packed rows then keep their dense mask."""
    model = build("llama").train()
    batch = {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    if is_packed:
        batch["position_ids"] = (torch.arange(24) % 12).expand(2, -1)
    expected = model(**batch).loss
    patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**batch).loss, expected)


def test_the_trainer_reports_the_same_losses(tmp_path: Path) -> None:
    """With gradient accumulation, gradient checkpointing and evaluation."""
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in tokens(16, 16)]

    def losses(model: Any) -> list[float]:
        arguments = transformers.TrainingArguments(
            tmp_path,
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])
        trainer.train()
        history = trainer.state.log_history
        return [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]

    expected = losses(build("llama"))
    model = build("llama")
    patch(model)
    found = losses(model)
    assert len(found) == 6
    assert found == pytest.approx(expected, rel=1e-5)

"""Generation: sampled tokens, their log-probabilities, and independence from the batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from small_models import SIZES, alibi_model, decoder, gpt2, llama
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ms_align import (
    DataError,
    LocalEngine,
    LocalGenerator,
    LoraOptions,
    ModelError,
    Sampling,
    add_lora,
)
from ms_align.engines.assembly import start_engine
from ms_align.engines.generator import EngineGenerator
from ms_align.errors import ConfigError
from ms_align.generation import fused, static_batch
from ms_align.generation.cuda_graph import capture
from ms_align.generation.fused import FusedReader, fused_reader
from ms_align.generation.reader import RerunReader, reader_of
from ms_align.generation.response_buffer import ResponseBuffer
from ms_align.generation.responses import Responses
from ms_align.generation.static_batch import DecodeCache
from ms_align.models.language_model import language_model
from ms_align.rollouts.rows import logprobs_of, sequences
from ms_align.tokenizer import ByteTokenizer

PROMPTS = [[5, 6, 7, 8, 9], [11], [20, 21, 22], [30] * 12, [40, 41]]
SAMPLING = Sampling(max_new_tokens=10, stop_token_ids=tuple(range(0, 258, 9)))
FLOAT32 = {"rtol": 0.0, "atol": 1e-5}
"""Log-probabilities of a few nats: some hundred roundings of 6e-8 relative in two layers."""

FAMILIES = ("gemma2", "gemma3_text", "glm4", "granite", "olmo2", "phi3", "smollm3")
MODELS = {
    "llama": decoder,
    "qwen2": lambda: decoder("qwen2"),
    "qwen3": lambda: decoder("qwen3"),
    "mistral": lambda: decoder("mistral"),
    "gemma2": lambda: decoder("gemma2"),
    "transformers-llama": llama,
    "transformers-gpt2": gpt2,
    "transformers-bloom": lambda: alibi_model("bloom"),
    "transformers-falcon": lambda: alibi_model("falcon"),
    "transformers-mpt": lambda: alibi_model("mpt"),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    """Each type of model: rotary positions, learned positions, and ALiBi."""
    return MODELS[request.param]()


def single_row_logprobs(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities (S, V) of a row from the model itself, without cache or padding."""
    with torch.no_grad():
        output = model(torch.tensor([tokens]))
    return getattr(output, "logits", output)[0].float().log_softmax(-1)


@pytest.mark.parametrize("fused", [False, True])
def test_log_probabilities_do_not_depend_on_the_batch(model: nn.Module, fused: bool) -> None:
    """Prompts of unequal length and rows that join late match the plain forward pass to 1e-5."""
    responses = LocalGenerator(model, max_num_seqs=3, fused=fused)(
        PROMPTS, SAMPLING, count=2, seed=1
    )
    assert responses.logprobs is not None
    assert len(set(responses.lengths.tolist())) > 2, "rows are to end at different times"
    for row in range(10):
        prompt, tokens = PROMPTS[row // 2], responses.row(row)
        table = single_row_logprobs(model, prompt + tokens)
        expected = torch.stack([table[len(prompt) - 1 + i, t] for i, t in enumerate(tokens)])
        torch.testing.assert_close(responses.logprobs[row, : len(tokens)], expected, **FLOAT32)


def with_adapters() -> nn.Module:
    """A decoder with LoRA adapters that are not zero."""
    model = add_lora(decoder(), LoraOptions(rank=2))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return model


STATIC_MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "llama": (decoder, True),
    "llama-transformers": (llama, True),
    "qwen2": (lambda: decoder("qwen2"), True),
    "qwen3": (lambda: decoder("qwen3"), True),
    "unfused": (decoder, False),
    "unfused-qwen3": (lambda: decoder("qwen3"), False),
    "window": (lambda: decoder("mistral", sliding_window=WINDOW), True),
    "softcap": (lambda: decoder("gemma2", sliding_window=WINDOW), True),
    "sinks": (lambda: decoder("gpt_oss", num_local_experts=4, sliding_window=WINDOW), True),
    "experts": (lambda: decoder("qwen3_moe", **EXPERTS), True),
    "latent": (lambda: latent_decoder(), True),
    "adapters": (with_adapters, True),
}
"""Models that decode with static shapes, and whether to fuse their weights."""
SLOW = pytest.mark.slow
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("qwen3", "window", "adapters") else pytest.param(name, marks=SLOW)
        for name in STATIC_MODELS
    ],
)
def test_static_shapes_give_the_same_responses(name: str) -> None:
    """Prompts of unequal length, rows that join late, stops: the same tokens and lengths."""
    build, fused = STATIC_MODELS[name]
    options: dict[str, Any] = {"max_num_seqs": 3, "fused": fused}
    sampling = evolve(SAMPLING, max_new_tokens=20, temperature=0.8, top_k=60, top_p=0.95)
    expected = LocalGenerator(build(), **options)(PROMPTS, sampling, count=2, seed=1)
    for kernels in (False, True):
        generator = LocalGenerator(build(), static_shapes=True, kernels=kernels, **options)
        actual = generator(PROMPTS, sampling, count=2, seed=1)
        assert generator.static_shapes
        assert generator.kernels == kernels
        same_responses(actual, expected)


def same_responses(actual: Responses, expected: Responses) -> None:
    """Compare tokens exactly and log-probabilities within float32."""
    for column, values in expected.columns.items():
        if "logprobs" in column:
            torch.testing.assert_close(actual.columns[column], values, **FLOAT32)
        else:
            assert torch.equal(actual.columns[column], values), column


@pytest.mark.parametrize(
    "stops", [pytest.param("tokens", marks=SLOW), pytest.param("strings", marks=SLOW), "both"]
)
def test_a_static_batch_grows_is_refilled_and_compacted(
    stops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small blocks of positions, with a queue and responses of very different lengths."""
    monkeypatch.setattr(static_batch, "BLOCK", 4)
    monkeypatch.setattr(static_batch, "INITIAL_POSITIONS", 2)
    monkeypatch.setattr(static_batch, "MIN_COMPACTED_STEPS", 1)
    counts = {"grow": 0, "select": 0}
    for name in counts:
        method = getattr(DecodeCache, name)

        def count(cache: DecodeCache, argument: Any, name: str = name, method: Any = method) -> Any:
            counts[name] += 1
            return method(cache, argument)

        monkeypatch.setattr(DecodeCache, name, count)
    sampling = Sampling(
        max_new_tokens=40,
        stop_token_ids=tuple(range(0, 258, 30)) if stops != "strings" else (),
        stop_strings=("a", "O", "7", "e ") if stops != "tokens" else (),
    )
    options: dict[str, Any] = {"max_num_seqs": 4, "decode": ByteTokenizer().decode}
    expected = LocalGenerator(decoder(), **options)(PROMPTS, sampling, count=3, seed=5)
    actual = LocalGenerator(decoder(), static_shapes=True, **options)(
        PROMPTS, sampling, count=3, seed=5
    )
    same_responses(actual, expected)
    assert len(set(expected.lengths.tolist())) > 5
    assert counts["grow"] >= 2
    assert counts["select"] >= 1


def operators_of_a_step(layers: int) -> int:
    """Return the number of operators of a decoding step that launch kernels on a GPU."""
    model = language_model(decoder(num_hidden_layers=layers).requires_grad_(False))
    reader = fused_reader(model)
    assert reader is not None
    sampling = Sampling(max_new_tokens=8, stop_token_ids=(1, 2))
    buffer = ResponseBuffer.empty(2, sampling, 0, torch.device("cpu"))
    batch = static_batch.StaticBatch(reader, buffer, 2, 4, use_graph=False, use_kernels=False)
    with torch.no_grad():
        batch.prefill([0, 1], [[5, 6, 7]], 2)
        with OperatorCounter() as counter:
            batch.run(1)
    return counter.count


class OperatorCounter(TorchDispatchMode):
    """Counts operators whose result does not share the memory of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_decoding_step_has_few_operators() -> None:
    """Each one is a kernel on a GPU, except that a CPU computes a norm in six."""
    two, three = operators_of_a_step(2), operators_of_a_step(3)
    # Two norms, four products, rotation, two writes, attention, two sums and the gate's two.
    assert three - two <= 12 + 4 + 1 + 2 + 1 + 2 + 2
    assert two - 2 * (three - two) <= 61


def test_a_step_that_cannot_be_captured_runs_uncaptured(caplog: pytest.LogCaptureFixture) -> None:
    """One line names the reason, and the step itself is returned."""
    calls: list[int] = []
    step = capture(lambda: calls.append(1) if calls else torch.ones(1).item())  # type: ignore[arg-type,func-returns-value]
    calls.append(0)
    step()
    assert calls == [0, 1]
    assert caplog.text.count("decoding runs without a CUDA graph") == 1


def test_training_and_rollout_log_probabilities_agree(model: nn.Module) -> None:
    """Right-padded rows of an update against the rollout, so the first ratio is 1."""
    sampling = Sampling(max_new_tokens=10, temperature=0.7)
    responses = LocalGenerator(model)(PROMPTS, sampling, seed=2)
    rows = sequences(PROMPTS, responses)
    rescored = logprobs_of(LocalEngine(model), rows, 0.7)
    torch.testing.assert_close(rescored, rows["old_logprobs"], **FLOAT32)


def test_padding_and_packing_do_not_change_log_probabilities(model: nn.Module) -> None:
    """Left-padded, right-padded and packed rows give the same as single rows."""
    engine = LocalEngine(model)
    texts = [[5, 6, 7, 8, 9], [20, 21, 22], [30, 31, 32, 33]]
    width = 8
    expected = [
        single_row_logprobs(model, text)[:-1].gather(1, torch.tensor(text)[1:, None])[:, 0]
        for text in texts
    ]

    def evaluate(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return engine.evaluate(batch, lambda output, b: -output.token_losses(b["targets"]))

    right = {"tokens": torch.zeros(3, width).long(), "targets": torch.full((3, width), -100)}
    left = {name: value.clone() for name, value in right.items()}
    left["positions"] = torch.zeros(3, width).long()
    left["documents"] = torch.zeros(3, width).int()
    for row, text in enumerate(texts):
        count, tokens = len(text) - 1, torch.tensor(text)
        right["tokens"][row, :count], right["targets"][row, :count] = tokens[:-1], tokens[1:]
        left["tokens"][row, -count:], left["targets"][row, -count:] = tokens[:-1], tokens[1:]
        left["positions"][row, -count:] = torch.arange(count)
        left["documents"][row, -count:] = 1
    packed = {
        "tokens": torch.cat([torch.tensor(t[:-1]) for t in texts])[None],
        "targets": torch.cat([torch.tensor(t[1:]) for t in texts])[None],
        "positions": torch.cat([torch.arange(len(t) - 1) for t in texts])[None],
        "documents": torch.cat([torch.full((len(t) - 1,), i) for i, t in enumerate(texts)])[None],
    }
    packed["documents"] = packed["documents"].int()
    for actual in (evaluate(right)[right["targets"] >= 0], evaluate(left)[left["targets"] >= 0]):
        torch.testing.assert_close(actual, torch.cat(expected), **FLOAT32)
    torch.testing.assert_close(evaluate(packed)[0], torch.cat(expected), **FLOAT32)


WINDOW = 4
"""Shorter than the texts below."""


def sliding_window_model(family: str) -> nn.Module:
    """Build a transformers model with a sliding window in all layers, or in the second only."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    layers = ["full_attention", "sliding_attention"]
    if family in ("Qwen2", "Qwen3"):
        sizes |= {"use_sliding_window": True, "layer_types": layers}
    if family in ("Qwen3", "Gemma2", "Gemma3Text"):
        sizes["head_dim"] = 8
    config = getattr(transformers, family + "Config")(**sizes, sliding_window=WINDOW)
    model: nn.Module = getattr(transformers, family.removesuffix("Text") + "ForCausalLM")(config)
    return model.eval()


WINDOWED = ["Mistral", "Mixtral", "Phi3", "Starcoder2", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text"]


@pytest.mark.parametrize("family", WINDOWED)
def test_sliding_windows_work_in_rollouts_and_updates(family: str) -> None:
    """Far beyond the window, both agree with the model on single rows."""
    model = sliding_window_model(family)
    prompts = [[3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
    responses = LocalGenerator(model)(prompts, Sampling(max_new_tokens=12), count=2, seed=0)
    assert responses.logprobs is not None
    row_prompts = [prompt for prompt in prompts for _ in range(2)]
    rows = sequences(row_prompts, responses)
    rescored = logprobs_of(LocalEngine(model), rows, 1.0)
    torch.testing.assert_close(rescored, rows["old_logprobs"], **FLOAT32)
    for row, prompt in enumerate(row_prompts):
        tokens = responses.row(row)
        table = single_row_logprobs(model, prompt + tokens)
        expected = torch.stack([table[len(prompt) - 1 + i, t] for i, t in enumerate(tokens)])
        torch.testing.assert_close(responses.logprobs[row, : len(tokens)], expected, **FLOAT32)


@pytest.mark.parametrize("family", WINDOWED)
def test_sliding_windows_work_in_packed_rows(family: str) -> None:
    """Two packed texts longer than the window, compared with single rows."""
    model = sliding_window_model(family)
    texts = [list(range(1, 13)), list(range(60, 46, -1))]
    packed = {
        "tokens": torch.tensor([[token for text in texts for token in text[:-1]]]),
        "targets": torch.tensor([[token for text in texts for token in text[1:]]]),
        "positions": torch.cat([torch.arange(len(text) - 1) for text in texts])[None],
        "documents": torch.tensor([[0] * 11 + [1] * 13], dtype=torch.int32),
    }
    actual = LocalEngine(model).evaluate(packed, lambda out, b: -out.token_losses(b["targets"]))
    expected = [
        single_row_logprobs(model, text)[:-1].gather(1, torch.tensor(text)[1:, None])[:, 0]
        for text in texts
    ]
    torch.testing.assert_close(actual[0], torch.cat(expected), **FLOAT32)


def test_a_soft_cap_is_detected_with_small_logits() -> None:
    """Near 0 a cap has no effect, so it is read from the configuration."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    config = Gemma2Config(**sizes, vocab_size=64, intermediate_size=64, pad_token_id=0)
    model = Gemma2ForCausalLM(config).eval()
    engine = LocalEngine(model)
    with torch.no_grad():
        model.model.norm.weight.add_(1000.0)  # as may happen in long training
    text = [3, 4, 5, 6]
    batch = {"tokens": torch.tensor([text[:-1]]), "targets": torch.tensor([text[1:]])}
    actual = engine.evaluate(batch, lambda output, b: -output.token_losses(b["targets"]))
    expected = single_row_logprobs(model, text)[:-1].gather(1, torch.tensor(text)[1:, None])[:, 0]
    torch.testing.assert_close(actual[0], expected, **FLOAT32)


def test_norms_with_epsilon_0_generate_correctly() -> None:
    """`rms_norm_eps: 0.0` is a value, not a missing setting."""
    model = llama()
    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    for norm in norms:
        norm.variance_epsilon = 0.0
    assert norms
    responses = LocalGenerator(model, fused=True)(PROMPTS, SAMPLING, seed=1)
    assert responses.logprobs is not None
    table = single_row_logprobs(model, PROMPTS[0] + responses.row(0))
    expected = [table[len(PROMPTS[0]) - 1 + i, t] for i, t in enumerate(responses.row(0))]
    torch.testing.assert_close(
        responses.logprobs[0, : len(expected)], torch.stack(expected), **FLOAT32
    )


def test_rows_can_be_packed_in_double_precision() -> None:
    """The mask value of float64 does not fit into float32."""
    model = llama().double()
    batch = {
        "tokens": torch.tensor([[5, 6, 7, 5, 6, 7]]),
        "targets": torch.tensor([[6, 7, 8, 6, 7, 8]]),
        "positions": torch.tensor([[0, 1, 2, 0, 1, 2]]),
        "documents": torch.tensor([[0, 0, 0, 1, 1, 1]]),
    }
    actual = LocalEngine(model).evaluate(batch, lambda output, b: output.token_losses(b["targets"]))
    torch.testing.assert_close(actual[0, 3:], actual[0, :3], **FLOAT32)


def test_unknown_window_masks_are_rejected_when_packed_and_generate_without_cache() -> None:
    """Models whose mask format is unknown run full rows at every step."""
    model = sliding_window_model("Olmo3")
    documents = torch.tensor([[0] * 8 + [1] * 8])
    with pytest.raises(ModelError, match="has sliding windows in a mask format"):
        language_model(model).hidden(torch.ones(1, 16, dtype=torch.int64), None, documents)
    assert isinstance(reader_of(language_model(model)), RerunReader)
    check_log_probabilities(model)


def check_log_probabilities(model: nn.Module) -> None:
    """Compare the log-probabilities of each response with its row alone."""
    responses = LocalGenerator(model, max_num_seqs=3, fused=False)(
        PROMPTS, SAMPLING, count=2, seed=1
    )
    assert responses.logprobs is not None
    for row, length in enumerate(responses.lengths.tolist()):
        prompt, tokens = PROMPTS[row // 2], responses.row(row)
        table = single_row_logprobs(model, prompt + tokens)
        expected = torch.stack([table[len(prompt) - 1 + at, t] for at, t in enumerate(tokens)])
        torch.testing.assert_close(responses.logprobs[row, :length], expected, **FLOAT32)


RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 4},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 0,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "recurrent_gemma": {"lru_width": 32, "num_hidden_layers": 3},
}


@pytest.mark.parametrize("family", RECURRENT)
def test_models_with_recurrent_state_generate(family: str) -> None:
    """Convolutions, state spaces and linear attention in transformers."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.CONFIG_MAPPING[family](**{**sizes, **heads, **RECURRENT[family]})
    check_log_probabilities(transformers.AutoModelForCausalLM.from_config(config).eval())


def latent_decoder() -> nn.Module:
    """Multi-head latent attention, with the proportions of DeepSeek-V3."""
    return decoder(
        "deepseek_v3",
        num_key_value_heads=4,
        tie_word_embeddings=False,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )


def test_keys_may_be_wider_than_values() -> None:
    """Multi-head latent attention."""
    check_log_probabilities(latent_decoder())


@pytest.mark.parametrize("family", ["GPT2", "StableLm", "GPTNeoX", "Phi"])
def test_architectures_without_an_ms_parallel_model_run_in_one_process(
    family: str, tmp_path: Path
) -> None:
    """The engine computes and generates the same as transformers."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = getattr(transformers, f"{family}Config")(
        **sizes, num_attention_heads=4, num_key_value_heads=4, bos_token_id=0, eos_token_id=0
    )
    model = getattr(
        transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}"
    )(config).eval()
    model.save_pretrained(tmp_path)
    engine = start_engine(tmp_path)
    batch = {"tokens": torch.tensor([PROMPTS[3]]), "targets": torch.tensor([PROMPTS[3]])}
    actual = engine.evaluate(batch, lambda output, _: output.logits())
    with torch.no_grad():
        torch.testing.assert_close(actual, model(batch["tokens"]).logits, **FLOAT32)
    assert engine.module is not None
    check_log_probabilities(engine.module)


def test_the_batch_and_slots_do_not_change_tokens(model: nn.Module) -> None:
    """A seed gives the same tokens one row at a time or in one batch."""
    sequential = LocalGenerator(model, max_num_seqs=1)(PROMPTS, SAMPLING, count=2, seed=4)
    all_at_once = LocalGenerator(model, max_num_seqs=64)(PROMPTS, SAMPLING, count=2, seed=4)
    assert torch.equal(sequential.tokens, all_at_once.tokens)
    assert torch.equal(sequential.lengths, all_at_once.lengths)
    assert torch.equal(sequential.stopped, all_at_once.stopped)


def test_tokens_follow_the_models_distribution() -> None:
    """Chi-squared test of 4,000 first tokens."""
    model = decoder()
    responses = LocalGenerator(model, max_num_seqs=512)(
        [[5, 6, 7]], Sampling(max_new_tokens=1), count=4000, seed=0
    )
    expected = single_row_logprobs(model, [5, 6, 7])[-1].exp() * 4000
    counts = torch.bincount(responses.tokens[:, 0], minlength=258).float()
    frequent = expected >= 5
    statistic = float(((counts - expected).square() / expected)[frequent].sum())
    freedom = int(frequent.sum())
    # Chi-squared has mean k and deviation √(2k); five deviations are one in millions.
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_truncated_tokens_are_never_sampled() -> None:
    """With top-k, top-p and min-p only the sampling log-probability is renormalized."""
    model = llama()
    sampling = Sampling(max_new_tokens=4, top_k=5, top_p=0.8, min_p=0.1)
    responses = LocalGenerator(model)([[5, 6]], sampling, count=64, seed=0)
    table = single_row_logprobs(model, [5, 6])[-1]
    top_tokens = table.topk(5).indices.tolist()
    assert set(responses.tokens[:, 0].tolist()) <= set(top_tokens)
    assert responses.logprobs is not None
    assert responses.sampling_logprobs is not None
    first = responses.tokens[:, 0]
    torch.testing.assert_close(responses.logprobs[:, 0], table[first], **FLOAT32)
    assert bool((responses.sampling_logprobs[:, 0] > responses.logprobs[:, 0]).all())
    total = sum(
        {
            int(token): float(probability)
            for token, probability in zip(
                first, responses.sampling_logprobs[:, 0].exp(), strict=True
            )
        }.values()
    )
    assert total == pytest.approx(1.0, abs=1e-5)


def test_temperature_0_takes_the_most_likely_token() -> None:
    """Greedy decoding."""
    model = llama()
    tokens = LocalGenerator(model)([[5, 6]], Sampling(max_new_tokens=6, temperature=0.0)).row(0)
    for index, token in enumerate(tokens):
        assert int(single_row_logprobs(model, [5, 6, *tokens[:index]])[-1].argmax()) == token


def test_a_row_at_the_end_of_the_context_may_wait_for_others() -> None:
    """Prompts leave just enough room for a response; learned positions make one more token fail.

    Some of these hundred rows finish while others are not yet numerous enough to release them.
    """
    prompts = [[n % 250 + 1] * 118 for n in range(100)]
    model, sampling = gpt2(), Sampling(max_new_tokens=10, stop_token_ids=tuple(range(0, 258, 20)))
    together = LocalGenerator(model, max_num_seqs=48)(prompts, sampling, seed=2)  # of 128 positions
    assert int(together.lengths.max()) == 10
    checked_rows = [0, 48, 99]
    for row in checked_rows:
        table = single_row_logprobs(model, prompts[row] + together.row(row))[117:]
        expected = table[torch.arange(len(together.row(row))), torch.tensor(together.row(row))]
        assert together.logprobs is not None
        actual = together.logprobs[row, : len(expected)]
        torch.testing.assert_close(actual, expected, **FLOAT32)


class FixedRowsEngine:
    """Engine that returns given rows and supports a single stop token."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def generate(self, prompts: object, *, stop_token: int | None, **_: object) -> list[list[int]]:
        """Return the rows, each up to the stop token."""
        lengths = [
            row.index(stop_token) + 1 if stop_token in row else len(row) for row in self.rows
        ]
        return [row[:end] for row, end in zip(self.rows, lengths, strict=True)]


def test_engine_responses_end_at_the_first_stop() -> None:
    """Stop strings and several stop tokens are found in the engine's rows."""
    model, decode = decoder(), ByteTokenizer().decode
    free = Sampling(max_new_tokens=24)
    rows = LocalGenerator(model)(PROMPTS, free, count=2, seed=3)
    engine = FixedRowsEngine([rows.row(index) for index in range(10)])
    for stops in (
        {"stop_token_ids": 9},
        {"stop_token_ids": (9, 30, 200)},
        {"stop_strings": ("a", "e ", "i", "7")},
        {"stop_token_ids": tuple(range(0, 258, 20)), "stop_strings": ("a", "O")},
    ):
        sampling = Sampling(max_new_tokens=24, **stops)
        expected = LocalGenerator(model, decode=decode)(PROMPTS, sampling, count=2, seed=3)
        actual = EngineGenerator(engine, decode)(PROMPTS, sampling, count=2)  # type: ignore[arg-type]
        assert torch.equal(actual.lengths, expected.lengths)
        assert torch.equal(actual.stopped, expected.stopped)
        assert [actual.row(n) for n in range(10)] == [expected.row(n) for n in range(10)]
    with pytest.raises(ModelError, match="decode="):
        EngineGenerator(engine)(PROMPTS, Sampling(stop_strings="a"))  # type: ignore[arg-type]


def test_all_sampling_settings_reach_the_engine() -> None:
    """Top-k, top-p and min-p with an engine under a layout."""
    received: dict[str, object] = {}

    class RecordingEngine(FixedRowsEngine):
        def generate(self, prompts: object, **settings: object) -> list[list[int]]:  # type: ignore[override]
            received.update(settings)
            return self.rows

    sampling = Sampling(max_new_tokens=5, temperature=0.5, top_k=7, top_p=0.9, min_p=0.05)
    EngineGenerator(RecordingEngine([[1, 2]]))([[3]], sampling, seed=4)  # type: ignore[arg-type]
    assert received == {
        "max_new_tokens": 5, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.05,
        "seed": 4, "stop_token": None,
    }  # fmt: skip


@pytest.mark.parametrize("token", [10**400, 2**31, -1, True])
def test_invalid_stop_tokens_are_rejected(token: int) -> None:
    """Values outside any vocabulary, as in a damaged config.json, in one line."""
    with pytest.raises(
        ConfigError, match=r"stop_token_ids must be token ids from 0 .*got"
    ) as raised:
        Sampling(stop_token_ids=token)
    assert len(str(raised.value)) < 200


def test_stop_tokens_and_strings_are_part_of_the_response() -> None:
    """The completing token is the last one, and nothing is tokenized again."""
    model, tokenizer = decoder(), ByteTokenizer()
    free = LocalGenerator(model)([[5, 6]], Sampling(max_new_tokens=12), seed=3).row(0)
    by_token = LocalGenerator(model)(
        [[5, 6]], Sampling(max_new_tokens=12, stop_token_ids=free[4]), seed=3
    )
    assert by_token.row(0) == free[: free.index(free[4]) + 1]
    assert bool(by_token.stopped[0])
    ascii_only = Sampling(max_new_tokens=40, stop_strings=("a", "e ", "i", "O", "7"))
    by_string = LocalGenerator(model, decode=tokenizer.decode)(
        [[5, 6]], ascii_only, count=8, seed=3
    )
    for row in range(8):
        text = tokenizer.decode(by_string.row(row))
        contained = [stop in text for stop in ascii_only.stop_strings]
        assert any(contained) == bool(by_string.stopped[row])
        before = tokenizer.decode(by_string.row(row)[:-1])
        assert not any(stop in before for stop in ascii_only.stop_strings)
    with pytest.raises(ModelError, match="decode="):
        LocalGenerator(model)([[5]], ascii_only)


def test_models_that_cannot_be_fused_run_unfused(caplog: pytest.LogCaptureFixture) -> None:
    """A Llama with a changed forward is detected by its logits."""
    plain, changed = llama(), llama()
    assert isinstance(LocalGenerator(plain)._reader(), FusedReader)
    assert isinstance(LocalGenerator(decoder("qwen3"))._reader(), FusedReader)
    layer = changed.model.layers[1]
    original = layer.mlp.forward
    layer.mlp.forward = lambda hidden: 2 * original(hidden)
    assert not isinstance(LocalGenerator(changed)._reader(), FusedReader)
    assert "generating without fusion" in caplog.text


@pytest.mark.parametrize("build", [llama, decoder])
def test_bfloat16_models_run_unfused(build: Callable[[], nn.Module]) -> None:
    """Log-probabilities match single rows within one bfloat16 step of a logit."""
    model = build().bfloat16()
    generator = LocalGenerator(model, max_num_seqs=3)
    responses = generator(PROMPTS, SAMPLING, seed=1)
    assert not isinstance(generator._reader(), FusedReader)
    assert responses.logprobs is not None
    for row, prompt in enumerate(PROMPTS):
        tokens = responses.row(row)
        table = single_row_logprobs(model, prompt + tokens)[len(prompt) - 1 : -1]
        expected = table.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        actual = responses.logprobs[row, : len(tokens)]
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=2**-6)


@pytest.mark.slow
def test_mixed_precision_casts_fused_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, the fused weights have the compute dtype and pass the comparison."""
    from ms_parallel import Engine
    from ms_parallel.models import architecture

    precision = torch.bfloat16
    monkeypatch.setattr(fused, "CPU_DTYPES", (precision,))
    engine = Engine(architecture("qwen3", SIZES), device="cpu", mixed_precision=True, compile=True)
    assert engine.module is not None
    generator = LocalGenerator(engine.module, static_shapes=True)
    responses = generator(PROMPTS, SAMPLING, seed=1)
    reader = generator._reader()
    assert isinstance(reader, FusedReader)
    assert {weight.dtype for weight in (reader._embedding, reader._head, reader._norm)} == {
        precision
    }
    assert {layer.qkv.dtype for layer in reader._layers} == {precision}
    rows = sequences(PROMPTS, responses)
    rescored = engine.evaluate(rows, lambda out, batch: -out.token_losses(batch["targets"]))
    assert responses.logprobs is not None
    for row, length in enumerate(responses.lengths.tolist()):
        start = len(PROMPTS[row]) - 1
        actual, expected = responses.logprobs[row, :length], rescored[row, start : start + length]
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=2**-5)


def test_prompts_that_cannot_be_continued_are_rejected() -> None:
    """Empty prompts, no prompts, prompts beyond the context, and tokens outside the vocabulary."""
    generator = LocalGenerator(llama())
    with pytest.raises(DataError, match="prompts are empty"):
        generator([], Sampling())
    with pytest.raises(DataError, match="prompt 1 is empty"):
        generator([[1], []], Sampling())
    with pytest.raises(DataError, match="prompt 0 has 100 tokens"):
        generator([[1] * 100], Sampling(max_new_tokens=64))
    with pytest.raises(DataError, match="token 300 and the model's vocabulary is 258"):
        generator([[300]], Sampling())
    with pytest.raises(DataError, match="token -1 and the model's vocabulary is 258"):
        generator([[-1, 2]], Sampling())


@pytest.mark.parametrize("number", [258, -1, 2**40])
@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_a_batch_of_another_vocabulary_is_rejected(name: str, number: int) -> None:
    """Before the embedding and before the loss."""
    engine = LocalEngine(decoder())
    batch = {key: torch.ones(2, 5, dtype=torch.int64) for key in ("tokens", "targets")}
    batch["targets"][0, 0] = -100
    engine.evaluate(batch, lambda output, rows: output.token_losses(rows["targets"]))
    batch[name][1, 3] = number
    with pytest.raises(DataError, match=f"batch's {name} has token {number} and the model's"):
        engine.evaluate(batch, lambda output, rows: output.token_losses(rows["targets"]))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_split_forward_passes_give_the_logits_of_every_family(name: str) -> None:
    """Running body and head separately keeps soft caps and divisors; fusing is not supported."""
    model = language_model(decoder(name))
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(model.project(model.hidden(tokens, None, None)), model.module(tokens))
    assert fused_reader(model) is None

"""The decoder: packed documents, caches, pipeline stages, initialization and losses."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from ms_parallel import operators as ops
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models import (
    DecoderConfig,
    KeyValueCache,
    StagedModel,
    architecture,
    build_model,
    spans,
)
from ms_parallel.models.decoder import Decoder
from ms_parallel.operators import losses, plain
from ms_parallel.weights import initialize

# A float32 rounding is 6e-8 of a value; logits here reach 10 after about 50 roundings.
TOLERANCE = 3e-5

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {"sliding_window": 5, "sliding_layers": (2, 3)},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 16},
    "transformer-xl": {"segment_length": 4, "memory_length": 6, "num_key_value_heads": None},
}


def test_initial_weights_do_not_depend_on_the_number_of_threads() -> None:
    """Each thread draws other chunks, with generators of their own."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            model = build_model(architecture("llama", {**SMALL, "vocab_size": 70_000}))
            initialize(model, 7)
            results.append(list(model.parameters()))
    finally:
        torch.set_num_threads(threads)
    assert len(results[0][0]) * SMALL["hidden_size"] > 2 * 2**20  # three chunks
    assert all(map(torch.equal, *results))


def small(family: str, layers: int = 4) -> StagedModel:
    """A model of a few layers with large enough weights."""
    overrides = {**SMALL, **FAMILIES[family], "num_hidden_layers": layers}
    settings = {k: v for k, v in overrides.items() if v is not None}
    model = build_model(architecture(family, settings))
    initialize(model, 3)
    return model


def tokens(rows: int, count: int) -> Tensor:
    """Random tokens, the same at every call."""
    return torch.randint(64, (rows, count), generator=torch.Generator().manual_seed(1))


def test_windows_that_config_json_cannot_express_are_refused() -> None:
    """A saved and loaded model must have the same windows."""
    with pytest.raises(ConfigError, match="'llama' does not support sliding_layers"):
        architecture("llama", {**SMALL, "sliding_layers": (1,)})
    for layers in ((4,), ("a",), "ab"):
        with pytest.raises(ConfigError, match="sliding_layers must be layer indices from 0 to 3"):
            architecture("qwen2", {**SMALL, "sliding_window": 4, "sliding_layers": layers})


def test_a_llama_that_transformers_cannot_load_is_refused() -> None:
    """It requires a hidden size that is a multiple of the number of heads."""
    sizes = {**SMALL, "hidden_size": 36, "num_attention_heads": 8, "head_dim": 8}
    with pytest.raises(ConfigError, match=r"hidden_size of .* must be a multiple of"):
        architecture("llama", sizes)
    assert architecture("mistral", sizes).hidden_size == 36


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_deep_copy_is_independent(family: str) -> None:
    """As needed for a reference model or averaged weights; only operators are shared."""
    model, text = small(family), tokens(2, 6)
    before = model(text)
    copied = deepcopy(model)
    assert torch.equal(copied(text), before)
    for parameter in copied.parameters():
        parameter.zero_()
    assert torch.equal(model(text), before)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_documents_give_the_logits_of_each_alone(family: str) -> None:
    """Three documents in a row do not affect one another."""
    model, lengths = small(family), (7, 1, 12)
    row = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].int()
    packed = model(row, positions=positions, documents=documents)
    if family == "transformer-xl":  # segments are cut by row position, not by document
        first = model(row[:, :7])
        torch.testing.assert_close(packed[:, :7], first, atol=TOLERANCE, rtol=0)
        changed = row.clone()
        changed[:, :8] = (changed[:, :8] + 1) % 64
        changed_logits = model(changed, positions=positions, documents=documents)
        assert torch.equal(changed_logits[:, 8:], packed[:, 8:])
        return
    alone = [model(part) for part in row.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_documents", [False, True])
@torch.no_grad()
def test_decoding_with_a_cache_equals_a_full_forward(family: str, with_documents: bool) -> None:
    """Chunks of any size give the same logits, also after a rewind."""
    model, row = small(family), tokens(2, 20)
    documents = positions = None
    if with_documents:
        documents = torch.tensor([[0] * 9 + [1] * 11, [0] * 3 + [1] * 17]).int()
        starts = torch.tensor([[0] * 9 + [9] * 11, [0] * 3 + [3] * 17])
        positions = torch.arange(20) - starts

    def chunk(a: int, b: int, cache: KeyValueCache) -> Tensor:
        return model(
            row[:, a:b],
            positions=None if positions is None else positions[:, a:b],
            documents=None if documents is None else documents[:, a:b],
            cache=cache,
        )

    expected = model(row, positions=positions, documents=documents)
    cache = KeyValueCache()
    chunks = [chunk(0, 6, cache), chunk(6, 15, cache)]
    chunk(15, 18, cache)
    cache.rewind(15)
    chunks += [chunk(i, i + 1, cache) for i in range(15, 20)]
    torch.testing.assert_close(torch.cat(chunks, 1), expected, atol=TOLERANCE, rtol=0)
    assert cache.length == 20


@torch.no_grad()
def test_tokens_without_documents_continue_the_last_document() -> None:
    """A prompt of two documents is continued in the second."""
    model, row = small("llama"), tokens(1, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7]).int()
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    expected = model(row, positions=positions, documents=documents)
    cache = KeyValueCache()
    model(row[:, :8], positions=positions[:, :8], documents=documents[:, :8], cache=cache)
    continued = model(row[:, 8:], positions=positions[:, 8:], cache=cache)
    torch.testing.assert_close(continued, expected[:, 8:], atol=TOLERANCE, rtol=0)


def test_a_cache_cannot_be_rewound_past_its_length() -> None:
    """It cannot be rewound to more positions than it holds."""
    with pytest.raises(ModelError, match="cache of 0 positions to 1"):
        KeyValueCache().rewind(1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_stages_in_sequence_equal_the_full_model(family: str, tied: bool) -> None:
    """Two separately built stages have the full model's weights and give its exact logits."""
    settings = {k: v for k, v in {**SMALL, **FAMILIES[family]}.items() if v is not None}
    config = architecture(family, {**settings, "tie_word_embeddings": tied})
    full_model = build_model(config)
    front = build_model(config, layers=range(3), last=False)
    back = build_model(config, layers=range(3, 4), first=False)
    for model in (full_model, front, back):
        initialize(model, 5)
    row = tokens(2, 11)
    assert torch.equal(back(front(row)), full_model(row))
    assert torch.equal(back.head_weight, full_model.head_weight)
    with pytest.raises(ModelError, match="last pipeline stage"):
        _ = front.head_weight


def test_a_tied_head_is_one_parameter() -> None:
    """It is counted once, and both uses add to its gradient."""
    model = build_model(architecture("llama", {**SMALL, "tie_word_embeddings": True}))
    initialize(model, 0)
    names = [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in names
    model(tokens(1, 4)[:, :1]).sum().backward()
    gradient = model.head_weight.grad
    assert gradient is not None
    assert gradient.abs().sum(1).count_nonzero() == 64


def test_initial_weights_depend_only_on_seed_and_name() -> None:
    """Another seed or another name gives other values."""
    first, second = small("llama"), small("llama")
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
    initialize(second, 4)
    blocks = "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(
        first.get_parameter(blocks.format(0)), second.get_parameter(blocks.format(0))
    )
    assert not torch.equal(
        first.get_parameter(blocks.format(0)), first.get_parameter(blocks.format(1))
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_initialize_depends_only_on_torchs_seed(family: str) -> None:
    """No weight is uninitialized memory."""
    built = []
    for junk in (1.0, 2.0):
        # Freed memory that an uninitialized weight would show.
        junk_tensors = [torch.full((64, 32), junk) for _ in range(50)]
        del junk_tensors
        torch.manual_seed(0)
        settings = {k: v for k, v in {**SMALL, **FAMILIES[family]}.items() if v is not None}
        built.append(build_model(architecture(family, settings)))
    for name, parameter in built[0].named_parameters():
        assert torch.equal(parameter, built[1].get_parameter(name)), name


def test_the_document_mask_is_built_once_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers share one mask; changing the documents in place builds another."""
    builds: list[object] = []
    build = plain._DocumentMasks._build
    monkeypatch.setattr(
        plain._DocumentMasks, "_build", staticmethod(lambda *a: builds.append(a) or build(*a))
    )
    model, documents = small("llama"), torch.tensor([[0, 0, 1, 1]]).int()
    before = model(tokens(1, 4), documents=documents)
    assert len(builds) == 1
    documents[0, 1] = 1
    after = model(tokens(1, 4), documents=documents)
    assert len(builds) == 2
    assert not torch.equal(before, after)
    other = torch.tensor([[0, 0, 1, 1]]).int()  # the first documents are still alive
    assert torch.equal(model(tokens(1, 4), documents=other), before)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_separate_attention_of_long_documents_equals_the_mask(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and gradients of packed rows, with and without a window."""
    model, lengths = small(family), (70, 90, 96, 64, 5, 187)
    ids = torch.repeat_interleave(torch.tensor([0, 1, 2, 0, 3, 1]), torch.tensor(lengths))
    documents, text = ids.view(2, 256).int(), tokens(2, 256)
    assert spans.document_lengths(documents) == lengths
    results = []
    for shortest in (64, 10_000):
        monkeypatch.setattr(spans, "MIN_MEAN_LENGTH", shortest)
        logits = model(text, documents=documents)
        results.append((logits, *torch.autograd.grad(logits.square().mean(), model.parameters())))
    for separate, masked in zip(*results, strict=True):
        torch.testing.assert_close(separate, masked, atol=TOLERANCE, rtol=0)


def test_recurring_or_short_documents_use_the_mask() -> None:
    """Document 0 continues after document 1; eight documents of 32; one document per row."""
    returning = torch.repeat_interleave(torch.tensor([0, 1, 0]), torch.tensor([80, 96, 80]))
    assert spans.document_lengths(returning[None].int()) is None
    assert spans.document_lengths(torch.arange(8).repeat_interleave(32)[None].int()) is None
    assert spans.document_lengths(torch.zeros(3, 256).int()) is None


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [0, 5, 21])
def test_chunked_losses_equal_unchunked_ones(
    reduction: str, ignored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients equal the plain formula's, also with ignored targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, 16, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator, requires_grad=True)
    targets = torch.randint(50, (21,), generator=generator)
    targets[:ignored] = -100
    targets = targets.view(3, 7)
    results = []
    for chunk_bytes in (1 << 28, 4 * 4 * 50):
        monkeypatch.setattr(losses, "_CHUNK_BYTES", chunk_bytes)
        loss = ops.linear_cross_entropy(hidden, weight, targets, reduction=reduction)  # type: ignore[arg-type]
        results.append((loss, *torch.autograd.grad(loss.sum(), (hidden, weight))))
    for expected, chunked in zip(*results, strict=True):
        # Sums of 21 terms of order 10, with relative roundings of 6e-8.
        torch.testing.assert_close(chunked, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"hiden_size": 64}, "did you mean 'hidden_size'"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads must divide .*, got 3"),
        ("llama", {"head_dim": 7}, "head_dim must be even .*, got 7"),
        ("llama", {"vocab_size": 0}, "vocab_size must be"),
        ("llama", {"vocab_size": "many"}, "vocab_size must be an integer .*, got 'many'"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta must be a number .*, got nan"),
        ("llama", {"query_key_norm": True}, "use model_type .* or qwen3 or"),
        (
            "llama",
            {"rope_scaling": {"kind": "ntk", "factor": 2.0}},
            "known: linear, dynamic, llama3, yarn",
        ),
        ("llama", {"rope_scaling": {"factr": 2.0}}, "did you mean 'factor'"),
        ("lama", {}, "did you mean 'llama'"),
        ("transformer-xl", {"segment_lenght": 4}, "did you mean 'segment_length'"),
    ],
)
def test_a_bad_architecture_is_refused_with_a_remedy(
    family: str, overrides: dict[str, object], message: str
) -> None:
    """The one-line error names the setting and valid values."""
    with pytest.raises(ConfigError, match=message) as caught:
        architecture(family, overrides)
    assert "\n" not in str(caught.value)


def test_a_decoder_uses_the_given_operators() -> None:
    """A decoder calls the operators that it was built with."""

    class Loud:
        rms_norm = staticmethod(lambda x, weight, eps=1e-6: ops.rms_norm(x, weight, eps) * 2)
        rotary = staticmethod(ops.rotary)
        swiglu = staticmethod(ops.swiglu)
        attention = staticmethod(ops.attention)
        linear_cross_entropy = staticmethod(ops.linear_cross_entropy)

    config = architecture("llama", SMALL)
    assert isinstance(config, DecoderConfig)
    plain, loud = Decoder(config), Decoder(config, ops=Loud())
    for model in (plain, loud):
        initialize(model, 0)
    assert not torch.allclose(plain(tokens(1, 4)), loud(tokens(1, 4)))


@pytest.mark.parametrize("family", ["llama", "mistral", "transformer-xl"])
def test_a_model_compiles_to_one_graph(family: str) -> None:
    """torch.compile traces it without graph breaks, and loss and gradients are equal."""
    model, batch = small(family, layers=2), tokens(2, 8)  # two segments
    documents = torch.arange(8).ge(5).int().expand(2, -1).contiguous()
    plain = model(batch, documents=documents)
    plain.square().mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    torch.compiler.reset()
    traced = torch.compile(model, backend="aot_eager", fullgraph=True)(batch, documents=documents)
    traced.square().mean().backward()
    torch.testing.assert_close(traced, plain, rtol=0, atol=TOLERANCE)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=TOLERANCE)

"""The Triton kernels against the reference in float64, in Triton's interpreter.

Not collected directly: `test_triton.py` runs it in a process with TRITON_INTERPRET=1.
"""

# ruff: noqa: N803  (pointers and constants are capital in Triton)
import itertools
import os

import pytest
import torch
import triton
import triton.language as tl
from attrs import evolve
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ms_kernels.checking import compare
from ms_kernels.core.dispatch import describe_call
from ms_kernels.core.launches import TunedKernel
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS
from ms_kernels.operators.attention import kernels
from ms_kernels.operators.attention.contract import visible
from ms_kernels.operators.attention.triton import document_ranges
from ms_kernels.operators.linear_cross_entropy import triton_logits
from ms_kernels.tuning import tuner

from .interpreter import correct_bfloat16
from .test_operators import draw_arguments
from .test_recurrent import RECURRENT, assert_documents_independent, assert_outside_terms_ignored

correct_bfloat16()

EXAMPLES = int(os.environ.get("MS_EXAMPLES", "6"))
OPERATORS = {impl.operator: impl for impl in IMPLEMENTATIONS if impl.backend == "triton"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_equal_the_reference(operator):
    """Odd sizes, empty batches, any strides, three dtypes and every option are within tolerance."""
    contract, kernels = CONTRACTS[operator], OPERATORS[operator]
    compared = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=EXAMPLES < 10,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(data=st.data())
    def compare_one_call(data):
        nonlocal compared
        dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
        tensors, options = draw_arguments(data, contract, dtype)
        call = describe_call(contract, tuple(tensors), options)
        contract.bind(call)
        assume(kernels.refuses(call) is None)
        for part, ratio in compare(contract, kernels.run, tensors, options):
            assert ratio <= 1, f"{part} is off by {ratio:.3g} times the tolerance"
        compared += 1

    compare_one_call()
    assert compared >= EXAMPLES  # refused calls are redrawn and not counted


@triton.jit
def attention_block_ranges(
    OUT,
    RANGES,
    queries,
    keys,
    window,
    OF_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Store the four positions that attention computes for block `program_id(0)`."""
    block = tl.program_id(0)
    if OF_KEYS:
        start, end, full_start, full_end = kernels._query_range(
            block, 0, queries, keys, window, RANGES, CAUSAL, WINDOW, DOCUMENTS, BM, BN
        )
    else:
        start, end, full_start, full_end = kernels._key_range(
            block, 0, queries, keys, window, RANGES, CAUSAL, WINDOW, DOCUMENTS, BM, BN
        )
    tl.store(OUT + block * 4, start)
    tl.store(OUT + block * 4 + 1, end)
    tl.store(OUT + block * 4 + 2, full_start)
    tl.store(OUT + block * 4 + 3, full_end)


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_attention_masks_every_block_that_needs_it(of_keys):
    """Over all pairs: skipped blocks are fully hidden, unmasked blocks fully visible.

    Covers causal masks, windows, caches, and documents that are short, long or interleaved.
    """
    generator = torch.Generator().manual_seed(0)
    unmasked = 0
    draws = itertools.product((40, 61), (0, 13), (True, False), (None, 5, 30), (None, 0.02, 0.2, 3))
    for keys, cached, causal, window, chance in draws:
        queries, (query_block, key_block) = keys - cached, (16, 8) if of_keys else (8, 16)
        documents = None
        if chance is not None:
            ends = torch.rand(1, keys, generator=generator) < min(chance, 0.1)
            documents = ends.int().cumsum(1).int() % (2 if chance == 3 else keys)
        ranges = torch.zeros(1)
        if documents is not None:
            ranges = document_ranges(documents, queries, query_block, key_block, of_keys=of_keys)
        blocks = -(-keys // key_block) if of_keys else -(-queries // query_block)
        out = torch.full((blocks, 4), -1, dtype=torch.int32)
        masks = {"CAUSAL": causal, "WINDOW": window is not None, "DOCUMENTS": chance is not None}
        attention_block_ranges[(blocks,)](
            out,
            ranges,
            queries,
            keys,
            window or 0,
            of_keys,
            *masks.values(),
            query_block,
            key_block,
        )
        mask = visible(queries, keys, torch.device("cpu"), documents, causal, window)
        pairs = torch.ones(queries, keys, dtype=torch.bool) if mask is None else mask[0]
        pairs = pairs.T if of_keys else pairs
        size = key_block if of_keys else query_block
        for rows, (start, end, full_start, full_end) in zip(
            pairs.split(size), out.tolist(), strict=True
        ):
            assert start <= full_start <= full_end
            assert not rows[:, :start].any()
            assert not rows[:, max(end, full_end) :].any()
            assert rows[:, full_start:full_end].all()
            if not of_keys:
                assert full_end <= keys  # keys past the end would count in the softmax
            unmasked += full_end - full_start
    assert unmasked > 1000


def test_the_interpreter_rounds_to_the_nearest_bfloat16():
    """A bfloat16 swiglu is off by at most half a unit in the last place: it is not truncated."""
    contract = CONTRACTS["swiglu"]
    gate, up = contract.draw({}, dtype=torch.bfloat16).values()
    expected = contract.reference(gate.double(), up.double())
    actual = OPERATORS["swiglu"].run(gate, up)
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8 + 1e-6, atol=1e-30)


def test_the_tuner_runs_every_candidate(monkeypatch):
    """Every kernel of the operator gets an entry whose values it was launched with."""
    launched = []
    original = TunedKernel.values

    def recording(kernel, key, *sizes):
        values = original(kernel, key, *sizes)
        launched.append((kernel.name, tuple(values.items())))
        return values

    monkeypatch.setattr(TunedKernel, "values", recording)
    shrunk = [
        evolve(tuned, tried_at=({"...": 4, "I": 16},), candidates=tuned.candidates[:2])
        for tuned in OPERATORS["swiglu"].tuned
    ]
    implementation = evolve(OPERATORS["swiglu"], devices=None, tuned=tuple(shrunk))
    monkeypatch.setattr(tuner, "IMPLEMENTATIONS", (implementation,))
    (entry,) = tuner.tune(torch.device("cpu"), dtypes=[torch.float32], spend_s=0.01).entries
    assert [config.kernel for config in entry.configurations] == ["gated_forward", "gated_backward"]
    for config in entry.configurations:
        assert config.at_most == {"I": 16}
        assert (config.kernel, tuple(config.values.items())) in launched
    for tuned in shrunk:
        assert all((tuned.name, tuple(values.items())) in launched for values in tuned.candidates)


FEW = {"...": 16, "V": 64, "T": 16, "R": 32}
"""Small sizes for interpreted calls, which are slow."""


def run_example(operator, changed, **options):
    """Run a kernel on its example with single values replaced: NAME -> (index, value)."""
    contract = CONTRACTS[operator]
    example = contract.draw({name: FEW[name] for name in FEW.keys() & contract.example.keys()})
    for name, (index, value) in changed.items():
        example[name][index] = value
    values = tuple(options.get(option.name, option.default) for option in contract.options)
    result = OPERATORS[operator].run(*example.values(), *values)
    return example, result


OUT_OF_RANGE = [-1, -(2**31), 2**31 - 1]
"""Indices that would read or write out of bounds if a kernel followed them."""


@pytest.mark.parametrize("index", OUT_OF_RANGE)
def test_an_out_of_range_page_or_length_gives_nan_without_a_read(index):
    """Only the faulty sequence is NaN; the interpreter would crash if it followed the index."""
    for name, position in (("page_table", (0, 1)), ("lengths", (0,))):
        example, result = run_example("decode_attention", {name: (position, index)})
        assert result[0].isnan().all()
        assert not result[1:].isnan().any()
        assert torch.equal(result[1:], run_example("decode_attention", {})[1][1:])
        del example


@pytest.mark.parametrize("target", OUT_OF_RANGE)
def test_an_out_of_range_target_gives_nan_without_a_read(target):
    """Only the row's own loss or log-probability is NaN."""
    for operator, name, options in (
        ("cross_entropy", "targets", {"reduction": "none"}),
        ("linear_cross_entropy", "targets", {"reduction": "none"}),
        ("token_log_probs", "tokens", {}),
    ):
        _, result = run_example(operator, {name: ((5,), target)}, **options)
        assert result.isnan().nonzero().tolist() == [[5]]


@pytest.mark.parametrize("index", OUT_OF_RANGE)
def test_an_out_of_range_row_index_is_neither_read_nor_written(index):
    """Its token and the gradient of its weight are NaN; all other gradients are unchanged."""
    _, result = run_example("unpermute_tokens", {"places": ((7, 0), index)})
    assert result.isnan().any(1).nonzero().tolist() == [[7]]
    example = CONTRACTS["unpermute_tokens"].draw({})
    unused_row = int(example["places"][7, 0])
    example["places"][7, 0] = index
    grad_out = torch.ones(64, 32)
    backward = torch.ops.ms_kernels.unpermute_tokens_triton_backward.default
    rows, weights = backward(grad_out, example["rows"], example["places"], example["weights"], 3)
    assert weights.isnan().nonzero().tolist() == [[7, 0]]
    used_rows = [row for row in range(128) if row != unused_row]
    expected = torch.empty(128)
    expected[example["places"].clamp(0, 127).flatten()] = example["weights"].flatten()
    torch.testing.assert_close(rows[used_rows], expected[used_rows, None].expand(-1, 32))


@pytest.mark.parametrize("counts", [[0, 96, 0, -1], [0, 2**31 - 1, 5, 5], [-7, 50, 60, 0]])
def test_invalid_counts_touch_nothing_past_the_rows(counts):
    """In forward and backward, memory after x and after the result stays unchanged."""
    example = CONTRACTS["grouped_matmul"].draw({})
    buffer = torch.zeros(200, 32)
    buffer[96:] = torch.nan
    x, weights = buffer[:96], example["weights"]
    bad_counts = torch.tensor(counts)
    result = OPERATORS["grouped_matmul"].run(x, weights, bad_counts)
    assert result.shape == (96, 48)
    backward = torch.ops.ms_kernels.grouped_matmul_triton_backward.default
    _, weight_grads = backward(torch.ones(96, 48), x, weights, bad_counts, 3)
    assert not weight_grads.isnan().any()


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [10, 0, 20, 0], [0, 95, 0, 0], [1, 1, 1, 1]])
def test_rows_without_an_expert_are_nan(counts):
    """Rows left over by counts that are too small never expose uninitialized memory."""
    example = CONTRACTS["grouped_matmul"].draw({})
    result = OPERATORS["grouped_matmul"].run(example["x"], example["weights"], torch.tensor(counts))
    assert result[sum(counts) :].isnan().all()
    assert not result[: sum(counts)].isnan().any()


def test_out_of_range_experts_sort_last_and_are_not_counted():
    """Their rows, and so their tokens, are NaN after the product."""
    example = CONTRACTS["permute_tokens"].draw({})
    example["experts"][3, 1], example["experts"][9, 0] = -1, 4
    rows, counts, places = OPERATORS["permute_tokens"].run(*example.values(), 4)
    assert counts.sum() == rows.shape[0] - 2
    assert {int(places[3, 1]), int(places[9, 0])} == {126, 127}
    assert torch.equal(rows[126:], example["x"][[3, 9]])


@pytest.mark.parametrize("with_state", [False, True])
def test_kernels_ignore_terms_outside_the_window(with_state):
    """The same check as in `test_recurrent.py` for the other backends."""
    assert assert_outside_terms_ignored(OPERATORS["causal_conv1d"].run, with_state) >= 20


def test_logit_chunks_share_one_buffer_and_give_the_same_numbers(monkeypatch):
    """Five chunks of rows, the last one shorter, match a single chunk."""
    for operator in ("linear_cross_entropy", "token_log_probs"):
        contract = CONTRACTS[operator]
        for dtype in (torch.float32, torch.bfloat16):
            tensors = contract.draw({"...": 14, "V": 32, "H": 8}, dtype=dtype).values()
            with monkeypatch.context() as patched:
                patched.setattr(triton_logits, "CHUNK_BYTES", 3 * 32 * 4)
                hidden, weight = list(tensors)[:2]
                chunks = triton_logits.chunks(hidden, weight, gradients=True)
                chunk_starts = [
                    (rows.start, *(t.data_ptr() for t in buffers)) for rows, *buffers in chunks
                ]
                assert [start for start, *_ in chunk_starts] == [0, 3, 6, 9, 12]
                assert len({tuple(pointers) for _, *pointers in chunk_starts}) == 1
                parts = compare(contract, OPERATORS[operator].run, tensors, contract.defaults)
                for part, ratio in parts:
                    assert ratio <= 1, f"{operator}: {part} is off by {ratio:.3g} tolerances"


@pytest.mark.parametrize("operator", RECURRENT)
def test_kernels_keep_documents_bitwise_independent(operator):
    """Changing one token to NaN or any number leaves the other documents' results unchanged."""
    run = OPERATORS[operator].run
    numbers = [torch.nan] if EXAMPLES < 10 else [0.5, torch.inf, torch.nan]
    assert_documents_independent(
        lambda *args: run(*args)[0], CONTRACTS[operator], numbers, final_state=True
    )


SMALL = {"...": 3, "H": 8, "V": 12, "I": 8, "B": 1, "S": 3, "Sq": 5, "Sk": 5, "T": 4, "K": 32}
SMALL |= {"P": 16, "G": 1, "N": 6, "E": 4}


@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck_passes_for_every_operator(operator):
    """Fake results match the real shapes, dtypes and strides."""
    contract = CONTRACTS[operator]
    dims = {} if operator in ("decode_attention", "unpermute_tokens") else dict(SMALL)
    if operator == "permute_tokens":
        dims = {"T": 4, "H": 8}
    example = contract.draw({name: size for name, size in dims.items() if name in contract.example})
    tensors = [
        tensor.requires_grad_(argument.differentiable)
        for argument, tensor in zip(contract.arguments, example.values(), strict=True)
    ]
    name = f"{operator}_triton"
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        getattr(torch.ops.ms_kernels, name).default,
        (*tensors, *contract.defaults),
        test_utils=utilities,
    )

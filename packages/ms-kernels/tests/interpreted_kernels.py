"""The Triton kernels against the reference in float64, in Triton's interpreter.

Not collected by itself: `test_triton.py` runs it in a process whose TRITON_INTERPRET is 1.
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

from ms_kernels import ArgumentError, adamw_step
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
from .test_operators import arguments_of
from .test_recurrent import APART, assert_apart, assert_outside_is_left_out

correct_bfloat16()

EXAMPLES = int(os.environ.get("MS_EXAMPLES", "6"))
OPERATORS = {each.operator: each for each in IMPLEMENTATIONS if each.backend == "triton"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_equal_the_reference(operator):
    """Odd sizes, no rows, any strides, three dtypes, every option: within the tolerance."""
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
        tensors, options = arguments_of(data, contract, dtype)
        call = describe_call(contract, tuple(tensors), options)
        contract.bind(call)
        assume(kernels.refuses(call) is None)
        for part, share in compare(contract, kernels.run, tensors, options):
            assert share <= 1, f"{part} is off by {share:.3g} times the tolerance"
        compared += 1

    compare_one_call()
    assert compared >= EXAMPLES  # calls that are refused are drawn again, not counted


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
    """Store the four numbers that attention computes for block `program_id(0)`, in positions."""
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
def test_attention_masks_all_blocks_that_need_it(of_keys):
    """Enumerated over all pairs: skipped blocks are hidden, unmasked blocks are visible.

    For causal masks, windows, caches, and documents that end often, seldom and come back.
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
                assert full_end <= keys  # keys beyond the last would count in the softmax
            unmasked += full_end - full_start
    assert unmasked > 1000


def test_the_interpreter_rounds_to_the_nearest_bfloat16():
    """A swiglu of bfloat16 is off by half a unit in the last place at most, so nothing is cut."""
    contract = CONTRACTS["swiglu"]
    gate, up = contract.draw({}, dtype=torch.bfloat16).values()
    truth = contract.reference(gate.double(), up.double())
    got = OPERATORS["swiglu"].run(gate, up)
    torch.testing.assert_close(got.double(), truth, rtol=2**-8 + 1e-6, atol=1e-30)


def test_adamw_forgets_old_moments_entirely_where_it_is_told_to():
    """With betas of 0 a slope of 1e-4 beside moments of 1 makes a step of its sign."""
    contract, count = CONTRACTS["adamw_step"], 29
    generator = torch.Generator().manual_seed(0)
    slope = 1e-4 * torch.randn(count, generator=generator)
    tensors = [torch.randn(count, generator=generator), slope, torch.ones(count), torch.ones(count)]
    options = (1, 0.1, (0.0, 0.0), 1e-8, 0.01)
    for part, share in compare(contract, OPERATORS["adamw_step"].run, tensors, options):
        assert share <= 1, f"{part} is off by {share:.3g} times the tolerance"


def test_a_tuner_runs_a_kernel_with_each_candidate(monkeypatch):
    """Every kernel of the operator gets an entry, of values that it was run with."""
    ran = []
    first = TunedKernel.values

    def noted(kernel, key, *sizes):
        values = first(kernel, key, *sizes)
        ran.append((kernel.name, tuple(values.items())))
        return values

    monkeypatch.setattr(TunedKernel, "values", noted)
    small = [
        evolve(each, tried_at=({"...": 4, "I": 16},), candidates=each.candidates[:2])
        for each in OPERATORS["swiglu"].tuned
    ]
    here = evolve(OPERATORS["swiglu"], devices=None, tuned=tuple(small))
    monkeypatch.setattr(tuner, "IMPLEMENTATIONS", (here,))
    (entry,) = tuner.tune(torch.device("cpu"), dtypes=[torch.float32], spend_s=0.01).entries
    assert [each.kernel for each in entry.configurations] == ["gated_forward", "gated_backward"]
    for each in entry.configurations:
        assert each.at_most == {"I": 16}
        assert (each.kernel, tuple(each.values.items())) in ran
    for each in small:
        assert all((each.name, tuple(values.items())) in ran for values in each.candidates)


FEW = {"...": 16, "V": 64, "T": 16, "R": 32}
"""Sizes of what is interpreted, where a few rows say as much as many."""


def result_of(operator, changed, **options):
    """Run a kernel on its example, some numbers of an argument replaced: NAME -> (place, value)."""
    contract = CONTRACTS[operator]
    drawn = contract.draw({name: FEW[name] for name in FEW.keys() & contract.example.keys()})
    for name, (place, value) in changed.items():
        drawn[name][place] = value
    values = tuple(options.get(each.name, each.default) for each in contract.options)
    found = OPERATORS[operator].run(*drawn.values(), *values)
    return drawn, found


FAR = [-1, -(2**31), 2**31 - 1]
"""Where an index that is out of range would read or write, were it followed."""


@pytest.mark.parametrize("far", FAR)
def test_a_page_or_length_out_of_range_is_not_read_and_makes_nan(far):
    """The sequence at fault alone; the interpreter would fall where it followed the index."""
    for name, place in (("page_table", (0, 1)), ("lengths", (0,))):
        drawn, got = result_of("decode_attention", {name: (place, far)})
        assert got[0].isnan().all()
        assert not got[1:].isnan().any()
        assert torch.equal(got[1:], result_of("decode_attention", {})[1][1:])
        del drawn


@pytest.mark.parametrize("far", FAR)
def test_a_target_that_is_no_class_is_not_read_and_makes_nan(far):
    """Its own row's loss or log-probability, and no other."""
    for operator, name, options in (
        ("cross_entropy", "targets", {"reduction": "none"}),
        ("linear_cross_entropy", "targets", {"reduction": "none"}),
        ("token_log_probs", "tokens", {}),
    ):
        _, got = result_of(operator, {name: ((5,), far)}, **options)
        assert got.isnan().nonzero().tolist() == [[5]]


@pytest.mark.parametrize("far", FAR)
def test_a_place_that_is_no_row_is_neither_read_nor_written(far):
    """Its token is NaN, and so is the gradient of its weight; other gradients are as they were."""
    _, got = result_of("unpermute_tokens", {"places": ((7, 0), far)})
    assert got.isnan().any(1).nonzero().tolist() == [[7]]
    drawn = CONTRACTS["unpermute_tokens"].draw({})
    lost = int(drawn["places"][7, 0])
    drawn["places"][7, 0] = far
    pull = torch.ones(64, 32)
    ran = torch.ops.ms_kernels.unpermute_tokens_triton_backward.default
    rows, weights = ran(pull, drawn["rows"], drawn["places"], drawn["weights"], 3)
    assert weights.isnan().nonzero().tolist() == [[7, 0]]
    kept = [row for row in range(128) if row != lost]
    truth = torch.empty(128)
    truth[drawn["places"].clamp(0, 127).flatten()] = drawn["weights"].flatten()
    torch.testing.assert_close(rows[kept], truth[kept, None].expand(-1, 32))


@pytest.mark.parametrize("counts", [[0, 96, 0, -1], [0, 2**31 - 1, 5, 5], [-7, 50, 60, 0]])
def test_counts_that_are_no_partition_touch_nothing_beyond_the_rows(counts):
    """Neither forward nor backward; what lies behind x and the result stays as it was."""
    drawn = CONTRACTS["grouped_matmul"].draw({})
    room = torch.zeros(200, 32)
    room[96:] = torch.nan
    x, weights = room[:96], drawn["weights"]
    wrong = torch.tensor(counts)
    got = OPERATORS["grouped_matmul"].run(x, weights, wrong)
    assert got.shape == (96, 48)
    ran = torch.ops.ms_kernels.grouped_matmul_triton_backward.default
    _, to_weights = ran(torch.ones(96, 48), x, weights, wrong, 3)
    assert not to_weights.isnan().any()


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [10, 0, 20, 0], [0, 95, 0, 0], [1, 1, 1, 1]])
def test_rows_that_no_expert_has_are_nan(counts):
    """Too few counts leave rows over: never what was in memory before."""
    drawn = CONTRACTS["grouped_matmul"].draw({})
    got = OPERATORS["grouped_matmul"].run(drawn["x"], drawn["weights"], torch.tensor(counts))
    assert got[sum(counts) :].isnan().all()
    assert not got[: sum(counts)].isnan().any()


def test_a_choice_that_is_no_expert_comes_last_and_is_not_counted():
    """So that its rows are NaN after the product, and its token too."""
    drawn = CONTRACTS["permute_tokens"].draw({})
    drawn["experts"][3, 1], drawn["experts"][9, 0] = -1, 4
    rows, counts, places = OPERATORS["permute_tokens"].run(*drawn.values(), 4)
    assert counts.sum() == rows.shape[0] - 2
    assert {int(places[3, 1]), int(places[9, 0])} == {126, 127}
    assert torch.equal(rows[126:], drawn["x"][[3, 9]])


def test_one_tensor_is_not_both_moments_for_the_kernel_either():
    """It is refused before a backend is asked, whichever it would be."""
    moments = torch.zeros(8)
    with pytest.raises(ArgumentError, match="square is in the memory of mean"):
        adamw_step(torch.ones(8), torch.ones(8), moments, moments, step=1, learning_rate=0.1)


@pytest.mark.parametrize("given_state", [False, True])
def test_a_term_outside_the_window_is_left_out_by_the_kernels(given_state):
    """As `test_recurrent.py` states it for the other backends."""
    assert assert_outside_is_left_out(OPERATORS["causal_conv1d"].run, given_state) >= 20


def test_chunks_of_logits_share_one_buffer_and_change_no_number(monkeypatch):
    """Five chunks of rows, the last one shorter, give what one chunk gives."""
    for operator in ("linear_cross_entropy", "token_log_probs"):
        contract = CONTRACTS[operator]
        for dtype in (torch.float32, torch.bfloat16):
            tensors = contract.draw({"...": 14, "V": 32, "H": 8}, dtype=dtype).values()
            with monkeypatch.context() as patched:
                patched.setattr(triton_logits, "CHUNK_BYTES", 3 * 32 * 4)
                hidden, weight = list(tensors)[:2]
                chunks = triton_logits.chunks(hidden, weight, gradients=True)
                places = [(rows.start, *(t.data_ptr() for t in more)) for rows, *more in chunks]
                assert [start for start, *_ in places] == [0, 3, 6, 9, 12]
                assert len({tuple(pointers) for _, *pointers in places}) == 1
                parts = compare(contract, OPERATORS[operator].run, tensors, contract.defaults)
                for part, share in parts:
                    assert share <= 1, f"{operator}: {part} is off by {share:.3g} tolerances"


@pytest.mark.parametrize("operator", APART)
def test_kernels_keep_documents_apart_to_the_bit(operator):
    """One token becomes NaN, or any other number: the other documents' results stay."""
    run = OPERATORS[operator].run
    numbers = [torch.nan] if EXAMPLES < 10 else [0.5, torch.inf, torch.nan]
    assert_apart(lambda *given: run(*given)[0], CONTRACTS[operator], numbers, final_state=True)


SMALL = {"...": 3, "H": 8, "V": 12, "I": 8, "B": 1, "S": 3, "Sq": 5, "Sk": 5, "T": 4, "K": 32}
SMALL |= {"P": 16, "G": 1, "N": 6, "E": 4}


@pytest.mark.parametrize("operator", OPERATORS)
def test_torch_is_told_the_truth_about_each_operator(operator):
    """Fake results have the real shapes, dtypes and strides, and nothing is written unannounced."""
    contract = CONTRACTS[operator]
    dims = {} if operator in ("decode_attention", "unpermute_tokens") else dict(SMALL)
    if operator == "permute_tokens":
        dims = {"T": 4, "H": 8}
    drawn = contract.draw({name: size for name, size in dims.items() if name in contract.example})
    tensors = [
        each.requires_grad_(argument.differentiable and not contract.mutates)
        for argument, each in zip(contract.arguments, drawn.values(), strict=True)
    ]
    name = f"{operator}_triton"
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        getattr(torch.ops.ms_kernels, name).default,
        (*tensors, *contract.defaults),
        test_utils=utilities,
    )

"""Recurrent operators: the delta rule's state and the convolution's taps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ms_kernels
from ms_kernels.checking import compare
from ms_kernels.operators import CONTRACTS, OPERATORS
from ms_kernels.operators.gated_delta_rule import cpu as chunks

from .truth import TRUTHS

RECURRENT = ["causal_conv1d", "gated_delta_rule"]
BACKENDS = ["cpu", "reference"]


def assert_documents_independent(run, contract, numbers=(0.5, torch.inf, torch.nan), **options):
    """Fail unless changing a token leaves every other document's results bitwise unchanged.

    The changed token takes each of `numbers`. Document ids may repeat: a new document starts
    wherever the id changes.
    """
    values = tuple(options.get(option.name, option.default) for option in contract.options)
    example = contract.draw({"B": 2, "S": 24, "Hk": 1, "Hv": 1})
    example["documents"] = torch.tensor([[0] * 5 + [1] * 9 + [0] + [7] * 9, [3] * 24])
    before = run(*example.values(), *values)
    position, document = 8, slice(5, 14)
    for name in ("x", "q", "k", "v", "g", "beta"):
        for number in numbers:
            if name not in example:
                continue
            changed = {**example, name: example[name].clone()}
            changed[name][0, position] = number
            after = run(*changed.values(), *values)
            assert not torch.equal(after[0, document], before[0, document])
            assert torch.equal(after[0, : document.start], before[0, : document.start])
            assert torch.equal(after[0, document.stop :], before[0, document.stop :])
            assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", RECURRENT)
def test_a_changed_token_leaves_other_documents_bitwise_unchanged(operator, backend, monkeypatch):
    """Whether it becomes another number, infinity or NaN; also with chunks of 4 positions."""
    (impl,) = [impl for impl in OPERATORS[operator].implementations if impl.backend == backend]
    assert_documents_independent(impl.run, CONTRACTS[operator])
    monkeypatch.setattr(chunks, "MAX_CHUNK", 4)
    assert_documents_independent(impl.run, CONTRACTS[operator])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", RECURRENT)
def test_gradients_do_not_cross_documents(operator, backend):
    """A gradient on one document's results reaches no other document's inputs."""
    contract = CONTRACTS[operator]
    example = contract.draw({"B": 1, "S": 24})
    example["documents"] = torch.tensor([[0] * 5 + [1] * 9 + [0] * 10])
    leaves = [tensor.requires_grad_() for tensor in example.values() if tensor.is_floating_point()]
    with ms_kernels.use_backend(backend):
        result = getattr(ms_kernels, operator)(**example)
    grads = torch.autograd.grad(result[:, 5:14].sum(), leaves)
    for leaf, grad in zip(leaves, grads, strict=True):
        if leaf.shape[:2] == (1, 24):
            assert grad[:, 5:14].any()
            assert not grad[:, :5].any()
            assert not grad[:, 14:].any()


def assert_outside_terms_ignored(run, with_state):
    """Fail unless inf and NaN reach exactly the results and gradients whose window holds them.

    The expected values sum each window's terms in a loop and never touch anything outside it.
    Returns the number of comparisons.
    """
    contract = CONTRACTS["causal_conv1d"]
    documents = torch.tensor([[0] * 2 + [1] * 4 + [2], [3] * 7])
    compared = 0
    for with_documents in (False, True):
        for name, index in (
            ("weight", (1, 0)), ("weight", (1, 2)), ("weight", (1, 3)), ("x", (0, 1, 1)),
            ("x", (1, 6, 0)), ("bias", (2,)), ("state", (0, 3, 1)), ("state", (0, 0, 1)),
        ):  # fmt: skip
            if name == "state" and not with_state:
                continue
            for number in (torch.inf, torch.nan):
                example = contract.draw({"B": 2, "S": 7, "C": 3, "K": 4})
                example |= {"documents": documents} if with_documents else {"documents": None}
                example |= {} if with_state else {"state": None}
                example[name][index] = number
                output = run(*example.values(), False, False)
                expected = TRUTHS["causal_conv1d"](*example.values(), False, False)
                # float32 sums of five terms.
                torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
                compared += 1
    # An inf in the output gradient reaches only the inputs in its window and the taps they met.
    example = contract.draw({"B": 2, "S": 7, "C": 3, "K": 4})
    example |= {"documents": documents} | ({} if with_state else {"state": None})
    leaves = {
        name: example[name].requires_grad_()
        for name in ("x", "weight", "state")
        if example[name] is not None
    }
    result = run(*example.values(), False, False)
    grad_out = torch.ones_like(result)
    grad_out[0, 3, 1] = torch.nan  # the second position of its document
    grads = torch.autograd.grad(result, list(leaves.values()), grad_out)
    grad_of = dict(zip(leaves, grads, strict=True))
    assert grad_of["x"].isnan().nonzero().tolist() == [[0, 2, 1], [0, 3, 1]]
    assert grad_of["weight"].isnan().nonzero().tolist() == [[1, 2], [1, 3]]
    assert not with_state or not grad_of["state"].isnan().any()
    return compared + 1


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_terms_outside_the_window_are_ignored(backend, with_state):
    """Neither the zeros before the first position nor another document's inputs meet an inf."""
    operator = OPERATORS["causal_conv1d"]
    (impl,) = [impl for impl in operator.implementations if impl.backend == backend]
    assert assert_outside_terms_ignored(impl.run, with_state) >= 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_attention_reads_only_visible_positions(backend):
    """NaN past the length, before the window or in unused pages changes nothing."""
    contract = CONTRACTS["decode_attention"]
    run = next(
        impl.run
        for impl in OPERATORS["decode_attention"].implementations
        if impl.backend == backend
    )
    example = contract.draw({"B": 3, "N": 2, "page": 4, "P": 7})
    example["page_table"] = torch.arange(6, dtype=torch.int32).view(3, 2)
    example["lengths"] = torch.tensor([8, 5, 0], dtype=torch.int32)
    for window in (None, 3):
        before = run(*example.values(), window, None)
        changed = {name: tensor.clone() for name, tensor in example.items()}
        for name in ("key_pages", "value_pages"):
            rows = changed[name].view(28, *changed[name].shape[2:])
            for sequence, length in enumerate((8, 5, 0)):
                first = 0 if window is None else max(length - window, 0)
                rows[8 * sequence : 8 * sequence + first] = torch.nan
                rows[8 * sequence + length : 8 * sequence + 8] = torch.nan
            rows[24:] = torch.nan
        assert torch.equal(run(*changed.values(), window, None), before)
        assert before.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nonfinite_value_stays_in_its_row_and_heads(backend):
    """NaN in a query affects only that query; in a key or value, only its batch row and head."""
    contract = CONTRACTS["attention"]
    run = next(
        impl.run for impl in OPERATORS["attention"].implementations if impl.backend == backend
    )
    for name in ("q", "k", "v"):
        example = contract.draw({"B": 2, "Sq": 9, "Sk": 9})
        expected = run(*example.values(), True, 4, None)
        example[name][0, 5, 1] = torch.nan
        actual = run(*example.values(), True, 4, None)
        unchanged = (actual == expected).all(-1)  # (B, S, Hq)
        assert unchanged[1].all()
        if name == "q":
            assert (~unchanged[0]).nonzero().tolist() == [[5, 1]]
        else:  # key head 1 serves query heads 2 and 3
            assert unchanged[0, :, :2].all()
            assert not unchanged[0, 5, 2:].any()


@pytest.mark.parametrize("operator", RECURRENT)
def test_packed_documents_equal_separate_rows(operator):
    """Each document has the results and gradients it gets in a separate row, in float64."""
    contract = CONTRACTS[operator]
    example = contract.draw({"B": 1, "S": 90}, dtype=torch.float64)
    lengths = [1, 70, 3, 16]
    documents = torch.arange(4).repeat_interleave(torch.tensor(lengths))[None]
    tensors = {
        name: tensor for name, tensor in example.items() if name not in ("state", "documents")
    }
    packed = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    function = getattr(ms_kernels, operator)
    packed_result = function(**packed, documents=documents)
    (packed_result * packed_result.detach().cos()).sum().backward()
    separate = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    rows = [
        {
            name: tensor if tensor.shape[:1] != (1,) else tensor[:, span]
            for name, tensor in separate.items()
        }
        for span in (slice(sum(lengths[:index]), sum(lengths[: index + 1])) for index in range(4))
    ]
    separate_result = torch.cat([function(**row) for row in rows], 1)
    (separate_result * separate_result.detach().cos()).sum().backward()
    torch.testing.assert_close(packed_result, separate_result, rtol=1e-12, atol=1e-12)
    for name, tensor in packed.items():
        torch.testing.assert_close(tensor.grad, separate[name].grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("operator", RECURRENT)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_sequence_in_pieces_equals_the_full_sequence(operator, data):
    """The state carries over wherever the row is cut, so decoding may run token by token.

    A document that starts inside a piece, or with it, resets the state.
    """
    positions = data.draw(st.integers(2, 30))
    example = CONTRACTS[operator].draw({"B": 2, "S": positions}, dtype=torch.float64)
    cuts = data.draw(st.lists(st.integers(1, positions - 1), unique=True).map(sorted))
    documents, state = example.pop("documents"), example.pop("state")
    function = getattr(ms_kernels, operator)
    full, last = function(**example, documents=documents, state=state, final_state=True)
    results = []
    for start, end in zip([0, *cuts], [*cuts, positions], strict=True):
        part = {
            name: tensor[:, start:end] if tensor.shape[:2] == (2, positions) else tensor
            for name, tensor in example.items()
        }
        ids = documents[:, start:end]
        if start:
            new_document = documents[:, start] != documents[:, start - 1]
            state = state.masked_fill(new_document.view(-1, *[1] * (state.ndim - 1)), 0)
        result, state = function(**part, documents=ids, state=state, final_state=True)
        results.append(result)
    torch.testing.assert_close(torch.cat(results, 1), full, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_chunks_equal_the_recurrence_and_its_gradients(data):
    """In float64 within 1e-12 and 1e-11, for chunks of 4 or 64 and documents down to one token."""
    contract = CONTRACTS["gated_delta_rule"]
    max_chunk = data.draw(st.sampled_from([4, 64]))
    positions = data.draw(st.integers(1, 40 if max_chunk == 4 else 140))
    example = contract.draw(
        {"B": 2, "S": positions, "Hk": 1, "Hv": 2, "D": 5, "Dv": 3},
        dtype=torch.float64,
        seed=data.draw(st.integers(0, 2**31)),
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    start_rate = data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
    starts = torch.rand(2, positions, generator=generator) < start_rate
    inputs = {**example, "documents": starts.cumsum(1)}
    original, chunks.MAX_CHUNK = chunks.MAX_CHUNK, max_chunk
    try:
        options = (None, data.draw(st.booleans()), True)
        for part, ratio in compare(contract, chunks.gated_delta_rule, inputs.values(), options):
            assert ratio <= 1, f"{part} is off by {ratio:.3g} times the tolerance"
    finally:
        chunks.MAX_CHUNK = original


@pytest.mark.parametrize("decay", [-50.0, -1e4, -torch.inf])
def test_a_strong_decay_keeps_later_positions_exact(decay):
    """Differences of running sums would lose the later decays' digits or give NaN."""
    contract = CONTRACTS["gated_delta_rule"]
    example = contract.draw({"B": 1, "S": 64})
    example["g"][:, 9] = decay
    run, options = chunks.gated_delta_rule, (None, True, True)
    ratios = list(compare(contract, run, example.values(), options))
    assert all(ratio <= 1 for _, ratio in ratios), ratios


def test_the_delta_rule_matches_transformers():
    """Qwen3-Next's reference rule in float32, with normalized keys and a state."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    example = CONTRACTS["gated_delta_rule"].draw({"Hk": 4})
    example.pop("documents")
    expected, last = qwen.torch_recurrent_gated_delta_rule(
        *(example[name] for name in ("q", "k", "v", "g", "beta")),
        initial_state=example["state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    result, state = ms_kernels.gated_delta_rule(**example, normalize=True, final_state=True)
    # Both sum 16 terms of order one in float32, over 48 sequential positions.
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_the_convolution_matches_torch():
    """A depthwise Conv1d padded on the left and cut on the right, as in Qwen3-Next."""
    example = CONTRACTS["causal_conv1d"].draw({}, dtype=torch.float64)
    x, weight, bias = (example[name] for name in ("x", "weight", "bias"))
    expected = torch.nn.functional.conv1d(
        x.transpose(1, 2), weight.unsqueeze(1), bias, padding=3, groups=64
    )[..., :48].transpose(1, 2)
    result = ms_kernels.causal_conv1d(x, weight, bias, silu=True)
    torch.testing.assert_close(result, torch.nn.functional.silu(expected), rtol=1e-12, atol=1e-12)


def test_the_delta_rule_compiles_to_one_graph():
    """Chunking depends on sizes only; calls with documents use the reference."""
    example = CONTRACTS["gated_delta_rule"].draw({"S": 16, "Dv": 16})
    example.pop("documents")
    compiled = torch.compile(ms_kernels.gated_delta_rule, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**example), ms_kernels.gated_delta_rule(**example))
    example["documents"] = torch.arange(16).expand(2, -1) // 5
    torch.testing.assert_close(
        compiled(**example), ms_kernels.gated_delta_rule(**example), rtol=1e-5, atol=1e-5
    )

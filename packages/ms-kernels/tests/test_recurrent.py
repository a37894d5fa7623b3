"""What goes from position to position: the state of the delta rule, the taps of the convolution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ms_kernels
from ms_kernels.checking import compare
from ms_kernels.operators import CONTRACTS, OPERATORS
from ms_kernels.operators.gated_delta_rule import cpu as chunks

from .truth import TRUTHS

APART = ["causal_conv1d", "gated_delta_rule"]
BACKENDS = ["cpu", "reference"]


def assert_apart(run, contract, numbers=(0.5, torch.inf, torch.nan), **options):
    """Fail unless a changed token leaves every other document's results as they were, to the bit.

    A number of it becomes each of `numbers`. The documents' numbers come again: a new one begins
    wherever the number changes.
    """
    values = tuple(options.get(each.name, each.default) for each in contract.options)
    drawn = contract.draw({"B": 2, "S": 24, "Hk": 1, "Hv": 1})
    drawn["documents"] = torch.tensor([[0] * 5 + [1] * 9 + [0] + [7] * 9, [3] * 24])
    before = run(*drawn.values(), *values)
    at, own = 8, slice(5, 14)
    for name in ("x", "q", "k", "v", "g", "beta"):
        for number in numbers:
            if name not in drawn:
                continue
            changed = {**drawn, name: drawn[name].clone()}
            changed[name][0, at] = number
            after = run(*changed.values(), *values)
            assert not torch.equal(after[0, own], before[0, own])
            assert torch.equal(after[0, : own.start], before[0, : own.start])
            assert torch.equal(after[0, own.stop :], before[0, own.stop :])
            assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", APART)
def test_a_token_moves_no_other_document_by_a_bit(operator, backend, monkeypatch):
    """Be it changed to another number, to infinity or to NaN; chunks of 4 positions too."""
    (each,) = [each for each in OPERATORS[operator].implementations if each.backend == backend]
    assert_apart(each.run, CONTRACTS[operator])
    monkeypatch.setattr(chunks, "MAX_CHUNK", 4)
    assert_apart(each.run, CONTRACTS[operator])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", APART)
def test_a_gradient_moves_no_other_document_by_a_bit(operator, backend):
    """A pull on one document's results reaches no other document's inputs."""
    contract = CONTRACTS[operator]
    drawn = contract.draw({"B": 1, "S": 24})
    drawn["documents"] = torch.tensor([[0] * 5 + [1] * 9 + [0] * 10])
    leaves = [each.requires_grad_() for each in drawn.values() if each.is_floating_point()]
    with ms_kernels.use_backend(backend):
        result = getattr(ms_kernels, operator)(**drawn)
    grads = torch.autograd.grad(result[:, 5:14].sum(), leaves)
    for leaf, grad in zip(leaves, grads, strict=True):
        if leaf.shape[:2] == (1, 24):
            assert grad[:, 5:14].any()
            assert not grad[:, :5].any()
            assert not grad[:, 14:].any()


def assert_outside_is_left_out(run, given_state):
    """Fail unless inf and NaN reach exactly the results and gradients whose window holds them.

    The truth adds up the terms of each window in a loop and never meets what lies outside. Returns
    the number of comparisons.
    """
    contract = CONTRACTS["causal_conv1d"]
    documents = torch.tensor([[0] * 2 + [1] * 4 + [2], [3] * 7])
    compared = 0
    for cut in (False, True):
        for name, at in (
            ("weight", (1, 0)), ("weight", (1, 2)), ("weight", (1, 3)), ("x", (0, 1, 1)),
            ("x", (1, 6, 0)), ("bias", (2,)), ("state", (0, 3, 1)), ("state", (0, 0, 1)),
        ):  # fmt: skip
            if name == "state" and not given_state:
                continue
            for number in (torch.inf, torch.nan):
                drawn = contract.draw({"B": 2, "S": 7, "C": 3, "K": 4})
                drawn |= {"documents": documents} if cut else {"documents": None}
                drawn |= {} if given_state else {"state": None}
                drawn[name][at] = number
                got = run(*drawn.values(), False, False)
                truth = TRUTHS["causal_conv1d"](*drawn.values(), False, False)
                # float32: sums of five terms.
                torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5, equal_nan=True)
                compared += 1
    # A pull of inf at one position reaches the inputs in its window alone, and the taps they met.
    drawn = contract.draw({"B": 2, "S": 7, "C": 3, "K": 4})
    drawn |= {"documents": documents} | ({} if given_state else {"state": None})
    leaves = {
        name: drawn[name].requires_grad_()
        for name in ("x", "weight", "state")
        if drawn[name] is not None
    }
    result = run(*drawn.values(), False, False)
    pull = torch.ones_like(result)
    pull[0, 3, 1] = torch.nan  # the second position of its document
    found = torch.autograd.grad(result, list(leaves.values()), pull)
    slopes = dict(zip(leaves, found, strict=True))
    assert slopes["x"].isnan().nonzero().tolist() == [[0, 2, 1], [0, 3, 1]]
    assert slopes["weight"].isnan().nonzero().tolist() == [[1, 2], [1, 3]]
    assert not given_state or not slopes["state"].isnan().any()
    return compared + 1


@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_term_outside_the_window_is_left_out(backend, given_state):
    """Neither the zeros before the first position nor another document meets an inf."""
    operator = OPERATORS["causal_conv1d"]
    (each,) = [each for each in operator.implementations if each.backend == backend]
    assert assert_outside_is_left_out(each.run, given_state) >= 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_attention_reads_only_what_a_sequence_sees(backend):
    """NaN after a length, before a window and in pages that are not in use changes nothing."""
    contract = CONTRACTS["decode_attention"]
    run = next(
        each.run
        for each in OPERATORS["decode_attention"].implementations
        if each.backend == backend
    )
    drawn = contract.draw({"B": 3, "N": 2, "page": 4, "P": 7})
    drawn["page_table"] = torch.arange(6, dtype=torch.int32).view(3, 2)
    drawn["lengths"] = torch.tensor([8, 5, 0], dtype=torch.int32)
    for window in (None, 3):
        before = run(*drawn.values(), window, None)
        changed = {name: each.clone() for name, each in drawn.items()}
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
def test_a_number_that_is_not_finite_stays_in_its_row_and_heads(backend):
    """Attention: NaN in a query stays with it, in a key or value with its batch row and head."""
    contract = CONTRACTS["attention"]
    run = next(
        each.run for each in OPERATORS["attention"].implementations if each.backend == backend
    )
    for name in ("q", "k", "v"):
        drawn = contract.draw({"B": 2, "Sq": 9, "Sk": 9})
        before = run(*drawn.values(), True, 4, None)
        drawn[name][0, 5, 1] = torch.nan
        after = run(*drawn.values(), True, 4, None)
        same = (after == before).all(-1)  # (B, S, Hq)
        assert same[1].all()
        if name == "q":
            assert (~same[0]).nonzero().tolist() == [[5, 1]]
        else:  # key head 1 serves query heads 2 and 3
            assert same[0, :, :2].all()
            assert not same[0, 5, 2:].any()


@pytest.mark.parametrize("operator", APART)
def test_packed_documents_are_as_if_alone(operator):
    """Each document's results and gradients are those of its own row, in float64."""
    contract = CONTRACTS[operator]
    drawn = contract.draw({"B": 1, "S": 90}, dtype=torch.float64)
    lengths = [1, 70, 3, 16]
    numbers = torch.arange(4).repeat_interleave(torch.tensor(lengths))[None]
    tensors = {name: each for name, each in drawn.items() if name not in ("state", "documents")}
    packed = {name: each.clone().requires_grad_() for name, each in tensors.items()}
    function = getattr(ms_kernels, operator)
    whole = function(**packed, documents=numbers)
    (whole * whole.detach().cos()).sum().backward()
    alone = {name: each.clone().requires_grad_() for name, each in tensors.items()}
    rows = [
        {name: each if each.shape[:1] != (1,) else each[:, part] for name, each in alone.items()}
        for part in (slice(sum(lengths[:at]), sum(lengths[: at + 1])) for at in range(4))
    ]
    apart = torch.cat([function(**each) for each in rows], 1)
    (apart * apart.detach().cos()).sum().backward()
    torch.testing.assert_close(whole, apart, rtol=1e-12, atol=1e-12)
    for name, each in packed.items():
        torch.testing.assert_close(each.grad, alone[name].grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("operator", APART)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_pieces_of_a_sequence_give_what_the_whole_gives(operator, data):
    """A state goes from call to call, wherever the row is cut: so a decoder may go token by token.

    A document that begins inside a piece, or with it, ends what the state held.
    """
    positions = data.draw(st.integers(2, 30))
    drawn = CONTRACTS[operator].draw({"B": 2, "S": positions}, dtype=torch.float64)
    cuts = data.draw(st.lists(st.integers(1, positions - 1), unique=True).map(sorted))
    documents, state = drawn.pop("documents"), drawn.pop("state")
    function = getattr(ms_kernels, operator)
    whole, last = function(**drawn, documents=documents, state=state, final_state=True)
    made = []
    for first, end in zip([0, *cuts], [*cuts, positions], strict=True):
        part = {
            name: each[:, first:end] if each.shape[:2] == (2, positions) else each
            for name, each in drawn.items()
        }
        numbers = documents[:, first:end]
        if first:
            begun = documents[:, first] != documents[:, first - 1]
            state = state.masked_fill(begun.view(-1, *[1] * (state.ndim - 1)), 0)
        result, state = function(**part, documents=numbers, state=state, final_state=True)
        made.append(result)
    torch.testing.assert_close(torch.cat(made, 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_chunks_equal_the_recurrence_and_its_gradients(data):
    """In float64 within 1e-12 and 1e-11, chunks of 4 or 64, documents of one token among them."""
    contract = CONTRACTS["gated_delta_rule"]
    longest = data.draw(st.sampled_from([4, 64]))
    positions = data.draw(st.integers(1, 40 if longest == 4 else 140))
    drawn = contract.draw(
        {"B": 2, "S": positions, "Hk": 1, "Hv": 2, "D": 5, "Dv": 3},
        dtype=torch.float64,
        seed=data.draw(st.integers(0, 2**31)),
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    share = data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
    starts = torch.rand(2, positions, generator=generator) < share
    given_ = {**drawn, "documents": starts.cumsum(1)}
    before, chunks.MAX_CHUNK = chunks.MAX_CHUNK, longest
    try:
        options = (None, data.draw(st.booleans()), True)
        for part, off in compare(contract, chunks.gated_delta_rule, given_.values(), options):
            assert off <= 1, f"{part} is off by {off:.3g} times the tolerance"
    finally:
        chunks.MAX_CHUNK = before


@pytest.mark.parametrize("strong", [-50.0, -1e4, -torch.inf])
def test_a_strong_decay_leaves_what_comes_after_it_exact(strong):
    """Differences of running sums would lose the later decays' digits, or be NaN."""
    contract = CONTRACTS["gated_delta_rule"]
    drawn = contract.draw({"B": 1, "S": 64})
    drawn["g"][:, 9] = strong
    run, options = chunks.gated_delta_rule, (None, True, True)
    shares = list(compare(contract, run, drawn.values(), options))
    assert all(share <= 1 for _, share in shares), shares


def test_the_rule_is_that_of_transformers():
    """Qwen3-Next's own slow rule in float32, keys normalized, with a state."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    drawn = CONTRACTS["gated_delta_rule"].draw({"Hk": 4})
    drawn.pop("documents")
    truth, last = qwen.torch_recurrent_gated_delta_rule(
        *(drawn[name] for name in ("q", "k", "v", "g", "beta")),
        initial_state=drawn["state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    result, state = ms_kernels.gated_delta_rule(**drawn, normalize=True, final_state=True)
    # Both sum 16 terms of order one in float32, at 48 positions one after the other.
    torch.testing.assert_close(result, truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_the_convolution_is_that_of_torch():
    """A depthwise Conv1d, padded on the left and cut on the right, as Qwen3-Next has it."""
    drawn = CONTRACTS["causal_conv1d"].draw({}, dtype=torch.float64)
    x, weight, bias = (drawn[name] for name in ("x", "weight", "bias"))
    truth = torch.nn.functional.conv1d(
        x.transpose(1, 2), weight.unsqueeze(1), bias, padding=3, groups=64
    )[..., :48].transpose(1, 2)
    result = ms_kernels.causal_conv1d(x, weight, bias, silu=True)
    torch.testing.assert_close(result, torch.nn.functional.silu(truth), rtol=1e-12, atol=1e-12)


def test_under_compile_the_rule_is_one_graph_without_documents():
    """Chunks are cut by sizes alone; documents are data, and go to the reference."""
    drawn = CONTRACTS["gated_delta_rule"].draw({"S": 16, "Dv": 16})
    drawn.pop("documents")
    compiled = torch.compile(ms_kernels.gated_delta_rule, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**drawn), ms_kernels.gated_delta_rule(**drawn))
    drawn["documents"] = torch.arange(16).expand(2, -1) // 5
    torch.testing.assert_close(
        compiled(**drawn), ms_kernels.gated_delta_rule(**drawn), rtol=1e-5, atol=1e-5
    )

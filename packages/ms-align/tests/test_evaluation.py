"""Scores of continuations against plain torch, whatever the rows' order, length and company."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from small_models import decoder

from ms_align import ConfigError, DataError, LocalEngine, Sampling
from ms_align.evaluation.engine_scorer import EngineScorer
from ms_align.evaluation.exported_scorer import ExportedScorer
from ms_align.evaluation.scorer import ContinuationScore, Row, Scorer
from ms_align.evaluation.tasks import _numbers
from ms_align.evaluation.texts import Texts
from ms_align.tokenizer import ByteTokenizer

MODEL = decoder(seed=3)
"""Over 258 tokens, sharpened so that a wrong position shows."""
BYTES = ByteTokenizer()


class Runtime:
    """The model as an exported one would be asked."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.widths: list[int] = []

    @torch.no_grad()
    def logits(self, tokens: Tensor, /) -> Tensor:
        """Logits (B, S, V)."""
        self.widths.append(tokens.shape[1])
        found: Tensor = self.model(tokens)
        return found

    def generate(self, tokens: list[int], most: int, /) -> list[int]:
        """The likeliest tokens, one after the other."""
        made: list[int] = []
        while len(made) < most:
            made.append(int(self.logits(torch.tensor([tokens + made]))[0, -1].argmax()))
        return made


@torch.no_grad()
def plain(row: Row) -> ContinuationScore:
    """The row alone, by torch's own functions."""
    tokens = torch.tensor(row.tokens)
    logprobs = MODEL(tokens[None, :-1])[0].log_softmax(-1)[-row.scored :]
    targets = tokens[-row.scored :]
    chosen = logprobs.gather(1, targets[:, None]).sum()
    return ContinuationScore(float(chosen), bool((logprobs.argmax(-1) == targets).all()))


ROWS = st.lists(st.integers(0, 257), min_size=2, max_size=24).flatmap(
    lambda tokens: st.builds(
        Row, tokens=st.just(tuple(tokens)), scored=st.integers(1, len(tokens) - 1)
    )
)


@settings(max_examples=25, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=9), st.integers(1, 5))
def test_scores_are_those_of_each_row_alone(rows: list[Row], batch_size: int) -> None:
    """Padding, order and company move no score by more than sums of 24 float32 logarithms do."""
    scorers: list[Scorer] = [
        EngineScorer(LocalEngine(MODEL), batch_size=batch_size, decode=BYTES.decode),
        ExportedScorer(Runtime(MODEL), context=None, batch_size=batch_size, decode=BYTES.decode),
    ]
    for scorer in scorers:
        for found, expected in zip(scorer.score(rows), map(plain, rows), strict=True):
            assert found.logprob == pytest.approx(expected.logprob, abs=2e-4)
            assert found.greedy == expected.greedy


def test_the_models_own_answer_is_greedy_and_another_is_not() -> None:
    """What the model writes itself is all likeliest; one changed token is not."""
    scorer = EngineScorer(LocalEngine(MODEL), decode=BYTES.decode)
    prompt = [72, 101, 108]
    (answer,) = scorer.generate([prompt], Sampling(max_new_tokens=6, temperature=0.0), seed=0)
    other = [*answer[:3], (answer[3] + 1) % 256, *answer[4:]]
    rows = [Row(tokens=(*prompt, *each), scored=len(each)) for each in (answer, other)]
    own, changed = scorer.score(rows)
    assert (own.greedy, changed.greedy) == (True, False)
    assert own.logprob > changed.logprob


def test_both_write_the_same_and_stop_alike() -> None:
    """An exported model's answer is cut at the first stop, that included, as an engine's is."""
    engine = EngineScorer(LocalEngine(MODEL), decode=BYTES.decode)
    exported = ExportedScorer(Runtime(MODEL), context=None, decode=BYTES.decode)
    prompts = [[1, 2, 3], [200], [5, 5, 5, 5]]
    free = Sampling(max_new_tokens=12, temperature=0.0)
    whole = engine.generate(prompts, free, seed=0)
    assert exported.generate(prompts, free, seed=0) == whole
    stop = Sampling(max_new_tokens=12, temperature=0.0, stop_tokens=(whole[0][4],))
    cut = engine.generate(prompts, stop, seed=0)
    assert cut == exported.generate(prompts, stop, seed=0)
    assert cut[0] == whole[0][: whole[0].index(whole[0][4]) + 1]
    with pytest.raises(ConfigError, match="temperature: 0"):
        exported.generate(prompts, Sampling(), seed=0)


def test_texts_of_bytes_have_an_end_and_no_other_special_token() -> None:
    """A tokenizer without special tokens puts none around a text."""
    texts = Texts(BYTES)
    assert texts.encode("ab") == texts.encode("ab", True) == [97, 98]
    assert (texts.prefix, texts.ends, texts.end_text) == (256, (256,), "")
    assert texts.decode([97, 256]) == "a"

    class Endless:
        def encode(self, text: str) -> list[int]:
            return [0]

        def decode(self, tokens: object) -> str:
            return ""

    with pytest.raises(ConfigError, match="eos_token"):
        Texts(Endless())


def test_a_continuation_that_the_model_cannot_read_is_refused() -> None:
    """As long as its context it is scored; one token more is one line, and no wrong number."""
    pytest.importorskip("lm_eval")
    from ms_align.evaluation.harness import HarnessModel

    scorer = ExportedScorer(Runtime(MODEL), context=4, decode=BYTES.decode)
    model = HarnessModel(scorer, Texts(BYTES))
    assert len(model._loglikelihood_tokens([(None, [1], [2] * 4)])) == 1
    with pytest.raises(DataError, match="continuation of 5 tokens"):
        model._loglikelihood_tokens([(None, [1], [2] * 5)])


def test_numbers_of_a_task_are_kept_and_its_name_is_not() -> None:
    """A standard error that the harness did not compute is `N/A`, and left out."""
    given = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": "N/A", "f1_stderr,strict": 0.25}
    assert _numbers(given) == {"acc": 0.5, "f1,strict,stderr": 0.25}

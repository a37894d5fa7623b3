"""Verifiable rewards: exact match, numeric answers, and Python that parses or passes tests.

Each is a callable on samples, usable as `reward_model`; reference answers are `sample.answer`.
"""

import ast
import math
import os
import re
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

from attrs import field, frozen

from ms_align.errors import RewardError
from ms_align.rewards.sandbox import Limits, judge
from ms_align.rewards.scoring import Sample
from ms_align.settings import flag, number, text

# Sign, digits with thousands separators, decimals, exponent, denominator.
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?")
# The closing fence may be missing, as in a response that was cut off.
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@frozen(kw_only=True)
class _BinaryReward:
    """Reward with two possible values."""

    reward: float = field(default=1.0)
    otherwise: float = field(default=0.0)

    def __call__(self, samples: Sequence[Sample], /) -> list[float]:
        """Return one number per sample."""
        return [
            self.reward if self.passes(sample, index) else self.otherwise
            for index, sample in enumerate(samples)
        ]

    @abstractmethod
    def passes(self, sample: Sample, index: int) -> bool:
        """Return True if a sample gets the reward; `index` is used in error messages."""


@frozen(kw_only=True)
class ExactMatch(_BinaryReward):
    """Reward for a response that equals the answer: `reward`, else `otherwise`."""

    strip: bool = field(default=True, validator=flag)
    """Ignore surrounding whitespace."""
    fold_case: bool = field(default=False, validator=flag)
    """Ignore case."""

    def passes(self, sample: Sample, index: int) -> bool:
        """Return True if the response equals the answer."""
        return self._normalize(sample.response) == self._normalize(_answer(sample, index))

    def _normalize(self, value: str) -> str:
        value = value.strip() if self.strip else value
        return value.casefold() if self.fold_case else value


@frozen(kw_only=True)
class Numeric(_BinaryReward):
    """Reward for equal last numbers of response and answer: `reward`, else `otherwise`."""

    tolerance: float = field(default=1e-6, validator=number())
    """Tolerance, relative to the answer and absolute near 0."""

    def passes(self, sample: Sample, index: int) -> bool:
        """Return True if the last numbers of response and answer are equal."""
        expected, actual = last_number(_answer(sample, index)), last_number(sample.response)
        if expected is None:
            raise RewardError(
                f"the answer {sample.answer!r} of sample {index} contains no number; use ExactMatch"
            )
        if actual is None:
            return False
        return math.isclose(actual, expected, rel_tol=self.tolerance, abs_tol=self.tolerance)


@frozen(kw_only=True)
class PythonParses(_BinaryReward):
    """Reward for code that parses and is not empty: `reward`, else `otherwise`."""

    min_statements: int = 1
    """Minimum number of statements, as the empty string parses too."""

    def passes(self, sample: Sample, index: int) -> bool:
        """Return True if the response's code parses and is not empty."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as invalid escape sequences
                tree = ast.parse(code_of(sample.response))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return len(tree.body) >= self.min_statements


@frozen(kw_only=True)
class PythonTests:
    """Reward for code that passes the sample's tests: `reward`, else `otherwise`.

    Code and tests run in two sandboxed processes. They exchange only plain values, and the verdict
    comes from the process of the tests. See `ms_align.rewards.sandbox` for the guarantees.
    """

    tests_key: str = field(default="tests", validator=text())
    """Prompt column with the tests, as Python code. Default if missing: `answer`."""
    limits: Limits = field(factory=Limits, metadata={"table": Limits})
    reward: float = field(default=1.0)
    otherwise: float = field(default=0.0)

    def __call__(self, samples: Sequence[Sample], /) -> list[float]:
        """Score each sample by running its code against its tests, one sample per core."""
        tests = [
            sample.extra.get(self.tests_key) or _answer(sample, index)
            for index, sample in enumerate(samples)
        ]
        codes = [code_of(sample.response) for sample in samples]
        # Threads only wait: each program runs in its own process.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            outcomes = pool.map(lambda code, test: judge(code, test, self.limits), codes, tests)
            return [self.reward if outcome.passed else self.otherwise for outcome in outcomes]


def code_of(response: str) -> str:
    """Return the first fenced Python block, or the whole response if it has none."""
    block = _FENCE.search(response)
    return block[1] if block else response


def last_number(value: str) -> float | None:
    """Parse the last number in a text: signed, with commas, an exponent, or as a fraction."""
    numbers = _NUMBER.findall(value)
    if not numbers:
        return None
    # thousands separators
    digits = numbers[-1].replace(",", "")
    try:
        return float(Fraction(digits)) if "/" in digits else float(digits)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def _answer(sample: Sample, index: int) -> str:
    if sample.answer is None:
        raise RewardError(
            f"sample {index} has no answer to compare its response with; add `answer` to its "
            "prompt, or pass a response_dataset"
        )
    return sample.answer

"""Lints Triton IR for 32-bit offsets that may overflow, and for launch axes limited to 65,535.

Interval analysis over 32-bit integers. The program index along the first axis is below 2^30, and so
is the first tile of a launch (their sum stays below 2^31, which the launch checks). A kernel
argument is bounded by the entry for its name in `LIMITS`, or by 2^31. A 32-bit result whose
interval exceeds 32 bits is a fault if an address is computed from it.
"""

import re
from collections.abc import Callable, Mapping

Interval = tuple[int, int]

WORD: Interval = (-(2**31), 2**31 - 1)

LIMITS: Mapping[str, int] = {
    "first": 2**30 - 1,
    "stride": 2**23,
    "width": 2**20,
    "out_width": 2**20,
    "classes": 2**24,
    "queries": 2**26,
    "keys": 2**26,
    "positions": 2**26,
    "heads": 2**12,
    "q_heads": 2**12,
    "k_heads": 2**12,
    "group": 2**12,
    "half": 2**12,
    "page": 2**16,
    "parts": 2**10,
    "part_positions": 2**20,
    "choices": 2**10,
    "experts": 2**10,
    "groups": 2**15,
    "group_size": 2**15,
    "rows_per_part": 2**26,
    "window": 2**26,
}
"""Maximum of an argument, by its name or name suffix: rows of 2^20 features, 2^24 classes,
sequences of 2^26 positions, row strides of 2^23 elements. An index that is a product beyond 32 bits
within these limits must be 64 bits wide."""

PROGRAMS = 2**30 - 1

LOADED: Interval = (-2, 2**26)
"""Interval of integers read from memory: positions, pages, blocks and row offsets."""

_RESULT = re.compile(r"^\s*(%[\w:]+)(?:, %\w+)* = (.*)$")
_NAME = re.compile(r"%[\w]+(?:#\d+)?")


def lint(ttir: str, limits: Mapping[str, int] | None = None) -> list[str]:
    """Return the faults in one kernel's Triton IR, one line per fault.

    Args:
        ttir: Triton IR as text, with values named as in the source.
        limits: maximum values of arguments that override `LIMITS`.
    """
    analysis = _IntervalAnalysis({**LIMITS, **(limits or {})})
    for line in ttir.splitlines():
        analysis.read(line)
    return analysis.faults


class _IntervalAnalysis:
    """Line-by-line interval analysis of a kernel; values are defined before they are used."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.faults: list[str] = []
        self._limits = limits
        self._intervals: dict[str, Interval] = {}
        self._tainted: dict[str, str] = {}
        """Values computed from an overflowing value, with the line where it overflowed."""

    def read(self, line: str) -> None:
        # Remove the source location.
        line = re.sub(r"\s*loc\([^)]*\)\s*$", "", line.strip())
        if line.startswith("tt.func"):
            self._arguments(line)
            return
        if line.startswith("scf.for") or " = scf.for" in line or " = tt.for" in line:
            self._loop(line)
            return
        match = _RESULT.match(line)
        if not match:
            return
        # An operation with several results defines `%x:2`.
        name, text = match[1].partition(":")[0], match[2]
        axis = re.search(r"tt\.get_program_id ([xyz])", text)
        if axis and axis[1] != "x":
            self.faults.append(
                f"axis {axis[1]} of the launch, which is limited to 65,535 programs: {line[:90]}"
            )
        self._operation(name, text, line)

    def _arguments(self, line: str) -> None:
        for match in re.finditer(r"%(\w+): (i32|i64)", line):
            name = match[1]
            # `x_stride` has the limit of `stride`.
            limit = self._limits.get(name, self._limits.get(name.rpartition("_")[2], WORD[1]))
            self._intervals["%" + name] = (0, limit)

    def _loop(self, line: str) -> None:
        """Set the interval of a loop variable from its bounds."""
        match = re.search(r"scf\.for (?:unsigned )?(%\w+) = (\S+) to (\S+) step", line)
        if match is None:
            return
        low, high = self._of(match[2]), self._of(match[3])
        self._intervals[match[1]] = (low[0], max(low[0], high[1]))
        # A carried value may change in every iteration, so it may be any 32-bit integer.
        for carried in re.finditer(r"(%\w+) = (%[\w#]+)", line.partition("iter_args")[2]):
            if carried[2] in self._intervals:
                self._intervals[carried[1]] = WORD

    def _of(self, name: str) -> Interval:
        return self._intervals.get(name.rstrip(","), WORD)

    def _operation(self, name: str, text: str, line: str) -> None:
        operation = text.split()[0].strip('"')
        operands = _NAME.findall(text.partition(":")[0] if " : " in text else text)
        # The type of the result is after the last " : ".
        wide = bool(re.search(r"\bi64\b|xi64\b", text.rpartition(" : ")[2]))
        if operation == "tt.addptr":
            self._address(operands, line)
            return
        interval = self._interval(operation, text, operands)
        if interval is None:
            return
        taint = next(
            (self._tainted[operand] for operand in operands if operand in self._tainted), None
        )
        narrow = bool(re.search(r"\bi32\b|xi32\b", text.rpartition(" : ")[2])) and not wide
        outside = interval[0] < WORD[0] or interval[1] > WORD[1]
        if operation.startswith("arith.ext") or wide:
            self._intervals[name] = interval
        elif narrow and outside:
            # No fault yet: it is one only if an address depends on this value.
            taint = taint or line
            interval = WORD
        # A comparison gives a mask, which cannot be out of range.
        if operation.startswith("arith.cmp"):
            taint = None
        if taint:
            self._tainted[name] = taint
        self._intervals[name] = interval

    def _address(self, operands: list[str], line: str) -> None:
        # The first operand is the base pointer.
        for operand in operands[1:]:
            if operand in self._tainted:
                origin = self._tainted[operand]
                self.faults.append(
                    f"an address is computed in 32 bits that may overflow: {origin[:110]}"
                )

    def _interval(self, operation: str, text: str, operands: list[str]) -> Interval | None:
        """Return the interval of the result of an integer operation; None for other operations."""
        if operation == "arith.constant":
            match = re.search(r"(?:dense<)?(-?\d+)>? : (?:tensor<.*x)?(i\d+)", text)
            return (int(match[1]), int(match[1])) if match else None
        if operation == "tt.make_range":
            match = re.search(r"end = (\d+) : i32, start = (\d+)", text)
            return (int(match[2]), int(match[1]) - 1) if match else WORD
        if operation == "tt.get_program_id":
            return (0, PROGRAMS)
        if operation in _UNARY:
            return self._of(operands[0]) if operands else None
        if operation == "arith.select" and len(operands) == 3:
            # operands[0] is the condition.
            first, second = self._of(operands[1]), self._of(operands[2])
            return (min(first[0], second[0]), max(first[1], second[1]))
        if operation == "tt.load":
            return LOADED if "i32" in text else None
        if operation in _BINARY and len(operands) >= 2:
            return _BINARY[operation](self._of(operands[0]), self._of(operands[1]))
        return None


_UNARY = frozenset(
    {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "arith.extsi"}
    | {"arith.extui", "arith.trunci", "ttg.convert_layout"}
)


def _product(x: Interval, y: Interval) -> Interval:
    # The product is extreme at the ends of the intervals.
    ends = [a * b for a in x for b in y]
    return (min(ends), max(ends))


def _quotient(x: Interval, y: Interval) -> Interval:
    """Divide intervals with a divisor of at least 1; division by 0 is not checked here."""
    low, high = max(y[0], 1), max(y[1], 1)
    # int(a / b) rounds toward zero, as arith.divsi does.
    ends = [int(a / b) for a in x for b in (low, high)]
    return (min(ends), max(ends))


def _remainder(x: Interval, y: Interval) -> Interval:
    # The result of arith.remsi has the sign of the dividend.
    largest = min(max(y[1] - 1, 0), max(x[1], 0))
    return (0, largest) if x[0] >= 0 else (-max(y[1] - 1, 0), largest)


_BINARY: Mapping[str, Callable[[Interval, Interval], Interval]] = {
    "arith.addi": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "arith.subi": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "arith.muli": _product,
    "arith.divsi": _quotient,
    "arith.remsi": _remainder,
    "arith.minsi": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "arith.maxsi": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
}

"""Turns a rank's phases on a V, written as words, into actions.

`F0` is the forward of the next microbatch on the rank's stage of the way down, `F1` on that of the
way up; `B`, `I` and `W` likewise; `W` alone is the oldest backward of weights that is due; `F0&B1`
is a pair.
"""

from collections.abc import Iterable

from ms_parallel.schedules.table.action import Action, Kind

_KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
}


def actions_of(program: Iterable[str], stages: tuple[int, int], microbatches: int) -> list[Action]:
    """List the actions that `program` stands for; drop those on microbatches past the last.

    Args:
        program: Words as above; backwards of weights that it leaves are added at the end.
        stages: The rank's stage on the way down and on the way up.
        microbatches: Microbatches of one step.
    """
    done: dict[tuple[bool, int], int] = {}
    weights: list[Action] = []
    row: list[Action] = []

    def take(word: str) -> Action | None:
        if word[0] == "W":
            due = [w for w in weights if word == "W" or w.stage == stages[int(word[1])]]
            if due:
                weights.remove(due[0])
            return due[0] if due else None
        forward, stage = word[0] == "F", stages[int(word[1])]
        number = done.get((forward, stage), 0)
        done[forward, stage] = number + 1
        if word[0] == "I" and number < microbatches:
            weights.append(Action(Kind.BACKWARD_WEIGHT, stage, number))
        return Action(_KINDS[word[0]], stage, number) if number < microbatches else None

    for word in program:
        parts = [action for part in word.split("&") if (action := take(part)) is not None]
        row += [Action.overlap(*parts)] if len(parts) == 2 else parts
    return row + weights

"""Cost of tools and environments: `python packages/ms-align/benchmarks/environments.py`.

Measures tool calls, environments and entire episodes of a scripted policy, whose generation takes
no time. Measures a single process; run it on an idle machine.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from plain_tools import Countdown, add
from small_models import decoder
from tool_models import STOP, Script, call, chat_tokenizer

from ms_align import LocalEngine, Sampling
from ms_align.environments.conversation import ChatFormat
from ms_align.environments.episodes import EpisodeRunner
from ms_align.environments.pool import Request, ToolPool
from ms_align.environments.tools import schemas_of, target_of
from ms_align.rollouts.generators.policy import PolicyRollouts
from ms_align.rollouts.prompts import read_prompts


def use_tool(context: str) -> str:
    """Call the tool once, then answer."""
    return "42" if "<|im_start|>tool" in context else call("add", a=12, b=30)


def episodes(count: int, *, environment: bool) -> float:
    """Return the seconds that episodes of two or three turns take."""
    tokenizer = chat_tokenizer()
    tools = () if environment else (add,)
    tokenizer.tools = schemas_of(tools)
    pool = ToolPool(
        [target_of(tool, "tools") for tool in tools],
        target_of(Countdown, "environment") if environment else None,
    )
    runner = EpisodeRunner(
        LocalEngine(decoder(vocab_size=260)),
        ChatFormat(tokenizer),
        pool,
        has_tools=not environment,
        has_environment=environment,
        max_tool_calling_iterations=None,
        max_episode_tokens=4000,
        max_active=64,
    )
    rows = [{"prompt": "go", "answer": 3}] * count
    prompts = read_prompts(rows, tokenizer, chat=True)
    sampling = Sampling(max_new_tokens=200, stop_token_ids=STOP)
    policy = Script(tokenizer, (lambda context: "1") if environment else use_tool)
    start = time.perf_counter()
    runner(PolicyRollouts(policy), prompts, sampling, count=1, seed=0)
    seconds = time.perf_counter() - start
    runner.close()
    return seconds


def main() -> None:
    """Print a line per measurement."""
    pool = ToolPool([target_of(add, "tools")], None)
    fields = {"do": "call", "name": "add", "arguments": {"a": 1, "b": 2}, "seed": 0}
    pool.run([Request(fields=fields)] * 100)
    start = time.perf_counter()
    pool.run([Request(fields=fields)] * 5000)
    sys.stdout.write(f"tool calls: {5000 / (time.perf_counter() - start):,.0f} per s\n")
    start = time.perf_counter()
    for child in [pool.start() for _ in range(200)]:
        pool.end(child)
    sys.stdout.write(f"processes started: {200 / (time.perf_counter() - start):,.0f} per s\n")
    pool.close()
    for name, environment, turns in (("tool", False, 2), ("environment", True, 3)):
        rate = 256 / episodes(256, environment=environment)
        sys.stdout.write(f"episodes of {turns} turns with a {name}: {rate:,.0f} per s\n")


if __name__ == "__main__":
    main()

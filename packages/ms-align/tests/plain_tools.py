"""Tools and an environment for tests. They import no torch, as their process is forked."""

import json
import os
import signal
import time
import urllib.request
from typing import Any


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def misbehave(how: str) -> str:
    """Misbehave.

    Args:
        how: kind of misbehavior
    """
    if how == "hang":
        time.sleep(1000)
    if how == "spin":
        while True:
            pass
    if how == "raise":
        raise ValueError("no such thing")
    if how == "exit":
        os._exit(3)
    if how == "flood":
        return "x" * (1 << 24)
    if how == "memory":
        return str(len(bytearray(1 << 40)))
    return "well"


class Countdown:
    """Environment that asks to count down; the reward is the fraction of right steps."""

    def reset(self, row: dict[str, Any], *, seed: int) -> str:
        """Start at the row's answer."""
        self.number = self.start = int(row["answer"])
        self.fault = row.get("fault")
        return f"start at {self.number}"

    def step(self, response: str) -> tuple[str | None, float, bool]:
        """Reward the next number."""
        if self.fault is not None:
            misbehave(self.fault)
            if self.fault == "flood":
                return "x" * (1 << 24), 0.0, False
        self.number -= 1
        reward = float(response.strip() == str(self.number)) / self.start
        return f"go on from {self.number}", reward, self.number == 0


class KillsTheTrainer(Countdown):
    """Kill the trainer with SIGKILL at step KILL_AT, counted over all episodes, if it is set."""

    def step(self, response: str) -> tuple[str | None, float, bool]:
        """Count steps in a file, as each episode has a separate process."""
        if "KILL_AT" in os.environ:
            with open(os.environ["STEPS_FILE"], "ab+") as file:
                file.write(b".")
                file.flush()
                if file.tell() == int(os.environ["KILL_AT"]):
                    with open(f"/proc/{os.getppid()}/stat") as stat:
                        trainer = int(stat.read().rpartition(")")[2].split()[1])
                    os.kill(trainer, signal.SIGKILL)
        return super().step(response)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def complete(
    base_url: str, api_key: str, messages: list[dict[str, Any]], *, stream: bool = False
) -> dict[str, Any]:
    """Send a chat completion with nothing but the standard library; return the message."""
    body = {"model": "policy", "messages": messages, "tools": TOOLS}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        content = response.read()
    if not stream:
        message: dict[str, Any] = json.loads(content)["choices"][0]["message"]
        return message
    *events, done, end = content.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    first, last, usage = (json.loads(event.removeprefix("data: ")) for event in events)
    message = first["choices"][0]["delta"]
    calls = message.get("tool_calls", [])
    assert last["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
    assert usage["usage"]["completion_tokens"] > 0
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    return message


def agent(row: dict[str, Any], *, base_url: str, api_key: str) -> float:
    """Let the policy call `add`, and reward the right sum; a row may ask for misbehavior."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
    stream = bool(row.get("stream"))
    message = complete(base_url, api_key, messages, stream=stream)
    for call in message.get("tool_calls", ()):
        result = str(add(**json.loads(call["function"]["arguments"])))
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        if row.get("edits"):  # an agent that shortens its history
            messages[0]["content"] = "..."
        misbehave(row.get("fault", ""))
        message = complete(base_url, api_key, messages, stream=stream)
    return float(message["content"] == row["answer"])


def openai_agent(row: dict[str, Any], *, base_url: str, api_key: str) -> float:
    """The same agent, written against OpenAI's client."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    message = answer.choices[0].message
    for call in message.tool_calls or ():
        result = str(add(**json.loads(call.function.arguments)))
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
    return float(message.content == row["answer"])


def streaming_openai_agent(row: dict[str, Any], *, base_url: str, api_key: str) -> float:
    """The same agent, which reads its responses as streams."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    while True:
        with client.chat.completions.stream(
            model="policy", messages=messages, tools=TOOLS, stream_options={"include_usage": True}
        ) as stream:
            answer = stream.get_final_completion()
        message = answer.choices[0].message
        assert answer.usage is not None
        if not message.tool_calls:
            return float(message.content == row["answer"])
        messages.append(message)
        for call in message.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

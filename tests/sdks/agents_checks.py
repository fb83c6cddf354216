"""OpenAI's Agents SDK over the HTTP APIs: by plain requests, and by its WebSocket of Responses."""

import asyncio
from typing import Any

from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, set_tracing_disabled
from rachis import AsyncClient

MODEL = "rachis-builtin"
FACTS = "k1=blue; k2=red; k17=melon; k1="
_SETTINGS = ModelSettings(temperature=0.0, max_tokens=6)


def _config(http: str, *, is_websocket: bool) -> RunConfig:
    set_tracing_disabled(True)
    provider = OpenAIProvider(
        api_key="none",
        base_url=f"{http}/v1",
        websocket_base_url=f"{http.replace('http', 'ws', 1)}/v1",
        use_responses_websocket=is_websocket,
    )
    return RunConfig(model_provider=provider, model_settings=_SETTINGS)


async def _plain(address: str, turns: list[dict[str, str]]) -> str:
    async with AsyncClient(address) as client:
        return (await client.generate(turns, temperature=0.0, max_tokens=6)).text


async def _is_the_clients(address: str, http: str, *, is_websocket: bool) -> None:
    agent, config = Agent(name="facts", model=MODEL), _config(http, is_websocket=is_websocket)
    expected = await _plain(address, [{"role": "user", "content": FACTS}])
    first = await Runner.run(agent, FACTS, run_config=config)
    assert first.final_output == expected, (first.final_output, expected)
    streamed = Runner.run_streamed(agent, FACTS, run_config=config)
    said = [event.data.delta async for event in streamed.stream_events() if _is_text(event)]
    assert "".join(said) == expected
    # The next turn of the conversation, with all that was said.
    turns: list[dict[str, str]] = [
        {"role": "user", "content": FACTS},
        {"role": "assistant", "content": expected},
        {"role": "user", "content": "k2="},
    ]
    second = await Runner.run(agent, [*first.to_input_list(), turns[-1]], run_config=config)
    assert second.final_output == await _plain(address, turns)


def _is_text(event: Any) -> bool:
    return event.type == "raw_response_event" and event.data.type == "response.output_text.delta"


async def check_agents_run_over_http(address: str, http: str) -> None:
    await _is_the_clients(address, http, is_websocket=False)


async def check_agents_run_over_the_websocket(address: str, http: str) -> None:
    await _is_the_clients(address, http, is_websocket=True)


async def check_several_agents_run_at_once(address: str, http: str) -> None:
    config = _config(http, is_websocket=True)
    expected = await _plain(address, [{"role": "user", "content": FACTS}])
    runs = [Runner.run(Agent(name=f"{number}", model=MODEL), FACTS, run_config=config) for number in range(4)]
    assert [run.final_output for run in await asyncio.gather(*runs)] == [expected] * 4

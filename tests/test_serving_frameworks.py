"""Frameworks that speak OpenAI's API get answers, tool calls and structured results; absent ones are skipped."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.clients import Api, model_api, openai
from tests.test_serving_apis import answer_of, dense

pydantic = pytest.importorskip("pydantic")
pytestmark = [pytest.mark.grammar, pytest.mark.filterwarnings("ignore")]  # those of frameworks


class Zone(pydantic.BaseModel):
    """Time zones."""

    zone: Literal["utc", "cet"]


def get_time(zone: Literal["utc", "cet"]) -> str:
    """Return the time."""
    return f"noon in {zone}"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with model_api(tmp_path_factory.mktemp("frameworks"), ctx=4096) as api:
        yield api


def test_openai_parses_structured_answers_of_both_apis(api):
    options = {"model": "m", "extra_body": dense(api)}
    chat = api.client.chat.completions.parse(
        messages=[{"role": "user", "content": "a"}], response_format=Zone, **options
    )
    assert chat.choices[0].message.parsed.zone in ("utc", "cet")
    response = api.client.responses.parse(input="a", text_format=Zone, **options)
    assert response.output_parsed.zone in ("utc", "cet")


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain_answers_streams_and_calls(api, use_responses_api):
    langchain = pytest.importorskip("langchain_openai")
    options: dict[str, Any] = {"base_url": f"{api.address}/v1", "api_key": "any", "model": "m"}
    options |= {"use_responses_api": use_responses_api, "max_retries": 0}
    model = langchain.ChatOpenAI(**options, extra_body=answer_of("the the"))
    assert model.invoke("a").text == "the the"
    assert "".join(chunk.text for chunk in model.stream("a")) == "the the"
    tools = langchain.ChatOpenAI(**options, extra_body=dense(api), max_tokens=200)
    (call,) = tools.bind_tools([get_time], tool_choice="get_time").invoke("a").tool_calls
    assert call["name"] == "get_time" and call["args"]["zone"] in ("utc", "cet")
    structured = tools.with_structured_output(Zone, method="json_schema").invoke("a")
    assert structured.zone in ("utc", "cet")


@pytest.mark.parametrize("name", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents_call_tools_and_answer(api, name):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{api.address}/v1", api_key="any") as client:
            model = getattr(agents, name)("m", client)
            settings = agents.ModelSettings(
                tool_choice="required", extra_body=dense(api), max_tokens=200
            )
            agent = agents.Agent(
                name="a", model=model, model_settings=settings,
                tools=[agents.function_tool(get_time)], tool_use_behavior="stop_on_first_tool",
            )  # fmt: skip
            calling = await agents.Runner.run(agent, "a")
            answering = agents.ModelSettings(extra_body=answer_of("the the"))
            plain_agent = agents.Agent(name="b", model=model, model_settings=answering)
            return [calling.final_output, (await agents.Runner.run(plain_agent, "a")).final_output]

    called, answer = asyncio.run(run())
    assert called in ("noon in utc", "noon in cet") and answer == "the the"


@pytest.mark.parametrize("name", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_answers_and_calls(api, name):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")

    async def run() -> tuple[str, Zone]:
        async with openai.AsyncOpenAI(base_url=f"{api.address}/v1", api_key="any") as client:
            model = getattr(models, name)(
                "m", provider=providers.OpenAIProvider(openai_client=client)
            )
            settings: Any = {"extra_body": answer_of("the the")}
            answer = await pydantic_ai.Agent(model).run("a", model_settings=settings)
            agent = pydantic_ai.Agent(model, output_type=Zone, retries=0)
            settings = {"extra_body": dense(api), "max_tokens": 200}
            return answer.output, (await agent.run("a", model_settings=settings)).output

    answer, zone = asyncio.run(run())
    assert answer == "the the" and zone.zone in ("utc", "cet")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_returns_models(api, mode):
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(api.client, mode=getattr(instructor.Mode, mode))
    zone = client.chat.completions.create(
        model="m", response_model=Zone, max_retries=0, extra_body=dense(api), max_tokens=200,
        messages=[{"role": "user", "content": "a"}],
    )  # fmt: skip
    assert zone.zone in ("utc", "cet")


def test_llm_answers_and_streams(api):
    pytest.importorskip("llm")
    chat_class = pytest.importorskip("llm.default_plugins.openai_models").Chat
    model = chat_class("m", model_name="m", api_base=f"{api.address}/v1", can_stream=True)
    for stream in (False, True):
        assert model.prompt("a", stream=stream, key="any", max_tokens=4).text()

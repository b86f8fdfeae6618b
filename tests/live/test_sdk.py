"""A client that people really use."""

from openai import AsyncOpenAI

from tests.conftest import StartProxy
from tests.live.talk import CHATML, FOX


async def test_openai_sdk(proxy_server: StartProxy) -> None:
    """Streamed and whole, with usage: the same text twice, the second time from the cache."""
    proxy = await proxy_server("--parallel", "2", "--ctx-size", "4096", model="dense", engine_flags=CHATML)
    async with AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="anything") as client:
        asked = {
            "model": "dense",
            "messages": [{"role": "user", "content": "Tell me about foxes."}],
            "max_tokens": 12,
            "extra_body": FOX,
        }
        stream = await client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)  # type: ignore[call-overload]
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(**asked)  # type: ignore[call-overload]
        models = [model.id async for model in client.models.list()]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text.split() == ["fox"] * 12
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert whole.usage.prompt_tokens_details.cached_tokens > 0
    assert models == ["dense"]

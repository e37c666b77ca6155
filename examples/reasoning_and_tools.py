"""Watch the model think, and let it call a tool: `python examples/reasoning_and_tools.py http://127.0.0.1:30000/v1`."""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000/v1", api_key="EMPTY")
model = client.models.list().data[0].id  # "k3lib-nano", or what this server was started with

# ---- reasoning ----
print("Thinking:")
is_thinking = True
stream = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "What is 15% of 240?"}], max_tokens=1000, stream=True
)
for chunk in stream:
    delta = chunk.choices[0].delta
    if getattr(delta, "reasoning_content", None):
        print(delta.reasoning_content, end="", flush=True)
    if delta.content:
        if is_thinking:
            print("\nAnswer:")
        is_thinking = False
        print(delta.content, end="", flush=True)

# ---- tool calling ----
parameters = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city name"}},
    "required": ["city"],
}
function = {"name": "get_weather", "description": "Get the current weather for a city", "parameters": parameters}
settings = {"model": model, "tools": [{"type": "function", "function": function}], "max_tokens": 1000}
messages = [{"role": "user", "content": "What's the weather in Beijing?"}]
answer = client.chat.completions.create(**settings, messages=messages).choices[0].message
print("\n\nThinking:", getattr(answer, "reasoning_content", None), sep="\n")

# all of the answer goes back, with its reasoning, then what the tool returned for each of its calls
messages.append(answer.model_dump(exclude_none=True))
for call in answer.tool_calls or []:
    print("Call:", call.function.name, call.function.arguments)
    result = {**json.loads(call.function.arguments), "temperature": 21, "sky": "sunny"}
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
if answer.tool_calls:
    answer = client.chat.completions.create(**settings, messages=messages).choices[0].message
print("Answer:", answer.content, sep="\n")

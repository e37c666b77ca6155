"""Watch the model think, and let it call a tool: `python examples/reasoning_and_tools.py http://127.0.0.1:30000/v1`."""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000/v1", api_key="none")
model = client.models.list().data[0].id


def get_weather(city):
    return {"city": city, "celsius": 21}


parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"]}
parameters["additionalProperties"] = False
function = {"name": "get_weather", "description": "Weather of a city", "parameters": parameters, "strict": True}
settings = {"model": model, "max_tokens": 300, "tools": [{"type": "function", "function": function}]}


def ask(messages, **more):
    """Print an answer while it comes; return it as a message to send back."""
    answer = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in client.chat.completions.create(**settings, messages=messages, stream=True, **more):
        delta = chunk.choices[0].delta
        for key in ("reasoning_content", "content"):
            answer[key] += getattr(delta, key, None) or ""
        for piece in delta.tool_calls or []:  # a call comes in pieces: first its name, then its arguments
            if piece.id:
                named = {"name": piece.function.name, "arguments": ""}
                answer["tool_calls"].append({"id": piece.id, "type": "function", "function": named})
            answer["tool_calls"][piece.index]["function"]["arguments"] += piece.function.arguments or ""
    print("  thought:", repr(answer["reasoning_content"][:60]))
    print("  said:   ", repr(answer["content"][:60]))
    return answer


messages = [{"role": "user", "content": "How is the weather in Paris?"}]
print("With low effort")
ask(messages, reasoning_effort="low")

print("Without thinking, and with a tool that must be called")
messages.append(ask(messages, tool_choice="required", extra_body={"chat_template_kwargs": {"thinking": False}}))
for call in messages[-1]["tool_calls"]:
    try:
        result = get_weather(**json.loads(call["function"]["arguments"]))
    except ValueError as error:  # cut off by max_tokens
        result = {"error": str(error)}
    print("  called: ", call["function"]["name"], call["function"]["arguments"], "->", result)
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})

print("With the results")
ask(messages, reasoning_effort="high", extra_body={"separate_reasoning": True, "top_k": 20, "min_p": 0.01})

"""Talk to a running server: `k3lib-serve`, then `python examples/chat_client.py http://127.0.0.1:30000/v1`."""

import sys

from openai import BadRequestError, OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Hello"}]
settings = {"model": model, "messages": messages, "max_tokens": 64, "reasoning_effort": "none"}

answer = client.chat.completions.create(**settings, temperature=0)
print(repr(answer.choices[0].message.content), answer.choices[0].finish_reason)
print(f"{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out")

pieces = client.chat.completions.create(**settings, temperature=0, stream=True)
text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
print("the stream says the same:", text == answer.choices[0].message.content)

try:
    client.chat.completions.create(**settings, temperature=-1)
except BadRequestError as error:
    print("refused:", error.body["message"])

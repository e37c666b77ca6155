"""Load a checkpoint and generate: several chats at once, then one as a stream."""

import torch

from k3lib import Engine, SamplingParams, nano
from k3lib.server.chat import encode_segments, render_chat
from k3lib.server.tokenizer import IncrementalDecoder, load_tokenizer

engine = Engine.from_pretrained(nano.folder(), dtype=torch.float32)  # or any other folder in the released layout
tok = load_tokenizer()  # its tokens are bytes


def chat(question):
    return encode_segments(tok, render_chat([{"role": "user", "content": question}], thinking=False))


end = tok.special["<|close|>"]  # of what is said; brackets of the message would follow
greedy = SamplingParams(temperature=0, max_new_tokens=80, stop_token_ids=(end,))
questions = ["What is 7 + 8?", "Hello"]
for question, out in zip(questions, engine.generate(list(map(chat, questions)), greedy), strict=True):
    print(question, "->", repr(tok.decode(out.token_ids[:-1])), out.finish)

decoder = IncrementalDecoder(tok)
for token in engine.stream(chat("Thanks"), greedy):
    if token != end:
        print(decoder.push([token]), end="", flush=True)
print(decoder.finish())

drawn = [engine.generate([[1, 2, 3]], SamplingParams(seed=7, max_new_tokens=8))[0].token_ids for _ in range(2)]
print("equal seeds, equal tokens:", drawn[0] == drawn[1])
print(engine.stats())

"""Load a checkpoint and generate: several prompts at once, then one as a stream."""

import tempfile

from k3lib import Engine, KimiK3ForCausalLM, SamplingParams
from k3lib.server.tiny import make_tiny

with tempfile.TemporaryDirectory() as folder:
    make_tiny(folder)  # random weights in the released layout, 3 MB
    model = KimiK3ForCausalLM.from_pretrained(folder)

engine = Engine(model)
greedy = SamplingParams(temperature=0, max_new_tokens=8)
outputs = engine.generate([[1, 2, 3], [4, 5, 6, 7]], greedy)
for out in outputs:
    print(out.prompt_ids, "->", out.token_ids, out.finish)

streamed = []
for token in engine.stream([1, 2, 3], greedy):
    print(token, end=" ", flush=True)
    streamed.append(token)
print()
assert len(streamed) == 8

drawn = [engine.generate([[1, 2, 3]], SamplingParams(seed=7, max_new_tokens=8))[0].token_ids for _ in range(2)]
print("equal seeds, equal tokens:", drawn[0] == drawn[1])
print(engine.stats())

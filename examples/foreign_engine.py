"""The hybrid cache in an engine of one's own: forty lines, prefix reuse included."""

import torch

from k3lib.cache import CacheConfig, HybridCache
from k3lib.errors import CapacityError
from k3lib.server.tiny import tiny_model


class MyEngine:
    """Greedy, continuous batching; a request that does not fit waits."""

    def __init__(self, model, **sizes):
        self.model = model
        self.cache = HybridCache.allocate(model.config, CacheConfig(**sizes))

    def admit(self, tokens, total):
        lease = self.cache.open(tokens)  # finds and pins what is cached of the prompt
        try:
            self.cache.grow(lease, tokens=total - lease.length)
        except CapacityError:
            self.cache.close(lease)
            raise
        print(f"{lease.cached_len} of {len(tokens)} prompt tokens need no prefill")
        return lease, tokens, total

    @torch.inference_mode()
    def run(self, prompts, count):
        waiting, running = [list(prompt) for prompt in prompts], []
        results = list(waiting)
        while waiting or running:
            try:
                while waiting:
                    running.append(self.admit(waiting[0], len(waiting[0]) + count))
                    waiting.pop(0)
            except CapacityError:
                assert running, "a request that does not fit alone never will"
            work = [(lease, tokens[lease.length :]) for lease, tokens, _ in running]
            mode = "decode" if all(len(new) == 1 for _, new in work) else "prefill"
            logits = self.model(self.cache.make_batch(work, mode=mode), self.cache, logits="last")
            for (lease, tokens, total), (_, new), token in zip(running, work, logits.argmax(-1).tolist(), strict=True):
                self.cache.commit(lease, new)  # from now on others can reuse what this step kept
                tokens.append(token)
                if len(tokens) == total:
                    self.cache.close(lease)  # keeps the last state as well: the next turn begins there
            running = [entry for entry in running if entry[0].is_open]
        return results


engine = MyEngine(tiny_model(dtype=torch.float32), num_pages=64, num_slots=4, page_size=16, checkpoint_grid=32)
(first,) = engine.run([range(100)], 10)
again, turn = engine.run([range(100), [*first, 7, 8, 9]], 10)
assert again == first
engine.cache.check()

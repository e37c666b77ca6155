"""Small seeded models, engines over them, and what must hold once an engine is idle."""

import contextlib
import random

import torch
from seeded import seed_weights

from k3lib import KimiK3Config, KimiK3ForCausalLM
from k3lib.cache import CacheConfig
from k3lib.engine import Engine, EngineConfig, SamplingParams

__all__ = [
    "Scripted", "alone", "drained", "greedy", "ids_of", "make_engine", "one_thread", "prompts", "run_all",
    "small_model",
]  # fmt: skip

VOCAB = 512


@contextlib.contextmanager
def one_thread():
    """Small models are several times faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def small_model(seed=0, **changes):
    """Three layers: KDA and dense, KDA and MoE, MLA and MoE; two AttnRes blocks."""
    sizes = {
        "num_hidden_layers": 3, "kda_layers": [1, 2], "full_attn_layers": [3], "attn_res_block_size": 2,
        "num_experts": 6, "num_experts_per_token": 2, "hidden_size": 48, "intermediate_size": 64, "num_heads": 2,
        "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    model = KimiK3ForCausalLM(KimiK3Config.tiny(**{**sizes, **changes}), dtype=torch.float32)
    return seed_weights(model, seed).eval().requires_grad_(requires_grad=False)


def make_engine(model, *, slots=8, pages=100, page_size=4, grid=16, tokenizer=None, listener=None, pools=(), **rules):
    """An engine with small pages and a narrow checkpoint grid; `pools` are further fields of its `CacheConfig`."""
    cache = CacheConfig(num_pages=pages, num_slots=slots, page_size=page_size, checkpoint_grid=grid, **dict(pools))
    return Engine(model, EngineConfig(cache=cache, **rules), tokenizer=tokenizer, listener=listener)


def greedy(tokens=6, **fields):
    return SamplingParams(**{"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **fields})


def prompts(*lengths, seed=0, below=VOCAB):
    rng = random.Random(seed)
    return [[rng.randrange(below) for _ in range(n)] for n in lengths]


_solo = {}


def alone(model, ids, params, **rules):
    """The output of one request by itself in a fresh engine without a prefix cache; computed once."""
    key = (id(model), tuple(ids), params, tuple(sorted(rules.items())))
    if key not in _solo:
        engine = make_engine(model, pages=200, disable_radix_cache=True, **rules)
        (out,) = engine.generate([ids], params)
        assert drained(engine)
        _solo[key] = (model, out)  # the model, so that no other one gets its id
    return _solo[key][1]


def ids_of(outputs):
    return [out.token_ids for out in outputs]


def drained(engine):
    """The drain invariant: nothing runs, everything is free or cached, and a flush frees all of it."""
    cache = engine.cache
    cache.check()
    engine.scheduler.check()
    assert not engine.has_work
    assert not engine._states
    assert not engine._inboxes
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert cache.free_pages + cache.cached_pages == cache.config.num_pages
    assert cache.free_slots + cache.cached_slots == cache.config.num_slots
    cache.issue()
    cache.clear()
    cache.check()
    assert cache.free_pages == cache.config.num_pages
    assert cache.free_slots == cache.config.num_slots
    return True


def run_all(engine, limit=2000):
    """Step to the end; the tokens and the ends of the requests, by id, in the order of the ends."""
    tokens, ends = {}, {}
    for _ in range(limit):
        if not engine.has_work:
            return tokens, ends
        for out in engine.step():
            tokens.setdefault(out.request_id, []).extend(out.token_ids)
            assert out.request_id not in ends, "an output after the end"
            if out.finish is not None:
                ends[out.request_id] = out.finish
        engine.cache.check()
        engine.scheduler.check()
    raise AssertionError(f"still working after {limit} steps: {engine.stats()}")


class Scripted:
    """In place of a runner's model: the next token is a function of the last ids of a step and the context's length."""

    def __init__(self, model, after):
        self.config, self.mesh, self.device, self.dtype = model.config, model.mesh, model.device, model.dtype
        self.after = after

    def __call__(self, batch, cache, logits="last"):
        scores = torch.zeros(len(batch.new_tokens), self.config.text.vocab_size)
        parts = batch.input_ids.split(batch.new_tokens)
        for row, (ids, length) in enumerate(zip(parts, batch.seq_lens.tolist(), strict=True)):
            scores[row, self.after(ids.tolist(), length)] = 50.0
        return scores

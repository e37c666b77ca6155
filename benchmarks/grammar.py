"""Constrained decoding: what it costs to compile a schema and to find the tokens that come next.

    python -m benchmarks.grammar --tokenizer ../shared/data/tokenizer     # the vocabulary of 163,840
    python -m benchmarks.grammar                                          # the one of bytes

With the package xgrammar installed, it runs beside. All figures of a table come from one run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time

import numpy as np

from k3lib.engine.grammar import GrammarCompiler, Matcher, build_grammar
from k3lib.server.tokenizer import load_tokenizer

SCHEMAS = {
    "three fields": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["city", "days", "ok"],
        "additionalProperties": False,
    },
    "nested list": {
        "type": "object",
        "properties": {
            "rows": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"id": {"type": "string", "maxLength": 40}, "n": {"type": "number"}},
                    "required": ["id", "n"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["rows"],
        "additionalProperties": False,
    },
    "200 words": {
        "type": "object",
        "properties": {"w": {"enum": [f"word {i}" for i in range(200)]}},
        "required": ["w"],
    },
}
TEXTS = {
    "three fields": '{"city": "Ulan Bator in the rain", "days": 12345, "ok": true}',
    "nested list": json.dumps({"rows": [{"id": f"row number {i}", "n": i / 7} for i in range(12)]}),
    "200 words": '{"w": "word 123"}',
}


def times_of(accept, fill, tokens) -> list[float]:
    found = []
    for token in tokens:
        begin = time.perf_counter()
        fill()
        found.append(time.perf_counter() - begin)
        assert accept(token)
    return found


def ours(tok, name: str) -> tuple[float, float, list[float]]:
    """Seconds to compile first, to compile anew, and of each mask."""
    grammar = build_grammar(
        None, None, thinking=False, response_format={"type": "json_schema", "json_schema": {"schema": SCHEMAS[name]}}
    )
    compiler = GrammarCompiler(tok)
    begin = time.perf_counter()
    compiler.compile(grammar)
    first = time.perf_counter() - begin
    again = []
    for _ in range(5):
        compiler._kept.clear()
        begin = time.perf_counter()
        matcher = compiler.matcher(grammar)
        again.append(time.perf_counter() - begin)
    rows = np.zeros((1, matcher.num_words), dtype=np.uint32)
    masks = times_of(matcher.accept, lambda: Matcher.fill([matcher], rows), tok.encode(TEXTS[name]))
    return first, statistics.median(again), masks


def xgrammar(tok, name: str) -> tuple[float, float, list[float]]:
    import xgrammar as xgr  # noqa: PLC0415 - optional

    words = [tok.decode_bytes([i]) for i in range(tok.n_base)]
    words += [f"<special {i}>".encode() for i in range(tok.n_base, tok.vocab_size)]
    begin = time.perf_counter()
    info = xgr.TokenizerInfo(words, vocab_type=xgr.VocabType.RAW, stop_token_ids=[tok.stop_ids[0]])
    compiled = xgr.GrammarCompiler(info, cache_enabled=False).compile_json_schema(SCHEMAS[name], max_whitespace_cnt=1)
    first = time.perf_counter() - begin
    compiler, again = xgr.GrammarCompiler(info, cache_enabled=False), []
    for _ in range(3):
        begin = time.perf_counter()
        compiled = compiler.compile_json_schema(SCHEMAS[name], max_whitespace_cnt=1)
        again.append(time.perf_counter() - begin)
    matcher = xgr.GrammarMatcher(compiled)
    mask = xgr.allocate_token_bitmask(1, tok.vocab_size)
    masks = times_of(matcher.accept_token, lambda: matcher.fill_next_token_bitmask(mask), tok.encode(TEXTS[name]))
    return first, statistics.median(again), masks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="folder of tiktoken.model")
    tok = load_tokenizer(parser.parse_args().tokenizer)
    peers = {"k3lib": ours, **({"xgrammar": xgrammar} if importlib.util.find_spec("xgrammar") else {})}
    print(f"vocabulary {tok.vocab_size}\n")
    print(f"{'schema':<14}{'':<10}{'first ms':>10}{'compile ms':>12}{'mask us, median':>17}{'worst':>10}")
    for name in SCHEMAS:
        for peer, measure in peers.items():
            first, again, masks = measure(tok, name)
            middle, worst = 1e6 * statistics.median(masks), 1e6 * max(masks)
            print(f"{name:<14}{peer:<10}{1e3 * first:>10.0f}{1e3 * again:>12.1f}{middle:>17.0f}{worst:>10.0f}")


if __name__ == "__main__":
    main()

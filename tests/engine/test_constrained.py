"""Grammars in the engine: the same tokens however a request is run, and masks that reach the sampler."""

import json

import pytest
from engines import drained, make_engine, prompts, run_all, small_model

from k3lib.engine import Request, SamplingParams
from k3lib.engine.grammar import build_grammar
from k3lib.errors import RequestError
from k3lib.server.tokenizer import load_tokenizer

pytest.importorskip("llguidance")

TOK = load_tokenizer()
WORDS = {"type": "array", "items": {"enum": ["a", "bc", 7]}, "minItems": 4, "maxItems": 12}
GRAMMAR = build_grammar(
    None, None, thinking=False, response_format={"type": "json_schema", "json_schema": {"schema": WORDS}}
)


@pytest.fixture(scope="module")
def model():
    return small_model()


SCARCE = {"pages": 31, "schedule_conservativeness": 0.0}  # so that requests lose their memory half-way


def params(seed, **fields):
    stops = {"stop_token_ids": TOK.stop_ids, "max_new_tokens": 90, "seed": seed}
    return SamplingParams(**{**stops, "grammar": GRAMMAR, **fields})


def document(tokens):
    text, markup = TOK.decode(tokens).removeprefix("<|open|>response<|sep|>").split("<|close|>", 1)
    assert markup in ("response<|sep|><|end_of_msg|>", "response<|sep|><|close|>message<|sep|><|end_of_msg|>")
    return json.loads(text)


def test_the_same_tokens_alone_in_a_batch_and_after_preemption(model):
    asked = [(ids, params(seed)) for seed, ids in enumerate(prompts(9, 17, 30, 5))]
    alone = []
    for ids, how in asked:
        engine = make_engine(model, tokenizer=TOK)
        (out,) = engine.generate([ids], how)
        alone.append(out.token_ids)
        assert set(document(out.token_ids)) <= {"a", "bc", 7}
        assert out.finish == "stop"
        assert drained(engine)
    for rules in ({}, SCARCE, {"chunked_prefill_size": 7}, {"deterministic": True}):
        engine = make_engine(model, tokenizer=TOK, **rules)
        outs = engine.generate([ids for ids, _ in asked], [how for _, how in asked])
        assert [out.token_ids for out in outs] == alone
        if rules is SCARCE:
            assert any(out.preemptions for out in outs)
        assert drained(engine)


def test_new_weights_in_the_middle_keep_the_document_valid(tmp_path):
    engine = make_engine(small_model(), tokenizer=TOK)
    engine.add(Request(prompts(9)[0], params(1), request_id="x"))
    tokens = [token for _ in range(5) for out in engine.step() for token in out.token_ids]
    small_model(3).save_pretrained(tmp_path / "new")
    engine.update_weights(tmp_path / "new")
    rest, ends = run_all(engine)
    assert ends == {"x": "stop"}
    assert document(tokens + rest["x"])


def test_logprobs_are_those_of_the_model(model):
    engine = make_engine(model, tokenizer=TOK)
    (out,) = engine.generate([prompts(9)[0]], params(1, logprobs=True, top_logprobs=3))
    assert len(out.logprobs) == len(out.token_ids)
    assert any(entry.logprob < entry.top[-1][1] for entry in out.logprobs), "a mask chose what the model would not"


@pytest.mark.parametrize("tokenizer", [None, type("T", (), {"encode": None, "decode": None})()])
def test_a_grammar_needs_the_tokens_of_the_chat_format(model, tokenizer):
    engine = make_engine(model, tokenizer=tokenizer)
    with pytest.raises(RequestError, match="response_format needs Engine") as refused:
        engine.generate([[1]], params(1))
    assert refused.value.param == "response_format"
    hint = build_grammar([{"type": "function", "function": {"name": "f"}}], None)
    assert hint.is_hint
    assert len(engine.generate([[1]], params(1, grammar=hint, max_new_tokens=3))[0].token_ids) == 3


def test_what_is_no_grammar_is_refused(model):
    engine = make_engine(model, tokenizer=TOK)
    with pytest.raises(RequestError, match="must be a Grammar, got dict"):
        engine.add(Request([1], params(1, grammar={"type": "object"})))
    assert drained(engine)


def test_biases_outside_the_vocabulary_are_refused(model):
    engine = make_engine(model)
    with pytest.raises(RequestError, match="token 512, outside the vocabulary") as refused:
        engine.add(Request([1], SamplingParams(logit_bias={512: 1.0})))
    assert refused.value.param == "logit_bias"

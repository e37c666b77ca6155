"""Short arguments come in one piece when their call ends, so a stream says what the whole says, whatever the markup."""

import json

from hypothesis import given
from hypothesis import strategies as st
from test_parser import joined

from k3lib.server.calls import HELD
from k3lib.server.chat import OutputParser, parse_output, parse_output_ids
from k3lib.server.tokenizer import load_tokenizer

TINY = load_tokenizer()
MARKS = (
    "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", '<|open|>call tool="f" index="1"<|sep|>', "<|close|>call<|sep|>",
    "<|open|>call<|sep|>", '<|open|>argument key="a" type="string"<|sep|>', '<|open|>argument key="a"<|sep|>',
    '<|open|>argument key="b" type="number"<|sep|>', "<|close|>argument<|sep|>", "<|close|>message<|sep|>",
    '<|open|>json type="object"<|sep|>', "<|end_of_msg|>", "1", "x", '"', "é", "<|", "\n",
)  # fmt: skip
SCRIPTS = st.lists(st.sampled_from(MARKS), max_size=6).map("".join)  # too short for more than `HELD` characters


def whole_and_streamed(output, sizes, *, as_ids):
    source = TINY.encode(output, allow_special=True) if as_ids else output
    parser = OutputParser(tok=TINY, keeps_text=False)
    feed = parser.feed_ids if as_ids else parser.feed
    deltas, at = [], 0
    for size in [*sizes, len(source)]:
        deltas += feed(source[at : at + size])
        at += size
    deltas += parser.finish()
    whole = parse_output_ids(source, TINY) if as_ids else parse_output(source)
    return whole, joined(deltas), parser


@given(SCRIPTS, st.lists(st.integers(1, 9), max_size=30), st.booleans())
def test_a_stream_of_short_calls_says_what_the_whole_says(script, sizes, as_ids):
    output = f'<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="g" index="1"<|sep|>{script}'
    whole, streamed, parser = whole_and_streamed(output, sizes, as_ids=as_ids)
    assert streamed[2] == [tuple(call) for call in whole.tool_calls]
    assert parser.num_calls == len(whole.tool_calls)


def test_the_vectors_in_every_chunking(outputs):
    for case in outputs["cases"]:
        flags = {"thinking": case["thinking"], "tools_active": case["tools_active"]}
        for sizes in [*case["chunkings"].values(), [1] * len(case["output"])]:
            parser, deltas, at = OutputParser(**flags), [], 0
            for size in [*sizes, len(case["output"])]:
                deltas += parser.feed(case["output"][at : at + size])
                at += size
            deltas += parser.finish()
            want = [(call["name"], call["arguments"]) for call in case["expected"]["tool_calls"]]
            assert joined(deltas)[2] == want, case["name"]


def test_long_arguments_are_streamed():
    text = "line\n" * 40
    output = '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="t" '
    output += f'type="string"<|sep|>{text}<|close|>argument<|sep|><|close|>call<|sep|>'
    parser, sizes = OutputParser(), []
    for character in output:
        sizes += [len(d["tool_call"]["arguments"]) for d in parser.feed(character)]
    assert sizes[0] == 0
    assert HELD < sizes[1] <= HELD + 2
    assert max(sizes[2:]) <= 2
    assert parser.result().tool_calls == [("f", json.dumps({"t": text}))]

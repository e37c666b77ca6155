"""The tokenizer against the published vectors, and the promises of the byte tokenizer."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3lib.errors import ConfigError, RequestError
from k3lib.server.tokenizer import IncrementalDecoder, check_ids, load_tokenizer

TINY = load_tokenizer()


@functools.cache
def _official():
    default = Path(__file__).parents[2] / "../shared/data/tokenizer"
    folder = Path(os.environ.get("K3LIB_TOKENIZER_DIR", default))
    if not (folder / "tiktoken.model").is_file():
        return None
    return load_tokenizer(folder, verify=True)


@pytest.fixture
def official():
    tok = _official()
    if tok is None:
        pytest.skip("needs the official tiktoken.model, set K3LIB_TOKENIZER_DIR")
    return tok


@pytest.fixture
def vectors(golden):
    return json.loads((golden / "protocol/tokenizer.json").read_text(encoding="utf-8"))


def test_official_names_and_sizes(official, vectors):
    meta = vectors["meta"]
    assert official.n_base == meta["tiktoken_model"]["base_ranks"]
    assert official.vocab_size == meta["tiktoken_model"]["vocab_size"]
    named = dict(meta["special_named"])
    for name, i in official.special.items():
        assert name == named.get(i, f"<|reserved_token_{i}|>")
    assert official.stop_ids == (163586, 163585, 163593)


def test_official_ids(official, vectors):
    for case in vectors["cases"]:
        text, ordinary = case["text"], case["ids_ordinary"]
        assert official.encode(text) == ordinary, text
        special = case.get("ids_allow_special", ordinary)
        assert official.encode(text, allow_special=True) == special, text
        assert official.decode(ordinary) == official.decode(special) == text


def test_long_runs_are_cut_where_the_reference_cuts(official, vectors):
    for case in vectors["chunk_cut_cases"]:
        text = "".join(part * count for part, count in case["text_runs"])
        ids = official.encode(text, allow_special=True)
        assert len(ids) == case["n_tokens"]
        assert ids[: len(case["ids_head"])] == case["ids_head"]
        assert ids[-len(case["ids_tail"]) :] == case["ids_tail"]
        digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
        assert digest == case["ids_sha256"]
        assert (163584 in ids) == case["has_bos_id"]


def test_official_decoding(official, vectors):
    for case in vectors["decode_cases"]:
        assert official.decode(case["ids"]) == case["text"]
        decoder = IncrementalDecoder(official)
        text = "".join(decoder.push([i]) for i in case["ids"]) + decoder.finish()
        assert text == case["text"]


def test_byte_tokenizer_keeps_the_offsets():
    ids = {name: TINY.special[name] for name in ("[BOS]", "<|end_of_msg|>", "<|open|>", "[PAD]")}
    assert ids == {"[BOS]": 256, "<|end_of_msg|>": 258, "<|open|>": 259, "[PAD]": 511}
    assert TINY.special["<osagent_mode>"] == 321
    assert TINY.special["<|reserved_token_264|>"] == 264
    assert (TINY.n_base, TINY.vocab_size, TINY.stop_ids) == (256, 512, (258, 257, 265))


def test_none_and_bytes_name_the_byte_tokenizer():
    assert load_tokenizer("bytes").encode("é<|open|>", True) == [0xC3, 0xA9, 259]


@given(st.text(), st.booleans())
def test_decoding_undoes_encoding(text, allow_special):
    assert TINY.decode(TINY.encode(text, allow_special)) == text


@given(st.lists(st.sampled_from([*TINY.special, "a", " ", "<|"]), max_size=6).map("".join))
def test_request_text_never_makes_a_control_token(text):
    assert all(i < TINY.n_base for i in TINY.encode(text))


def test_every_special_name_encodes_to_its_id():
    assert all(TINY.encode(name, True) == [i] for name, i in TINY.special.items())


def test_a_cut_hides_the_special_token_that_straddles_it():
    ids = TINY.encode("a" * 24_998 + "[BOS]", allow_special=True)
    assert TINY.special["[BOS]"] not in ids
    assert TINY.special["[BOS]"] in TINY.encode("a" * 24_995 + "[BOS]", allow_special=True)


@given(st.lists(st.integers(0, 511), max_size=12), st.data())
def test_incremental_decoding_equals_decoding(ids, data):
    decoder, text = IncrementalDecoder(TINY), ""
    rest = ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text += decoder.push(rest[:size])
        rest = rest[size:]
    assert text + decoder.finish() == TINY.decode(ids)


def test_an_incomplete_character_is_held_back():
    decoder = IncrementalDecoder(TINY)
    assert decoder.push([0xF0, 0x9F, 0x98]) == ""
    assert decoder.push([0x80]) == "😀"
    assert decoder.push([0xE4]) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.push([65]) == "A"


def test_lone_surrogates_become_replacement_characters():
    assert TINY.decode(TINY.encode("a\ud800b")) == "a\ufffdb"


def test_ids_outside_the_vocabulary_decode_to_replacement_characters():
    assert TINY.decode([65, 512, -1]) == "A\ufffd\ufffd"
    with pytest.raises(RequestError, match=r"token id 512 is not in 0\.\.511"):
        check_ids(TINY, [1, 512], param="prompt")


def write_ranks(folder, tokens, *, numbers=None):
    numbers = range(len(tokens)) if numbers is None else numbers
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in zip(tokens, numbers, strict=True)]
    (folder / "tiktoken.model").write_text("".join(lines))


ALL_BYTES = [bytes([i]) for i in range(256)]


def test_a_rank_file_with_renamed_tokens(tmp_path):
    write_ranks(tmp_path, [*ALL_BYTES, b"ab"])
    config = {"added_tokens_decoder": {"257": {"content": "[START]", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tok = load_tokenizer(tmp_path)
    assert tok.encode("abc[START]<|open|>", True) == [256, 99, 257, 260]
    assert tok.decode([256, 258]) == "ab[EOS]"


@pytest.mark.parametrize(
    ("tokens", "numbers", "message"),
    [
        (ALL_BYTES[:-1], None, "expected all 256 single bytes, 1 are missing, first 255"),
        (ALL_BYTES, [*range(255), 300], "without rank 255"),
        (ALL_BYTES, [*range(255), 0], "rank 0 occurs twice"),
        ([*ALL_BYTES, b"a"], None, "1 tokens occur twice"),
    ],
)
def test_bad_ranks_are_refused(tmp_path, tokens, numbers, message):
    write_ranks(tmp_path, tokens, numbers=numbers)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


def test_other_bad_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"need a folder with tiktoken\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_text("YQ== 0\nnonsense\n")
    with pytest.raises(ConfigError, match="line 2: expected '<base64> <rank>'"):
        load_tokenizer(tmp_path)
    write_ranks(tmp_path, ALL_BYTES)
    with pytest.raises(ConfigError, match="has SHA-256"):
        load_tokenizer(tmp_path, verify=True)
    config = {"added_tokens_decoder": {"7": {"content": "x"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"special id 7 is outside 256\.\.511"):
        load_tokenizer(tmp_path)


def test_chat_and_tokenizer_need_neither_torch_nor_tiktoken():
    code = (
        "import sys; from k3lib.server.tokenizer import load_tokenizer;"
        "import k3lib.server.chat; load_tokenizer().encode('a');"
        "sys.exit(any(m in sys.modules for m in ('torch', 'tiktoken', 'fastapi')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

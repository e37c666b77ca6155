"""Attention residuals in Triton against the reference.

Shapes: T tokens, D hidden size.
"""

import pytest
import torch

from k3lib.backends.triton.attn_res import attn_res_triton, attn_res_triton_invariant
from k3lib.errors import ConfigError
from k3lib.ops import attn_res
from k3lib.testing import assert_close, tolerance

CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
HIDDEN = [40, *([7168] if CUDA else [])]


def case(device, tokens=3, rows=4, hidden=40, num_blocks=3, dtype=torch.float32, scale=1.0):
    tensors = {
        "prefix": torch.randn(tokens, hidden) * scale,
        "delta": torch.randn(tokens, hidden) * scale,
        "bank": torch.randn(tokens, rows, hidden) * scale,
    }
    tensors = {name: x.to(dtype).to(device) for name, x in tensors.items()}
    tensors["bank"][:, num_blocks:] = torch.nan
    keywords = {
        "score_weight": (torch.randn(hidden) / hidden**0.5).to(device),
        "out_norm_weight": torch.randn(hidden).to(dtype).to(device),
        "num_blocks": num_blocks,
        "write_block": None,
        "eps": 1e-5,
        "out_eps": 1e-5,
    }
    return tensors, keywords


@pytest.fixture(params=["few tokens", "many tokens"], autouse=True)
def kernel(request, monkeypatch):
    """Each of the two kernels, whatever the number of tokens."""
    from k3lib.backends.triton import attn_res_kernels  # noqa: PLC0415 - after the interpreter has been chosen

    monkeypatch.setattr(attn_res_kernels, "STREAM_FROM", 1 if request.param == "many tokens" else 1 << 40)


def compare(tensors, keywords, dtype):
    """The reference in fp32 on the rounded sum, since that is what is mixed."""
    wide = dict(tensors)
    if wide["prefix"] is not None and wide["delta"] is not None:
        wide["prefix"], wide["delta"] = wide["prefix"] + wide["delta"], None
    wide = {name: None if x is None else x.float() for name, x in wide.items()}
    mine = {name: None if x is None else x.clone() for name, x in tensors.items()}
    norm = keywords["out_norm_weight"]
    want, p = attn_res.reference(**wide, **{**keywords, "out_norm_weight": None if norm is None else norm.float()})
    got, new = attn_res_triton(**mine, **keywords)
    assert_close("out", want, got, tolerance("attn_res", dtype))
    assert got.dtype == dtype
    assert (p is None) == (new is None)
    if p is not None:
        assert new.float().equal(p)
    assert mine["bank"].float().nan_to_num(7.0).equal(wide["bank"].nan_to_num(7.0))
    for name in ("prefix", "delta"):
        assert mine[name] is None or mine[name].equal(tensors[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_blocks", [0, 1, 3, 8])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_matches_reference(device, hidden, num_blocks, dtype):
    compare(*case(device, rows=8, hidden=hidden, num_blocks=num_blocks, dtype=dtype), dtype)


@pytest.mark.parametrize("write", [0, 1, 2, 3])
@pytest.mark.parametrize("absent", ["prefix", "delta", None])
def test_writes_the_sum_after_reading(device, absent, write):
    tensors, keywords = case(device)
    if absent:
        tensors[absent] = None
    compare(tensors, {**keywords, "write_block": write}, torch.float32)


def test_a_missing_summand_is_not_copied(device):
    tensors, keywords = case(device)
    tensors["delta"] = None
    _, new = attn_res_triton(**tensors, **keywords)
    assert new is tensors["prefix"]


def test_without_norm_gives_the_mixture(device):
    tensors, keywords = case(device)
    compare(tensors, {**keywords, "out_norm_weight": None}, torch.float32)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_extreme_values(device, scale):
    tensors, keywords = case(device, scale=scale)
    keywords["score_weight"] = keywords["score_weight"] * 50  # scores far apart
    compare(tensors, keywords, torch.float32)


def test_strided_tokens(device):
    tensors, keywords = case(device)
    for name, x in tensors.items():
        wide = torch.full((x.shape[0], 2, *x.shape[1:]), torch.nan, device=device)
        wide[:, 1] = x
        tensors[name] = wide[:, 1]
    compare(tensors, keywords, torch.float32)


def test_no_tokens(device):
    tensors, keywords = case(device, tokens=0)
    out, new = attn_res_triton(**tensors, **keywords)
    assert out.shape == new.shape == (0, 40)


def test_same_bits_twice(device):
    tensors, keywords = case(device, tokens=5, hidden=HIDDEN[-1])
    assert attn_res_triton(**tensors, **keywords)[0].equal(attn_res_triton(**tensors, **keywords)[0])


def test_invariant_gives_the_same_bits_in_any_batch(device):
    tensors, keywords = case(device, tokens=5, hidden=HIDDEN[-1])
    whole, _ = attn_res_triton_invariant(**tensors, **keywords)
    alone, _ = attn_res_triton_invariant(**{name: x[2:3] for name, x in tensors.items()}, **keywords)
    assert whole[2:3].equal(alone)


def test_a_token_of_nan_stays_alone(device):
    tensors, keywords = case(device, tokens=6)
    want, _ = attn_res_triton(**tensors, **keywords)
    tensors["prefix"][1] = torch.nan
    got, _ = attn_res_triton(**tensors, **keywords)
    assert got[1].isnan().all()
    others = [0, 2, 3, 4, 5]
    assert got[others].equal(want[others])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix": None, "delta": None}, "nothing to read"),
        ({"num_blocks": 5}, "num_blocks=5, but the bank has 4 rows"),
        ({"write_block": 4}, "write_block=4, but the bank has 4 rows"),
        ({"delta": torch.zeros(2, 40)}, "delta is torch.float32 of shape"),
        ({"score_weight": torch.zeros(39)}, "score_weight has shape"),
        ({"out_norm_weight": torch.zeros(39)}, "weight has shape"),
    ],
)
def test_refuses(device, change, message):
    tensors, keywords = case(device)
    before = tensors["bank"].clone()
    with pytest.raises(ConfigError, match=message):
        attn_res_triton(**{**tensors, **keywords, **change})
    assert tensors["bank"].nan_to_num(7.0).equal(before.nan_to_num(7.0))

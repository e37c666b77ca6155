"""cuDNN's attention through torch: what it takes, and that its lse and its masks are ours."""

from itertools import accumulate

import pytest
import torch

from k3lib.backends import sdpa
from k3lib.errors import ConfigError
from k3lib.ops import AttentionSpec, Target, attention_varlen, explain
from k3lib.testing import assert_close, tolerance

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: cuDNN has no other")
HOPPER = Target.of("cuda", "sm90", triton="3.6.0")


def spec(**facts):
    plain = {"heads": 12, "key_dim": 192, "value_dim": 128, "dtype": BF16, "causal": True}
    return AttentionSpec(**{**plain, **facts})


def test_it_is_chosen_on_hopper_for_the_widths_of_k3():
    assert explain(attention_varlen, spec(return_lse=True), target=HOPPER).chosen.name == "cudnn"


@pytest.mark.parametrize(("facts", "reason"), [
    ({"dtype": F32}, "needs bfloat16 or float16, got torch.float32"),
    ({"key_dim": 20}, "needs multiples of 8"),
    ({"value_dim": 256}, "needs multiples of 8 up to key_dim 192 and value_dim 128, got 192 and 256"),
    ({"deterministic": True}, "needs deterministic=False"),
])  # fmt: skip
def test_it_says_what_it_cannot_do(facts, reason):
    decision = explain(attention_varlen, spec(**facts), target=HOPPER)
    assert decision.chosen.name == "triton"
    assert reason in dict(decision.rejected)["cudnn"]


def test_other_chips_do_not_get_it():
    for target in (Target.of("cuda", "sm100", triton="3.6.0"), Target.of("rocm", "gfx950", triton="3.6.0")):
        assert "needs" in dict(explain(attention_varlen, spec(), target=target).rejected)["cudnn"]


def test_shapes_that_do_not_fit_are_refused():
    q, cu = torch.zeros(3, 2, 16), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ConfigError, match="do not fit together"):
        sdpa.attention_varlen_cudnn(q, q[:, :1], q, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, scale=1.0)


@pytest.mark.parametrize(("q_lengths", "k_lengths", "causal", "taken"), [
    ([8192], [8192], True, True), ([8192], [4096], False, True), ([8192], [4096], True, False),
    ([8191], [8191], True, False), ([2048], [2048], True, False), ([4096, 4096], [4096, 4096], True, False),
    ([0], [4096], False, False),
])  # fmt: skip
def test_it_gets_large_calls_of_lengths_that_come_again(q_lengths, k_lengths, causal, taken, monkeypatch):
    seen = []
    monkeypatch.setattr("k3lib.backends.triton.mla.attention_varlen_triton", lambda *_, **__: seen.append("triton"))

    def cudnn(q, k, v, *_, **__):
        seen.append("cudnn")
        return v, None

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn, raising=False)
    q, k = (torch.zeros(sum(n), 1, 8, dtype=BF16) for n in (q_lengths, k_lengths))
    cu_q, cu_k = (torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (q_lengths, k_lengths))
    sdpa.attention_varlen_cudnn(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=causal, scale=1.0)
    assert seen == ["cudnn" if taken else "triton"]


@gpu_only
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_lengths", "k_lengths"), [
    ([300], [300]), ([128], [128]), ([64], [640]), ([5], [700]), ([0], [7]), ([3], [0]), ([70, 0, 5], [70, 9, 300]),
], ids=str)  # fmt: skip
def test_it_matches_the_reference(q_lengths, k_lengths, causal, dtype, monkeypatch):
    monkeypatch.setattr(sdpa, "_GRID", 64)
    monkeypatch.setattr(sdpa, "_LEAST", 0)

    def draw(count, width, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, 3, width, generator=generator).to(dtype).cuda()

    q, k, kv = draw(sum(q_lengths), 192, 0), draw(sum(k_lengths), 192, 1), draw(sum(k_lengths), 256, 2)
    v = kv[..., 128:]  # as in the layer: a slice
    cu_q, cu_k = (torch.tensor([0, *accumulate(n)], dtype=torch.int32, device="cuda") for n in (q_lengths, k_lengths))
    call = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": causal, "scale": 192**-0.5}
    want, want_lse = attention_varlen.reference(q.float(), k.float(), v.float(), **call, return_lse=True)
    out, lse = sdpa.attention_varlen_cudnn(q, k, v, **call, return_lse=True)
    assert_close("out", want, out, tolerance("attention_varlen", dtype))
    assert_close("lse", want_lse, lse, tolerance("attention_varlen", dtype))
    assert lse.dtype == F32
    assert out.equal(sdpa.attention_varlen_cudnn(q, k, v, **call))

"""Adapters to packages that are not installed here: what they hand over and what they make of it, with stand-ins."""

import sys
import types

import pytest
import torch

from k3lib import conformance
from k3lib.backends.flash_kda import kda_chunk_flash_kda
from k3lib.backends.flash_mla import mla_decode_flash_mla
from k3lib.backends.humming import experts_humming
from k3lib.errors import ConfigError
from k3lib.ops import KDAParams, experts, kda_chunk, mla_decode
from k3lib.ops.quant import mxfp4_decode
from k3lib.testing import assert_close
from k3lib.trials import make_trial

F32 = torch.float32


def stand_in(monkeypatch, name, **members):
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, meta, *, softmax_scale, causal, use_legacy
):
    """As the package: `[B, 1, H, D]` over `[P, 64, 1, D]`; a row without keys has an lse of +inf and any output."""
    assert meta == "meta"
    assert use_legacy
    assert not causal
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    assert block_table.shape[0] == cache_seqlens.shape[0] == q.shape[0]
    one_each = torch.arange(len(q) + 1, dtype=torch.int32)
    out, lse = mla_decode.reference(
        q[:, 0], k_cache[:, :, 0], latent_dim=head_dim_v, page_table=block_table, key_lens=cache_seqlens,
        cu_seqlens=one_each, scale=softmax_scale, return_lse=True,
    )  # fmt: skip
    empty = cache_seqlens == 0
    out[empty], lse[empty] = 7.0, torch.inf
    return out[:, None], lse[..., None]


@pytest.mark.parametrize("contexts", [[70, 1, 130], [0, 65], []], ids=str)
def test_flash_mla_gets_a_request_for_each_token(monkeypatch, contexts):
    stand_in(
        monkeypatch, "flash_mla", flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=lambda: ("meta", None)
    )
    args = make_trial("mla_decode", dtype=F32, contexts=contexts, heads=3, lse=True).args
    got, lse = mla_decode_flash_mla(**args)
    want, want_lse = mla_decode.reference(**args)
    assert_close("out", want, got, 1e-5)
    assert_close("lse", want_lse, lse, 1e-5)
    assert mla_decode_flash_mla(**{**args, "return_lse": False}).equal(got)


def test_flash_mla_looks_up_the_request_of_each_token(monkeypatch):
    stand_in(
        monkeypatch, "flash_mla", flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=lambda: ("meta", None)
    )
    args = make_trial("mla_decode", dtype=F32, contexts=[70, 30, 9], heads=2).args
    args["cu_seqlens"] = torch.tensor([0, 2, 2, 3], dtype=torch.int32)  # two tokens, none, one
    args["key_lens"] = torch.tensor([69, 70, 9], dtype=torch.int32)
    assert_close("out", mla_decode.reference(**args), mla_decode_flash_mla(**args), 1e-5)
    with pytest.raises(ConfigError, match="does not fit pages"):
        mla_decode_flash_mla(**{**args, "q": args["q"][..., 1:]})


def flash_kda_fwd(
    q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, *, initial_state=None, final_state=None, cu_seqlens=None
):
    """As the package: `[1, T, H, 128]`, states in the order of the requests."""
    assert cu_seqlens.dtype == torch.int64
    assert dt_bias.shape == g.shape[2:]
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, out))
    state = slots = None
    if initial_state is not None:
        state = torch.cat([torch.zeros_like(initial_state[:1]), initial_state])
        slots = torch.arange(1, len(state), dtype=torch.int32)
    out[0] = kda_chunk.reference(
        q[0], k[0], v[0], g[0], beta[0], params=KDAParams(A_log, dt_bias, lower_bound), state=state, slots=slots,
        cu_seqlens=cu_seqlens, scale=scale,
    )  # fmt: skip
    if final_state is not None:
        final_state.copy_(state[1:])


@pytest.mark.parametrize("sizes", [{"lengths": [5, 0, 3], "absent": True}, {"lengths": [4], "state": None}], ids=str)
def test_flash_kda_states_are_gathered_and_scattered(monkeypatch, sizes):
    stand_in(monkeypatch, "flash_kda", fwd=flash_kda_fwd)
    want, got = (make_trial("kda_chunk", dtype=F32, key=16, value=16, **sizes).args for _ in range(2))
    result = kda_chunk_flash_kda(**got)
    assert_close("out", kda_chunk.reference(**want), result, 1e-5)
    if "state" in got:
        assert_close("state", want["state"][1:], got["state"][1:], 1e-5)
    with pytest.raises(ConfigError, match=r"a bound of the gate in \[-5, 0\], got -7"):
        kda_chunk_flash_kda(**{**got, "params": got["params"]._replace(lower_bound=-7.0)})


class HummingLayer:
    """As the package: an indexed product of MXFP4 weights, a row for each route, blocks of routes of one expert."""

    made = 0

    def __init__(self, *, shape_n, shape_k, weight_config, num_experts, torch_dtype):
        HummingLayer.made += 1
        assert weight_config == {"quant_method": "mxfp4"}
        self.shape, self.num_experts, self.humming_config = (shape_n, shape_k), num_experts, object()

    def load_from_tensors(self, tensors):
        self.weight = mxfp4_decode(tensors["weight"], tensors["weight_scale"], F32)
        assert self.weight.shape == (self.num_experts, *self.shape)

    def to(self, device):
        return self

    def transform(self):
        self.is_ready = True

    def __call__(self, x, *, sorted_ids, expert_ids, num_tokens_padded, top_k, compute_config, tuning_config):
        assert self.is_ready
        assert compute_config == {"gemm_type": "indexed"}
        block, routes = tuning_config[0][2]["block_shape"][0], len(x) * top_k
        out = torch.full((routes, self.shape[0]), torch.nan, device=x.device)
        for begin in range(0, int(num_tokens_padded), block):
            mine = sorted_ids[begin : begin + block].long()
            mine = mine[mine < routes]
            out[mine] = x[mine // top_k] @ self.weight[int(expert_ids[begin // block])].T
        return out


@pytest.mark.parametrize("sizes", [{"tokens": 5}, {"tokens": 9, "outside": True}, {"tokens": 0}], ids=str)
def test_humming_gets_blocks_of_routes(monkeypatch, device, sizes):
    pytest.importorskip("triton")
    config = {"block_shape": (8, 64, 64)}
    stand_in(monkeypatch, "humming")
    stand_in(monkeypatch, "humming.layer", HummingLayer=HummingLayer)
    stand_in(monkeypatch, "humming.tune", get_heuristics_config=lambda layer, *, shape_m, gemm_type: config)
    args = make_trial("experts", dtype=F32, experts=6, top_k=3, width=64, intermediate=32, device=device, **sizes).args
    HummingLayer.made = 0
    got = [experts_humming(**args) for _ in range(2)]
    assert HummingLayer.made == (2 if sizes["tokens"] else 0), "the layout is made once"
    assert_close("out", experts.reference(**args), got[0], 1e-5)
    assert got[0].equal(got[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("op", "name"), [(mla_decode, "flash_mla"), (experts, "humming")])
def test_the_real_package_conforms(op, name):
    impl = next(impl for impl in op.implementations() if impl.name == name)
    if reason := impl.why_not(None, op.local_target()):
        pytest.skip(reason)
    results = conformance.run([op.name], device="cuda", impls=[name])
    assert [r for r in results if r.outcome == "FAILED"] == []
    assert sum(r.outcome == "ok" for r in results) >= 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flash_mla_replays_in_a_graph_over_other_lengths():
    pytest.importorskip("flash_mla")
    args = make_trial("mla_decode", contexts=[700, 90, 64], heads=48, device="cuda").args
    args["key_lens"] = args["key_lens"].clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mla_decode_flash_mla(**args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = mla_decode_flash_mla(**args)
    for lens in ([700, 90, 64], [3, 80, 1]):
        args["key_lens"].copy_(torch.tensor(lens))
        graph.replay()
        torch.cuda.synchronize()
        wide = {**args, "q": args["q"].float(), "pages": args["pages"].float()}
        assert_close("out", mla_decode.reference(**wide), got, 4e-3)

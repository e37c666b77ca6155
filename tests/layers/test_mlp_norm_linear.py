"""Linear layers, embedding, norms and the dense MLP: values, cuts over ranks, dtypes that are kept."""

import pytest
import torch
from seeded import Ranks, copy_shard, draw, seed_weights
from torch.nn import functional as F

from k3lib.config import SiTU
from k3lib.errors import ConfigError
from k3lib.layers import GatedRMSNorm, Linear, RMSNorm, SiTUMLP, VocabEmbedding
from k3lib.layers.linear import Fused, placement
from k3lib.parallel import LOCAL, RankView
from k3lib.testing import assert_close, tolerance

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CUTS = [None, "out", "in"]


class Partial(RankView):
    """A rank whose sums stay partial, so that a test can add them itself."""

    def all_reduce(self, x, op="sum"):
        return x

    def all_gather(self, x, dim=0):
        return x


def mlp(tp=LOCAL, dtype=F32):
    return SiTUMLP(12, 16, SiTU(beta=4.0, linear_beta=25.0), tp=tp, dtype=dtype)


# ---- linear


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_make_the_whole(cut, size):
    full = seed_weights(Linear(8, 12, cut=cut, dtype=F32))
    parts = [copy_shard(full, Linear(8, 12, cut=cut, tp=RankView(r, size), dtype=F32)).weight for r in range(size)]
    if cut is None:
        assert all(torch.equal(part, full.weight) for part in parts)
    else:
        assert torch.equal(torch.cat(parts, dim=0 if cut == "out" else 1), full.weight)
        assert parts[0].numel() * size == full.weight.numel()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_partial_sums_add_up(size):
    full = seed_weights(Linear(8, 12, cut="in", dtype=F32))
    x = draw(5, 8)
    parts = [
        copy_shard(full, Linear(8, 12, cut="in", tp=Partial(r, size), dtype=F32))(x.chunk(size, -1)[r])
        for r in range(size)
    ]
    assert_close("sum", full(x), torch.stack(parts).sum(0), tolerance("linear", F32))


@pytest.mark.parametrize("size", [2, 4])
def test_columns_concatenate(size):
    full = seed_weights(Linear(8, 12, cut="out", dtype=F32))
    x = draw(5, 8)
    parts = [copy_shard(full, Linear(8, 12, cut="out", tp=RankView(r, size), dtype=F32))(x) for r in range(size)]
    assert_close("columns", full(x), torch.cat(parts, dim=-1), tolerance("linear", F32))


def test_a_unit_is_not_cut():
    Linear(8, 12, cut="out", unit=6, tp=RankView(0, 2))
    with pytest.raises(ConfigError, match=r"tp_size=4.*12 in units of 6.*one of 1, 2"):
        Linear(8, 12, cut="out", unit=6, tp=RankView(0, 4))


def test_a_width_that_is_no_multiple_of_its_unit_is_refused():
    with pytest.raises(ConfigError, match=r"12 in units of 5"):
        Linear(8, 12, cut="out", unit=5, tp=RankView(0, 2))


def test_placement_says_which_part_a_parameter_holds():
    place = placement(Linear(8, 12, cut="in", tp=RankView(1, 4)).weight)
    assert (place.full_shape, place.shard.dim, place.begin, place.end) == ((12, 8), 1, 2, 4)
    assert placement(torch.zeros(3)).full_shape == (3,)


def test_a_layer_on_meta_allocates_nothing():
    assert Linear(1 << 20, 1 << 20, device="meta").weight.is_meta


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(rank, size):
    with pytest.raises(ConfigError, match=f"rank={rank}"):
        RankView(rank, size)


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_rank_view_refuses_to_communicate(call):
    with pytest.raises(ConfigError, match=f"{call} over 3 ranks.*rank 1"):
        getattr(RankView(1, 3), call)(torch.zeros(3))


@pytest.mark.parametrize("outputs", [20, 1001])
def test_joined_weights_are_those_of_the_modules_with_or_without_padding(outputs):
    modules = [seed_weights(Linear(8, n, dtype=F32), seed=n) for n in (outputs, 30)]
    part, x = Fused(*modules), draw(3, 8)
    want = torch.cat([module(x) for module in modules], dim=-1)
    with torch.inference_mode():
        part.fuse()
        assert part.intact().shape[0] % 16 == 0 or outputs < 1000
        assert_close("joined", want, part(x), 1e-6)
        assert part.joined().equal(torch.cat([module.weight for module in modules]))
        modules[1].weight.zero_()
        assert not part(x)[:, outputs:].any()


@pytest.mark.parametrize(
    ("inputs", "outputs", "dtype", "columns"),
    [(8, 20, F32, True), (64, 20, F32, False), (8, 20, BF16, False), (540, 994, F32, False)],
    ids=["small", "wide", "bf16", "large"],
)
def test_small_tall_fp32_weights_are_joined_by_columns(inputs, outputs, dtype, columns):
    modules = [seed_weights(Linear(inputs, n, dtype=dtype), seed=n) for n in (outputs, 30)]
    before = [module.weight.clone() for module in modules]
    part = Fused(*modules)
    part.fuse()
    assert part.weight.stride() == ((1, part.weight.shape[0]) if columns else (inputs, 1))
    assert all(module.weight.equal(weight) for module, weight in zip(modules, before, strict=True))


# ---- embedding


@pytest.mark.parametrize("size", [1, 2, 4])
def test_embedding_of_ranks_adds_up(size):
    full = seed_weights(VocabEmbedding(20, 6, dtype=F32))
    ids = torch.tensor([0, 19, 4, 5, 10, 9, 15])
    results = Ranks(size).run(lambda group: copy_shard(full, VocabEmbedding(20, 6, tp=group, dtype=F32))(ids))
    for rows in results:
        assert torch.equal(rows, F.embedding(ids, full.weight))


@pytest.mark.parametrize(("ids", "bad"), [([3, 20], 20), ([-1, 3], -1), ([-2, 40], -2)])
def test_ids_outside_the_vocabulary_are_refused(ids, bad):
    with pytest.raises(ConfigError, match=f"token id {bad} is outside the vocabulary 0..19"):
        seed_weights(VocabEmbedding(20, 6, dtype=F32))(torch.tensor(ids))


def test_no_ids_give_no_rows():
    assert seed_weights(VocabEmbedding(20, 6, dtype=F32))(torch.zeros(0, dtype=torch.int64)).shape == (0, 6)


# ---- norms


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm(eps):
    norm = seed_weights(RMSNorm(12, eps, dtype=F32))
    x = draw(5, 12) * 1e-3
    assert_close("norm", F.rms_norm(x, (12,), norm.weight, eps), norm(x), tolerance("rms_norm", F32))


def test_rms_norm_rounds_before_the_weight_in_bf16():
    norm = seed_weights(RMSNorm(12, 1e-5, dtype=BF16))
    x = draw(50, 12, dtype=BF16)
    wide = x.float()
    want = norm.weight * (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(BF16)
    assert torch.equal(norm(x), want)


def test_gated_norm():
    norm = seed_weights(GatedRMSNorm(12, 1e-5, dtype=F32))
    x, gate = draw(5, 3, 12), draw(5, 3, 12, seed=1)
    want = F.rms_norm(x, (12,), norm.weight, 1e-5) * gate.sigmoid()
    assert_close("norm", want, norm(x, gate), tolerance("gated_rms_norm", F32))


@pytest.mark.parametrize(("dtype", "kept"), [(BF16, F32), (torch.float16, F32), (F64, F64), (F32, F32)])
def test_weight_of_the_gated_norm_is_kept_wide(dtype, kept):
    norm = seed_weights(GatedRMSNorm(12, 1e-5, dtype=F32))
    exact = norm.weight.clone()
    norm.to(dtype)
    assert norm.weight.dtype == kept
    assert torch.equal(norm.weight.to(F32), exact)
    assert GatedRMSNorm(12, 1e-5, dtype=dtype).weight.dtype == kept


# ---- MLP


def test_mlp_is_its_formula():
    layer = seed_weights(mlp())
    x = draw(7, 12)
    gate, up = layer.gate_proj(x), layer.up_proj(x)
    want = layer.down_proj(4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh())
    assert_close("mlp", want, layer(x), tolerance("situ_and_mul", F32))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_of_the_mlp_add_up(size):
    full = seed_weights(mlp()).requires_grad_(requires_grad=False)
    x = draw(7, 12)
    partial = [copy_shard(full, mlp(Partial(r, size)))(x) for r in range(size)]
    assert_close("partial", full(x), torch.stack(partial).sum(0), tolerance("linear", F32))
    for out in Ranks(size).run(lambda group: copy_shard(full, mlp(group))(x)):
        assert_close("reduced", full(x), out, tolerance("linear", F32))


def test_gradient_of_the_mlp_is_the_derivative():
    layer = seed_weights(mlp(dtype=F64))
    assert torch.autograd.gradcheck(layer, (draw(3, 12, dtype=F64).requires_grad_(),))

"""Attention residuals: golden vectors, online softmax, identities, what is written and what is not.

Shapes: T tokens, D hidden size.
"""

import pytest
import torch

from k3lib.errors import ConfigError
from k3lib.ops import AttnResSpec, attn_res, implementations, rms_norm
from k3lib.testing import assert_close, skip_unless_able, tolerance

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
every_impl = pytest.mark.parametrize("impl", implementations(attn_res), ids=str)


def draw(*shape, seed=0, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def read(op, prefix, delta, bank, *, score_weight, out_norm_weight=None, num_blocks=None, write_block=None, eps=1e-5):
    return op(
        prefix,
        delta,
        bank,
        score_weight=score_weight,
        out_norm_weight=out_norm_weight,
        num_blocks=bank.shape[1] if num_blocks is None else num_blocks,
        write_block=write_block,
        eps=eps,
        out_eps=1e-5,
    )


def able(impl, *args, **kwargs):
    skip_unless_able(impl, read(AttnResSpec.of, *args, **kwargs))
    return read(impl.run, *args, **kwargs)


def online(rows, score_weight, eps=1e-5):
    """One pass over the rows `[T, n, D]` with a running maximum, in fp64."""
    rows, score_weight = rows.double(), score_weight.double()
    highest = torch.full((rows.shape[0], 1), -torch.inf, dtype=F64)
    total, mix = torch.zeros_like(highest), torch.zeros_like(rows[:, 0])
    for row in rows.unbind(1):
        normed = row / (row.square().mean(-1, keepdim=True) + eps).sqrt()
        score = (normed * score_weight).sum(-1, keepdim=True)
        new = torch.maximum(highest, score)
        old_part, new_part = (highest - new).exp(), (score - new).exp()
        total, mix, highest = total * old_part + new_part, mix * old_part + new_part * row, new
    return mix / total


@pytest.mark.parametrize("name", ["one_block", "eight_blocks", "tiny_values", "bf16"])
@every_impl
def test_mix_reproduces_golden_vectors(impl, name, load_golden, device):
    vectors = load_golden("attn_res")
    case = {key: x.to(device) for key, x in vectors.case(f"mix.{name}").items()}
    weight = case["norm_weight"].float() * case["proj_weight"][0].float()
    eps = vectors.fact(f"mix.{name}.eps")
    out, _ = able(impl, case["prefix_sum"], None, case["blocks"], score_weight=weight, eps=eps)
    vectors.check(f"mix.{name}", "y", out.cpu(), atol=5e-5)


def run_stack(op, case, layers, block_size, eps):
    """The layer loop of the golden documents, with the sum of the last sublayer pending as `delta`."""
    w = {key[2:]: x for key, x in case.items() if key.startswith("w.")}
    score = lambda name: w[f"{name}_norm.weight"] * w[f"{name}_proj.weight"][0]  # noqa: E731
    prefix, delta, num_blocks = case["x"], None, 0
    bank = torch.full((*prefix.shape[:1], -(-layers // block_size), prefix.shape[1]), torch.nan)
    seen = {"in_attn": [], "in_mlp": [], "prefix": []}
    for i in range(layers):
        layer = f"layers.{i}"
        write = num_blocks if i % block_size == 0 else None
        mixed, prefix = read(
            op, prefix, delta, bank, score_weight=score(f"{layer}.self_attention_res"), num_blocks=num_blocks,
            write_block=write, eps=eps,
        )  # fmt: skip
        num_blocks += write is not None
        seen["in_attn"].append(mixed)
        delta = rms_norm(mixed, w[f"{layer}.input_layernorm.weight"], eps=eps) @ w[f"{layer}.attn"].T
        mixed, prefix = read(
            op, prefix, delta, bank, score_weight=score(f"{layer}.mlp_res"), num_blocks=num_blocks, eps=eps
        )
        seen["in_mlp"].append(mixed)
        delta = rms_norm(mixed, w[f"{layer}.post_attention_layernorm.weight"], eps=eps) @ w[f"{layer}.mlp"].T
        seen["prefix"].append(prefix + delta)
    output = {"score_weight": score("output_attn_res"), "num_blocks": num_blocks, "eps": eps}
    final, _ = read(op, prefix, delta, bank, **output)
    normed, _ = read(op, prefix, delta, bank, **output, out_norm_weight=w["norm.weight"])
    return {**{name: torch.stack(x) for name, x in seen.items()}, "blocks": bank, "final": final, "normed": normed}


@pytest.mark.parametrize("name", ["l9b4", "l5b1"])
@every_impl
def test_stack_of_layers_reproduces_golden_vectors(impl, name, load_golden):
    vectors = load_golden("attn_res")
    case = vectors.case(f"stack.{name}")
    skip_unless_able(impl, read(AttnResSpec.of, case["x"], None, case["x"][:, None], score_weight=case["x"][0]))
    facts = {key: vectors.fact(f"stack.{name}.{key}") for key in ("layers", "block_size", "eps")}
    for result, got in run_stack(impl.run, case, **facts).items():
        vectors.check(f"stack.{name}", result, got, atol=5e-5)


def test_gives_known_answers():
    bank = torch.tensor([[[1, 2, 3, 4], [4, 3, 2, 1]]], dtype=F64)
    prefix = torch.tensor([[-1, 0, 1, 0]], dtype=F64)
    out, _ = read(attn_res, prefix, None, bank, score_weight=torch.tensor([0.5, -0.25, 0.1, 1.0], dtype=F64))
    want = torch.tensor([[1.793081, 2.167540, 2.541998, 2.771226]], dtype=F64)
    assert (out - want).abs().max() < 1e-6


@pytest.mark.parametrize("num_blocks", [1, 2, 8])
@every_impl
def test_matches_the_online_softmax(impl, num_blocks, device):
    prefix, delta, bank, weight = draw(5, 32), draw(5, 32, seed=1), draw(5, 8, 32, seed=2), draw(32, seed=3)
    bank[:, num_blocks:] = torch.nan
    out, new = able(
        impl,
        prefix.to(device),
        delta.to(device),
        bank.to(device),
        score_weight=weight.to(device),
        num_blocks=num_blocks,
    )
    p = prefix + delta
    assert_close(
        "out", online(torch.cat([bank[:, :num_blocks], p[:, None]], 1), weight), out, tolerance("attn_res", F32)
    )
    assert_close("prefix", p, new, tolerance("attn_res", F32))


@pytest.mark.parametrize("absent", ["prefix", "delta"])
@every_impl
def test_either_summand_may_be_absent(impl, absent, device):
    x, bank, weight = draw(4, 16), draw(4, 2, 16, seed=1), draw(16, seed=2)
    summands = (None, x.to(device)) if absent == "prefix" else (x.to(device), None)
    out, new = able(impl, *summands, bank.to(device), score_weight=weight.to(device))
    assert_close("out", online(torch.cat([bank, x[:, None]], 1), weight), out, tolerance("attn_res", F32))
    assert new.cpu().equal(x)


@every_impl
def test_empty_bank_is_the_identity(impl, device):
    x, bank = draw(4, 16).to(device), torch.full((4, 3, 16), torch.nan, device=device)
    out, new = able(impl, x, None, bank, score_weight=draw(16, seed=1).to(device), num_blocks=0)
    assert_close("out", x, out, tolerance("attn_res", F32))
    assert new.equal(x)


@pytest.mark.parametrize("blocks", [1, 2, 9])
@every_impl
def test_zero_query_gives_the_plain_mean(impl, blocks, device):
    rows = draw(3, blocks, 8)
    out, _ = able(
        impl, rows[:, -1].to(device), None, rows[:, :-1].to(device), score_weight=torch.zeros(8, device=device)
    )
    assert_close("out", rows.mean(1), out, tolerance("attn_res", F32))


@every_impl
def test_mixes_raw_rows_whatever_their_size(impl, device):
    rows = draw(3, 4, 16) * torch.tensor([1e-3, 1.0, 1e3, 30.0])[:, None]
    weight = draw(16, seed=1)
    out, _ = able(impl, rows[:, -1].to(device), None, rows[:, :-1].to(device), score_weight=weight.to(device))
    assert_close("out", online(rows, weight), out, tolerance("attn_res", F32))


@every_impl
def test_large_scores_do_not_overflow(impl, device):
    rows, weight = draw(3, 4, 16), draw(16, seed=1) * 1e4
    out, _ = able(impl, rows[:, -1].to(device), None, rows[:, :-1].to(device), score_weight=weight.to(device))
    assert_close("out", online(rows, weight), out, tolerance("attn_res", F32))


@every_impl
def test_out_norm_is_the_rms_norm_of_the_mixture(impl, device):
    x, bank, weight, norm = (
        t.to(device) for t in (draw(4, 16), draw(4, 2, 16, seed=1), draw(16, seed=2), draw(16, seed=3))
    )
    mixture, _ = able(impl, x, None, bank, score_weight=weight)
    out, _ = able(impl, x, None, bank, score_weight=weight, out_norm_weight=norm)
    assert_close("out", rms_norm.reference(mixture, norm, eps=1e-5), out, tolerance("attn_res", F32))


@every_impl
def test_write_stores_the_sum_after_reading_and_begins_a_block(impl, device):
    prefix, delta, bank, weight = draw(4, 16), draw(4, 16, seed=1), draw(4, 3, 16, seed=2), draw(16, seed=3)
    got = bank.clone().to(device)
    out, new = able(
        impl, prefix.to(device), delta.to(device), got, score_weight=weight.to(device), num_blocks=1, write_block=1
    )
    p = prefix + delta
    assert new is None
    assert_close("out", online(torch.stack([bank[:, 0], p], 1), weight), out, tolerance("attn_res", F32))
    assert_close("bank", p, got[:, 1], tolerance("attn_res", F32))
    assert got[:, [0, 2]].cpu().equal(bank[:, [0, 2]])


def test_write_may_replace_a_row_that_was_just_read():
    x, bank, weight = draw(4, 16), draw(4, 2, 16, seed=1), draw(16, seed=2)
    want, _ = read(attn_res, x, None, bank, score_weight=weight)
    out, _ = read(attn_res, x, None, bank, score_weight=weight, write_block=1)
    assert out.equal(want)
    assert bank[:, 1].equal(x)


@every_impl
def test_without_a_write_nothing_is_touched(impl, device):
    given = [t.to(device) for t in (draw(4, 16), draw(4, 16, seed=1), draw(4, 3, 16, seed=2))]
    before = [t.clone() for t in given]
    able(
        impl,
        *given,
        score_weight=draw(16, seed=3).to(device),
        out_norm_weight=draw(16, seed=4).to(device),
        num_blocks=2,
    )
    assert all(a.equal(b) for a, b in zip(given, before, strict=True))


@every_impl
def test_bf16_is_rounded_once(impl, device):
    x, bank, weight = draw(9, 64, dtype=BF16), draw(9, 3, 64, seed=1, dtype=BF16), draw(64, seed=2)
    out, _ = able(impl, x.to(device), None, bank.to(device), score_weight=weight.to(device))
    want = online(torch.cat([bank, x[:, None]], 1), weight)
    assert out.dtype == BF16
    assert_close("out", want, out, tolerance("attn_res", BF16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 3}, "num_blocks=3, but the bank has 2 rows"),
        ({"num_blocks": -1}, "num_blocks=-1, but the bank has 2 rows"),
        ({"write_block": 2}, "write_block=2, but the bank has 2 rows"),
        ({"write_block": -1}, "write_block=-1, but the bank has 2 rows"),
    ],
)
def test_rows_that_the_bank_lacks_are_refused(changes, message):
    bank = draw(4, 2, 16)
    before = bank.clone()
    with pytest.raises(ConfigError, match=message):
        read(attn_res, draw(4, 16), None, bank, score_weight=draw(16), **changes)
    assert bank.equal(before)


def test_nothing_to_read_is_refused():
    with pytest.raises(ConfigError, match="prefix and delta are both None"):
        read(attn_res, None, None, draw(4, 2, 16), score_weight=draw(16))


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("norms", [False, True], ids=["mixture", "normed"])
def test_gradients_are_right(rows, norms):
    leaves = [
        draw(*shape, seed=i, dtype=F64).requires_grad_()
        for i, shape in enumerate([(2, 4), (2, 4), (2, rows - 1, 4), (4,), (4,)])
    ]

    def call(prefix, delta, bank, weight, norm):
        return read(attn_res, prefix, delta, bank, score_weight=weight, out_norm_weight=norm if norms else None)

    used = leaves if norms else [*leaves[:4], leaves[4].detach()]
    assert torch.autograd.gradcheck(call, used)

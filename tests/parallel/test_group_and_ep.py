"""Groups of ranks, and experts spread over them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeded import Ranks, draw

from k3lib.config import SiTU
from k3lib.errors import ConfigError
from k3lib.ops import ExpertWeights, experts
from k3lib.parallel import LOCAL, ExpertSpread, Placement, RankView, ep_experts
from k3lib.parallel.ep import choose_places
from k3lib.testing import assert_close

ACT = SiTU(beta=4.0, linear_beta=25.0)
EXPERTS, WIDTH, INNER, TOP_K = 8, 12, 10, 3


def weights_of(rank: int, size: int) -> ExpertWeights:
    count = EXPERTS // size
    mine = slice(rank * count, (rank + 1) * count)
    w13, w2 = draw(EXPERTS, 2 * INNER, WIDTH, seed=1), draw(EXPERTS, WIDTH, INNER, seed=2)
    return ExpertWeights(w13[mine], w2[mine], first_expert=rank * count)


def tokens_of(rank: int, count: int):
    generator = torch.Generator().manual_seed(90 + rank)
    ids = [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(count)]
    ids = torch.stack(ids) if ids else torch.zeros(0, TOP_K)
    return draw(count, WIDTH, seed=10 + rank), ids.int(), draw(count, TOP_K, seed=20 + rank).abs()


def test_a_group_of_one_is_the_identity():
    x = draw(4, 3)
    assert LOCAL.all_reduce(x) is LOCAL.all_gather(x) is LOCAL.reduce_scatter(x) is LOCAL.all_to_all(x, [4], [4]) is x


def test_a_view_of_a_rank_refuses_to_talk():
    view = RankView(1, 2)
    for call in (view.all_reduce, view.all_gather, view.reduce_scatter):
        with pytest.raises(ConfigError, match="over 2 ranks"):
            call(draw(2, 2))
    with pytest.raises(ConfigError, match="all_to_all over 2 ranks"):
        view.all_to_all(draw(2, 2), [1, 1], [1, 1])
    with pytest.raises(ConfigError, match="rank=2 is not one of 2 ranks"):
        RankView(2, 2)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("counts", [[5] * 8, [7, 0, 1, 30, 0, 2, 3, 64]], ids=["equal", "unequal"])
def test_experts_over_ranks_equal_all_experts_in_one_place(size, counts):
    everything = weights_of(0, 1)

    def work(group):
        x, ids, weights = tokens_of(group.rank, counts[group.rank])
        return ep_experts(x, ids, weights, weights_of(group.rank, size), act_fn=ACT, group=group)

    for rank, got in enumerate(Ranks(size).run(work)):
        x, ids, weights = tokens_of(rank, counts[rank])
        assert_close(f"rank {rank}", experts(x, ids, weights, everything, act_fn=ACT), got, 1e-5)


def test_a_rank_without_tokens_still_serves_the_others():
    def work(group):
        x, ids, weights = tokens_of(3, 6 if group.rank == 0 else 0)
        return ep_experts(x, ids, weights, weights_of(group.rank, 2), act_fn=ACT, group=group)

    first, second = Ranks(2).run(work)
    x, ids, weights = tokens_of(3, 6)
    assert_close("out", experts(x, ids, weights, weights_of(0, 1), act_fn=ACT), first, 1e-5)
    assert second.shape == (0, WIDTH)


def test_experts_of_another_rank_are_refused():
    x, ids, weights = tokens_of(0, 2)
    with pytest.raises(ConfigError, match="rank 0 of 1 with 4 experts must hold those from 0, got first_expert=4"):
        ep_experts(x, ids, weights, weights_of(1, 2), act_fn=ACT, group=LOCAL)


# ---- placement


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_balanced_placement_holds_every_expert_and_spreads_the_work(size, per_rank, extra, random):
    redundant = extra * size
    loads = [random.choice([0.0, 1.0, 5.0, 50.0]) for _ in range(size * per_rank)]
    placement = Placement.balanced(loads, size, redundant)
    assert placement.per_rank == per_rank + extra
    assert set(placement.experts) == set(range(len(loads)))
    copies = [placement.experts.count(e) for e in range(len(loads))]
    assert sum(copies) == len(loads) + redundant
    work = [sum(loads[e] / copies[e] for e in placement.of(rank)) for rank in range(size)]
    heaviest = max(load / count for load, count in zip(loads, copies, strict=True))
    # greedy: above the mean by one piece at most, unless places ran out on the other ranks
    if extra == 0 and per_rank == 1:
        assert sorted(work) == sorted(loads)
    assert max(work) <= sum(loads) / size + heaviest * placement.per_rank


def test_a_hot_expert_gets_the_copies_on_other_ranks():
    placement = Placement.balanced([100.0, 1, 1, 1], 4, 4)
    ranks = [rank for rank in range(4) if 0 in placement.of(rank)]
    assert len(ranks) == 4
    table = placement.table()
    ids = torch.zeros(8, 1, dtype=torch.int32)
    places = choose_places(ids, table).flatten()
    assert places.bincount(minlength=8)[places.unique()].tolist() == [2, 2, 2, 2]  # neighbours take different copies
    assert {placement.experts[p] for p in places.tolist()} == {0}
    assert choose_places(torch.tensor([[-1]], dtype=torch.int32), table).item() == -1


def test_placements_that_lose_an_expert_are_refused():
    for experts_, size, message in (((0, 2), 1, r"\[1\] lie nowhere"), ((0, 1, 2), 2, "3 places do not divide over 2")):
        with pytest.raises(ConfigError, match=message):
            Placement(experts_, size)
    with pytest.raises(ConfigError, match="4 experts and 1 copies do not divide over 2 ranks"):
        Placement.balanced([1.0] * 4, 2, 1)
    with pytest.raises(ConfigError, match="loads must be >= 0, got -1"):
        Placement.balanced([1.0, -1], 2)
    spread = ExpertSpread(ep=RankView(0, 2), placement=Placement.contiguous(4, 4))
    with pytest.raises(ConfigError, match="4 experts over 4 ranks does not fit num_experts=4 over ep_size=2"):
        spread.held(4)
    with pytest.raises(ConfigError, match="ep_size=2 does not divide num_experts=5"):
        ExpertSpread(ep=RankView(0, 2)).held(5)


@pytest.mark.parametrize("counts", [[5, 2, 0], [0, 0, 0], [1, 7, 3]])
def test_replicas_of_different_size_meet_in_the_same_experts(counts):
    def work(group):
        x, ids, weights = tokens_of(group.rank, counts[group.rank])
        spread = ExpertSpread(ep=group, replicas=group)
        held = spread.held(9)
        w13, w2 = draw(9, 2 * INNER, WIDTH, seed=1), draw(9, WIDTH, INNER, seed=2)
        prepared = ExpertWeights(w13[list(held)], w2[list(held)], first_expert=held[0])
        return spread.run(x, ids, weights, prepared, act_fn=ACT, counts=counts)

    everything = ExpertWeights(draw(9, 2 * INNER, WIDTH, seed=1), draw(9, WIDTH, INNER, seed=2))
    for rank, got in enumerate(Ranks(3).run(work)):
        x, ids, weights = tokens_of(rank, counts[rank])
        assert_close(f"rank {rank}", experts(x, ids, weights, everything, act_fn=ACT), got, 1e-5)


def test_tokens_of_replicas_that_were_counted_wrongly_are_refused():
    spread = ExpertSpread(ep=RankView(0, 2), replicas=RankView(0, 2))
    x, ids, weights = tokens_of(0, 3)
    with pytest.raises(ConfigError, match=r"tokens of each are \(2, 2\), replica 0 has 3"):
        spread.run(x, ids, weights, weights_of(0, 2), act_fn=ACT, counts=(2, 2))

"""Groups of ranks, and experts spread over them."""

import pytest
import torch
from seeded import Ranks, draw

from k3lib.config import SiTU
from k3lib.errors import ConfigError
from k3lib.ops import ExpertWeights, experts
from k3lib.parallel import LOCAL, RankView, ep_experts
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

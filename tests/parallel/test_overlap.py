"""Two computations beside each other: the results of one after the other, on any device."""

import pytest
import torch
from seeded import Ranks, copy_shard, draw, seed_weights

from k3lib.capture import capture
from k3lib.config import LatentMoEConfig, SiTU
from k3lib.layers import LatentMoE
from k3lib.parallel import LOCAL, RankView
from k3lib.parallel.streams import WAYS, beside, beside_in_graphs
from k3lib.testing import assert_close

gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: streams are there")
CONFIG = LatentMoEConfig(
    hidden_size=64, latent_size=32, intermediate_size=32, num_experts=8, top_k=3, num_shared_experts=2,
    renormalize=True, latent_norm=True, act=SiTU(beta=4.0, linear_beta=25.0),
)  # fmt: skip


def layers(device="cpu", dtype=torch.float32, way="always"):
    """A layer, and one with the same weights whose shared experts are overlapped."""
    found = [LatentMoE(CONFIG, overlap_shared=on, dtype=dtype, device=device) for on in ("never", way)]
    return [seed_weights(layer).requires_grad_(requires_grad=False) for layer in found]


@pytest.mark.parametrize("run", WAYS.values())
def test_without_streams_one_runs_after_the_other(run):
    order = []

    def give(name):
        order.append(name)
        return torch.ones(1) * len(order)

    results = run(torch.device("cpu"), lambda: give("first"), lambda: give("second"))
    assert order == ["first", "second"]
    assert [float(x) for x in results] == [1, 2]


def test_a_layer_with_overlapped_shared_experts_gives_the_same():
    plain, overlapped = layers()
    for tokens in (0, 1, 9):
        x = draw(tokens, 64)
        assert plain(x).equal(overlapped(x))


def test_overlapped_layers_of_several_ranks_give_the_same():
    whole, _ = layers()
    x = draw(5, 64)

    def work(group):
        return copy_shard(whole, LatentMoE(CONFIG, shared=group, overlap_shared="always", dtype=torch.float32))(x)

    for got in Ranks(2).run(work):
        assert_close("out", whole(x), got, 1e-5)


def test_collectives_of_two_groups_are_not_issued_at_once():
    """Unless somebody wants it: kernels of two communicators can wait for each other for ever."""
    one, other = RankView(0, 2), RankView(0, 2)
    for groups, way, used in [
        ({"tp": one}, "graphs", "graphs"),
        ({"tp": one, "shared": LOCAL}, "graphs", "graphs"),
        ({"tp": one, "shared": other}, "graphs", "never"),
        ({"tp": one, "shared": other}, "always", "always"),
        ({"tp": one, "shard_latent": True}, "graphs", "graphs"),
    ]:
        layer = LatentMoE(CONFIG, overlap_shared=way, device="meta", **groups)
        assert layer.overlap_shared == used


class Stop(Exception):
    """What a computation ends with."""


def fail():
    raise Stop


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu_only)])
def test_a_failure_of_either_is_the_failure(device):
    place = torch.device(device)
    for pair in ((fail, lambda: torch.ones(1)), (lambda: torch.ones(1), fail)):
        with pytest.raises(Stop):
            beside(place, *pair)
    assert beside(place, lambda: torch.ones(1, device=place), lambda: torch.ones(1, device=place))[1].item() == 1


@gpu_only
def test_both_run_on_streams_of_their_own_and_the_caller_sees_both():
    place, streams = torch.device("cuda"), []
    x = torch.ones(1 << 22, device=place)

    def work(times):
        streams.append(torch.cuda.current_stream())
        y = x
        for _ in range(times):
            y = y * 1.0 + 1.0
        return y

    for _ in range(20):  # nobody waits between them, and what they freed is used again
        first, second = beside(place, lambda: work(3), lambda: work(40))
        total = first + second
        del first, second
        other = torch.full_like(x, -7.0)  # where they were, if it may
        assert total.eq(45).all()
        del other
    assert len(set(streams)) == 2
    assert streams[1] == torch.cuda.current_stream()


@gpu_only
def test_the_default_uses_two_streams_in_graphs_alone():
    place, streams = torch.device("cuda"), []

    def work():
        streams.append(torch.cuda.current_stream())
        return torch.ones(4, device=place)

    def both():
        streams.clear()
        one, two = beside_in_graphs(place, work, work)
        return one + two

    assert both().tolist() == [2] * 4
    assert len(set(streams)) == 1
    graph, out = capture(both, place, torch.cuda.graph_pool_handle())
    assert len(set(streams)) == 2
    graph.replay()
    assert out.tolist() == [2] * 4


@gpu_only
def test_memory_of_the_side_stream_is_not_used_again_while_it_is_read():
    """What is freed while the other stream is late must not be given out to anybody meanwhile."""
    place = torch.device("cuda")
    n = 1 << 20
    wrong = torch.zeros((), device=place, dtype=torch.int64)
    for turn in range(40):  # streams are given out in turn, 32 of them: one is the side stream
        x = torch.full((n,), float(turn), device=place)

        def slow(x=x):
            torch.cuda._sleep(2_000_000)  # a millisecond
            return x + 1

        def quick(x=x):
            return x * 2

        late, early = (slow, quick) if turn % 2 else (quick, slow)
        one, two = beside(place, late, early)
        del x
        torch.cuda._sleep(1_000_000)
        both = one + two
        del one, two
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # another stream takes what is free
            junk = [torch.full((n,), -1.0, device=place) for _ in range(3)]
        wrong += both.ne(3.0 * turn + 1).sum()
        del junk, both
    assert wrong.item() == 0


@gpu_only
@pytest.mark.parametrize("way", ["graphs", "always"])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_a_captured_layer_equals_an_eager_one_bit_for_bit(tokens, way):
    plain, overlapped = layers("cuda", torch.bfloat16, way)
    x = draw(tokens, 64, dtype=torch.bfloat16).cuda()

    def chain(layer):
        y = x
        for _ in range(4):
            y = layer(y)
        return y

    with torch.inference_mode():
        want = chain(plain)
        assert want.isfinite().all()
        assert chain(overlapped).equal(want)
        graph, out = capture(lambda: chain(overlapped), torch.device("cuda"), torch.cuda.graph_pool_handle())
        for turn in range(3):
            x.copy_(draw(tokens, 64, seed=turn, dtype=torch.bfloat16))
            graph.replay()
            junk = torch.full((1 << 20,), 3.0, device="cuda")  # eager work between replays
            assert out.equal(chain(plain))
            del junk

"""Seeded weights and ranks that are threads: what the tests of layers and models share."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from k3lib.layers import KimiDeltaAttention
from k3lib.layers.linear import placement

__all__ = ["Ranks", "copy_shard", "draw", "seed_weights"]


def draw(*shape, seed=0, dtype=torch.float32):
    """Normal numbers; the same in every dtype, up to rounding."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def seed_weights(module, seed=0):
    """Fill all parameters so that every mechanism matters: decays of all speeds, norms off one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        x = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.endswith("A_log"):
            x = x.sigmoid() * 2 - 1
        elif name.endswith("e_score_correction_bias"):
            x = x * 0.1
        elif parameter.ndim == 1 and name.endswith("weight"):  # norms
            x = 1 + 0.2 * x
        elif parameter.ndim > 1 and not name.endswith("embed_tokens.weight"):
            x = x * parameter.shape[-1] ** -0.5
        parameter.data.copy_(x)
    for layer in module.modules():
        if isinstance(layer, KimiDeltaAttention):
            layer.A_log.data[layer.num_heads :] = 0
    return module


def copy_shard(full, rank):
    """Fill the parameters of one rank's layer from the whole layer, by the placement that each parameter states."""
    whole = dict(full.named_parameters())
    for name, parameter in rank.named_parameters():
        place, source = placement(parameter), whole[name].data
        if name.endswith("A_log"):
            owner = rank.get_submodule(name.removesuffix("A_log").removesuffix("."))
            source = owner.pad_decay(name, source)
        elif place.shard is not None:
            source = source.narrow(place.shard.dim, place.begin, place.end - place.begin)
        parameter.data.copy_(source)
    return rank


@dataclass(frozen=True)
class _Rank:
    rank: int
    ranks: "Ranks"

    @property
    def size(self):
        return self.ranks.size

    def _exchange(self, x):
        self.ranks.values[self.rank] = x
        self.ranks.barrier.wait()
        values = list(self.ranks.values)
        self.ranks.barrier.wait()
        return values

    def all_reduce(self, x, op="sum"):
        assert op == "sum"
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x, dim=0):
        return torch.cat(self._exchange(x), dim=dim)

    def all_to_all(self, x, send_counts, recv_counts):
        parts = [sent.split(counts)[self.rank] for sent, counts in self._exchange((x, list(send_counts)))]
        assert [len(part) for part in parts] == list(recv_counts)
        return torch.cat(parts)

    def reduce_scatter(self, x, dim=0):
        return self.all_reduce(x).chunk(self.size, dim)[self.rank]


class Ranks:
    """A group whose ranks are threads of this process: `Ranks(2).run(lambda group: ...)` gives one result a rank."""

    def __init__(self, size):
        self.size = size
        self.values = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def __getitem__(self, rank):
        return _Rank(rank, self)

    def run(self, work):
        def one(rank):
            try:
                with torch.no_grad():
                    return work(self[rank])
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))

"""The cache alone: pages and slots for requests of a serving stack of one's own."""

from k3lib import KimiK3Config
from k3lib.cache import CacheConfig, HybridCache, kv_bytes_per_token, state_bytes_per_slot
from k3lib.errors import CapacityError

config = KimiK3Config.tiny()
cache = HybridCache.allocate(config, CacheConfig(num_pages=4, page_size=16, num_slots=2), device="cpu")
print(f"a token takes {kv_bytes_per_token(config.text):.0f} bytes, a slot {state_bytes_per_slot(config.text)} bytes")

prompt = list(range(40))
lease = cache.open(prompt)  # takes a slot
cache.grow(lease, tokens=len(prompt))  # takes pages: 40 tokens need three of 16
print(f"slot {lease.slot}, pages {lease.pages}, free pages {cache.free_pages}")

batch = cache.make_batch([(lease, prompt)], mode="prefill")  # index tensors for the step
print(f"rows {batch.rows[:3].tolist()} ..., slots {batch.slots.tolist()}, page table {batch.page_table.tolist()}")
# here a model would run: its layers read and write cache.view(layer)
print("layer 0:", tuple(cache.view(0).state.shape), " layer 3:", tuple(cache.view(3).pages.shape))
cache.commit(lease, prompt)

cache.grow(lease, tokens=1)  # the third page has room: nothing is taken
print("after one more token:", lease.length, "committed,", len(lease.pages), "pages")

other = cache.open(prompt)
try:
    cache.grow(other, tokens=len(prompt))
except CapacityError as error:
    print("full:", error)  # nothing was taken

cache.close(lease)
cache.grow(other, tokens=len(prompt))
cache.close(other)
cache.check()
assert (cache.free_pages, cache.free_slots) == (4, 2)
print("all free again")

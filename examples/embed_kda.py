"""One KDA layer inside another model: whole sequences, then the same tokens one by one."""

import torch

from k3lib import Batch
from k3lib.config import KDAConfig
from k3lib.layers import KimiDeltaAttention

torch.manual_seed(0)
config = KDAConfig(hidden_size=256, num_heads=4, key_dim=32, value_dim=64, gate_lower_bound=-5.0)
kda = KimiDeltaAttention(config).requires_grad_(False)

x = torch.randn(10, 256)  # two sequences of 6 and 4 tokens, packed end to end
y = kda(x, Batch.lengths([6, 4]))
print("whole sequences:", tuple(y.shape))

state = kda.new_state(num_slots=2)  # rows 1 and 2; row 0 is the null slot
steps = [kda(x[[t, 6 + t]], Batch.decode(slots=[1, 2]), state) for t in range(4)]
first, second = torch.stack(steps, dim=1)
error = max((first - y[:4]).abs().max(), (second - y[6:]).abs().max())
print(f"token by token: largest difference {error:.1e}")
assert error < 1e-5

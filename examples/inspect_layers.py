"""Look inside a run: tensors of any module by hooks, and which kernels ran."""

from collections import Counter

import torch

from k3lib import Batch
from k3lib.batch import FeatureTap
from k3lib.ops import observe
from k3lib.server.tiny import tiny_model

model = tiny_model(dtype=torch.float32)

# every module has the name of its weights in the checkpoint; ordinary hooks see their outputs
seen = {}
for name, module in model.named_modules():
    if name.endswith(("self_attn", "mlp", "block_sparse_moe")):
        module.register_forward_hook(lambda _module, _inputs, out, name=name: seen.update({name: out}))

kernels = Counter()
taps = FeatureTap(layers=(0, 8), kind="prefix")  # the running sum after the first and the last layer
with observe(lambda op, _spec, kernel: kernels.update([f"{op}/{kernel}"])), torch.inference_mode():
    logits = model(Batch.pack([[1, 2, 3], [4, 5]]), taps=taps)

for name, out in list(seen.items())[:4]:
    print(f"{name:<34} {tuple(out.shape)}  rms {out.square().mean().sqrt():.3f}")
print(f"... {len(seen)} modules")
for kernel, count in sorted(kernels.items()):
    print(f"{count:3d} x {kernel}")
print("running sums:", tuple(taps.out.shape), " logits:", tuple(logits.shape))
assert len(seen) == 18
assert kernels["kda_recurrent/reference"] == 6

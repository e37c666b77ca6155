"""A kernel of one's own: register it, force it, ask why others were not chosen."""

import torch

from k3lib import Batch
from k3lib.errors import BackendUnavailable
from k3lib.ops import KDASpec, Target, explain, kda_recurrent, register, use_backend
from k3lib.server.tiny import tiny_model

calls = []


@register(
    kda_recurrent,
    name="mine",
    platforms={"cpu"},
    priority=5,
    supports=lambda spec: None if spec.saves == "none" else f"needs saves=none, got saves={spec.saves}",
)
def kda_recurrent_mine(
    q, k, v, gate, beta, *, params, state=None, slots=None, cu_seqlens, scale, saves=None, verify=None
):
    calls.append(v.shape[0])  # a real one would launch something here
    return kda_recurrent.reference(
        q, k, v, gate, beta, params=params, state=state, slots=slots, cu_seqlens=cu_seqlens, scale=scale
    )


model = tiny_model(dtype=torch.float32)
batch = Batch.pack([[1, 2, 3]])
with use_backend(kda_recurrent="reference"):
    want = model(batch)
with use_backend(kda_recurrent="mine"):
    got = model(batch)
print(f"mine ran {len(calls)} times, once in each KDA layer; equal logits: {torch.equal(want, got)}")
assert calls == [3] * 6

spec = KDASpec.from_config(model.config)
print(explain(kda_recurrent, spec))
print(explain(kda_recurrent, spec, target=Target.of("cuda", "sm90")))  # a chip that need not be here
try:
    with use_backend(kda_recurrent="mine"):
        kda_recurrent.resolve(spec, target=Target.of("cuda", "sm90"))
except BackendUnavailable as error:
    print("refused:", error)

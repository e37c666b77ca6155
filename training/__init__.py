"""Training of k3lib-nano, a small Kimi-K3 that answers: data, differentiable ops, optimiser, draft, export."""

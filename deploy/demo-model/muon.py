"""Muon: momentum whose matrix updates are made orthogonal by five Newton-Schulz steps (Jordan et al., 2024).

Matrices of one shape are handled as one batch. The update is scaled by 0.2 sqrt(max(rows, columns)), which
gives it about the size of an AdamW update (Liu et al., 2025), so both share one range of rates.
"""
import torch


def orthogonalize(g):
    """[B, m, n] -> nearly orthogonal matrices with the same singular vectors; in bf16 on a GPU."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                by_shape.setdefault(tuple(p.shape), []).append(p)
            for (rows, columns), same in by_shape.items():
                state = self.state[same[0]]
                gradient = torch.stack([p.grad for p in same]).float()
                if not state:
                    state["momentum"] = torch.zeros_like(gradient)
                state["momentum"].lerp_(gradient, 1 - group["momentum"])
                update = orthogonalize(gradient.lerp(state["momentum"], group["momentum"])).float()
                torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(same, list(update.unbind()), alpha=-group["lr"] * 0.2 * max(rows, columns) ** 0.5)

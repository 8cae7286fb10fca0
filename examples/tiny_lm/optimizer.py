"""Muon (Jordan et al. 2024): momentum whose update of each matrix is made orthogonal by a Newton-Schulz iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class Muon(torch.optim.Optimizer):
    """Muon in fp32, for matrices only. ``torch.optim.Muon`` iterates in bf16, slow on most CPUs."""

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; ``closure`` is not supported."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                velocity = self.state[matrix].setdefault("velocity", torch.zeros_like(matrix))
                velocity.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonal(matrix.grad.lerp(velocity, group["momentum"]))
                scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.add_(update, alpha=-group["lr"] * scale)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly U @ V.T of the singular value decomposition U, S, V.T of ``matrix`` [rows, columns]."""
    tall = matrix.shape[0] > matrix.shape[1]
    x: torch.Tensor = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x

"""Small decoders around an operator of their own, and exact attention to run them with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.library.custom_op("lamina_test::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, kind: str, slopes: Tensor | None = None) -> Tensor:
    raise RuntimeError("captured, never run")


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer: int, kind: str, slopes: Tensor | None = None) -> Tensor:
    return q.new_empty(q.shape[0], 1, q.shape[1], v.shape[3])


CUT = torch.ops.lamina_test.attend.default


class History:
    """Attention over each row's own past; ``rows`` names the sequences of the batch. Also a ``Send``."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        self.rows: list[int] = []
        self.events: list[str] = []
        self._queries: dict[int, Tensor] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, *_: object) -> Tensor:
        self.q(layer, q)
        self.kv_(layer, k, v)
        return self.receive(layer)

    def q(self, layer: int, q: Tensor) -> None:
        self.events.append(f"q{layer}")
        self._queries[layer] = q

    def kv_(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.events.append(f"kv{layer}")
        for i, row in enumerate(self.rows):
            keys, values = self.kv.setdefault((layer, row), ([], []))
            keys.append(k[i, :, 0])
            values.append(v[i, :, 0])

    def receive(self, layer: int) -> Tensor:
        q, outputs = self._queries.pop(layer), []
        for i, row in enumerate(self.rows):
            k, v = (torch.stack(t, 1).repeat_interleave(q.shape[1] // t[0].shape[0], 0) for t in self.kv[layer, row])
            scores = torch.einsum("hd,htd->ht", q[i, :, 0], k) / q.shape[-1] ** 0.5
            outputs.append(torch.einsum("ht,htd->hd", scores.softmax(-1), v))
        return torch.stack(outputs)[:, None]


class Sender:
    """Gives a History the interface of a Send."""

    def __init__(self, history: History) -> None:
        self.q, self.kv = history.q, history.kv_


def spread(first: float, last: float, count: int) -> Tensor:
    """Does as torch.linspace, which makes no meta tensors in a process that has loaded a model. transformers puts
    another function in its place for that time, and torch.device keeps the functions that it found at its first use.
    """
    return first + (last - first) * torch.arange(count) / (count - 1)


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(spread(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    heads, kv_heads, size = 4, 2, 8

    def __init__(self, hidden: int, layer: int, fused: str) -> None:
        super().__init__()
        self.layer, self.fused = layer, fused
        self.widths = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        if fused:
            self.qkv_proj = nn.Linear(hidden, sum(self.widths))
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, w) for w in self.widths)
        self.o_proj = nn.Linear(self.heads * self.size, hidden)
        self.register_buffer("frequencies", 1.0 / 100 ** spread(0.0, 1.0, self.size // 2)[None], persistent=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.fused:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        qkv, (q, k, _) = self.qkv_proj(x), self.widths
        if self.fused == "slices":
            return qkv[..., :q], qkv[..., q : q + k], qkv[..., q + k :]
        if self.fused == "split":
            return qkv.split(self.widths, dim=-1)
        if self.fused == "clamp":
            return qkv.clamp(-8, 8).split(self.widths, dim=2)
        group = qkv.unflatten(-1, (self.kv_heads, -1))  # interleaved by KV head: no contiguous part is Q
        width = self.size * self.heads // self.kv_heads
        q_, k_, v_ = group.split([width, self.size, self.size], dim=-1)
        return q_.flatten(-2), k_.flatten(-2), v_.flatten(-2)

    def forward(self, x: Tensor, positions: Tensor, run: Callable[..., Tensor], slopes: Tensor | None) -> Tensor:
        q, k, v = (t.view(t.shape[0], 1, -1, self.size).transpose(1, 2) for t in self.project(x))
        angle = positions[:, None, :, None].float() @ self.frequencies.float()  # a GEMM of one element: cheap
        cos, sin = torch.cat([angle.cos()] * 2, -1).to(q.dtype), torch.cat([angle.sin()] * 2, -1).to(q.dtype)
        q, k = (t * cos + torch.cat([-t[..., self.size // 2 :], t[..., : self.size // 2]], -1) * sin for t in (q, k))
        return self.o_proj(run(q, k, v, self.layer, "full", slopes).flatten(2))


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.silu(self.up(x))))


class Layer(nn.Module):
    def __init__(self, hidden: int, layer: int, fused: str, parallel: bool, mlp: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.parallel = parallel
        self.norm, self.attention, self.mlp = RMSNorm(hidden), Attention(hidden, layer, fused), mlp(hidden)
        if not parallel:
            self.mlp_norm = RMSNorm(hidden)

    def forward(self, x: Tensor, positions: Tensor, run: Callable[..., Tensor], slopes: Tensor | None) -> Tensor:
        h = self.norm(x)
        attended = self.attention(h, positions, run, slopes)
        if self.parallel:
            return x + attended + self.mlp(h)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A decode step; ``run`` is the cut operator or, to compute the truth, attention over a History."""

    def __init__(
        self,
        layers: int = 3,
        hidden: int = 32,
        *,
        fused: str = "",
        parallel: bool = False,
        tied: bool = False,
        mlp: Callable[[int], nn.Module] = Mlp,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, hidden)
        self.layers = nn.ModuleList(Layer(hidden, i, fused, parallel, mlp) for i in range(layers))
        self.norm, self.head = RMSNorm(hidden), nn.Linear(hidden, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.slopes = nn.Parameter(torch.arange(4.0))
        self.run: Callable[..., Tensor] = CUT

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, self.run, self.slopes * 2)
        return self.head(self.norm(x))

"""The demo model in torch: a small qwen3moe, with training kernels shaped for a CPU.

Decides the architecture and how it is computed; knows nothing of data, schedules or files.
Weights, residual stream, norms, router and loss are float32; matrix products and attention run in
the `precision` asked for (bfloat16 in training: several times faster on a CPU that has it).

Shapes below: N tokens = B windows of T, d = n_embd, E experts, K used, f = expert width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The model's sizes, in llama.cpp's words."""

    n_vocab: int = 4096
    n_embd: int = 256
    n_layer: int = 6
    n_head: int = 4
    n_head_kv: int = 2
    head_size: int = 64
    n_expert: int = 32
    n_expert_used: int = 4
    n_ff_expert: int = 128
    rms_epsilon: float = 1e-6
    rope_base: float = 10_000.0
    n_ctx_train: int = 512


@dataclass
class RouterStatistics:
    """What the routers did in one forward pass.

    `balance` is the mean over layers of E * sum(load * probability), 1 when even; `z` the mean
    squared log-partition of the router logits; `load` [n_layer, E] each expert's share of the
    assignments, times E (1 = the mean).
    """

    balance: Tensor
    z: Tensor
    load: Tensor


# oneDNN makes a kernel for every new shape. Expert batches change size every step, so each
# expert's rows are padded to a multiple of this; unpadded, training spends its time making kernels.
ROW_PADDING = 64
# Rows of the output matrix product at a time, so that the logits stay in the L3 cache.
LOSS_ROWS = 1024
# Elements of attention scores at a time, for the same reason.
ATTENTION_ELEMENTS = 32 * 256 * 256


class ExpertMixture(torch.autograd.Function):
    """The weighted sum of the chosen experts' SwiGLU networks, tokens sorted by expert.

    rows [N, d]; gate_up [E, d, 2f] (gate first); down [E, f, d]; weights and experts [N, K].
    Returns [N, d] in the precision of `rows`.
    """

    @staticmethod
    def forward(
        context: Any, rows: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor
    ) -> Tensor:
        n_tokens, n_embd = rows.shape
        n_used = experts.shape[1]
        n_expert, _, doubled = gate_up.shape
        width = doubled // 2
        assignment = experts.reshape(-1)
        order = torch.argsort(assignment, stable=True)
        counts = torch.bincount(assignment, minlength=n_expert)
        padded = (counts + ROW_PADDING - 1) // ROW_PADDING * ROW_PADDING
        first = torch.cumsum(counts, 0) - counts
        first_padded = torch.cumsum(padded, 0) - padded
        expert_of = assignment.index_select(0, order)
        position = torch.arange(order.numel()) - first[expert_of] + first_padded[expert_of]
        n_rows = int(padded.sum())
        bounds = [0, *torch.cumsum(padded, 0).tolist()]
        # place[p]: the padded row of assignment p; token[r]: the token of padded row r.
        place = torch.empty_like(order)
        place[order] = position
        token = torch.zeros(n_rows, dtype=torch.long)
        token[position] = order // n_used
        # Padding rows have weight zero, so what they compute changes nothing.
        scale = rows.new_zeros(n_rows, 1)
        scale[position, 0] = weights.reshape(-1).index_select(0, order).to(rows.dtype)

        sorted_rows = rows.index_select(0, token)
        hidden = rows.new_empty(n_rows, doubled)
        for expert in range(n_expert):
            begin, end = bounds[expert], bounds[expert + 1]
            if end > begin:
                torch.mm(sorted_rows[begin:end], gate_up[expert], out=hidden[begin:end])
        activated = functional.silu(hidden[:, :width]) * hidden[:, width:]
        scaled = activated * scale
        contributions = rows.new_empty(n_rows, n_embd)
        for expert in range(n_expert):
            begin, end = bounds[expert], bounds[expert + 1]
            if end > begin:
                torch.mm(scaled[begin:end], down[expert], out=contributions[begin:end])
        context.save_for_backward(sorted_rows, hidden, scaled, activated, scale, gate_up, down, token, place)
        context.bounds = bounds
        return sum_over_used(contributions.index_select(0, place).view(n_tokens, n_used, n_embd))

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        sorted_rows, hidden, scaled, activated, scale, gate_up, down, token, place = context.saved_tensors
        bounds = context.bounds
        n_expert, width, _ = down.shape
        n_tokens, n_embd = grad.shape
        n_used = place.numel() // n_tokens
        grad_out = grad.contiguous().index_select(0, token)
        grad_scaled = torch.empty_like(scaled)
        grad_down = torch.zeros_like(down)
        for expert in range(n_expert):
            begin, end = bounds[expert], bounds[expert + 1]
            if end > begin:
                torch.mm(grad_out[begin:end], down[expert].t(), out=grad_scaled[begin:end])
                torch.mm(scaled[begin:end].t(), grad_out[begin:end], out=grad_down[expert])
        grad_scale = (grad_scaled * activated).sum(1, dtype=torch.float32)
        grad_activated = grad_scaled * scale
        gate, up = hidden[:, :width], hidden[:, width:]
        sigmoid = torch.sigmoid(gate)
        silu = sigmoid * gate
        grad_hidden = torch.empty_like(hidden)
        torch.mul(grad_activated, silu, out=grad_hidden[:, width:])
        torch.mul(grad_activated * up, sigmoid + silu * (1 - sigmoid), out=grad_hidden[:, :width])
        grad_sorted = torch.empty_like(sorted_rows)
        grad_gate_up = torch.zeros_like(gate_up)
        for expert in range(n_expert):
            begin, end = bounds[expert], bounds[expert + 1]
            if end > begin:
                torch.mm(grad_hidden[begin:end], gate_up[expert].t(), out=grad_sorted[begin:end])
                torch.mm(sorted_rows[begin:end].t(), grad_hidden[begin:end], out=grad_gate_up[expert])
        grad_rows = sum_over_used(grad_sorted.index_select(0, place).view(n_tokens, n_used, n_embd))
        grad_weights = grad_scale.index_select(0, place).view(n_tokens, n_used)
        return grad_rows, grad_gate_up, grad_down, grad_weights, None


def sum_over_used(values: Tensor) -> Tensor:
    """[N, K, d] summed over K, left to right (a CPU does this far faster than `sum(1)`)."""
    total = values[:, 0]
    for slot in range(1, values.shape[1]):
        total = total + values[:, slot]
    return total


class TiedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `rows @ embedding.T`, its gradient made in the same pass.

    rows [N, d], embedding [n_vocab, d], targets [N]. Natural logarithm.
    """

    @staticmethod
    def forward(context: Any, rows: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        grad_rows = torch.empty_like(rows)
        grad_embedding = torch.zeros(embedding.shape, dtype=torch.float32)
        loss = torch.zeros(())
        for begin in range(0, rows.shape[0], LOSS_ROWS):
            part, target = rows[begin : begin + LOSS_ROWS], targets[begin : begin + LOSS_ROWS, None]
            probability = torch.softmax(part @ embedding.t(), -1, dtype=torch.float32)
            of_target = probability.gather(1, target)
            loss = loss - of_target.clamp_min(1e-30).log().sum()
            probability.scatter_add_(1, target, torch.full_like(of_target, -1.0))
            grad_logits = probability.to(rows.dtype)
            torch.mm(grad_logits, embedding, out=grad_rows[begin : begin + LOSS_ROWS])
            grad_embedding += grad_logits.t() @ part
        context.save_for_backward(grad_rows, grad_embedding)
        context.embedding_dtype = embedding.dtype
        return loss / rows.shape[0]

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_rows, grad_embedding = context.saved_tensors
        scale = grad / grad_rows.shape[0]
        return (
            grad_rows * scale.to(grad_rows.dtype),
            (grad_embedding * scale).to(context.embedding_dtype),
            None,
        )


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension, in float32."""
    rows = rows.float()
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding, NEOX style: the halves of a head are the pairs."""
    left, right = heads.chunk(2, -1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1)


def attention_inputs(
    rows: Tensor, norm: Tensor, qkv: Tensor, query_norm: Tensor, key_norm: Tensor,
    cosine: Tensor, sine: Tensor, windows: int, shape: Shape, precision: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries [B*n_head_kv, G*T, head_size], keys and values [B*n_head_kv, T, head_size].

    G query heads share a key head; queries are scaled already.
    """
    n_head, n_kv, size = shape.n_head, shape.n_head_kv, shape.head_size
    length = rows.shape[0] // windows
    normed = rms_norm(rows, norm, shape.rms_epsilon).to(precision)
    heads = (normed @ qkv.t()).view(windows, length, n_head + 2 * n_kv, size)
    queries, keys, values = heads.split([n_head, n_kv, n_kv], 2)
    queries = rotate(rms_norm(queries, query_norm, shape.rms_epsilon), cosine, sine) * size**-0.5
    keys = rotate(rms_norm(keys, key_norm, shape.rms_epsilon), cosine, sine)

    def by_key_head(part: Tensor) -> Tensor:
        return part.to(precision).permute(0, 2, 1, 3).reshape(windows * n_kv, -1, size)

    return by_key_head(queries), by_key_head(keys), by_key_head(values)


def route(
    rows: Tensor, norm: Tensor, router: Tensor, shape: Shape, precision: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(normed rows [N, d], mean probability [E], weights [N, K], experts [N, K], z)."""
    normed = rms_norm(rows, norm, shape.rms_epsilon)
    logits = normed @ router.t()
    probability = torch.softmax(logits, -1)
    chosen, experts = torch.topk(probability, shape.n_expert_used, -1)
    z = torch.logsumexp(logits, -1).pow(2).mean()
    return normed.to(precision), probability.mean(0), chosen / chosen.sum(-1, keepdim=True), experts, z


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, windows: int) -> Tensor:
    """Causal attention; returns [N, n_head * head_size]. mask is [1, G*T, T]."""
    length, size = keys.shape[1], keys.shape[2]
    at_once = max(1, ATTENTION_ELEMENTS // (length * length))
    parts = []
    for begin in range(0, queries.shape[0], at_once):
        piece = slice(begin, begin + at_once)
        scores = torch.baddbmm(mask, queries[piece], keys[piece].transpose(1, 2))
        parts.append(torch.bmm(torch.softmax(scores, -1), values[piece]))
    heads = torch.cat(parts).view(windows, -1, length, size)
    return heads.transpose(1, 2).reshape(windows * length, -1)


class Layer(nn.Module):
    """One block's weights: attention, then the mixture of experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, size = shape.n_embd, shape.head_size
        branch = 0.04 / math.sqrt(2 * shape.n_layer)
        self.attention_norm = nn.Parameter(torch.ones(d))
        self.query_norm = nn.Parameter(torch.ones(size))
        self.key_norm = nn.Parameter(torch.ones(size))
        self.qkv = normal((shape.n_head + 2 * shape.n_head_kv) * size, d, deviation=0.04)
        self.attention_output = normal(d, shape.n_head * size, deviation=branch)
        self.expert_norm = nn.Parameter(torch.ones(d))
        self.router = normal(shape.n_expert, d, deviation=0.02)
        self.gate_up = normal(shape.n_expert, d, 2 * shape.n_ff_expert, deviation=0.04)
        self.down = normal(shape.n_expert, shape.n_ff_expert, d, deviation=branch)


def normal(*size: int, deviation: float) -> nn.Parameter:
    """A parameter drawn from a normal distribution by torch's global generator."""
    return nn.Parameter(torch.randn(*size) * deviation)


class Dropout:
    """Dropout masks as random pieces of one pool made once: no random number per element.

    `reseed` fixes the pieces of a step, so a resumed run draws what an unbroken one would have.
    """

    POOL = 1 << 24

    def __init__(self, rate: float, seed: int) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        kept = torch.rand(self.POOL, generator=self.generator) >= rate
        self.pool = kept.to(torch.float32) / (1 - rate)

    def reseed(self, step: int) -> None:
        self.generator.manual_seed((self.seed << 32) + step)

    def __call__(self, values: Tensor) -> Tensor:
        last = self.POOL - values.numel()
        begin = int(torch.randint(0, last, (), generator=self.generator))
        return values * self.pool[begin : begin + values.numel()].view_as(values)


class DemoModel(nn.Module):
    """The language model; the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = normal(shape.n_vocab, shape.n_embd, deviation=0.02)
        self.output_norm = nn.Parameter(torch.ones(shape.n_embd))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))
        self.attention_inputs = attention_inputs
        self.route = route
        self.positions: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    def fuse(self) -> None:
        """Fuses the two element-wise parts (norms, rotation, routing) with torch.compile."""
        self.attention_inputs = torch.compile(attention_inputs, dynamic=False)
        self.route = torch.compile(route, dynamic=False)

    def position_tables(self, length: int, precision: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Cosines and sines [1, T, 1, head_size / 2], and the causal mask [1, G*T, T]."""
        if (length, precision) not in self.positions:
            shape = self.shape
            exponent = torch.arange(0, shape.head_size, 2).float() / shape.head_size
            angle = torch.outer(torch.arange(length).float(), 1.0 / shape.rope_base**exponent)
            mask = torch.full((length, length), float("-inf")).triu(1)
            mask = mask.repeat(shape.n_head // shape.n_head_kv, 1).to(precision)
            self.positions[length, precision] = (
                angle.cos()[None, :, None, :], angle.sin()[None, :, None, :], mask[None],
            )  # fmt: skip
        return self.positions[length, precision]

    def hidden(
        self, ids: Tensor, precision: torch.dtype, dropout: Dropout | None = None
    ) -> tuple[Tensor, RouterStatistics]:
        """The rows before the output matrix [N, d], for token ids [B, T]."""
        shape = self.shape
        windows, length = ids.shape
        cosine, sine, mask = self.position_tables(length, precision)
        rows = functional.embedding(ids.reshape(-1), self.embedding)
        rows = rows if dropout is None else dropout(rows)
        balance, z, loads = torch.zeros(()), torch.zeros(()), []
        for module in self.layers:
            layer = cast(Layer, module)
            queries, keys, values = self.attention_inputs(
                rows, layer.attention_norm, layer.qkv.to(precision), layer.query_norm, layer.key_norm,
                cosine, sine, windows, shape, precision,
            )  # fmt: skip
            attended = attend(queries, keys, values, mask, windows)
            branch = attended @ layer.attention_output.to(precision).t()
            rows = rows + (branch if dropout is None else dropout(branch))
            normed, probability, weights, experts, layer_z = self.route(
                rows, layer.expert_norm, layer.router, shape, precision
            )
            counts = torch.bincount(experts.reshape(-1), minlength=shape.n_expert).float()
            load = counts / experts.numel() * shape.n_expert
            balance = balance + (load * probability).sum()
            z = z + layer_z
            loads.append(load)
            branch = ExpertMixture.apply(
                normed, layer.gate_up.to(precision), layer.down.to(precision), weights, experts
            )
            rows = rows + (branch if dropout is None else dropout(branch))
        statistics = RouterStatistics(balance / shape.n_layer, z / shape.n_layer, torch.stack(loads))
        return rms_norm(rows, self.output_norm, shape.rms_epsilon).to(precision), statistics

    def logits(self, ids: Tensor, precision: torch.dtype = torch.float32) -> Tensor:
        """Logits [B, T, n_vocab] for token ids [B, T]."""
        rows, _ = self.hidden(ids, precision)
        return (rows @ self.embedding.to(precision).t()).view(*ids.shape, -1)

    def loss(
        self, ids: Tensor, targets: Tensor, precision: torch.dtype, dropout: Dropout | None = None
    ) -> tuple[Tensor, RouterStatistics]:
        """Mean cross-entropy in nats of targets [B, T] given ids [B, T]."""
        rows, statistics = self.hidden(ids, precision, dropout)
        loss = TiedCrossEntropy.apply(rows, self.embedding.to(precision), targets.reshape(-1))
        return loss, statistics

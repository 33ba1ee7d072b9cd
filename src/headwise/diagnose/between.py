"""What heads have in common: inner products of their forms, which do not change with a head's
basis, and what is lost where two KV heads share keys or values, or all pass through a latent."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.diagnose.forms import TINY, energy_rank
from headwise.diagnose.layouts import Heads

WIDE = 1536  # rows above which products of all heads with all are in 32 bits
MOST_PAIRS = 128  # of KV heads in a layer whose sharing is computed; the most alike first


# ---- inner products of forms


def query_key_gram(heads: Heads) -> Tensor:
    """<A_i, A_j> for all heads (H, H): sum((Q_i Q_j^T) * (K_i K_j^T)), over all distances where
    coordinates rotate."""
    k = heads.k
    if not len(heads.pairs):
        return _gram(heads.q, k, heads.group)
    still = heads.still
    total = heads.q.new_zeros(heads.q.shape[0], heads.q.shape[0])
    if len(still):
        total += _gram(heads.q[:, still], k[:, still], heads.group)
    # A pair (a, b) of coordinates is a complex one: q = a + ib. Turning both by any angle leaves
    # Re(conj(q_i) . q_j  *  conj(k_j) . k_i) / 2 on average.
    for pair in heads.pairs:
        total += _complex_gram(heads.q[:, pair], k[:, pair], heads.group)
    return total


def _complex_gram(q: Tensor, k: Tensor, group: int) -> Tensor:
    def products(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        g = (flat @ flat.T).view(x.shape[0], 2, x.shape[0], 2)
        real = g[:, 0, :, 0] + g[:, 1, :, 1]
        return torch.complex(real, g[:, 0, :, 1] - g[:, 1, :, 0])

    right = products(k).repeat_interleave(group, 0).repeat_interleave(group, 1)
    return (products(q) * right.conj()).real / 2


def value_output_gram(heads: Heads) -> Tensor:
    """<B_i, B_j> for all heads: sum((O_i O_j^T) * (V_i V_j^T))."""
    return _gram(heads.o, heads.v, heads.group)


def _gram(left: Tensor, right: Tensor, group: int) -> Tensor:
    """sum((left_i left_j^T) * (right_i right_j^T)), a block of rows at a time and half of them."""
    H, R, _ = left.shape
    small = torch.float32 if H * R > WIDE else torch.float64
    a, b = left.flatten(0, 1).to(small), right.flatten(0, 1).to(small)
    scale_a, scale_b = (t.abs().amax().clamp_min(TINY) for t in (a, b))
    a, b = a / scale_a, b / scale_b
    right_gram = (b @ b.T).view(right.shape[0], right.shape[1], right.shape[0], -1)
    total = left.new_zeros(H, H)
    step = max(1, 512 // R)
    for i in range(0, H, step):
        rows = range(i, min(H, i + step))
        products = (a[i * R : rows[-1] * R + R] @ a[i * R :].T).view(len(rows), R, H - i, R)
        for n, h in enumerate(rows):
            other = right_gram[h // group].transpose(0, 1)  # (K, R, R)
            other = other.repeat_interleave(group, 0)[i:]
            total[h, i:] = (products[n].transpose(0, 1) * other).sum((-2, -1), dtype=torch.float64)
    total = torch.triu(total) + torch.triu(total, 1).T
    return total * (scale_a.double() * scale_b.double()) ** 2


def cosines(gram: Tensor) -> Tensor:
    """Inner products over norms; 0 where a form is 0."""
    norm = gram.diagonal().clamp_min(0).sqrt()
    return torch.where(
        (norm[:, None] * norm) > 0, gram / (norm[:, None] * norm).clamp_min(TINY), 0.0
    ).clamp(-1, 1)


def effective_heads(cosine: Tensor) -> float:
    """exp of the entropy of the eigenvalues of the cosines as shares: H where all forms are at
    right angles, 1 where all are the same."""
    share = torch.linalg.eigvalsh(cosine).clamp_min(0)
    share = share / share.sum().clamp_min(TINY)
    return float((-torch.xlogy(share, share).sum()).exp())


# ---- sharing


def sharing_losses(heads: Heads, part: str) -> Tensor:
    """What is lost where KV heads i and j share their keys (part "k") or values ("v"): the share of
    the energy of both heads' forms that lies outside the best shared map. (K, K), NaN where it was
    not computed.

    Queries (outputs) stay each head's own and adapt. Under rotary positions a shared key is shared
    pair by pair, so that rotation and sharing commute.
    """
    left, right = (heads.q, heads.k) if part == "k" else (heads.o, heads.v)
    K, group = right.shape[0], heads.group
    found = torch.full((K, K), torch.nan, dtype=torch.float64)
    if K < 2 or not left.shape[1]:
        return found
    # Every KV head as its queries weigh it: with sum_h Q_h Q_h^T = L L^T, the rows L^T K.
    weight = (left @ left.mT).view(K, group, *left.shape[1:2], -1).sum(1)
    grams = _weighted(heads, weight, right) if part == "v" or not len(heads.pairs) else None
    pairs = torch.combinations(torch.arange(K))
    if grams is None:
        loss = _complex_losses(heads, weight)
        found[:] = loss
        found.fill_diagonal_(torch.nan)
        return found
    blocks, energy = grams
    alike = blocks.square().sum((-2, -1)).sqrt()
    alike = alike / (alike.diagonal()[:, None] * alike.diagonal()).clamp_min(TINY).sqrt()
    order = alike[pairs[:, 0], pairs[:, 1]].argsort(descending=True)[:MOST_PAIRS]
    i, j = pairs[order].T
    joint = torch.cat((torch.cat((blocks[i, i], blocks[i, j]), 2),
                       torch.cat((blocks[j, i], blocks[j, j]), 2)), 1)  # fmt: skip
    values = torch.linalg.eigvalsh(joint)
    kept = values[:, right.shape[1] :].sum(-1)
    loss = 1 - kept / (energy[i] + energy[j]).clamp_min(TINY)
    found[i, j] = found[j, i] = loss.clamp(0, 1)
    return found


def _weighted(heads: Heads, weight: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """L_i^T K_i K_j^T L_j for all pairs (K, K, R, R), and each head's energy."""
    K, R, _ = right.shape
    L = _root(weight)
    flat = right.flatten(0, 1)
    small = torch.float32 if K * R > WIDE else torch.float64
    gram = (flat.to(small) @ flat.to(small).T).double().view(K, R, K, R).transpose(1, 2)
    blocks = L.mT[:, None] @ gram @ L[None]
    diagonal = blocks.diagonal(dim1=0, dim2=1)  # (R, R, K)
    return blocks, diagonal.diagonal(dim1=0, dim2=1).sum(-1)


def _root(gram: Tensor) -> Tensor:
    """L with L L^T = gram."""
    L, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed.any()):
        values, vectors = torch.linalg.eigh(gram)
        L = vectors * values.clamp_min(0).sqrt()[..., None, :]
    return L


def _complex_losses(heads: Heads, weight: Tensor) -> Tensor:
    """Sharing of keys that rotate: of each pair of coordinates the best complex map for both heads;
    of those that stand still the best real one."""
    K = heads.k.shape[0]
    lost = heads.k.new_zeros(K, K)
    total = heads.k.new_zeros(K)
    for pair in heads.pairs:
        a = weight[:, pair, pair].sum(-1)  # |q|^2 of the group
        flat = heads.k[:, pair].flatten(0, 1)
        g = (flat @ flat.T).view(K, 2, K, 2)
        real = g[:, 0, :, 0] + g[:, 1, :, 1]
        cross = real.square() + (g[:, 0, :, 1] - g[:, 1, :, 0]).square()
        energy = a * real.diagonal()
        mixed = a[:, None] * a * cross
        trace = energy[:, None] + energy
        gap = ((energy[:, None] - energy).square() + 4 * mixed).clamp_min(0).sqrt()
        lost += (trace - gap) / 4  # the smaller eigenvalue, over two as the energy is
        total += energy / 2
    still = heads.still
    if len(still):
        rows = weight[:, still][:, :, still]
        blocks, energy = _weighted(heads, rows, heads.k[:, still])
        pairs = torch.combinations(torch.arange(K))
        for i, j in pairs.tolist():
            joint = torch.cat((torch.cat((blocks[i, i], blocks[i, j]), 1),
                               torch.cat((blocks[j, i], blocks[j, j]), 1)), 0)  # fmt: skip
            values = torch.linalg.eigvalsh(joint).clamp_min(0)
            part = values[: len(still)].sum()
            lost[i, j] += part
            lost[j, i] += part
        total += energy
    return (lost / (total[:, None] + total).clamp_min(TINY)).clamp(0, 1)


def shareable(loss: Tensor, within: float) -> int:
    """How many KV heads have a partner with whom they could share within this loss."""
    best = torch.nan_to_num(loss, nan=2.0).amin(-1) if len(loss) > 1 else loss.new_full((1,), 2)
    return int((best <= within).sum())


# ---- a latent for all keys and values


def latent_widths(heads: Heads, shares: tuple[float, ...]) -> tuple[int, list[int]]:
    """The rows of all keys and values together (of a latent model its latent), and how many
    dimensions hold each share of their energy: the width that a latent would need by the weights
    alone."""
    rows = heads.latent
    if rows is None:
        rows = torch.cat((heads.k.flatten(0, 1), heads.v.flatten(0, 1)))
    width = rows.shape[0]
    if rows.shape[0] > rows.shape[1]:
        rows = rows.T
    small = torch.float32 if rows.shape[0] > WIDE // 2 else torch.float64
    rows = (rows / rows.abs().amax().clamp_min(TINY)).to(small)
    values = torch.linalg.eigvalsh(rows @ rows.T).flip(0).clamp_min(0).double().sqrt()
    return width, [int(energy_rank(values, share)) for share in shares]

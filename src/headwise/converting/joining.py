"""Fewer dimensions for keys and values: one KV head of lower rank, or one for several.

Keys k_i of the KV heads of a group are read by queries of second moment W_i. The shared keys k' of
R' coordinates with the smallest error of all scores, queries free to adapt, are the R' leading
principal components of the rows W_i^1/2 k_i side by side: k' = sum_i E_i^T W_i^1/2 k_i and
q' = E_i^T W_i^-1/2 q. For one KV head that is the best approximation of the product Q^T K of this
rank. Values are the same with W_i = sum_h O_h O_h^T, outputs adapting.

Coordinates that rotate do so in pairs, which are complex numbers. A map commutes with rotation
where it multiplies every pair by a complex number, so pairs of one frequency are joined by one
complex component, and the rank of a head falls by leaving pairs out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.converting.maps import HeadMaps
from headwise.converting.moments import Moments
from headwise.diagnose.forms import TINY

SMALL = 1e-12  # of the largest eigenvalue, below which a direction is not used
MOST_SWAPS = 200


@dataclass(frozen=True, kw_only=True)
class Rotated:
    """Which coordinates of a head rotate together, and which pairs stay in which new place."""

    pairs: Tensor  # (P, 2)
    still: Tensor  # coordinates that do not
    kept: Sequence[int] = ()  # pairs that stay, in order
    new_pairs: Tensor  # (P', 2): their new coordinates
    new_still: Tensor


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Maps, and the share of the energy of scores and outputs that they lose."""

    maps: HeadMaps
    scores_lost: float
    outputs_lost: float


def join(
    moments: Moments, groups: Sequence[Sequence[int]], R: int, V: int, rotated: Rotated
) -> Joined:
    """One KV head of rank R and value width V for each group of old ones."""
    K, group = moments.kv_heads, moments.group
    old_R, old_V = moments.q.shape[-1], moments.o.shape[-1]
    importance = moments.importance()
    # Heads that write nothing still have scores; they count a little, so that nothing is divided by
    # zero.
    importance = importance + 1e-9 * importance.mean() + TINY
    queries = (moments.q * importance[:, None, None]).view(K, group, old_R, old_R).sum(1)
    outputs = moments.o.view(K, group, old_V, old_V).sum(1)
    alone = all(len(members) == 1 for members in groups)
    to_q = torch.zeros(K, old_R, R, dtype=torch.float64)
    to_o = torch.zeros(K, old_V, V, dtype=torch.float64)
    k_maps, v_maps = [], []
    lost = torch.zeros(2, 2, dtype=torch.float64)  # scores, outputs; lost, of how much
    for members in groups:
        picked = torch.tensor(members)
        keys = _sub(moments.k, picked, K)
        k_map, q_map, k_lost = _keys(queries[picked], keys, R, rotated)
        values = torch.block_diag(moments.own[members[0]]) if alone else None
        values = _sub(moments.v, picked, K) if values is None else values
        v_map, o_map, v_lost = shared(outputs[picked], values, V)
        to_q[picked], to_o[picked] = q_map, o_map
        k_maps.append(k_map)
        v_maps.append(v_map)
        lost += torch.stack((k_lost, v_lost))
    # Query heads follow their KV heads.
    order = [g for members in groups for g in members]
    source = torch.tensor([g * group + i for g in order for i in range(group)])
    return Joined(
        maps=HeadMaps(
            source=source, q=to_q[source // group], members=torch.tensor([*map(list, groups)]),
            k=torch.stack(k_maps), v=torch.stack(v_maps), o=to_o[source // group],
        ),
        scores_lost=float(lost[0, 0] / lost[0, 1].clamp_min(TINY)),
        outputs_lost=float(lost[1, 0] / lost[1, 1].clamp_min(TINY)),
    )  # fmt: skip


def _sub(joint: Tensor, picked: Tensor, K: int) -> Tensor:
    """The rows and columns of some KV heads."""
    width = len(joint) // K
    rows = (picked[:, None] * width + torch.arange(width)).flatten()
    return joint[rows][:, rows]


def shared(weights: Tensor, joint: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Maps (J, A, width) of J heads' rows to shared ones, and back for those who read them; energy
    lost, and of how much.

    `weights` (J, A, A) are the second moments of what reads each head's rows, `joint` (J A, J A)
    those of the rows.
    """
    J, A, _ = weights.shape
    if J == 1 and width == A:
        one = torch.eye(A, dtype=torch.float64)[None]
        return one, one, weights.new_zeros(2)
    root, inverse = roots(weights)
    wide = torch.block_diag(*root)
    energy, E = torch.linalg.eigh(symmetric(wide @ joint @ wide))
    count = min(width, J * A)
    E, energy = E.flip(1), energy.flip(0).clamp_min(0)
    parts = E[:, :count].reshape(J, A, count)
    forward, backward = root @ parts, inverse @ parts
    # Both sides are made equally large, which changes no product.
    sizes = forward.square().sum().sqrt(), backward.square().sum().sqrt()
    if min(sizes) > 0:
        ratio = (sizes[1] / sizes[0]).sqrt()
        forward, backward = forward * ratio, backward / ratio
    missing = width - count
    pad = torch.nn.functional.pad
    lost = torch.stack((energy[count:].sum(), energy.sum()))
    return pad(forward, (0, missing)), pad(backward, (0, missing)), lost


def symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def roots(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Square roots of positive semidefinite matrices, and their pseudo-inverses."""
    values, vectors = torch.linalg.eigh(symmetric(moments))
    used = values > SMALL * values[..., -1:].clamp_min(TINY)
    root = torch.where(used, values.clamp_min(0).sqrt(), 0.0)
    inverse = torch.where(used, values.clamp_min(TINY).rsqrt(), 0.0)
    return (vectors * root[..., None, :]) @ vectors.mT, (
        vectors * inverse[..., None, :]
    ) @ vectors.mT


def _keys(
    weights: Tensor, joint: Tensor, R: int, rotated: Rotated
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for keys, coordinates that rotate pair by pair."""
    if not len(rotated.pairs):
        return shared(weights, joint, R)
    J, A, _ = weights.shape
    forward, backward, lost = keys_of_pairs(weights, joint, R, rotated)
    still, new_still = rotated.still, rotated.new_still
    if len(still):
        rows = (torch.arange(J)[:, None] * A + still).flatten()
        part = weights[:, still[:, None], still]
        f, b, missing = shared(part, joint[rows][:, rows], len(new_still))
        forward[:, still[:, None], new_still] = f
        backward[:, still[:, None], new_still] = b
        lost += missing
        if J == 1 and len(still) == len(new_still):  # exact: its energy is not computed above
            lost[1] += (part[0] * joint[rows][:, rows]).sum()
    return forward, backward, lost


def pair_grams(weights: Tensor, joint: Tensor, pairs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For every pair of coordinates what reads it in each head (J,), and the complex second moments
    of the heads' keys (J, J)."""
    J, A, _ = weights.shape
    by_head = joint.view(J, A, J, A)
    for a, b in pairs.tolist():
        real = by_head[:, a, :, a] + by_head[:, b, :, b]
        imaginary = by_head[:, b, :, a] - by_head[:, a, :, b]
        size = (weights[:, a, a] + weights[:, b, b]).clamp_min(0) / 2
        yield size, torch.complex(real, imaginary)


def keys_of_pairs(
    weights: Tensor, joint: Tensor, R: int, rotated: Rotated
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for what rotates alone: one complex component for every pair that stays."""
    J, A, _ = weights.shape
    forward, backward = (torch.zeros(J, A, R, dtype=torch.float64) for _ in range(2))
    lost = torch.zeros(2, dtype=torch.float64)
    places = {pair: place for place, pair in enumerate(rotated.kept)}
    for p, (size, gram) in enumerate(pair_grams(weights, joint, rotated.pairs)):
        a, b = rotated.pairs[p].tolist()
        energy = torch.einsum("j,jj->", size.to(gram), gram).real
        lost[1] += energy
        if p not in places:
            lost[0] += energy
            continue
        one = torch.ones(J, dtype=torch.complex128)
        if J > 1:
            root = size.sqrt()
            values, vectors = torch.linalg.eigh(root[:, None] * gram * root)
            lost[0] += values[:-1].clamp_min(0).sum()
            back = torch.where(root > 0, root.clamp_min(TINY).reciprocal(), 0.0)
            # k' = sum_i conj(e_i) w_i k_i and k_i = e_i / w_i k', so q' = conj(e_i) / w_i q.
            to_key = vectors[:, -1].conj() * root
            to_query = vectors[:, -1].conj() * back
            ratio = to_query.abs().square().sum() / to_key.abs().square().sum().clamp_min(TINY)
            ratio = ratio.sqrt().sqrt().clamp_min(1e-100)
            to_key, to_query = to_key * ratio, to_query / ratio
        else:
            to_key = to_query = one
        i, j = rotated.new_pairs[places[p]].tolist()
        for out, factor in ((forward, to_key), (backward, to_query)):
            out[:, a, i], out[:, b, j] = factor.real, factor.real
            out[:, a, j], out[:, b, i] = factor.imag, -factor.imag
    return forward, backward, lost


def pair_energies(moments: Moments, pairs: Tensor) -> Tensor:
    """The energy of the scores of every pair of coordinates that rotate, all heads together, as a
    share of that of all of them (P,)."""
    K, group, A = moments.kv_heads, moments.group, moments.q.shape[-1]
    q = moments.q.diagonal(dim1=1, dim2=2) * moments.importance()[:, None]
    q = q.view(K, group, A).sum(1)
    k = moments.k.diagonal().view(K, A)
    a, b = pairs.T
    energy = ((q[:, a] + q[:, b]) * (k[:, a] + k[:, b])).sum(0)
    return energy / energy.sum().clamp_min(TINY)


# ---- which KV heads are joined


def by_index(K: int, count: int) -> list[list[int]]:
    """Neighbours together, as mean pooling does it."""
    size = K // count
    return [list(range(i * size, (i + 1) * size)) for i in range(count)]


def by_similarity(moments: Moments, count: int, rotated: Rotated) -> list[list[int]]:
    """Groups of equal size, such that the energy lost by joining pairs within them is small.

    Greedy: the cheapest pair first, then whoever costs least beside the members; then pairs of
    heads change places as long as that helps.
    """
    K = moments.kv_heads
    size = K // count
    if size == 1 or count == 1:
        return by_index(K, count)
    cost = pair_costs(moments, rotated)
    groups: list[list[int]] = []
    free = set(range(K))
    while free:
        left = sorted(free)
        seed = min(itertools.combinations(left, 2), key=lambda pair: float(cost[pair]))
        members = list(seed)
        while len(members) < size:
            rest = [i for i in left if i not in members]
            members.append(min(rest, key=lambda i: float(cost[i, members].sum())))
        groups.append(sorted(members))
        free -= set(members)
    for _ in range(MOST_SWAPS):
        if not _swap(groups, cost):
            break
    return sorted(groups)


def _swap(groups: list[list[int]], cost: Tensor) -> bool:
    """Exchange the two heads of different groups that helps most; False where none does."""

    def within(members: list[int]) -> float:
        return float(cost[members][:, members].sum()) / 2

    best: tuple[float, int, int, int, int] | None = None
    for (a, first), (b, second) in itertools.combinations(enumerate(groups), 2):
        before = within(first) + within(second)
        for i, j in itertools.product(range(len(first)), range(len(second))):
            one, other = list(first), list(second)
            one[i], other[j] = second[j], first[i]
            gain = before - within(one) - within(other)
            if gain > 1e-12 * abs(before) and (best is None or gain > best[0]):
                best = gain, a, b, i, j
    if best is None:
        return False
    _, a, b, i, j = best
    groups[a][i], groups[b][j] = groups[b][j], groups[a][i]
    groups[a].sort()
    groups[b].sort()
    return True


def pair_costs(moments: Moments, rotated: Rotated) -> Tensor:
    """What is lost where two KV heads become one, in the energy of what the layer writes (K, K)."""
    K, group = moments.kv_heads, moments.group
    R, V = moments.q.shape[-1], moments.o.shape[-1]
    importance = moments.importance()
    queries = (moments.q * importance[:, None, None]).view(K, group, R, R).sum(1)
    outputs = moments.o.view(K, group, V, V).sum(1)
    every = Rotated(
        pairs=rotated.pairs, still=rotated.still, kept=range(len(rotated.pairs)),
        new_pairs=rotated.pairs, new_still=rotated.still,
    )  # fmt: skip
    cost = torch.zeros(K, K, dtype=torch.float64)
    for i, j in itertools.combinations(range(K), 2):
        picked = torch.tensor([i, j])
        _, _, keys = _keys(queries[picked], _sub(moments.k, picked, K), R, every)
        _, _, values = shared(outputs[picked], _sub(moments.v, picked, K), V)
        cost[i, j] = cost[j, i] = keys[0] + values[0]
    return cost

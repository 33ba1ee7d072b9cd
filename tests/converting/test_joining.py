"""Cut ranks, joined heads and latents against algebra written out: dense forms and their SVD."""

import dataclasses

import pytest
import torch
from support.planted_heads import (
    codegen,
    dense,
    fused,
    grouped,
    planted,
    separate,
    transposed,
    write,
)
from support.tolerance import seeded

from headwise.converting.joining import Rotated, by_similarity, join, pair_energies
from headwise.converting.latent import to_latent
from headwise.converting.maps import padded, spread
from headwise.converting.moments import by_distance, moments_of_weights
from headwise.converting.parts import raw_heads, stored_parts
from headwise.converting.target import slots
from headwise.converting.turning import phases
from headwise.diagnose.checkpoints import open_checkpoint
from headwise.diagnose.forms import turn_of
from headwise.diagnose.layouts import Heads, heads_of, rotation

NO_PAIRS = torch.zeros(0, 2, dtype=torch.long)


def heads_from(q, k, v, o, biases=None, rope=0, theta=10_000.0):
    """`Heads` of given tensors, the first `rope` coordinates rotating."""
    from headwise.diagnose.layouts import Layout

    layout = Layout(num_heads=len(q), rope_dim=rope, rope_theta=theta)
    pairs, frequencies = rotation(layout, q.shape[1])
    return Heads(
        q=q, k=k, v=v, o=o, dim=q.shape[2], ov=o[:0], latent=None, biases=biases or {}, pairs=pairs,
        frequencies=frequencies,
    )  # fmt: skip


def plain_rotated(R, new):
    return Rotated(
        pairs=NO_PAIRS, still=torch.arange(R), new_pairs=NO_PAIRS, new_still=torch.arange(new)
    )


def turning(heads, kept=None, new=None):
    """All pairs of `heads`, or some of them in heads of rank `new`."""
    if kept is None:
        kept, new = range(len(heads.pairs)), heads.q.shape[1]
    from headwise.diagnose.layouts import Layout

    rope = 2 * len(kept)
    new_pairs = rotation(Layout(num_heads=1, rope_dim=rope), new)[0]
    still = torch.arange(rope, new)
    return Rotated(pairs=heads.pairs, still=heads.still, kept=kept, new_pairs=new_pairs,
                   new_still=still)  # fmt: skip


def outputs_of(heads):
    """What every head writes from every value: O_h^T V_g, dense."""
    return dense(heads.o, heads.v)


def away(new, old):
    """The difference as a share; moments are squares, which halves the digits."""
    return float((new - old).norm() / old.norm())


LAYOUTS = {
    "separate": separate,
    "fused": fused,
    "grouped": grouped,
    "transposed": transposed,
    "codegen": codegen,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_planted_rank_is_kept_exactly_in_every_layout(name, tmp_path):
    alone = name in ("transposed", "codegen")  # no grouped heads there
    H, K, R, D = 8, 8 if alone else 4, 8, 64 if alone else 37
    q, k, v, o = planted(H=H, K=K, R=R, V=R, D=D)
    # Keys and values of every KV head span 4 of 8 dimensions.
    g = seeded(5)
    thin = (torch.randn(2, K, R, 4, generator=g) @ torch.randn(2, K, 4, R, generator=g)).double()
    k, v = thin[0] @ k, thin[1] @ v
    config, tensors = LAYOUTS[name](q, k, v, o)
    checkpoint = open_checkpoint(write(tmp_path, config, tensors))
    layout = checkpoint.layouts[0]
    layout = dataclasses.replace(layout, rope_dim=0)
    parts = checkpoint.parts(0)
    if name == "transposed":
        bias = torch.randn(3, H, R, generator=g).double()
        bias[2] = (thin[1] @ bias[2, ..., None])[..., 0]  # values stay in what they span
        parts["qkv_bias"] = bias.flatten()
        parts["o_bias"] = torch.randn(D, generator=g).double()
    heads = raw_heads(parts, layout)
    done = join(moments_of_weights(heads, 0.3), [[i] for i in range(K)], 4, 4, plain_rotated(R, 4))
    assert done.scores_lost < 1e-12
    assert done.outputs_lost < 1e-12
    new = stored_parts(done.maps.weights(heads), parts, layout)
    assert {part: t.dtype for part, t in new.items()} == {p: t.dtype for p, t in parts.items()}
    narrow = dataclasses.replace(layout, head_dim=4, v_head_dim=4)
    back = heads_of(new, narrow)
    assert back.q.shape == (H, 4, D)
    assert away(dense(back.q, back.k), dense(heads.q, heads.k)) < 1e-7
    assert away(outputs_of(back), outputs_of(heads)) < 1e-7
    if name == "transposed":
        # A bias of the queries adds b_q . K x to the scores of a key.
        for kind, other in (("q", "k"), ("v", "o")):
            was = heads.biases[kind][:, None] @ getattr(heads, other)
            now = back.biases[kind][:, None] @ getattr(back, other)
            assert away(now, was) < 1e-7, kind
        assert torch.equal(new["o_bias"], parts["o_bias"])


def test_cut_is_the_best_approximation_of_each_product():
    heads = heads_from(*planted(H=3, K=3, R=7, V=5, D=19))
    done = join(moments_of_weights(heads, 1.0), [[0], [1], [2]], 3, 2, plain_rotated(7, 3))
    new = done.maps.weights(heads)
    for forms, cut, rank in (
        (dense(heads.q, heads.k), dense(new.q, new.k), 3),
        (outputs_of(heads), outputs_of(new), 2),
    ):
        tail = torch.linalg.svdvals(forms)[:, rank:].square().sum(-1)
        assert torch.allclose((forms - cut).square().sum((1, 2)), tail, rtol=1e-9)


def test_calibrated_cut_is_the_best_for_scores_of_the_data():
    heads = heads_from(*planted(H=1, K=1, R=6, V=6, D=13))
    g = seeded(3)
    x = torch.randn(400, 13, generator=g).double() @ torch.randn(13, 13, generator=g).double()
    q, k, v = (x @ t[0].mT for t in (heads.q, heads.k, heads.v))
    keys = k - k.mean(0)
    plain = moments_of_weights(heads, 1.0)
    moments = dataclasses.replace(
        plain, q=(q.T @ q)[None] / 400, k=keys.T @ keys / 400, v=v.T @ v / 400,
        own=(v.T @ v)[None] / 400,
    )  # fmt: skip
    scores = q @ keys.T
    best = float(torch.linalg.svdvals(scores)[2:].square().sum())
    errors = []
    for given in (moments, plain):
        maps = join(given, [[0]], 2, 6, plain_rotated(6, 2)).maps
        cut = (q @ maps.q[0]) @ (keys @ maps.k[0, 0]).T
        errors.append(float((scores - cut).square().sum()))
    assert errors[0] == pytest.approx(best, rel=1e-9)
    assert errors[1] > 1.05 * best


def test_heads_that_are_one_in_other_bases_are_joined_exactly():
    H, K, R, V, D = 8, 4, 5, 3, 31
    q, k, v, o = planted(H=H, K=K, R=R, V=V, D=D)
    g = seeded(9)
    # KV heads 0 and 2 are one, and 1 and 3, each in a basis of its own.
    for i, j in ((0, 2), (1, 3)):
        k[j] = torch.randn(R, R, generator=g).double() @ k[i]
        v[j] = torch.randn(V, V, generator=g).double() @ v[i]
    heads = heads_from(q, k, v, o)
    moments = moments_of_weights(heads, 0.5)
    rotated = plain_rotated(R, R)
    groups = by_similarity(moments, 2, rotated)
    assert groups == [[0, 2], [1, 3]]
    done = join(moments, groups, R, V, rotated)
    assert done.scores_lost + done.outputs_lost < 1e-12
    new = done.maps.weights(heads)
    order = done.maps.source
    assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert torch.allclose(dense(new.q, new.k), dense(q, k)[order], atol=1e-8)
    assert torch.allclose(outputs_of(new), outputs_of(heads)[order], atol=1e-8)
    by_neighbours = join(moments, [[0, 1], [2, 3]], R, V, rotated)
    assert by_neighbours.scores_lost > 0.03


def test_rotating_keys_that_differ_by_a_phase_are_joined_exactly():
    H, K, R, V, D = 4, 2, 6, 3, 23
    q, k, v, o = planted(H=H, K=K, R=R, V=V, D=D)
    v[1] = v[0]
    for p, (a, b) in enumerate(((0, 3), (1, 4), (2, 5))):  # pairs lie half a head apart
        factor = torch.tensor(0.7 * p + 0.3j).exp() * (p + 0.5)
        turned = torch.complex(k[0, a], k[0, b]) * factor
        k[1, a], k[1, b] = turned.real, turned.imag
    heads = heads_from(q, k, v, o, rope=R)
    done = join(moments_of_weights(heads, 1.0), [[0, 1]], R, V, turning(heads))
    assert done.scores_lost < 1e-12
    new = done.maps.weights(heads)
    for distance in (0, 1, 17):
        turn = turn_of(heads, distance)
        was = heads.q.mT @ turn @ heads.paired(heads.k)
        assert torch.allclose(new.q.mT @ turn @ new.k, was, atol=1e-9)


def test_rank_of_rotating_heads_falls_by_pairs_and_says_which():
    q, k, v, o = planted(H=2, K=1, R=10, V=3, D=23)
    q[:, [1, 6]] *= 0  # the second of five pairs, and the fourth
    k[:, [3, 8]] *= 0
    heads = heads_from(q, k, v, o, rope=10, theta=100.0)
    moments = moments_of_weights(heads, 1.0)
    energies = pair_energies(moments, heads.pairs)
    assert energies[[1, 3]].tolist() == [0, 0]
    kept, places, power = slots(5, 3, 2)
    assert (kept, places, power) == ([0, 2, 4], [0, 1, 2], 1.2)
    done = join(moments, [[0]], 6, 3, turning(heads, kept, 6))
    assert done.scores_lost == 0
    new = done.maps.weights(heads)
    theirs = heads_from(new.q, new.k, new.v, new.o, rope=6, theta=100.0**power)
    for distance in (0, 3):
        was = q.mT @ turn_of(heads, distance) @ k.expand(2, -1, -1)
        now = new.q.mT @ turn_of(theirs, distance) @ new.k.expand(2, -1, -1)
        assert torch.allclose(was, now, atol=1e-9)
    lost = join(moments, [[0]], 6, 3, turning(heads, [0, 1, 2], 6)).scores_lost
    assert lost == pytest.approx(float(energies[4]), rel=1e-9)


def test_more_heads_and_zeros_change_no_form():
    H, K, R, V, D = 4, 2, 3, 5, 17
    heads = heads_from(*planted(H=H, K=K, R=R, V=V, D=D))
    maps = spread(H, K, R, V, 2, 2).then(padded(8, 4, torch.tensor([1, 4, 2]), 6, V, 7))
    new = maps.weights(heads)
    assert (new.q.shape, new.v.shape) == ((8, 6, D), (4, 7, D))
    twice = torch.arange(H).repeat_interleave(2)
    assert torch.allclose(dense(new.q, new.k), dense(heads.q, heads.k)[twice], atol=1e-12)
    written = outputs_of(new).view(H, 2, D, D).sum(1)
    assert torch.allclose(written, outputs_of(heads), atol=1e-12)
    # Each of two heads writes from coordinates of its own, so their values need half the width.
    ranks = torch.linalg.matrix_rank(outputs_of(new)).view(H, 2)
    assert ranks.tolist() == [[3, 2]] * H
    assert torch.equal(new.k[:, [1, 4, 2]], heads.k.repeat_interleave(2, 0))


def test_latent_of_the_rank_of_keys_and_values_is_exact():
    H, K, R, V, D = 6, 3, 4, 5, 29
    q, k, v, o = planted(H=H, K=K, R=R, V=V, D=D)
    g = seeded(2)
    rows = torch.randn(27, 11, generator=g).double() @ torch.randn(11, D, generator=g).double()
    k, v = rows[: K * R].view(K, R, D), rows[K * R :].view(K, V, D)
    heads = heads_from(q, k, v, o)
    moments = moments_of_weights(heads, 0.5)
    for width, exact in ((12, True), (11, False)):
        maps = to_latent(moments, width)
        again = ((maps.down @ maps.up).T @ rows - rows).norm() / rows.norm()
        assert (float(again) < 1e-9) == exact
        assert (maps.lost < 1e-12) == exact


def test_phase_without_rotation_is_the_mean_over_what_a_head_sees():
    generator = seeded(3)
    weights = torch.rand(3, 7, 7, generator=generator, dtype=torch.float64).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    frequencies = torch.tensor([1.0, 0.2])
    q, k, v, o = (torch.ones(3, 4, 5).double() for _ in range(4))
    moments = moments_of_weights(heads_from(q, k, v, o, rope=4), 0.5)
    found = phases(dataclasses.replace(moments, near=by_distance(weights)), frequencies)
    for h, p in ((0, 0), (2, 1)):
        total = sum(
            weights[h, m, n] * torch.exp(-1j * frequencies[p].double() * (m - n))
            for m in range(7)
            for n in range(m + 1)
        )
        assert abs(found[h, p] - total / 7) < 1e-7

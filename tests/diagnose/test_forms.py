"""Every figure against the same written out in matrices as wide as the model."""

import itertools
import math

import pytest
import torch
from support.planted_heads import at_distance, dense, figures, lies, planted

from headwise.diagnose import between, forms
from headwise.diagnose.layouts import Layout, heads_of
from headwise.diagnose.measures import measure

CLOSE = {"rel": 1e-9, "abs": 1e-9}
ROTARY = {"rope_dim": 6, "rope_theta": 50.0, "rope_at": "last"}


def heads(q, k, v, o, **layout):
    parts = {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1)}
    parts["o"] = o.flatten(0, 1).T
    return heads_of(parts, Layout(num_heads=len(q), num_kv_heads=len(k), **layout))


def check(form, expected):
    """One form's measures against dense forms (H, D, D)."""
    for h, A in enumerate(expected):
        wanted = figures(A)
        assert form.effective[h] == pytest.approx(wanted["effective"], **CLOSE)
        assert form.stable[h] == pytest.approx(wanted["stable"], **CLOSE)
        assert [form.r90[h], form.r99[h], form.r999[h]] == wanted["ranks"]
        s = wanted["s"][: form.width]
        assert form.condition[h] == pytest.approx(float(s[0] / s[-1]), rel=1e-7)
        assert form.norm[h] == pytest.approx(float(A.norm()), **CLOSE)
        symmetric, angle = lies(A)
        assert form.symmetric[h] == pytest.approx(symmetric, **CLOSE)
        assert form.angle[h] == pytest.approx(angle, **CLOSE)
        assert form.trace[h] == pytest.approx(float(A.trace() / wanted["s"].sum()), **CLOSE)
    flat = torch.stack([A.flatten() / A.norm() for A in expected])
    cosines = torch.tensor(form.cosines, dtype=torch.float64)
    assert torch.allclose(cosines, flat @ flat.T, atol=1e-9)


@pytest.mark.parametrize(("H", "K"), [(6, 6), (6, 3), (6, 1)])
def test_measures_equal_dense_algebra(H, K):
    q, k, v, o = planted(H, K)
    found = measure(heads(q, k, v, o), 7)
    assert (found.layer, found.num_heads, found.num_kv_heads) == (7, H, K)
    check(found.qk, dense(q, k))
    check(found.vo, dense(o, v))


def test_planted_rank_and_condition_are_found():
    q, k, v, o = planted(H=2, K=2, R=7, V=7)
    Q = torch.linalg.qr(q[0].T)[0]
    s = torch.logspace(0, -5, 7, dtype=torch.float64)
    q[0], k[0] = (Q * s).T, Q.T  # positive semidefinite, condition 1e5
    q[1, 3:] = q[1, :3].repeat(2, 1)[:4]  # rank 3
    found = measure(heads(q, k, v, o), 0).qk
    assert found.condition[0] == pytest.approx(1e5, rel=1e-6)
    assert found.condition[1] is None
    assert found.trace[0] == pytest.approx(1.0, abs=1e-9)
    assert found.symmetric[0] == pytest.approx(1.0, abs=1e-9)
    assert found.r999[1] <= 3
    assert sum(value > 1e-12 for value in found.spectrum[1]) == 3


def test_zero_head_says_nothing():
    q, k, v, o = planted()
    q[2] = 0
    found = measure(heads(q, k, v, o), 0).qk
    assert found.effective[2] == found.r90[2] == 0
    assert found.angle[2] is None
    assert all(math.isfinite(value) for value in found.effective)


def test_identity_form_has_angle_zero_and_its_negative_180():
    eye = torch.eye(8, dtype=torch.float64)[None].repeat(2, 1, 1)
    q = torch.stack((eye[0], -eye[0]))
    found = measure(heads(q, eye, eye, eye), 0).qk
    assert found.angle == [pytest.approx(0, abs=1e-5), pytest.approx(180, abs=1e-5)]
    assert found.effective == [pytest.approx(8)] * 2


# ---- rotary positions


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("distance", [0, 1, 5])
def test_rotated_spectrum_is_that_of_the_rotated_form(place, distance):
    q, k, v, o = planted()
    found = forms.rotated_spectra(heads(q, k, v, o, **ROTARY | {"rope_at": place}), (0, distance))
    s = torch.linalg.svdvals(at_distance(q, k, distance, 6, 50.0, place))
    assert torch.allclose(found[1], s[:, :8], atol=1e-9)


def every_turn(q, k):
    """All forms over a grid of angles that averages products of two rotations exactly; coordinates
    2..7 rotate in pairs (i, i + 3)."""
    angles = torch.arange(4).double() * math.pi / 2
    for turn in itertools.product(angles, repeat=3):
        R = torch.eye(8, dtype=torch.float64)
        for n, angle in enumerate(turn):
            i, j = 2 + n, 5 + n
            R[i, i] = R[j, j] = angle.cos()
            R[i, j], R[j, i] = -angle.sin(), angle.sin()
        yield dense(q, R @ k)


def test_rotary_products_are_averages_over_all_distances():
    q, k, v, o = planted()
    found = between.query_key_gram(heads(q, k, v, o, **ROTARY))
    all_forms = [forms.flatten(1) for forms in every_turn(q, k)]
    expected = sum(A @ A.T for A in all_forms) / len(all_forms)
    assert torch.allclose(found, expected, rtol=1e-9)
    energies = forms.pair_energies(heads(q, k, v, o, **ROTARY))
    assert torch.allclose(energies.sum(1), expected.diagonal(), rtol=1e-9)


def test_interleaved_rotation_is_the_same_head_in_another_order():
    q, k, v, o = planted()
    order = [0, 1, 2, 5, 3, 6, 4, 7]  # neighbours from halves
    a = measure(heads(q, k, v, o, **ROTARY), 0)
    b = measure(heads(q[:, order], k[:, order], v, o, **ROTARY, rope_interleaved=True), 0)
    assert b.effective_at == [pytest.approx(row, **CLOSE) for row in a.effective_at]
    assert b.pairs90 == a.pairs90
    assert b.effective_at[1] != pytest.approx(a.effective_at[0], rel=1e-3)


# ---- between heads


def test_redundancy_does_not_depend_on_the_basis():
    q, k, v, o = planted(H=4, K=4)
    mixed = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    q[1], k[1] = 3 * mixed @ q[0], torch.linalg.inv(mixed).T @ k[0]  # the same form, three times
    found = measure(heads(q, k, v, o), 0).qk
    assert found.cosines[0][1] == pytest.approx(1.0, abs=1e-9)
    assert found.effective_heads == pytest.approx(
        between.effective_heads(torch.tensor(found.cosines, dtype=torch.float64)), **CLOSE
    )
    assert found.effective_heads < 3.5


def test_effective_heads_count_equal_ones_once():
    assert between.effective_heads(torch.eye(5, dtype=torch.float64)) == pytest.approx(5)
    assert between.effective_heads(torch.ones(5, 5, dtype=torch.float64)) == pytest.approx(1)


def shared_loss(forms, rank):
    """What the best shared right factor of stacked forms (n, D, D) loses, by SVD."""
    s = torch.linalg.svdvals(forms.flatten(0, 1)).square()
    return float(s[rank:].sum() / s.sum())


def test_sharing_loss_is_that_of_the_best_shared_factor():
    q, k, v, o = planted()
    found = heads(q, k, v, o)
    for part, left, right in (("k", q, k), ("v", o, v)):
        loss = between.sharing_losses(found, part)
        A, width = dense(left, right), right.shape[1]
        for i, j in ((0, 1), (0, 2), (1, 2)):
            both = torch.cat((A[2 * i : 2 * i + 2], A[2 * j : 2 * j + 2]))
            assert float(loss[i, j]) == pytest.approx(shared_loss(both, width), rel=1e-9)
    assert loss[0, 0].isnan()


def test_sharing_loss_of_equal_keys_is_zero_in_any_basis():
    q, k, v, o = planted(H=3, K=3)
    mixed = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    k[2] = mixed @ k[0]
    loss = between.sharing_losses(heads(q, k, v, o), "k")
    assert float(loss[0, 2]) == pytest.approx(0, abs=1e-12)
    assert between.shareable(loss, 0.01) == 2
    # Under rotary positions a basis may turn and stretch every pair, and mix what stands still.
    allowed = torch.eye(8, dtype=torch.float64)
    allowed[:2, :2] = mixed[:2, :2]
    for n, (a, b) in enumerate(((0.3, 2.0), (-1.0, 0.5), (0.7, -0.2))):
        i, j = 2 + n, 5 + n
        allowed[i, i], allowed[j, j], allowed[i, j], allowed[j, i] = a, a, -b, b
    k[2] = allowed @ k[0]
    loss = between.sharing_losses(heads(q, k, v, o, **ROTARY), "k")
    assert float(loss[0, 2]) == pytest.approx(0, abs=1e-9)
    k[2] = mixed @ k[0]
    loss = between.sharing_losses(heads(q, k, v, o, **ROTARY), "k")
    assert float(loss[0, 2]) > 0.02


def test_latent_width_is_that_of_all_keys_and_values():
    q, k, v, o = planted()
    basis = torch.randn(4, 29, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    k, v = k[..., :4] @ basis, v[..., :4] @ basis
    width, ranks = between.latent_widths(heads(q, k, v, o), (0.9, 0.99, 0.999))
    s = torch.linalg.svdvals(torch.cat((k.flatten(0, 1), v.flatten(0, 1)))).square().cumsum(0)
    assert width == 3 * (8 + 5)
    assert ranks == [int((s < share * s[-1]).sum()) + 1 for share in (0.9, 0.99, 0.999)]
    assert ranks[2] <= 4


def test_gaussian_latent_is_that_of_the_published_control():
    """marin's random control, 1024 x 512: 475 dimensions hold 99 %, stable rank 176."""
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    s = torch.linalg.svdvals(x)
    assert abs(int(forms.energy_rank(s, 0.99)) - 475) <= 1
    assert float(forms.stable_rank(s)) == pytest.approx(176, abs=6)


# ---- biases


def test_bias_share_is_that_of_the_homogeneous_form():
    q, k, v, _ = planted()
    g = torch.Generator().manual_seed(2)
    bq, bk = (torch.randn(n, 8, generator=g, dtype=torch.float64) for n in (6, 3))
    parts = {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1)}
    parts |= {"q_bias": bq.flatten(), "k_bias": bk.flatten()}
    found = heads_of(parts, Layout(num_heads=6, num_kv_heads=3))
    whole = dense(torch.cat((q, bq[..., None]), 2), torch.cat((k, bk[..., None]), 2))
    expected = 1 - dense(q, k).square().sum((1, 2)) / whole.square().sum((1, 2))
    assert torch.allclose(forms.bias_share(found), expected, rtol=1e-9)
    assert measure(found, 0).vo is None  # no output matrix

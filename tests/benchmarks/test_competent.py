"""The single model that ensembles are measured against: every attention computes the same."""

import torch
from support.tolerance import close, seeded

from benchmarks.competent import ATTENTION, CompetentLayer, outputs_of
from benchmarks.figure1 import ms_of
from headwise.experiments.rank_paper.shapes import paper_shape


def test_competent_models_differ_in_speed_alone():
    shape = paper_shape(dim=10, depth=2, rank=5, width=3, ffn_dim=7)
    x = torch.randn(2, 11, 10, generator=seeded(3))
    torch.manual_seed(0)
    first = [CompetentLayer(shape) for _ in range(2)]
    found = {}
    for attention in ATTENTION:
        layers = [CompetentLayer(shape, attention) for _ in range(2)]
        for layer, same in zip(layers, first, strict=True):
            layer.load_state_dict(same.state_dict())
        out = outputs_of(layers, x, "fp32")
        out.square().sum().backward()
        found[attention] = [out, *(p.grad for layer in layers for p in layer.parameters())]
        assert (outputs_of(layers, x, "bf16") - out).norm() < 0.05 * out.norm()
    for other in ("plain", "ours"):
        for made, wanted in zip(found[other], found["sdpa"], strict=True):
            close(made, wanted, other)


def test_measurements_are_numbers_or_hold_one():
    assert [ms_of(1.5), ms_of({"ms": 2.5, "way": "plain fp16"}), ms_of(None)] == [1.5, 2.5, None]

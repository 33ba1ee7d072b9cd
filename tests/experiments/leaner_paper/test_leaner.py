"""More heads and fewer layers: arms that differ in one thing, names from shapes alone, differences
with intervals."""

import dataclasses
import json

import pytest
from support.experiment_rows import rows_with_losses

from headwise.errors import UsageError
from headwise.experiments import find
from headwise.experiments.leaner_paper import leaner
from headwise.experiments.settings import CHOICES, settings_of
from headwise.experiments.shapes import shape_for
from headwise.show.figure import to_json
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure

QUICK = leaner.PRESETS["quick"]
BASES = [
    (name, dataclasses.replace(preset, tasks=(name,)), more)
    for preset in leaner.PRESETS.values()
    for name in CHOICES
    for more in ((2,), (2, 4))
]


def base_of(settings):
    return shape_for(
        settings.task(settings.tasks[0]),
        settings.dim,
        settings.depth,
        settings.heads,
        settings.dim // settings.heads,
        settings.ffn_dim,
    )


@pytest.mark.parametrize(
    ("name", "settings", "more"),
    BASES,
    ids=lambda v: "" if not isinstance(v, tuple | str) else str(v),
)
def test_arms_change_what_their_names_say_and_nothing_else(name, settings, more):
    base = base_of(settings)
    arms = leaner.arms(base, list(more))
    heads = base.num_heads
    half, thin = base.depth // 2, base.ffn_dim // 2
    assert arms[leaner.HALF] == base.replace(depth=half)
    assert arms[leaner.THIN] == base.replace(ffn_dim=thin)
    for k in more:
        split, wide = arms[f"split to {k * heads}"], arms[f"widen to {k * heads}"]
        assert (split.params, split.num_heads, split.head_dim) == (
            base.params,
            k * heads,
            base.head_dim // k,
        )
        assert (wide.num_heads, wide.head_dim, wide.depth, wide.ffn_dim) == (
            k * heads,
            base.head_dim,
            base.depth,
            base.ffn_dim,
        )
        for how, grown in (("split", split), ("widen", wide)):
            assert arms[f"{how} to {k * heads}, {leaner.HALF}"] == grown.replace(depth=half)
            assert arms[f"{how} to {k * heads}, {leaner.THIN}"] == grown.replace(ffn_dim=thin)
        for kind, target in (
            ("widen-iso to", base),
            ("trade to", base),
            ("feed-forward instead of", wide),
            ("layers instead of", wide),
        ):
            arm = arms.get(f"{kind} {k * heads}")
            assert arm is not None or kind in ("widen-iso to", "trade to"), (
                "only heads can be too many"
            )
            if arm is not None:
                assert abs(arm.params / target.params - 1) <= 0.005
        assert (
            arms[f"feed-forward instead of {k * heads}"].num_heads
            == arms[f"layers instead of {k * heads}"].num_heads
            == heads
        )
    assert leaner.named(set(arms.values())) == arms, "names come back from the shapes alone"


def points_of(loss, settings=QUICK):
    first = leaner.runs(settings)
    return leaner.summary(
        rows_with_losses([*first, *leaner.then(settings, rows_with_losses(first, loss))], loss)
    )


def loss_of(run):
    """Layers matter, heads do not; seeds scatter a little; the tuning seed is far too good."""
    return 2.0 / run.shape.depth + 0.001 * run.seed if run.seed else -1.0 + run.recipe.lr


def test_leaner_points_carry_the_difference_and_the_headline_says_what_half_the_layers_cost():
    points = {p.arm: p for p in points_of(loss_of)}
    assert points["base"].change is None
    assert points["base"].n == 3
    assert points["base"].lr == QUICK.lrs[0]
    assert points[leaner.HALF].gap.mean == pytest.approx(1.0)
    assert points[leaner.HALF].change.startswith("+1.0000 ± 0.00")
    assert points["split to 4"].change.startswith("none found (+0.0000 ± ")
    assert points["split to 4"].off == 0.0
    assert points["widen to 4"].off > 0.2
    lines = leaner.headline(list(points.values()))
    assert lines[0] == (
        "farthest: base 2 x 16 in 2 layers, feed-forward 128, held-out loss 1.0020 ± 0.0025 "
        "(3 seeds)"
    )
    assert lines[1].startswith("farthest, half the layers: without more heads +1.0000 ± ")
    assert "split to 4 +1.0000" in lines[1]
    assert "widen to 4 +1.0000" in lines[1]
    assert "split to 4 none found" in lines[2]
    assert "trade to 4 +1.0000" in lines[2]


def test_arm_that_was_only_tuned_is_set_beside_the_base_on_that_seed():
    """The tuning's seed is far too good here: beside the base's other seeds everything would look
    better."""
    first = leaner.runs(QUICK)
    base = base_of(QUICK)
    later = [
        run for run in leaner.then(QUICK, rows_with_losses(first, loss_of)) if run.shape == base
    ]
    points = {p.arm: p for p in leaner.summary(rows_with_losses([*first, *later], loss_of))}
    assert points["base"].n == 3
    assert points[leaner.HALF].change == "+0.0000 (the tuning's seed)"


def test_base_that_diverged_leaves_nothing_to_compare_with():
    def loss(run):
        return (
            None
            if (run.shape.depth, run.shape.num_heads, run.shape.ffn_dim) == (2, 2, 128)
            else loss_of(run)
        )

    points = points_of(loss)
    assert leaner.headline(points) == []
    assert all(p.change is None for p in points)
    leaner.figure(points)


def test_figure_has_every_arm_once_and_draws(tmp_path):
    settings = dataclasses.replace(QUICK, tasks=("farthest", "recall"))
    points = points_of(lambda run: 1.0 + run.shape.params * 1e-6 + 0.001 * run.seed, settings)
    description = leaner.figure(points)
    json.dumps(to_json(description), allow_nan=False)
    cuts = ("full size", leaner.HALF, leaner.THIN)
    assert [panel.title for panel in description.panels] == [
        f"{task}, {cut}" for task in ("farthest", "recall") for cut in cuts
    ]
    for task in settings.tasks:
        panels = [panel for panel in description.panels if panel.title.startswith(task)]
        assert [len(panel.lines) for panel in panels] == [6, 2, 2]
        assert all(
            len({line.colour for line in panel.lines}) == len(panel.lines) for panel in panels
        )
        shown = {y for panel in panels for line in panel.lines for y in line.y}
        assert shown == {p.held_out for p in points if p.task == task}
    save(description, tmp_path / "leaner.png")
    json.dumps(plotly_figure(description), allow_nan=False)


BAD = [
    (["tasks=chess"], "unknown task 'chess'; choices: "),
    (
        ["more=3"],
        "more must be numbers of at least 2 that divide the rank, got more 3, dim 32, heads 2",
    ),
    (["more=1"], "more must be numbers of at least 2"),
    (["depth=1"], "depth and ffn_dim must be at least 2 to be halved, got 1 and 128"),
    (["source=a.txt"], "source goes with the tasks text, images, sentences, got farthest"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings_die_in_one_line(changes, message):
    with pytest.raises(UsageError) as caught:
        settings_of(find("leaner"), "quick", changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)

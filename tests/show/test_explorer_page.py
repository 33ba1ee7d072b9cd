"""The explorer used as people use it, in Chromium without a network: sliders by keyboard, numbers,
the address, what is copied, neighbours, the measured map, a phone, the dark."""

import json
import random
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from support.explorer_browser import Quiet, chromium

from headwise.cli.shapes import shape_of
from headwise.experiments.measured import plain
from headwise.explorer import explore
from headwise.explorer.explore import DECODER
from headwise.shape import Layer, Shape

ROWS = Path(__file__).parents[2] / "results/map/text.jsonl"
START = Shape(
    dim=96, depth=4, num_heads=6, num_kv_heads=3, head_dim=16, ffn_dim=256, qk_rope_head_dim=16,
    activation="swiglu", causal=True, vocab_size=1000,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("explorer")
    explore(START, output=made / "plain.html")
    explore(output=made / "map.html", rows=ROWS)
    return made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, folder: Path) -> Iterator[Page]:
    with Quiet(browser, folder / "plain.html") as opened:
        yield opened


def shape_in(page: Page) -> Shape:
    page.wait_for_function("!waiting")
    return Shape.of(page.evaluate("state.shape"))


def tile(page: Page, label: str) -> str:
    page.wait_for_function("!waiting")
    found = page.locator(".tile", has=page.get_by_text(label, exact=True))
    return found.locator(".exact").text_content() or ""


# ---- moving


def test_page_says_what_the_shape_costs(page: Page) -> None:
    sentence = page.locator("#sentence").text_content() or ""
    assert sentence.startswith("4 layers of 6 heads of rank 16, width 96: ")
    assert tile(page, "Parameters") == f"{START.params:,}"
    assert tile(page, "KV cache per token") == f"{START.kv_bytes(1):,}"
    assert tile(page, "Decode FLOPs per token") == f"{START.decode_flops(2048):,}"
    train = START.train_flops_per_token(2048)
    assert tile(page, "Training FLOPs per token") == f"{int(train):,}"


def test_slider_is_moved_by_the_keyboard(page: Page) -> None:
    page.get_by_label("depth", exact=True).first.focus()
    page.keyboard.press("ArrowRight")
    moved = shape_in(page)
    assert moved == START.replace(depth=5)
    assert tile(page, "Parameters") == f"{moved.params:,}"
    assert page.locator(".tile .ratio").first.text_content() == (
        f"{moved.params / START.params:.2f}×"
    )


def test_heads_are_moved_to_where_kv_heads_divide_them(page: Page) -> None:
    page.locator("#control-num_heads").fill("8")
    assert shape_in(page) == START.replace(num_heads=8, num_kv_heads=2)
    page.locator("#control-num_kv_heads").fill("8")
    assert shape_in(page).num_kv_heads == 8


def test_sizes_follow_others_where_asked(page: Page) -> None:
    page.get_by_label("as width / heads").check()
    page.locator("#control-num_heads").fill("12")
    assert shape_in(page) == START.replace(
        num_heads=12, num_kv_heads=3, head_dim=8, v_head_dim=8, qk_rope_head_dim=8
    )
    page.get_by_label("as 4 x width").check()
    assert shape_in(page).ffn_dim == 4 * 96


def test_fault_is_said_and_mended(page: Page) -> None:
    page.locator("#control-num_kv_heads").fill("4")
    page.get_by_label("as width / heads").check()
    said = page.get_by_role("alert")
    said.wait_for()
    assert "num_heads must be a multiple of num_kv_heads, got num_heads 6, num_kv_heads 4" in (
        said.text_content() or ""
    )
    assert "stale" in (page.locator("#costs").get_attribute("class") or "")
    said.get_by_role("button").click()
    said.wait_for(state="hidden")
    assert shape_in(page).num_kv_heads == 3


def test_window_and_latent_are_moved(page: Page) -> None:
    page.locator("#control-window").fill("64")
    page.locator("#control-pattern").select_option("4")
    assert shape_in(page) == START.replace(windows=(64, 64, 64, 0))
    page.locator("#control-kv_lora_rank").fill("40")
    moved = shape_in(page)
    assert moved == START.replace(windows=(64, 64, 64, 0), kv_lora_rank=40, num_kv_heads=6)
    assert tile(page, "KV cache at the context") == f"{moved.kv_bytes(2048):,}"


def test_encoder_has_no_cache(page: Page) -> None:
    page.get_by_label("a token sees earlier ones only").uncheck()
    page.wait_for_function("!state.shape.causal")
    assert shape_in(page) == START.replace(causal=False)
    assert page.get_by_text("KV cache per token", exact=True).is_hidden()


# ---- the address


def test_address_holds_the_shape(browser: Browser, folder: Path) -> None:
    with Quiet(browser, folder / "plain.html") as page:
        page.locator("#control-head_dim").fill("24")
        page.locator("#control-context").fill("777")
        page.wait_for_function("location.hash.includes('context=777')")
        address = page.evaluate("location.hash")
    with Quiet(browser, folder / "plain.html", address) as other:
        assert shape_in(other) == START.replace(head_dim=24, v_head_dim=24, qk_rope_head_dim=24)
        assert other.evaluate("state.at.context") == 777
        other.evaluate("location.hash = '#dim=8&depth=3&num_heads=2'")
        other.wait_for_function("state.shape.dim === 8")
        assert shape_in(other) == Shape(dim=8, depth=3, num_heads=2)


@pytest.mark.parametrize(
    "address",
    [
        "#dim=x",
        "#dim=8&depth=-1&num_heads=2",
        "#dim=8&<b>=3",
        "#dim=1e999",
        "#%",
        "#dim=8&dtype=no",
    ],
)
def test_address_that_cannot_be_read_is_left_aside(
    browser: Browser, folder: Path, address: str
) -> None:
    with Quiet(browser, folder / "plain.html", address) as page:
        assert shape_in(page) == START


# ---- copying


def states() -> Iterator[tuple[Shape, list[str]]]:
    rng = random.Random("copies")
    for _ in range(600):
        heads = rng.choice((1, 4, 6))
        rank = rng.choice((8, 16))
        latent = rng.choice((0, 0, 24))
        rope = rng.choice((rank, rank, 0, 4))
        yield (
            START.replace(
                num_heads=heads,
                num_kv_heads=heads if latent else rng.choice((1, heads)),
                head_dim=rank,
                v_head_dim=rng.choice((rank, rank, 12)),
                qk_rope_head_dim=rope,
                kv_lora_rank=latent,
                ffn_dim=rng.choice((384, 100)),
                activation=rng.choice(("swiglu", "swiglu", "geglu", "relu")),
                windows=rng.choice(((0,), (0,), (9,), (9, 0))),
                qk_norm="none" if latent else rng.choice(("none", "none", "head")),
                qkv_bias=rng.random() < 0.2,
                tied=rng.random() < 0.5,
                layers=rng.choice(((), (), (), (Layer(ffn_dim=31), Layer()))),
                extras=rng.choice(((), (), (), (("rest", 3),))),
            ),
            [name for name in ("v_head_dim", "num_kv_heads", "ffn_dim") if rng.random() < 0.5],
        )


def test_copies_are_the_shape_itself(page: Page) -> None:
    cases = [(plain(shape), follows) for shape, follows in states()]
    found: list[list[Any]] = page.evaluate(
        """cases => cases.map(([fields, names]) => {
          const all = { ...PAGE.defaults, ...fields };
          const follows = new Set(all.layers.length ? [] : names);
          const shape = settled(all, follows);
          const address = asAddress(shape, follows, PAGE.at, PAGE.defaults);
          const read = fromAddress(`#${address}`, PAGE.defaults);
          return [shape, settled(read.shape, read.follows),
            asCommand(shape, follows, PAGE.at, PAGE.defaults),
            asPython(shape, follows, PAGE.defaults), asConfig(shape, PAGE.at)];
        })""",
        cases,
    )
    configs = commands = 0
    for fields, read, command, python, config in found:
        shape = Shape.of(fields)
        assert Shape.of(read) == shape
        names: dict[str, Any] = {}
        exec(python["text"], names)
        assert names["shape"] == shape
        if "text" in command:
            words = shlex.split(command["text"])
            assert words[:5] == ["headwise", "cost", "--tokens", "2048", "--set"]
            assert shape_of(words[5:]) == shape
            commands += 1
        if "text" in config:
            assert Shape.from_hf(json.loads(config["text"])) == shape, config
            configs += 1
        else:
            assert config["refused"]
    assert commands > 100
    assert configs > 30


def test_tabs_are_moved_by_the_keyboard(page: Page) -> None:
    page.get_by_role("tab", name="Command").focus()
    page.keyboard.press("ArrowRight")
    assert (page.locator("#copied").text_content() or "").startswith("from headwise.shape import")
    page.keyboard.press("ArrowRight")
    text = page.locator("#copied").text_content() or ""
    assert Shape.from_hf(json.loads(text)) == START


# ---- neighbours


@pytest.mark.parametrize("budget", ["params", "train_flops"])
def test_neighbours_meet_the_budget(page: Page, budget: str) -> None:
    def cost(shape: Shape) -> int:
        return shape.params if budget == "params" else shape.flops(2048, training=True)

    found = page.evaluate(
        """([fields, budget]) => neighboursOf({ ...PAGE.defaults, ...fields }, PAGE.at, budget)""",
        [plain(DECODER), budget],
    )
    assert len(found) >= 9
    for near in found:
        shape = Shape.of(near["shape"])
        assert cost(shape) == pytest.approx(cost(DECODER), rel=0.02), near["name"]
        wider, narrower = (shape.replace(ffn_dim=shape.ffn_dim + by) for by in (64, -64))
        off = abs(cost(shape) - cost(DECODER))
        assert off <= min(abs(cost(s) - cost(DECODER)) for s in (wider, narrower)) * 1.001
        ratios = near["ratios"]
        assert ratios["kv_bytes_at_context"] == pytest.approx(
            shape.kv_bytes(2048) / DECODER.kv_bytes(2048), abs=2e-6
        )
        assert ratios["decode_flops"] == pytest.approx(
            shape.decode_flops(2048) / DECODER.decode_flops(2048), abs=2e-6
        )
    half = next(near for near in found if near["name"] == "Half the KV heads")
    assert half["ratios"]["kv_bytes_at_context"] == 0.5


def test_neighbour_is_taken(page: Page) -> None:
    page.locator("#control-num_kv_heads").fill("6")
    page.get_by_role("button", name="Half the KV heads").click()
    page.wait_for_function("state.shape.num_kv_heads === 3")
    assert shape_in(page).ffn_dim > START.ffn_dim


# ---- the measured map


def test_map_shows_the_loss_of_every_cell_and_where_one_is(browser: Browser, folder: Path) -> None:
    with Quiet(browser, folder / "map.html") as page:
        cells = page.evaluate("PAGE.tasks[0].cells")
        assert page.locator("#map .grid button").count() == len(cells) == 65
        here = page.locator("#here").text_content() or ""
        least = min(cells, key=lambda cell: cell["loss"])
        assert here.startswith(f"You are here: {least['num_heads']} x {least['head_dim']} in ")
        assert page.locator("#map button.best").count() == 1
        assert page.locator("#map button.here").count() == 1
        page.locator("#map .grid button").first.click()
        page.wait_for_function("state.shape.head_dim === 64")
        taken = shape_in(page)
        assert (taken.num_heads, taken.depth) == (1, 1)
        page.locator("#control-num_heads").fill("3")
        page.wait_for_function("document.querySelectorAll('#map .near-here').length === 1")
        assert "No cell is yours" in (page.locator("#here").text_content() or "")


# ---- everywhere


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_and_can_be_read(browser: Browser, folder: Path, scheme: str) -> None:
    viewport = {"width": 390, "height": 844}
    path = folder / "map.html"
    with Quiet(browser, path, viewport=viewport, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator("#strip").is_visible()
        low = page.evaluate(CONTRASTS)
        assert {name: ratio for name, ratio in low.items() if ratio < 4.5} == {}


# The contrast of text with what is behind it, by WCAG 2, for one element of each kind.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (...colours) => {
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = c => c.map(v => v / 255)
    .map(v => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = node => {
    const found = [];
    for (; node; node = node.parentElement) found.unshift(getComputedStyle(node).backgroundColor);
    return found;
  };
  const names = ["h1", "h1 b", ".brand", ".row label", ".row .link", ".tile span", ".tile b",
    ".exact", ".soft", ".near button", ".near td", ".near .better", ".near .worse",
    ".grid button.best", ".grid button", ".grid button:last-of-type", ".tabs button", "pre"];
  const found = {};
  for (const name of names) {
    const node = document.querySelector(name);
    if (!node) continue;
    const back = rgb(...behind(node)), front = rgb(...behind(node), getComputedStyle(node).color);
    const [a, b] = [light(back), light(front)].sort((x, y) => y - x);
    found[name] = (a + 0.05) / (b + 0.05);
  }
  for (const node of document.querySelectorAll(".grid button")) {
    const back = rgb(...behind(node)), front = rgb(...behind(node), getComputedStyle(node).color);
    const [a, b] = [light(back), light(front)].sort((x, y) => y - x);
    found[`cell ${node.textContent}`] = (a + 0.05) / (b + 0.05);
  }
  return found;
}"""

"""`moectl explain --html`: a page with every answer, in a browser without a network."""

import copy
import json
import re
import time
from pathlib import Path

import pytest

from moectl.cli.explain.page import html_page, page_data
from moectl.oracle import ENGINES, engine_named
from moectl.printable import printable
from support.browser import chromium
from support.invoking import moectl
from support.scripts import loaded

ROOT = Path(__file__).resolve().parents[3]
PAGES = loaded("refresh_docs").PAGES
MADE = ROOT / "docs" / "backends.html"
"""The page of all built-in models, as scripts/refresh_docs makes it."""
MODELS = ("gpt-oss-20b", "Kimi-K2-Thinking", "QuantTrio/Qwen3.6-35B-A3B-AWQ", "baidu/ERNIE-4.5-21B-A3B-PT")
GPUS, TP = ("h100", "b200", "mi300x"), (1, 8)
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028{{data}}'\"&amp;"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A page of some models and the document that the same command prints."""
    path = tmp_path_factory.mktemp("page") / "moe.html"
    options = ("--gpu", ",".join(GPUS), "--tp", ",".join(map(str, TP)), "--offline", "--json")
    done = moectl("explain", *MODELS, *options, "--html", path)
    return path, done.document


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def opened(browser):
    """Opens a file without a network; fails if it logs, requests anything or opens a dialog."""
    contexts, complaints = [], []

    def open_page(path, **settings):
        settings = {"viewport": {"width": 1400, "height": 900}, **settings}
        context = browser.new_context(offline=True, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: complaints.append(request.url) if request.url != url else None)
        url = Path(path).as_uri()
        page.goto(url)
        page.wait_for_selector("tbody tr")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def cell(page, model, gpu, tp):
    return page.locator(f'button.cell[aria-label^="{model} on {gpu}, TP {tp}:"]')


def panel(page):
    return page.locator("#panel")


def rows_shown(page):
    return page.locator("tbody tr:visible th.model .name").all_inner_texts()


def search(page, words):
    page.get_by_label("Search models and formats").fill(words)


def test_every_cell_shows_the_backends_of_the_document(opened, made):
    path, document = made
    page = opened(path)
    wanted = {}
    for row in document["rows"]:
        state = "refused" if row["refusal"] or row["gates"] else "none"
        shown = row["backend"] if row["usable"] else state
        names = wanted.setdefault((row["checkpoint"], row["gpu"], row["tp"]), [])
        names += [] if shown in names else [shown]
    assert len(wanted) == len(MODELS) * len(GPUS) * len(TP)
    assert {"refused", "humming", "marlin"} <= {name for names in wanted.values() for name in names}
    assert page.locator("button.cell").count() == len(wanted)
    for (model, gpu, tp), names in wanted.items():
        assert cell(page, model, gpu, tp).locator(".backend").all_inner_texts() == names, (model, gpu, tp)


def test_marks_are_those_of_the_document(opened, made):
    path, document = made
    page = opened(path)
    rows = [((row["checkpoint"], row["gpu"], row["tp"]), row) for row in document["rows"]]
    marked = {key for key, row in rows if row["fits"] is False}
    fallbacks = {key for key, row in rows if row["usable"] and row["fallback"]}
    assert marked and fallbacks
    for key, _ in rows:
        assert cell(page, *key).locator(".mark.unfit").count() == (key in marked), key
        assert (cell(page, *key).locator(".mark.fallback").count() > 0) == (key in fallbacks), key


def test_a_click_shows_every_reason(opened, made):
    path, document = made
    page = opened(path)
    row = next(r for r in document["rows"] if (r["checkpoint"], r["gpu"], r["tp"]) == (*KIMI, "h100", 8))
    cell(page, *KIMI, "h100", 8).click()
    text = panel(page).inner_text()
    assert KIMI[0] in text and row["because"] in text and row["gpu_name"] in text
    assert f"vllm serve {KIMI[0]} --tensor-parallel-size 8" in text
    assert f"moectl explain {KIMI[0]} --gpu h100 --tp 8 -v" in text
    assert "TP 8" in text and "66.4 GiB" in text and row["memory"]["smallest_tp"] == 8
    items = panel(page).locator(".candidates > li")
    assert items.count() == len(row["candidates"]) > 5
    for number, candidate in enumerate(row["candidates"]):
        item = items.nth(number)
        assert item.locator(".name").inner_text() == candidate["backend"]
        assert item.locator("ul li").all_inner_texts() == candidate["reasons"]
    assert panel(page).locator(".candidates .chosen .class").all_inner_texts() == [row["experts"]]


KIMI = ("moonshotai/Kimi-K2-Thinking",)


def test_what_cannot_be_served_says_why_and_has_no_command(opened, made):
    path, document = made
    page = opened(path)
    refused = next(row for row in document["rows"] if row["gates"])
    cell(page, refused["checkpoint"], refused["gpu"], refused["tp"]).click()
    assert refused["gates"][0] in panel(page).inner_text()
    assert "vllm serve" not in panel(page).inner_text()
    cell(page, *KIMI, "h100", 1).click()
    assert "does not fit" in panel(page).inner_text() and "vllm serve" not in panel(page).inner_text()


def test_groups_of_layers_with_different_answers_are_told_apart(opened, made):
    page = opened(made[0])
    cell(page, MODELS[2], "h100", 1).click()
    assert panel(page).locator(".choice .backend").all_inner_texts() == ["triton", "humming"]
    assert panel(page).locator(".choice .layers").all_inner_texts() == ["layers 0", "layers 1-39"]


def test_search_keeps_models_with_all_words(opened, made):
    page = opened(made[0])
    assert len(rows_shown(page)) == len(MODELS)
    search(page, "KIMI int4")
    assert rows_shown(page) == list(KIMI)
    assert page.locator("#counts").inner_text() == "1 of 4 models, 6 cells"
    search(page, "nothing like it")
    assert rows_shown(page) == []
    page.get_by_role("button", name="Clear the filters").click()
    assert len(rows_shown(page)) == len(MODELS)


def test_filters_by_backend_mark_and_gpu(opened, made):
    path, document = made
    page = opened(path)
    page.select_option("#backend", "backend:humming")
    usable = [row for row in document["rows"] if row["usable"] and row["backend"] == "humming"]
    assert sorted(rows_shown(page)) == sorted({row["checkpoint"] for row in usable})
    assert page.locator("button.cell:visible:not(.dim)").count() == len(usable)
    page.get_by_role("button", name=re.compile("^refused")).click()
    assert rows_shown(page) == ["baidu/ERNIE-4.5-21B-A3B-PT"]
    page.get_by_role("button", name=re.compile("^.?refused")).click()
    assert len(rows_shown(page)) == len(MODELS)
    page.get_by_label("h100", exact=True).uncheck()
    assert page.locator("thead th:visible[colspan]").all_inner_texts()[0].startswith("b200")
    assert page.locator("button.cell:visible").count() == len(MODELS) * 2 * len(TP)


def test_keys_reach_everything(opened, made):
    page = opened(made[0])
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    cell(page, "openai/gpt-oss-20b", "h100", 1).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert panel(page).locator("h2").inner_text() == KIMI[0]
    assert "TP 8" in panel(page).locator(".where").first.inner_text()
    page.keyboard.press("ArrowRight")
    assert "B200" in panel(page).locator(".where").first.inner_text()
    page.keyboard.press("Escape")
    assert not panel(page).is_visible()
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith(f"{KIMI[0]} on b200, TP 1")
    assert page.locator("button.cell[tabindex='0']").count() == 1


def test_an_address_opens_its_cell(opened, made, browser):
    page = opened(made[0])
    cell(page, *KIMI, "b200", 8).click()
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    assert panel(page).locator("h2").inner_text() == KIMI[0]


def test_head_and_first_column_stay_in_view(opened):
    page = opened(MADE, viewport={"width": 800, "height": 600})
    page.locator("#scroller").evaluate("scroller => scroller.scrollTo(900, 1500)")
    place = page.locator("#scroller").bounding_box()
    head = page.locator("thead th.first").nth(2).bounding_box()
    corner = page.locator("thead th.model").bounding_box()
    label = page.locator("thead .gpu", has_text="h200").bounding_box()
    assert label["x"] > corner["x"] + corner["width"], "a GPU's name stays in view as long as its columns"
    row = page.locator("tbody tr").nth(40).locator("th").bounding_box()
    assert abs(head["y"] - place["y"]) < 1 and abs(corner["y"] - place["y"]) < 1
    assert abs(corner["x"] - place["x"]) < 1 and abs(row["x"] - place["x"]) < 1


def test_the_page_says_how_it_was_made(opened, made):
    path, document = made
    page = opened(path)
    page.get_by_role("button", name="About this page").click()
    text = panel(page).inner_text()
    assert "vllm-0.33.0, vllm-0.32.0" in text and document["moectl"] in text and f"--html {path}" in text
    assert document["assumptions"] and all(line in text for line in document["assumptions"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_its_ground(opened, made, scheme):
    """Contrast of at least 4.5 (WCAG AA) of names in cells, reasons and headings."""
    page = opened(made[0], color_scheme=scheme)
    cell(page, *KIMI, "b200", 1).click()
    worst = page.evaluate(CONTRAST)
    assert worst[0] >= 4.5, worst


CONTRAST = """() => {
  const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const rgb = parse(getComputedStyle(node).backgroundColor);
      if (rgb.length < 4 || rgb[3] > 0) return rgb.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const texts = ".part .backend, .mark, .model span, thead th, small, aside p, aside li, aside dt, aside dd,"
    + "aside h3, aside span, #counts, #legend button, label";
  let worst = [21, ""];
  for (const node of document.querySelectorAll(texts)) {
    if (!node.offsetParent || !node.textContent) continue;
    const pair = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (ratio < worst[0]) worst = [ratio, node.textContent];
  }
  return worst;
}"""


def hostile(document):
    """`document` with one checkpoint whose name, note and sentences try to become markup."""
    changed = copy.deepcopy(document)
    name = changed["checkpoints"][0]["name"]
    changed["checkpoints"][0] |= {"name": HOSTILE, "note": HOSTILE}
    for row in changed["rows"]:
        if row["checkpoint"] == name:
            row |= {"checkpoint": HOSTILE, "because": HOSTILE, "backend": HOSTILE, "usual_name": HOSTILE}
            row["candidates"][0] |= {"backend": HOSTILE, "experts": HOSTILE, "reasons": [HOSTILE]}
    changed["assumptions"] = [HOSTILE]
    return changed


def test_names_from_files_stay_text(opened, made, tmp_path):
    path = tmp_path / "hostile.html"
    path.write_bytes(html_page([hostile(made[1])], f"moectl {HOSTILE}"))
    page = opened(path)
    assert rows_shown(page)[0].split() == printable(HOSTILE).split()
    assert page.locator("img, tbody script, aside script").count() == 0
    page.locator("button.cell").first.click()
    assert panel(page).locator(".choice .backend").inner_text() == printable(HOSTILE)
    page.get_by_role("button", name="About this page").click()
    assert printable(HOSTILE) in panel(page).locator("code").inner_text()
    assert page.locator("img").count() == 0 and page.locator("script").count() == 2


def test_a_page_of_one_hostile_name_has_it_escaped_in_its_title(made, tmp_path):
    document = hostile(made[1])
    document["rows"] = [row for row in document["rows"] if row["checkpoint"] == HOSTILE]
    text = html_page([document], "moectl").decode()
    assert "<img" not in text and text.count("</script>") == 2 and "\u2028{" not in text.split("<script")[1]
    assert "&lt;/script&gt;&lt;img src=x" in re.search("<title>(.*?)</title>", text)[1]


def test_a_name_that_is_no_utf8_makes_a_page(made):
    name = made[1]["rows"][0]["checkpoint"]
    document = json.loads(json.dumps(made[1]).replace(name, "m\\udcff"))
    document["rows"] = [row for row in document["rows"] if row["checkpoint"] == "m\udcff"]
    assert "<title>m\\udcff: MoE backends" in html_page([document], "moectl").decode()


def test_equally_frequent_backends_are_in_the_order_of_the_rows(made):
    """Whatever the hashes of their names are in this process."""
    first = next(row for row in made[1]["rows"] if row["usable"])
    names = [f"backend{number}" for number in range(12)]
    rows = [{**first, "backend": name, "layers": [number]} for number, name in enumerate(names)]
    assert page_data([{**made[1], "rows": rows}], "moectl")["backends"] == names


def test_nothing_in_a_page_is_loaded_or_markup_from_data(made):
    text = made[0].read_text()
    assert not re.search(r"""(?:src|href|url|import)\s*[=(]\s*["']?(?:https?:)?//""", text)
    assert "innerHTML" not in text and "eval(" not in text
    assert "default-src 'none'" in text and "unsafe" not in text


def test_a_page_can_hold_several_policies(made):
    """Answers of another policy for the same models become a second table in the same columns."""
    options = ("--gpu", "h100,b200", "--tp", "8", "--policy", "moectl", "--offline", "--json")
    other = moectl("explain", MODELS[0], *options).document
    data = page_data([made[1], other], "moectl")
    assert [policy["name"] for policy in data["policies"]] == ["vllm-0.33.0", "moectl"]
    assert len(data["columns"]) == len(GPUS) * len(TP) and len(data["models"]) == len(MODELS)
    rows = [data["shared"][row] for row in data["policies"][1]["cells"]]
    filled = [entry for row in rows for entry in row if entry is not None]
    assert len(filled) == 2
    parts = [part for entry in filled for part in data["entries"][entry][0]]
    backends = [data["answers"][answer]["backend"] for _, answer in parts]
    assert backends == [row["backend"] for row in other["rows"]]


def choose_engine(page, name):
    page.locator("#engine").select_option(label=engine_named(name).versioned)


def test_a_page_answers_for_every_engine_and_release(opened, made):
    """Each is what the command answers for it alone, and nothing is loaded for it."""
    page = opened(made[0])
    titles = page.locator("#engine option").all_inner_texts()
    assert titles == [engine.versioned for engine in ENGINES.values()]
    for name in ("moectl", "vllm==0.31.0", "sglang"):
        options = ("--gpu", ",".join(GPUS), "--tp", ",".join(map(str, TP)), "--offline", "--json")
        rows = moectl("explain", *MODELS, *options, "--engine", name).document["rows"]
        choose_engine(page, name)
        wanted = {}
        for row in rows:
            state = "refused" if row["refusal"] or row["gates"] else "none"
            names = wanted.setdefault((row["checkpoint"], row["gpu"], row["tp"]), {})
            names[row["backend"] if row["usable"] else state] = None
        assert page.locator("button.cell").count() == len(wanted)
        for key, names in wanted.items():
            assert cell(page, *key).locator(".backend").all_inner_texts() == [*names], (name, key)
        chips = page.locator("#legend button[data-filter^='backend:']").all()
        shown = {chip.get_attribute("data-filter").removeprefix("backend:") for chip in chips}
        assert shown == {row["backend"] for row in rows if row["usable"]}


def test_what_is_open_stays_open_under_another_engine(opened, made):
    page = opened(made[0])
    cell(page, *KIMI, "h100", 8).click()
    choose_engine(page, "moectl")
    where = panel(page).locator(".where").first.inner_text()
    assert "H100" in where and "TP 8" in where and where.endswith("moectl")
    assert f"moectl explain {KIMI[0]} --gpu h100 --tp 8 -v --engine moectl" in panel(page).inner_text()
    assert page.locator("button.cell[aria-current='true']").count() == 1
    address = page.url
    assert address.endswith("/moectl")
    page.goto("about:blank")
    page.goto(address)
    assert panel(page).locator(".where").first.inner_text() == where
    assert page.locator("#engine option:checked").inner_text() == "moectl"
    choose_engine(page, "vllm")
    assert "vllm serve" in panel(page).inner_text() and not page.url.endswith("/moectl")


def test_a_filter_that_an_engine_has_no_cell_for_is_dropped(opened, made):
    page = opened(made[0])
    page.select_option("#backend", "backend:humming")
    choose_engine(page, "vllm==0.32.0")
    assert page.locator("#backend").input_value() == "backend:humming"
    choose_engine(page, "moectl")
    assert page.locator("#backend").input_value() == ""
    assert len(rows_shown(page)) == len(MODELS)


def test_a_page_of_one_engine_has_no_switch_and_less_than_all_of_them(opened, made, tmp_path):
    """All engines and releases take less than three times the bytes of one: what is equal is there once."""
    one = tmp_path / "one.html"
    options = ("--gpu", ",".join(GPUS), "--tp", ",".join(map(str, TP)), "--offline", "--html", one)
    done = moectl("explain", *MODELS, *options, "--engine", "vllm")
    assert "engines" not in done.words
    assert not opened(one).locator("#engine").is_visible()
    assert made[0].stat().st_size < 3 * one.stat().st_size


def test_repeated_reasons_are_stored_once(made):
    rows = made[1]["rows"]
    data = page_data([made[1]], "moectl")
    assert len(data["strings"]) == len(set(data["strings"]))
    assert len(data["candidates"]) < sum(len(row["candidates"]) for row in rows) * 2 / 3
    assert len(data["answers"]) < len(rows)


def test_the_page_of_all_built_in_models_is_that_of_today(tmp_path, monkeypatch):
    """What scripts/refresh_docs wrote, made again; a browser loads it in another test."""
    monkeypatch.chdir(tmp_path)
    done = moectl(*PAGES[MADE.name].split()[1:], env={"MOECTL_OFFLINE": "1"})
    assert Path(MADE.name).read_bytes() == MADE.read_bytes(), "run scripts/refresh_docs"
    assert "60 models, 16 columns" in done.words
    assert MADE.stat().st_size < 500_000


def test_sixty_models_open_within_three_seconds(opened):
    start = time.perf_counter()
    page = opened(MADE)
    seconds = time.perf_counter() - start
    assert page.locator("tbody tr").count() == 60 and page.locator("button.cell").count() == 960
    assert seconds < 3


def test_gpus_and_deployments_have_defaults_that_are_printed(tmp_path):
    done = moectl("explain", MODELS[0], "--offline", "--html", tmp_path / "one.html")
    assert "taking --gpu h100,h200,b200,mi300x --tp 1,2,4,8" in done.stderr
    assert "1 model, 16 columns" in done.words
    options = ("--dp", "2", "--gpu", "h200", "--offline", "--html", tmp_path / "one.html")
    done = moectl("explain", MODELS[0], *options)
    assert "taking" not in done.stderr and "1 model, 1 column," in done.words


def test_a_replayed_document_makes_the_same_answers(made, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(made[1]))
    options = ("--replay", tmp_path / "a.json", "--html", tmp_path / "b.html", "--json")
    again = moectl("explain", *options).document
    first, second = (page_data([each], "") for each in (made[1], again))
    assert first["policies"] == second["policies"] and first["answers"] == second["answers"]
    assert b"60 MoE layers of 384 experts" in (tmp_path / "b.html").read_bytes()


@pytest.mark.parametrize("other", [("--why", "marlin"), ("--md",)])
def test_other_forms_of_answers_are_refused_beside_a_page(tmp_path, other):
    done = moectl("explain", MODELS[0], "--gpu", "h200", *other, "--html", tmp_path / "a.html", code=2)
    assert "--html" in done.stderr and not (tmp_path / "a.html").exists()


def test_a_page_never_replaces_what_is_read(tmp_path, tiny_gpt_oss):
    config = tiny_gpt_oss / "config.json"
    before = config.read_bytes()
    done = moectl("explain", tiny_gpt_oss, "--gpu", "h200", "--html", config, code=2)
    assert "cannot write" in done.stderr and config.read_bytes() == before
    done = moectl("explain", MODELS[0], "--gpu", "h200", "--html", tmp_path / "none" / "a.html", code=3)
    assert "not a writable directory" in done.stderr


def test_more_cells_than_a_browser_draws_at_once_are_refused(tmp_path):
    done = moectl("explain", "--gpu", "all", "--tp", "1,2,4,8", "--html", tmp_path / "a.html", code=2)
    assert "a page has at most 5000 cells" in done.stderr

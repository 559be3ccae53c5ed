"""The page of `relaylm serve`, in a real browser and with a real server."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
import uvicorn

import relaylm
from relaylm.cli import main as cli
from relaylm.serve.app import Settings, create_app
from relaylm.serve.host import Host
from relaylm.show.colours import MODELS, colour_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&amp;$DATA"
SETTINGS = {"prompt": "the ", "length": "48", "seed": "3", "schedule": "sandwich:50%", "pace": "spacing", "number": "8"}


@pytest.fixture(scope="module")
def family() -> Any:
    return relaylm.Family.load("wiki-char", device="cpu")


@pytest.fixture(scope="module")
def address(family: Any) -> Iterator[str]:
    """A server in a thread."""
    app = create_app(Host({"wiki-char": family}), Settings())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def view(chrome: Any, address: str) -> Iterator[Any]:
    """A tab; it must neither complain nor ask any other host."""
    context = chrome.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    view, complaints = context.new_page(), []
    view.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
    view.on("pageerror", lambda error: complaints.append(str(error)))
    view.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    here = (address, "blob:", "data:", "file:")
    view.on("request", lambda request: request.url.startswith(here) or complaints.append(request.url))
    yield view
    context.close()
    refusals = re.compile(r"status of 40[01] ")  # the browser logs every refusal, also those that a test asks for
    assert [text for text in complaints if not refusals.search(text)] == []


def opened(view: Any, address: str, **settings: str) -> None:
    view.goto(f"{address}/#{urlencode(SETTINGS | settings)}")
    view.locator(".segment").first.wait_for()
    sync_api.expect(view.locator("#plan")).not_to_be_empty()


def run(view: Any) -> None:
    view.locator("#run").click()
    view.locator("#save:not([disabled])").wait_for()
    view.locator("#differ").wait_for()


def text_of(lane: Any) -> str:
    return "".join(lane.locator(".text span").all_text_contents())


def notation(view: Any) -> str:
    return view.locator("#schedule").input_value()


def test_two_lanes_write_what_sample_writes(view: Any, address: str, family: Any, tmp_path: Path) -> None:
    opened(view, address)
    run(view)
    options: dict[str, Any] = {"prompt": "the ", "length": 48, "seed": 3, "spacing": 8}
    wanted = [relaylm.sample(family, schedule, **options) for schedule in ("heavy", "sandwich:50%")]
    lanes = [view.locator(".lane").nth(k) for k in range(2)]
    assert [text_of(lane) for lane in lanes] == [samples.texts[0] for samples in wanted]
    # What differs is marked, in both, and counted.
    pairs = list(zip(wanted[0].texts[0], wanted[1].texts[0], strict=True))
    differ = [position for position, (one, other) in enumerate(pairs) if one != other]
    assert differ, "a seed under which nothing differs tests nothing"
    for lane in lanes:
        marked = lane.locator(".text span").evaluate_all("all => all.map(span => span.classList.contains('differs'))")
        assert [position for position, mark in enumerate(marked) if mark] == differ
    assert view.locator("#differ").text_content().startswith(f"{len(differ)} of {48 - 4} tokens differ")
    # Colours are the writers', and pointing at a token says when, by whom and how likely.
    light, heavy = family.light, family.heavy
    writers = wanted[1].trace.model_nL[0]
    for position in (4, 20, 47):
        token = lanes[1].locator(".text span").nth(position)
        token.hover()
        said = lanes[1].locator(".inspect").text_content()
        name = wanted[1].trace.models[writers[position]]
        about = rf"position {position + 1} of 48 · by {name} in call \d+ of \d+, t = [01]\.\d+ · probability [\d.e-]+$"
        assert re.search(about, said), said
        assert lanes[0].locator(".text span").nth(position).evaluate("span => span.classList.contains('on')")
        rank = family.names.index(name)
        assert token.evaluate("span => span.style.getPropertyValue('--c')") == colour_of(rank)
    view.locator("#prompt").focus()
    # Costs.
    notes = view.locator("#costs .note").all_text_contents()
    assert notes[:2] == [str(samples.cost.total_calls) for samples in wanted] and len(notes) == 6
    assert wanted[1].cost.calls[light] and wanted[1].cost.calls[heavy]
    # The keyboard goes through tokens, and back through the calls.
    lanes[0].locator(".text").focus()
    for key in ("End", "ArrowLeft", "ArrowUp", "ArrowDown", "Home", "ArrowRight"):
        view.keyboard.press(key)
    assert "position 2 of 48 · given" in lanes[0].locator(".inspect").text_content()
    view.locator("#controls input").fill("0")
    assert lanes[1].locator(".mask").count() == 44
    # The player that is saved has both lanes in it, whole.
    with view.expect_download() as download:
        view.locator("#save").click()
    download.value.save_as(tmp_path / "saved.html")
    saved = view.context.new_page()
    saved.goto((tmp_path / "saved.html").as_uri() + "#1/999")
    assert [text_of(saved.locator("section").nth(k)) for k in range(2)] == [samples.texts[0] for samples in wanted]


def test_the_strip_is_edited_by_keyboard_and_pointer(view: Any, address: str, family: Any) -> None:
    opened(view, address)
    (light, middle, heavy), borders = family.names, view.get_by_role("slider", name="border between")
    assert borders.count() == 2 and view.locator("#plan").text_content()
    first = borders.first
    first.focus()
    for key in ("ArrowRight", "ArrowRight", "PageUp", "Shift+ArrowLeft"):
        view.keyboard.press(key)
    assert notation(view) == f"{light}:36.9% {heavy}:38.1% {light}:25%"
    assert first.get_attribute("aria-valuenow") == "36.9" and first.get_attribute("aria-valuemax") == "74"
    view.keyboard.press("Home")
    assert notation(view) == f"{light}:1% {heavy}:74% {light}:25%"
    view.keyboard.press("End")
    view.keyboard.press("ArrowRight")
    assert notation(view) == f"{light}:74% {heavy}:1% {light}:25%"
    # Delete on a border lets the stretch before it go on; s splits, a digit chooses the model, delete removes.
    view.keyboard.press("Delete")
    assert notation(view) == f"{light}:75% {light}:25%"
    view.keyboard.press("s")
    view.keyboard.press("2")
    assert notation(view) == f"{light}:38% {middle}:37% {light}:25%"
    view.keyboard.press("Delete")
    assert notation(view) == light
    view.get_by_role("button", name="Split").click()
    view.get_by_role("group", name="Model of the stretch").get_by_role("button", name=heavy).click()
    view.get_by_label("Share, %").fill("30")
    view.get_by_label("Share, %").press("Enter")
    assert notation(view) == f"{light}:70% {heavy}:30%"
    # The pointer.
    box, border = view.locator("#strip").bounding_box(), borders.first.bounding_box()
    view.mouse.move(border["x"] + border["width"] / 2, border["y"] + 10)
    view.mouse.down()
    view.mouse.move(box["x"] + 0.4 * box["width"], border["y"] + 10, steps=3)
    view.mouse.up()
    assert notation(view) == f"{light}:40% {heavy}:60%"
    # What is typed is drawn; counts of steps and a spacing go where they belong; what is wrong is said.
    expect = sync_api.expect
    for text, stretches, pace, number in (
        ("L8 H32 L8", 3, "steps", "48"),
        ("small-first:25% spaced:5:prefix", 2, "prefix", "5"),
    ):
        view.locator("#schedule").fill(text)
        view.locator("#schedule").press("Enter")
        expect(view.locator("#pace")).to_have_value(pace)
        expect(view.locator("#number")).to_have_value(number)
        expect(view.locator(".segment")).to_have_count(stretches)
    for text in ("interleaved:25%", "sandwhich:25%"):
        asked = {"schedule": text, "spacing": "5:prefix", "length": "48"}
        message = httpx.get(f"{address}/v1/schedule", params=asked).json()["error"]["message"]
        view.locator("#schedule").fill(text)
        view.locator("#schedule").press("Enter")
        expect(view.locator("#plan.bad")).to_have_text(message)
    # So does a prompt that the tokenizer cannot read, before anything runs; and the alert after a try.
    opened(view, address, prompt="Ünreadable")
    expect(view.locator("#plan.bad")).to_contain_text("the prompt cannot be read")
    view.locator("#run").click()
    expect(view.locator("#problem")).to_contain_text("the prompt cannot be read")
    assert view.locator("#result").is_hidden() and view.locator("#run").is_visible()


def test_a_run_takes_what_is_being_typed(view: Any, address: str) -> None:
    """Ctrl and Enter run without leaving the field; the strip, the lane and the code are of the schedule that runs."""
    opened(view, address, length="32", compare="no")
    for text, code, stretches in (("light", "light", 1), ("L25% H75% spaced:9", "'L25% H75%'", 2)):
        view.locator("#schedule").fill(text)
        view.keyboard.press("Control+Enter")
        for part in (".segment", ".track i"):
            sync_api.expect(view.locator(part)).to_have_count(stretches)
        assert f"--schedule {code} \\\n" in view.locator("#snippet").text_content()
    assert view.locator("#number").input_value() == "9"
    view.locator("#save:not([disabled])").wait_for()


def test_a_link_restores_and_the_code_says_the_same(
    view: Any, address: str, family: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    view.goto(address)
    view.locator(".segment").first.wait_for()
    view.get_by_label("Fill in blanks").check(force=True)
    view.locator("#infill").fill("the ____ of the ______")
    view.locator("#schedule").fill("light")
    view.locator("#schedule").press("Enter")
    view.locator("#pace").select_option("steps")
    view.locator("#number").fill("6")
    view.locator("#seed").fill("11")
    view.locator("#compare").uncheck()
    view.locator("summary").click()
    view.locator("#temperature").fill("0.9")
    view.locator("#share").click()
    view.get_by_text("Link copied.").wait_for()
    link = view.evaluate("navigator.clipboard.readText()")

    other = view.context.new_page()
    other.goto(link)
    other.locator(".segment").first.wait_for()
    codes = []
    for language in ("cli", "python", "curl"):
        for tab in (view, other):
            tab.locator(f"[name=snippet][value={language}]").check(force=True)
        assert view.locator("#snippet").text_content() == other.locator("#snippet").text_content()
        other.locator("#copy").click()
        other.get_by_text("Code copied.").wait_for()
        codes.append(other.evaluate("navigator.clipboard.readText()"))
    other.locator("#run").click()
    other.locator("#save:not([disabled])").wait_for()
    assert other.locator(".lane").count() == 1
    text = text_of(other.locator(".lane"))

    # Pasted, each gives this text.
    command, *words = shlex.split(codes[0].replace("\\\n", ""))
    assert command == "relaylm" and cli.main([*words, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == text
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(codes[1], {})
    assert said.getvalue().startswith(text)
    words = shlex.split(codes[2].replace("\\\n", ""))
    assert words[:2] == ["curl", "-N"] and words[2] == f"{address}/v1/denoise"
    (kind,), (body,) = ([words[k + 1] for k, word in enumerate(words) if word == flag] for flag in ("-H", "-d"))
    answer = httpx.post(words[2], content=body, headers=dict([kind.split(": ")]), timeout=60)
    done = json.loads(re.findall(r"event: done\ndata: (.*)", answer.text)[0])
    assert done["texts"] == [text]


def test_a_link_to_a_family_that_is_not_here_says_so(view: Any, address: str, family: Any) -> None:
    """What is shown is no other family's without a word. A name is text, however it is written."""
    for model in ("small", HOSTILE):
        opened(view, address, model=model, schedule="light")
        said = view.locator("#problem")
        sync_api.expect(said).to_contain_text(f"family {model} is not known to this server: wiki-char is chosen")
        assert view.locator("#model").input_value() == "wiki-char" and said.get_attribute("role") == "alert"
        assert view.locator("#seed").input_value() == "3" and notation(view) == "light"
    view.locator("#compare").uncheck()
    run(view)
    assert view.locator("#problem").is_hidden()
    opened(view, address, model="wiki-char", rule="unheard-of", pace="never")
    sync_api.expect(view.locator("#problem")).to_contain_text("rule unheard-of")
    sync_api.expect(view.locator("#problem")).to_contain_text("never")
    opened(view, address, model="wiki-char")
    assert view.locator("#problem").is_hidden()


def test_the_strip_is_there_whatever_is_wrong(view: Any, address: str) -> None:
    """A text that the family cannot read says nothing about the schedule; of one that is none nothing can be shown."""
    opened(view, address, prompt="THE", schedule="L25% H75%")
    sync_api.expect(view.locator("#plan")).to_contain_text("'T' is not a symbol")
    assert view.locator(".segment b").all_inner_texts() == ["4b", "12b"]
    view.locator("#run").click()
    sync_api.expect(view.locator("#problem")).to_contain_text("'T' is not a symbol")
    view.locator("#prompt").fill("the ")
    sync_api.expect(view.locator("#problem")).to_be_hidden()
    view.goto("about:blank")
    opened(view, address, schedule="nonsense")
    sync_api.expect(view.locator("#plan")).to_contain_text("nonsense")
    assert view.locator(".segment b").all_inner_texts() == ["12b"]
    view.locator(".segment").press("s")
    assert notation(view) == "12b:50% 4b:50%"
    sync_api.expect(view.locator("#plan")).to_contain_text("calls for 48 positions")


def test_every_control_has_a_name_of_its_own(view: Any, address: str) -> None:
    """As a screen reader has it; what is hidden now has a label, too."""
    opened(view, address)
    view.locator("summary").click()
    run(view)
    view.locator(".border").nth(1).focus()
    fields = view.locator("input, select, textarea")
    labels = fields.evaluate_all(
        "all => all.map(one => one.ariaLabel || [...one.labels].map(label => label.textContent.trim()).join())"
    )
    assert len(labels) > 15 and all(labels), labels
    nodes = view.context.new_cdp_session(view).send("Accessibility.getFullAXTree")["nodes"]
    names = []
    for node in nodes:
        what = {entry["name"]: entry["value"].get("value") for entry in node.get("properties", [])}
        if what.get("focusable") and node["role"]["value"] not in ("option", "RootWebArea"):
            names.append((node["role"]["value"], node.get("name", {}).get("value", "").strip()))
    assert len(names) > 35 and all(name for _, name in names), names
    assert len(set(names)) == len(names), sorted(names)


def events(*pairs: tuple[str, dict[str, Any]]) -> str:
    return "".join(f"event: {name}\ndata: {json.dumps(value)}\n\n" for name, value in pairs)


def test_a_hostile_text_is_text(view: Any, address: str, tmp_path: Path) -> None:
    """Names, tokens, messages: whatever a server says is shown, never read as HTML."""
    models = httpx.get(f"{address}/v1/models").json()
    models["data"][0]["id"] = HOSTILE
    start = {"id": "x", "family": HOSTILE, "rows": 1, "length": 3, "seed": 0, "schedule": HOSTILE, "law": "uniform:3"}
    start |= {"steps": 3, "models": [], "given": [[HOSTILE, None, None]], "planned": None}
    name = models["data"][0]["relaylm"]["models"][-1]["name"]
    written = {"row": 0, "positions": [2], "tokens": [0], "texts": [HOSTILE], "logprobs": [-0.5], "model": name}
    stream = events(
        ("start", start),
        ("written", {**written, "step": 2, "t": 0.7}),
        ("error", {"error": {"message": HOSTILE, "type": "x", "code": "x"}}),
    )
    view.route("**/v1/models", lambda route: route.fulfill(json=models))
    view.route("**/v1/schedule*", lambda route: route.fulfill(status=400, json={"error": {"message": HOSTILE}}))
    view.route("**/v1/denoise", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    view.goto(f"{address}/#{urlencode({'schedule': HOSTILE, 'prompt': HOSTILE})}")
    view.get_by_text(HOSTILE).nth(1).wait_for()  # the plan's line
    view.locator("#run").click()
    view.locator("#problem").get_by_text(HOSTILE).wait_for()
    tokens = view.locator(".lane").first.locator(".text span")
    assert tokens.nth(0).text_content() == tokens.nth(2).text_content() == HOSTILE
    tokens.nth(2).hover()
    assert "probability 0.61" in view.locator(".lane").first.locator(".inspect").text_content()
    with view.expect_download() as download:
        view.locator("#save").click()
    download.value.save_as(tmp_path / "saved.html")
    assert view.locator("img, main script").count() == 0
    view.goto((tmp_path / "saved.html").as_uri() + "#1/9")
    assert text_of(view.locator("section").first).count(HOSTILE) == 2 and view.locator("img").count() == 0


def test_what_the_server_takes_the_page_sends(view: Any, address: str, family: Any) -> None:
    """Numbers between the steps of a field's arrows, too; what the server does not take it says."""
    opened(view, address, schedule="L8 H8 L8", length="24", temperature="0.85", top_p="0.97", compare="no")
    assert view.get_by_label("Share, %").input_value() == "33.4"
    run(view)
    asked: dict[str, Any] = {"prompt": "the ", "length": 24, "seed": 3, "temperature": 0.85, "top_p": 0.97}
    assert text_of(view.locator(".lane")) == relaylm.sample(family, "L8 H8 L8", **asked).texts[0]
    view.locator("#seed").fill("-1")
    view.locator("#run").click()
    sync_api.expect(view.locator("#problem")).to_contain_text("seed must be a whole number")


def test_what_is_pointed_at_is_told_wherever_it_is(view: Any, address: str) -> None:
    """The line about a token may lie over the text, at the bottom of the window: it neither comes and goes under the
    pointer nor covers the token to which the keyboard goes."""
    view.set_viewport_size({"width": 700, "height": 500})
    opened(view, address, length="256", schedule="light", compare="no", pace="spacing", number="32")
    run(view)
    token, line = view.locator(".text span").nth(80), view.locator(".inspect")
    token.evaluate("span => scrollBy(0, span.getBoundingClientRect().bottom - innerHeight + 2)")
    box = token.bounding_box()
    for x in (2, 4, 3):
        view.mouse.move(box["x"] + x, box["y"] + 8)
        view.wait_for_timeout(60)
        assert "position 81 of 256" in line.text_content()
    view.mouse.move(0, 0)
    view.locator(".text").focus()
    view.keyboard.press("Home")
    for _ in range(6):
        view.keyboard.press("ArrowDown")
        token, covering = view.locator(".text .on").bounding_box(), line.bounding_box()
        assert token["y"] + token["height"] <= covering["y"], "the line about the token covers it"


def test_the_ring_of_the_focus_is_whole(view: Any, address: str) -> None:
    """It is drawn up to 4 pixels outside the text, and the line below has a background of its own."""
    opened(view, address)
    run(view)
    for lane in view.locator(".lane").all():
        text, line = (lane.locator(name).bounding_box() for name in (".text", ".inspect"))
        assert line["y"] - (text["y"] + text["height"]) >= 4


def test_the_keyboard_stays_where_run_and_stop_are(view: Any, address: str) -> None:
    opened(view, address, length="256", pace="steps", number="128")
    view.locator("#run").focus()
    for key, wanted in (("Enter", "stop"), ("Enter", "run"), ("Control+Enter", "run"), ("Escape", "run")):
        view.keyboard.press(key)
        if key == "Control+Enter":
            view.locator("#stop").wait_for()
            continue
        sync_api.expect(view.locator(f"#{wanted}")).to_be_focused()
    opened(view, address, length="24", pace="spacing", number="8")
    view.locator("#run").focus()
    view.keyboard.press("Enter")
    view.locator("#save:not([disabled])").wait_for()
    sync_api.expect(view.locator("#run")).to_be_focused()


# The least contrast, by WCAG's formula, of any text with what is behind it, and of the edge of any field, of what is
# chosen and of the line above what differs with what is around it; and which that is.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const seen = colours => {
    for (const colour of ["white", ...colours]) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = rgb => rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
  const contrast = (colour, under) => {
    const behind = [];
    for (let at = under; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const [a, b] = [light(seen(behind)), light(seen([...behind, colour]))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const worst = { text: [99, ""], edge: [99, ""] };
  const note = (kind, ratio, what) => { if (ratio < worst[kind][0]) worst[kind] = [ratio, what]; };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest(".mask, :disabled, option")) continue;
    note("text", contrast(getComputedStyle(element).color, element), texts.currentNode.data);
  }
  const fields = "select, textarea, input:not([type=radio], [type=checkbox], [type=range])";
  const chosen = ".switch :checked + span, [aria-pressed=true]:not(.segment)";
  for (const element of document.querySelectorAll(fields + ", " + chosen)) {
    if (!element.checkVisibility() || element.disabled) continue;
    const { borderTopColor, borderTopWidth } = getComputedStyle(element);
    const ratio = parseFloat(borderTopWidth) ? contrast(borderTopColor, element.parentElement) : 1;
    note("edge", ratio, element.outerHTML.slice(0, 80));
  }
  for (const mark of document.querySelectorAll(".text .differs")) {
    for (const under of [mark, mark.parentElement]) {
      note("edge", contrast(getComputedStyle(mark).borderTopColor, under), mark.outerHTML);
    }
  }
  return worst;
}"""


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (320, "light")])
def test_on_a_phone_nothing_is_cut_off_and_all_is_legible(chrome: Any, address: str, width: int, theme: str) -> None:
    screen = {"viewport": {"width": width, "height": 800}, "has_touch": True, "color_scheme": theme}
    context = chrome.new_context(**screen, reduced_motion="reduce")
    view = context.new_page()
    opened(view, address, length="24", number="4")
    view.locator("summary").click()
    view.locator("#run").tap()
    view.locator("#save:not([disabled])").wait_for()
    view.locator(".written").nth(5).tap()
    assert "by " in view.locator(".inspect").first.text_content()
    assert view.evaluate("document.documentElement.scrollWidth") == width
    for _ in range(2):
        worst = view.evaluate(CONTRAST)
        assert worst["text"][0] >= 4.5 and worst["edge"][0] >= 3, worst
        view.locator("#theme").click()
    context.close()


def test_text_is_legible_in_the_colours_of_all_models(view: Any, address: str) -> None:
    """In a family of many models, too; as it is written, and where it differs."""
    opened(view, address, length="24", number="4", compare="no")
    run(view)
    add = """colours => {
      for (const colour of colours) for (const kind of ["written", "written now", "written differs"]) {
        const span = document.createElement("span");
        Object.assign(span, { className: "by " + kind, textContent: colour });
        span.style.setProperty("--c", colour);
        document.querySelector(".lane .text").append(span);
      }
    }"""
    view.evaluate(add, list(MODELS))
    for _ in range(2):
        worst = view.evaluate(CONTRAST)
        assert worst["text"][0] >= 4.5 and worst["edge"][0] >= 3, worst
        view.locator("#theme").click()


def test_the_page_asks_for_a_key_where_one_is_needed(view: Any, address: str) -> None:
    def guarded(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer open":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "the API key is missing or wrong"}})

    view.route("**/v1/**", guarded)
    view.goto(address)
    view.locator("#problem").get_by_text("API key").wait_for()
    assert view.locator("#key").evaluate("key => key === document.activeElement")
    view.locator("#key").fill("open")
    view.locator("#key").press("Tab")
    view.locator(".segment").first.wait_for()
    assert "open" not in view.url and view.locator("#problem").is_hidden()


def test_the_policy_of_the_page_is_strict(address: str) -> None:
    answer = httpx.get(address)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
    assert not re.search(r"<script(?![^>]*src=)|\sstyle=|<style|\son\w+=|https?:", answer.text)


def test_stop_stops(view: Any, address: str) -> None:
    opened(view, address, length="256", pace="steps", number="256")
    view.locator("#run").click()
    view.locator(".written").first.wait_for()
    view.locator("#stop").click()
    view.locator("#run").wait_for()
    assert view.locator(".mask").count() and view.locator("#problem").is_hidden()
    for _ in range(100):  # no row stays behind
        if not httpx.get(f"{address}/health").json().get("rows_in_flight"):
            break
        view.wait_for_timeout(100)
    assert not httpx.get(f"{address}/health").json().get("rows_in_flight")

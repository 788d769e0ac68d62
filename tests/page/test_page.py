"""The admin page in a real Chromium: what it shows, by pointer and keyboard, on narrow and wide screens, and how fast.

Screenshots go to $QKV_PAGE_SHOTS, for people.
"""

import json
import os
import pathlib
import re
import shutil
import statistics
import time
import urllib.parse
import urllib.request

import grpc
import pytest
from kv import FP16, TIMEOUT
from playwright.sync_api import sync_playwright
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2
from scene import HEADS, LAYERS, MARKUP, ODD_NAMES, TOKENS, admin_address, fill, open_session, scene

PATIENCE = 60  # seconds
SHOTS = pathlib.Path(os.environ.get("QKV_PAGE_SHOTS", "build/page/shots"))
COLUMNS = 2048  # of the map


@pytest.fixture(scope="session")
def shown(tmp_path_factory):
    with scene(tmp_path_factory.mktemp("data")) as (daemon, stub):
        yield daemon, stub, f"http://{admin_address(daemon)}"


@pytest.fixture(scope="session")
def chromium():
    path = shutil.which("chromium")
    assert path, "chromium is missing; tests/run.sh --only page installs it"
    with sync_playwright() as playwright:
        # Its sandbox needs rights that containers seldom give; it is shown this daemon's page alone.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browse(chromium, shown):
    """Opens the page, watches that nothing is wrong and nothing asked of others, and closes it."""
    contexts, wrong = [], []
    base = shown[2]

    def watch(request):
        if not request.url.startswith((base + "/", "data:,")):
            wrong.append(f"asked for {request.url}")

    def go(fragment="", width=1280, height=900, scheme="light", route=None, expected=None):
        """`expected` is part of a line that the browser itself writes to its console."""
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") and
                not (expected and expected in m.text) else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}"))
        page.on("request", watch)
        if route:
            route(page)
        page.goto(base + "/" + fragment)
        until(page, "document.querySelector('#about').textContent !== 'loading'")
        return page

    yield go
    for context in contexts:
        context.close()
    assert wrong == []


def until(page, condition):
    """The page's policy forbids what playwright's own wait_for_function does."""
    end = time.monotonic() + PATIENCE
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.02)


def address_of(session, tenant="default", view="bits"):
    return "#" + urllib.parse.urlencode({"session": session, "tenant": tenant, "view": view})


def until_loaded(page, layers):
    until(page, f"map !== null && map.data.length === {layers} && map.dirty.size === 0"
                " && document.querySelector('#progress').textContent === ''")


def api(shown, path, **query):
    with urllib.request.urlopen(f"{shown[2]}/api/{path}?{urllib.parse.urlencode(query)}", timeout=PATIENCE) as answer:
        return json.load(answer)


def column(page, selector, number):
    return page.eval_on_selector_all(f"{selector} tr", f"rows => rows.map(row => row.children[{number}].textContent)")


def pixel(page, x, y):
    """Colour of a column and row of the map."""
    return tuple(page.evaluate(f"""(() => {{
      const g = new OffscreenCanvas(1, 1).getContext('2d', {{willReadFrequently: true}});
      g.drawImage(map.canvas, {x}, {y}, 1, 1, 0, 0, 1, 1);
      return [...g.getImageData(0, 0, 1, 1).data];
    }})()"""))


def point_at(page, x, y):
    """Moves the pointer over a column and row of the map."""
    left, top = page.evaluate(f"""(() => {{
      $('map').scrollIntoView({{block: 'end'}});
      const p = plot(), box = $('map').getBoundingClientRect();
      const across = ({x} + 0.5 - map.left) / (map.right - map.left), down = ({y} + 0.5) / map.canvas.height;
      return [box.left + p.x + across * p.w, box.top + p.y + down * p.h];
    }})()""")
    page.mouse.move(left, top)


# ---- What it shows ----


def test_tenants_sessions_and_calls(browse, shown):
    page = browse()
    until(page, "$('sessions').children.length >= 50 && $('tenants').children.length === 3")
    assert column(page, "#tenants", 0) == ["chat", "default", "search"] and column(page, "#tenants", 1)[0] == "60"
    for row, tenant in enumerate(api(shown, "tenants")["tenants"]):
        memory = column(page, "#tenants", 3)[row]
        assert abs(size(memory) / tenant["memory_bytes"] - 1) < 0.1, (memory, tenant)
        assert abs(size(column(page, "#tenants", 4)[row]) / tenant["storage_bytes"] - 1) < 0.1
    names = column(page, "#calls", 0)
    assert names[0] == "all calls" and {"Append", "Attend", "Fork", "· encode"} <= set(names)
    for _ in range(200):
        shown[1].GetSession(kv.GetSessionRequest(session="large"), timeout=TIMEOUT)
    until(page, "[...document.querySelectorAll('#calls tr')].some(row => row.firstChild.textContent === 'GetSession' &&"
                " row.children[1].textContent > '0.0' && row.children[3].textContent.endsWith('s'))")
    page.get_by_role("button", name="GetSession").click()
    assert page.locator("#latencies").get_attribute("aria-label").startswith("p50 (blue) and p99 (orange): up to ")
    assert page.locator("#rates").get_attribute("aria-label").startswith("GetSession, a second: up to ")
    assert page.locator("#calls tr[aria-current=true]").count() == 1


def size(text):
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)


def test_search_and_pages(browse):
    page = browse()
    page.get_by_placeholder("part of a name").fill("USER-1")
    page.get_by_placeholder("tenant (all)").fill("search")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#sessions tr').length === 1")
    assert column(page, "#sessions", 0) == ["search/user-1"] and column(page, "#sessions", 1) == ["search"]
    page.get_by_role("button", name="chat", exact=True).click()  # the tenant's name
    page.get_by_placeholder("part of a name").fill("")
    page.get_by_role("button", name="Search", exact=True).click()
    until(page, "document.querySelectorAll('#sessions tr').length === 50")
    first = column(page, "#sessions", 0)
    page.get_by_role("button", name="Next page").click()
    until(page, "document.querySelectorAll('#sessions tr').length === 10")
    assert set(column(page, "#sessions", 1)) == {"chat"} and not set(first) & set(column(page, "#sessions", 0))
    assert not page.get_by_role("button", name="Next page").is_visible()
    page.get_by_placeholder("part of a name").fill("nobody")
    page.get_by_role("button", name="Search", exact=True).click()
    until(page, "document.querySelector('#sessions').textContent === 'none'")


def test_the_map_is_what_the_daemon_says(browse, shown):
    page = browse(address_of("large"))
    until_loaded(page, LAYERS)
    assert page.evaluate("[map.canvas.width, map.canvas.height]") == [COLUMNS, LAYERS * HEADS]
    for layer in (0, 1, 31):
        truth = api(shown, "map", session="large", layer=layer, buckets=COLUMNS)
        for x, head in ((0, 0), (COLUMNS // 2 + 9, 3), (COLUMNS - 1, 7)):
            point_at(page, x, layer * HEADS + head)
            text = page.locator("#at").text_content()
            first, per = x * truth["tokens_per_bucket"], truth["tokens_per_bucket"]
            assert text.startswith(f"layer {layer}, head {head}, tokens {first:,} to {first + per - 1:,}: "
                                   f"{truth['bits'][head][x]:.2f} bits a coordinate, attention "), text
            shown_attention = float(re.search(r"attention (\S+),", text).group(1))
            assert shown_attention == pytest.approx(truth["attention"][head][x], rel=0.01)
            where = max(range(5), key=lambda i: truth["places"][i][x])
            assert {"exact": "exact rows", "memory": "in memory", "shared": "in memory, shared"}[
                truth["place_names"][where]] in text
    four, one, exact = pixel(page, 5, 0), pixel(page, COLUMNS // 2 + 5, 0), pixel(page, COLUMNS - 1, 0)
    assert four == (38, 130, 142, 255) and exact == (170, 170, 170, 255)  # of the legend
    assert abs(one[0] - 72) < 8 and abs(one[1] - 40) < 8
    page.get_by_role("button", name="Where it lies").click()
    until(page, "map.dirty.size === 0")
    assert pixel(page, 5, 9) == (38, 160, 105, 255) and pixel(page, COLUMNS - 9, 9) == (56, 120, 216, 255)
    page.get_by_role("button", name="Attention received").click()
    until(page, "map.dirty.size === 0")
    truth = api(shown, "map", session="large", layer=31, buckets=COLUMNS)["attention"][0]
    brightest, darkest = truth.index(max(truth)), truth.index(min(truth[:-1]))
    assert sum(pixel(page, brightest, 31 * HEADS)[:2]) > sum(pixel(page, darkest, 31 * HEADS)[:2])


def test_a_session_on_the_ssd(browse):
    page = browse(address_of("search/user-0", "search", "places"))
    until_loaded(page, 6)
    assert pixel(page, 0, 0) == (217, 119, 6, 255)
    point_at(page, 0, 0)
    assert "100 % on the SSD alone" in page.locator("#at").text_content()
    page.get_by_role("button", name="Bits held").click()
    until(page, "map.dirty.size === 0")
    assert pixel(page, 0, 0) == (40, 40, 48, 255)


def test_it_follows_a_session_that_grows(browse, shown):
    _, stub, _ = shown
    model = model_pb2.Model(name="growing", layers=2, kv_heads=2, q_heads=2, key_dim=16, value_dim=16, dtype=FP16)
    stub.RegisterModel(model_pb2.RegisterModelRequest(model=model), timeout=TIMEOUT)
    open_session(stub, "grows", "growing")
    page = browse(address_of("grows"), expected="404 (Not Found)")
    until_loaded(page, 2)
    assert page.locator("#facts").text_content().startswith("0 tokens, 2 layers of 2 KV heads, model growing")
    fill(stub, "grows", model, 500)
    page.get_by_role("button", name="Reload").click()
    until(page, "map.canvas.width === 500")
    until_loaded(page, 2)
    assert page.locator("#facts").text_content().startswith("500 tokens, ")
    stub.CloseSession(kv.CloseSessionRequest(session="grows"), timeout=TIMEOUT)
    page.get_by_role("button", name="Reload").click()
    until(page, "document.querySelector('#facts').textContent.includes('no session grows')")


# ---- By keyboard ----


def focused(page):
    return page.evaluate("document.activeElement.id || document.activeElement.textContent")


def tab_to(page, wanted, key="Tab"):
    for _ in range(150):
        page.keyboard.press(key)
        if focused(page) == wanted:
            return
    raise AssertionError(f"Tab does not reach {wanted}")


def test_by_keyboard_alone(browse):
    page = browse()
    until(page, "document.querySelectorAll('#sessions tr').length >= 50")
    tab_to(page, "text")
    page.keyboard.type("large")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#sessions tr').length === 2")
    tab_to(page, "large")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    until_loaded(page, LAYERS)
    assert focused(page) == "h-one"
    tab_to(page, "Where it lies")
    page.keyboard.press("Space")
    assert page.evaluate("view") == "places"
    tab_to(page, "map")
    page.keyboard.press("ArrowRight")
    assert "layer 0, head 0, tokens 0 to 63: " in page.locator("#at").text_content()
    for key in ("ArrowRight", "Shift+ArrowRight", "PageDown", "ArrowDown"):
        page.keyboard.press(key)
    assert "layer 1, head 1, tokens 1,088 to 1,151: " in page.locator("#at").text_content()
    page.keyboard.press("End")
    assert f"tokens {TOKENS - 64:,} to {TOKENS - 1:,}: " in page.locator("#at").text_content()
    for _ in range(20):
        page.keyboard.press("+")
    left, right = page.evaluate("[map.left, map.right]")
    assert right == COLUMNS and right - left == 8
    page.keyboard.press("Home")
    assert page.evaluate("[map.left, map.right]") == [0, 8]
    page.keyboard.press("-")
    assert page.evaluate("[map.left, map.right]") == [0, 16]
    page.keyboard.press("0")
    assert page.evaluate("[map.left, map.right]") == [0, COLUMNS]


def test_the_focus_stays_while_figures_change(browse, shown):
    page = browse()
    until(page, "document.querySelectorAll('#calls tr').length > 3")
    page.get_by_role("button", name="Attend", exact=True).focus()
    before = page.evaluate("past.length")
    shown[1].Touch(kv.TouchRequest(session="large"), timeout=TIMEOUT)  # which is a new row
    until(page, f"past.length > {before} + 6 && $('calls').textContent.includes('Touch')")  # sessions are listed again, too
    assert focused(page) == "Attend"


# ---- Screens ----


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width,height", [(360, 740), (768, 1024), (1920, 1080)])
def test_screens(browse, width, height, scheme):
    view = {360: "attention", 768: "places", 1920: "bits"}[width]
    page = browse(address_of("large", view=view), width, height, scheme)
    until_loaded(page, LAYERS)
    until(page, "past.length > 1")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    point_at(page, 1100, 100)
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{width}-{scheme}-{view}.png", full_page=True)
    back, text = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    assert contrast(back, text) > 7 and (luminance(back) > 0.5) == (scheme == "light")
    card = page.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")
    for element in ("#about", "#sessions button", "#calls td", "#legend", "#at"):
        colour = page.eval_on_selector(element, "e => getComputedStyle(e).color")
        assert contrast(card, colour) > 4.5, element


def luminance(colour):
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
              for c in (int(n) / 255 for n in re.findall(r"\d+", colour)[:3])]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


# ---- How fast ----


def test_131072_tokens_stay_fluent(browse):
    """The script's time of a frame, and of what is done to a view; printed, and bounded so that a slow way shows."""
    began = time.monotonic()
    page = browse(address_of("large"), 1920, 1080)
    until_loaded(page, LAYERS)
    loaded = time.monotonic() - began
    page.evaluate("""(() => {
      window.spent = {frames: [], paints: []};
      const frame = drawMap, one = paintLayer;
      drawMap = () => { const t = performance.now(); frame(); spent.frames.push(performance.now() - t); };
      paintLayer = index => { const t = performance.now(); one(index); spent.paints.push(performance.now() - t); };
      window.beats = [];
      let last = performance.now();
      const beat = now => { beats.push(now - last); last = now; requestAnimationFrame(beat); };
      requestAnimationFrame(beat);
    })()""")
    for i in range(120):  # hovering
        point_at(page, 17 * i % COLUMNS, 7 * i % (LAYERS * HEADS))
    page.locator("#map").focus()
    for key in ("+", "-") * 20:
        page.keyboard.press(key)
    spent, beats = page.evaluate("[spent, beats]")
    views = []
    for view in ("attention", "places", "bits") * 3:
        page.evaluate("spent.paints.length = 0")
        page.click(f"[data-view={view}]")
        until(page, "spent.paints.length > 0 && map.dirty.size === 0")
        views.append(sum(page.evaluate("spent.paints")))
    print(f"\nloaded in {loaded:.1f} s; of a frame, ms: {statistics.median(spent['frames']):.2f} median, "
          f"{max(spent['frames']):.2f} longest of {len(spent['frames'])}; between frames "
          f"{statistics.median(beats):.1f} median; another view {statistics.median(views):.0f} median, "
          f"{max(views):.0f} longest")
    assert len(spent["frames"]) > 50 and statistics.median(spent["frames"]) < 8
    assert statistics.median(views) < 150


# ---- Names that are not nice ----


def test_the_daemon_refuses_markup_in_names(shown):
    _, stub, _ = shown
    for name in MARKUP:
        opening = kv.OpenSessionRequest(session=name, model="small")
        model = model_pb2.Model(name=name, layers=1, kv_heads=1, q_heads=1, key_dim=16, value_dim=16, dtype=FP16)
        tenant = kv.OpenSessionRequest(session="s", model="small", tenant=name)
        for call, request in ((stub.OpenSession, opening), (stub.OpenSession, tenant),
                              (stub.RegisterModel, model_pb2.RegisterModelRequest(model=model))):
            with pytest.raises(grpc.RpcError) as caught:
                call(request, timeout=TIMEOUT)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value


def test_odd_names_are_like_any_other(browse):
    page = browse()
    page.get_by_placeholder("tenant (all)").fill("default")
    page.keyboard.press("Enter")
    until(page, "!document.querySelector('#sessions').textContent.includes('chat/')")
    assert set(ODD_NAMES) <= set(column(page, "#sessions", 0))
    for name in ODD_NAMES:
        page.get_by_role("button", name=name, exact=True).click()
        until(page, f"document.querySelector('#h-one').textContent === {json.dumps(name + ', tenant default')}")
        until_loaded(page, 6)
        assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_markup_in_answers_is_text(browse):
    """Were the daemon to let such names in, or an answer be forged, it would be text."""
    def row(name):
        return {"session": name, "tenant": name, "model": name, "length": 1, "memory_bytes": 1, "storage_bytes": 1,
                "bits_per_coordinate": 1, "last_used_unix_ms": 1, "layers": 1, "kv_heads": 1, "codec": name,
                "shared_bytes": 0, "fp16_bytes": 0, "first_position": 0, "lengths": [1]}

    def forge(page):
        def status(route):
            value = route.fetch().json()
            value.update(version=MARKUP[0], state=MARKUP[1], kernels=MARKUP[2], listen=MARKUP)
            value["calls"] = [dict(value["calls"][0], method=name, service="s") for name in MARKUP]
            route.fulfill(json=value)

        page.route("**/api/status", status)
        page.route("**/api/sessions?*", lambda route: route.fulfill(json={"sessions": [row(name) for name in MARKUP]}))
        page.route("**/api/session?*", lambda route: route.fulfill(json=row(MARKUP[1])))
        page.route("**/api/tenants", lambda route: route.fulfill(json={"tenants": [
            {"tenant": name, "sessions": 1, "tokens": 1, "memory_bytes": 1, "storage_bytes": 1} for name in MARKUP]}))
        page.route("**/api/map?*", lambda route: route.fulfill(json={
            "layer": 0, "position": 0, "tokens": 1, "tokens_per_bucket": 1, "kv_heads": 1, "counted": True, "queries": 1,
            "bits": [[1]], "attention": [[1]], "place_names": ["exact", "memory", "shared", "ssd", "gpu"],
            "places": [[1], [0], [0], [0], [0]]}))

    page = browse(route=forge)
    until(page, "$('sessions').children.length === 4 && $('tenants').children.length === 4")
    assert column(page, "#sessions", 0) == column(page, "#tenants", 0) == MARKUP
    assert MARKUP[1] in page.locator("#about").text_content()
    for place in ("#sessions", "#tenants", "#calls"):
        page.locator(f"{place} button").nth(1).click()
    page.locator("#sessions button").first.click()
    until(page, "document.querySelector('#facts').textContent.includes('<script>')")
    until_loaded(page, 1)
    for fragment in (MARKUP[0], MARKUP[2], "\"] , *"):
        page.evaluate("text => { location.hash = '#' + new URLSearchParams({session: text, tenant: text, view: text}) }",
                      fragment)
        until(page, f"document.querySelector('#h-one').textContent === {json.dumps(fragment + ', tenant ' + fragment)}")
    assert page.title() == "qkvd" and page.locator("main img, main script, main b b").count() == 0
    attributes = page.evaluate("[...document.querySelectorAll('main *')].flatMap(e => [...e.attributes].map(a => a.name))")
    assert not [name for name in attributes if name.startswith("on")]

"""The report in a real browser: it loads in silence, asks for nothing, and its controls do what they say."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from synthetic_runs import CHARACTERS, Character, write_comparison, write_run

from nmsparse.workbench.report import ReportFiles, write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = ("headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking", "disable-component-update")
WIDE, NARROW = (1360, 900), (375, 800)
HOSTILE = "</script><img src=x onerror=alert(1)>"

pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="no browser on this machine: apt-get install chromium chromium-driver to check the report in one",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = BROWSER or ""
    for flag in (*FLAGS, "disable-sync", f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """A comparison in which one run diverged and one has not finished."""
    folder = write_comparison(tmp_path_factory.mktemp("runs") / "runs")
    write_run(folder / "trio-2x4" / "seed-2", CHARACTERS[3], 2, stop=210, ending="diverged")
    write_run(folder / "step", Character("step", 1.68, 0.003), 0, stop=300, ending=None)
    return write_report([folder], folder.parent / "report.html")


@pytest.fixture
def visit(browser: Chrome, written: ReportFiles) -> Iterator[Callable[..., Chrome]]:
    """Opens a report in a window of a size and a colour scheme, and looks for complaints and requests when the test is over."""

    def opened(path: Path = written.html, size: tuple[int, int] = WIDE, scheme: str = "light", has_script: bool = True) -> Chrome:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not has_script})
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == NARROW}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get(path.as_uri())
        return browser

    browser.get("about:blank")
    browser.get_log("browser")
    browser.get_log("performance")
    yield opened
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    requests = [address for address in _requests(browser) if not address.startswith(("data:", "blob:"))]
    assert requests
    assert all(address.startswith("file:") and address.endswith(".html") for address in requests)
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    browser.execute_script("localStorage.clear()")


def _requests(browser: Chrome) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def one(browser: Chrome, selector: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, selector)


def in_middle(browser: Chrome, selector: str) -> WebElement:
    """An element, scrolled to where nothing sticky covers it."""
    element = one(browser, selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    return element


def shown(browser: Chrome, selector: str) -> int:
    """How many elements of a kind are drawn."""
    script = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.getClientRects().length).length"
    return browser.execute_script(script, selector)


def brightness(browser: Chrome) -> float:
    """Of the page's background, 0 to 255."""
    picture = "const c = document.createElement('canvas').getContext('2d');"
    script = picture + "c.fillStyle = getComputedStyle(document.body).backgroundColor; c.fillRect(0, 0, 1, 1);"
    red, green, blue, _ = browser.execute_script(script + "return [...c.getImageData(0, 0, 1, 1).data]")
    return (red + green + blue) / 3


OVERLAPS = """
const boxed = (element) => [element.textContent, element.getBoundingClientRect()];
const boxes = (plot, kind) => [...plot.querySelectorAll(kind)].map(boxed).filter(([, box]) => box.width);
const touch = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
const found = [];
for (const plot of document.querySelectorAll(".variant, .row-axis")) {
  const all = [...boxes(plot, ".x-tick"), ...boxes(plot, ".y-tick"), ...boxes(plot, ".end")];
  for (const [i, [text, box]] of all.entries()) {
    for (const [other, place] of all.slice(i + 1)) if (touch(box, place)) found.push([text, other]);
  }
}
return found;
"""


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_every_window_and_colour_scheme(visit: Callable[..., Chrome], size: tuple[int, int], scheme: str) -> None:
    browser = visit(size=size, scheme=scheme)
    assert (brightness(browser) > 128) == (scheme == "light")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    browser.execute_script("for (const details of document.querySelectorAll('details')) details.open = true")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    assert browser.execute_script(OVERLAPS) == []
    assert shown(browser, ".variant .line") == 4 * 6 - 3 + 4 * 4  # no flips, churn and distance of dense; step has not finished
    assert shown(browser, ".variant .lone") == 2 * 10
    cut = "return [...document.querySelectorAll('.x-tick, .y-tick')].filter((e) => e.getBoundingClientRect().left < 0).length"
    assert browser.execute_script(cut) == 0


def test_the_theme_button_changes_colours_and_is_remembered(visit: Callable[..., Chrome]) -> None:
    browser = visit(scheme="light")
    button = one(browser, ".theme")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert brightness(browser) < 128
    assert button.get_attribute("aria-pressed") == "true"
    browser.refresh()
    assert brightness(browser) < 128
    one(browser, ".theme").send_keys(Keys.ENTER)
    assert brightness(browser) > 128


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_the_legend_hides_and_shows_a_group_everywhere(visit: Callable[..., Chrome], size: tuple[int, int]) -> None:
    browser = visit(size=size)
    index = one(browser, ".legend .key:nth-child(2) input").get_attribute("data-group")
    kinds = (f".variant .hides.g{index}", f".film.g{index}", f".heat-map.g{index}", f".row.g{index}")
    before, dense = [shown(browser, kind) for kind in kinds], shown(browser, ".variant .g0 .line")
    assert min(before) > 0
    in_middle(browser, ".legend .key:nth-child(2)").click()
    assert [shown(browser, kind) for kind in kinds] == [0, 0, 0, 0]
    assert shown(browser, ".variant .g0 .line") == dense
    one(browser, ".legend .key:nth-child(2) input").send_keys(Keys.SPACE)
    assert [shown(browser, kind) for kind in kinds] == before


def test_a_chart_changes_its_scale(visit: Callable[..., Chrome]) -> None:
    browser = visit()
    chart = '.chart[data-chart="loss"]'
    for view in ("close-up", "log", "linear"):
        in_middle(browser, f'{chart} input[value="{view}"] + span').click()
        assert shown(browser, f"{chart} .variant") == 1
        assert shown(browser, f'{chart} .variant[data-view="{view}"]') == 1


def test_pointing_at_a_chart_reads_its_values(visit: Callable[..., Chrome]) -> None:
    browser = visit()
    series = _data(browser)["charts"]["loss"]["series"]
    plot = in_middle(browser, '.chart[data-chart="loss"] .variant')
    ActionChains(browser).move_to_element_with_offset(plot, 0, 30).perform()
    lines = one(browser, ".tip").text.split("\n")
    assert lines[0] == "step 200"
    at = series[0]["steps"].index(200)
    dense = lines[lines.index("dense") + 1]
    assert [float(part) for part in dense.split(" ± ")] == pytest.approx(
        [series[0]["means"][at], series[0]["deviations"][at]], rel=0.05
    )
    assert "trio 2:4 (seed 2, diverged)" in lines
    one(browser, ".legend .key:first-child").click()
    ActionChains(browser).move_to_element_with_offset(plot, 3, 30).perform()
    assert "dense" not in one(browser, ".tip").text.split("\n")
    ActionChains(browser).move_to_element(one(browser, ".theme")).perform()
    assert not one(browser, ".tip").is_displayed()


def test_a_chart_can_be_read_with_the_keyboard(visit: Callable[..., Chrome]) -> None:
    browser = visit()
    frame = in_middle(browser, '.chart[data-chart="flip_rate"] .frame')
    frame.send_keys(Keys.HOME)
    words = one(browser, "#read-out").get_attribute("textContent") or ""
    assert words.startswith("step 5: ")
    assert "sr-ste 2:4" in words
    frame.send_keys(Keys.ARROW_RIGHT)
    assert (one(browser, "#read-out").get_attribute("textContent") or "").startswith("step 10: ")
    assert one(browser, ".tip").is_displayed()
    frame.send_keys(Keys.ESCAPE)
    assert not one(browser, ".tip").is_displayed()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_the_slider_moves_the_mask_through_time(visit: Callable[..., Chrome], size: tuple[int, int], scheme: str) -> None:
    browser = visit(size=size, scheme=scheme)
    films = _data(browser)["masks"][0]["films"]
    slider = in_middle(browser, ".mask-step")
    last = _cells(browser)
    slider.send_keys(Keys.HOME)
    assert one(browser, ".mask-now").text == f"step {films[0]['frames'][0]['step']}"
    assert _cells(browser)[1:] == ["", ""]
    assert "the first record" in one(browser, ".film-words").text
    slider.send_keys(Keys.ARROW_RIGHT)
    kept, new, gone = _cells(browser)
    assert new
    assert gone
    before, now = (_bits(films[0], film["bits"]) for film in films[0]["frames"][:2])
    assert _count(new) == sum(b > a for a, b in zip(before, now, strict=True))
    assert _count(gone) == sum(b < a for a, b in zip(before, now, strict=True))
    assert _count(kept) == sum(a == b == "1" for a, b in zip(before, now, strict=True))
    slider.send_keys(Keys.END)
    assert _cells(browser) == last
    one(browser, '.masks input[value="previous"] + span').click()
    assert _count(_cells(browser)[1]) < _count(last[1])


def _cells(browser: Chrome) -> list[str]:
    return [one(browser, f".film .{kind}").get_attribute("d") or "" for kind in ("kept", "new", "gone")]


def _count(path: str) -> int:
    return sum(int(part.rpartition("h")[2]) for part in path.split("M") if part)


def _bits(film: dict[str, Any], digits: str) -> str:
    return f"{int(digits, 16):0{4 * len(digits)}b}"[: film["rows"] * film["columns"]]


def test_the_mask_plays_by_itself_and_stops(visit: Callable[..., Chrome]) -> None:
    browser = visit()
    button = in_middle(browser, ".mask-play")
    button.click()
    assert button.text == "Pause"
    start = one(browser, ".mask-now").text
    _until(lambda: one(browser, ".mask-now").text != start)
    button.click()
    assert button.text == "Play"


def test_pointing_at_a_heat_map_names_layer_and_step(visit: Callable[..., Chrome]) -> None:
    browser = visit()
    ActionChains(browser).move_to_element(in_middle(browser, ".heat-plot")).perform()
    text = one(browser, ".tip").text
    assert text.startswith("step ")
    assert "transformer.h.1." in text
    assert text.endswith("%")


def test_the_page_hands_out_its_numbers(visit: Callable[..., Chrome], written: ReportFiles, tmp_path: Path) -> None:
    browser = visit()
    behaviour = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    for link in browser.find_elements(By.CSS_SELECTOR, "a[download]"):
        browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", link)
        link.click()
    for original in written.csv:
        copy = tmp_path / original.name
        _until(lambda copy=copy, original=original: copy.exists() and copy.read_bytes() == original.read_bytes())


def _until(is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.05)


def test_without_scripts_the_figures_are_there_and_the_legend_works(visit: Callable[..., Chrome]) -> None:
    browser = visit(has_script=False)
    assert one(browser, ".chart .line").is_displayed()
    assert one(browser, ".film svg").is_displayed()
    assert one(browser, ".results").is_displayed()
    assert not one(browser, ".theme").is_displayed()
    assert not one(browser, ".mask-controls").is_displayed()
    one(browser, ".legend .key:first-child").click()
    assert not one(browser, '.chart[data-chart="loss"] .variant.is-first .g0').is_displayed()
    log = one(browser, '.chart[data-chart="loss"] input[value="log"] + span')
    ActionChains(browser).scroll_to_element(log).perform()
    ActionChains(browser).scroll_by_amount(0, 300).perform()
    log.click()
    assert one(browser, '.chart[data-chart="loss"] .variant[data-view="log"]').is_displayed()


def test_hostile_text_runs_no_script(visit: Callable[..., Chrome], tmp_path: Path) -> None:
    write_run(tmp_path / "runs", CHARACTERS[2], label=HOSTILE, model={"name": HOSTILE}, config={HOSTILE: HOSTILE})
    page = write_report([tmp_path / "runs"], tmp_path / "hostile.html", title=HOSTILE).html
    browser = visit(page)
    assert one(browser, "h1").text == HOSTILE
    assert browser.find_elements(By.CSS_SELECTOR, "img") == []
    plot = in_middle(browser, '.chart[data-chart="loss"] .variant')
    ActionChains(browser).move_to_element(plot).perform()
    assert HOSTILE in one(browser, ".tip").text
    assert browser.find_elements(By.CSS_SELECTOR, "img") == []


def test_a_printed_page_is_light_and_complete(visit: Callable[..., Chrome]) -> None:
    browser = visit(scheme="dark")
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert pdf.startswith(b"%PDF")
    assert browser.execute_script("return [...document.querySelectorAll('details')].every((e) => e.open)")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    assert brightness(browser) > 128
    assert shown(browser, ".theme, .views, .mask-controls") == 0
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def _data(browser: Chrome) -> dict[str, Any]:
    return json.loads(one(browser, "#data").get_attribute("textContent") or "")["sections"][0]

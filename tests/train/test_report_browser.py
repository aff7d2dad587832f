"""The page in a reader's browser: drawn, readable, and without other resources."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from fullshard_train.report import RunRecord, write_report
from fullshard_train.report.palette import PALETTES
from fullshard_train.report.step_timeline import step_figure
from tests.support.made_up_run import Sizes, made_up_run

WIDE, NARROW = 1400, 420
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
NASTY = "<b>layers</b>.<a href='https://example.invalid'>0</a></script>"

# Every text that is seen, with its contrast against the nearest background behind it. The texts
# on bars lie on bars, not on a background: their colors are compared without a browser.
CONTRASTS = """
const parts = (color) => (color.match(/[\\d.]+/g) || []).map(Number);
const luminance = (rgb) => rgb.slice(0, 3)
  .map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const found = parts(getComputedStyle(each).backgroundColor);
    if (found.length === 3 || found[3] > 0) return found;
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const style = getComputedStyle(element);
  if (!own || !element.getClientRects().length || style.visibility === "hidden") continue;
  if (element.closest(".bars, script, style")) continue;
  const svg = element instanceof SVGElement;
  const text = luminance(parts(svg ? style.fill : style.color));
  const ground = luminance(behind(svg ? element.closest(".plot") : element));
  const contrast = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
  found.push([contrast, element.textContent.slice(0, 40)]);
}
return found;
"""


@contextmanager
def browser(profile: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        driver.execute_cdp_cmd("Network.enable", {})
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        yield driver
    finally:
        driver.quit()


def show(driver: webdriver.Chrome, scheme: str, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == NARROW}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def wait_for_colors(driver: webdriver.Chrome, scheme: str) -> None:
    """Wait until the figures have the colors of a scheme."""
    ink = PALETTES[scheme]["muted"]
    asked = "rgb({}, {}, {})".format(*(int(ink[start : start + 2], 16) for start in (1, 3, 5)))
    last = "return getComputedStyle(document.querySelector('#memory .y-axis text')).fill"
    WebDriverWait(driver, 20).until(lambda found: found.execute_script(last) == asked)


def run_to_show() -> RunRecord:
    """Two ranks, a loss that is not finite, and a unit with a name that would like to be a tag."""
    record = made_up_run(Sizes(steps=120, ranks=2, units=6))
    metrics = list(record.metrics)
    metrics[49] = replace(metrics[49], loss=float("nan"))
    old = record.units[1].name
    timelines = [
        replace(
            each,
            spans=tuple(replace(s, unit=NASTY) if s.unit == old else s for s in each.spans),
        )
        for each in record.timelines
    ]
    units = [replace(each, name=NASTY) if each.name == old else each for each in record.units]
    return replace(record, metrics=metrics, timelines=timelines, units=units)


def num_bars(record: RunRecord) -> int:
    picture = step_figure(record)
    assert picture is not None
    return sum(len(rank["spans"]) for rank in picture.content["ranks"])


def assert_drawn(driver: webdriver.Chrome, record: RunRecord) -> None:
    def count(selector: str) -> int:
        return len(driver.find_elements(By.CSS_SELECTOR, selector))

    assert len(bars(driver)) == num_bars(record)
    strokes = driver.execute_script(
        "return [...document.querySelectorAll('#memory .lines .line')].map((e) => e.style.stroke)"
    )
    assert strokes == ["var(--series-0)", "var(--series-1)"] * 2  # each rank in both panels
    legend = driver.find_elements(By.CSS_SELECTOR, "#rank-legend li")
    assert [each.text for each in legend] == ["rank 0", "rank 1"]
    line = driver.find_element(By.CSS_SELECTOR, "#curve-loss .line").get_attribute("d")
    assert line.count("M") == 2  # a gap, and below it a cross
    assert count(".curve .cross") == 1
    assert count("#curve-loss .lines .line") == 3  # every step, their mean, validation
    assert count("#curve-loss .lines circle") == 6
    assert count(".curve .lines .line") == 12
    assert count(".curve .lines .restart") == 6
    assert count("#memory-kinds .parts span") == 5


def assert_readable(driver: webdriver.Chrome, scheme: str, width: int) -> None:
    contrasts = driver.execute_script(CONTRASTS)
    assert len(contrasts) > 90
    assert [each for each in contrasts if each[0] < 4.5] == [], (scheme, width)
    wide = driver.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width, (scheme, width)


def assert_hover_tells(driver: webdriver.Chrome, record: RunRecord) -> None:
    """Hovering shows the unit whose name would like to be a tag, and what is under the pointer."""
    units = Select(driver.find_element(By.ID, "unit-choice"))
    units.select_by_visible_text(NASTY)
    left, top = next((x, y) for x, y, style in bars(driver) if re.search("forward.*: 1;", style))
    timeline = driver.find_element(By.CSS_SELECTOR, "#timeline svg")
    label = tip(driver, "timeline", timeline, (left + 1, top + 5))
    assert NASTY in label
    assert "forward: " in label
    assert "rank 0, from " in label
    units.select_by_visible_text("All units")
    memory = tip(driver, "memory", driver.find_element(By.CSS_SELECTOR, "#memory svg"))
    assert re.search(r"ms.*rank 0: [\d.]+ MiB full, 5\d\d\.\d MiB allocated.*rank 1: ", memory)
    loss = tip(driver, "curve-loss", driver.find_element(By.CSS_SELECTOR, "#curve-loss svg"))
    step, value = re.match(r"step (\d+)training (\d\.\d{4})", loss).groups()
    assert float(value) == pytest.approx(record.metrics[int(step) - 1].loss, abs=1e-4)


def tip(
    driver: webdriver.Chrome, plot: str, on: WebElement, at: tuple[float, float] | None = None
) -> str:
    """What is shown when the pointer is at a place of an element, or over its middle."""
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", on)
    width, height = on.rect["width"], on.rect["height"]
    x, y = at or (width / 2, height / 2)
    offset = (round(x - width / 2), round(y - height / 2))
    ActionChains(driver).move_to_element_with_offset(on, *offset).perform()
    shown = f"return document.querySelector('#{plot} .tip:not([hidden])')?.textContent"
    return WebDriverWait(driver, 10).until(lambda found: found.execute_script(shown))


def bars(driver: webdriver.Chrome) -> list[tuple[float, float, str]]:
    """The left, the top and the style of every bar; those that look alike are one path."""
    paths: list[list[str]] = driver.execute_script(
        "return [...document.querySelectorAll('#timeline .bars path')]"
        ".map((each) => [each.getAttribute('d'), each.style.cssText])"
    )
    return [
        (float(x), float(y), style)
        for path, style in paths
        for x, y in re.findall(r"M([\d.]+) ([\d.]+)h", path)
    ]


def num_chosen(driver: webdriver.Chrome) -> int:
    return sum("opacity: 1;" in style for _, _, style in bars(driver))


def shown_range(driver: webdriver.Chrome, plot: str, axis: str = "x") -> list[float]:
    """The numbers at both ends of an axis, from the places of its first and last label."""
    return driver.execute_script(
        """
        const [plot, axis] = arguments;
        const root = document.querySelector(`#${plot} svg`);
        const labels = [...root.querySelectorAll(`.${axis}-axis text`)];
        const [first, last] = [labels[0], labels.at(-1)].map((each) =>
          [Number(each.getAttribute(axis)), Number(each.textContent.replace("\\u2212", "-"))]);
        const [, left, bottom, right] = root.querySelector(".x-axis > .axis:last-child")
          .getAttribute("d").match(/M([\\d.]+) ([\\d.]+)H([\\d.]+)/).map(Number);
        const at = (px) => first[1] + (last[1] - first[1]) * (px - first[0]) / (last[0] - first[0]);
        return (axis === "x" ? [left, right] : [bottom, 10]).map(at);
        """,
        plot,
        axis,
    )


def assert_zoom_is_shared(driver: webdriver.Chrome) -> None:
    whole = shown_range(driver, "timeline")
    assert shown_range(driver, "memory") == pytest.approx(whole)
    driver.find_element(By.CSS_SELECTOR, "[data-zoom=in]").click()
    near = shown_range(driver, "timeline")
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2)
    assert shown_range(driver, "memory") == pytest.approx(near)
    drag(driver, "memory", 100, 0, Keys.SHIFT)
    moved = shown_range(driver, "timeline")
    assert moved[0] < near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    driver.find_element(By.CSS_SELECTOR, "[data-zoom=all]").click()
    assert shown_range(driver, "timeline") == pytest.approx(whole, abs=1e-9)
    drag(driver, "timeline", 200, 10)
    assert shown_range(driver, "memory")[1] < whole[1] / 2 + 40
    double_click(driver, "timeline")
    assert shown_range(driver, "memory") == pytest.approx(whole, abs=1e-9)


def drag(driver: webdriver.Chrome, plot: str, right: int, down: int, key: str = "") -> None:
    figure = driver.find_element(By.CSS_SELECTOR, f"#{plot} svg")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", figure)
    actions = ActionChains(driver).key_down(key) if key else ActionChains(driver)
    actions.move_to_element(figure).click_and_hold().move_by_offset(right, down).release()
    (actions.key_up(key) if key else actions).perform()


def double_click(driver: webdriver.Chrome, plot: str) -> None:
    figure = driver.find_element(By.CSS_SELECTOR, f"#{plot} svg")
    ActionChains(driver).move_to_element_with_offset(figure, 0, 60).double_click().perform()


def assert_curves_zoom(driver: webdriver.Chrome) -> None:
    """Dragging zooms into steps, values or both, as the box is wide, high or both."""
    whole = [shown_range(driver, "curve-loss", axis) for axis in "xy"]
    drag(driver, "curve-loss", 300, 4)
    steps = shown_range(driver, "curve-loss")
    assert whole[0][0] < steps[0] < steps[1] < whole[0][1]
    losses = shown_range(driver, "curve-loss", "y")  # those of the steps that are left
    assert losses[1] - losses[0] < (whole[1][1] - whole[1][0]) / 4
    double_click(driver, "curve-loss")
    drag(driver, "curve-loss", 4, -60)
    assert shown_range(driver, "curve-loss") == pytest.approx(whole[0])
    assert shown_range(driver, "curve-loss", "y")[1] < whole[1][1] - 0.1
    double_click(driver, "curve-loss")
    assert shown_range(driver, "curve-loss", "y") == pytest.approx(whole[1])


def assert_choices_work(driver: webdriver.Chrome, record: RunRecord) -> None:
    units = Select(driver.find_element(By.ID, "unit-choice"))
    assert {each.text for each in units.options} >= {NASTY, "All units", "(root)"}
    units.select_by_visible_text(NASTY)
    assert 0 < num_chosen(driver) < num_bars(record)
    units.select_by_visible_text("All units")
    assert num_chosen(driver) == num_bars(record)
    ranks = Select(driver.find_element(By.ID, "rank-choice"))
    ranks.select_by_visible_text("Rank 1")
    assert len(bars(driver)) == num_bars(replace(record, timelines=record.timelines[1:]))
    ranks.select_by_index(0)


def assert_table_sorts(driver: webdriver.Chrome) -> None:
    def column(index: int) -> list[str]:
        return driver.execute_script(
            "return [...document.querySelectorAll('#unit-table tbody tr')]"
            ".map((row) => row.cells[arguments[0]].dataset.value || row.cells[0].textContent)",
            index,
        )

    before = column(0)
    headings = driver.find_elements(By.CSS_SELECTOR, "#unit-table thead th")
    exposed = len(headings) - 1
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", headings[exposed])
    headings[exposed].find_element(By.TAG_NAME, "button").click()
    falling = [float(value) for value in column(exposed)]
    assert falling == sorted(falling, reverse=True)
    assert headings[exposed].get_attribute("aria-sort") == "descending"
    headings[exposed].find_element(By.TAG_NAME, "button").click()
    assert [float(value) for value in column(exposed)] == falling[::-1]
    assert column(0) != before
    assert sorted(column(0)) == sorted(before)


def assert_compared(driver: webdriver.Chrome, page: Path) -> None:
    """Two runs, each with its color in every figure, and both under the pointer."""
    driver.get(page.as_uri())
    strokes = driver.execute_script(
        "return ['loss', 'lr', 'mfu'].map((key) => ["
        "...document.querySelectorAll(`#curve-${key} .lines .line`)].map((e) => e.style.stroke))"
    )
    colors = ["var(--series-0)", "var(--series-1)"]
    assert [sorted(set(each)) for each in strokes] == [colors] * 3
    legend = driver.find_elements(By.CSS_SELECTOR, "#training .legend li")
    assert [each.text for each in legend] == ["one", "other"]
    label = tip(driver, "curve-lr", driver.find_element(By.CSS_SELECTOR, "#curve-lr svg"))
    assert re.fullmatch(r"step \d+one \S+other \S+", label)


def assert_alone(driver: webdriver.Chrome) -> None:
    """There were no network requests and no errors."""
    entries: list[dict[str, Any]] = driver.get_log("browser")
    assert [json.dumps(entry) for entry in entries] == []
    loaded = driver.execute_script(
        "return performance.getEntriesByType('resource').map((each) => each.name)"
    )
    assert loaded == []
    links = driver.execute_script("return document.querySelectorAll('svg a').length")
    assert links == 0


@pytest.mark.exhaustive
def test_the_report_opens_in_a_real_browser(tmp_path):
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("no Chromium on this machine")
    record = run_to_show()
    page = write_report(record, tmp_path / "a run" / "report.html")
    with browser(tmp_path / "profile") as driver:
        for width in (WIDE, NARROW):
            show(driver, "light", width)
            driver.get(page.as_uri())
            assert_drawn(driver, record)
            assert_readable(driver, "light", width)
            if width == WIDE:
                assert_hover_tells(driver, record)
                assert_zoom_is_shared(driver)
                assert_curves_zoom(driver)
                assert_choices_work(driver, record)
                assert_table_sorts(driver)
            show(driver, "dark", width)
            wait_for_colors(driver, "dark")
            assert_drawn(driver, record)
            assert_readable(driver, "dark", width)
            assert_alone(driver)
        others = [replace(record, title="other")]
        page = write_report(replace(record, title="one"), tmp_path / "both.html", others=others)
        for width in (NARROW, WIDE):
            show(driver, "dark", width)
            assert_compared(driver, page)
            assert_readable(driver, "dark", width)
            assert_alone(driver)

"use strict";
// Draws the figures of a report as SVG, from the JSON in the page. Colors are variables of the
// style sheet, which follow the scheme; a figure is drawn again when its width changes.
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const FONT_PX = 12;
  const PRINTED_PX = 680;
  let printing = false;

  // Elements

  const withAttributes = (element, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const svg = (name, attributes = {}, ...children) =>
    withAttributes(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
  const html = (name, attributes = {}, ...children) =>
    withAttributes(document.createElement(name), attributes, children);

  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `${FONT_PX}px ${getComputedStyle(document.body).fontFamily}`;
  const widthOf = (text) => pen.measureText(text).width;

  // Ranks, runs and kinds of memory have a color each; dashes tell more of them apart.
  const NUM_COLORS = 12;
  const DASHES = ["none", "6 3", "2 2", "8 3 2 3"];
  const seriesColor = (index) => `var(--series-${index % NUM_COLORS})`;
  const seriesDashes = (index) => DASHES[Math.floor(index / NUM_COLORS) % DASHES.length];
  const swatch = (color, dashes = "none") =>
    svg("svg", { class: "stroke", "aria-hidden": "true", viewBox: "0 0 20 12" },
      svg("path", { d: "M0 6H20", style: `stroke: ${color}`, "stroke-dasharray": dashes }));

  // Numbers

  const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
  const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const grouped = (value, digits) => value.toLocaleString("en-US", {
    minimumFractionDigits: digits, maximumFractionDigits: digits,
  }).replace("-", "−");
  const powerOfTen = (power) =>
    `10${power < 0 ? "⁻" : ""}${[...String(Math.abs(power))].map((each) => SUPERSCRIPTS[each]).join("")}`;
  const exponential = (value, digits) => {
    if (value === 0) return "0";
    const [mantissa, power] = value.toExponential(digits).split("e").map(Number);
    return `${mantissa}×${powerOfTen(power)}`.replace("-", "−");
  };

  // A format is as in Python: ".4f" has four decimals, ".3e" an exponent, ".4g" four digits.
  const shown = (value, format) => {
    const digits = Number(format.slice(1, -1));
    const size = Math.abs(value);
    if (format.endsWith("f")) return grouped(value, digits);
    if (format.endsWith("e") || (size > 0 && size < 1e-3) || size >= 1e6) return exponential(value, digits - 1);
    return value.toLocaleString("en-US", { maximumSignificantDigits: digits }).replace("-", "−");
  };

  /** The round numbers in a range, at most `most` and at least `least` apart, with their labels. */
  const ticksIn = ([low, high], most, least = 0) => {
    const rough = Math.max((high - low) / most, least);
    const power = 10 ** Math.floor(Math.log10(rough) + 1e-9);
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * (1 - 1e-9));
    const first = Math.ceil(low / step - 1e-9);
    const count = Math.floor(high / step + 1e-9) - first + 1;
    const values = Array.from({ length: Math.max(count, 0) }, (_, index) => (first + index) * step);
    return values.map((value) => ({ value, label: tickLabel(value, step, values) }));
  };
  const tickLabel = (value, step, values) => {
    if (value === 0) return "0";
    const largest = Math.max(...values.map(Math.abs));
    const decimals = (of) => Math.max(0, -Math.floor(Math.log10(of) + 1e-9));
    if (largest < 2e-3) {
      const power = Math.floor(Math.log10(largest) + 1e-9);
      const unit = 10 ** power;
      return `${grouped(value / unit, decimals(step / unit))}×${powerOfTen(power)}`;
    }
    const [size, prefix] = (largest >= 1e4 && PREFIXES.find(([each]) => largest >= each)) || [1, ""];
    return grouped(value / size, decimals(step / size)) + prefix;
  };

  const scale = ([low, high], [start_px, end_px]) => {
    const px = (value) => start_px + ((value - low) / (high - low)) * (end_px - start_px);
    px.inverse = (at_px) => low + ((at_px - start_px) / (end_px - start_px)) * (high - low);
    return px;
  };

  /** The index of the value nearest to `wanted` in an ascending list. */
  const nearest = (values, wanted) => {
    let [start, end] = [0, values.length - 1];
    while (end - start > 1) {
      const middle = (start + end) >> 1;
      if (values[middle] <= wanted) start = middle;
      else end = middle;
    }
    return wanted - values[start] <= values[end] - wanted ? start : end;
  };

  // Figures. Each has a place in the page, an SVG as wide as it, and a tip that follows the pointer.

  const DRAGGED_PX = 5;

  class Figure {
    constructor(id, printed_px = PRINTED_PX) {
      this.id = id;
      this.printed_px = printed_px;
      this.place = document.getElementById(id);
      this.root = svg("svg", { class: "figure" });
      this.tip = html("div", { class: "tip", hidden: "" });
      this.place.append(this.root, this.tip);
      this.listen();
      new ResizeObserver(() => {
        if (!printing && this.place.clientWidth !== this.width) this.draw();
      }).observe(this.place);
    }

    /** Begin a drawing, with margins around the area that data is drawn in. */
    begin(height, margins) {
      this.width = printing ? this.printed_px : this.place.clientWidth;
      const { left, right, top, bottom } = margins;
      this.area = { left, right: Math.max(this.width - right, left + 1), top, bottom: height - bottom };
      const attributes = { width: this.width, height, viewBox: `0 0 ${this.width} ${height}` };
      withAttributes(this.root, attributes, []).replaceChildren();
      this.leave();
    }

    text(text, x, y, attributes = {}) {
      return this.root.appendChild(svg("text", { x, y, "dominant-baseline": "central", ...attributes }, text));
    }

    add(name, attributes, ...children) {
      return this.root.appendChild(svg(name, attributes, ...children));
    }

    /** The axis below, with a label for every tick that fits, and lines up to `grid_top`. */
    drawXAxis(range, title, { least = 0, grid_top = null } = {}) {
      const { left, right, bottom } = this.area;
      this.x = scale(range, [left, right]);
      const group = this.add("g", { class: "x-axis" });
      for (const { value, label } of ticksIn(range, Math.max(2, (right - left) / 60), least)) {
        const x = this.x(value);
        const half = widthOf(label) / 2;
        const label_x = Math.min(Math.max(x, half), this.width - half);
        if (grid_top !== null) group.append(svg("path", { class: "grid", d: `M${x} ${grid_top}V${bottom}` }));
        group.append(
          svg("path", { class: "axis", d: `M${x} ${bottom}v4` }),
          svg("text", { x: label_x, y: bottom + 14, "text-anchor": "middle", "dominant-baseline": "central" }, label),
        );
      }
      group.append(svg("path", { class: "axis", d: `M${left} ${bottom}H${right}` }));
      this.text(title, (left + right) / 2, bottom + 32, { "text-anchor": "middle" });
    }

    drawYAxis(ticks, y) {
      const { left, right } = this.area;
      const group = this.add("g", { class: "y-axis" });
      for (const { value, label } of ticks) {
        group.append(
          svg("path", { class: "grid", d: `M${left} ${y(value)}H${right}` }),
          svg("text", { x: left - 7, y: y(value), "text-anchor": "end", "dominant-baseline": "central" }, label),
        );
      }
    }

    /** A group that shows nothing outside of the area. */
    clipped(attributes) {
      const { left, right, top, bottom } = this.area;
      const rect = svg("rect", { x: left, y: top - 4, width: right - left, height: bottom - top + 8 });
      this.add("clipPath", { id: `${this.id}-area` }, rect);
      return this.add("g", { ...attributes, "clip-path": `url(#${this.id}-area)` });
    }

    /** Show a tip beside the pointer: a heading, and rows of a text with an optional swatch. */
    showTip(at, heading, rows) {
      this.tip.replaceChildren(html("b", {}, heading), ...rows.map((row) => html("div", {}, ...row)));
      this.tip.hidden = false;
      const { offsetWidth: width, offsetHeight: height } = this.tip;
      const beside = at.x + 14 + width > this.width ? at.x - 14 - width : at.x + 14;
      this.tip.style.left = `${Math.max(0, beside)}px`;
      this.tip.style.top = `${Math.max(0, at.y - height / 2)}px`;
    }

    leave() {
      this.tip.hidden = true;
      if (this.marks) this.marks.remove();
      this.marks = null;
    }

    /** What the pointer is at: a line, and dots on the lines of the figure. */
    mark(x, dots) {
      const { top, bottom } = this.area;
      this.marks = this.add("g", { class: "marks" }, svg("path", { class: "axis", d: `M${x} ${top}V${bottom}` }));
      for (const [dot_x, dot_y, color] of dots) {
        this.marks.append(svg("circle", { cx: dot_x, cy: dot_y, r: 3.5, style: `fill: ${color}` }));
      }
    }

    // Dragging zooms, with Shift it moves; a figure defines zoom, move, reset, hover and press.
    // A finger scrolls the page, as it does elsewhere.
    listen() {
      const at = (event) => {
        const box = this.root.getBoundingClientRect();
        return { x: event.clientX - box.left, y: event.clientY - box.top };
      };
      let start = null;
      let last = null;
      let box = null;
      const end = () => {
        if (box) box.remove();
        start = box = null;
      };
      this.place.addEventListener("pointerdown", (event) => {
        if (event.button !== 0 || event.pointerType === "touch") return;
        start = last = at(event);
        this.place.setPointerCapture(event.pointerId);
        event.preventDefault();
      });
      this.place.addEventListener("pointermove", (event) => {
        const now = at(event);
        this.leave();
        if (start === null) return this.hover(now);
        if (event.shiftKey) this.move(last.x - now.x);
        else if (this.isDragged(start, now)) {
          const { left, right, top, bottom } = this.boxOf(start, now);
          if (box === null) box = this.add("rect", { class: "box" });
          withAttributes(box, { x: left, y: top, width: right - left, height: bottom - top }, []);
        }
        last = now;
      });
      this.place.addEventListener("pointerup", (event) => {
        if (start === null) return;
        const [from, now, is_drawn] = [start, at(event), box !== null];
        end();
        if (is_drawn) this.zoom(this.boxOf(from, now));
        else if (!this.isDragged(from, now)) this.press(now);
      });
      this.place.addEventListener("pointercancel", end);
      this.place.addEventListener("pointerleave", () => this.leave());
      this.place.addEventListener("dblclick", () => this.reset());
    }

    isDragged(from, to) {
      return Math.max(Math.abs(to.x - from.x), Math.abs(to.y - from.y)) > DRAGGED_PX;
    }

    /** The part of the area between two points; as high as the area unless `is_free`. */
    boxOf(from, to, is_free = { x: true, y: false }) {
      const { left, right, top, bottom } = this.area;
      const inside = (value, low, high) => Math.min(Math.max(value, low), high);
      const [x0, x1] = [from.x, to.x].map((each) => inside(each, left, right)).sort((a, b) => a - b);
      const [y0, y1] = [from.y, to.y].map((each) => inside(each, top, bottom)).sort((a, b) => a - b);
      return {
        left: is_free.x ? x0 : left, right: is_free.x ? x1 : right,
        top: is_free.y ? y0 : top, bottom: is_free.y ? y1 : bottom,
      };
    }

    press() {}
    move() {}
  }

  // Curves of metrics over steps

  const FEW_POINTS = 60;
  const SAME_STEP_PX = 3;

  /** A path through points; a gap where y is null. A point between two gaps is a dot. */
  const pathThrough = ([xs, ys], x, y) => {
    let path = "";
    let is_open = false;
    ys.forEach((value, index) => {
      if (value === null) is_open = false;
      else {
        const point = `${x(xs[index]).toFixed(1)} ${y(value).toFixed(1)}`;
        path += is_open ? `L${point}` : `M${point}h0`;
        is_open = true;
      }
    });
    return path;
  };

  class CurveFigure extends Figure {
    constructor(key, curve) {
      super(`curve-${key}`, key === "loss" ? PRINTED_PX : PRINTED_PX / 2 - 20);
      this.curve = curve;
      this.zoomed = { x: null, y: null };
      const steps = curve.runs.flatMap((run) => run.line[0]);
      const [first, last] = [Math.min(...steps), Math.max(...steps)];
      const beyond = last - first <= 8 ? 0.5 : (last - first) / 80;
      this.whole = [first - beyond, last + beyond];
      this.draw();
    }

    color(index) {
      return this.curve.runs.length === 1 ? "var(--accent)" : seriesColor(index);
    }

    validationColor(index) {
      return this.curve.runs.length === 1 ? seriesColor(1) : seriesColor(index);
    }

    /** The range of all values whose step is in a range of steps. */
    fitting([first, last]) {
      let [low, high] = [Infinity, -Infinity];
      for (const { line, mean, validation } of this.curve.runs) {
        for (const [xs, ys] of [line, mean, validation]) {
          ys.forEach((value, index) => {
            if (value === null || xs[index] < first || xs[index] > last) return;
            low = Math.min(low, value);
            high = Math.max(high, value);
          });
        }
      }
      if (low > high) return [0, 1];
      const beyond = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
      return [low - beyond, high + beyond];
    }

    draw() {
      const height = this.place.clientHeight;
      const x_range = this.zoomed.x || this.whole;
      const y_range = this.zoomed.y || this.fitting(x_range);
      const ticks = ticksIn(y_range, Math.max(2, Math.min(6, (height - 60) / 32)));
      const labels_px = Math.max(...ticks.map(({ label }) => widthOf(label)), 10);
      this.begin(height, { left: labels_px + 32, right: 12, top: 10, bottom: 44 });
      const { left, top, bottom } = this.area;
      this.y = scale(y_range, [bottom, top]);
      this.drawYAxis(ticks, this.y);
      this.drawXAxis(x_range, "step", { least: 1 });
      const middle = (top + bottom) / 2;
      this.text(this.curve.axis, 0, 0, {
        transform: `translate(9 ${middle}) rotate(-90)`, "text-anchor": "middle",
      });
      const group = this.clipped({ class: "lines" });
      this.curve.runs.forEach((run, index) => this.drawRun(group, run, index));
    }

    drawRun(group, run, index) {
      const { top, bottom } = this.area;
      const line = (points, attributes, color) =>
        group.append(svg("path", { d: pathThrough(points, this.x, this.y), ...attributes, style: `stroke: ${color}` }));
      const dots = ([xs, ys], r, color) => xs.forEach((step, place) => {
        if (ys[place] === null) return;
        group.append(svg("circle", { cx: this.x(step), cy: this.y(ys[place]), r, style: `fill: ${color}` }));
      });
      const color = this.color(index);
      for (const step of run.restarts) {
        const style = this.curve.runs.length === 1 ? "" : `stroke: ${color}`;
        group.append(svg("path", { class: "restart", d: `M${this.x(step)} ${top}V${bottom}`, style }));
      }
      const dashes = { "stroke-dasharray": seriesDashes(index) };
      const is_smoothed = run.mean[0].length > 0;
      line(run.line, { class: is_smoothed ? "line soft" : "line", ...dashes }, color);
      if (run.line[0].length <= FEW_POINTS) dots(run.line, 2.5, color);
      if (is_smoothed) line(run.mean, { class: "line mean", ...dashes }, color);
      if (run.validation[0].length) {
        line(run.validation, { class: "line validation", ...dashes }, this.validationColor(index));
        dots(run.validation, 3.5, this.validationColor(index));
      }
      for (const [step] of run.crosses) {
        const at = `${this.x(step)} ${bottom - 6}`;
        group.append(svg("path", { class: "cross", d: `M${at}m-4 -4l8 8m0 -8l-8 8` }));
      }
    }

    /** The points nearest to a place among all lines: their step, text, color and y. */
    near(x_px) {
      const wanted = this.x.inverse(x_px);
      const found = [];
      const several = this.curve.runs.length > 1;
      const add = (xs, row) => {
        if (xs.length) found.push(row(nearest(xs, wanted)));
      };
      this.curve.runs.forEach(({ name, line, validation, crosses }, index) => {
        const kept = line[0].map((_, place) => place).filter((place) => line[1][place] !== null);
        const plain = validation[0].length ? "training" : "";
        add(kept.map((place) => line[0][place]), (place) => ({
          step: line[0][kept[place]], value: line[1][kept[place]], color: this.color(index), dashes: seriesDashes(index),
          name: several ? name : plain,
        }));
        add(validation[0], (place) => ({
          step: validation[0][place], value: validation[1][place], color: this.validationColor(index),
          name: several ? `${name}, validation` : "validation",
        }));
        add(crosses.map(([step]) => step), (place) => ({
          step: crosses[place][0], text: crosses[place][1], color: "var(--alarm)", name: several ? name : "",
        }));
      });
      const away = (each) => Math.abs(this.x(each.step) - x_px);
      const closest = Math.min(...found.map(away));
      const nearby = found.filter((each) => away(each) <= closest + SAME_STEP_PX);
      return nearby.sort((a, b) => away(a) - away(b));
    }

    hover(at) {
      const { left, right } = this.area;
      if (at.x < left || at.x > right) return;
      const found = this.near(at.x);
      if (!found.length) return;
      const { step } = found[0];
      const rows = found.map((each) => {
        const value = each.text || `${shown(each.value, this.curve.format)} ${this.curve.unit}`;
        const elsewhere = each.step === step ? "" : ` at step ${grouped(each.step, 0)}`;
        return [swatch(each.color, each.dashes), `${each.name} ${value.trim()}${elsewhere}`.trim()];
      });
      this.mark(this.x(step), found.filter((each) => each.value !== undefined)
        .map((each) => [this.x(each.step), this.y(each.value), each.color]));
      this.showTip(at, `step ${grouped(step, 0)}`, rows);
    }

    /** A box that is mostly wide zooms into steps, one that is mostly high into values. */
    boxOf(from, to) {
      const [wide, high] = [Math.abs(to.x - from.x), Math.abs(to.y - from.y)];
      return super.boxOf(from, to, { x: wide > high / 4, y: high > wide / 4 });
    }

    zoom({ left, right, top, bottom }) {
      const is_whole = (of, [low, high]) => of[0] === low && of[1] === high;
      const { area } = this;
      if (!is_whole([left, right], [area.left, area.right])) {
        this.zoomed.x = [this.x.inverse(left), this.x.inverse(right)];
      }
      if (!is_whole([top, bottom], [area.top, area.bottom])) {
        this.zoomed.y = [this.y.inverse(bottom), this.y.inverse(top)];
      }
      this.draw();
    }

    reset() {
      this.zoomed = { x: null, y: null };
      this.draw();
    }
  }

  // One step: the timeline and, on the same axis of time, memory

  const step = content.step;
  const TIME = "time since the step began, ms";
  const MARGINS = { left: 66, right: 22 };
  const chosen = { places: [], unit: null, range: null };
  const stepFigures = [];

  const wholeStep = () => [0, Math.max(...chosen.places.map((place) => step.ranks[place].duration_ms), 1e-3)];
  const shownRange = () => chosen.range || wholeStep();
  const drawStep = () => stepFigures.forEach((each) => each.draw());

  const showRange = (range) => {
    const [start, end] = wholeStep();
    const width = Math.min(Math.max(range[1] - range[0], 1e-3), end - start);
    const from = Math.min(Math.max(range[0], start), end - width);
    chosen.range = width < end - start ? [from, from + width] : null;
    drawStep();
  };

  /** Show `part` of the time that is shown now, around a moment, or later by a part of it. */
  const zoomAround = (moment, part) => {
    const [start, end] = shownRange();
    showRange([moment - (moment - start) * part, moment + (end - moment) * part]);
  };
  const moveBy = (ms) => showRange(shownRange().map((each) => each + ms));

  const useButton = (how) => {
    const [start, end] = shownRange();
    const [middle, half] = [(start + end) / 2, (end - start) / 2];
    if (how === "in") zoomAround(middle, 0.5);
    else if (how === "out") zoomAround(middle, 2);
    else if (how === "earlier") moveBy(-half);
    else if (how === "later") moveBy(half);
    else showRange(wholeStep());
  };

  class StepFigure extends Figure {
    constructor(id) {
      super(id);
      stepFigures.push(this);
      this.place.addEventListener("wheel", (event) => {
        const box = this.root.getBoundingClientRect();
        if (event.ctrlKey) zoomAround(this.x.inverse(event.clientX - box.left), event.deltaY > 0 ? 1.25 : 0.8);
        else if (event.deltaX !== 0 && chosen.range !== null) this.move(event.deltaX);
        else return;
        event.preventDefault();
      }, { passive: false });
    }

    zoom({ left, right }) {
      if (right > left) showRange([this.x.inverse(left), this.x.inverse(right)]);
    }

    move(px) {
      moveBy(this.x.inverse(px) - this.x.inverse(0));
    }

    reset() {
      showRange(wholeStep());
    }
  }

  // Each rank has a row with its name and three rows of bars.

  const ROWS_PER_RANK = 4;
  const ROW_PX = 24;
  const BAR_PX = 20;
  const FADED = 0.15;
  const HATCHED_PX = 3; // the smallest width of a bar with hatching
  const NEAR_PX = 4;
  const HATCHINGS = { "await-gather": 45, "await-reduce": -45 };

  class Timeline extends StepFigure {
    draw() {
      const height = chosen.places.length * ROWS_PER_RANK * ROW_PX + 56;
      this.begin(height, { ...MARGINS, top: 4, bottom: 48 });
      this.drawXAxis(shownRange(), TIME, { grid_top: this.area.top });
      for (const [key, degrees] of Object.entries(HATCHINGS)) {
        const size = { width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${degrees})` };
        this.add("pattern", { id: `hatching-${key}`, ...size },
          svg("rect", { width: 5, height: 5, style: "fill: var(--card)" }),
          svg("rect", { width: 2, height: 5, style: `fill: var(--${key})` }));
      }
      // Bars that look alike are one path, so that drawing thousands of them stays fast.
      this.bars = this.add("g", { class: "bars" });
      this.paths = {};
      const labels = chosen.places.flatMap((index, place) => this.drawRank(step.ranks[index], place));
      for (const [style, path] of Object.entries(this.paths)) this.bars.append(svg("path", { d: path, style }));
      this.bars.append(...labels);
    }

    rowY(place, row) {
      return this.area.top + (place * ROWS_PER_RANK + row + 0.5) * ROW_PX;
    }

    drawRank({ rank, duration_ms, spans }, place) {
      const title = this.text("", 4, this.rowY(place, 0), { class: "rank" });
      title.append(svg("tspan", { "font-weight": 650 }, `rank ${rank}`), `  ${duration_ms.toFixed(1)} ms`);
      step.rows.forEach((name, row) => {
        this.text(name, this.area.left - 7, this.rowY(place, row + 1), { "text-anchor": "end" });
      });
      return spans.flatMap((span) => {
        const from = Math.max(this.x(span[2] / 1000), this.area.left);
        const to = Math.min(this.x((span[2] + span[3]) / 1000), this.area.right);
        return from > to ? [] : this.drawBar(span, place, from, to);
      });
    }

    /** Draw a bar, and return its label if it has room for one. */
    drawBar([activity, unit], place, from, to) {
      const { key, row } = step.activities[activity];
      const y = this.rowY(place, row + 1);
      const width = Math.max(to - from, 0.5);
      const is_chosen = chosen.unit === null || chosen.unit === unit;
      const is_hatched = key in HATCHINGS;
      const tone = `var(--${key}${unit % 2 ? "-next" : ""})`;
      const fill = is_hatched && width > HATCHED_PX ? `url(#hatching-${key})` : tone;
      const style = `fill: ${fill}; opacity: ${is_chosen ? 1 : FADED}`;
      const [x, w] = [from.toFixed(2), width.toFixed(2)];
      this.paths[style] = `${this.paths[style] || ""}M${x} ${y - BAR_PX / 2}h${w}v${BAR_PX}h-${w}z`;
      const label = step.labels[unit];
      if (!is_chosen || is_hatched || width < 9 || widthOf(label) + 4 > width) return [];
      const middle = { x: (from + to) / 2, y, "text-anchor": "middle", "dominant-baseline": "central" };
      return [svg("text", { ...middle, style: `fill: var(--${key}-ink)` }, label)];
    }

    /** The span at a point, or the nearest one in its row, and its rank. */
    spanAt({ x, y }) {
      const row = Math.floor((y - this.area.top) / ROW_PX);
      const rank = step.ranks[chosen.places[Math.floor(row / ROWS_PER_RANK)]];
      if (rank === undefined) return null;
      let [found, nearest_px] = [null, NEAR_PX];
      for (const span of rank.spans) {
        const [activity, , start, duration] = span;
        if (step.activities[activity].row !== (row % ROWS_PER_RANK) - 1) continue;
        const away = Math.max(this.x(start / 1000) - x, x - this.x((start + duration) / 1000), 0);
        if (away < nearest_px) [found, nearest_px] = [span, away];
      }
      return found && { rank: rank.rank, span: found };
    }

    hover(at) {
      const found = this.spanAt(at);
      this.place.classList.toggle("over", found !== null);
      if (found === null) return;
      const [activity, unit, start, duration] = found.span;
      const ms = (us) => (us / 1000).toFixed(2);
      this.showTip(at, step.units[unit], [
        [`${step.activities[activity].name}: ${ms(duration)} ms`],
        [`rank ${found.rank}, from ${ms(start)} to ${ms(start + duration)} ms`],
      ]);
    }

    press(at) {
      const found = this.spanAt(at);
      if (found === null) return;
      const unit = found.span[1];
      chooseUnit(unit === chosen.unit ? null : unit);
    }
  }

  const areaStyle = (property, index) => `${property}: ${seriesColor(index)}`;
  const PANEL_PX = 130;
  const PANEL_GAP_PX = 34;

  class MemoryFigure extends StepFigure {
    draw() {
      const height = 2 * PANEL_PX + PANEL_GAP_PX + 72;
      this.begin(height, { ...MARGINS, top: 24, bottom: 48 });
      this.drawXAxis(shownRange(), TIME, { grid_top: this.area.top });
      const lines = this.clipped({ class: "lines" });
      this.panels = ["full", "allocated"].map((field, index) => this.drawPanel(lines, field, index));
      this.root.append(lines); // above the grid of both panels
      const legend = chosen.places.map((place) =>
        html("li", {}, swatch(seriesColor(place), seriesDashes(place)), `rank ${step.ranks[place].rank}`));
      const kinds = (step.held?.kinds ?? []).map((name, index) =>
        html("li", {}, html("span", { class: "swatch", style: areaStyle("background", index) }), name));
      document.getElementById("rank-legend").replaceChildren(...legend, ...kinds);
    }

    /** The memory of a planned step by kind, stacked. */
    drawKinds(y) {
      const { at_ms, tops } = step.held;
      const areas = this.clipped({ class: "bars" });
      [...tops.entries()].reverse().forEach(([index, sizes]) => {
        const steps = at_ms.map((at, sample) => `H${this.x(at).toFixed(1)}V${y(sizes[sample]).toFixed(1)}`);
        const path = `M${this.x(0)} ${y(0)}${steps.join("")}H${this.x(step.ranks[0].duration_ms).toFixed(1)}V${y(0)}z`;
        areas.append(svg("path", { d: path, style: areaStyle("fill", index) }));
      });
    }

    drawPanel(lines, field, index) {
      const top = this.area.top + index * (PANEL_PX + PANEL_GAP_PX);
      const highest = Math.max(...chosen.places.flatMap((place) => step.ranks[place].memory[field]), 0) || 1;
      const y = scale([0, highest * 1.05], [top + PANEL_PX, top]);
      const unit = step.memory_units[index];
      this.drawYAxis(ticksIn([0, highest * 1.05], 4), y);
      if (field === "allocated" && step.held) this.drawKinds(y);
      this.text(`${{ full: "full parameters", allocated: "allocated" }[field]}, ${unit}`, this.area.left, top - 11);
      for (const place of chosen.places) {
        const { memory, duration_ms } = step.ranks[place];
        let path = "";
        memory.at_ms.forEach((at, sample) => {
          const to = y(memory[field][sample]).toFixed(1);
          path += sample ? `H${this.x(at).toFixed(1)}V${to}` : `M${this.x(at).toFixed(1)} ${to}`;
        });
        if (path) path += `H${this.x(duration_ms).toFixed(1)}`;
        const style = `stroke: ${seriesColor(place)}`;
        lines.append(svg("path", { class: "line rank", d: path, style, "stroke-dasharray": seriesDashes(place) }));
      }
      return { field, unit, y };
    }

    hover(at) {
      const { left, right } = this.area;
      if (at.x < left || at.x > right) return;
      const ms = this.x.inverse(at.x);
      const dots = [];
      const rows = [];
      for (const place of chosen.places) {
        const { rank, memory } = step.ranks[place];
        const sample = memory.at_ms.findLastIndex((each) => each <= ms);
        if (sample < 0) continue;
        const amounts = this.panels.map(({ field, unit, y }) => {
          dots.push([at.x, y(memory[field][sample]), seriesColor(place)]);
          return `${grouped(memory[field][sample], 1)} ${unit}`;
        });
        const text = `rank ${rank}: ${amounts[0]} full, ${amounts[1]} allocated`;
        rows.push([swatch(seriesColor(place), seriesDashes(place)), text]);
      }
      this.mark(at.x, dots);
      this.showTip(at, `${ms.toFixed(2)} ms`, rows);
    }
  }

  const chooseUnit = (unit) => {
    chosen.unit = unit;
    document.getElementById("unit-choice").value = unit === null ? "" : String(unit);
    stepFigures[0].draw();
  };

  const startStep = () => {
    const ranks = document.getElementById("rank-choice");
    const choose = () => {
      chosen.places = ranks.value.split(" ").map(Number);
      showRange(shownRange());
    };
    choose();
    new Timeline("timeline");
    if (document.getElementById("memory")) new MemoryFigure("memory");
    drawStep();
    ranks.addEventListener("change", choose);
    document.getElementById("unit-choice").addEventListener("change", (event) => {
      chooseUnit(event.target.value === "" ? null : Number(event.target.value));
    });
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => useButton(button.dataset.zoom));
    }
  };

  // A click on a heading of the table of units sorts by its column; a second click reverses it.

  const sortBy = (heading) => {
    const column = heading.cellIndex;
    const is_number = heading.classList.contains("number");
    const [first, second] = is_number ? ["descending", "ascending"] : ["ascending", "descending"];
    const order = heading.getAttribute("aria-sort") === first ? second : first;
    for (const each of heading.parentElement.cells) each.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const body = document.querySelector("#unit-table tbody");
    const key = (row) => (is_number ? row.cells[column].dataset.value : row.cells[0].textContent);
    const compare = (a, b) => {
      if (!is_number) return sign * key(a).localeCompare(key(b), "en", { numeric: true });
      if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");
      return sign * (Number(key(a)) - Number(key(b)));
    };
    body.append(...[...body.rows].sort(compare));
  };

  for (const heading of document.querySelectorAll("#unit-table thead th")) {
    heading.querySelector("button").addEventListener("click", () => sortBy(heading));
  }

  for (const place of document.querySelectorAll("[data-series]")) {
    const index = Number(place.dataset.series);
    place.replaceWith(swatch(seriesColor(index), seriesDashes(index)));
  }

  const curves = Object.entries(content.curves).map(([key, curve]) => new CurveFigure(key, curve));
  if (step !== null) startStep();
  const drawAll = (is_printed) => {
    printing = is_printed;
    for (const each of [...curves, ...stepFigures]) each.draw();
  };
  window.addEventListener("beforeprint", () => drawAll(true));
  window.addEventListener("afterprint", () => drawAll(false));
})();

"use strict";
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const settings = { displayModeBar: false, responsive: true, doubleClick: "reset" };
  const PRINTED_PX = 680;
  let printing = false;

  // A colour is "$" and its name, replaced by the colour of the current scheme.
  const colour = (name) => content.palettes[dark.matches && !printing ? "dark" : "light"][name];
  const painted = (value) => {
    if (typeof value === "string") return value.startsWith("$") ? colour(value.slice(1)) : value;
    if (Array.isArray(value)) return value.map(painted);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, painted(each)]));
  };

  // Plotly interprets some HTML tags in labels; names must be escaped.
  const literal = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const axis = (given) => ({
    gridcolor: "$grid", linecolor: "$line", tickcolor: "$line", zeroline: false, automargin: true,
    tickfont: { size: 12, color: "$muted" }, exponentformat: "power", separatethousands: true,
    ...given,
    title: { font: { size: 12, color: "$muted" }, standoff: 8, ...given.title },
  });

  const layout = (given) => {
    const found = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "$ink" },
      margin: { l: 52, r: 12, t: 10, b: 42 }, dragmode: touch ? false : "zoom",
      hoverlabel: {
        bgcolor: "$card", bordercolor: "$line", align: "left", font: { color: "$ink", size: 13 },
      },
      ...given,
    };
    for (const key of Object.keys(found)) {
      if (/^[xy]axis/.test(key)) found[key] = axis(found[key]);
    }
    if (printing) found.width = found.printed_px || PRINTED_PX;
    delete found.printed_px;
    return painted(found);
  };

  const draw = (id, data, given) => {
    const place = document.getElementById(id);
    if (place === null) return;
    Plotly.react(place, painted(data), layout(given), settings);
  };

  const drawCurves = () => {
    for (const [key, figure] of Object.entries(content.curves)) {
      const printed_px = key === "loss" ? PRINTED_PX : PRINTED_PX / 2 - 20;
      draw(`curve-${key}`, figure.data, {
        ...figure.layout,
        xaxis: {
          ...figure.layout.xaxis, showgrid: false, ticks: "outside", ticklen: 4, tickangle: 0,
          ...(key === "loss" ? {} : { nticks: 5 }),
        },
        yaxis: { ...figure.layout.yaxis, nticks: 6 },
        printed_px,
      });
    }
  };

  // The timeline has three rows per rank, below a row with its name.

  const step = content.step;
  const ROWS_PER_RANK = 4;
  const ROW_PX = 24;
  const FADED = 0.15;
  // The smallest width of a bar with hatching, and with a label.
  const HATCHED_PX = 3;
  const LABELLED_PX = 9;
  const MARGINS = { l: 66, r: 22 };
  const chosen = { places: [], unit: null, range: null };

  const wholeStep = () => [0, Math.max(...chosen.places.map((p) => step.ranks[p].duration_ms), 1e-3)];

  const bars = () => {
    const traces = step.activities.map(({ key }) => ({
      type: "bar", orientation: "h", name: key, base: [], x: [], y: [], width: 0.86, text: [],
      customdata: [], hovertemplate: "%{customdata[1]}<extra></extra>", textangle: 0,
      textposition: "inside", insidetextanchor: "middle", insidetextfont: { color: `$${key}-ink` },
      marker: {
        color: [], opacity: [], line: { width: 0 },
        pattern: { shape: [], size: 5, solidity: 0.4, fillmode: "replace", bgcolor: "$card" },
      },
    }));
    const hatchings = { "await-gather": "/", "await-reduce": "\\" };
    const [left, right] = chosen.range || wholeStep();
    const place_px = printing ? PRINTED_PX : document.getElementById("timeline").clientWidth;
    const px_per_ms = (place_px - MARGINS.l - MARGINS.r) / (right - left);
    for (const [place, index] of chosen.places.entries()) {
      const { rank, spans } = step.ranks[index];
      for (const [activity, unit, start, duration] of spans) {
        const { key, name, row } = step.activities[activity];
        const trace = traces[activity];
        const from = start / 1000;
        const ms = duration / 1000;
        trace.base.push(from);
        trace.x.push(ms);
        trace.y.push(place * ROWS_PER_RANK + 1 + row);
        const width_px = ms * px_per_ms;
        const hatching = hatchings[key] || "";
        const followed = chosen.unit === null || chosen.unit === unit;
        const labelled = followed && !hatching && width_px > LABELLED_PX;
        trace.text.push(labelled ? literal(step.labels[unit]) : "");
        trace.marker.pattern.shape.push(width_px > HATCHED_PX ? hatching : "");
        trace.marker.color.push(unit % 2 ? `$${key}-next` : `$${key}`);
        trace.marker.opacity.push(followed ? 1 : FADED);
        trace.customdata.push([
          unit,
          `<b>${literal(step.units[unit])}</b><br>${name}: ${ms.toFixed(2)} ms<br>` +
            `rank ${rank}, from ${from.toFixed(2)} to ${(from + ms).toFixed(2)} ms`,
        ]);
      }
    }
    return traces;
  };

  const drawTimeline = () => {
    const first_rows = chosen.places.map((_, place) => place * ROWS_PER_RANK);
    const num_rows = chosen.places.length * ROWS_PER_RANK;
    draw("timeline", bars(), {
      barmode: "overlay", hovermode: "closest", hoverdistance: 12,
      uniformtext: { mode: "hide", minsize: 10 },
      height: num_rows * ROW_PX + 56, margin: { ...MARGINS, t: 4, b: 46 },
      xaxis: { title: { text: "time since the step began, ms" }, range: chosen.range || wholeStep(),
        automargin: false },
      yaxis: {
        range: [num_rows - 0.4, -0.5], fixedrange: true, showgrid: false, automargin: false,
        tickvals: first_rows.flatMap((row) => step.rows.map((_, index) => row + 1 + index)),
        ticktext: first_rows.flatMap(() => step.rows),
      },
      annotations: chosen.places.map((index, place) => ({
        xref: "paper", x: 0, xanchor: "left", xshift: -MARGINS.l + 4, yref: "y",
        y: first_rows[place] + 0.12, yanchor: "middle", showarrow: false, align: "left",
        font: { size: 13, color: "$ink" },
        text: `<b>rank ${step.ranks[index].rank}</b>  ${step.ranks[index].duration_ms.toFixed(1)} ms`,
      })),
    });
  };

  const drawMemory = () => {
    const line = (index, field, unit, axes) => {
      const { rank, memory } = step.ranks[index];
      return {
        type: "scatter", mode: "lines", x: memory.at_ms, y: memory[field], ...axes,
        line: { color: "$accent", width: 1.5, shape: "hv" },
        opacity: chosen.places.length > 1 ? 0.7 : 1,
        hovertemplate: `rank ${rank}, %{x:.2f} ms: %{y:,.1f} ${unit}<extra></extra>`,
      };
    };
    const [full, allocated] = step.memory_units;
    const title = (text, y) => ({
      xref: "paper", yref: "paper", x: 0, y, xanchor: "left", yanchor: "bottom", showarrow: false,
      font: { size: 12, color: "$muted" }, text,
    });
    const range = chosen.range || wholeStep();
    const amounts = { rangemode: "tozero", fixedrange: true, automargin: false, nticks: 5 };
    draw("memory", [
      ...chosen.places.map((p) => line(p, "full", full, {})),
      ...chosen.places.map((p) => line(p, "allocated", allocated, { yaxis: "y2" })),
    ], {
      height: 340, margin: { ...MARGINS, t: 24, b: 46 }, hovermode: "closest",
      xaxis: { title: { text: "time since the step began, ms" }, range, anchor: "y2", automargin: false },
      yaxis: { ...amounts, domain: [0.58, 1] },
      yaxis2: { ...amounts, domain: [0, 0.42] },
      annotations: [title(`full parameters, ${full}`, 1.005), title(`allocated, ${allocated}`, 0.425)],
    });
  };

  const drawStep = () => {
    if (step === null) return;
    drawTimeline();
    drawMemory();
  };

  const showRange = (range) => {
    const [start, end] = wholeStep();
    const width = Math.min(range[1] - range[0], end - start);
    const from = Math.min(Math.max(range[0], start), end - width);
    chosen.range = width < end - start ? [from, from + width] : null;
    drawStep();
  };

  const zoom = (how) => {
    const [start, end] = chosen.range || wholeStep();
    const width = end - start;
    if (how === "in") showRange([start + width / 4, end - width / 4]);
    else if (how === "out") showRange([start - width / 2, end + width / 2]);
    else if (how === "earlier") showRange([start - width / 2, end - width / 2]);
    else if (how === "later") showRange([start + width / 2, end + width / 2]);
    else showRange(wholeStep());
  };

  const followZoom = (id) => {
    const place = document.getElementById(id);
    if (place === null) return;
    place.on("plotly_relayout", (change) => {
      if ("xaxis.range[0]" in change) showRange([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
      else if (change["xaxis.autorange"]) showRange(wholeStep());
    });
    place.on("plotly_doubleclick", () => { showRange(wholeStep()); });
  };

  const chooseUnit = (unit) => {
    chosen.unit = unit;
    document.getElementById("unit-choice").value = unit === null ? "" : String(unit);
    drawTimeline();
  };

  const startStep = () => {
    if (step === null) return;
    const ranks = document.getElementById("rank-choice");
    const choose = () => {
      chosen.places = ranks.value.split(" ").map(Number);
      drawStep();
    };
    choose();
    ranks.addEventListener("change", choose);
    document.getElementById("unit-choice").addEventListener("change", (event) => {
      chooseUnit(event.target.value === "" ? null : Number(event.target.value));
    });
    document.getElementById("timeline").on("plotly_click", ({ points }) => {
      const unit = points[0].customdata[0];
      chooseUnit(unit === chosen.unit ? null : unit);
    });
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => zoom(button.dataset.zoom));
    }
    followZoom("timeline");
    followZoom("memory");
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

  const drawAll = () => {
    drawCurves();
    drawStep();
  };
  drawCurves();
  startStep();
  dark.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => { printing = true; drawAll(); });
  window.addEventListener("afterprint", () => { printing = false; drawAll(); });
})();

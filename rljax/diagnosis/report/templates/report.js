// Draws the charts of the page, and again when the reader's color scheme changes.
(() => {
  "use strict";

  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const views = [];
  let turn = 0; // of drawing: a later one replaces an earlier one

  // [{a: 1, b: 2}, ...] of columns {a: [1, ...], b: [2, ...]}
  function rows(table) {
    const names = Object.keys(table);
    return table[names[0]].map((_, i) => Object.fromEntries(names.map((name) => [name, table[name][i]])));
  }

  // Vega's config in the colors of report.css
  function theme() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const text = { labelColor: color("soft"), titleColor: color("soft"), labelFontSize: 11, titleFontSize: 11, titleFontWeight: 400 };
    return {
      background: "transparent",
      font: style.getPropertyValue("--font").trim(),
      view: { stroke: null },
      axis: { ...text, domainColor: color("line"), tickColor: color("line"), gridColor: color("line"), gridOpacity: 0.7, tickSize: 4, titlePadding: 8 },
      axisX: { grid: false, labelFlush: false, tickCount: window.innerWidth < 600 ? 5 : 8 },
      axisY: { domain: false, ticks: false, tickCount: 5, minExtent: 44, labelLimit: 80 },
      legend: { ...text, labelColor: color("ink"), columns: window.innerWidth < 600 ? 2 : 4, labelLimit: 220, symbolStrokeWidth: 0, symbolSize: 90, rowPadding: 3, offset: 10 },
      range: {
        category: Array.from({ length: 8 }, (_, i) => color(`series-${i}`)),
        ramp: [color("ramp-low"), color("ramp-middle"), color("ramp-high")],
        heatmap: [color("ramp-low"), color("ramp-middle"), color("ramp-high")],
      },
      style: {
        band: { opacity: 0.14, strokeOpacity: 0 },
        raw: { strokeWidth: 1, strokeOpacity: 0.4 },
        smooth: { strokeWidth: 2.2, strokeJoin: "round" },
        near: { stroke: color("paper"), strokeWidth: 1.5 },
        stacked: { opacity: 0.85 },
        cell: { stroke: null },
        "broken-area": { color: color("broken"), fillOpacity: 0.07 },
        "broken-line": { color: color("broken"), strokeWidth: 1.5, strokeDash: [5, 3] },
        "warning-area": { color: color("warning"), fillOpacity: 0.07 },
        "warning-line": { color: color("warning"), strokeWidth: 1.5, strokeDash: [5, 3] },
      },
    };
  }

  async function draw() {
    const mine = ++turn;
    views.splice(0).forEach((view) => view.finalize());
    const root = document.documentElement;
    root.removeAttribute("data-drawn");
    const options = { config: theme(), renderer: "svg", actions: false, ast: true, tooltip: { theme: dark.matches ? "dark" : "light" } };
    for (const node of document.querySelectorAll("[data-chart]")) {
      const { spec, tables } = charts[node.dataset.chart];
      const datasets = Object.fromEntries(Object.entries(tables).map(([name, table]) => [name, rows(table)]));
      const view = await window.vegaEmbed(node, { ...spec, datasets }, options);
      if (mine !== turn) return view.finalize();
      views.push(view);
    }
    root.dataset.drawn = String(views.length); // the page is complete: for tests, and for printing by a script
  }

  // Tokens by advantage, by version or plain
  function recolor(event) {
    if (event.target.name === "tokens-by") document.getElementById("samples").dataset.by = event.target.value;
  }

  dark.addEventListener("change", draw);
  document.addEventListener("change", recolor);
  draw();
})();

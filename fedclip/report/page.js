"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  // Okabe and Ito's colours, which colour-blind people tell apart, and dashes besides.
  const colours = ["var(--blue)", "var(--orange)", "#009e73", "#b46fa0", "#8a8f98", "#b59b00"];
  const dashes = [[1, 0], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [12, 4]];
  const names = ["round", "least", "low", "median", "high", "most", "limit", "limit2", "share"];
  const rows = (points, keys) =>
    points.map((point) => Object.fromEntries(keys.map((key, i) => [key, point[i]])));
  const x = { field: "round", type: "quantitative", title: "round",
    axis: { tickMinStep: 1, format: "d", tickCount: 6 } };
  // Text and lines take the page's colours, so that dark mode and print need no other chart.
  const config = {
    background: null, font: "system-ui, sans-serif", view: { stroke: null },
    axis: { labelColor: "currentColor", titleColor: "currentColor", domainColor: "currentColor",
      tickColor: "currentColor", gridColor: "currentColor", gridOpacity: 0.15, labelFontSize: 12,
      titleFontSize: 12, titleFontWeight: "normal", titlePadding: 10, labelOverlap: true,
      labelLimit: 80 },
  };
  const draw = (element, values, layer) => {
    const spec = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container",
      height: 230, autosize: { type: "fit", contains: "padding" }, data: { values }, layer, config };
    return vegaEmbed(element, spec, { renderer: "svg", actions: false, tooltip: true })
      .then(() => element.querySelectorAll("svg, svg *").forEach((node) => {
        // The figure has a name and a description of its own.
        node.removeAttribute("aria-label");
        node.removeAttribute("role");
        node.removeAttribute("tabindex");
      }))
      .catch((error) => { element.textContent = `No chart: ${error.message}`; });
  };
  // One round alone is too short for a line or an area.
  const band = (values) => values.length > 1 ? { type: "area" } : { type: "bar", size: 30 };
  const limitOf = (values) => values.length > 1
    ? { type: "line", strokeWidth: 2, strokeDash: [7, 4] }
    : { type: "tick", orient: "horizontal", size: 50, thickness: 2 };
  const tooltip = (fields, format = ".4~g") => fields.map(([field, title]) =>
    ({ field, title, type: "quantitative", format: field === "round" ? "d" : format }));

  const clipper = (element, key) => {
    const [e, c] = element.dataset[key].split(" ").map(Number);
    const found = data.experiments[e].clippers[c];
    const pick = document.getElementById(`pick-${e}-${c}`);
    const chosen = pick && pick.value !== "" ? found.nodes[Number(pick.value)][1] : found.all;
    return rows(chosen, names);
  };
  const norms = (element) => {
    const values = clipper(element, "norms");
    const positive = values.every((row) => row.least === null || row.least > 0);
    const y = (field, field2) => ({ x, y: { field, type: "quantitative", title: "norm before clipping",
      scale: positive ? { type: "log", nice: false } : { type: "symlog", zero: false, nice: false },
      axis: { format: "~g", tickCount: 5 } }, ...(field2 ? { y2: { field: field2 } } : {}) });
    const line = { interpolate: "linear", strokeWidth: 2, point: values.length < 40 };
    return draw(element, values, [
      { mark: { ...band(values), color: colours[0], opacity: 0.2 }, encoding: y("least", "most") },
      { mark: { ...band(values), color: colours[0], opacity: 0.3 }, encoding: y("low", "high") },
      { mark: { type: "line", color: colours[0], ...line, point: line.point && { color: colours[0] } },
        encoding: y("median") },
      ...["limit", "limit2"].filter((field) => values.some((row) => row[field] !== null))
        .map((field) => ({ mark: { ...limitOf(values), color: colours[1] }, encoding: y(field) })),
      { mark: { type: "rule", opacity: 0, strokeWidth: 12 }, encoding: { x, tooltip: tooltip([
        ["round", "round"], ["least", "smallest norm"], ["median", "median norm"],
        ["high", "95 % below"], ["most", "largest norm"], ["limit", "least limit"],
        ["limit2", "largest limit"]]) } },
    ]);
  };
  const share = (element) => {
    const values = clipper(element, "share");
    const edge = values.length > 1 ? { line: { color: colours[1] } } : {};
    return draw(element, values, [
      { mark: { ...band(values), color: colours[1], opacity: 0.35, ...edge },
        encoding: { x, y: { field: "share", type: "quantitative", title: "steps clipped",
          scale: { domain: [0, 1] }, axis: { format: ".0%", tickCount: 5 } } } },
      { mark: { type: "rule", opacity: 0, strokeWidth: 12 }, encoding: { x, tooltip: [
        ...tooltip([["round", "round"]]), ...tooltip([["share", "steps clipped"]], ".1%")] } },
    ]);
  };
  const entry = (text, paint) => {
    const item = document.createElement("li");
    item.innerHTML = '<svg viewBox="0 0 32 12" aria-hidden="true"><path d="M0 6H32"/></svg>';
    paint(item.querySelector("path"));
    item.append(text);
    return item;
  };
  const metric = (element) => {
    const name = data.metrics[Number(element.dataset.metric)];
    const y = { type: "quantitative", title: name, scale: { zero: false },
      axis: { format: "~g", tickCount: 5 } };
    const layer = [], key = element.parentElement.querySelector(".key");
    const shown = data.experiments.filter((experiment) => experiment.metrics[name]);
    shown.forEach((experiment, i) => {
      const { server, band: shared, of } = experiment.metrics[name];
      const color = colours[i % colours.length], dash = dashes[i % dashes.length];
      const banded = shared.length && (shown.length === 1 || of === "runs");
      if (banded) {
        const ends = rows(shared, ["round", "least", "most"]);
        layer.push({ data: { values: ends },
          mark: { ...band(ends), color, opacity: 0.18 },
          encoding: { x, y: { ...y, field: "least" }, y2: { field: "most" } } });
      }
      layer.push({ data: { values: rows(server, ["round", "value"]) },
        mark: { type: "line", color, strokeDash: dash, strokeWidth: 2,
          point: server.length < 40 && { color } },
        encoding: { x, y: { ...y, field: "value" }, tooltip: tooltip([["round", "round"], ["value", name]]) } });
      const said = shown.length > 1 ? experiment.name
        : shared.length ? `average of the ${of}` : "average";
      key.append(entry(said, (path) => {
        path.setAttribute("stroke", color);
        path.setAttribute("stroke-width", 3);
        path.setAttribute("stroke-dasharray", dash.join(" "));
      }));
      if (banded && shown.length === 1) {
        key.append(entry(`lowest to highest of the ${of}`, (path) => {
          path.setAttribute("stroke", color);
          path.setAttribute("stroke-width", 12);
          path.setAttribute("opacity", 0.2);
        }));
      }
    });
    return draw(element, [], layer);
  };

  document.querySelectorAll("[data-pick]").forEach((select) => select.addEventListener("change", () => {
    const place = select.dataset.pick;
    norms(document.querySelector(`[data-norms="${place}"]`));
    share(document.querySelector(`[data-share="${place}"]`));
  }));
  // One chart after the other, from the top: the first is there at once, and the page answers.
  const charts = Object.entries({ metric, norms, share });
  (async () => {
    for (const element of document.querySelectorAll(".chart")) {
      await charts.find(([key]) => key in element.dataset)[1](element);
      await new Promise((next) => setTimeout(next));
    }
  })();
})();

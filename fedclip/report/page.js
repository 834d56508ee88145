"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  // Okabe and Ito's colours, which colour-blind people tell apart, and dashes besides.
  const colours = ["var(--blue)", "var(--orange)", "#009e73", "#b46fa0", "#8a8f98", "#b59b00",
    "#56b4e9", "#d55e00"];
  const dashes = [[1, 0], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [12, 4], [1, 3], [6, 2, 1, 2]];
  const ink = "currentColor";
  // Rounds are whole numbers, and so are the ticks.
  const rounds = (values, title) => {
    const low = Math.min(...values), high = Math.max(...values);
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((each) => (high - low) / each <= 7)
      ?? Math.ceil((high - low) / 7);
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
    return { field: "x", type: "quantitative", title,
      scale: { domain: low < high ? [low, high] : [low - 1, high + 1], nice: false },
      axis: { values: found, format: "d" } };
  };
  // Text and lines take the page's colours, so that dark mode and print need no other chart.
  const config = {
    background: null, font: "system-ui, sans-serif", view: { stroke: null },
    axis: { labelColor: ink, titleColor: ink, domainColor: ink,
      tickColor: ink, gridColor: ink, gridOpacity: 0.15, labelFontSize: 12,
      titleFontSize: 12, titleFontWeight: "normal", titlePadding: 10, labelOverlap: true,
      labelLimit: 80 },
  };
  const embed = (element, layer) => {
    const spec = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container",
      height: 230, autosize: { type: "fit", contains: "padding" }, data: { values: [] }, layer,
      config };
    return vegaEmbed(element, spec, { renderer: "svg", actions: false, tooltip: true })
      .then(() => element.querySelectorAll("svg, svg *").forEach((node) => {
        // The figure has a name and a description of its own.
        node.removeAttribute("aria-label");
        node.removeAttribute("role");
        node.removeAttribute("tabindex");
      }))
      .catch((error) => { element.textContent = `No chart: ${error.message}`; });
  };
  // Ticks at 1, 2, 5 times powers of ten, fewer the longer the axis is.
  const ticks = (low, high) => {
    const decades = Math.log10(high / low), found = [];
    const parts = decades <= 1.3 ? [1, 2, 5] : decades <= 3 ? [1, 3] : [1];
    const step = Math.max(1, Math.ceil(decades / 6));
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p += step) {
      parts.forEach((part) => found.push(Number(`${part}e${p}`)));
    }
    return found.filter((value) => value >= low && value <= high);
  };
  // Plain numbers, as far as they are short: 0.1, 1, 150, 1,000; then 1e6.
  const labels = "datum.value == 0 || (abs(datum.value) >= 0.001 && abs(datum.value) < 1000000)"
    + " ? format(datum.value, ',.5~r') : replace(format(datum.value, '.2~e'), '+', '')";
  const scaled = (values, share) => {
    if (share) return { scale: { domain: [0, 1] }, axis: { format: ".0%", tickCount: 5 } };
    const axis = { labelExpr: labels, tickCount: 5 };
    const known = values.filter((value) => value !== null);
    const low = Math.min(...known), high = Math.max(...known);
    return low > 0 && high / low > 10
      ? { scale: { type: "log", nice: false, domain: [low, high] },
        axis: { ...axis, values: ticks(low, high) } }
      : { scale: { zero: false }, axis };
  };
  const entry = (text, paint) => {
    const item = document.createElement("li");
    item.innerHTML = '<svg viewBox="0 0 32 12" aria-hidden="true"><path d="M0 6H32"/></svg>';
    Object.entries(paint).forEach(([key, value]) =>
      item.querySelector("path").setAttribute(key, value));
    item.append(text);
    return item;
  };
  // One round alone is too short for a line or an area: it has a point, or a bar.
  const chart = (element, { title, share, at = "round", bands = [], lines = [], rules = [] }) => {
    const shown = lines.filter(({ points }) => points.some((point) => point[1] !== null));
    const all = [...bands, ...shown].flatMap(({ points }) => points);
    const numbers = [...all.flatMap((point) => point.slice(1)), ...rules.map((rule) => rule[1])];
    const x = rounds(all.map((point) => point[0]), at);
    const y = { type: "quantitative", title, ...scaled(numbers, share) };
    const format = share ? ".1%" : ".4~g";
    const layer = [], key = element.parentElement.querySelector(".key");
    key.replaceChildren();
    bands.filter(({ points }) => points.length).forEach(({ name, points, colour, opacity }) => {
      layer.push({ data: { values: points.map(([round, low, high]) => ({ x: round, low, high })) },
        mark: { ...(points.length > 1 ? { type: "area" } : { type: "bar", size: 30 }),
          color: colour, opacity },
        encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" } } });
      if (name) key.append(entry(name, { stroke: colour, "stroke-width": 12, opacity }));
    });
    shown.forEach(({ name, points, colour, dash = [1, 0], point = true }) => {
      const values = points.map(([round, value]) => ({ x: round, y: value, name }));
      const few = points.length < 40;
      layer.push({ data: { values },
        mark: { type: "line", color: colour, strokeDash: dash, strokeWidth: 2,
          point: (points.length === 1 || (few && point)) && { color: colour, size: 20 } },
        encoding: { x, y: { ...y, field: "y" }, tooltip: [{ field: "name", title: "of" },
          { field: "x", title: at, format: "d", type: "quantitative" },
          { field: "y", title, format, type: "quantitative" }] } });
      if (name) {
        key.append(entry(name, { stroke: colour, "stroke-width": 3,
          "stroke-dasharray": dash.join(" ") }));
      }
    });
    rules.forEach(([name, value, start], i) => {
      const values = [{ y: value, text: name }];
      const end = i % 2 ? "right" : "left";
      layer.push({ data: { values }, mark: { type: "rule", color: ink, strokeDash: [1, 3],
        strokeWidth: start ? 2.5 : 1.5 }, encoding: { y: { ...y, field: "y" } } });
      layer.push({ data: { values }, mark: { type: "text", color: ink, align: end, baseline: "bottom",
        dy: -2, fontSize: 12, fontWeight: start ? "bold" : "normal", stroke: "var(--paper)", strokeWidth: 4,
        x: end === "left" ? 4 : { expr: "width - 4" } },
      encoding: { y: { ...y, field: "y" }, text: { field: "text" } } });
      key.append(entry(`${name}: ${value}${start ? ", the proposal to start with" : ", proposed"}`,
        { stroke: ink, "stroke-width": start ? 3 : 2, "stroke-dasharray": "1 3" }));
    });
    return embed(element, layer);
  };

  // The series of clients: a line each, or a band with its ends; a point's value is at a place.
  const clients = ({ lines, band, cut }, of, place = 1) => ({
    bands: place > 1 || !band.length ? [] : [{ points: band, colour: colours[0], opacity: 0.25,
      name: `${of} of all clients but the ${cut > 1 ? `${cut} ` : ""}highest and lowest` }],
    lines: lines.map(([name, points], i) => ({ name, colour: colours[(i + !!band.length) % 8],
      dash: dashes[(i + !!band.length) % 8], points: points.map((point) => [point[0], point[place]]) })),
  });
  const column = (points, ...places) => points.map((point) => [point[0], ...places.map((i) => point[i])]);
  const found = (element, key) => {
    const [e, c] = element.dataset[key].split(" ").map(Number);
    const pick = document.getElementById(`pick-${e}-${c}`);
    const clipper = data.experiments[e].clippers[c];
    const chosen = pick && pick.value !== "" ? clipper.nodes[Number(pick.value)] : null;
    return [clipper, chosen, chosen ? chosen[1] : clipper.all];
  };
  const norms = (element) => {
    const [clipper, chosen, points] = found(element, "norms");
    const alone = chosen || !clipper.lines.length;
    const low = column(points, 6), high = column(points, 7);
    const same = low.every((point, i) => point[1] === high[i][1]);
    const dash = { colour: ink, dash: [7, 4], point: false };
    const limits = !low.some((point) => point[1] !== null) ? []
      : same ? [{ name: "limit of this run", points: low, ...dash }]
        : [{ name: "limits of this run, lowest and highest of all nodes", points: low, ...dash },
          { points: high, ...dash }];
    const blue = colours[0];
    const shown = alone ? {
      bands: [
        { name: "smallest to largest norm", points: column(points, 1, 5), colour: blue, opacity: 0.2 },
        { name: "90 % of the norms", points: column(points, 2, 4), colour: blue, opacity: 0.3 }],
      lines: [{ name: "median norm", points: column(points, 3), colour: blue }],
    } : clients(clipper, "medians");
    return chart(element, { title: alone ? "norm before clipping" : "median norm before clipping",
      ...shown, lines: [...shown.lines, ...limits], rules: clipper.rules });
  };
  const share = (element) => {
    const [clipper, chosen, points] = found(element, "share");
    const whole = { name: chosen ? chosen[0] : clipper.lines.length ? "all together" : "",
      points: column(points, 8), colour: ink };
    const many = clipper.band.length > 0;
    const lines = chosen || !clipper.lines.length ? [whole]
      : [...(many ? [whole] : []), ...clients(clipper, "", 2).lines];
    return chart(element, { title: "steps clipped", share: true, lines });
  };
  const metric = (element) => {
    const name = data.metrics[Number(element.dataset.metric)];
    const at = data.rounds ? "round" : "evaluation";
    const shown = data.experiments.filter((experiment) => experiment.metrics[name]);
    if (shown.length === 1) {
      const { server, clients: own } = shown[0].metrics[name];
      const series = clients(own, name);
      const mean = { points: server, colour: ink,
        name: own.lines.length ? "average of the clients" : "" };
      return chart(element, { title: name, at, bands: series.bands,
        lines: [...series.lines, mean] });
    }
    const lines = [];
    shown.forEach((experiment, i) => {
      const { server, clients: own } = experiment.metrics[name];
      const colour = colours[i % 8];
      // Without a server's file, as on a client's machine, its only client stands for it.
      const points = server.length ? server : own.lines[0][1];
      lines.push({ name: experiment.name, points, colour, dash: dashes[i % 8] });
    });
    return chart(element, { title: name, at, lines });
  };

  const charts = { metric, norms, share };
  document.querySelectorAll("[data-pick]").forEach((select) => select.addEventListener("change", () => {
    ["norms", "share"].forEach((kind) => {
      const element = document.querySelector(`[data-${kind}="${select.dataset.pick}"]`);
      if (element) charts[kind](element);
    });
  }));
  // One chart after the other, from the top: the first is there at once, and the page answers.
  (async () => {
    for (const element of document.querySelectorAll(".chart")) {
      await Object.entries(charts).find(([key]) => key in element.dataset)[1](element);
      await new Promise((next) => setTimeout(next));
    }
  })();
})();

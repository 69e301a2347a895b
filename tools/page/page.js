// The page of one or several runs. All text goes through textContent: names and samples may hold
// anything. Written against the data that tools/page.py makes.
"use strict";

const COLOURS = {  // neighbours in a stack differ in lightness, for black and white
  data: "#f2a72e", forward: "#0b4f8a", backward: "#8cc9f0", waiting: "#c2659b", optimizer: "#12683f",
  other: "#c3c8cf", logging: "#a8861a", evaluation: "#532f85", checkpoint: "#f0926a",
  startup: "#c9ced6", training: "#2a7f62", lost: "#c62828",
};
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];  // of runs, for black and white
const HEIGHT = innerWidth < 600 ? 190 : 235;
let page = JSON.parse(document.getElementById("data").textContent);
let zoom = null;  // [first, last step] or null for all
let sampleShown = null;  // position of the slider, as a share
const plots = [];

// --- small things ---

const byId = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const runColour = i => css("--run" + i % 4);

function add(parent, tag, text = "", more = {}) {
  const node = document.createElement(tag);
  node.textContent = text;
  Object.assign(node, more);
  parent.append(node);
  return node;
}

function format(x) {
  if (x == null) return "–";
  const size = Math.abs(x);
  for (const [unit, least] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e4]])
    if (size >= least) return +(x / (unit == "k" ? 1e3 : least)).toPrecision(4) + unit;
  return size && size < 1e-3 ? x.toExponential(2) : String(+x.toPrecision(4));
}

function duration(s) {
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h}h${String(m).padStart(2, "0")}m` : m ? `${m}m${String(Math.round(s) % 60).padStart(2, "0")}s`
    : +s.toPrecision(3) + "s";
}

const ink = colour => {  // black or white, whichever can be read on it
  const [r, g, b] = [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
  return 0.3 * r + 0.6 * g + 0.1 * b > 140 ? "#000" : "#fff";
};

// --- head: verdict and goodput ---

function drawHead() {
  const head = byId("head");
  head.replaceChildren();
  add(head, "h1", page.runs.map(r => r.name).join(" and "));
  page.runs.forEach((run, i) => {
    const f = run.figures, block = add(head, "div");
    const line = add(block, "p", "", {className: "verdict"});
    if (page.runs.length > 1) {
      add(line, "span", "", {className: "key"}).style.borderColor = runColour(i);
      line.lastChild.style.borderTopStyle = i ? "dashed" : "solid";
      add(line, "b", run.name + " ");
    }
    const bad = run.events.filter(e => ["slow-down", "no progress", "runs out"].includes(e.kind));
    run.verdict.forEach((text, k) => {
      const className = bad.some(e => text.includes(e.text.slice(0, 400))) ? "bad" : "";
      add(k ? block : line, k ? "p" : "span", text, {className});
    });
    const facts = [`step ${run.step}${run.max_steps && " of " + run.max_steps}`];
    for (const [key, text] of [["train/loss", x => `loss ${x}`], ["val/loss", x => `validation ${x}`],
      ["step_ms_median", x => `${x} ms a step`], ["perf/tokens_per_second", x => `${x} tokens/s`],
      ["perf/mfu", x => `MFU ${x}`]])
      if (f[key] != null) facts.push(text(format(f[key])));
    add(block, "p", facts.join(" · "), {className: "soft"});
    drawGoodput(block, run);
  });
  add(head, "p", "made " + page.made, {className: "soft"});
}

function drawGoodput(block, run) {
  const seconds = run.processes.flatMap(p => page.kinds.map(k => p[k] || 0));
  const total = seconds.reduce((a, b) => a + b, 0);
  if (!total) return;
  const bar = add(block, "div", "", {className: "bar", role: "img"}), sums = {};
  for (const process of run.processes)
    for (const kind of page.kinds) {
      const s = process[kind];
      if (!s) continue;
      sums[kind] = (sums[kind] || 0) + s;
      const part = add(bar, "i", s > 0.07 * total && kind != "lost" ? kind : "", {className: kind,
        title: `${kind}: ${duration(s)}, ${(100 * s / total).toFixed(1)} %`});
      part.style.flex = `${s / total} 0 0px`;
      if (kind != "lost") part.style.backgroundColor = COLOURS[kind];
      part.style.color = ink(COLOURS[kind]);
      part.style.fontStyle = "normal";
    }
  const parts = Object.entries(sums).filter(([, s]) => s >= 0.001 * total)
    .map(([kind, s]) => `${kind} ${(100 * s / total).toFixed(1)} %`);
  const text = `${duration(total)}: ${parts.join(", ")}`;
  bar.setAttribute("aria-label", text);
  add(block, "p", text, {className: "soft"});
  run.events.filter(e => e.kind == "restart").slice(0, 5)
    .forEach(e => add(block, "p", `after step ${e.step}: ${e.text}`, {className: "soft"}));
}

// --- charts ---

const lastStep = () => Math.max(1, ...page.runs.map(r => r.step));

function setZoom(range) {
  const [low, high] = [0, lastStep()];
  if (range) range = [Math.max(low, range[0]), Math.min(high, range[1])];
  if (range && (range[1] - range[0] < 1 || range[0] <= low && range[1] >= high)) range = null;
  zoom = range;
  const [min, max] = zoom || [low, high];
  for (const u of plots) if (u.scales.x.min != min || u.scales.x.max != max) u.setScale("x", {min, max});
  byId("zoom").hidden = !zoom;
}

function eventsAt(u, run, at) {  // what happened there, within 6 pixels
  const margin = 6 * (u.scales.x.max - u.scales.x.min) / u.over.clientWidth;
  return run.events.filter(e => e.kind == "slow-down"
    ? e.step <= at + margin && at <= (e.until ?? lastStep()) : Math.abs(e.step - at) <= margin);
}

// lines: [{label, x, y, low?, high?, run, stroke, dash?, scale?, points?}]
function chart(title, lines, {runs = page.runs, draw, rangeY, value, bands, colours, describe, heat} = {}) {
  const figure = add(byId("charts"), "figure", "", {tabIndex: 0});
  figure.setAttribute("role", "group");
  figure.setAttribute("aria-label", title);
  add(figure, "h2", title);
  const tables = lines.map(l => [l.x, l.y, ...(l.low ? [l.low, l.high] : [])]);
  const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
  const series = [{label: "step", value: (u, x) => x ?? "–"}], spread = [];
  for (const l of lines) {
    const paint = {label: l.label, stroke: l.stroke, width: l.width ?? 1.5, dash: l.dash || [], fill: l.fill,
      scale: l.scale || "y", spanGaps: true, points: {show: l.y.length < 2 || l.points && l.y.length < 60, size: 6},
      value: value || ((u, x) => format(x))};
    series.push(paint);
    if (l.low) {
      const quiet = {...paint, width: 0, class: "quiet", points: {show: false}, fill: undefined};
      series.push({...quiet, label: l.label + " low"}, {...quiet, label: l.label + " high"});
      spread.push({series: [series.length - 1, series.length - 2], fill: l.stroke + "30"});
    }
  }
  const axis = {stroke: () => css("--soft"), grid: {stroke: css("--line"), width: 1},
    ticks: {stroke: css("--line"), width: 1}, font: "12px system-ui, sans-serif"};
  const valuesOf = (u, splits) => splits.map(x => x == null ? "" : format(x));
  const axes = [{...axis, values: valuesOf},
    {...axis, size: heat ? 96 : 56, values: valuesOf, ...(heat && {grid: {show: false}, ...heat})}];
  if (lines.some(l => l.scale == "right"))
    axes.push({...axis, scale: "right", side: 1, size: 56, values: valuesOf, grid: {show: false}});
  const note = add(figure, "figcaption", "");
  note.setAttribute("aria-live", "polite");
  const hover = u => {
    const at = u.data[0][u.cursor.idx];
    const here = u.over.matches(":hover") || figure.contains(document.activeElement);
    const said = at == null || !here ? [] : runs.flatMap(run => eventsAt(u, run, at).map(e =>
      `${runs.length > 1 ? run.name + ": " : ""}${e.kind} at step ${e.step}: ${e.text}`));
    if (describe && at != null && here) said.unshift(describe(u, at));
    note.textContent = said.join("\n");
  };
  const options = {
    width: figure.clientWidth - 18, height: HEIGHT, series, axes, bands: bands || spread,
    scales: {x: {time: false, range: (u, min, max) => [min, max]}, y: {range: rangeY}},
    cursor: {y: !!heat, sync: {key: "steps", scales: ["x", null],
      filters: {sub: type => type == "mousemove" || type == "mouseleave"}},
    drag: {x: true, y: false}, bind: {dblclick: () => () => { setZoom(null); return null; }}},
    hooks: {setCursor: [hover],
      setScale: [(u, key) => {
        const {min, max} = u.scales.x;
        if (key == "x" && plots.includes(u) && (min != (zoom?.[0] ?? 0) || max != (zoom?.[1] ?? lastStep())))
          queueMicrotask(() => setZoom([min, max]));
      }],
      draw: [...(draw ? [draw] : []), u => drawEvents(u, runs, draw && !heat)]},
  };
  const dashed = (u, k) => series[k].dash?.length ? "dashed" : "solid";
  options.legend = {show: !heat, markers: {dash: dashed}};
  if (colours) options.legend.markers = {width: 0, fill: (u, k) => colours[k - 1] || "transparent"};
  const u = new uPlot(options, data, figure);
  figure.append(note);
  plots.push(u);
  figure.addEventListener("keydown", e => onKey(e, u));
  for (const entry of figure.querySelectorAll(".u-series:not(:first-child) th")) {
    entry.tabIndex = 0;
    entry.onkeydown = e => { if (e.key == "Enter") entry.click(); };
  }
  for (const type of ["down", "move", "up"]) touch(u.over, type);
  new ResizeObserver(() => u.setSize({width: figure.clientWidth - 18, height: HEIGHT})).observe(figure);
  return u;
}

function touch(over, type) {  // a finger does what the mouse does; up and down it scrolls the page
  over.addEventListener("pointer" + type, e => {
    if (e.pointerType == "mouse") return;
    const {clientX, clientY} = e;
    const send = kind => (kind == "mouseup" ? document : over).dispatchEvent(
      new MouseEvent(kind, {clientX, clientY, movementX: 1, bubbles: true}));  // 0: uPlot ignores it
    if (type == "down") send("mousemove");
    send("mouse" + type);
  });
}

function onKey(e, u) {
  const step = e.shiftKey ? 10 : 1, n = u.data[0].length;
  const [min, max] = zoom || [0, lastStep()];
  const at = u.data[0][u.cursor.idx] ?? (min + max) / 2;
  const show = i => u.setCursor({left: u.valToPos(u.data[0][Math.max(0, Math.min(n - 1, i))], "x"),
    top: u.cursor.top >= 0 ? u.cursor.top : u.over.clientHeight / 2});
  const first = u.valToIdx(min), last = u.valToIdx(max), i = u.cursor.idx ?? first - step;
  const act = {
    ArrowRight: () => show(Math.min(last, i + step)), ArrowLeft: () => show(Math.max(first, i - step)),
    Home: () => show(first), End: () => show(last),
    ArrowUp: () => u.setCursor({left: u.cursor.left, top: Math.max(0, u.cursor.top - 12)}),
    ArrowDown: () => u.setCursor({left: u.cursor.left, top: Math.min(u.over.clientHeight - 1, u.cursor.top + 12)}),
    "+": () => setZoom([at - (at - min) / 2, at + (max - at) / 2]),
    "-": () => setZoom([at - (at - min) * 2, at + (max - at) * 2]),
    Escape: () => setZoom(null),
  }[e.key == "=" ? "+" : e.key];
  if (!act || e.ctrlKey || e.metaKey || e.altKey) return;
  e.preventDefault();
  act();
}

function drawEvents(u, runs, named) {
  const {ctx} = u, {left, top, width, height} = u.bbox, ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  runs.forEach(run => {
    let row = 0;
    for (const e of run.events) {
      const x = u.valToPos(e.step, "x", true);
      const colour = e.kind == "restart" ? css("--soft") : css("--alarm");
      ctx.strokeStyle = ctx.fillStyle = colour;
      ctx.lineWidth = ratio;
      if (e.kind == "slow-down") {
        const end = Math.min(left + width, e.until == null ? Infinity : u.valToPos(e.until, "x", true));
        ctx.globalAlpha = 0.12;
        ctx.fillRect(x, top, end - x, height);
        ctx.globalAlpha = 1;
        ctx.fillRect(x, top, 2 * ratio, height);
        ctx.fillRect(x, top, end - x, 3 * ratio);
        if (named) {
          const text = `since step ${e.step}: ${e.label}`, w = ctx.measureText(text).width;
          const from = Math.max(left, Math.min(x + 4 * ratio, left + width - w - 8 * ratio));
          const y = top + (6 + 18 * row++) * ratio;
          ctx.fillStyle = css("--back");
          ctx.fillRect(from, y, w + 8 * ratio, 17 * ratio);
          ctx.fillStyle = colour;
          ctx.fillText(text, from + 4 * ratio, y + 13 * ratio);
        }
      } else {  // a dashed line with a triangle above
        ctx.setLineDash([3 * ratio, 3 * ratio]);
        ctx.beginPath();
        ctx.moveTo(x, top);
        ctx.lineTo(x, top + height);
        ctx.stroke();
        ctx.setLineDash([]);
        ctx.beginPath();
        ctx.moveTo(x - 5 * ratio, top);
        ctx.lineTo(x + 5 * ratio, top);
        ctx.lineTo(x, top + 8 * ratio);
        ctx.fill();
      }
    }
  });
  ctx.restore();
}

// --- what is drawn ---

function line(i, table, name, label, more = {}) {
  const run = page.runs[i], t = run[table];
  if (!t[name]) return [];
  return [{label: page.runs.length > 1 ? `${label} ${run.name}` : label, x: t.step, y: t[name],
    low: t[name + " low"], high: t[name + " high"], stroke: runColour(i), dash: DASHES[i % 4], ...more}];
}

const perRun = lines => page.runs.flatMap((_, i) => lines(i));

function lineChart(title, lines, more) {
  if (lines.length) chart(title, lines, more);
}

// The second line of a run: dotted, and of another colour where there is one run only.
const second = i => ({dash: [2, 3], stroke: runColour(page.runs.length > 1 ? i : 1)});

function drawLoss() {
  lineChart("Loss (nats)", perRun(i => [...line(i, "logs", "train/loss", "train"),
    ...line(i, "evaluations", "val/loss", "validation", {points: true, ...second(i)})]));
  const names = new Set(page.runs.flatMap(r => [...Object.keys(r.logs), ...Object.keys(r.evaluations)])
    .filter(n => /^(train|val)\/loss\//.test(n)));
  const datasets = [...new Set([...names].map(n => n.replace(/^(train|val)\/loss\//, "")))];
  lineChart("Loss by dataset (nats)", datasets.flatMap((name, k) => perRun(i => {
    const stroke = runColour(k);
    const dash = DASHES[(page.runs.length > 1 ? i : k) % 4];
    return [...line(i, "logs", "train/loss/" + name, name, {stroke, dash}),
      ...line(i, "evaluations", "val/loss/" + name, name + " validation", {stroke, dash, points: true, width: 1})];
  })));
}

function drawPhases(run, i) {
  const logs = run.logs, names = page.phases.filter(p => logs[`perf/${p}_ms`]?.some(x => x > 0));
  const of = page.runs.length > 1 ? ", " + run.name : "";
  if (!names.length)
    return lineChart(`Step time (ms)${of}`, line(i, "logs", "perf/step_ms", "step"), {runs: [run]});
  const raw = names.map(p => logs[`perf/${p}_ms`]);
  let shown = names.map(() => true);
  const stack = () => {
    let sums = logs.step.map(() => 0);
    return raw.map((column, k) => (sums = sums.map((s, j) => column[j] == null ? null : s + shown[k] * column[j])));
  };
  const lines = stack().map((y, k) => ({label: names[k], x: logs.step, y, width: 1,
    stroke: css("--back"), fill: k ? undefined : COLOURS[names[0]]}));
  const bands = names.slice(1).map((name, k) => ({series: [k + 2, k + 1], fill: COLOURS[name]}));
  const order = logs.step;  // the steps of this run alone: no join, so indices agree
  const top = () => {  // a rare evaluation or checkpoint may be cut off, or it would flatten the rest
    const sums = stack().at(-1).filter(x => x != null).sort((a, b) => a - b);
    return 1.15 * Math.min(sums.at(-1), 1.5 * sums[Math.floor(0.9 * sums.length)]) || 1;
  };
  const labels = u => {
    const {ctx} = u, {left, width} = u.bbox, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "alphabetic";
    const sums = stack(), j = Math.min(order.length - 1, u.valToIdx(u.scales.x.max));
    names.forEach((name, k) => {
      if (!shown[k] || sums[k][j] == null) return;
      const high = u.valToPos(sums[k][j], "y", true), low = u.valToPos(k ? sums[k - 1][j] : 0, "y", true);
      if (low - high < 13 * ratio || low - 13 * ratio < u.bbox.top) return;
      const at = [name, left + width - 6 * ratio, (high + low) / 2 + 4 * ratio];
      ctx.lineWidth = 4 * ratio;
      ctx.lineJoin = "round";
      ctx.strokeStyle = COLOURS[name];  // readable where the band is narrower than the word
      ctx.fillStyle = ink(COLOURS[name]);
      ctx.strokeText(...at);
      ctx.fillText(...at);
    });
    ctx.restore();
  };
  const u = chart(`Step time by phase (ms)${of}`, lines, {runs: [run], bands, colours: names.map(name => COLOURS[name]), draw: labels, rangeY: () => [0, top()],
    value: (u, x, k, j) => format(j == null ? null : raw[k - 1][j])});
  u.hooks.setSeries = [(u, k, options) => {
    if (k == null || options.show == null) return;
    shown = u.series.slice(1).map(s => s.show);
    u.setData([logs.step, ...stack()], false);
    setZoom(zoom);
  }];
}

const STOPS = [[13, 8, 60], [82, 18, 124], [163, 44, 122], [229, 92, 81], [252, 163, 62], [250, 240, 150]];

function heatColour(share) {
  const at = Math.max(0, Math.min(0.9999, share)) * (STOPS.length - 1), k = Math.floor(at);
  return `rgb(${STOPS[k].map((c, j) => Math.round(c + (at - k) * (STOPS[k + 1][j] - c)))})`;
}

function drawHeat(run, key, title, logarithmic) {
  const table = run.heat[key];
  if (!table) return;
  const names = Object.keys(table).filter(n => n != "step" && !/ (low|high)$/.test(n));
  const byNumber = n => +(n.match(/\d+/)?.[0] ?? (n.includes("embed") ? -1 : Infinity));
  names.sort((a, b) => byNumber(a) - byNumber(b) || 0);  // from the bottom up
  const scale = x => logarithmic ? Math.log10(x) : x;
  const known = names.flatMap(n => table[n]).filter(x => x != null && (x > 0 || !logarithmic));
  if (!known.length) return;
  const sorted = known.map(scale).sort((a, b) => a - b);
  const low = sorted[Math.floor(0.05 * sorted.length)], high = sorted[Math.ceil(0.95 * sorted.length) - 1];
  const share = x => high > low ? (scale(x) - low) / (high - low) : 0.5;
  const steps = table.step, n = names.length;
  const paint = u => {
    const {ctx} = u, y = k => u.valToPos(k, "y", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    ctx.clip();
    names.forEach((name, k) => steps.forEach((step, j) => {
      if (table[name][j] == null) return;
      const from = u.valToPos(j ? steps[j - 1] : 0, "x", true), to = u.valToPos(step, "x", true);
      ctx.fillStyle = heatColour(share(table[name][j]));
      ctx.fillRect(Math.floor(from), Math.floor(y(k + 1)), Math.ceil(to - from) + 1, Math.ceil(y(k) - y(k + 1)) + 1);
    }));
    ctx.restore();
  };
  const every = Math.ceil(n / 12), prefix = key == "ranks" ? "rank " : "";
  const unit = logarithmic ? "" : " ms";
  const [dark, light] = (logarithmic ? [10 ** low, 10 ** high] : [low, high]).map(format);
  chart(`${title}${page.runs.length > 1 ? ", " + run.name : ""}: dark ${dark}${unit}, light ${light}${unit}`,
    [{label: "", x: steps, y: steps.map(() => null), stroke: "#000"}], {
      runs: [run], draw: paint, rangeY: () => [0, n],
      heat: {splits: () => names.map((_, k) => k + 0.5).filter((_, k) => k % every == 0),
        values: (u, at) => at.map(k => prefix + names[Math.floor(k)].slice(0, 14)), ticks: {show: false}},
      describe: (u, at) => {
        const j = steps.findIndex(s => s >= at), k = Math.floor(u.posToVal(u.cursor.top, "y"));
        return names[k] == null || j < 0 ? "" :
          `step ${steps[j]} · ${prefix}${names[k]}: ${format(table[names[k]][j])}${unit}`;
      }});
  if (key == "ranks" && run.slow_rank) add(byId("charts").lastChild, "p", run.slow_rank);
}

function drawCharts() {
  plots.splice(0).forEach(u => u.destroy());
  byId("charts").replaceChildren();
  drawLoss();
  page.runs.forEach(drawPhases);
  const mfu = page.runs.some(r => r.logs["perf/mfu"]) ? " and MFU" : "";
  lineChart(`Throughput (tokens/s)${mfu}`, perRun(i => [
    ...line(i, "logs", "perf/tokens_per_second", "tokens/s"),
    ...line(i, "logs", "perf/mfu", "MFU", {scale: "right", ...second(i)})]),
  {rangeY: (u, low, high) => [0, 1.1 * high || 1]});
  const memory = {host_rss: "host", workers_rss: "workers", allocated: "device, allocated",
    reserved: "device, reserved", peak: "device, peak"};
  lineChart("Memory (GB)", perRun(i => Object.entries(memory).flatMap(([key, label], k) => {
    const column = page.runs[i].logs[`memory/${key}_gb`];
    return column?.some(x => x > 0) ? line(i, "logs", `memory/${key}_gb`, label, {dash: DASHES[k % 4],
      stroke: page.runs.length > 1 ? runColour(i) : runColour(k), width: k > 3 ? 2.5 : 1.5}) : [];
  })), {rangeY: (u, low, high) => [0, 1.1 * high || 1]});
  lineChart("Gradient norm, learning rate", perRun(i => [
    ...line(i, "logs", "train/grad_norm", "gradient norm"),
    ...line(i, "logs", "train/learning_rate", "learning rate", {scale: "right", ...second(i)})]),
  {rangeY: (u, low, high) => [0, 1.1 * high || 1]});
  page.runs.forEach(run => drawHeat(run, "layers", "Update ratio by layer", true));
  page.runs.forEach(run => drawHeat(run, "ranks", "Own work of each rank (ms a step)", false));
  setZoom(zoom);
}

function drawEventList() {
  const place = byId("events");
  place.replaceChildren();
  const list = page.runs.flatMap(run => run.events.map(e => [run, e])).sort((a, b) => a[1].step - b[1].step);
  add(place, "h2", list.length ? "What happened" : "Nothing happened: no slow-down, anomaly or restart");
  const ul = add(place, "ul");
  for (const [run, e] of list) {
    const item = add(ul, "li");
    const name = page.runs.length > 1 ? run.name + ": " : "";
    add(item, "button", `${name}step ${e.step}, ${e.kind}`).onclick = () => {
      const span = Math.max(20, 0.1 * lastStep());
      setZoom([e.step - span, (e.until ?? e.step) + span]);
      byId("charts").scrollIntoView();
    };
    add(item, "span", " " + e.text);
  }
}

function drawSamples() {
  const place = byId("samples"), steps = [...new Set(page.runs.flatMap(r => r.samples.map(s => s.step)))];
  place.replaceChildren();
  if (!steps.length) return;
  steps.sort((a, b) => a - b);
  add(place, "h2", "Samples of what it writes");
  const slider = add(place, "input", "", {type: "range", min: 0, max: steps.length - 1, step: 1});
  slider.setAttribute("aria-label", "step of the sample");
  const out = add(place, "div");
  const show = () => {
    const step = steps[slider.value];
    slider.setAttribute("aria-valuetext", `step ${step}`);
    out.replaceChildren();
    for (const run of page.runs) {
      const sample = run.samples.filter(s => s.step <= step).at(-1);
      if (!sample) continue;
      add(out, "p", `step ${sample.step}${page.runs.length > 1 ? ", " + run.name : ""}`, {className: "soft"});
      add(out, "pre", sample.text);
    }
  };
  slider.value = sampleShown == null ? steps.length - 1 : Math.min(sampleShown, steps.length - 1);
  slider.oninput = () => { sampleShown = +slider.value; show(); };
  show();
}

function table(place, names, key) {
  const t = add(add(place, "div", "", {className: "wide"}), "table");
  const head = add(t, "tr");
  add(head, "th");
  for (const run of page.runs) add(head, "th", run.name);
  for (const name of names) {
    const row = add(t, "tr");
    add(row, "th", name);
    for (const run of page.runs) add(row, "td", run[key][name] ?? "");
  }
}

function drawConfig() {
  const place = byId("config"), open = place.querySelector("details")?.open;
  place.replaceChildren();
  const all = key => [...new Set(page.runs.flatMap(r => Object.keys(r[key])))];
  const differ = all("config").filter(n => new Set(page.runs.map(r => r.config[n])).size > 1);
  add(place, "h2", "Configuration");
  table(place, all("notes"), "notes");
  if (page.runs.length > 1) {
    add(place, "p", differ.length ? "The runs differ in:" : "The runs have the same configuration.");
    if (differ.length) table(place, differ, "config");
  }
  const details = add(place, "details", "", {open: !!open});  // as it was before a renewal
  add(details, "summary", "all options");
  table(details, all("config"), "config");
}

function draw() {
  document.title = page.runs.map(r => r.name).join(", ");
  drawHead();
  drawCharts();
  drawEventList();
  drawSamples();
  drawConfig();
}

// --- a run that goes on ---

async function renew() {
  try {
    const answer = await fetch("data");
    if (answer.ok) {
      const newer = await answer.json();
      if (JSON.stringify(newer.runs) != JSON.stringify(page.runs)) {
        const at = scrollY;
        page = newer;
        draw();
        scrollTo(0, at);
      }
    }
  } catch { /* the server is gone: the page stays as it is */ }
  setTimeout(renew, 1000 * page.again_s);
}

byId("zoom").onclick = () => setZoom(null);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
if (page.again_s) setTimeout(renew, 1000 * page.again_s);

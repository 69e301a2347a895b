// The page of one or several runs. All text goes through textContent: names and samples may hold
// anything. Written against the data that tools/page.py makes.
"use strict";

const COLOURS = {  // neighbours in a stack differ in lightness, for black and white
  data: "#f2a72e", forward: "#0b4f8a", backward: "#8cc9f0", waiting: "#c2659b", optimizer: "#12683f",
  other: "#c3c8cf", logging: "#a8861a", evaluation: "#532f85", checkpoint: "#f0926a",
  startup: "#c9ced6", training: "#2a7f62", lost: "#c62828",
};
const BETWEEN = ["logging", "evaluation", "checkpoint"];  // of steps: shown when asked for
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];  // of runs, for black and white
const AXES = {step: ["step", 1], tokens: ["train/tokens", 1], hours: ["goodput/wall_s", 3600]};  // column, unit
const HEIGHT = innerWidth < 600 ? 190 : 235;
let page = JSON.parse(document.getElementById("data").textContent);
let axis = "step";  // what is on the x axis of all charts
let zoom = null;  // [first, last x] or null for all
let smooth = true;
const logarithmic = {};  // title of a chart → whether its y axis is, once that was chosen
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
    if (size >= least && size < 1e15) return +(x / (unit == "k" ? 1e3 : least)).toPrecision(4) + unit;
  return size && size < 1e-3 || size >= 1e15 ? x.toExponential(2) : String(+x.toPrecision(4));
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

function shorten(paths) {  // to the part in which they differ
  if (paths.length < 2) return paths;
  const parts = paths.map(path => path.split("/"));
  const least = Math.min(...parts.map(p => p.length)), same = i => parts.every(p => p.at(i) == parts[0].at(i));
  let first = 0, last = 0;
  while (first < least - 1 && same(first)) first++;
  while (last < least - 1 - first && same(-1 - last)) last++;
  return parts.map(p => p.slice(first, p.length - last).join("/"));
}

// --- the x axis ---

function placer(run) {  // step → where it lies on the x axis: between the logs around it
  if (axis == "step") return step => step;
  const [column, unit] = AXES[axis], values = run.logs[column];
  const known = [[0, 0], ...run.logs.step.map((s, j) => [s, values[j] / unit]).filter((p, j) => values[j] != null)];
  return step => {
    const next = known.findIndex(([s]) => s >= step);
    if (next < 1) return known.at(next)[1];
    const [[s0, x0], [s1, x1]] = known.slice(next - 1, next + 1);
    return x0 + (x1 - x0) * (step - s0) / (s1 - s0);
  };
}

const lastX = () => Math.max(...page.runs.map(run => run.x(run.step))) || 1;

function setZoom(range) {
  const high = lastX();
  if (range) range = [Math.max(0, range[0]), Math.min(high, range[1])];
  if (range && (range[1] - range[0] < Math.min(1, high / 1e3) || range[0] <= 0 && range[1] >= high)) range = null;
  zoom = range;
  const [min, max] = zoom || [0, high];
  for (const u of plots) u.setScale("x", {min, max});
  byId("zoom").hidden = !zoom;
}

function drawTools() {
  const tools = byId("tools");
  tools.replaceChildren();
  const button = (text, pressed, onclick) => add(tools, "button", text, {onclick, ariaPressed: pressed});
  const known = Object.keys(AXES).filter(a => page.runs.every(r => a == "step" || r.logs[AXES[a][0]]));
  if (known.length > 1) for (const name of known)
    button(name, axis == name, () => { axis = name; zoom = null; drawCharts(); });
  button("smooth", smooth, () => { smooth = !smooth; drawCharts(); });
}

// --- head: verdict and goodput ---

function drawHead() {
  const head = byId("head");
  head.replaceChildren();
  add(head, "h1", page.runs.map(r => r.short).join(" and "));
  page.runs.forEach((run, i) => {
    const f = run.figures, block = add(head, "div");
    if (page.runs.length > 1) {
      const title = add(block, "b", run.short);
      const key = add(title, "span", "", {className: "key"});
      key.style.borderColor = runColour(i);
      key.style.borderTopStyle = i ? "dashed" : "solid";
    }
    const alarms = run.events.filter(e => !["anomaly", "restart"].includes(e.kind));
    const slow = alarms.filter(e => e.kind == "slow-down").length;
    let said = 0;
    run.verdict.forEach((text, k) => {
      const event = alarms.find(e => text.includes(e.text));
      if (event?.kind == "slow-down" && ++said > 5) return;
      const trace = Object.keys(run.traces).find(path => text.endsWith(path));
      const line = add(block, "p", trace ? text.slice(0, -trace.length) : text,
        {className: `${k ? "" : "verdict"} ${event ? "bad" : ""}`});
      if (trace) add(line, "a", trace, {href: run.traces[trace]});
    });
    if (slow > 5) add(block, "a", `${slow - 5} more slow-downs`, {href: "#events", className: "bad"});
    const facts = [`step ${run.step}${run.max_steps && " of " + run.max_steps}`];
    for (const [key, text] of [["train/loss", x => `loss ${x}`], ["val/loss", x => `validation ${x}`],
      ["step_ms_median", x => `${x} ms/step`], ["perf/tokens_per_second", x => `${x} tokens/s`],
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
    }
  const parts = Object.entries(sums).filter(([, s]) => s >= 0.001 * total)
    .map(([kind, s]) => `${kind} ${(100 * s / total).toFixed(1)} %`);
  const text = `${duration(total)}: ${parts.join(", ")}`;
  bar.setAttribute("aria-label", text);
  add(block, "p", text, {className: "soft"});
}

// --- charts ---

function eventsAt(u, run, at) {  // what happened there, within 6 pixels
  const margin = 6 * (u.scales.x.max - u.scales.x.min) / u.over.clientWidth;
  return run.events.filter(e => e.kind == "slow-down"
    ? run.x(e.step) <= at + margin && at <= run.x(e.until ?? run.step) : Math.abs(run.x(e.step) - at) <= margin);
}

function highest(sorted) {  // without a few values far above the rest, as of the first steps
  const most = sorted.at(-1), usual = sorted[Math.floor(0.95 * (sorted.length - 1))];
  return usual > 0 && most > 5 * usual ? 1.5 * usual : most;
}

function rangeOf(u, log, fromZero, stacked) {  // of what is seen of the y axis
  const [first, last] = zoom || [0, lastX()];
  const columns = stacked ? [u.data.at(-1)] : u.data.filter((_, k) => k && u.series[k].show && u.series[k].scale == "y");
  const seen = columns.flatMap(y => y.filter((v, j) => v != null && (v > 0 || !log) && u.data[0][j] >= first && u.data[0][j] <= last))
    .sort((a, b) => a - b);
  if (!seen.length) return [log ? 0.1 : 0, 1];
  const low = seen[0], high = log ? seen.at(-1) : highest(seen), margin = 0.05 * (high - low) || 0.1 * Math.abs(high) || 1;
  u.cut = high < seen.at(-1) ? `▲ up to ${format(seen.at(-1))}` : "";
  if (log) return [low, Math.max(high, 2 * low)].map((x, k) => {  // to a digit, for the axis
    const unit = 10 ** Math.floor(Math.log10(x));
    return (k ? Math.ceil : Math.floor)(x / unit) * unit;
  });
  return fromZero ? [0, 1.1 * high || 1] : [low - margin, high + margin];
}

function helps(lines) {  // whether a logarithmic axis does: the highest is ten times the lowest
  const values = lines.filter(l => !l.scale).flatMap(l => l.y).filter(x => x != null).sort((a, b) => a - b);
  return values[0] > 0 && highest(values) > 10 * values[0];
}

function smoothed(y) {  // means over 2 % of the points to both sides, fewer at the start, where a loss is steep
  const most = Math.ceil(y.length / 50);
  return y.map((x, i) => {
    const near = y.slice(Math.max(0, i - Math.min(most, i)), i + Math.min(most, i) + 1).filter(v => v != null);
    return x == null ? null : near.reduce((a, b) => a + b) / near.length;
  });
}

// lines: [{label, x, y, low?, high?, stroke, dash?, scale?, points?, smooth?, gaps?, show?}]
function chart(title, lines, {runs = page.runs, draw, log, fromZero, stacked, value, bands, colours, describe, heat, onShow} = {}) {
  const figure = add(byId("charts"), "figure", "", {tabIndex: 0});
  figure.setAttribute("role", "group");
  figure.setAttribute("aria-label", title);
  const heading = add(figure, "h2", title), note = add(figure, "figcaption");
  note.setAttribute("aria-live", "polite");
  if (log && (log = lines.every(l => l.scale || l.y.every(x => x == null || x > 0)))) {
    log = logarithmic[title] ?? helps(lines);
    add(heading, "button", "log", {ariaPressed: log, onclick: () => { logarithmic[title] = !log; drawCharts(); }});
  }
  const tables = [], series = [{label: axis, value: (u, x) => x == null ? "–" : axis == "step" ? x : format(x)}];
  const spread = [], parts = {};  // a line's index → those of its raw values and extremes
  for (const l of lines) {
    const main = series.length, much = smooth && l.smooth && l.y.length > 50;
    const paint = {label: l.label, stroke: l.stroke, width: l.width ?? 1.5, dash: l.dash || [], fill: l.fill,
      scale: l.scale || "y", spanGaps: !l.gaps, show: l.show ?? true,
      points: {show: l.y.length < 2 || l.points && l.y.length < 60, size: 6},
      value: value || ((u, x, k, j) => format(j == null ? x : u.data[much ? main + 1 : main][j]))};
    const quiet = {...paint, class: "quiet", points: {show: false}, fill: undefined};
    series.push(paint);
    if (much) series.push({...quiet, stroke: l.stroke + "66", width: 1});
    if (l.low) {
      spread.push({series: [series.length + 1, series.length], fill: l.stroke + "30"});
      series.push({...quiet, width: 0}, {...quiet, width: 0});
    }
    parts[main] = series.slice(main + 1).map((_, k) => main + 1 + k);
    tables.push([l.x, much ? smoothed(l.y) : l.y, ...(much ? [l.y] : []), ...(l.low ? [l.low, l.high] : [])]);
  }
  const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
  const valuesOf = (u, splits) => splits.map(x => x == null ? "" : format(x));
  const ofAxis = {stroke: () => css("--soft"), grid: {stroke: css("--line"), width: 1}, values: valuesOf,
    ticks: {stroke: css("--line"), width: 1}, font: "12px system-ui, sans-serif"};
  const sides = {...ofAxis, size: (u, texts) => 22 + 7 * Math.max(2, ...(texts || []).map(text => text.length))};
  const axes = [ofAxis, {...sides, ...(heat && {grid: {show: false}, ...heat})}];
  if (lines.some(l => l.scale == "right")) axes.push({...sides, scale: "right", side: 1, grid: {show: false}});
  const hover = u => {
    const at = u.data[0][u.cursor.idx];
    const here = u.over.matches(":hover") || figure.contains(document.activeElement);
    const said = at == null || !here ? [] : runs.flatMap(run => eventsAt(u, run, at).map(e =>
      `${page.runs.length > 1 ? run.short + ": " : ""}${e.kind} at step ${e.step}: ${e.text}`));
    if (describe && at != null && here) said.unshift(describe(u, at));
    note.textContent = said.join("\n");
  };
  const options = {
    width: figure.clientWidth - 18, height: HEIGHT, series, axes, bands: bands || spread,
    scales: {x: {time: false, range: (u, min, max) => [min, max]},
      y: {distr: log ? 3 : 1, range: heat ? () => heat.range : u => rangeOf(u, log, fromZero, stacked)},
      right: {range: (u, min, max) => [0, 1.1 * max || 1]}},
    cursor: {y: !!heat, sync: {key: "steps", scales: ["x", null],
      filters: {sub: type => type == "mousemove" || type == "mouseleave"}},
    drag: {x: true, y: false}, bind: {dblclick: () => () => { setZoom(null); return null; }}},
    hooks: {setCursor: [hover],
      setScale: [(u, key) => {
        const {min, max} = u.scales.x;
        if (key == "x" && plots.includes(u) && (min != (zoom?.[0] ?? 0) || max != (zoom?.[1] ?? lastX())))
          queueMicrotask(() => setZoom([min, max]));
      }],
      setSeries: [(u, k, {show}) => {
        if (show == null || !parts[k]) return;
        for (const part of parts[k]) u.setSeries(part, {show});
        onShow?.(u);
      }],
      draw: [...(draw ? [draw] : []), u => drawEvents(u, runs)]},
  };
  const dashed = (u, k) => series[k].dash?.length ? "dashed" : "solid";
  options.legend = {show: !heat, markers: {dash: dashed}};
  if (colours) options.legend.markers = {width: 0, fill: (u, k) => colours[k - 1] || "transparent"};
  const u = new uPlot(options, data, figure);
  plots.push(u);
  figure.addEventListener("keydown", e => onKey(e, u));
  for (const entry of figure.querySelectorAll(".u-series:not(:first-child) th")) {
    entry.tabIndex = 0;
    entry.onkeydown = e => { if (e.key == "Enter") entry.click(); };
  }
  for (const type of ["down", "move", "up"]) touch(u.over, type);
  return figure;
}

function layout() {  // charts beside one another are as high as each other's legends need
  const card = u => u.root.parentNode, bottom = node => node.getBoundingClientRect().bottom;
  for (const u of plots) u.setSize({width: card(u).clientWidth - 18, height: HEIGHT});
  queueMicrotask(() => {  // now they are of that size
    const spare = plots.map(u => bottom(card(u)) - bottom(card(u).lastElementChild) - 9);
    plots.forEach((u, k) => u.setSize({width: u.width, height: HEIGHT + Math.max(0, Math.floor(spare[k]))}));
  });
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
  const [min, max] = zoom || [0, lastX()];
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

function drawEvents(u, runs) {
  const {ctx} = u, {left, top, width, height} = u.bbox, ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.fillStyle = css("--soft");
  ctx.fillText(u.cut || "", left + 6 * ratio, top + 14 * ratio);
  runs.forEach(run => {
    const own = page.runs.length > 1 && runColour(page.runs.indexOf(run));
    for (const e of run.events) {
      const x = u.valToPos(run.x(e.step), "x", true);
      const colour = own || css(e.kind == "restart" ? "--soft" : "--alarm");
      ctx.fillStyle = colour;
      if (e.kind == "slow-down") {
        const end = Math.min(left + width, u.valToPos(run.x(e.until ?? run.step), "x", true));
        ctx.globalAlpha = 0.12;
        ctx.fillRect(x, top, end - x, height);
        ctx.globalAlpha = 1;
        ctx.fillRect(x, top, 2 * ratio, height);
        ctx.fillRect(x, top, end - x, 3 * ratio);
      } else {  // a triangle, and a line of dots where it is no mere anomaly
        for (let y = top; e.kind != "anomaly" && y < top + height; y += 6 * ratio) ctx.fillRect(x, y, ratio, 3 * ratio);
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
  return [{label: page.runs.length > 1 ? `${label} ${run.short}` : label, x: t.x, y: t[name],
    low: t[name + " low"], high: t[name + " high"], stroke: runColour(i), dash: DASHES[i % 4], ...more}];
}

const perRun = lines => page.runs.flatMap((_, i) => lines(i));

function lineChart(title, lines, more) {
  if (lines.length) chart(title, lines, more);
}

// The second line of a run: dotted, and of another colour where there is one run only.
const second = i => ({dash: [2, 3], stroke: runColour(page.runs.length > 1 ? i : 1)});

function drawLoss() {
  const own = {smooth: true, gaps: true};  // a gap: not finite
  lineChart("Loss (nats)", perRun(i => [...line(i, "logs", "train/loss", "train", own),
    ...line(i, "evaluations", "val/loss", "validation", {points: true, gaps: true, ...second(i)})]), {log: true});
  const names = new Set(page.runs.flatMap(r => [...Object.keys(r.logs), ...Object.keys(r.evaluations)])
    .filter(n => /^(train|val)\/loss\//.test(n)));
  const datasets = [...new Set([...names].map(n => n.replace(/^(train|val)\/loss\//, "")))];
  lineChart("Loss by dataset (nats)", datasets.flatMap((name, k) => perRun(i => {
    const stroke = runColour(k);
    const dash = DASHES[(page.runs.length > 1 ? i : k) % 4];
    return [...line(i, "logs", "train/loss/" + name, name, {stroke, dash, ...own}),
      ...line(i, "evaluations", "val/loss/" + name, name + " validation", {stroke, dash, points: true, width: 1})];
  })), {log: true});
}

function drawPhases(run, i) {
  const logs = run.logs, names = page.phases.filter(p => logs[`perf/${p}_ms`]?.some(x => x > 0));
  const of = page.runs.length > 1 ? `, ${run.short}` : "";
  if (!names.length)
    return lineChart(`Step time (ms)${of}`, line(i, "logs", "perf/step_ms", "step"), {runs: [run]});
  const raw = names.map(p => logs[`perf/${p}_ms`]);
  let shown = names.map(p => !BETWEEN.includes(p));
  const stack = () => {
    let sums = logs.step.map(() => 0);
    return raw.map((column, k) => (sums = sums.map((s, j) => column[j] == null ? null : s + shown[k] * column[j])));
  };
  const visible = () => names.map((_, k) => k + 1).filter(k => shown[k - 1]);
  const bandsOf = ks => ks.slice(1).map((k, j) => ({series: [k, ks[j]], dir: -1, fill: () => COLOURS[names[k - 1]]}));
  const lines = stack().map((y, k) => ({label: names[k], x: logs.x, y, width: 1, show: shown[k],
    stroke: css("--back"), fill: () => visible()[0] == k + 1 ? COLOURS[names[k]] : null}));
  chart(`Step time by phase (ms)${of}`, lines, {runs: [run], bands: bandsOf(visible()), stacked: true, fromZero: true,
    colours: names.map(name => COLOURS[name]), value: (u, x, k, j) => format(j == null ? null : raw[k - 1][j]),
    onShow: u => {
      shown = u.series.slice(1).map(s => s.show);
      u.bands.splice(0, Infinity, ...bandsOf(visible()));
      u.setData([logs.x, ...stack()], false);
      setZoom(zoom);
    }});
}

const STOPS = [[13, 8, 60], [82, 18, 124], [163, 44, 122], [229, 92, 81], [252, 163, 62], [250, 240, 150]];

function heatColour(share) {
  const at = Math.max(0, Math.min(0.9999, share)) * (STOPS.length - 1), k = Math.floor(at);
  return `rgb(${STOPS[k].map((c, j) => Math.round(c + (at - k) * (STOPS[k + 1][j] - c)))})`;
}

function drawHeat(run, key, title, logarithmic) {
  const table = run.heat[key];
  if (!table) return;
  const names = Object.keys(table).filter(n => n != "step" && n != "x");
  const byNumber = n => +(n.match(/\d+/)?.[0] ?? (n.includes("embed") ? -1 : Infinity));
  names.sort((a, b) => byNumber(a) - byNumber(b) || 0);  // from the bottom up
  const scale = x => logarithmic ? Math.log10(x) : x;
  const known = names.flatMap(n => table[n]).filter(x => x != null && (x > 0 || !logarithmic));
  if (!known.length) return;
  const sorted = known.map(scale).sort((a, b) => a - b);
  const low = sorted[Math.floor(0.05 * sorted.length)], high = sorted[Math.ceil(0.95 * sorted.length) - 1];
  const share = x => high > low ? (scale(x) - low) / (high - low) : 0.5;
  const steps = table.x, n = names.length;
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
  const unit = logarithmic ? "" : " ms", of = page.runs.length > 1 ? ", " + run.short : "";
  const figure = chart(title + of, [{label: "", x: steps, y: steps.map(() => null), stroke: "#000"}], {
    runs: [run], draw: paint,
    heat: {range: [0, n], splits: () => names.map((_, k) => k + 0.5).filter((_, k) => k % every == 0),
      values: (u, at) => at.map(k => prefix + names[Math.floor(k)].slice(0, 14)), ticks: {show: false}},
    describe: (u, at) => {
      const j = steps.findIndex(s => s >= at), k = Math.floor(u.posToVal(u.cursor.top, "y"));
      return names[k] == null || j < 0 ? "" :
        `step ${table.step[j]} · ${prefix}${names[k]}: ${format(table[names[k]][j])}${unit}`;
    }});
  const [least, most] = (logarithmic ? [10 ** low, 10 ** high] : [low, high]).map(x => format(x) + unit);
  const bar = add(figure, "p", least + " ", {className: "scale"});
  add(bar, "i").style.background = `linear-gradient(90deg, ${STOPS.map(c => `rgb(${c})`)})`;
  bar.append(" " + most);
}

function drawCharts() {
  plots.splice(0).forEach(u => u.destroy());
  byId("charts").replaceChildren();
  for (const run of page.runs) {
    run.x = placer(run);
    for (const t of [run.logs, run.evaluations, ...Object.values(run.heat)]) t.x = (t.step || []).map(run.x);
  }
  drawTools();
  drawLoss();
  page.runs.forEach(drawPhases);
  const mfu = page.runs.some(r => r.logs["perf/mfu"]) ? " and MFU" : "";
  lineChart(`Throughput (tokens/s)${mfu}`, perRun(i => [
    ...line(i, "logs", "perf/tokens_per_second", "tokens/s"),
    ...line(i, "logs", "perf/mfu", "MFU", {scale: "right", ...second(i)})]),
  {fromZero: true});
  const memory = {host_rss: "host", workers_rss: "workers", allocated: "device, allocated",
    reserved: "device, reserved", peak: "device, peak"};
  lineChart("Memory (GB)", perRun(i => Object.entries(memory).flatMap(([key, label], k) => {
    const column = page.runs[i].logs[`memory/${key}_gb`];
    return column?.some(x => x > 0) ? line(i, "logs", `memory/${key}_gb`, label, {dash: DASHES[k % 4],
      stroke: page.runs.length > 1 ? runColour(i) : runColour(k), width: k > 3 ? 2.5 : 1.5}) : [];
  })), {fromZero: true});
  lineChart("Gradient norm, learning rate", perRun(i => [
    ...line(i, "logs", "train/grad_norm", "gradient norm", {smooth: true}),
    ...line(i, "logs", "train/learning_rate", "learning rate", {scale: "right", ...second(i)})]),
  {fromZero: true, log: true});
  page.runs.forEach(run => drawHeat(run, "layers", "Update ratio by layer", true));
  page.runs.forEach(run => drawHeat(run, "ranks", "Own work of each rank (ms/step)", false));
  setZoom(zoom);
  layout();
}

function drawEventList() {
  const place = byId("events");
  place.replaceChildren();
  const list = page.runs.flatMap(run => run.events.map(e => [run, e])).sort((a, b) => a[1].step - b[1].step);
  add(place, "h2", list.length ? "What happened" : "Nothing happened: no slow-down, anomaly or restart");
  const ul = add(place, "ul");
  for (const [run, e] of list) {
    const item = add(ul, "li");
    const name = page.runs.length > 1 ? run.short + ": " : "";
    add(item, "button", `${name}step ${e.step}, ${e.kind}`).onclick = () => {
      const span = 0.1 * lastX();
      setZoom([run.x(e.step) - span, run.x(e.until ?? e.step) + span]);
      byId("charts").scrollIntoView();
    };
    add(item, "span", " " + e.text);
  }
}

function drawSamples() {
  const place = byId("samples");
  const all = page.runs.flatMap(run => run.samples.map(sample => ({run, ...sample}))).sort((a, b) => b.step - a.step);
  place.replaceChildren();
  if (all.length) add(place, "h2", "Samples of what it writes");
  all.forEach(({run, step, text}, i) => {
    const details = add(place, "details", "", {open: i < page.runs.length});
    add(details, "summary", `step ${step}${page.runs.length > 1 ? ", " + run.short : ""}`);
    add(details, "pre", text);
  });
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
  const details = add(place, "details", "", {open: !!open});  // as it was before a refresh
  add(details, "summary", "all options");
  table(details, all("config"), "config");
}

function draw() {
  shorten(page.runs.map(r => r.name)).forEach((name, i) => { page.runs[i].short = name; });
  document.title = page.runs.map(r => r.short).join(", ");
  drawHead();
  drawCharts();
  drawEventList();
  drawSamples();
  drawConfig();
}

// --- a live run ---

let newest = "";

async function refresh() {
  try {
    const answer = await fetch("data"), text = await answer.text();
    if (answer.ok && text != newest) {
      const at = scrollY;
      page = JSON.parse(newest = text);
      draw();
      scrollTo(0, at);
    }
  } catch { /* the server has ended: the page stays as it is */ }
  setTimeout(refresh, 1000 * page.again_s);
}

let width = 0;
new ResizeObserver(() => { if (width != (width = byId("charts").clientWidth)) layout(); }).observe(byId("charts"));
byId("zoom").onclick = () => setZoom(null);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
if (page.again_s) setTimeout(refresh, 1000 * page.again_s);

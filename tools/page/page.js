// The page of one or several runs, from the data that tools/report.py writes into it. All text goes
// through textContent: names and samples may hold anything.
"use strict";

const COLOURS = {  // neighbours in a stack differ in lightness, for black and white
  data: "#f2a72e", forward: "#0b4f8a", backward: "#8cc9f0", waiting: "#c2659b", optimizer: "#12683f",
  other: "#c3c8cf", logging: "#a8861a", evaluation: "#532f85", checkpoint: "#f0926a",
  "start-up": "#c9ced6", training: "#2a7f62", lost: "#c62828",
};
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [1, 3]];  // of lines, to tell them apart in black and white
const HEIGHT = 235;
const page = JSON.parse(document.getElementById("data").textContent);
const several = page.runs.length > 1;
const plots = [];

// --- small things ---

const byId = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = i => css("--line" + i % 5);

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
  for (const [unit, least] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (size >= 10 * least) return +(x / least).toPrecision(4) + unit;
  return size && size < 1e-3 ? x.toExponential(2) : String(+x.toPrecision(4));
}

function duration(s) {
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h}h${m}m` : m ? `${m}m${Math.floor(s) % 60}s` : +s.toPrecision(3) + "s";
}

const described = e => e.text.startsWith(e.kind) ? e.text : `${e.kind}: ${e.text}`;

// --- head: verdict and goodput ---

function drawHead() {
  const head = byId("head");
  add(head, "h1", page.runs.map(run => run.name).join(" and "));
  page.runs.forEach((run, i) => {
    const f = run.figures, block = add(head, "div");
    if (several) add(block, "b", run.name).style.color = colour(i);
    run.verdict.forEach((text, k) => {
      const alarm = run.events.some(e => e.kind != "anomaly" && text.includes(e.text));
      add(block, "p", text, {className: `${k ? "" : "verdict"} ${alarm ? "bad" : ""}`});
    });
    const last = run.config.max_steps;  // "null" with --max_minutes; another loop's is not known
    const facts = [`step ${run.step}${/^\d/.test(last) ? ` of ${last}` : ""}`];
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
  const parts = Object.entries(run.seconds).filter(([, s]) => s > 0);
  const total = parts.reduce((sum, [, s]) => sum + s, 0);
  if (!total) return;
  const share = s => `${(100 * s / total).toFixed(1)} %`;
  const bar = add(block, "div", "", {className: "bar"});
  const key = add(block, "p", duration(total), {className: "soft"});
  for (const [kind, s] of parts) {
    const part = add(bar, "i", "", {className: kind, title: `${kind}: ${duration(s)}, ${share(s)}`});
    part.style.flexGrow = s / total;
    const colour = COLOURS[kind] ?? COLOURS.other;  // a phase of the loop's own
    part.style.backgroundColor = colour;
    add(key, "span", " ■ ").style.color = colour;
    add(key, "span", `${kind} ${share(s)}`);
  }
}

// --- charts ---

function highest(values) {  // ignores a few values far above the rest, as in the first steps
  const sorted = values.filter(x => x != null).sort((a, b) => a - b);
  if (sorted.length < 20) return sorted.at(-1);
  const most = sorted.at(-1), usual = sorted[Math.floor(0.95 * (sorted.length - 1))];
  return usual > 0 && most > 5 * usual ? 1.5 * usual : most;
}

// lines: [{label, stroke, dash?, data: [steps, values]}]; stacked: they are parts of a whole
function chart(title, lines, {runs = page.runs, stacked = false, fromZero = true} = {}) {
  if (!lines.length) return;
  const figure = add(byId("charts"), "figure", "", {className: stacked ? "stacked" : ""});
  // the same steps in all charts, even if the first ones have no value
  const all = [[1, Math.max(...page.runs.map(run => run.step))], [null, null]];
  const [steps, , ...raw] = uPlot.join([all, ...lines.map(line => line.data)]);
  const data = [steps, ...raw];
  if (stacked) for (let k = 2; k < data.length; k++)
    data[k] = data[k].map((x, j) => x == null ? data[k - 1][j] : x + (data[k - 1][j] ?? 0));
  const drawn = stacked ? data.at(-1) : raw.flat(), top = highest(drawn);
  const most = drawn.reduce((a, b) => Math.max(a, b ?? -Infinity), -Infinity);
  add(figure, "h2", title + (most > top ? `, cut: it goes up to ${format(most)}` : ""));
  const note = add(figure, "figcaption");
  const axis = {stroke: css("--soft"), font: "12px system-ui, sans-serif", size: 64,
    grid: {stroke: css("--grid"), width: 1}, ticks: {stroke: css("--grid"), width: 1},
    values: (u, splits) => splits.map(x => format(x))};
  const series = lines.map(({label, stroke, dash}, k) => ({
    label, stroke, dash, width: 1.5, fill: stacked && !k ? stroke : undefined,
    points: {show: lines[k].data[0].length < 50},
    value: (u, x, _, j) => format(raw[k][j])}));
  plots.push(new uPlot({
    width: figure.clientWidth - 18, height: HEIGHT, axes: [{...axis, size: 32}, axis],
    series: [{label: "step", value: (u, x) => x ?? "–"}, ...series],
    bands: stacked ? lines.slice(1).map(({stroke}, k) => ({series: [k + 2, k + 1], fill: stroke})) : [],
    scales: {x: {time: false}, y: {range: (u, min, max) => {
      const low = fromZero ? 0 : min, high = min < top ? Math.min(max, top) : max;
      const margin = 0.05 * (high - low) || 1;
      return [fromZero ? 0 : low - margin, high + margin];
    }}},
    legend: {markers: {dash: (u, k) => lines[k - 1]?.dash?.length ? "dashed" : "solid"}},
    cursor: {y: false, sync: {key: "steps", scales: ["x", null]}},
    hooks: {
      draw: [u => drawEvents(u, runs)],
      setCursor: [u => {
        const step = u.data[0][u.cursor.idx];
        note.textContent = step == null || !u.over.matches(":hover") ? "" : eventsAt(u, runs, step);
      }]},
  }, data, figure));
}

function eventsAt(u, runs, step) {  // the events within 6 pixels of a step
  const margin = 6 * (u.scales.x.max - u.scales.x.min) / u.over.clientWidth;
  return runs.flatMap(run => run.events.filter(e => e.step - margin <= step
    && step <= (e.kind == "slow-down" ? e.until ?? run.step : e.step) + margin)
    .map(e => `${several ? run.name + ": " : ""}step ${e.step}, ${described(e)}`)).join("\n");
}

function drawEvents(u, runs) {  // a slow-down is an area, an anomaly a tick, the rest a line
  const {ctx} = u, {left, top, width, height} = u.bbox, ratio = devicePixelRatio;
  const at = step => Math.max(left, Math.min(left + width, u.valToPos(step, "x", true)));
  ctx.save();
  for (const run of runs) for (const e of run.events) {
    if (e.step > u.scales.x.max || (e.until ?? e.step) < u.scales.x.min && e.kind != "slow-down") continue;
    const x = at(e.step), end = at(e.until ?? run.step);
    ctx.fillStyle = css(e.kind == "restart" ? "--soft" : "--alarm");
    ctx.fillRect(x, top, 2 * ratio, e.kind == "anomaly" ? 10 * ratio : height);
    if (e.kind != "slow-down") continue;
    ctx.fillRect(x, top, end - x, 3 * ratio);
    ctx.globalAlpha = 0.15;
    ctx.fillRect(x, top, end - x, height);
    ctx.globalAlpha = 1;
  }
  ctx.restore();
}

// --- what is drawn ---

function lineChart(title, columns, more) {  // columns: {name of a column: label}
  chart(title, page.runs.flatMap((run, i) => Object.entries(columns).map(([name, label], k) => ({
    label: several ? `${label} ${run.name}` : label, data: run.lines[name],
    stroke: colour(several ? i : k), dash: DASHES[(several && k == 0 ? i : k) % 5]})))
    .filter(line => line.data), more);
}

function drawCharts() {
  lineChart("Loss (nats)", {"train/loss": "train", "val/loss": "validation", "val/loss_ema": "averaged weights"}, {fromZero: false});
  const datasets = [...new Set(page.runs.flatMap(run => Object.keys(run.lines)))]
    .filter(name => /^(train|val)\/loss\//.test(name));
  lineChart("Loss by dataset (nats)", Object.fromEntries(datasets.map(name => [name, name.replace("/loss/", " ")])),
    {fromZero: false});
  for (const run of page.runs) {
    const phases = page.phases.filter(phase => run.lines[`perf/${phase}_ms`]);
    chart("Step time by phase (ms)" + (several ? `, ${run.name}` : ""), phases.map(phase =>
      ({label: phase, data: run.lines[`perf/${phase}_ms`], stroke: COLOURS[phase]})), {runs: [run], stacked: true});
  }
  lineChart("Throughput (tokens/s)", {"perf/tokens_per_second": "tokens/s"});
  lineChart("Memory (GB)", {"memory/host_rss_gb": "host",
    "memory/allocated_gb": "device, allocated", "memory/reserved_gb": "device, reserved",
    "memory/peak_gb": "device, peak"});
  lineChart("Gradient norm", {"train/grad_norm": "gradient norm"});
  lineChart("Learning rate", {"train/learning_rate": "learning rate"});
}

function drawEventList() {
  const list = page.runs.flatMap(run => run.events.map(e => [run, e])).sort((a, b) => a[1].step - b[1].step);
  add(byId("events"), "h2", list.length ? "What happened" : "Nothing happened: no slow-down, anomaly or restart");
  const ul = add(byId("events"), "ul");
  for (const [run, e] of list)
    add(ul, "li", `${several ? run.name + ": " : ""}step ${e.step}, ${described(e)}`);
}

function drawSamples() {
  const all = page.runs.flatMap(run => run.samples.map(sample => ({run, ...sample}))).sort((a, b) => b.step - a.step);
  if (all.length) add(byId("samples"), "h2", "Samples of what it writes");
  all.forEach(({run, step, text}, i) => {
    const details = add(byId("samples"), "details", "", {open: i < page.runs.length});
    add(details, "summary", `step ${step}${several ? ", " + run.name : ""}`);
    add(details, "pre", text);
  });
}

function drawConfig() {  // the options; of several runs, those in which they differ
  const names = [...new Set(page.runs.flatMap(run => Object.keys(run.config)))]
    .filter(name => !several || new Set(page.runs.map(run => run.config[name])).size > 1);
  if (!names.length && !several) return;  // another loop's run
  const details = add(byId("config"), "details", "", {open: several});
  add(details, "summary", several ? "Options in which the runs differ" : "Options");
  const table = add(details, "table");
  for (const name of names) {
    const row = add(table, "tr");
    add(row, "th", name);
    for (const run of page.runs) add(row, "td", run.config[name] ?? "");
  }
}

document.title = page.runs.map(run => run.name).join(", ");
drawHead();
drawCharts();
drawEventList();
drawSamples();
drawConfig();
addEventListener("resize", () => plots.forEach(u =>
  u.setSize({width: u.root.parentNode.clientWidth - 18, height: HEIGHT})));

// Keeps the page up to date from server-sent events: a whole state first, then changes.

import { clock, countsChart, element, lineChart } from "./charts.js";

const LANES = 40;
const COLUMN = { step: 0, tokens: 1, up: 2, down: 3, open: 4, counts: 5, losses: 6 };
const CSS_OF = {
  stepping: "training", quiet: "waiting", joining: "joining", joined: "joining", restarting: "joining", starting: "joining",
  restoring: "joining", "waiting for learners": "joining", down: "down", "cut off": "cutoff",
  "out of reach": "cutoff", running: "merged", closing: "grace", left: "gone", finished: "gone", ended: "gone",
};
const WELL = new Set(["stepping", "running", "closing", "finished", "left", "ended"]);
const ORDER = new Intl.Collator("en", { numeric: true });
const by = (id) => document.getElementById(id);

let state = null;
let source = null;
let paused = false;
let over = false;
let awaySince = null;
let shownMost = LANES;
let spokenRemark = null;

// ---- what the syncer says

function connect() {
  source = new EventSource("/page/events");
  source.addEventListener("state", (event) => take(JSON.parse(event.data)));
  source.addEventListener("change", (event) => change(JSON.parse(event.data)));
  source.addEventListener("end", (event) => end(JSON.parse(event.data)));
  source.onopen = heard;
  source.onerror = () => {
    if (over) return;
    away();
    if (source.readyState === EventSource.CLOSED) setTimeout(again, 2000);
  };
}

/** The syncer has answered, but not with events: says why, and tries again. */
async function again() {
  const stopping = new AbortController();
  try {
    const answer = await fetch("/page/events", { signal: stopping.signal, cache: "no-store" });
    const reason = answer.headers.get("X-Reason") || "";
    const ok = answer.ok;
    stopping.abort();
    if (answer.status === 401) return signInAgain();
    if (!ok) {
      notice(`The syncer does not show this page: ${reason}. It is tried again.`);
      return void setTimeout(again, 5000);
    }
  } catch {
    return void setTimeout(again, 2000);
  }
  connect();
}

function signInAgain() {
  link("away", "signed out");
  const place = document.createElement("a");
  place.href = "/";
  place.textContent = "Sign in again";
  by("notice").replaceChildren("The run's secret has changed, or the time is up. ", place, ".");
  by("notice").hidden = false;
}

function heard() {
  if (awaySince !== null) notice(`The syncer is back, after ${clock((Date.now() - awaySince) / 1000)}.`, 10000);
  awaySince = null;
  link(paused ? "paused" : "live", paused ? "paused" : "live");
}

function away() {
  awaySince ??= Date.now();
  link("away", "away");
  const phase = state?.run.phase;
  const likely = phase === "closing" ? " It was in its closing rounds: the run has most likely finished." : "";
  notice(`The syncer does not answer. This page goes on by itself when it is back.${likely}`);
}

function end(told) {
  if (told.how === "finished") {
    over = true;
    source.close();
    link("ended", "finished");
    by("headline").textContent = "finished";
    notice(`The run has finished at step ${told.step}. Its report is ${told.folder}/report.html on the syncer's machine; ddiloco report ${told.folder} makes it anew.`);
  } else {
    awaySince = Date.now();
    link("away", "stopped");
    notice(`The syncer was told to stop at step ${told.step}. When it is started again (--resume ${told.folder}), this page goes on by itself.`);
  }
}

function link(kind, words) {
  by("link").dataset.link = kind;
  by("link").textContent = words;
}

let noticed = 0;
function notice(words, milliseconds = 0) {
  const box = by("notice"), turn = ++noticed;
  if (box.textContent !== words) box.textContent = words;
  box.hidden = false;
  if (milliseconds) setTimeout(() => { if (turn === noticed) box.hidden = true; }, milliseconds);
}

// ---- the state

function take(whole) {
  state = whole;
  stillHere();
  spokenRemark ??= whole.remarks.at(-1)?.join() ?? "";
  draw();
}

function change(news) {
  if (state === null) return;
  stillHere();
  Object.assign(state, news.set);
  state.history.rows.push(...news.rows);
  for (const [name, spans] of Object.entries(news.lanes)) (state.lanes[name] ??= []).push(...spans);
  Object.assign(state.learners, news.learners);
  for (const name of news.gone) delete state.learners[name];
  draw();
}

/** After a stop that was announced, or a break, something comes again. */
function stillHere() {
  if (awaySince !== null) heard();
}

const now = () => Math.max(1, state.history.rows.length - 1) * state.history.interval;
const learnersOf = () => Object.keys(state.learners).sort(ORDER.compare);
const fewEnough = () => state.history.lines;

// ---- drawing

let asked = false;
function draw() {
  if (paused || asked || state === null) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    for (const part of [drawHead, drawCards, drawLoss, drawWaits, drawTime, drawLanes, drawRounds, drawTraffic, drawLog]) part();
  });
}

function drawHead() {
  const { run, problems } = state;
  const name = run.name ? `Decoupled DiLoCo: ${run.name}` : "Decoupled DiLoCo run";
  put(by("title"), name);
  if (document.title !== name) document.title = name;
  if (!over) put(by("headline"), run.reading ? "reading the tape" : run.headline);
  put(by("position"), run.phase === "empty" ? "" : run.position);
  put(by("elapsed"), run.elapsed);
  by("share").hidden = run.share === null;
  by("share").value = run.share ?? 0;
  rows(by("problems"), problems, () => {
    const made = document.createElement("p");
    made.className = "problem";
    return made;
  }, put);
  put(by("source"), run.whole ? "" : "The tapes of the other processes are not on this machine: faults, evaluations and how processes ended are not told here.");
}

function drawCards() {
  rows(by("cards"), state.cards, () => {
    const card = document.createElement("div");
    card.className = "card";
    card.innerHTML = '<dt></dt><dd></dd><dd class="detail"></dd>';
    return card;
  }, (card, values) => values.forEach((value, n) => put(card.children[n], value)));
}

function drawLoss() {
  const { interval, rows: samples } = state.history;
  const evaluations = state.evaluations.filter((each) => each[2] !== null).map(([at, , loss]) => [at, loss]);
  const series = {};
  samples.forEach((row, n) => {
    for (const [name, loss] of Object.entries(row[COLUMN.losses])) {
      if (loss !== null) (series[name] ??= []).push([n * interval, loss]);
    }
  });
  const lines = [];
  let band = null, told = "";
  if (fewEnough()) {
    for (const name of Object.keys(series).sort(ORDER.compare)) {
      lines.push({ css: color(name), points: smooth(series[name]), title: name });
      told += `, ${name} ${series[name].at(-1)[1].toFixed(3)}`;
    }
  } else if (series.middle) {
    const [low, high] = [series.tenth, series["nine tenths"]];
    band = low.map(([at, value], n) => [at, value, (high[n] ?? high.at(-1))[1]]);
    lines.push({ css: "c0", points: smooth(series.middle), title: "the middle of all learners" });
    told = `, the middle of all learners ${series.middle.at(-1)[1].toFixed(3)}`;
  }
  if (evaluations.length) {
    lines.push({ css: "ink", points: evaluations, dots: true, title: "global weights", end: evaluations.at(-1)[1].toFixed(3) });
    told = `, global weights ${evaluations.at(-1)[1].toFixed(3)}${told}`;
  }
  by("loss-chart").hidden = !lines.length;
  by("no-loss").hidden = lines.length > 0;
  const label = lines.length ? `Loss over time; now${told.slice(1)}.` : "No loss is told yet.";
  lineChart(by("loss-chart"), { lines, band, high: now(), name: "mean loss per token", label });
  const keys = lines.map((line) => [line.css, line.title]);
  if (band) keys.push(["band", "eight of ten learners"]);
  rows(by("loss-keys"), keys, makeKey, fillKey);
}

function drawWaits() {
  rows(by("open"), state.open, makeWait, (item, each) => {
    item.dataset.for = each.for;
    const step = each.step === null ? "" : `, step ${each.step}`;
    put(item.children[0], `Round ${each.round} of ${each.shard} (fragment ${each.fragment}${step}) waits for ${each.text}`);
    const lines = each.awaited.map(([who, why]) => `${who}: ${why}`);
    if (each.delivered) lines.push(`delivered: ${each.delivered}`);
    rows(item.children[1], lines, () => document.createElement("p"), put);
    put(item.children[2], `open for ${each.seconds} s`);
  });
  rows(by("idle"), state.waits, makeWait, (item, [who, why]) => {
    item.dataset.for = "process";
    put(item.children[0], who);
    rows(item.children[1], [why], () => document.createElement("p"), put);
    put(item.children[2], "");
  });
  if (!state.open.length && !state.waits.length) {
    rows(by("idle"), ["Nobody waits: no round is open, and all that should train do."], makeWait, (item, words) => {
      item.dataset.for = "";
      put(item.children[0], words);
    });
  }
}

function drawTime() {
  const { text, parts, last } = state.time;
  by("time").hidden = !parts.length;
  if (!parts.length) return;
  put(by("time-title"), text);
  let at = 0;
  const bars = parts.map(([css, , share]) => {
    const width = 10 * (Number.parseFloat(share.replace("<", "")) || 0), bar = element("rect", { x: at, width, height: 10, class: css });
    at += width;
    return bar;
  });
  by("time-bar").replaceChildren(...bars);
  const told = parts.map(([css, name, share, mean]) => [css, `${name}: ${share}, ${mean}`]);
  by("time-bar").setAttribute("aria-label", told.map((each) => each[1]).join("; "));
  rows(by("time-keys"), told, makeKey, fillKey);
  rows(by("time-last"), last, () => document.createElement("p"), put);
}

function chosen() {
  const wanted = by("wanted").value.trim().toLowerCase(), kind = by("state").value;
  let names = learnersOf().filter((name) => name.toLowerCase().includes(wanted));
  if (kind === "not") names = names.filter((name) => state.learners[name][0] !== "stepping");
  const total = names.length;
  if (total > shownMost) {
    const lately = (name) => Number.parseFloat(state.learners[name][5]) || 0;
    const well = (name) => (WELL.has(state.learners[name][0]) ? 1 : 0);
    names = [...names].sort((a, b) => well(a) - well(b) || lately(a) - lately(b) || ORDER.compare(a, b));
    names = names.slice(0, shownMost).sort(ORDER.compare);
  }
  return { names, total };
}

function drawLanes() {
  const { names, total } = chosen(), many = Object.keys(state.learners).length > 12;
  const all = Object.keys(state.learners).length + state.unlisted;
  by("filter").hidden = !many;
  by("more").hidden = total <= names.length;
  put(by("shown"), `${names.length} of ${all} learners`);
  const lanes = [...names, ...state.shards.map((shard) => shard[0])];
  rows(by("lane-list"), lanes, makeLane, drawLane);
  const ticks = [0, 0.5, 1].map((share) => clock(share * now()));
  rows(axis, ticks, () => document.createElement("span"), put);
  drawCounts(many);
  by("key-training").setAttribute("class", fewEnough() ? "c0" : "training");
  rows(by("learners").tBodies[0], names.map((name) => [name, ...state.learners[name]]), () => makeRow(10), fillRow);
  rows(by("shards").tBodies[0], state.shards, () => makeRow(10), fillRow);
}

const axis = document.createElement("span");
axis.className = "ticks";
by("lane-axis").append(axis);

function makeLane() {
  const item = document.createElement("li");
  item.append(document.createElement("span"), element("svg", { role: "img", preserveAspectRatio: "none" }), document.createElement("span"));
  item.lastChild.className = "state";
  return item;
}

function drawLane(item, name) {
  const spans = state.lanes[name] ?? [], last = spans.at(-1)?.[1] ?? "";
  const [label, picture, words] = item.children;
  const shard = !(name in state.learners);
  put(label, name);
  label.title = name;
  put(words, last === "stepping" ? "training" : last);
  item.toggleAttribute("data-trouble", !WELL.has(last));
  item.classList.toggle("first-shard", name === state.shards[0]?.[0]);
  const end = state.history.rows.length;
  const width = picture.clientWidth || 600, scale = width / Math.max(1, end);
  const drawn = `${name} ${width} ${end} ${spans.length}`;
  if (item.drawn === drawn) return;
  item.drawn = drawn;
  picture.setAttribute("viewBox", `0 0 ${width} 18`);
  const ways = {};
  spans.forEach(([begin, what], n) => {
    const until = spans[n + 1]?.[0] ?? end, size = Math.max(1, (until - begin) * scale);
    const css = what === "stepping" && fewEnough() ? color(name) : CSS_OF[what] ?? "other";
    ways[css] = (ways[css] ?? "") + `M${(begin * scale).toFixed(1)} 0h${size.toFixed(1)}v18h${(-size).toFixed(1)}z`;
  });
  picture.replaceChildren(...Object.entries(ways).map(([css, d]) => element("path", { d, class: `steps ${css}` })));
  const away = spans.filter((span) => !WELL.has(span[1])).length;
  picture.setAttribute("aria-label", `${shard ? "Shard" : "Learner"} ${name}: ${last === "stepping" ? "training" : last} since ${clock((spans.at(-1)?.[0] ?? 0) * state.history.interval)}${away ? `, ${away} times otherwise` : ""}.`);
}

function drawCounts(many) {
  const place = by("counts-chart");
  place.hidden = !many;
  if (!many) return;
  const { interval, rows: samples } = state.history;
  const groups = ["training", "joining", "waiting", "cutoff", "down", "gone"];
  const layers = groups.map((css) => ({ css, points: samples.map((_, n) => [n * interval, 0]) }));
  let total = 1;
  samples.forEach((row, n) => {
    let sum = 0;
    for (const [what, count] of Object.entries(row[COLUMN.counts])) {
      const layer = layers[groups.indexOf(CSS_OF[what])];
      if (layer) layer.points[n][1] += count;
      sum += count;
    }
    total = Math.max(total, sum);
  });
  const counts = Object.entries(samples.at(-1)?.[COLUMN.counts] ?? {}).map(([what, count]) => `${count} ${what}`);
  countsChart(place, { layers, high: now(), total, label: `Learners by what they do, over time; now ${counts.join(", ")}.` });
}

function drawRounds() {
  const told = state.recent.map((each) => [
    `${each.shard} ${each.round}`, each.fragment, each.step ?? "–", clock(each.at), each.took, each.fate, each.from || "nobody", each.without || "–",
  ]);
  rows(by("recent").tBodies[0], told, () => makeRow(8), fillRow);
}

function drawTraffic() {
  const { interval, rows: samples } = state.history;
  const line = (column, css, title) => ({ css, title, points: samples.map((row, n) => [n * interval, row[column]]).filter((point) => point[1] !== null) });
  const prefixed = (value) => [["G", 1e9], ["M", 1e6], ["k", 1e3]].reduce((text, [unit, size]) => text ?? (value >= size ? `${value / size}${unit}` : null), null) ?? `${value}`;
  const latest = (each) => (each.points.length ? prefixed(Math.round(each.points.at(-1)[1])) : "not known");
  const up = line(COLUMN.up, "c0", "sent"), down = line(COLUMN.down, "c1", "received"), speed = line(COLUMN.tokens, "c2", "tokens");
  lineChart(by("bytes-chart"), { lines: [up, down], high: now(), name: "bytes/s", zero: true, show: prefixed, label: `Bytes a second over time; now sent ${latest(up)}, received ${latest(down)}.` });
  lineChart(by("speed-chart"), { lines: [speed], high: now(), name: "tokens/s", zero: true, show: prefixed, label: `Tokens a second over time; now ${latest(speed)}.` });
}

function drawLog() {
  rows(by("log"), state.remarks.toReversed(), () => {
    const item = document.createElement("li");
    item.append(document.createElement("time"), document.createElement("span"));
    return item;
  }, (item, [at, words]) => {
    put(item.children[0], clock(at));
    put(item.children[1], words);
  });
  const newest = state.remarks.at(-1);
  if (newest && newest.join() !== spokenRemark) {
    spokenRemark = newest.join();
    put(by("spoken"), newest[1]);
  }
}

// ---- small things

/** Makes a container hold one element for each item, and changes only what differs. */
function rows(container, items, make, fill) {
  while (container.children.length > items.length) container.lastElementChild.remove();
  items.forEach((item, n) => {
    if (!container.children[n]) container.append(make());
    fill(container.children[n], item);
  });
}

function put(node, words) {
  const text = String(words);
  if (node.textContent !== text) node.textContent = text;
}

function makeRow(count) {
  const row = document.createElement("tr"), first = document.createElement("th");
  first.scope = "row";
  row.append(first);
  for (let n = 1; n < count; n++) row.append(document.createElement("td"));
  return row;
}

function fillRow(row, values) {
  values.forEach((value, n) => put(row.children[n], n === 1 && value === "stepping" ? "training" : value));
  row.children[1].classList.toggle("state-bad", typeof values[1] === "string" && values[1] in CSS_OF && !WELL.has(values[1]));
}

function makeWait() {
  const item = document.createElement("li");
  item.append(document.createElement("p"), document.createElement("div"), document.createElement("p"));
  item.lastChild.className = "faint";
  return item;
}

function makeKey() {
  const item = document.createElement("li");
  const picture = element("svg", { class: "key", viewBox: "0 0 14 14", "aria-hidden": "true" }, element("rect", { width: 14, height: 14 }));
  item.append(picture, document.createElement("span"));
  return item;
}

function fillKey(item, [css, words]) {
  item.firstChild.firstChild.setAttribute("class", css);
  put(item.lastChild, words);
}

function color(name) {
  const place = learnersOf().indexOf(name);
  return `c${Math.max(0, place) % 6}`;
}

/** Means over a few neighbours: single losses jump. */
function smooth(points) {
  const reach = Math.min(6, Math.floor(points.length / 12));
  return points.map(([at], n) => {
    const near = points.slice(Math.max(0, n - reach), n + reach + 1);
    return [at, near.reduce((sum, point) => sum + point[1], 0) / near.length];
  });
}

// ---- what the reader does

by("pause").addEventListener("click", () => {
  paused = !paused;
  by("pause").setAttribute("aria-pressed", String(paused));
  by("pause").textContent = paused ? "Go on" : "Pause";
  if (!over && awaySince === null) link(paused ? "paused" : "live", paused ? "paused" : "live");
  draw();
});
by("more").addEventListener("click", () => { shownMost += LANES; draw(); });
by("wanted").addEventListener("input", draw);
by("state").addEventListener("change", draw);
by("filter").addEventListener("submit", (event) => event.preventDefault());
new ResizeObserver(draw).observe(document.body);
connect();

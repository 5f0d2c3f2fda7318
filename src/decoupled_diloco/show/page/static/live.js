// Updates the page from server-sent events: first a whole state, then changes.

const LANES = 40;
const SVG = "http://www.w3.org/2000/svg";
const CSS_OF = {
  stepping: "training", quiet: "waiting", joining: "joining", joined: "joining", restarting: "joining", starting: "joining",
  restoring: "joining", "waiting for learners": "joining", down: "down", disconnected: "down", "never connected": "down", "partly connected": "waiting", "cut off": "cutoff",
  "out of reach": "cutoff", running: "merged", closing: "grace", left: "gone", away: "gone", finished: "gone", ended: "gone",
};
const WELL = new Set(["stepping", "running", "closing", "finished", "left", "away", "ended"]);
const ORDER = new Intl.Collator("en", { numeric: true });
const by = (id) => document.getElementById(id);

let state = null;
let source = null;
let paused = false;
let over = false;
let awaySince = null;
let shownMost = LANES;
let announcedRemark = null;

// ---- messages from the syncer

function connect() {
  source = new EventSource("/page/events");
  source.addEventListener("state", (event) => take(JSON.parse(event.data)));
  source.addEventListener("change", (event) => change(JSON.parse(event.data)));
  source.addEventListener("end", (event) => end(JSON.parse(event.data)));
  source.onopen = connected;
  source.onerror = () => {
    if (over) return;
    away();
    if (source.readyState === EventSource.CLOSED) setTimeout(again, 2000);
  };
}

/** The syncer answered without events: show the reason, and try again. */
async function again() {
  const stopping = new AbortController();
  try {
    const answer = await fetch("/page/events", { signal: stopping.signal, cache: "no-store" });
    const reason = answer.headers.get("X-Reason") || "";
    const ok = answer.ok;
    stopping.abort();
    if (answer.status === 401) return signInAgain();
    if (!ok) {
      notice(`The syncer does not serve this page: ${reason}. Retrying.`);
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
  by("notice").replaceChildren("The run's secret has changed, or the sign-in has expired. ", place, ".");
  by("notice").hidden = false;
}

function connected() {
  if (awaySince !== null) notice(`The syncer is back, after ${clock((Date.now() - awaySince) / 1000)}.`, 10000);
  awaySince = null;
  link(paused ? "paused" : "live", paused ? "paused" : "live");
}

function away() {
  awaySince ??= Date.now();
  link("away", "away");
  const phase = state?.run.phase;
  const likely = phase === "closing" ? " It was in its closing rounds, so the run has probably finished." : "";
  notice(`The syncer does not answer. This page continues when it is back.${likely}`);
}

function end(outcome) {
  if (outcome.how === "finished") {
    over = true;
    source.close();
    link("ended", "finished");
    by("headline").textContent = "finished";
    notice(`The run finished at step ${outcome.step}. Its report is ${outcome.folder}/report.html on the syncer's machine; ddiloco report ${outcome.folder} writes it again.`);
  } else {
    awaySince = Date.now();
    link("away", "stopped");
    notice(`The syncer was stopped at step ${outcome.step}. This page continues when it is restarted (--resume ${outcome.folder}).`);
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
  announcedRemark ??= whole.remarks.at(-1)?.join() ?? "";
  draw();
}

function change(news) {
  if (state === null) return;
  stillHere();
  Object.assign(state, news.set);
  Object.assign(state.charts, news.charts);
  for (const [name, spans] of Object.entries(news.lanes)) (state.lanes[name] ??= []).push(...spans);
  Object.assign(state.learners, news.learners);
  for (const name of news.gone) delete state.learners[name];
  draw();
}

/** A message arrived after an announced stop or a broken connection. */
function stillHere() {
  if (awaySince !== null) connected();
}

const now = () => Math.max(1, state.history.samples - 1) * state.history.interval;
const learnersOf = () => Object.keys(state.learners).sort(ORDER.compare);
const fewEnough = () => state.history.lines;

// ---- drawing

let scheduled = false;
function draw() {
  if (paused || scheduled || state === null) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    for (const part of [drawHead, drawCards, drawCharts, drawWaits, drawTime, drawLanes, drawRounds, drawLog]) part();
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
  put(by("source"), run.whole ? "" : "The tapes of the other processes are not on this machine, so faults, evaluations and ended processes are not shown.");
}

function drawCards() {
  rows(by("cards"), state.cards, () => {
    const card = document.createElement("div");
    card.className = "card";
    card.innerHTML = '<dt></dt><dd></dd><dd class="detail"></dd>';
    return card;
  }, (card, values) => values.forEach((value, n) => put(card.children[n], value)));
}

/** Insert the charts, which the syncer has drawn. */
function drawCharts() {
  for (const name of ["loss", "counts", "bytes", "speed"]) {
    const place = by(`${name}-chart`), svg = state.charts[name];
    place.hidden = !svg;
    if (place.drawn !== svg) place.innerHTML = place.drawn = svg;
  }
  by("no-loss").hidden = Boolean(state.charts.loss);
  rows(by("loss-keys"), state.charts.keys, makeKey, fillKey);
}

function drawWaits() {
  rows(by("open"), state.open, makeWait, (item, each) => {
    item.dataset.for = each.for;
    const step = each.step === null ? "" : `, step ${each.step}`;
    put(item.children[0], `Round ${each.round} of ${each.shard} (fragment ${each.fragment}${step}) waits for ${each.text}`);
    const lines = each.awaited.map(([name, why]) => `${name}: ${why}`);
    if (each.delivered) lines.push(`delivered: ${each.delivered}`);
    rows(item.children[1], lines, () => document.createElement("p"), put);
    put(item.children[2], `open for ${each.seconds} s`);
  });
  rows(by("idle"), state.waits, makeWait, (item, [name, why]) => {
    item.dataset.for = "process";
    put(item.children[0], name);
    rows(item.children[1], [why], () => document.createElement("p"), put);
    put(item.children[2], "");
  });
  if (!state.open.length && !state.waits.length) {
    rows(by("idle"), ["Nothing is waiting: no round is open, and all learners in the run train."], makeWait, (item, words) => {
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
  const keys = parts.map(([css, name, share, mean]) => [css, `${name}: ${share}, ${mean}`]);
  by("time-bar").setAttribute("aria-label", keys.map((each) => each[1]).join("; "));
  rows(by("time-keys"), keys, makeKey, fillKey);
  rows(by("time-last"), last, () => document.createElement("p"), put);
}

function chosen() {
  const wanted = by("wanted").value.trim().toLowerCase(), kind = by("state").value;
  let names = learnersOf().filter((name) => name.toLowerCase().includes(wanted));
  if (kind === "not") names = names.filter((name) => state.learners[name][0] !== "stepping");
  const total = names.length;
  if (total > shownMost) {
    const recent = (name) => Number.parseFloat(state.learners[name][5]) || 0;
    const well = (name) => (WELL.has(state.learners[name][0]) ? 1 : 0);
    names = [...names].sort((a, b) => well(a) - well(b) || recent(a) - recent(b) || ORDER.compare(a, b));
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
  by("key-training").setAttribute("class", fewEnough() ? "c0" : "training");
  fillTable("learners", names.map((name) => [name, ...state.learners[name]]));
  fillTable("shards", state.shards);
  by("sites-box").hidden = !state.sites.length;
  fillTable("sites", state.sites);
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
  const end = state.history.samples;
  const width = picture.clientWidth || 600, scale = width / Math.max(1, end);
  const drawn = `${name} ${width} ${end} ${spans.length}`;
  if (item.drawn === drawn) return;
  item.drawn = drawn;
  picture.setAttribute("viewBox", `0 0 ${width} 18`);
  const paths = {};
  spans.forEach(([begin, what], n) => {
    const until = spans[n + 1]?.[0] ?? end, size = Math.max(1, (until - begin) * scale);
    const css = what === "stepping" && fewEnough() ? color(name) : CSS_OF[what] ?? "other";
    paths[css] = (paths[css] ?? "") + `M${(begin * scale).toFixed(1)} 0h${size.toFixed(1)}v18h${(-size).toFixed(1)}z`;
  });
  picture.replaceChildren(...Object.entries(paths).map(([css, d]) => element("path", { d, class: `steps ${css}` })));
  const away = spans.filter((span) => !WELL.has(span[1])).length;
  picture.setAttribute("aria-label", `${shard ? "Shard" : "Learner"} ${name}: ${last === "stepping" ? "training" : last} since ${clock((spans.at(-1)?.[0] ?? 0) * state.history.interval)}${away ? `, not working ${away} times` : ""}.`);
}

function drawRounds() {
  const lines = state.recent.map((each) => [
    `${each.shard} ${each.round}`, each.fragment, each.step ?? "–", clock(each.at), each.took, each.fate, each.from || "–", each.without || "–",
  ]);
  fillTable("recent", lines);
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
  if (newest && newest.join() !== announcedRemark) {
    announcedRemark = newest.join();
    put(by("spoken"), newest[1]);
  }
}

// ---- helpers

function element(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (number) => String(number).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return (hours ? `${hours}:` : "") + `${two(minutes)}:${two(whole % 60)}`;
}

/** Give a container one element per item, and update only what differs. */
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

/** Give a table one row per item, with a cell for each column of its head. */
function fillTable(id, items) {
  const count = by(id).tHead.rows[0].cells.length;
  rows(by(id).tBodies[0], items, () => makeRow(count), fillRow);
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

// ---- controls

by("pause").addEventListener("click", () => {
  paused = !paused;
  by("pause").setAttribute("aria-pressed", String(paused));
  by("pause").textContent = paused ? "Resume" : "Pause";
  if (!over && awaySince === null) link(paused ? "paused" : "live", paused ? "paused" : "live");
  draw();
});
by("more").addEventListener("click", () => { shownMost += LANES; draw(); });
by("wanted").addEventListener("input", draw);
by("state").addEventListener("change", draw);
by("filter").addEventListener("submit", (event) => event.preventDefault());
new ResizeObserver(draw).observe(document.body);
connect();

// Charts as the report draws them: a class, never a colour, for each thing; page.css has the rest.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 52, RIGHT = 12, TOP = 22, BOTTOM = 36;

export function element(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (number) => String(number).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return (hours ? `${hours}:` : "") + `${two(minutes)}:${two(whole % 60)}`;
}

/** Multiples of 1, 2 or 5 times a power of ten, at most about `most`. */
export function roundNumbers(low, high, most) {
  if (!(high > low)) return [];
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n <= high / step + 1e-9; n++) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
}

function timeTicks(high, most) {
  const sizes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = sizes.find((size) => high / size <= most) || 86400 * Math.ceil(high / 86400 / most);
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, n) => n * step);
}

/**
 * Lines over the run's time, in the place of what the container shows.
 * lines: {css, points: [[seconds, value]], dots, title}; band: [[seconds, low, high]].
 */
export function lineChart(container, { lines, band, high, name, label, show, zero }) {
  const width = container.clientWidth, height = container.clientHeight;
  if (!width) return;
  const values = lines.flatMap((line) => line.points.map((point) => point[1]));
  if (band) values.push(...band.flatMap((each) => each.slice(1)));
  const known = values.filter(Number.isFinite).sort((a, b) => a - b);
  const at = (share) => known[Math.min(known.length - 1, Math.floor(share * known.length))];
  let [bottom, top] = known.length ? [zero ? 0 : at(0.002), at(0.998)] : [0, 1];
  const margin = 0.06 * (top - bottom) || 0.1;
  top += margin;
  if (!zero) bottom -= margin;
  const span = high || 1;
  const x = (seconds) => LEFT + (seconds / span) * (width - LEFT - RIGHT);
  const y = (value) => {
    const inside = Math.min(top, Math.max(bottom, value));
    return height - BOTTOM - ((inside - bottom) / (top - bottom)) * (height - TOP - BOTTOM);
  };
  const parts = [];
  const text = (px, py, words, css, anchor = "start") =>
    parts.push(element("text", { x: px, y: py, class: css, "text-anchor": anchor }, words));
  for (const tick of roundNumbers(bottom, top, 6)) {
    parts.push(element("line", { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick), class: "grid" }));
    text(LEFT - 6, y(tick) + 4, show ? show(tick) : `${tick}`, "tick", "end");
  }
  for (const tick of timeTicks(span, width < 600 ? 4 : 9)) {
    text(x(tick), height - BOTTOM + 17, clock(tick), "tick", "middle");
  }
  text((LEFT + width - RIGHT) / 2, height - 4, "time since the run began", "name", "middle");
  text(2, 12, name, "name");
  if (band && band.length > 1) {
    const lower = band.map(([t, low]) => `${x(t).toFixed(1)},${y(low).toFixed(1)}`);
    const upper = band.map(([t, , up]) => `${x(t).toFixed(1)},${y(up).toFixed(1)}`).reverse();
    parts.push(element("path", { class: "band", d: `M${[...lower, ...upper].join("L")}z` }));
  }
  for (const line of lines) {
    const places = line.points.map(([t, value]) => [x(t).toFixed(1), y(value).toFixed(1)]);
    if (places.length > 1) {
      const title = element("title", {}, line.title || "");
      parts.push(element("polyline", { class: `line ${line.css}`, points: places.map((p) => p.join()).join(" ") }, title));
    }
    if (places.length === 1 || (line.dots && places.length <= 60)) {
      for (const [cx, cy] of places) parts.push(element("circle", { class: `dot ${line.css}`, cx, cy, r: 3 }));
    }
    if (line.end && places.length) {
      const [px, py] = places.at(-1);
      text(Number(px) - 2, Math.max(TOP - 6, Number(py) - 9), line.end, `value ${line.css}`, "end");
    }
  }
  put(container, width, height, label, parts);
}

/** How many learners are in which state over time, stacked. */
export function countsChart(container, { layers, high, label, total }) {
  const width = container.clientWidth, height = container.clientHeight;
  if (!width || !layers.length) return;
  const x = (seconds) => LEFT + (seconds / (high || 1)) * (width - LEFT - RIGHT);
  const y = (count) => height - BOTTOM - (count / (total || 1)) * (height - TOP - BOTTOM);
  const parts = [];
  const below = layers[0].points.map(() => 0);
  for (const { css, points } of layers) {
    const lower = points.map(([t], n) => `${x(t).toFixed(1)},${y(below[n]).toFixed(1)}`).reverse();
    points.forEach(([, count], n) => (below[n] += count));
    const upper = points.map(([t], n) => `${x(t).toFixed(1)},${y(below[n]).toFixed(1)}`);
    parts.push(element("path", { class: css, d: `M${[...upper, ...lower].join("L")}z` }));
  }
  const text = (px, py, words, css, anchor) =>
    parts.push(element("text", { x: px, y: py, class: css, "text-anchor": anchor }, words));
  for (const tick of roundNumbers(0, total, 5)) text(LEFT - 6, y(tick) + 4, `${tick}`, "tick", "end");
  for (const tick of timeTicks(high || 1, width < 600 ? 4 : 9)) {
    text(x(tick), height - BOTTOM + 17, clock(tick), "tick", "middle");
  }
  text(2, 12, "learners", "name", "start");
  text((LEFT + width - RIGHT) / 2, height - 4, "time since the run began", "name", "middle");
  put(container, width, height, label, parts);
}

function put(container, width, height, label, parts) {
  const svg = element("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  svg.append(...parts);
  container.replaceChildren(svg);
}


"use strict";
// Puts what the server says into its place. All words and numbers come ready from it, and only as text.

const SVG = "http://www.w3.org/2000/svg";
const AGAIN = 2000;  // milliseconds until a lost connection is tried again
const STALE = 5000;  // milliseconds without an event after which what is shown is old
const byId = id => document.getElementById(id);

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function children(parent, count, make) {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) parent.append(make());
  return [...parent.children];
}

function element(name, className, ...inside) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...inside);
  return made;
}

function pick(view, path) {
  return path.split(".").reduce((found, key) => (found == null ? "" : found[key]), view) ?? "";
}

// A line through shares of the height, one for each second, newest at the right; a gap where nothing is known.
function trace(points, shown) {
  let path = "", drawn = false;
  points.forEach((point, index) => {
    if (point !== null) {
      const x = 100 * (shown - points.length + index) / (shown - 1);
      const at = `${x.toFixed(2)} ${(100 * (1 - point)).toFixed(2)}`;
      path += drawn ? `L${at}` : `M${at}h0.001`;  // a single second is a dot
    }
    drawn = point !== null;
  });
  return path;
}

function area(points, shown) {
  const known = points.map(point => point ?? 0);
  if (!known.length) return "";
  const left = 100 * (shown - known.length) / (shown - 1);
  return `M${left.toFixed(2)} 100L${trace(known, shown).slice(1)}L100 100Z`;
}

function labels(parent, ticks, side) {
  children(parent, ticks.length, () => element("span", "")).forEach((span, index) => {
    write(span, ticks[index].label);
    span.style[side] = `${100 * ticks[index].at}%`;
  });
}

function overTime(chart, top, lines, shown) {
  for (const [selector, path] of Object.entries(lines)) chart.querySelector(selector).setAttribute("d", path);
  labels(chart.querySelector(".up"), [{at: 0, label: "0"}, {at: 1, label: top}], "bottom");
  const across = chart.querySelector(".across");
  across.classList.add("ends");
  const [start, end] = children(across, 2, () => element("span", ""));
  write(start, "a minute ago");
  write(end, "now");
  start.style.left = end.style.right = "0";
}

function bars(chart, view) {
  const rows = view ? view.rows : [];
  const make = () => element("span", "");
  const cells = children(chart.querySelector(".bars"), 3 * rows.length, make);
  rows.forEach((row, index) => {
    const [label, track, value] = cells.slice(3 * index, 3 * index + 3);
    [label.className, track.className, value.className] = ["label", "track", "value"];
    write(label, row.label);
    write(value, row.value);
    children(track, 1, () => element("span", "fill"))[0].style.width = `${100 * row.share}%`;
  });
}

function curve(chart, view) {
  if (!view) return;
  const at = ([x, y]) => `${(100 * x).toFixed(2)} ${(100 * (1 - y)).toFixed(2)}`;
  chart.querySelector(".fit.line").setAttribute("d", view.line.length ? "M" + view.line.map(at).join("L") : "");
  const dots = children(chart.querySelector(".dots"), view.dots.length, () => document.createElementNS(SVG, "path"));
  view.dots.forEach((dot, index) => {
    dots[index].setAttribute("d", `M${at([dot.x, dot.y])}h0.001`);
    dots[index].setAttribute("stroke-width", (5 + 13 * Math.sqrt(dot.share)).toFixed(1));
  });
  labels(chart.querySelector(".up"), view.up, "bottom");
  labels(chart.querySelector(".across"), view.across, "left");
}

function facts(parent, rows) {
  const make = () => element("div", "fact", element("dt", ""), element("dd", "value"), element("dd", "hint"));
  children(parent, rows.length, make).forEach((card, index) => {
    const [label, value, hint] = card.children;
    write(label, rows[index].label);
    write(value, rows[index].value);
    write(hint, rows[index].hint);
  });
}

function counts(parent, rows) {
  const make = () => element("div", "", element("dt", ""), " ", element("dd", ""));
  children(parent, rows.length, make).forEach((pair, index) => {
    write(pair.firstElementChild, rows[index].label);
    write(pair.lastElementChild, rows[index].value);
  });
}

function draw(article, view) {
  const chart = name => article.querySelector(`[data-chart="${name}"]`);
  for (const place of article.querySelectorAll("[data-text]")) write(place, pick(view, place.dataset.text));
  article.querySelector(".state").className = `state ${view.state.kind}`;
  children(article.querySelector(".alerts"), view.alerts.length, () => element("li", ""))
    .forEach((item, index) => write(item, view.alerts[index]));
  facts(article.querySelector(".facts"), view.facts);
  counts(article.querySelector(".counts"), view.counts);
  article.querySelector(".charts").hidden = !view.history;
  if (view.history) {
    const {shown, throughput, latency} = view.history;
    overTime(chart("throughput"), throughput.top,
             {".area": area(throughput.points, shown), ".line": trace(throughput.points, shown)}, shown);
    overTime(chart("latency"), latency.top,
             {".p50.line": trace(latency.lines.p50, shown), ".p99.line": trace(latency.lines.p99, shown)}, shown);
  }
  for (const name of ["sizes", "reasons", "tenants"]) {
    chart(name).hidden = !(view[name] && view[name].rows.length);
    bars(chart(name), view[name]);
  }
  chart("curve").hidden = !view.curve;
  curve(chart("curve"), view.curve);
}

function show({models}) {
  const template = byId("model").content;
  children(byId("models"), models.length, () => template.cloneNode(true).firstElementChild)
    .forEach((article, index) => draw(article, models[index]));
  document.title = models.map(model => `${model.name}: ${model.state.word}`).join(", ");
}

// The stream is read with fetch: an EventSource cannot send a key.
let key = "", stop = null, last = 0, timer = null;

function say(text, lost) {
  write(byId("connection"), text);
  byId("connection").classList.toggle("lost", lost);
  document.body.classList.toggle("stale", lost);
}

async function* events(signal) {
  const response = await fetch("live", {signal, headers: key ? {Authorization: `Bearer ${key}`} : {}});
  if (response.status === 401) throw new Error("key");
  if (!response.ok) throw new Error(`The server answered ${response.status}`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) yield JSON.parse(part.slice("data: ".length));
  }
}

async function look() {
  clearTimeout(timer);
  if (stop) stop.abort();
  const mine = stop = new AbortController();
  try {
    for await (const event of events(mine.signal)) {
      byId("key").hidden = true;
      last = Date.now();
      say("Live", false);
      show(event);
    }
  } catch (error) {
    if (mine.signal.aborted) return;
    if (error.message === "key") return ask();
  }
  say("No connection: the server has stopped, or is out of reach. Trying again …", true);
  timer = setTimeout(look, AGAIN);
}

function ask() {
  say(key ? "The key was refused" : "A key is needed", true);
  byId("key").hidden = false;
  byId("secret").focus();
}

byId("key").addEventListener("submit", event => {
  event.preventDefault();
  key = byId("secret").value;
  look();
});

// Nobody sees a hidden page: the server need not work for it.
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) look();
  else {
    last = 0;
    if (stop) stop.abort();
  }
});

setInterval(() => {
  if (!document.hidden && last && Date.now() - last > STALE) say("Nothing has come for some seconds", true);
}, 1000);

look();

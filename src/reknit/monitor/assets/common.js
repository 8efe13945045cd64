"use strict";
// What pages share: data, colours, texts, tables, and charts by uPlot.
const FULL = 65535;
const $ = (id) => document.getElementById(id);
// From dark to bright in lightness too, so that it can be read without colours.
const STOPS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
// Colours that people with any kind of colour blindness tell apart (after Paul Tol, "muted").
const LANES = ["#4444bb", "#ddcc77", "#117733", "#cc6677", "#88ccee", "#882255", "#44aa99", "#999933", "#aa4499", "#cccccc"];

function given() {
  const block = $("data");
  return block ? JSON.parse(block.textContent) : null;
}
function numbers(text, type) {
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let k = 0; k < binary.length; k++) bytes[k] = binary.charCodeAt(k);
  return new type(bytes.buffer);
}
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
function heat(x) {
  const at = Math.max(0, Math.min(1, x)) * (STOPS.length - 1), k = Math.min(Math.floor(at), STOPS.length - 2);
  return "rgb(" + STOPS[k].map((from, c) => Math.round(from + (STOPS[k + 1][c] - from) * (at - k))).join(",") + ")";
}
function dark(hex) {
  const [r, g, b] = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
  return .299 * r + .587 * g + .114 * b < 140;
}
function three(x) {
  return x === 0 ? "0" : Math.abs(x) >= 100 ? Math.round(x).toLocaleString("en") : Number(x.toPrecision(3)).toString();
}
function time(s) {
  return s === 0 ? "0 s" : s < 1e-3 ? `${three(s * 1e6)} µs` : s < 1 ? `${three(s * 1e3)} ms` : s < 120 ? `${three(s)} s` : `${three(s / 60)} min`;
}
function size(n) {
  let unit = 0;
  while (n >= 1023.95 && unit < 6) { n /= 1024; unit++; }
  return `${unit ? n.toFixed(1) : three(n)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][unit]}`;
}
// The unit for numbers up to this one, so that an axis has round numbers: its size and its name.
function unit(most) {
  let power = 0;
  while (most >= 1024 ** (power + 1) && power < 6) power++;
  return [1024 ** power, ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][power]];
}
function node(name, text, more) {
  return Object.assign(document.createElement(name), { textContent: text ?? "" }, more);
}
function fill(table, heads, rows) {
  const line = (cell, texts) => { const row = node("tr"); row.append(...texts.map((text) => node(cell, text))); return row; };
  const head = node("thead"), body = node("tbody");
  head.append(line("th", heads));
  for (const cell of head.rows[0].cells) cell.scope = "col";
  body.append(...rows.map((row) => line("td", row)));
  table.replaceChildren(head, body);
}
function list(place, texts) {
  place.replaceChildren(...texts.map((text) => node("li", text)));
}
function options(select, names, chosen) {
  select.replaceChildren(...names.map((name, n) => new Option(name, n)));
  select.value = chosen;
}
// A canvas as wide as its place, sharp on every screen; the pen counts in CSS pixels.
function pen(canvas, height, width) {
  const wide = width ?? Math.max(200, canvas.parentElement.clientWidth), ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(wide * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${wide}px`;
  canvas.style.height = `${height}px`;
  const drawn = canvas.getContext("2d");
  drawn.setTransform(ratio, 0, 0, ratio, 0, 0);
  drawn.clearRect(0, 0, wide, height);
  drawn.font = `${fontSize()}px system-ui, sans-serif`;
  drawn.textBaseline = "middle";
  drawn.fillStyle = colour("ink");
  return [drawn, wide];
}
function fontSize() {
  return Math.round(parseFloat(getComputedStyle(document.body).fontSize) * 0.8);
}
function short(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
function swatch(fill) {
  const mark = document.createElement("canvas");
  mark.width = mark.height = 13;
  mark.setAttribute("aria-hidden", "true");
  const drawn = mark.getContext("2d");
  drawn.fillStyle = fill;
  drawn.fillRect(0, 0, 13, 13);
  return mark;
}
const charts = new Map();
// The width of an upright axis, with room for its longest label; a later cycle of uPlot keeps it, so that these end.
function room(u, labels, number, cycle) {
  const axis = u.axes[number];
  if (cycle > 1) return axis._size;
  u.ctx.font = axis.font[0];
  const widths = (labels ?? []).map((label) => u.ctx.measureText(label).width / devicePixelRatio);
  return Math.ceil(axis.ticks.size + axis.gap + fontSize() / 2 + Math.max(fontSize() * 2, ...widths));
}
// Draw a chart in a place, instead of the one that is there; series and axes as uPlot has them.
function chart(place, height, series, axes, data, more) {
  charts.get(place)?.destroy();
  const line = colour("line"), ink = colour("quiet"), font = `${fontSize()}px system-ui, sans-serif`;
  const styled = axes.map((axis) => ({
    stroke: ink, font, labelFont: font, labelSize: fontSize() * 1.7, labelGap: 2, size: axis.side === 2 ? fontSize() * 2.4 : room,
    grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, ...axis,
  }));
  // Half of the last label is right of the picture.
  const padding = [null, axes.some((axis) => axis.side === 1) ? null : fontSize() * 3, null, null];
  const width = Math.max(200, place.clientWidth);
  const made = new uPlot({ width, height, padding, series, axes: styled, cursor: { y: false, drag: { x: true, y: false } }, ...more }, data, place);
  charts.set(place, made);
  return made;
}
// Draw anew when width, colours or medium change.
function redrawn(draw) {
  let width = document.body.clientWidth, waiting = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  }).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let folded = [];
  window.addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const each of folded) each.open = true;
    document.documentElement.classList.add("printing");
    draw();
  });
  window.addEventListener("afterprint", () => {
    for (const each of folded) each.open = false;
    document.documentElement.classList.remove("printing");
    draw();
  });
}

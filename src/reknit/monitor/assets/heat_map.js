"use strict";
// The heat map: a cell for each rank, with the seconds of one phase.
const HEAT_HIGH = 520;
let cells = [], pointedRow = -1, heatShape = null;

function secondsIn(found, row) {
  const share = found.shares[row];
  return share === FULL || share === undefined ? null : share / (FULL - 1) * found.most;
}
// The place of each rank: its column is its place along one axis (or in its host), its row all other places.
function grid(rows) {
  const by = $("columns").value, keys = new Map(), taken = new Map();
  if (by === "number") {
    const across = Math.max(1, Math.ceil(Math.sqrt(rows.length * 3)));
    return { at: rows.map((_, n) => [n % across, Math.floor(n / across)]), along: "", down: [] };
  }
  const host = by === "host", axis = Number(by), names = [];
  const at = rows.map((row) => {
    const key = host ? data_of.host[row] : data_of.places.map((p) => p[row]).filter((_, k) => k !== axis).join();
    const x = host ? 0 : Math.max(0, data_of.places[axis][row]), spot = host ? `${key}` : `${key}|${x}`;
    const again = taken.get(spot) ?? 0; // ranks with equal places get columns or rows of their own
    taken.set(spot, again + 1);
    const line = host ? `${key}` : `${key}|${again}`;
    if (!keys.has(line)) {
      keys.set(line, keys.size);
      names.push(host ? data_of.hosts[key] || "a host" : otherAxes(row, axis));
    }
    return [host ? again : x, keys.get(line)];
  });
  return { at, along: host ? "rank in its host" : data_of.axes[axis], down: names };
}
function otherAxes(row, axis) {
  return data_of.axes.map((name, k) => k === axis || data_of.places[k][row] < 0 ? "" : `${name} ${data_of.places[k][row]}`).filter(Boolean).join(", ");
}
function drawHeat() {
  const found = data_of.cells.find((c) => c.lane === Number($("lane").value));
  if (!found) return;
  const rows = [];
  for (let row = 0; row < found.shares.length; row++) if (found.shares[row] !== FULL) rows.push(row);
  const { at, along, down } = grid(rows);
  const across = reach(at, 0), deep = reach(at, 1);
  // The longer side lies along the page, and goes on below where the page ends.
  const turned = deep > across * 2, long = turned ? deep : across, wide = turned ? across : deep;
  const total = Math.max(200, $("heat").parentElement.clientWidth), left = 8 * fontSize(), room = total - left - 4;
  let edge = Math.max(2, Math.min(30, Math.floor(room / long)));
  const fits = Math.max(1, Math.floor(room / edge)), bands = Math.ceil(long / fits);
  const gap = edge > 5 ? 1 : 0, top = fontSize() * 1.6;
  let high = Math.max(edge, Math.min(12, (HEAT_HIGH / bands - top) / wide));
  if (bands * (wide * high + top) > HEAT_HIGH) high = Math.max(1, (HEAT_HIGH / bands - top) / wide);
  const band = wide * high + top;
  const [ink] = pen($("heat"), bands * band + 4);
  heatShape = { turned, fits, edge, high, band, left, top };
  cells = rows.map((row, n) => {
    const [a, b] = turned ? [at[n][1], at[n][0]] : at[n];
    return { row, a, b, x: left + (a % fits) * edge, y: Math.floor(a / fits) * band + top + b * high, seconds: secondsIn(found, row) };
  });
  const span = found.most - found.least;
  for (const cell of cells) {
    ink.fillStyle = heat(span > 0 ? (cell.seconds - found.least) / span : 0);
    ink.fillRect(cell.x, cell.y, Math.max(edge - gap, 1), Math.max(high - gap, .8));
  }
  ink.fillStyle = colour("quiet");
  const name = (line) => line.length ? line : "";
  for (let k = 0; k < bands; k++) {
    const from = k * fits, until = Math.min(long, from + fits) - 1;
    const text = turned ? (down.length ? `${name(down[from])} to ${name(down[until])}` : `from ${from}`)
      : along ? `${along} ${from} to ${until}` : `ranks ${cells.length ? rankNumber(cells[0].row) : 0} to ${cells.length ? rankNumber(cells[cells.length - 1].row) : 0}, by number`;
    ink.fillText(short(text, Math.floor(room / fontSize() * 1.8)), left, k * band + top / 2);
    const every = Math.max(1, Math.ceil(fontSize() * 1.2 / high));
    for (let b = 0; b < wide; b += every) {
      const side = turned ? `${along} ${b}` : down[b] ?? "";
      ink.fillText(short(side, 14), 0, k * band + top + (b + .5) * high, left - 6);
    }
  }
  // Single slow ranks among thousands are small: a ring shows where they are.
  if (edge < 8) {
    const slow = cells.filter((cell) => cell.seconds > 1.5 * found.median && cell.seconds > found.median + .02 * data_of.seconds);
    ink.strokeStyle = colour("mark");
    ink.lineWidth = 2;
    for (const cell of slow.sort((a, b) => b.seconds - a.seconds).slice(0, 20)) { ink.beginPath(); ink.arc(cell.x + edge / 2, cell.y + high / 2, 9, 0, 7); ink.stroke(); }
  }
  drawScale(found);
  if (pointedRow >= 0) ring();
}
function reach(at, k) {
  return at.reduce((most, place) => Math.max(most, place[k] + 1), 1);
}
function drawScale(found) {
  const [ink, wide] = pen($("scale"), 46), long = Math.min(420, wide - 90), left = 8;
  for (let k = 0; k < long; k++) { ink.fillStyle = heat(k / long); ink.fillRect(left + k, 0, 1.5, 16); }
  ink.fillStyle = colour("ink");
  const span = found.most - found.least || 1, middle = left + (found.median - found.least) / span * long;
  ink.fillText(time(found.least), left, 34);
  ink.textAlign = "right";
  ink.fillText(time(found.most), left + long, 34);
  ink.fillRect(middle - 1, 0, 2, 22);
  ink.textAlign = "center";
  const text = `median ${time(found.median)}`, half = ink.measureText(text).width / 2;
  const ends = Math.max(ink.measureText(time(found.least)).width, ink.measureText(time(found.most)).width) + 10;
  const at = Math.max(left + half + ends, Math.min(left + long - half - ends, middle));
  if (long > 2 * (half + ends)) ink.fillText(text, at, 34);
  $("scale").setAttribute("aria-label", `colour bar: dark is ${time(found.least)}, the median is ${time(found.median)}, bright is ${time(found.most)}`);
}
function ring() {
  const cell = cells.find((c) => c.row === pointedRow);
  if (!cell) return;
  const ink = $("heat").getContext("2d");
  ink.lineWidth = 2.5;
  ink.strokeStyle = colour("mark");
  ink.strokeRect(cell.x - 1, cell.y - 1, heatShape.edge + 1, heatShape.high + 1);
}
function point(cell) {
  if (!cell) return;
  pointedRow = cell.row;
  drawHeat();
  const all = data_of.cells.map((c) => [data_of.lanes[c.lane].name, secondsIn(c, cell.row)]).filter((e) => e[1] !== null);
  all.sort((a, b) => b[1] - a[1]);
  const more = all.slice(0, 8).map(([name, s]) => `${name} ${time(s)}`).join(", ");
  $("tip").textContent = `${rankName(cell.row)} on ${data_of.hosts[data_of.host[cell.row]] || "a host"}: ${time(cell.seconds)}. All phases: ${more}`;
}
function pointNext(key) {
  const [right, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key] ?? [0, 0];
  if (!right && !down) return false;
  const from = cells.find((c) => c.row === pointedRow);
  point(from ? cells.find((c) => c.a === from.a + right && c.b === from.b + down) ?? from : cells[0]);
  return true;
}
$("heat").onmousemove = (event) => {
  const box = $("heat").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const cell = cells.find((c) => x >= c.x && x < c.x + heatShape.edge && y >= c.y && y < c.y + heatShape.high);
  if (cell && cell.row !== pointedRow) point(cell);
};
$("heat").onkeydown = (event) => { if (pointNext(event.key)) event.preventDefault(); };
$("lane").onchange = drawHeat;
$("columns").onchange = drawHeat;

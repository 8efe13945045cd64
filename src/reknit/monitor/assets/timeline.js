"use strict";
// The timeline: bars of single ranks, or of many ranks together as density; the critical path above them.
const MOST_LINES = 160, PAGE_LINES = 40, LEVELS = 16, WAITS = -2;
let data_of = null; // the picture of the chosen operation, with its numbers unpacked
let lines = [], firstLine = 0, opened = null, from_s = 0, until_s = 1, pointed = null, shape = null, dragged = null;

function unpacked(picture) {
  if (picture.host_rows) return picture;
  const rank_type = picture.num_ranks <= FULL ? Uint16Array : Uint32Array, { bars } = picture;
  picture.ranks = numbers(picture.ranks, Uint32Array);
  picture.host = numbers(picture.host, picture.hosts.length < FULL ? Uint16Array : Uint32Array);
  picture.places = picture.places.map((text) => numbers(text, Int32Array));
  for (const cell of picture.cells) cell.shares = numbers(cell.of, Uint16Array);
  bars.rank = numbers(bars.rank, rank_type);
  bars.lane = numbers(bars.lane, Uint8Array);
  bars.start = numbers(bars.start, Uint16Array);
  bars.length = numbers(bars.length, Uint16Array);
  picture.host_rows = picture.hosts.map(() => []);
  picture.host.forEach((host, row) => picture.host_rows[host].push(row));
  // Bars are sorted by rank: those of rank n are first[n] up to first[n + 1].
  picture.first = new Uint32Array(picture.ranks.length + 1);
  for (const rank of bars.rank) picture.first[rank + 1]++;
  for (let n = 1; n < picture.first.length; n++) picture.first[n] += picture.first[n - 1];
  let number = 0;
  for (const lane of picture.lanes) lane.colour = lane.work ? LANES[number++ % LANES.length] : null;
  // The end of the work of each rank, to begin with the rank that was last.
  picture.ends = new Uint32Array(picture.ranks.length);
  for (let k = 0; k < bars.rank.length; k++) {
    const lane = picture.lanes[bars.lane[k] & 63];
    if (lane.work) picture.ends[bars.rank[k]] = Math.max(picture.ends[bars.rank[k]], bars.start[k] + bars.length[k]);
  }
  return picture;
}
function rankNumber(row) { return data_of.ranks[row]; }
function rankName(row) {
  const at = data_of.axes.map((name, k) => data_of.places[k][row] < 0 ? "" : `${name} ${data_of.places[k][row]}`).filter(Boolean).join(", ");
  return `rank ${data_of.ranks[row]}` + (at ? ` (${at})` : "");
}
function bunched(groups, label) {
  const per = Math.ceil(groups.length / MOST_LINES), found = [];
  for (let n = 0; n < groups.length; n += per) {
    const some = groups.slice(n, n + per);
    found.push({ label: some.length > 1 ? `${label(some[0])} … ${label(some[some.length - 1])}` : label(some[0]), rows: some.flat() });
  }
  return found;
}
function arrange() {
  const all = Array.from(data_of.ranks.keys()), mode = $("rows").value;
  const single = (rows) => rows.map((row) => ({ label: rankName(row), rows: [row] }));
  if (mode === "hosts") lines = bunched(data_of.host_rows, (rows) => data_of.hosts[data_of.host[rows[0]]] || "a host");
  else if (mode === "number" && all.length > PAGE_LINES) lines = bunched(all.map((row) => [row]), (rows) => `rank ${rankNumber(rows[0])}`);
  else if (mode === "number") lines = single(all);
  else if (mode === "last") lines = single(all.sort((a, b) => data_of.ends[b] - data_of.ends[a]));
  else lines = single(opened.rows);
  firstLine = 0;
}
function chooseRows() {
  const mode = $("rows").value, several = data_of.hosts.length > 1, names = [];
  if (several) names.push(["hosts", "hosts (density of their ranks)"]);
  names.push(["number", "all ranks by number"], ["last", "ranks that ended last, first"]);
  if (opened) names.push(["opened", `ranks of ${opened.label}`]);
  $("rows").replaceChildren(...names.map(([value, name]) => new Option(name, value)));
  const usual = data_of.ranks.length <= PAGE_LINES ? "number" : several ? "hosts" : "number";
  $("rows").value = names.some((each) => each[0] === mode) && mode ? mode : usual;
}
function shownLines() {
  return lines.every((line) => line.rows.length === 1) ? lines.slice(firstLine, firstLine + PAGE_LINES) : lines;
}
function drawTime() {
  const shown = shownLines(), whole = data_of.seconds, small = fontSize();
  const exact = shown.every((line) => line.rows.length === 1), labels = Math.min(17 * small * .55, $("time").parentElement.clientWidth * .3);
  const high = exact ? Math.max(16, small * 1.35) : Math.max(3, Math.min(20, Math.floor(440 / Math.max(1, shown.length))));
  const top = small * 2.6, deep = shown.length * high;
  const [ink, wide] = pen($("time"), top + deep + small * 2);
  const left = labels + 6, room = wide - left - 8, scale = room / (until_s - from_s);
  shape = { top, high, left, room, scale, shown };
  ink.fillText("critical path", 0, small * .9, left - 8);
  drawPath(ink, left, room, scale, small);
  const every = Math.max(1, Math.ceil(small * 1.2 / high));
  shown.forEach((line, n) => {
    const y = top + n * high;
    ink.fillStyle = colour("ink");
    if (n % every === 0) ink.fillText(short(line.label, 34), 0, y + Math.max(high, small) / 2, left - 8);
    if (line.rows.length === 1) drawRank(ink, line.rows[0], y, high, left, room, scale);
    else drawDensity(ink, line.rows, y, high, left, room);
  });
  ink.fillStyle = colour("quiet");
  const num = Math.max(2, Math.min(8, Math.floor(room / (small * 7))));
  for (let k = 0; k <= num; k++) {
    ink.textAlign = k === 0 ? "left" : k === num ? "right" : "center";
    ink.fillText(time(from_s + (until_s - from_s) * k / num), left + room * k / num, top + deep + small);
  }
  ink.textAlign = "left";
  if (dragged && dragged.to !== dragged.from) {
    ink.globalAlpha = .25;
    ink.fillStyle = colour("link");
    ink.fillRect(Math.min(dragged.from, dragged.to), top, Math.abs(dragged.to - dragged.from), deep);
    ink.globalAlpha = 1;
  }
  if (pointed && pointed.line < shown.length) {
    ink.strokeStyle = colour("mark");
    ink.lineWidth = 1.5;
    ink.strokeRect(left - 1, top + pointed.line * high, room + 2, high);
    const x = left + (pointed.time - from_s) * scale;
    ink.beginPath(); ink.moveTo(x, top); ink.lineTo(x, top + deep); ink.stroke();
  }
  $("paging").hidden = !exact || lines.length <= PAGE_LINES;
  $("shown").textContent = `${firstLine + 1} to ${firstLine + shown.length} of ${lines.length}`;
}
function drawPath(ink, left, room, scale, small) {
  for (const part of data_of.path) {
    const x = Math.max(left, left + (part.start - from_s) * scale), end = Math.min(left + room, left + (part.stop - from_s) * scale);
    if (end <= left || x >= left + room) continue;
    const lane = data_of.lanes[part.lane];
    ink.globalAlpha = lane ? 1 : .35;
    ink.fillStyle = lane?.colour ?? colour("wait");
    ink.fillRect(x, 2, Math.max(1.5, end - x - .5), small * 1.5);
    ink.globalAlpha = 1;
    const text = lane ? `${lane.name}, rank ${part.row >= 0 ? rankNumber(part.row) ?? "" : ""}` : "between phases";
    if (lane && end - x > ink.measureText(text).width + 8) {
      ink.fillStyle = dark(lane.colour) ? "#fff" : "#000";
      ink.fillText(text, x + 4, small * .9);
    }
    ink.fillStyle = colour("ink");
  }
}
// Trainer above, agent below; waiting is pale and thin, work in colour, short bars over long ones.
function drawRank(ink, row, y, high, left, room, scale) {
  const { bars, lanes, first, seconds } = data_of, unit = seconds / FULL, all = [];
  for (let k = first[row]; k < first[row + 1]; k++) all.push(k);
  // Waiting first, then phases that work in little of their time, then work: the longest first.
  const order = (k) => lanes[bars.lane[k] & 63].work ? bars.lane[k] & 64 ? 1 : 2 : 0;
  all.sort((a, b) => order(a) - order(b) || bars.length[b] - bars.length[a]);
  const agents = lanes.some((lane) => lane.name.endsWith("(agent)")), half = agents ? (high - 3) / 2 : high - 3;
  for (const k of all) {
    const lane = lanes[bars.lane[k] & 63], below = agents && lane.name.endsWith("(agent)");
    const x = Math.max(left, left + (bars.start[k] * unit - from_s) * scale), end = Math.min(left + room, left + ((bars.start[k] + bars.length[k]) * unit - from_s) * scale);
    if (end < left || x > left + room) continue;
    const at = y + 1 + (below ? half + .5 : 0), w = Math.max(1, end - x);
    const thin = bars.lane[k] & 64 && half > 4 ? half * .3 : 0;
    if (lane.work) { ink.fillStyle = lane.colour; ink.fillRect(x, at + thin, w, half - 2 * thin); }
    else { ink.globalAlpha = .3; ink.fillStyle = colour("wait"); ink.fillRect(x, at + half * .3, w, half * .4); ink.globalAlpha = 1; }
    if (bars.lane[k] & 128) { ink.fillStyle = colour("bad"); ink.fillRect(end - 3, y, 5, high - 1); }
  }
  for (const part of data_of.path) {
    if (part.row !== row) continue;
    const x = Math.max(left, left + (part.start - from_s) * scale), end = Math.min(left + room, left + (part.stop - from_s) * scale);
    if (end > x) { ink.fillStyle = colour("ink"); ink.fillRect(x, y + high - 2.5, end - x, 2.5); }
  }
}
function densities(rows, columns) {
  const { bars, lanes, first, seconds } = data_of, num = lanes.length, unit = seconds / FULL, per = columns / (until_s - from_s);
  const count = new Float32Array(num * (columns + 1)), failed = new Uint8Array(columns + 1);
  for (const row of rows)
    for (let k = first[row]; k < first[row + 1]; k++) {
      const lane = bars.lane[k] & 63;
      if (bars.lane[k] & 64 && lanes[lane].work) continue;
      const a = Math.max(0, Math.floor((bars.start[k] * unit - from_s) * per)), b = Math.min(columns, Math.ceil(((bars.start[k] + bars.length[k]) * unit - from_s) * per));
      if (b <= a) continue;
      count[lane * (columns + 1) + a]++;
      count[lane * (columns + 1) + b]--;
      if (bars.lane[k] & 128) failed[Math.max(0, b - 1)] = 1;
    }
  for (let lane = 0; lane < num; lane++)
    for (let x = 1; x <= columns; x++) count[lane * (columns + 1) + x] += count[lane * (columns + 1) + x - 1];
  return { count, failed };
}
function drawDensity(ink, rows, y, high, left, room) {
  const columns = Math.max(1, Math.min(600, Math.floor(room / 2))), step = room / columns, { lanes } = data_of, pale = colour("wait");
  const { count, failed } = densities(rows, columns), thick = high > 6 ? high - 1 : high;
  const draw = (from, until, lane, level) => {
    const x = left + from * step, wide = (until - from) * step;
    if (lane === WAITS) { ink.globalAlpha = .3; ink.fillStyle = pale; ink.fillRect(x, y + thick * .3, wide, Math.max(1, thick * .4)); }
    else if (lane >= 0) { ink.globalAlpha = .25 + .75 * level / LEVELS; ink.fillStyle = lanes[lane].colour; ink.fillRect(x, y, wide, thick); }
  };
  // Neighbours that look alike are one rectangle.
  let begin = 0, lane = -1, level = 0;
  for (let x = 0; x <= columns; x++) {
    let work = -1, most = 0, waits = false;
    for (let k = 0; k < lanes.length && x < columns; k++) {
      const here = count[k * (columns + 1) + x];
      if (!lanes[k].work) waits ||= here > 0;
      else if (here > most) { most = here; work = k; }
    }
    const shown = most ? work : waits ? WAITS : -1, high = Math.ceil(LEVELS * Math.min(1, most / rows.length));
    if (shown === lane && high === level && x < columns) continue;
    draw(begin, x, lane, level);
    [begin, lane, level] = [x, shown, high];
  }
  ink.globalAlpha = 1;
  ink.fillStyle = colour("bad");
  for (let x = 0; x < columns; x++) if (failed[x]) ink.fillRect(left + x * step - 1, y, 4, thick);
}
function describe() {
  const line = shape.shown[pointed.line];
  if (!line) return;
  const { bars, lanes, first, seconds } = data_of, unit = seconds / FULL, at = pointed.time, found = new Map();
  for (const row of line.rows)
    for (let k = first[row]; k < first[row + 1]; k++) {
      const begin = bars.start[k] * unit, end = begin + bars.length[k] * unit;
      if (begin <= at && at <= end + unit) found.set(bars.lane[k] & 63, [...(found.get(bars.lane[k] & 63) ?? []), end - begin]);
    }
  const one = line.rows.length === 1;
  const texts = [...found].sort((a, b) => Number(lanes[b[0]].work) - Number(lanes[a[0]].work)).map(([lane, all]) =>
    `${lanes[lane].name}${lanes[lane].work ? "" : " (waits)"} ${one ? time(all.reduce((a, b) => a + b, 0)) : `on ${all.length}`}`);
  const host = data_of.hosts[data_of.host[line.rows[0]]], where = one ? ` on ${host || "a host"}` : `, ${line.rows.length} ranks`;
  $("at").textContent = `${line.label}${where}, at ${time(at)}: ${texts.join(", ") || "nothing"}`;
}
function zoom(factor, middle) {
  const at = middle ?? (pointed ? pointed.time : (from_s + until_s) / 2), whole = data_of.seconds;
  const long = Math.min(whole, Math.max(whole / 5000, (until_s - from_s) * factor));
  from_s = Math.max(0, Math.min(whole - long, at - (at - from_s) * long / (until_s - from_s)));
  until_s = from_s + long;
  drawTime();
}
function openLine() {
  const line = pointed && shape.shown[pointed.line];
  if (!line || line.rows.length < 2) return;
  opened = line;
  chooseRows();
  $("rows").value = "opened";
  arrange();
  pointed = null;
  drawTime();
}
function spot(event) {
  const box = $("time").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const line = Math.floor((y - shape.top) / shape.high), at = from_s + (x - shape.left) / shape.scale;
  return { x, line: Math.max(0, Math.min(shape.shown.length - 1, line)), time: Math.max(from_s, Math.min(until_s, at)), inside: line >= 0 && line < shape.shown.length };
}
$("time").onmousemove = (event) => {
  const now = spot(event);
  if (dragged) dragged.to = now.x;
  if (!now.inside && !dragged) return;
  pointed = now;
  drawTime();
  describe();
};
$("time").onmousedown = (event) => { const now = spot(event); dragged = { from: now.x, to: now.x, time: now.time }; };
window.addEventListener("mouseup", (event) => {
  if (!dragged) return;
  const now = spot(event), begun = dragged;
  dragged = null;
  if (Math.abs(now.x - begun.from) < 5) { if (event.target === $("time")) { pointed = now; openLine(); } }
  else { [from_s, until_s] = [Math.min(begun.time, now.time), Math.max(begun.time, now.time)]; if (until_s - from_s < data_of.seconds / 5000) until_s = from_s + data_of.seconds / 5000; }
  drawTime();
});
$("time").onkeydown = (event) => {
  const step = (until_s - from_s) / 40, key = event.key;
  pointed ??= { line: 0, time: (from_s + until_s) / 2 };
  if (key === "+" || key === "=") return zoom(.6);
  if (key === "-") return zoom(1 / .6);
  if (key === "Enter") return openLine();
  if (key === "Home") { [from_s, until_s] = [0, data_of.seconds]; return drawTime(); }
  if (key === "ArrowLeft") pointed.time = Math.max(0, pointed.time - step);
  else if (key === "ArrowRight") pointed.time = Math.min(data_of.seconds, pointed.time + step);
  else if (key === "ArrowUp") pointed.line = Math.max(0, pointed.line - 1);
  else if (key === "ArrowDown") pointed.line = Math.min(shape.shown.length - 1, pointed.line + 1);
  else return;
  event.preventDefault();
  const long = until_s - from_s;
  if (pointed.time < from_s || pointed.time > until_s) { from_s = Math.max(0, Math.min(data_of.seconds - long, pointed.time - long / 2)); until_s = from_s + long; }
  drawTime();
  describe();
};
$("in").onclick = () => zoom(.6);
$("out").onclick = () => zoom(1 / .6);
$("whole").onclick = () => { [from_s, until_s] = [0, data_of.seconds]; drawTime(); };
$("rows").onchange = () => { pointed = null; arrange(); drawTime(); };
$("previous").onclick = () => { firstLine = Math.max(0, firstLine - PAGE_LINES); drawTime(); };
$("next").onclick = () => { if (firstLine + PAGE_LINES < lines.length) firstLine += PAGE_LINES; drawTime(); };

"use strict";
// The checkpoint as a whole: summary, bytes by rank, the inside of a file, and the reads of a layout.
let partAt = -1, cellAt = null, matrix = null;

function drawWriters() {
  const { items, names, nbytes, per } = data.writers;
  $("of-writers").hidden = !names.length;
  if (!names.length) return;
  const shown = (u, v) => v === null || v === undefined ? "" : size(v);
  // Bars are drawn over each other: each is the sum of its item and those after it.
  const sums = items.map((_, n) => names.map((_, k) => nbytes.slice(n).reduce((sum, row) => sum + row[k], 0)));
  const bars = uPlot.paths.bars({ size: [per > 1 || names.length > 60 ? 1 : .8, 60], gap: 0 });
  const most = Math.max(1, ...(sums[0] ?? [1])), [one, word] = unit(most);
  const series = [{ label: per > 1 ? "ranks" : "rank", value: (u, v) => names[v] ?? "" }, ...items.map((item, n) => ({
    label: short(item || "values", 30), fill: LANES[n % LANES.length], stroke: LANES[n % LANES.length], width: 0, paths: bars, points: { show: false },
    value: (u, v, s, k) => k === null || k === undefined ? "" : shown(u, nbytes[n][k]),
  }))];
  const axes = [{ side: 2, values: (u, ticks) => ticks.map((n) => Number.isInteger(n) && names[n] ? names[n].replace(/^ranks? /, "") : ""), space: fontSize() * 6 }, { values: (u, ticks) => ticks.map((v) => `${three(v)} ${word}`) }];
  chart($("writers"), 260, series, axes, [names.map((_, k) => k), ...sums.map((row) => row.map((v) => v / one))], { scales: { x: { time: false, range: () => [-.7, names.length - .3] }, y: { range: () => [0, most / one * 1.08] } } });
}
function drawInside() {
  const file = data.files[Number($("file").value)];
  $("of-files").hidden = !file;
  if (!file) return;
  const [ink, wide] = pen($("inside"), 64), scale = (wide - 2) / Math.max(1, file.nbytes), small = fontSize();
  ink.fillStyle = colour("card");
  ink.fillRect(0, 0, wide, 38);
  file.parts.forEach(([name, start, nbytes], n) => {
    const w = Math.max(1, nbytes * scale - (nbytes * scale > 4 ? 1 : 0));
    ink.fillStyle = LANES[n % LANES.length];
    ink.fillRect(1 + start * scale, 0, w, 38);
    if (w > ink.measureText(name).width + 8) { ink.fillStyle = dark(LANES[n % LANES.length]) ? "#fff" : "#000"; ink.fillText(name, 5 + start * scale, 19); }
    if (n === partAt) { ink.strokeStyle = colour("mark"); ink.lineWidth = 3; ink.strokeRect(1 + start * scale, 1.5, Math.max(3, w), 35); }
  });
  ink.fillStyle = colour("quiet");
  ink.fillText("0", 0, 38 + small);
  ink.textAlign = "right";
  ink.fillText(size(file.nbytes), wide, 38 + small);
}
function describePart() {
  const file = data.files[Number($("file").value)], one = file.parts[partAt];
  if (one) $("part").textContent = `${one[0]}: ${size(one[2])} from byte ${one[1].toLocaleString("en")} of ${file.path}, written by ${file.rank < 0 ? "an unnamed rank" : `rank ${file.rank}`}`;
}
function drawMatrix() {
  const { layout } = data;
  $("of-layout").hidden = !layout;
  if (!layout) return;
  const some = layout.ranks.length < layout.num_ranks ? ` ${layout.ranks.length} of ${layout.num_ranks.toLocaleString("en")} ranks are shown.` : "";
  const wanted = layout.ranks.reduce((sum, r) => sum + r.wanted, 0), read = layout.ranks.reduce((sum, r) => sum + r.read, 0);
  $("layout-words").textContent = `${layout.num_ranks.toLocaleString("en")} rank${layout.num_ranks === 1 ? "" : "s"}, ${layout.words}: they want ${size(wanted)} and read ${size(read)} (whole blocks, so that every byte is checked).${some}`;
  fill($("reads"), ["rank", "wants", "reads", "requests", "files"], layout.ranks.map((r) => [r.name, size(r.wanted), size(r.read), r.requests.toLocaleString("en"), r.files.toLocaleString("en")]));
  const small = fontSize(), canvas = $("matrix"), left = Math.min(small * 10, canvas.parentElement.clientWidth * .35), top = small * 2.4;
  const room = canvas.parentElement.clientWidth - left - 6, edge = Math.max(3, Math.min(64, room / layout.sources.length)), high = Math.max(7, Math.min(30, 480 / layout.ranks.length));
  const [ink] = pen(canvas, top + high * layout.ranks.length + 4), most = Math.max(1, ...layout.ranks.flatMap((r) => r.from));
  matrix = { left, top, edge, high };
  ink.fillStyle = colour("quiet");
  ink.fillText("written by", left, small * .7);
  const every = Math.max(1, Math.ceil(small * 4 / edge));
  layout.sources.forEach((name, k) => { if (k % every === 0) ink.fillText(short(name.replace(/^ranks? /, ""), 8), left + k * edge, small * 1.8); });
  layout.ranks.forEach((rank, n) => {
    ink.fillStyle = colour("ink");
    if (n % Math.ceil(small * 1.1 / high) === 0) ink.fillText(short(rank.name, 24), 0, top + (n + .5) * high, left - 6);
    rank.from.forEach((nbytes, k) => {
      ink.fillStyle = nbytes ? heat(nbytes / most) : colour("card");
      ink.fillRect(left + k * edge, top + n * high, Math.max(1, edge - 1), Math.max(1, high - 1));
    });
  });
  if (cellAt) { ink.strokeStyle = colour("mark"); ink.lineWidth = 2.5; ink.strokeRect(left + cellAt[1] * edge, top + cellAt[0] * high, edge - 1, high - 1); }
  const [bar, wide] = pen($("scale"), 42), long = Math.min(360, wide - 20);
  for (let k = 0; k < long; k++) { bar.fillStyle = heat(k / long); bar.fillRect(k, 0, 1.5, 15); }
  bar.fillStyle = colour("ink");
  bar.fillText("0 B", 0, 31);
  bar.textAlign = "right";
  bar.fillText(size(most), long, 31);
}
function describeCell() {
  const rank = data.layout.ranks[cellAt[0]];
  $("from").textContent = `${rank.name} reads ${size(rank.from[cellAt[1]])} that ${data.layout.sources[cellAt[1]]} wrote; in all ${size(rank.read)} in ${rank.requests} requests from ${rank.files} files`;
}
function goTo(row, column) {
  const { ranks, sources } = data.layout;
  cellAt = [Math.max(0, Math.min(ranks.length - 1, row)), Math.max(0, Math.min(sources.length - 1, column))];
  drawMatrix();
  describeCell();
}
$("matrix").onmousemove = (event) => {
  const box = $("matrix").getBoundingClientRect();
  const row = Math.floor((event.clientY - box.top - matrix.top) / matrix.high), column = Math.floor((event.clientX - box.left - matrix.left) / matrix.edge);
  if (data.layout.ranks[row] && column >= 0 && column < data.layout.sources.length && (cellAt?.[0] !== row || cellAt[1] !== column)) goTo(row, column);
};
$("matrix").onkeydown = (event) => {
  const [down, right] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key] ?? [0, 0];
  if (!down && !right) return;
  event.preventDefault();
  goTo((cellAt?.[0] ?? -down) + down, (cellAt?.[1] ?? -right) + right);
};
$("inside").onmousemove = (event) => {
  const file = data.files[Number($("file").value)], box = $("inside").getBoundingClientRect();
  const at = (event.clientX - box.left) / box.width * file.nbytes, found = file.parts.findIndex(([, start, nbytes]) => at >= start && at < start + nbytes);
  if (found >= 0 && found !== partAt) { partAt = found; drawInside(); describePart(); }
};
$("inside").onkeydown = (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], file = data.files[Number($("file").value)];
  if (!step) return;
  event.preventDefault();
  partAt = Math.max(0, Math.min(file.parts.length - 1, partAt + step));
  drawInside();
  describePart();
};
$("file").onchange = () => { partAt = -1; drawInside(); };

data = given();
$("headline").textContent = data.path;
$("facts").replaceChildren(...data.facts.map(([name, value]) => { const pair = node("div"); pair.append(node("dt", name), node("dd", value)); return pair; }));
options($("tensor"), data.tensors.map((each) => `${each.name} (${each.num_chunks})`), 0);
$("some").textContent = data.tensors.length < data.num_tensors ? `the largest ${data.tensors.length} of ${data.num_tensors.toLocaleString("en")}` : "";
options($("file"), data.files.map((each) => `${each.path} (${size(each.nbytes)})`), 0);
fill($("all-tensors"), ["tensor", "dtype", "shape", "size", "chunks"], data.tensors.map((t) => [t.name, t.dtype, `[${t.shape.join(", ")}]`, size(t.nbytes), t.num_chunks.toLocaleString("en")]));
fill($("all-files"), ["file", "rank", "size", "tensors"], data.files.map((f) => [f.path, f.rank < 0 ? "-" : f.rank, size(f.nbytes), f.parts.length]));
const drawAll = () => { if (tensor) drawTensor(); drawMatrix(); drawWriters(); drawInside(); };
showTensor();
drawAll();
redrawn(drawAll);

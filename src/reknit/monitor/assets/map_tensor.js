"use strict";
// The boxes of one tensor: chunks in the colours of their writers, and dashed the parts that a layout wants.
let data = null, tensor = null, chunkAt = -1, drawnBoxes = null;

// Twelve colours in turn, so that neighbours differ; the number of the rank is written where it fits.
function rankColour(rank) { return rank < 0 ? colour("wait") : `hsl(${(rank * 137.5) % 360} 55% ${rank % 2 ? 38 : 58}%)`; }
function drawTensor() {
  const { shape, dims, chunks, wanted } = tensor, small = fontSize(), left = small * 5, top = small * 1.8;
  const down = Math.max(1, dims[0] < 0 ? 1 : shape[dims[0]]), across = dims[1] < 0 ? 1 : Math.max(1, shape[dims[1]]);
  const room = Math.max(120, $("boxes").parentElement.clientWidth - left - 8);
  // The real proportions, as far as both sides stay visible.
  const high = Math.max(90, Math.min(520, room * down / across)), wide = Math.max(90, Math.min(room, high * across / down));
  const [ink] = pen($("boxes"), top + high + 6);
  const x = (at) => left + at / across * wide, y = (at) => top + at / down * high;
  drawnBoxes = { left, top, wide, high, across, down };
  chunks.forEach(([o0, l0, o1, l1, rank], n) => {
    const [a, b, w, h] = [x(o1), y(o0), l1 / across * wide, l0 / down * high], gap = Math.min(w, h) > 4 ? 1 : 0;
    ink.fillStyle = rankColour(rank);
    ink.fillRect(a, b, Math.max(.5, w - gap), Math.max(.5, h - gap));
    const text = `rank ${rank}`;
    if (h > small * 1.3 && w > ink.measureText(text).width + 6) {
      ink.fillStyle = rank % 2 ? "#fff" : "#000";
      ink.fillText(text, a + 4, b + small * .8);
    }
  });
  ink.setLineDash([7, 5]);
  ink.lineWidth = 2;
  for (const [o0, l0, o1, l1] of wanted) {
    ink.strokeStyle = colour("ink");
    ink.strokeRect(x(o1) + 1, y(o0) + 1, Math.max(1, l1 / across * wide - 2), Math.max(1, l0 / down * high - 2));
  }
  ink.setLineDash([]);
  if (chunks[chunkAt]) {
    const [o0, l0, o1, l1] = chunks[chunkAt];
    ink.strokeStyle = colour("mark");
    ink.lineWidth = 3;
    ink.strokeRect(x(o1), y(o0), Math.max(3, l1 / across * wide), Math.max(3, l0 / down * high));
  }
  ink.fillStyle = colour("quiet");
  ink.fillText(dims[1] < 0 ? "" : `dimension ${dims[1]}: 0 to ${across.toLocaleString("en")}`, left, top / 2);
  ink.fillText("0", 0, top + small * .6);
  if (dims[0] >= 0) { ink.fillText(`dim ${dims[0]}`, 0, top + high / 2); ink.fillText(down.toLocaleString("en"), 0, top + high - small * .6, left - 4); }
}
function describeChunk() {
  const one = tensor.chunks[chunkAt];
  if (!one) return;
  const [o0, l0, o1, l1, rank, file, start, nbytes, num] = one, { dims, wanted } = tensor;
  const range = dims[1] < 0 ? `[${o0}:${o0 + l0}]` : `[${o0}:${o0 + l0}, ${o1}:${o1 + l1}]`;
  const readers = wanted.filter(([a, h, b, w]) => a < o0 + l0 && o0 < a + h && b < o1 + l1 && o1 < b + w).map((each) => each[4]);
  const of = num > 1 ? `${num} chunks around ${range}, the first` : `chunk ${range}`;
  $("tip").textContent = `${of}: written by ${rank < 0 ? "an unnamed rank" : `rank ${rank}`}, ${size(nbytes)} in ${file} from byte ${start.toLocaleString("en")}`
    + (readers.length ? `; wanted by ${readers.slice(0, 6).join("; ")}${readers.length > 6 ? " and others" : ""}` : "");
}
function showTensor() {
  tensor = data.tensors[Number($("tensor").value)];
  if (!tensor) return;
  chunkAt = -1;
  const drawn = tensor.chunks.length < tensor.num_chunks ? `, drawn as ${tensor.chunks.length.toLocaleString("en")} boxes` : "";
  const flat = tensor.shape.length > 2 ? ` The picture has dimensions ${tensor.dims.join(" and ")} of ${tensor.shape.length}.` : "";
  $("cut").textContent = `${tensor.dtype}, shape [${tensor.shape.join(", ")}], ${size(tensor.nbytes)}, ${tensor.num_chunks.toLocaleString("en")} chunk${tensor.num_chunks === 1 ? "" : "s"}${drawn}.${flat}`;
  $("tip").textContent = "Point at a chunk, or use the arrow keys.";
  const ranks = [...new Set(tensor.chunks.map((each) => each[4]))], shown = ranks.slice(0, 12);
  const entries = shown.map((rank) => [rankColour(rank), rank < 0 ? "no rank" : `rank ${rank}`]);
  if (ranks.length > shown.length) entries.push([colour("paper"), `and ${ranks.length - shown.length} more ranks`]);
  if (tensor.wanted.length) entries.push([colour("ink"), "dashed: a part that the layout wants"]);
  $("legend").replaceChildren(...entries.map(([fill, name]) => { const entry = node("li"); entry.append(swatch(fill), name); return entry; }));
  drawTensor();
}
$("boxes").onmousemove = (event) => {
  const box = $("boxes").getBoundingClientRect(), { left, top, wide, high, across, down } = drawnBoxes;
  const at1 = (event.clientX - box.left - left) / wide * across, at0 = (event.clientY - box.top - top) / high * down;
  const found = tensor.chunks.findIndex(([o0, l0, o1, l1]) => at0 >= o0 && at0 < o0 + l0 && at1 >= o1 && at1 < o1 + l1);
  if (found >= 0 && found !== chunkAt) { chunkAt = found; drawTensor(); describeChunk(); }
};
$("boxes").onkeydown = (event) => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  chunkAt = Math.max(0, Math.min(tensor.chunks.length - 1, chunkAt + step));
  drawTensor();
  describeChunk();
};
$("tensor").onchange = showTensor;
$("find").oninput = () => {
  const found = data.tensors.findIndex((each) => each.name.includes($("find").value));
  if (found >= 0) { $("tensor").value = found; showTensor(); }
};

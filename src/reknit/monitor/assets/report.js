"use strict";
// The report: which save or load is chosen, its summary, its charts, and its tables.
let data = null, chosen = null;

function drawThroughput() {
  const speeds = data_of.throughput, step = data_of.seconds / Math.max(1, speeds.length);
  const x = speeds.map((_, n) => (n + .5) * step), limit = data.limit?.bytes_per_s;
  const mean = chosen.seconds > 0 ? chosen.nbytes / chosen.seconds : 0;
  const top = Math.max(limit ?? 0, ...speeds) * 1.08 || 1, [per, word] = unit(top), scaled = (v) => v / per;
  $("of-bytes").hidden = !chosen.nbytes;
  if (!chosen.nbytes) return;
  $("limit").textContent = limit
    ? `Dashed: ${data.limit.noun}, ${size(limit)}/s. On average ${size(mean)}/s, ${Math.round(100 * mean / limit)} % of it.`
    : `On average ${size(mean)}/s.`;
  const speed = (u, v) => v === null || v === undefined ? "" : `${size(v * per)}/s`;
  const series = [
    { label: "at", value: (u, v) => v === null || v === undefined ? "" : time(v) },
    { label: "throughput", stroke: colour("bar"), fill: colour("bar") + "33", width: 2, value: speed, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } },
    { label: data.limit?.noun ?? "limit", stroke: colour("mark"), width: 2, dash: [8, 6], value: speed, points: { show: false } },
  ];
  const axes = [{ side: 2, values: (u, all) => all.map(time) }, { values: (u, all) => all.map((v) => `${three(v)} ${word}/s`) }];
  chart($("throughput"), 260, series, axes, [x, speeds.map(scaled), speeds.map(() => limit ? limit / per : null)], { scales: { x: { time: false, range: () => [0, data_of.seconds] }, y: { range: () => [0, top / per] } } });
  $("throughput").setAttribute("aria-label", `throughput of all ranks together: on average ${size(mean)} per second, at most ${size(Math.max(0, ...speeds))} per second`);
}
function drawSteps() {
  const all = data.operations, x = all.map((_, n) => n), at = all.indexOf(chosen), seconds = (u, v) => v === null || v === undefined ? "" : time(v);
  const name = (n) => all[n] ? all[n].step === null ? all[n].action : `${all[n].action} ${all[n].step}` : "";
  const bars = uPlot.paths.bars({ size: [.72, 60], align: 0 }), bytes = Math.max(1, ...all.map((o) => o.nbytes)), [per, word] = unit(bytes);
  const dots = (label, stroke, width) => ({ label, stroke, width: 0, paths: () => null, points: { show: true, size: width, fill: stroke, stroke }, value: seconds });
  const series = [
    { label: "step", value: (u, v) => v === null || v === undefined ? "" : name(v) },
    { label: "whole", fill: colour("bar"), stroke: colour("bar"), width: 0, paths: bars, value: seconds, points: { show: false } },
    { label: "training blocked", fill: colour("mark"), stroke: colour("mark"), width: 0, paths: bars, value: seconds, points: { show: false } },
    dots("failed", colour("bad"), 11),
    dots("shown", colour("ink"), 7),
    { label: "size", scale: "size", stroke: colour("bar2"), width: 2, value: (u, v) => v === null || v === undefined ? "" : size(v * per), points: { show: all.length < 3, fill: colour("bar2") } },
  ];
  const whole = all.map((o) => Math.max(0, o.seconds));
  const rows = [x, whole, all.map((o) => Math.max(0, Math.min(o.blocked, o.seconds))), all.map((o) => o.failed ? o.seconds : null), all.map((o, n) => n === at ? o.seconds : null), all.map((o) => o.nbytes / per)];
  const most = Math.max(1e-9, ...whole);
  const axes = [
    { side: 2, values: (u, ticks) => ticks.map((n) => Number.isInteger(n) ? short(name(n), 14) : "") },
    { values: (u, ticks) => ticks.map(time) },
    { side: 1, scale: "size", grid: { show: false }, values: (u, ticks) => ticks.map((v) => `${three(v)} ${word}`) },
  ];
  const scales = { x: { time: false, range: () => [-.7, all.length - .3] }, y: { range: () => [0, most * 1.1] }, size: { range: () => [0, bytes / per * 1.15] } };
  const made = chart($("steps"), 260, series, axes, rows, { scales, cursor: { y: false, drag: { x: false, y: false } } });
  made.over.addEventListener("click", () => {
    if (made.cursor.idx !== null && made.cursor.idx !== undefined) { $("operation").value = made.cursor.idx; show(); }
  });
}
function drawLatencies() {
  const bars = chosen.storage?.bars[Number($("kind").value)] ?? [];
  if (!bars.length) return;
  const axes = [
    { side: 2, values: (u, ticks) => ticks.map((n) => bars[n] ? `≤ ${bars[n][0]}` : ""), incrs: [1, 2, 4, 8], space: fontSize() * 5 },
    { values: (u, ticks) => ticks.map((n) => Number.isInteger(n) ? n.toLocaleString("en") : "") },
  ];
  const series = [
    { label: "took up to", value: (u, v) => bars[v]?.[0] ?? "" },
    { label: "operations", fill: colour("bar"), stroke: colour("bar"), width: 0, paths: uPlot.paths.bars({ size: [.8, 70] }), points: { show: false }, value: (u, v) => v ?? "" },
  ];
  const most = Math.max(1, ...bars.map((bar) => bar[1]));
  const scales = { x: { time: false, range: () => [-.7, bars.length - .3] }, y: { range: () => [0, most * 1.1] } };
  chart($("latencies"), 220, series, axes, [bars.map((_, n) => n), bars.map((bar) => bar[1])], { scales });
}
function drawStorage() {
  const { rows, errors } = chosen.storage ?? { rows: [], errors: [] }, kind = Number($("kind").value);
  $("storage").hidden = !rows.length;
  if (!rows.length) return;
  fill($("requests"), data.storage_heads, rows);
  list($("errors"), errors);
  options($("kind"), rows.map((row) => `${row[0]} (${row[1]})`), rows[kind] ? kind : 0);
  drawLatencies();
}
function drawSummary() {
  const { summary } = chosen;
  $("headline").textContent = summary ? `${chosen.name}: ${summary.outcome}` : `${chosen.name}: ${size(chosen.nbytes)} in ${time(chosen.seconds)}${chosen.failed ? ", failed" : ""}`;
  $("headline").className = `outcome ${chosen.failed ? "bad" : "good"}`;
  $("facts").replaceChildren(...(summary?.facts ?? []).map(([name, value]) => {
    const pair = node("div");
    pair.append(node("dt", name), node("dd", value));
    return pair;
  }));
  const words = [["Last", summary?.last], ["Why", summary?.reason]].filter((each) => each[1]).flatMap(([name, text]) => [node("dt", name), node("dd", text)]);
  if (summary?.advice.length) {
    const each = node("dd");
    if (summary.advice.length === 1) each.textContent = summary.advice[0];
    else { const all = node("ul"); list(all, summary.advice); each.append(all); }
    words.push(node("dt", "What to do"), each);
  }
  $("words").replaceChildren(...words);
  list($("remarks"), chosen.remarks ?? []);
}
function drawPictures() {
  if (data_of) { drawTime(); drawHeat(); drawThroughput(); }
  drawStorage();
  drawSteps();
}
function legend() {
  const used = data_of.lanes.filter((lane) => lane.work).map((lane) => [lane.colour, lane.name]);
  const entries = [...used, [colour("wait"), "waits for other ranks (pale)"], [colour("ink"), "line below a bar: critical path"]];
  if (chosen.failed) entries.push([colour("bad"), "failed"]);
  $("legend").replaceChildren(...entries.map(([fill, name]) => {
    const entry = node("li");
    entry.append(swatch(fill), name);
    return entry;
  }));
}
function chooseLane() {
  const before = $("lane").selectedOptions[0]?.textContent, cells = data_of.cells;
  $("lane").replaceChildren(...cells.map((cell) => new Option(data_of.lanes[cell.lane].name, cell.lane)));
  const same = cells.find((cell) => data_of.lanes[cell.lane].name === before);
  const work = cells.filter((cell) => data_of.lanes[cell.lane].work);
  const uneven = (work.length ? work : cells).reduce((a, b) => b.most - b.median > a.most - a.median ? b : a);
  $("lane").value = (same ?? uneven).lane;
  const by = $("columns").selectedOptions[0]?.textContent;
  const ways = [...data_of.axes.map((axis, k) => [axis, String(k)]), ...(data_of.hosts.length > 1 ? [["host", "host"]] : []), ["number", "number"]];
  $("columns").replaceChildren(...ways.map(([name, value]) => new Option(name, value)));
  const again = ways.find((way) => way[0] === by);
  $("columns").value = again ? again[1] : data_of.axes.length ? String(data_of.axes.length - 1) : ways[0][1];
}
async function show() {
  const number = Number($("operation").value), other = data.operations[number].name !== chosen?.name, before = data_of;
  chosen = data.operations[number];
  if (!chosen.detail && !chosen.past && data.version !== undefined) {
    const answer = await fetch(`details/${data.version}/${number}`);
    if (!answer.ok) return; // newer data are on their way
    chosen.detail = await answer.json();
  }
  const picture = chosen.detail;
  $("past").hidden = !!picture;
  for (const part of ["of-time", "of-ranks", "of-bytes"]) $(part).hidden = !picture;
  data_of = picture ? unpacked(picture) : null;
  drawSummary();
  fill($("phases"), data.phase_heads, chosen.phases ?? []);
  fill($("path"), ["phase", "rank", "from", "seconds"], (picture?.path ?? []).map((part) => [
    data_of.lanes[part.lane]?.name ?? "between phases", part.name, time(part.start), (part.stop - part.start).toFixed(3)]));
  if (data_of) {
    // More events of the same save leave the zoom as it is.
    if (other || !before || (from_s === 0 && until_s >= before.seconds)) [from_s, until_s] = [0, data_of.seconds];
    if (other || before?.ranks.length !== data_of.ranks.length) { pointed = null; pointedRow = -1; opened = null; }
    chooseRows();
    arrange();
    chooseLane();
    legend();
  }
  drawPictures();
}
function take(found) {
  // Who looks at the newest goes on to newer ones; who chose another one stays there.
  const stay = data && Number($("operation").value) < data.operations.length - 1 && chosen.name;
  data = found;
  options($("operation"), data.operations.map((o) => o.name), "");
  const at = stay ? data.operations.findIndex((o) => o.name === stay) : -1;
  $("operation").value = at < 0 ? data.operations.length - 1 : at;
  $("run").hidden = !data.run.length;
  fill($("told"), data.run_heads, data.run);
  $("costs").hidden = !data.costs;
  if (data.costs) {
    list($("costs").querySelector("ul"), data.costs.remarks);
    fill($("intervals"), data.costs.heads, data.costs.rows);
  }
  fill($("history"), ["save or load", "outcome", "seconds", "blocked s", "bytes", "bytes/s"], data.operations.slice(-200).map((o) => [
    o.name, o.failed ? "failed" : "ok", o.seconds.toFixed(3), o.blocked.toFixed(3), size(o.nbytes), o.seconds > 0 ? `${size(o.nbytes / o.seconds)}/s` : "-"]));
  return show();
}
function live() {
  const changes = new EventSource("changes");
  changes.onmessage = async () => {
    const answer = await fetch("data"), found = answer.status === 200;
    document.body.classList.toggle("empty", !found);
    if (found) await take(await answer.json());
    else $("headline").textContent = "There are no events of saves or loads yet. The first one is shown here once its events are written.";
    $("state").textContent = found ? "live" : "no events yet";
  };
  changes.onerror = () => { $("state").textContent = "the server does not answer; trying again"; };
}
$("operation").onchange = show;
$("kind").onchange = drawLatencies;
redrawn(() => { if (chosen) { if (data_of) legend(); drawPictures(); } });
const whole_data = given();
if (whole_data) take(whole_data); else live();

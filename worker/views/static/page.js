// The page of a swarm. It asks /api/swarm every two seconds for what is new, keeps it within bounds,
// and draws it. What peers have written is only ever set as text, never as markup.
"use strict";

const MOST_POINTS = 4096, MOST_ROUNDS = 600, MOST_NEWS = 200;
const SMOOTHING = 0.3; // of the training loss: weight of the latest point
const WINDOWS = { "30 s": 30, "2 min": 120, "10 min": 600 };

const seen = { time_s: 0, peers: [], links: [], verdicts: [], swarm: {}, facts: [], table: {}, waits: {}, news: [], points: {}, rounds: {} };
const colours = new Map(); // of each peer, by when it was first seen
let windowS = 30, chosen = null;
const charts = {};

// ------------------------------------------------------------------ what every drawing needs

const $ = (id) => document.getElementById(id);

function made(namespace, name, attributes, ...children) {
  const element = document.createElementNS(namespace, name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null).map((c) => (typeof c === "object" ? c : String(c))));
  return element;
}
const html = (...parts) => made("http://www.w3.org/1999/xhtml", ...parts);
const svg = (...parts) => made("http://www.w3.org/2000/svg", ...parts);

const known = (value) => value !== null && value !== undefined;
const optional = (value, show) => (known(value) ? show(value) : "–");
const count = (n) => Math.round(n).toLocaleString("en");
const three = (x) => (x >= 100 ? count(x) : x.toPrecision(3));
const rate = (m) => (m >= 1000 ? `${three(m / 1000)} Gbit/s` : m >= 1 ? `${three(m)} Mbit/s` : m >= 0.001 ? `${Math.round(m * 1000)} kbit/s` : "0");
const seconds = (s) => (s < 1 ? `${Math.round(s * 1000)} ms` : s < 100 ? `${s.toPrecision(3)} s` : `${count(s)} s`);
const clock = (t) => new Date(t * 1000).toLocaleTimeString("en-GB");
const short = (name, most) => (name.length <= most ? name : `${name.slice(0, most - 6)}…${name.slice(-5)}`);

function seriesOf(peer) {
  if (!colours.has(peer)) colours.set(peer, colours.size % 8);
  return `s${colours.get(peer)}`;
}
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// ----------------------------------------------------------------------------- asking the peer

// The secret stands behind # in the address, which browsers send to nobody; it is taken out of it.
function token() {
  const given = decodeURIComponent(location.hash.slice(1));
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("token");
}

async function ask() {
  const shown = token();
  const headers = shown ? { Authorization: `Bearer ${shown}` } : {};
  const answer = await fetch(`api/swarm?since=${seen.time_s}`, { headers, credentials: "omit" });
  if (answer.status === 401) throw new Error("This page wants its token: open the address with #TOKEN behind it. The peer that serves it has told where the token is.");
  if (!answer.ok) throw new Error(`The peer that serves this page answers ${answer.status}.`);
  return answer.json();
}

function take(news) {
  for (const key of ["time_s", "peers", "links", "verdicts", "swarm", "facts", "table", "waits"]) seen[key] = news[key];
  seen.news = [...seen.news, ...news.news].slice(-MOST_NEWS);
  for (const peer of news.peers) seriesOf(peer.peer);
  for (const [peer, rows] of Object.entries(news.points)) {
    const named = rows.map((row) => Object.fromEntries(news.point.map((key, i) => [key, row[i]])));
    let points = [...(seen.points[peer] || []), ...named];
    if (points.length > MOST_POINTS) points = points.filter((_, i) => i % 2 === 0);
    seen.points[peer] = points;
  }
  for (const [peer, rounds] of Object.entries(news.rounds)) {
    const kept = new Map((seen.rounds[peer] || []).map((each) => [`${each.fragment}/${each.round}`, each]));
    for (const each of rounds) kept.set(`${each.fragment}/${each.round}`, each);
    seen.rounds[peer] = [...kept.values()].slice(-MOST_ROUNDS);
  }
}

async function watch() {
  let pauseS = 2;
  try {
    const news = await ask();
    take(news);
    pauseS = news.every_s;
    const idle = Date.now() / 1000 - seen.time_s;
    notice(seen.time_s === 0 ? "No peer has answered yet." : idle > 15 ? `Nobody has answered for ${seconds(idle)}. What was last seen stays.` : "");
    if (seen.time_s) draw();
  } catch (error) {
    notice(error instanceof TypeError ? "The peer that serves this page does not answer: it has ended, or the link to it is broken. What was last seen stays." : error.message);
  }
  setTimeout(watch, pauseS * 1000);
}

function notice(text) {
  $("notice").hidden = !text;
  $("notice").textContent = text;
}

// ------------------------------------------------------------------------- what follows from it

// The peer that the others wait for, as the peers have located it.
function slowPeer() {
  const located = believed().find((verdict) => verdict.kind !== "link");
  return located ? located.peer : null;
}

const believed = () => seen.verdicts.filter((verdict) => verdict.believed);

function marksOf(peer, slow) {
  const located = believed().find((verdict) => verdict.peer === peer.peer && verdict.kind !== "link");
  const by = seen.peers.filter((each) => each.quarantine[peer.peer]);
  if (["dead", "lost"].includes(peer.state)) return ["dead", peer.state];
  if (peer.state === "left") return ["dead", "left"];
  if (by.length) return ["quarantined", "in quarantine"];
  if (peer.state === "done") return ["done", ""];
  // Only members of the run are led to a relayed peer: a coordinator knows of it what others say.
  if (!peer.answers && peer.relays.length && !known(peer.seen_s) && peer.health === "alive") return ["", "relayed"];
  if (!peer.answers || peer.health === "suspect") return ["unsure", peer.health === "suspect" ? "suspect" : "no answer"];
  if (located) return ["slow", `slow ${located.kind}`];
  return slow === peer.peer ? ["slow", "slow"] : ["", ""];
}

function draw() {
  const slow = slowPeer();
  drawFacts();
  drawGraph(slow);
  drawWaits(slow);
  drawNews();
  drawLoss();
  drawTraffic();
  drawTimeline();
  drawTable(slow);
}

// -------------------------------------------------------------------------------------- the head

function drawFacts() {
  const { swarm, facts } = seen;
  $("run").textContent = `run ${swarm.run.slice(0, 8)} · ${swarm.preset} · seen by ${swarm.seen_by} · ${swarm.encrypted ? "encrypted" : "not encrypted"}`;
  const working = seen.peers.filter((p) => p.state === "training").length;
  document.title = `${working} of ${seen.peers.length} · step ${count(swarm.step)} · Murmuration`;
  $("facts").replaceChildren(...facts.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))));
  $("progress").style.width = swarm.steps ? `${(100 * swarm.step) / swarm.steps}%` : "0";
}

// ------------------------------------------------------------------------------------- the graph

function drawGraph(slow) {
  const graph = $("graph"), n = seen.peers.length, many = n > 24;
  const place = places(n);
  const most = Math.max(0.01, ...seen.links.flatMap((link) => link.mbps.map((m) => m || 0)));
  const lines = [], labels = [], live = new Set(seen.peers.filter((p) => p.live).map((p) => p.peer));
  for (const link of seen.links) {
    const a = place.get(link.a), b = place.get(link.b);
    if (!a || !b) continue;
    const [forth, back] = link.mbps.map((m) => m || 0), all = forth + back;
    if ((many && !all) || !live.has(link.a) || !live.has(link.b)) continue;
    const slowLink = believed().some((v) => v.kind === "link" && [v.peer, v.to].sort().join() === [link.a, link.b].sort().join());
    const relayed = known(link.via), mine = chosen === link.a || chosen === link.b;
    const kinds = ["link", all < 0.001 ? "quiet" : "", relayed ? "relayed" : "", slowLink ? "slow" : "", mine ? "chosen" : ""].join(" ");
    const text = `${link.a} → ${link.b} ${rate(forth)}, back ${rate(back)}`
      + optional(link.rtt_ms, (ms) => `, RTT ${seconds(ms / 1000)}`).replace("–", "") + (relayed ? `, relayed by ${link.via}` : ", direct");
    const line = svg("line", { class: kinds, x1: a.x, y1: a.y, x2: b.x, y2: b.y, "stroke-width": ((many ? 0.4 : 1) + (many ? 1.6 : 6) * Math.sqrt(all / (2 * most))).toFixed(2), "data-a": link.a, "data-b": link.b }, svg("title", {}, text));
    lines.push(line);
    if (mine) {
      const other = chosen === link.a ? b : a, own = chosen === link.a ? a : b;
      const label = `${rate(all)}${relayed ? ` via ${link.via}` : ""}`;
      labels.push(svg("text", { class: "link-label chosen", x: own.x + 0.62 * (other.x - own.x), y: own.y + 0.62 * (other.y - own.y) }, label));
    }
  }
  const nodes = seen.peers.map((peer) => node(peer, place.get(peer.peer), slow, many));
  graph.classList.toggle("many", many);
  graph.classList.toggle("dimmed", chosen !== null && place.has(chosen));
  graph.replaceChildren(...lines, ...labels, ...nodes);
  drawGraphKey();
}

// Peers stand on a ring, which fills the drawing whatever their number.
function places(n) {
  const angles = seen.peers.map((_, i) => (2 * Math.PI * i) / n - Math.PI / 2 + (n === 2 ? Math.PI / 2 : 0));
  const heights = angles.map(Math.sin), low = Math.min(...heights), tall = Math.max(...heights) - low;
  const yOf = (angle) => (tall > 0.1 ? 62 + (344 * (Math.sin(angle) - low)) / tall : 235);
  return new Map(seen.peers.map(({ peer }, i) => [peer, { x: 380 + (n > 1 ? 240 : 0) * Math.cos(angles[i]), y: yOf(angles[i]), angle: angles[i] }]));
}

function node(peer, at, slow, many) {
  const [kind, mark] = marksOf(peer, slow), r = many ? 7 : 17;
  const out = Math.sin(at.angle) < -0.3 ? -1 : 1; // names stand outside the ring
  const side = Math.abs(Math.cos(at.angle)) > 0.5 && !many;
  const x = side ? (Math.cos(at.angle) > 0 ? r + 9 : -r - 9) : 0, anchor = side ? (x > 0 ? "start" : "end") : "middle";
  const y = side ? -4 : out < 0 ? -r - 22 : r + 17;
  const group = svg("g", { class: `node ${kind}`, transform: `translate(${at.x.toFixed(1)} ${at.y.toFixed(1)})`, tabindex: 0, "data-peer": peer.peer });
  group.append(svg("circle", { r }));
  group.append(svg("circle", { r: r - 6 > 0 ? r - 8 : 3, class: "core" }));
  group.lastChild.style.fill = peer.answers ? `var(--${seriesOf(peer.peer)})` : "var(--line)";
  group.lastChild.style.strokeWidth = 0;
  if (!many) {
    const label = svg("text", { x, y }, svg("tspan", { class: "peer" }, short(peer.peer, 18)));
    if (mark) label.append(svg("tspan", { class: "mark" }, ` ${mark}`));
    const up = `↑ ${optional(peer.sent_mbps, rate)}`, down = `↓ ${optional(peer.received_mbps, rate)}`;
    const rates = svg("text", { x, y: y + 15, class: "quiet" });
    if (peer.answers && side) rates.append(svg("tspan", { x }, up), svg("tspan", { x, dy: 14 }, down));
    else if (peer.answers) rates.append(`${up}  ${down}`);
    label.style.textAnchor = rates.style.textAnchor = anchor;
    group.append(label, rates);
  }
  group.append(svg("title", {}, `${peer.peer} at ${peer.address}: ${peer.state}`));
  const choose = (name) => { chosen = name; drawGraph(slow); };
  group.addEventListener("mouseenter", () => { if (chosen !== peer.peer) choose(peer.peer); });
  group.addEventListener("click", () => choose(peer.peer));
  return group;
}

function drawGraphKey() {
  const line = (kind, width) => svg("svg", { viewBox: "0 0 26 12" }, svg("line", { class: `link ${kind}`, x1: 0, y1: 6, x2: 26, y2: 6, "stroke-width": width }));
  const ring = (kind) => svg("svg", { viewBox: "0 0 26 12" }, svg("g", { class: `node ${kind}` }, svg("circle", { r: 4, cx: 13, cy: 6 })));
  const key = [["direct", line("", 4)], ["relayed", line("relayed", 3)], ["idle", line("quiet", 1)], ["at work", ring("")], ["slow", ring("slow")], ["unsure", ring("unsure")], ["quarantine", ring("quarantined")], ["gone", ring("dead")]];
  $("graph-key").replaceChildren(...key.map(([text, icon]) => html("li", {}, icon, text)));
}

// ---------------------------------------------------------------------- what slows, what happened

function drawWaits(slow) {
  const told = seen.verdicts.map(({ text, by }) => html("li", {}, text, " ", html("small", {}, `found by ${by} of ${seen.peers.filter((p) => p.answers).length}`)));
  if (slow && !told.length) told.push(html("li", {}, `The others wait mostly for ${slow}.`));
  $("verdicts").replaceChildren(...(told.length ? told : [html("li", { class: "none" }, "Nothing stands out.")]));
  const ranked = Object.entries(seen.waits.by_peer).sort((a, b) => b[1] - a[1]).slice(0, 6);
  const bars = ranked.flatMap(([peer, s]) => {
    const filled = svg("rect", { class: "waits", x: 0, y: 0, width: (100 * s) / ranked[0][1], height: 9 });
    const bar = html("div", { class: "bar" }, svg("svg", { viewBox: "0 0 100 9", preserveAspectRatio: "none" }, filled));
    return [html("span", { title: peer }, short(peer, 22)), bar, html("span", {}, seconds(s))];
  });
  const caption = `Peers stood still ${(100 * seen.waits.share).toPrecision(2)} % of the last two minutes, waiting for:`;
  $("waits").replaceChildren(html("span", { class: "caption" }, ranked.length ? caption : "Nobody has waited in the last two minutes."), ...bars);
}

function drawNews() {
  const items = [...seen.news].reverse().map((each) => html("li", {}, html("time", {}, clock(each.time_s)), html("span", {}, html("strong", {}, each.peer), ` ${each.text}`)));
  $("news").replaceChildren(...items);
}

// ---------------------------------------------------------------------------------------- curves

// [step, validation loss], in order. Peers with the same anchor tell the same loss: it counts from the
// first look at which one of them had it.
function validation() {
  const stepOf = new Map();
  for (const { step, val_loss } of Object.values(seen.points).flat()) {
    if (known(val_loss) && !(stepOf.get(val_loss) <= step)) stepOf.set(val_loss, step);
  }
  const byStep = new Map([...stepOf].map(([loss, step]) => [step, loss]));
  return [...byStep].sort((a, b) => a[0] - b[0]);
}

function smoothed(points) {
  const steps = [], losses = [];
  for (const { step, loss } of points) {
    if (!known(loss) || (steps.length && step <= steps[steps.length - 1])) continue;
    losses.push(losses.length ? (1 - SMOOTHING) * losses[losses.length - 1] + SMOOTHING * loss : loss);
    steps.push(step);
  }
  return [steps, losses];
}

function drawLoss() {
  const names = seen.peers.map((p) => p.peer), tables = names.map((name) => smoothed(seen.points[name] || []));
  const validated = validation();
  const series = names.map((name) => ({ label: name, stroke: colourOf(seriesOf(name)), width: 1.4, points: { show: false }, spanGaps: true }));
  if (validated.length) {
    tables.push([validated.map((v) => v[0]), validated.map((v) => v[1])]);
    series.push({ label: "validation", stroke: colourOf("ink"), width: 2, points: { show: true, size: 6, fill: colourOf("card") }, spanGaps: true });
  }
  if (!tables.some(([steps]) => steps.length)) return;
  chart("loss", uPlot.join(tables), series, { scales: { x: { time: false } }, x: (step) => count(step), y: (loss) => loss.toFixed(2) });
}

function drawTraffic() {
  const names = seen.peers.map((p) => p.peer);
  const tables = names.map((name) => [(seen.points[name] || []).map((p) => p.time_s), (seen.points[name] || []).map((p) => p.sent_mbps)]);
  if (!tables.some(([times]) => times.length > 1)) return;
  const series = names.map((name) => ({ label: name, stroke: colourOf(seriesOf(name)), width: 1.4, points: { show: false }, spanGaps: true }));
  chart("traffic", uPlot.join(tables), series, { scales: { x: { time: false } }, x: clock, y: (mbps) => mbps.toPrecision(2), least: 0 });
}

// Makes the chart, or fills the one that is there; a new one where its series or the colours differ.
function chart(id, rows, series, { scales, x, y, least }) {
  const place = $(id), width = Math.max(200, place.clientWidth), dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const kind = JSON.stringify([series.map((each) => each.label), width, dark]);
  if (charts[id]?.kind === kind) {
    charts[id].plot.setData(rows);
    return;
  }
  charts[id]?.plot.destroy();
  const axis = { stroke: colourOf("faint"), grid: { stroke: colourOf("line"), width: 1 }, ticks: { stroke: colourOf("line"), width: 1 }, font: "11px system-ui, sans-serif" };
  const values = (show) => (_, splits) => splits.map((v) => optional(v, show));
  const options = {
    width,
    height: 206,
    scales: { ...scales, y: least === undefined ? {} : { range: (_, low, high) => [least, Math.max(high || 0, 0.1) * 1.05] } },
    axes: [{ ...axis, space: 90, values: values(x) }, { ...axis, size: 48, values: values(y) }],
    series: [{}, ...series.map((each) => ({ ...each, value: (_, v) => optional(v, y) }))],
    legend: { live: false },
    cursor: { points: { size: 6 } },
  };
  charts[id] = { kind, plot: new uPlot(options, rows, place) };
}

// -------------------------------------------------------------------------------------- timeline

function drawTimeline() {
  const board = $("timeline"), width = Math.max(300, board.clientWidth), row = seen.peers.length > 16 ? 24 : 30, top = 4, tall = row - 14;
  const left = 24 + 7 * Math.min(18, Math.max(...seen.peers.map((p) => p.peer.length)));
  const to = seen.time_s, from = to - windowS, height = top + row * seen.peers.length + 22;
  const xOf = (time_s) => left + ((Math.min(Math.max(time_s, from), to) - from) / windowS) * (width - left - 8);
  const bar = (kind, begin, end, y, height_, text) => {
    const x = xOf(begin), w = Math.max(1, xOf(end) - x);
    return svg("rect", { class: kind, x: x.toFixed(1), y, width: w.toFixed(1), height: height_, rx: 2 }, svg("title", {}, text));
  };
  const drawn = [];
  seen.peers.forEach(({ peer, waiting_s, answers }, i) => {
    const y = top + row * i;
    drawn.push(svg("line", { class: "row-line", x1: left, x2: width - 8, y1: y + row - 3.5, y2: y + row - 3.5 }), svg("text", { x: 0, y: y + tall - 3 }, short(peer, 18)));
    for (const [begin, end] of spansOfWork(seen.points[peer] || [], from)) drawn.push(bar("computing", begin, end, y, tall, `${peer}: at work`));
    for (const round of seen.rounds[peer] || []) {
      const over = known(round.ended_s), end = over ? round.ended_s : to;
      if (end > from && (over || answers)) {
        const state = round.failed ? "failed" : over ? "" : "open";
        drawn.push(bar(`flight ${state}`, round.began_s, end, y + tall + 2, 5, `${peer}: round ${round.round} of fragment ${round.fragment}, ${seconds(end - round.began_s)} on its way${round.failed ? ", failed" : ""}`));
      }
      if (known(round.resumed_s) && round.resumed_s > from && round.stall_s > 0.005) {
        drawn.push(...wait(bar, xOf, round.resumed_s - round.stall_s, round.resumed_s, y, tall, peer, round.waited_for));
      }
    }
    if (known(waiting_s) && answers) drawn.push(...wait(bar, xOf, to - waiting_s, to, y, tall, peer, ""));
  });
  const ticks = Math.max(2, Math.floor((width - left) / 150));
  for (let tick = 0; tick <= ticks; tick += 1) {
    const time_s = from + (windowS * tick) / ticks;
    drawn.push(svg("text", { class: "quiet", x: xOf(time_s), y: height - 6, "text-anchor": tick === 0 ? "start" : tick === ticks ? "end" : "middle" }, clock(time_s)));
  }
  board.setAttribute("viewBox", `0 0 ${width} ${height}`);
  board.replaceChildren(...drawn);
}

function wait(bar, xOf, begin, end, y, tall, peer, waitedFor) {
  const rect = bar("waits", begin, end, y, tall, `${peer} waits ${seconds(end - begin)}${waitedFor ? ` for ${waitedFor}` : ""}`);
  const room = xOf(end) - xOf(begin), name = short(waitedFor || "…", 18);
  if (room < 7 * name.length + 4) return [rect];
  return [rect, svg("text", { class: "waits-label", x: (xOf(begin) + room / 2).toFixed(1), y: y + tall - 4, "text-anchor": "middle" }, name)];
}

// From each answer in which it was at work to the next; longer silences are left white.
function spansOfWork(points, from) {
  const spans = [];
  points.forEach((point, i) => {
    const next = points[i + 1]?.time_s ?? seen.time_s;
    if (next < from || next - point.time_s > 12 || !known(point.loss)) return;
    const last = spans.at(-1);
    if (last && last[1] >= point.time_s) last[1] = next;
    else spans.push([point.time_s, next]);
  });
  return spans;
}

function drawChoices() {
  $("window").replaceChildren(...Object.entries(WINDOWS).map(([text, s]) => {
    const button = html("button", { type: "button", "aria-pressed": s === windowS }, text);
    button.addEventListener("click", () => { windowS = s; drawChoices(); if (seen.time_s) drawTimeline(); });
    return button;
  }));
  const box = (kind, y, tall) => svg("svg", { viewBox: "0 0 26 12" }, svg("rect", { class: kind, x: 0, y, width: 26, height: tall, rx: 2 }));
  const key = [["computing", box("computing", 1, 10)], ["waiting, with the name of whom", box("waits", 1, 10)], ["a round on its way", box("flight", 4, 5)], ["failed", box("flight failed", 4, 5)]];
  $("timeline-key").replaceChildren(...key.map(([text, icon]) => html("li", {}, icon, text)));
}

// ----------------------------------------------------------------------------------------- peers

function drawTable(slow) {
  const { heads, rows } = seen.table;
  const drawn = seen.peers.map((p, i) => {
    const [kind, mark] = marksOf(p, slow);
    const tone = kind === "dead" || kind === "slow" ? "bad" : kind === "" || kind === "done" ? "good" : "warn";
    const [name, state, ...rest] = rows[i];
    const cells = [
      [html("span", {}, html("span", { class: `swatch ${seriesOf(p.peer)}` }), name)],
      [mark && mark !== state ? `${state}, ${mark}` : state, tone],
      ...rest.map((value, at) => [value, heads[at + 2] === "not taken" ? "quiet" : null]),
    ];
    return html("tr", { "data-peer": p.peer, title: p.address }, ...cells.map(([value, tone_]) => html("td", { class: tone_ }, value)));
  });
  $("peers").tHead.replaceChildren(html("tr", {}, ...heads.map((head) => html("th", { scope: "col" }, head))));
  $("peers").tBodies[0].replaceChildren(...drawn);
  $("footer").textContent = `Last look ${clock(seen.time_s)}. “Waited for”: by the others, in the last two minutes. Rates are over about 20 s.`;
}

$("graph").addEventListener("mouseleave", () => { chosen = null; if (seen.time_s) draw(); });
addEventListener("resize", () => { if (seen.time_s) draw(); });
drawChoices();
watch();

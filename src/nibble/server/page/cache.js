// The picture of the cache: asks for /v1/cache each second, and draws what it says.
import { $, ask, bytes, connect, el, health, percent, plural, seconds, served, short, whole } from "./api.js";

const KEPT = 120; // points of a line
const OVER = 4; // seconds that a rate is taken over
const lines = { rate: [], ttft: [], hits: [], usage: [] };
const telling = { rate: short, ttft: seconds, hits: percent, usage: percent };
let samples = [];
let seen = null; // what /v1/cache said last
let widest = 0; // pages that the picture shows at least, so that it does not jump to and fro

export function push(name, value) {
  lines[name].push(value);
  if (lines[name].length > KEPT) lines[name].shift();
  $(`now-${name}`).textContent = value === null ? "–" : telling[name](value);
  drawLine(name);
}

function state(words, kind) {
  if ($("state").textContent !== words) $("state").textContent = words;
  $("state").className = `state ${kind}`;
}

// Words for an engine that does not serve.
const down = (status) =>
  status === "dead" ? ["ended", "The engine has ended, and is not started again. The server's log says why."]
    : seen ? ["starting again", "The engine's process ended, and is being started again."]
      : ["starting", "The engine is starting."];

export async function poll() {
  let wait = 1000;
  if ($("live").checked && !document.hidden) {
    try {
      const { status } = await health();
      if (status !== "ready") {
        samples = [];
        outdated(...down(status));
      } else {
        if (!served.model) await connect();
        count(await (await ask("v1/cache")).json());
        state("ready", "good");
        $("picture").classList.remove("old");
        $("cache-error").hidden = true;
      }
    } catch (error) {
      wait = 3000;
      samples = [];
      outdated(error.status === 401 ? "needs a key" : error.status === 503 ? "not ready" : "out of reach", error.message);
    }
  }
  setTimeout(poll, wait);
}

function outdated(words, why) {
  state(words, "bad");
  $("picture").classList.add("old");
  $("cache-error").textContent = why;
  $("cache-error").hidden = false;
}

function count(view) {
  const now = { at: view.at ?? performance.now() / 1000, ...view.tokens, ...view.prefix };
  const before = samples.at(-1);
  if (before && (now.decode < before.decode || now.at < before.at)) samples = []; // another engine
  if (now.at !== samples.at(-1)?.at) samples.push(now);
  while (samples.length > 2 && now.at - samples[1].at >= OVER) samples.shift();
  const [first] = samples;
  const rates = { decode: null, prompt: null };
  if (now.at > first.at) for (const name in rates) rates[name] = (now[name] - first[name]) / (now.at - first.at);
  const looked = now.lookup_tokens - first.lookup_tokens;
  const { pages } = (seen = view);
  if (rates.decode !== null) push("rate", rates.decode);
  push("hits", looked ? (now.hit_tokens - first.hit_tokens) / looked : (lines.hits.at(-1) ?? null));
  push("usage", pages.total ? pages.held / pages.total : 0);
  picture(view, rates);
}

function rows(body, table, numbers = -1) {
  const key = JSON.stringify(table);
  if ($(body).dataset.key === key) return; // what is selected stays so
  $(body).dataset.key = key;
  $(body).replaceChildren(...table.map((cells) => el("tr", {}, ...cells.map((cell, i) =>
    el("td", { textContent: cell, className: i === numbers ? "number" : "" })))));
}

function picture(view, rates) {
  const { requests, prefix, pages } = view;
  const tiles = {
    "Running": whole(requests.running),
    "Waiting": whole(requests.waiting),
    "Prompt tokens/s": rates.prompt === null ? "–" : short(rates.prompt),
    "Hit rate": prefix.hit_rate === null ? "–" : percent(prefix.hit_rate),
    "Preempted": whole(requests.preemptions),
    "Answered": whole(requests.finished),
  };
  const { drafts, replicas } = view;
  if (replicas) tiles["Replicas"] = `${replicas.filter((one) => one.state === "ready").length} of ${replicas.length} serve`;
  if (drafts) tiles[`Drafts accepted (${drafts.drafter})`] = drafts.accept_rate === null ? "–"
    : `${percent(drafts.accept_rate)}, ${drafts.tokens_per_step.toFixed(1)} tokens a step`;
  $("tiles").replaceChildren(...Object.entries(tiles).map(([dt, dd]) =>
    el("div", {}, el("dt", { textContent: dt }), el("dd", { textContent: dd }))));
  $("grid-title").textContent = `${plural(pages.total, "page")} of ${plural(pages.size, "token")}`;
  legend("legend", [
    ["own", "held by one request", pages.own], ["shared", "held, in the prefix cache", pages.shared],
    ["idle", "idle, in the prefix cache", pages.idle], ["free", "free", pages.free],
  ]);
  rows("groups", view.groups.map((group) => [
    `${group.name}, ${plural(group.layers, "layer")}`,
    group.kind + (group.window ? `, window ${group.window}` : ""), group.format, whole(group.bytes_per_token),
  ]), 3);
  const ratio = view.bytes_per_token_16bit / view.bytes_per_token;
  $("bytes-note").hidden = !view.bytes_per_token;
  $("bytes-note").textContent = `All layers: ${whole(view.bytes_per_token)} bytes per token; ` +
    `${whole(view.bytes_per_token_16bit)} in 16 bits, ${short(ratio)} times as many.`;
  quality(served.certificate, ratio);
  $("window").hidden = !view.window;
  if (view.window) exact(view.window);
  $("states").hidden = !view.states;
  if (view.states) states(view.states);
  $("tier").hidden = !view.host;
  if (view.host) tier(view.host);
  drawGrids();
}

// What `nibble certify` measured of this cache. ratio: 1 where it is not quantised.
function quality(certificate, ratio) {
  $("quality").hidden = !certificate;
  $("quality-note").textContent = certificate?.line ?? (ratio > 1
    ? "What this cache costs in quality was not measured: nibble certify does it, and nibble plan says how."
    : "This cache is not quantised.");
  if (!certificate) return;
  const { kl, kl_p99, perplexity_ratio, top1, recall, yardstick, yardstick_recall } = certificate;
  rows("figures", [
    ["KL, mean", kl.toPrecision(2), `nats from ${yardstick}'s predictions, per token; 0.01 is hard to notice`],
    ["KL, 99th percentile", kl_p99.toPrecision(2), "one token in a hundred is further off"],
    ["Perplexity", `${perplexity_ratio.toFixed(3)} times`, `that of ${yardstick}`],
    ["Same top token", percent(top1), `how often the likeliest next token is ${yardstick}'s`],
    ...Object.entries(recall).map(([tokens, share]) => [`Recall at ${whole(tokens)} tokens`, percent(share),
      `exact answers to look-ups; ${yardstick} has ${percent(yardstick_recall[tokens] ?? 0)}`]),
  ], 1);
}

function exact(found) {
  $("window-title").textContent = `Exact window: the newest ${plural(found.tokens, "token")} in ${found.dtype}`;
  snapshots("window", "page", found.pages, found.evicted_pages, found);
}

function states(found) {
  $("states-title").textContent = `Recurrent states in ${found.format}: ${bytes(found.bytes_per_slot)} a request`;
  snapshots("states", "slot", found.slots, found.evicted_slots, found);
  if (found.unwatched_layers) $("states-note").textContent +=
    ` The fidelity watch does not compare the states of ${plural(found.unwatched_layers, "layer")}.`;
}

function snapshots(id, unit, total, evicted, found) {
  legend(`${id}-legend`, [
    ["own", `${unit}s held by requests`, found.held], ["idle", "idle, of snapshots", found.idle], ["free", "free", found.free],
  ]);
  $(`${id}-note`).textContent = `${plural(total, unit)}, ${whole(found.snapshots)} of snapshots in the prefix cache. ` +
    `Cached prefixes so far: ${whole(found.hits)} went on at a snapshot, ${whole(found.misses)} had none; ` +
    `${plural(found.replayed_tokens, "token")} computed again, ${plural(evicted, unit)} evicted.`;
}

function tier(host) {
  legend("tier-legend", [
    ["own", "of pages that are needed", host.pinned], ["hot", "hot buffers", host.hot],
    ["idle", "of idle pages", host.idle], ["host", "pages that only the host has", host.only_host_pages],
    ["free", "free", host.free],
  ]);
  $("tier-note").textContent = `Host memory ${bytes(host.host_bytes)} in ${host.formats.join(", ")}. So far ` +
    `${plural(host.spilled, "request")} spilled, ${plural(host.saved, "page")} saved, ` +
    `${whole(host.loaded)} loaded back, ${whole(host.dropped)} dropped from the device.`;
}

function legend(id, kinds) {
  $(id).replaceChildren(...kinds.map(([kind, words, n]) =>
    el("li", {}, el("i", { className: `i-${kind}` }), `${words}: ${whole(n)}`)));
}

const told = (id) => [...$(id).children].map((li) => li.textContent).join(", ");

// The cache: drawn

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function brush(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale); // clears it
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { context, width, height };
}

// Cells by kind: counts, not places. What is there shows, be it less than a cell.
function cells(canvas, kinds, total) {
  const { context, width, height } = brush(canvas);
  let size = 26;
  const fits = () => Math.floor(width / size) * Math.floor(height / size);
  while (size > 8 && fits() < total) size -= 1;
  const each = Math.max(1, Math.ceil(total / Math.max(1, fits())));
  const columns = Math.max(1, Math.floor(width / size));
  const count = Math.ceil(total / each);
  let at = 0;
  for (const [kind, n] of kinds) {
    const last = kind === "free" ? count : Math.min(count, at + Math.ceil(n / each));
    context.fillStyle = colour(kind);
    for (; at < last; at += 1) {
      context.beginPath();
      context.roundRect((at % columns) * size, Math.floor(at / columns) * size, size - 2, size - 2, 2);
      context.fill();
    }
  }
  return each;
}

function drawGrids() {
  if (!seen) return;
  const { pages, host } = seen;
  const used = pages.total - pages.free;
  widest = Math.max(widest, 256, 2 ** Math.ceil(Math.log2(2 * used + 1)));
  const shown = $("whole").checked ? pages.total : Math.min(pages.total, widest);
  const each = cells($("grid"), ["own", "shared", "idle", "free"].map((kind) => [kind, pages[kind]]), shown);
  const rest = shown < pages.total ? ` Not drawn: ${plural(pages.total - shown, "page")}, all free.` : "";
  $("grid-note").textContent = `A cell is ${plural(each, "page")}; cells show how many, not where.${rest}`;
  $("grid").ariaLabel = `Pages of the cache. ${told("legend")}`;
  if (!host) return;
  const kinds = [["own", host.pinned], ["hot", host.hot], ["idle", host.idle], ["host", host.only_host_pages], ["free", host.free]];
  cells($("frames"), kinds, host.frames + host.only_host_pages);
  $("frames").ariaLabel = `Frames of the device. ${told("tier-legend")}`;
}

function drawLine(name) {
  const { context, width, height } = brush($(name));
  const points = lines[name].map((value, i) => [i, value]).filter(([, value]) => value !== null);
  const top = Math.max(...points.map(([, value]) => value), 1e-9);
  const step = (width - 4) / (KEPT - 1);
  const place = ([i, value]) => [width - 2 - (lines[name].length - 1 - i) * step, height - 2 - (height - 6) * value / top];
  context.strokeStyle = context.fillStyle = colour("own");
  context.lineWidth = 1.5;
  context.beginPath();
  points.forEach((point) => context.lineTo(...place(point)));
  context.stroke();
  if (points.length) {
    context.beginPath();
    context.arc(...place(points.at(-1)), 2, 0, 2 * Math.PI);
    context.fill();
  }
}

function redraw() {
  drawGrids();
  for (const name in lines) drawLine(name);
}

// The plan

async function plan() {
  if (!$("plan").open) return;
  try {
    const said = await (await ask("v1/plan")).json();
    $("notes").replaceChildren(...said.notes.map((note) => el("li", { textContent: note })));
    rows("routes", said.groups.flatMap((group) => Object.entries(group.routes).map(([phase, route]) =>
      [group.name, phase, route.backend + (route.runnable ? "" : " (declared only)"),
        route.stage_to ? `staged to ${route.stage_to}` : group.scheme, route.cites])));
    const { budget } = said;
    const parts = ["memory", "weights", "staging", "activations", "runtime", "reserve", "pool"].filter((name) => budget[name]);
    rows("memory", [...parts.map((name) => [name === "memory" ? `all of ${said.hardware.name}` : name, bytes(budget[name])]),
      ["tokens that the pool holds", whole(budget.tokens)], ["limited by", budget.limit]], 1);
    $("plan-error").hidden = true;
  } catch (error) {
    $("plan-error").textContent = error.message;
    $("plan-error").hidden = false;
  }
}

$("plan").addEventListener("toggle", plan);
$("whole").addEventListener("change", drawGrids);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(redraw).observe($("grid").parentElement);

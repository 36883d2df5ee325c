// Draws the run from the snapshots of /live, which are fetched while the page is visible.

import { ask, events, failure } from "/page/server.js";

const GROUPS = {
  a: ["attention", "--attention"], p: ["predictor", "--predictor"], n: ["neurons", "--neurons"],
  s: ["sums and logits", "--sums"], f: ["waiting for flash", "--flash"], m: ["waiting for participants", "--neutral"],
  r: ["reading flash", "--read"], e: ["evicting", "--evict"], c: ["messages, sampling, text", "--talk"],
};
const COLOUR_OF = Object.fromEntries(Object.values(GROUPS));
const REGIONS = { fixed: "--attention", kv: "--sums", hot: "--neurons", cold: "--read", processes: "--neutral" };
const GB = 1e9;
const MB = 1e6;
const TREND = 120;
const LABEL = 92;
const element = (id) => document.getElementById(id);
const speeds = [];
let latest = null;
let watching = null;
let seen = () => {};
let model = ""; // the displayed model, if the server has several

// Shows the run while the page is visible. changed: called with the reason why answers are delayed, "" if none.
export function look(changed) {
  seen = changed;
  document.addEventListener("visibilitychange", turn);
  window.addEventListener("resize", () => latest && draw(latest));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => latest && draw(latest));
  turn();
}

// Shows the run of this model from now on.
export function lookAt(name) {
  model = name;
  latest = null;
  speeds.length = 0;
  element("model").textContent = "";
  say("connecting", "");
  watching?.abort();
}

function turn() {
  if (document.hidden) watching?.abort();
  else if (!watching) watch();
}

async function watch() {
  watching = new AbortController();
  const { signal } = watching;
  while (!signal.aborted) {
    try {
      const response = await ask(model ? `/live?model=${encodeURIComponent(model)}` : "/live", { signal });
      if (!response.ok) throw await failure(response);
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message);
        latest = event;
        speeds.push(event.tokens_per_s);
        speeds.splice(0, speeds.length - TREND);
        draw(event);
        report(event);
        warmUp(event);
        seen(delay(event));
      }
      say("the server has stopped", "bad");
    } catch (error) {
      if (error.code === "asleep") say("no run now: your message starts it", "asleep");
      else if (!signal.aborted) say(error.message, "bad");
    }
    element("warm-up").hidden = true; // its progress is unknown now
    seen(element("state").className === "asleep" ? "the run is starting" : "");
    if (!signal.aborted) await new Promise((resolve) => setTimeout(resolve, 1000));
  }
  watching = null;
  if (!document.hidden) turn();
}

function say(text, mood) {
  const state = element("state");
  if (mood !== state.className) put("announcement", mood === "good" ? "connected" : text); // speeds are not read aloud
  put("state", text);
  state.className = mood;
  element("live").classList.toggle("stale", mood !== "good"); // the displayed figures are old
}

function report(run) {
  if (run.silent_s > 0) say(`no answer for ${Math.round(run.silent_s)} s`, "bad");
  else if (!run.ready) say("starting", "bad");
  else say(summary(run), "good");
}

function draw(run) {
  element("model").textContent = `${model ? "" : `${run.model}, `}${run.quantization}, ${run.mode}`;
  figures(run);
  trend();
  strip(run);
  processes(run);
  layers(run);
  regions(run);
}

function summary(run) {
  const work = run.sequences_active ? `${speed(run.tokens_per_s)} tokens/s` : "ready";
  return run.sequences_waiting ? `${work}, ${run.sequences_waiting} waiting` : work;
}

// Returns tokens per second as text, with at least two digits.
export function speed(value) {
  return value < 1 ? value.toPrecision(2) : value.toFixed(value < 100 ? 1 : 0);
}

function delay({ ready, warm_up: warmed }) {
  if (!ready) return "the run is starting";
  return isWarming(warmed) ? `memory is still warming up, ${percentOf(warmed)} %` : "";
}

const isWarming = (warmed) => Boolean(warmed) && warmed.loaded_bytes < warmed.total_bytes;
const percentOf = ({ loaded_bytes: loaded, total_bytes: total }) => Math.min(100, Math.floor((100 * loaded) / total));

// Shows the progress of loading weights; hides it when all are loaded or it is unknown.
function warmUp({ warm_up: warmed }) {
  const under = isWarming(warmed);
  element("warm-up").hidden = !under;
  if (!under) return;
  const { loaded_bytes: loaded, total_bytes: total } = warmed;
  const percent = percentOf(warmed);
  const [unit, size, digits] = total < GB ? ["MB", MB, 0] : ["GB", GB, 1];
  const [some, all] = [Math.min(loaded, total), total].map((one) => (one / size).toFixed(digits));
  element("warm-up-bar").value = percent;
  const left = warmed.left_s == null ? "" : `, ${(warmed.bytes_per_s / size).toFixed(digits)} ${unit}/s, ${Math.ceil(warmed.left_s)} s left`;
  put("warm-up-text", `Warming up: ${percent} %, ${some} of ${all} ${unit}${left}`);
}

function figures(run) {
  const ms = (value) => (value < 10 ? value.toFixed(1) : Math.round(value));
  const gap = run.tbt_ms;
  put("speed", run.tokens_per_s ? speed(run.tokens_per_s) : "–");
  put("gap", gap.p50 === undefined ? "–" : `${ms(gap.p50)} ms`);
  put("gaps", gap.p50 === undefined ? "" : `90 % within ${ms(gap.p90)}, 99 % within ${ms(gap.p99)} ms`);
  put("hits", run.hit_rate === null ? "–" : `${(100 * run.hit_rate).toFixed(1)} %`);
  put("slots", `${run.slots_free.toLocaleString("en")} of ${run.slots.toLocaleString("en")} slots free`);
  put("flash", `${bytes(run.flash_bytes_per_s)}/s`);
  put("queue", `${perToken(run.flash_bytes_per_token)}${run.flash_in_flight} in flight, ${run.flash_waiting} waiting`);
  put("dram", `${bytes(run.dram_bytes_per_s)}/s`);
  put("traffic", run.dram_bytes_per_token === null ? "" : `${bytes(run.dram_bytes_per_token)} per token`);
  put("memory", bytes(run.memory_bytes));
  put("limit", `of ${bytes(run.memory_limit_bytes)}, peak ${bytes(run.memory_peak_bytes)}`);
  const waitingShares = [["flash", run.flash_wait], ["each other", run.participant_wait]].filter(([, share]) => share !== null);
  const waits = waitingShares.length ? `Recently the workers waited ${waitingShares.map(([what, share]) => `${Math.round(100 * share)} % for ${what}`).join(", ")}.` : "";
  put("waits", run.deviations ? `${waits} Off the plan: ${run.deviations}.` : waits);
}

function trend() {
  const { context, width, height } = fresh("trend");
  const top = Math.max(...speeds, 1e-9);
  context.fillStyle = colour("--neurons");
  const step = width / TREND;
  speeds.forEach((one, n) => {
    const tall = (one / top) * height;
    context.fillRect(width - (speeds.length - n) * step, height - tall, Math.max(1, step - 0.5), tall);
  });
}

function strip(run) {
  const rows = run.strip;
  element("strip").style.height = rows.length ? `${rows.length * 23 + 16}px` : 0;
  const { context, width, height } = fresh("strip");
  const steps = run.strip_steps;
  put("steps", !rows.length ? "none yet" : `${steps.length > 1 ? `${steps[0]} to ${steps.at(-1)}` : steps[0] ?? "prompt"}, ${run.strip_ms.toFixed(1)} ms`);
  const seen = new Set();
  const scale = (width - LABEL) / (rows[0]?.cells.length ?? 1);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  rows.forEach((row, n) => {
    const y = n * 23 + 2;
    context.fillStyle = colour("--faint");
    context.fillText(row.name, 0, y + 10);
    context.fillStyle = colour("--empty");
    context.fillRect(LABEL, y, width - LABEL, 19);
    for (let from = 0; from < row.cells.length; ) {
      let to = from + 1;
      while (row.cells[to] === row.cells[from]) to++;
      const group = GROUPS[row.cells[from]];
      if (group) {
        seen.add(row.cells[from]);
        context.fillStyle = colour(group[1]);
        context.fillRect(LABEL + from * scale, y, Math.max(0.7, (to - from) * scale), 19);
      }
      from = to;
    }
  });
  context.fillStyle = colour("--faint");
  context.textAlign = "end";
  context.fillText(`${run.strip_ms.toFixed(1)} ms`, width, height - 6);
  context.textAlign = "start";
  context.fillText("0", LABEL, height - 6);
  legend("legend", Object.entries(GROUPS).filter(([letter]) => seen.has(letter)).map(([, [label, name]]) => [label, name]));
}

function processes(run) {
  const body = element("processes");
  while (body.rows.length < run.processes.length) {
    const row = body.insertRow();
    for (let n = 0; n < 4; n++) row.insertCell();
    row.cells[1].append(Object.assign(document.createElement("div"), { className: "doing" }));
  }
  while (body.rows.length > run.processes.length) body.deleteRow(-1);
  run.processes.forEach((one, n) => {
    const [name, doing, cpu, memory] = body.rows[n].cells;
    const fine = ["ready", "busy", "draining"].includes(one.state);
    name.textContent = `${one.role}.${one.index}${fine ? "" : ` ${one.state}`}${one.restarts ? ` (${one.restarts + 1}.)` : ""}`;
    name.className = fine ? "" : "bad";
    const by = one.numerics && `${one.numerics}${one.backend && ` by ${one.backend}`}`;
    const work = [one.work, one.work || one.backend ? by : ""].filter(Boolean).join(", ");
    if (work) name.append(Object.assign(document.createElement("small"), { className: "work", textContent: work }));
    name.title = `process ${one.pid}, core ${one.core ?? "any"}, step ${one.step}, ${one.state}${by && `, ${by}`}`;
    const parts = Object.entries(one.doing).filter(([label]) => COLOUR_OF[label]);
    doing.firstChild.replaceChildren(...parts.map(([label, share]) => {
      const part = document.createElement("b");
      part.style.width = `${100 * share}%`;
      part.style.background = `var(${COLOUR_OF[label]})`;
      part.title = `${label} ${Math.round(100 * share)} %`;
      return part;
    }));
    cpu.textContent = one.cpu === null ? "–" : `${Math.round(100 * one.cpu)} %`;
    memory.textContent = one.memory_bytes === null ? "–" : bytes(one.memory_bytes);
  });
}

function layers(run) {
  const { context, width, height } = fresh("layers");
  const count = run.resident.length;
  const top = Math.max(...run.fired, 1e-9);
  put("layers-say", run.fired.length ? `${Math.round((100 * run.fired.reduce((a, b) => a + b, 0)) / count)} % of neurons fire, at most ${Math.round(100 * top)} % in a layer` : "");
  const step = width / Math.max(1, count);
  for (let n = 0; n < count; n++) {
    context.fillStyle = colour("--neutral");
    context.fillRect(n * step, height * (1 - run.resident[n]), step - 1, height * run.resident[n]);
    const tall = ((run.fired[n] ?? 0) / top) * height * 0.9;
    context.fillStyle = colour("--neurons");
    context.fillRect(n * step + step * 0.2, height - tall, step * 0.6 - 1, tall);
  }
  legend("layers-legend", [["in memory", "--neutral"], ["firing, on another scale", "--neurons"]]);
}

function regions(run) {
  const { context, width, height } = fresh("regions");
  put("regions-say", `${bytes(run.memory_bytes)} in all`);
  const parts = run.regions.map((one) => [one.name, one.used_bytes]);
  const named = parts.reduce((sum, [, size]) => sum + size, 0);
  parts.push(["processes", Math.max(0, run.memory_bytes - named)]);
  context.fillStyle = colour("--empty");
  context.fillRect(0, 0, width, height);
  let x = 0;
  for (const [name, size] of parts) {
    const wide = (size / Math.max(1, named, run.memory_bytes)) * width;
    context.fillStyle = colour(REGIONS[name] ?? "--faint");
    context.fillRect(x, 0, wide, height);
    x += wide;
  }
  const reserved = Object.fromEntries(run.regions.map((one) => [one.name, one.total_bytes]));
  const size_of = (name, size) => ((reserved[name] ?? size) > size ? `${bytes(size)} of ${bytes(reserved[name])}` : bytes(size));
  legend("regions-legend", parts.map(([name, size]) => [`${name} ${size_of(name, size)}`, REGIONS[name] ?? "--faint"]));
}

function legend(id, entries) {
  const wanted = entries.map(([label, name]) => {
    const item = document.createElement("li");
    const mark = document.createElement("i");
    mark.style.background = `var(${name})`;
    item.append(mark, label);
    return item;
  });
  if (element(id).textContent !== entries.map(([label]) => label).join("")) element(id).replaceChildren(...wanted);
}

// Returns the context of a cleared canvas, in CSS pixels at any resolution of the screen.
function fresh(id) {
  const canvas = element(id);
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const [wide, tall] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== tall) [canvas.width, canvas.height] = [wide, tall];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const put = (id, text) => (element(id).textContent = text);
const perToken = (size) => (size === null ? "" : `${bytes(size)} per token, `);

function bytes(size) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (size < 1024) return `${unit === "B" ? Math.round(size) : size.toFixed(size < 100 ? 1 : 0)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(2)} GiB`;
}

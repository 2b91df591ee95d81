// What all pages share: the header, calls with a key, texts, polling. A page calls start_page() once.
"use strict";
const $ = id => document.getElementById(id);
const TERMINAL = new Set(["succeeded", "failed", "canceled", "expired", "rejected"]);
let key = sessionStorage.getItem("ditfleet-key") || "";
let generation = 0, begin = () => {};

// Elements are filled with text only, so that a prompt cannot inject markup.
function element(tag, className, text) {
  const e = document.createElement(tag);
  if (className) e.className = className;
  if (text !== undefined) e.textContent = text;
  return e;
}
function link(href, text) { const a = element("a", "", text); a.href = href; return a; }
function set_text(e, text) { if (e.textContent !== text) e.textContent = text; }

// An element with a unit's result, or with a preview if there is no result yet. A video loads only its first frame until it
// is played.
function medium(source, result, text) {
  const video = result && result.media_type.startsWith("video/"), shown = element(video ? "video" : "img");
  if (video) { shown.preload = "metadata"; shown.muted = true; shown.setAttribute("aria-label", text); } else shown.alt = text;
  shown.src = source;
  return shown;
}

async function call(path, options = {}) {
  const headers = Object.assign({}, options.headers);
  if (key) headers.Authorization = "Bearer " + key;
  const response = await fetch(path, Object.assign({}, options, {headers}));
  if (response.status === 401) { ask_key(key ? "Unknown API key. Enter another key." : ""); throw new Error("an API key is required"); }
  return response;
}
async function call_json(path, options) {
  const response = await call(path, options);
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error ? body.error.message : "HTTP " + response.status);
  return body;
}

function ask_key(message) {
  $("key-button").hidden = false;
  $("key-error").hidden = !message;
  $("key-error").textContent = message;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}
function add_key_dialog() {
  const dialog = element("dialog"), form = element("form"), input = element("input"), about = element("div");
  const error = element("div", "error"), buttons = element("div", "buttons");
  dialog.id = "key-dialog"; form.method = "dialog"; error.id = "key-error"; error.hidden = true;
  input.id = "key"; input.type = "password"; input.autocomplete = "off"; input.setAttribute("aria-label", "key");
  about.append(element("b", "", "API key required"), element("p", "note", "The key is stored in this browser tab only and sent with every request."));
  buttons.append(element("button", "main", "Continue"));
  form.append(about, input, error, buttons);
  dialog.append(form);
  dialog.onclose = () => { key = input.value.trim(); sessionStorage.setItem("ditfleet-key", key); restart(); };
  document.body.append(dialog);
}

function duration(ms) { return ms < 1 ? (ms ? ms.toFixed(1) : 0) + " ms" : ms < 1000 ? Math.round(ms) + " ms" : ms < 60000 ? (ms / 1000).toFixed(1) + " s" : Math.floor(ms / 60000) + " min" + (ms < 600000 ? " " + Math.floor(ms / 1000 % 60) + " s" : ""); }
// What is predicted of an open job: its place in the queue and the time left.
function outlook(job) {
  const left = job.eta_ms ? Math.round((job.eta_ms - Date.now()) / 1000) : 0, ahead = job.position ?? -1;
  return [ahead === 0 ? "next" : ahead > 0 ? ahead + (ahead === 1 ? " job ahead" : " jobs ahead") : "", left > 0 ? (left < 60 ? left + " s" : duration(1000 * left)) + " left" : ""].filter(Boolean).join(" · ");
}
// "step 3/8", "decoding"
function reached(unit) { return !unit.total_steps ? "" : unit.step < unit.total_steps ? "step " + unit.step + "/" + unit.total_steps : "decoding"; }
function ago(ms) { const s = Math.max(0, (Date.now() - ms) / 1000); return s < 5 ? "now" : s < 60 ? Math.round(s) + " s ago" : s < 3600 ? Math.round(s / 60) + " min ago" : new Date(ms).toLocaleString(); }

function show_problem(message) { set_text($("problem"), message); }
async function refresh_ready() {
  let ok = false, text = "service unreachable";
  try {
    const body = await (await fetch("/readyz")).json();
    ok = body.ready; text = ok ? "ready" : body.reasons.join("; ") || "not ready";
  } catch (e) { /* keeps the text above */ }
  $("ready").replaceChildren(element("span", "dot " + (ok ? "ok" : "bad")), document.createTextNode(text));
}
// Runs the task now and then `every` ms after it has ended, while the page is visible. A task that returns true ends.
// While a task fails, what the page shows is old, and grey.
const failing = new Set();
function set_failing(task, fails) {
  if (fails) failing.add(task); else failing.delete(task);
  document.querySelector("main").classList.toggle("stale", failing.size > 0);
}
async function poll(task, every) {
  const mine = generation;
  while (mine === generation) {
    if (!document.hidden) {
      try {
        const done = await task();
        if (mine !== generation) return;
        set_failing(task, false);
        if (!failing.size) show_problem("");
        if (done === true) return;
      } catch (e) { if (mine === generation) { set_failing(task, true); show_problem(e.message); } }
    }
    await new Promise(resolve => setTimeout(resolve, every));
  }
}
function restart() { ++generation; failing.clear(); begin(); poll(refresh_ready, 2500); }

// --- phases -----------------------------------------------------------------------------------------
const PHASES = ["admission", "queue", "earlier attempts", "queued again", "not started", "until started", "run", "adapter", "text", "wait", "denoise", "vae", "encode", "store", "hand-over", "total"];
// A job that ran on a slow worker without a longer phase was slowed by the worker, too.
function blame_text(job) {
  const slow = job.blame ? job.blame.worker : job.worker_speed !== null && job.worker;
  return slow ? "worker " + slow + " slow" + (job.blame ? ": " + job.blame.phase : "") : job.blame ? job.blame.phase : "–";
}
function phase_class(name) { return "p-" + (PHASES.includes(name) ? name.replaceAll(" ", "-") : "other"); }
// Sets the bars of a track: [class name, from, to] each, as parts of the whole.
function set_bars(track, bars) {
  while (track.children.length > bars.length) track.lastChild.remove();
  bars.forEach(([name, from, to], i) => {
    const bar = track.children[i] || track.appendChild(element("i"));
    bar.className = name;
    bar.style.left = 100 * from + "%";
    bar.style.width = Math.max(0, 100 * (to - from)) + "%";
  });
}

const ICON = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' rx='4' fill='%233763e0'/%3E%3Ccircle cx='6' cy='6' r='3' fill='white'/%3E%3Crect x='7' y='8' width='6' height='6' rx='1' fill='%23a9c0ff'/%3E%3C/svg%3E";

// Adds the header; here: the path of this page. `task` starts the page, again after the key has changed.
function start_page(here, task) {
  const header = document.querySelector("header"), ready = element("span", "note"), nav = element("nav", "note"), button = element("button", "small", "Key");
  ready.id = "ready";
  for (const [href, text] of [["/", "Jobs"], ["/slow", "Slow jobs"], ["/fleet", "Fleet"], ["/openapi.json", "API"], ["/metrics", "Metrics"]]) {
    const a = link(href, text);
    if (href === here) a.setAttribute("aria-current", "page");
    nav.append(a);
  }
  button.id = "key-button"; button.hidden = !key; button.onclick = () => ask_key("");
  header.append(element("h1", "", "DiTFleet"), ready, element("span", "grow"), nav, button);
  add_key_dialog();
  document.head.append(Object.assign(element("link"), {rel: "icon", href: ICON}));
  begin = task;
  restart();
}

// What all pages share: the header, calls with a key, texts, polling, pictures and their viewer. A page calls start_page() once.
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
// Where this page fetches a link of an answer: from the service that sent the page, or the store of results.
function local(link) { const url = new URL(link, location.href); return url.pathname.startsWith("/v1/jobs/") ? url.pathname + url.search : link; }
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

// Keeps choices that are not empty in the page's address.
function keep_in_url(choices) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(choices)) if (value) query.set(name, value); else query.delete(name);
  history.replaceState(null, "", location.pathname + (String(query) && "?" + query));
}
const chosen = name => new URLSearchParams(location.search).get(name) || "";
// The select `range` chooses how many minutes a page shows; empty is an hour.
function use_range(changed) {
  const select = $("range");
  select.value = chosen("minutes");
  if (select.selectedIndex < 0) select.value = "";
  select.onchange = () => { keep_in_url({minutes: select.value}); changed(); };
}
const range_text = () => $("range").selectedOptions[0].textContent;

// Job n of a batch has the id BATCH-n.
const batch_of = id => id.match(/^batch_[0-9A-Za-z]+(?=(-\d+)?$)/)?.[0];
const submit_job = spec => call_json("/v1/jobs", {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(spec)});
const retry_job = id => call_json("/v1/jobs/" + encodeURIComponent(id) + "/retry", {method: "POST"});
const may_retry = job => Boolean(job.spec) && ["failed", "canceled", "expired"].includes(job.state);

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
function restart() { ++generation; failing.clear(); uploads.clear(); begin(); poll(refresh_ready, 2500); }

// --- pictures ---------------------------------------------------------------------------------------
// Uploads by their ids: promises of object URLs, because an <img> cannot send a key.
const uploads = new Map();
function upload_url(id) {
  if (!uploads.has(id)) uploads.set(id, call("/v1/uploads/" + id + "/content").then(async response => {
    if (!response.ok) throw new Error(response.status === 404 ? "the picture is not stored any more" : "HTTP " + response.status);
    return URL.createObjectURL(await response.blob());
  }));
  return uploads.get(id);
}
const inputs_of = spec => spec?.images || (spec?.image ? [spec.image] : []);

// Resolves once the picture is loaded.
async function load_picture(source, text = "") {
  const shown = medium(source, null, text);
  await shown.decode();
  return shown;
}
// A canvas of this size with what a mask replaces in one colour: what is transparent or, without transparency, white.
async function mask_layer(source, width, height) {
  const canvas = element("canvas", "mask"), ink = canvas.getContext("2d");
  canvas.width = width; canvas.height = height;
  ink.drawImage(await load_picture(source), 0, 0, width, height);
  const pixels = ink.getImageData(0, 0, width, height), bytes = pixels.data;
  let clear = false;
  for (let i = 3; i < bytes.length; i += 4) clear ||= bytes[i] < 255;
  for (let i = 0; i < bytes.length; i += 4) {
    bytes[i + 3] = clear ? 255 - bytes[i + 3] : bytes[i];
    [bytes[i], bytes[i + 1], bytes[i + 2]] = MASK_COLOR;
  }
  ink.putImageData(pixels, 0, 0);
  return canvas;
}
const MASK_COLOR = [255, 45, 150];

// Shows the pictures that a job was given, the mask over the first.
function show_inputs(container, job) {
  const ids = inputs_of(job.spec), mark = [...ids, job.spec?.mask].join();
  if (container.dataset.mark === mark) return;
  container.dataset.mark = mark;
  container.style.setProperty("--columns", ids.length > 1 ? 2 : 1);
  container.replaceChildren(...ids.map((id, i) => {
    const box = element("button", "picture");
    fill_input(box, id, i ? null : job.spec.mask, "input " + (ids.length > 1 ? i + 1 + " " : "") + "of " + (job.spec.prompt || job.id)).catch(e => {
      if (!box.firstElementChild) box.textContent = "not stored";
      box.title = e.message;
    });
    return box;
  }));
}
async function fill_input(box, id, mask, text) {
  const source = await upload_url(id), shown = await load_picture(source, text);
  box.replaceChildren(shown);
  box.shown = {source, text, facts: text + ", " + shown.naturalWidth + "×" + shown.naturalHeight, name: id.slice(0, 12)};
  box.onclick = () => view(box);
  if (!mask) return;
  const scale = Math.min(1, 800 / Math.max(shown.naturalWidth, shown.naturalHeight)), side = length => Math.max(1, Math.round(length * scale));
  box.append(await mask_layer(await upload_url(mask), side(shown.naturalWidth), side(shown.naturalHeight)));
}
// Shows a unit's result, or a preview until there is one.
function fill_result(box, job, unit, source) {
  const result = unit && unit.result, phases = Object.entries(unit?.phases_us || {}).map(([name, us]) => name + " " + duration(Math.round(us / 1000))).join(", ");
  const text = (result ? "" : "preview of ") + (job.spec?.prompt || "image " + (unit ? unit.unit : 0));
  box.shown = {source, result, text, name: job.id + "-" + (unit ? unit.unit : 0) + "." + (result ? result.media_type.split("/")[1] : "png"),
    facts: [job.spec?.prompt, result ? result.width + "×" + result.height + ", seed " + result.seed : "preview", adapters_of(job.spec), phases].filter(Boolean).join(" · ")};
  box.replaceChildren(medium(source, result, text));
  box.onclick = () => view(box);
  if (box === viewed) view(box);
}
function adapters_of(spec) {
  const uses = (spec?.loras || []).map(l => l.name + (l.scale === undefined || l.scale === 1 ? "" : " × " + l.scale) + (l.expert ? " (" + l.expert + ")" : ""));
  return uses.length ? "with " + uses.join(", ") : "";
}

// The viewer shows one box over the page; the arrow keys go through the results of the page.
let viewed = null;
function view(box) {
  const dialog = $("viewer"), {source, result, text, facts, name} = box.shown, shown = medium(source, result, text), all = results_beside(box);
  viewed = box;
  if (shown.localName === "video") shown.controls = shown.loop = true;
  dialog.querySelector(".media").replaceChildren(shown, ...[...box.querySelectorAll("canvas")].map(copy_canvas));
  dialog.querySelector(".facts").textContent = facts;
  Object.assign(dialog.querySelector("a"), {href: source, download: name});
  const [back, next] = dialog.querySelectorAll("[data-step]"), at = all.indexOf(box);
  back.disabled = at === 0; next.disabled = at === all.length - 1;
  dialog.querySelector(".note").textContent = all.length > 1 ? at + 1 + " of " + all.length : "";
  if (!dialog.open) dialog.showModal();
}
function copy_canvas(canvas) {
  const copy = canvas.cloneNode();
  copy.getContext("2d").drawImage(canvas, 0, 0);
  return copy;
}
// The results on the page in order, and the box itself.
function results_beside(box) { return [...document.querySelectorAll(".image, .picture")].filter(b => b === box || b.shown && b.className.includes("image")); }
function step_view(step) {
  const all = results_beside(viewed), next = all[all.indexOf(viewed) + step];
  if (next) view(next);
}
function add_viewer() {
  const dialog = element("dialog"), buttons = element("div", "buttons"), close = element("button", "", "Close");
  dialog.id = "viewer";
  close.dataset.close = "";
  for (const [step, text, label] of [[-1, "‹", "previous"], [1, "›", "next"]]) {
    const button = element("button", "", text);
    button.dataset.step = step; button.title = button.ariaLabel = label; button.onclick = () => step_view(step);
    buttons.append(button);
  }
  buttons.append(element("span", "note"), element("span", "grow"), Object.assign(element("a", "button", "Save"), {download: ""}), close);
  dialog.append(element("div", "media"), element("div", "facts"), buttons);
  dialog.onclose = () => { viewed = null; dialog.querySelector(".media").replaceChildren(); };  // stops a video
  dialog.onclick = e => { if (e.target === dialog || e.target === close) dialog.close(); };
  dialog.addEventListener("keydown", e => {  // before a video's own keys
    const step = {ArrowLeft: -1, ArrowRight: 1}[e.key];
    if (!step) return;
    e.preventDefault(); e.stopPropagation();
    step_view(step);
  }, true);
  document.body.append(dialog);
}

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

// --- requests as code ---------------------------------------------------------------------------------
function quoted(text) { return "'" + text.replaceAll("'", "'\\''") + "'"; }
// With keys, the code reads the key from the environment, so that it shows no secret.
const SNIPPETS = {
  curl: (method, url, body) => `curl -s ${method === "GET" ? "" : `-X ${method} `}${quoted(url)}` + (key ? ' \\\n  -H "Authorization: Bearer $DITFLEET_KEY"' : "") +
    (body ? ` \\\n  -H 'Content-Type: application/json' \\\n  -d ${quoted(body)}` : ""),
  Python: (method, url, body) => `import json, os, urllib.request\n\nheaders = {${[key && '"Authorization": "Bearer " + os.environ["DITFLEET_KEY"]', body && '"Content-Type": "application/json"'].filter(Boolean).join(", ")}}\n` +
    (body ? `body = json.dumps(json.loads(r\'\'\'${body}\'\'\')).encode()\n` : "body = None\n") +
    `request = urllib.request.Request(${JSON.stringify(url)}, body, headers, method="${method}")\nwith urllib.request.urlopen(request) as answer:\n    print(answer.read().decode())`,
  JavaScript: (method, url, body) => `const answer = await fetch(${JSON.stringify(url)}, {\n  method: "${method}",\n  headers: {${[key && "Authorization: `Bearer ${process.env.DITFLEET_KEY}`", body && '"Content-Type": "application/json"'].filter(Boolean).join(", ")}},\n` +
    (body ? `  body: JSON.stringify(${body}),\n` : "") + "});\nconsole.log(await answer.text());",
};

// Choices of copy_from() with a job's request as code. `make`: returns its body, or promises it.
const as_code = make => Object.fromEntries(Object.entries(SNIPPETS).map(([name, snippet]) =>
  ["as " + name, async () => snippet("POST", location.origin + "/v1/jobs", JSON.stringify(await make()))]));
async function copy_text(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea");  // a page of http:// on another host has no clipboard
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
// A select copies what its choices make: text, or a promise of it.
function copy_from(select, makers, told) {
  for (const name of Object.keys(makers)) select.append(element("option", "", name));
  select.onchange = async () => {
    const make = makers[select.value];
    select.value = "";
    try { if (make) { await copy_text(await make()); told(""); } } catch (e) { told(e.message); }
  };
}

const ICON = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' rx='4' fill='%233763e0'/%3E%3Ccircle cx='6' cy='6' r='3' fill='white'/%3E%3Crect x='7' y='8' width='6' height='6' rx='1' fill='%23a9c0ff'/%3E%3C/svg%3E";

// Adds the header; here: the path of this page. `task` starts the page, again after the key has changed.
function start_page(here, task) {
  const header = document.querySelector("header"), ready = element("span", "note"), nav = element("nav", "note"), button = element("button", "small", "Key");
  ready.id = "ready";
  for (const [href, text] of [["/", "Jobs"], ["/slow", "Slow jobs"], ["/fleet", "Fleet"], ["/docs", "API"], ["/metrics", "Metrics"]]) {
    const a = link(href, text);
    if (href === here) a.setAttribute("aria-current", "page");
    nav.append(a);
  }
  button.id = "key-button"; button.hidden = !key; button.onclick = () => ask_key("");
  header.append(element("h1", "", "DiTFleet"), ready, element("span", "grow"), nav, button);
  add_key_dialog();
  add_viewer();
  document.head.append(Object.assign(element("link"), {rel: "icon", href: ICON}));
  begin = task;
  restart();
}

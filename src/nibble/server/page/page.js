// The page of `nibble serve`: the chat. What models and servers say is only ever set as text.
import { $, ask, connect, el, events, plural, seconds, served, short, whole } from "./api.js";
import { poll, push } from "./cache.js";

const turns = []; // {role, content, thoughts, coming, note, error, node}
let stopper = null; // of the answer that is coming

function show(turn) {
  const log = $("log");
  const below = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  const [thoughts, said, foot] = turn.node.querySelectorAll(".thoughts, .said, .foot");
  thoughts.hidden = !turn.thoughts;
  thoughts.lastChild.textContent = turn.thoughts;
  turn.content.split(/^```[^\n]*(?:\n|$)/m).forEach((text, i) => {
    let block = said.children[i]; // even: prose, odd: code
    if (!block) {
      block = said.appendChild(i % 2 ? el("pre", { tabIndex: 0 }, el("code")) : el("div", { className: "prose" }));
    }
    const inner = i % 2 ? block.firstChild : block;
    const wanted = i % 2 ? text : text.replace(/^\n+|\n+$/g, "");
    if (inner.textContent !== wanted) inner.textContent = wanted;
  });
  const parts = [];
  if (turn.error) parts.push(el("span", { className: "error", role: "alert", textContent: turn.error }));
  if (turn.note) parts.push(el("span", { className: "note", textContent: turn.note }));
  if (turn.role === "assistant" && !turn.coming) {
    if (turn.content) parts.push(el("button", { type: "button", textContent: "Copy", onclick: (e) => copy(turn, e.target) }));
    if (turn === turns.at(-1)) {
      parts.push(el("button", { type: "button", textContent: turn.content ? "Regenerate" : "Try again", onclick: regenerate }));
    }
  }
  foot.replaceChildren(...parts);
  if (below) log.scrollTop = log.scrollHeight;
}

function add(role, content, coming = false) {
  const said = el("div", { className: "said" });
  const who = el("div", { className: "who", textContent: role === "user" ? "You" : "Model" });
  const thoughts = el("details", { className: "thoughts" }, el("summary", { textContent: "Reasoning" }), el("div", { className: "thought" }));
  const node = el("article", { className: `turn ${role}` }, who, thoughts, said, el("div", { className: "foot" }));
  const turn = { role, content, thoughts: "", coming, note: "", error: "", node };
  turns.push(turn);
  $("empty").hidden = true;
  $("log").append(node);
  if (turns.length > 1) show(turns.at(-2)); // it is not the last any more
  show(turn);
  $("log").scrollTop = $("log").scrollHeight;
  return turn;
}

function drop(turn) {
  turns.splice(turns.indexOf(turn), 1);
  turn.node.remove();
}

async function copy(turn, button) {
  try {
    await navigator.clipboard.writeText(turn.content);
  } catch { // not over plain HTTP, but at localhost
    const field = document.body.appendChild(el("textarea", { value: turn.content, className: "hidden" }));
    field.select();
    document.execCommand("copy");
    field.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function question() {
  const said = turns.filter((turn) => turn.content).map(({ role, content }) => ({ role, content }));
  const system = $("system").value.trim();
  const body = { model: served.model, messages: system ? [{ role: "system", content: system }, ...said] : said };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if ($(name).value !== "") body[name] = $(name).valueAsNumber;
  }
  return JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } });
}

async function answer() {
  stopper = new AbortController();
  coming(true);
  const body = { method: "POST", headers: { "Content-Type": "application/json" }, signal: stopper.signal };
  const clock = { start: performance.now(), first: 0, last: 0, pieces: 0, usage: null };
  let turn = null;
  try {
    if (!served.model) await connect();
    body.body = question();
    turn = add("assistant", "", true);
    turn.note = "waiting for the first token";
    show(turn);
    for await (const event of events(await ask("v1/chat/completions", body))) take(turn, event, clock);
  } catch (error) {
    turn ??= add("assistant", "", true);
    if (error.name === "AbortError") clock.stopped = true;
    else turn.error = error.message;
  }
  cancelAnimationFrame(turn.frame);
  stopper = null;
  turn.coming = false;
  turn.note = about(turn, clock);
  coming(false);
  show(turn);
}

function take(turn, event, clock) {
  if (event.error) throw new Error(event.error.message);
  clock.usage = event.usage ?? clock.usage;
  for (const choice of event.choices) {
    clock.last = performance.now();
    if (!clock.first) {
      clock.first = clock.last;
      push("ttft", (clock.first - clock.start) / 1000);
    }
    clock.pieces += 1;
    clock.reason = choice.finish_reason ?? clock.reason;
    turn.content += choice.delta.content ?? "";
    turn.thoughts += choice.delta.reasoning_content ?? "";
  }
  cancelAnimationFrame(turn.frame);
  turn.frame = requestAnimationFrame(() => {
    turn.note = about(turn, clock);
    show(turn);
  });
}

function about(turn, { start, first, last, pieces, usage, reason, stopped }) {
  const parts = [];
  const tokens = usage?.completion_tokens ?? pieces; // pieces of a slow reader may hold several
  if (first) {
    parts.push(`${usage ? "" : "about "}${plural(tokens, "token")}`);
    if (last > first && tokens > 1) parts.push(`${short((tokens - 1) / ((last - first) / 1000))} tokens/s`);
    parts.push(`first after ${seconds((first - start) / 1000)}`);
  }
  if (usage) {
    parts.push(`${whole(usage.prompt_tokens_details?.cached_tokens ?? 0)} of ${whole(usage.prompt_tokens)} prompt tokens cached`);
  }
  if (stopped) parts.push("stopped");
  else if (reason === "length") parts.push("cut at its most tokens");
  else if (!turn.content && !turn.thoughts && !turn.error && reason) parts.push("an empty answer");
  return parts.join(" · ");
}

function coming(yes) {
  $("send").disabled = yes;
  $("stop").disabled = !yes;
  $("clear").disabled = yes;
  $("log").setAttribute("aria-busy", yes);
  if (!yes && (document.activeElement === $("stop") || document.activeElement === document.body)) $("text").focus();
}

function regenerate() {
  if (stopper) return;
  drop(turns.at(-1));
  answer();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (stopper || !text) return;
  const last = turns.at(-1);
  if (last?.role === "assistant" && !last.content) drop(last);
  add("user", text);
  $("text").value = "";
  answer();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!stopper) $("composer").requestSubmit();
});
$("settings").addEventListener("invalid", () => ($("settings").open = true), true); // or nobody sees which
$("stop").addEventListener("click", () => stopper?.abort());
addEventListener("keydown", (event) => event.key === "Escape" && stopper?.abort());
$("clear").addEventListener("click", () => {
  while (turns.length) drop(turns[0]);
  $("empty").hidden = false;
  $("text").focus();
});

// On a phone they would take half of the chat.
$("settings").open = !matchMedia("(max-width: 599px)").matches;
$("text").focus();
poll();

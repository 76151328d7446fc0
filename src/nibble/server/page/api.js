// What both views share: elements, numbers in words, and calls of the API.
export const $ = (id) => document.getElementById(id);

export function el(tag, props = {}, ...kids) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...kids);
  return node;
}

// Numbers in words

export const whole = (n) => Math.round(n).toLocaleString("en");
export const short = (n) => (n >= 100 ? whole(n) : n.toFixed(n >= 10 ? 1 : 2));
export const seconds = (s) => (s < 1 ? `${whole(s * 1000)} ms` : `${short(s)} s`);
export const percent = (x) => `${(100 * x).toFixed(x > 0 && x < 0.01 ? 2 : 0)} %`;
export const plural = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const at = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(n, 1)) / 10));
  return at ? `${(n / 1024 ** at).toFixed(1)} ${units[at]}` : `${n} B`;
}

// The API

export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = $("key").value.trim(); // in this field and nowhere else
  if (/[^\x21-\x7e]/.test(key)) throw new Error("An API key has only letters, digits and signs of ASCII.");
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const said = await response.json().then((body) => body.error.message, () => response.statusText);
  const words = {
    401: "The server wants an API key, or another one: enter it at the top of this page.",
    429: `The server is full: ${said}.`,
  };
  throw Object.assign(new Error(words[response.status] ?? said), { status: response.status });
}

// What /health says, whatever its status is.
export async function health() {
  const response = await fetch("health", { cache: "no-store" }).catch(() => null);
  const body = await response?.json().catch(() => null);
  if (!body) throw new Error("The server cannot be reached. Is it still running?");
  return body;
}

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const cut = "The connection broke off in the middle of the answer.";
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error(cut);
    });
    if (done) throw new Error(cut);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line.startsWith("data: [DONE]")) return;
      yield JSON.parse(line.slice(6));
    }
  }
}

export const served = { model: null, certificate: null };

export async function connect() {
  const list = (await (await ask("v1/models")).json()).data;
  $("model").textContent = served.model = list[0].id;
  document.title = `${served.model} – Nibble`;
  served.certificate = list[0].certificate;
  // What is left empty is the model's own.
  const defaults = { temperature: 1, top_p: 1, ...list[0].default_sampling_params };
  for (const name of ["temperature", "top_p"]) $(name).placeholder = defaults[name];
}

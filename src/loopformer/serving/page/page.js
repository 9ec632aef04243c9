// The page at `/` asks the server that sent it, and draws what comes back. From top to bottom:
//
//   server      requests, refusals, server-sent events; whether it is up, and its API key
//   fields      what was typed, and what is wrong with it
//   schedule    a bar of length 1, cut into steps whose borders move
//   texts       a text per budget, with its time and compute as bars
//   lens        the guesses at each budget, and after each loop of the full one
//   curve       perplexity against compute

const $ = (id) => document.getElementById(id);
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

let card = null; // the model, as /v1/models describes it
let fresh = false; // whether that was heard since the server last came up
let schedule = [1]; // the weights of the steps of the user's own schedule, whole numbers

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function amount(number) {
  const units = [[1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1e3, "kFLOP"], [0, "FLOP"]];
  const [size, unit] = units.find(([least]) => number >= least);
  return `${(number / (size || 1)).toPrecision(3)} ${unit}`;
}

const loops = (count) => (count === 1 ? "1 loop" : `${count} loops`);

// Server

class Refusal extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

async function ask(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  const method = body === undefined ? "GET" : "POST";
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, body: JSON.stringify(body) });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refusal("The server does not answer.");
  }
  if (answer.ok) return answer;
  const said = (await answer.json().catch(() => null))?.error;
  let message = said?.message ?? `The server answered with status ${answer.status}.`;
  const seconds = answer.headers.get("Retry-After");
  if (seconds && !message.includes("again")) message += ` Try again in ${seconds} s.`;
  throw new Refusal(message, answer.status, said?.param);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Refusal("The answer broke off.");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.slice("data: ".length);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Refusal(event.error.message);
        yield event;
      }
    }
  } catch (error) {
    throw error instanceof TypeError ? new Refusal("The connection to the server was lost.") : error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

const TROUBLE = {
  draining: "The server is shutting down: it finishes what runs and takes nothing new.",
  starting: "The model is being loaded.",
  lost: "The engine behind the server was lost; another one is being started.",
  hung: "The engine behind the server hangs; another one is being started.",
};

async function watch() {
  try {
    if (!document.hidden) await greet();
  } finally {
    setTimeout(watch, 2000);
  }
}

async function greet() {
  const answer = fetch("ready", { signal: AbortSignal.timeout(5000) }).then((answered) => answered.json());
  const status = await answer.then((said) => said.status, () => null);
  const silent = `The server at ${location.host} does not answer; this page keeps trying.`;
  $("state").textContent = status ?? "no answer";
  $("state").className = status === "ready" ? "up" : "down";
  $("trouble").hidden = status === "ready";
  $("trouble").textContent = status === null ? silent : (TROUBLE[status] ?? `The server is ${status}.`);
  if (status === null) fresh = false;
  if (status === "ready" && !fresh && $("key-form").hidden) await connect();
}

async function connect() {
  const before = card;
  try {
    card = (await (await ask("v1/models")).json()).data[0];
  } catch (refusal) {
    say(refusal, {}, (message) => ($("model").textContent = message));
    return;
  }
  fresh = true;
  $("key-form").hidden = true;
  $("model").textContent = `${card.id} · 1 to ${loops(card.loops)} · ${card.max_model_len} tokens of context`;
  $("untuned").hidden = card.tuned_to_answer !== false;
  for (const id of ["go", "measure-go", "own"]) $(id).disabled = false;
  if (before?.loops === card.loops) return;
  $("budget").max = card.loops;
  $("budgets").replaceChildren(...usualBudgets().map(budgetBox));
  setSchedule(read(card.trajectory));
  $("own").checked = !isEqual(card.trajectory);
  showEditor();
}

function askForKey() {
  const given = sessionStorage.getItem("key");
  $("key-form").hidden = false;
  $("key").focus();
  wrong("key", given ? "The server does not take this key." : "This server asks for a key.");
}

function useKey(submit) {
  submit.preventDefault();
  const key = $("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) return wrong("key", "A key has no spaces, and only letters and signs of ASCII.");
  wrong("key", "");
  sessionStorage.setItem("key", key);
  return connect();
}

// Fields

function wrong(id, message) {
  $(`${id}-wrong`).textContent = message;
  $(id).setAttribute("aria-invalid", String(message !== ""));
}

function clearWrong(form) {
  for (const field of form.querySelectorAll("[aria-invalid]")) wrong(field.id, "");
}

// A refusal is said at the field it is about, `fields` has their ids by the server's names; the rest `elsewhere`.
function say(refusal, fields, elsewhere) {
  if (refusal.name === "AbortError") return undefined;
  if (!(refusal instanceof Refusal)) throw refusal;
  if (refusal.status === 401) return askForKey();
  const about = refusal.param ?? refusal.message.toLowerCase();
  const named = (name) => (refusal.param ? about === name : about.includes(name));
  const name = refusal.status === 400 && Object.keys(fields).find(named);
  if (!name) return elsewhere(refusal.message);
  wrong(fields[name], refusal.message);
  return $(fields[name]).focus();
}

function numberOf(id) {
  if ($(id).validity.badInput) throw new Refusal("Write a number.", 400, id);
  return $(id).value === "" ? undefined : Number($(id).value);
}

// 1, L/4, L/2 and L.
function usualBudgets() {
  return [...new Set([8, 4, 2, 1].map((part) => String(Math.ceil(card.loops / part))))];
}

function budgetBox(budget) {
  const box = make("input");
  Object.assign(box, { type: "checkbox", value: budget, checked: true });
  return make("label", "", box, loops(Number(budget)));
}

// Schedule

const gcd = (a, b) => (b ? gcd(b, a % b) : a);
const equal = (count) => Array(count).fill(1);
const isEqual = (trajectory) => /^\d+$/.test(trajectory); // as `written` has it

function written(weights) {
  const common = weights.reduce(gcd);
  return new Set(weights).size === 1 ? String(weights.length) : weights.map((weight) => weight / common).join("-");
}

// "4" is four equal steps; "2-1-2-3", "0.25,0.25,0.5" and "1/4,1/4,1/2" are weights.
function read(text) {
  const plain = text.replace(/\s/g, "");
  const form = new Refusal("Write weights, such as 2-1-2-3, or a number of equal steps.", 400, "trajectory");
  const parts = plain.split(/[-,]/).map((part) => {
    if (!/^(\d+(\.\d{0,6})?|\d+\/\d+)$/.test(part)) throw form;
    const [top, bottom = "1"] = part.split("/");
    const scale = 10 ** (top.split(".")[1] ?? "").length;
    return [Math.round(top * scale), bottom * scale];
  });
  const count = parts.length === 1 ? parts[0][0] / parts[0][1] : parts.length;
  if (count > card.loops) throw new Refusal(`This model takes at most ${loops(card.loops)}.`, 400, "trajectory");
  if (parts.length === 1 && Number.isInteger(count) && count > 0) return equal(count);
  const common = parts.reduce((all, [, bottom]) => (all * bottom) / gcd(all, bottom), 1);
  const weights = parts.map(([top, bottom]) => (top * common) / bottom);
  if (parts.length === 1 || !weights.every((weight) => weight > 0 && Number.isSafeInteger(weight))) throw form;
  return weights;
}

function nameOf(trajectory) {
  const budget = loops(read(trajectory).length);
  return isEqual(trajectory) ? budget : `${budget}, ${trajectory}`;
}

// The user's own schedule, if there is one.
function ownSchedule() {
  return $("own").checked ? [written(read($("trajectory").value))] : [];
}

function showEditor() {
  $("editor").hidden = !$("own").checked;
}

function setSchedule(weights, keepText = false) {
  schedule = weights;
  wrong("trajectory", "");
  if (!keepText) $("trajectory").value = written(weights);
  $("budget").value = weights.length;
  const flops = card.flops_per_token[weights.length - 1];
  $("budget-said").textContent = `${loops(weights.length)}, ${amount(flops)} per token`;
  drawBar();
}

function drawBar() {
  const bar = $("bar");
  if (bar.querySelectorAll(".step").length !== schedule.length) {
    const steps = schedule.map(() => make("div", "step", make("span")));
    steps[0].classList.add("first");
    steps.at(-1).classList.add("last");
    bar.replaceChildren(...steps, ...schedule.slice(1).map((_, index) => makeBorder(index)));
  }
  const total = sum(schedule);
  const percent = (part) => Number(((100 * part) / total).toFixed(1));
  bar.querySelectorAll(".step").forEach((step, index) => {
    step.style.flexGrow = schedule[index];
    step.firstChild.textContent = `${percent(schedule[index])} %`;
  });
  bar.querySelectorAll(".border").forEach((border, index) => {
    const at = (count) => sum(schedule.slice(0, count));
    border.style.left = `${(100 * at(index + 1)) / total}%`;
    border.ariaValueMin = percent(at(index));
    border.ariaValueMax = percent(at(index + 2));
    border.ariaValueNow = percent(at(index + 1));
    border.ariaValueText = `${percent(at(index + 1))} % of the way`;
  });
}

const BY_KEY = { ArrowLeft: -1, ArrowDown: -1, PageDown: -4, Home: -Infinity };
Object.assign(BY_KEY, { ArrowRight: 1, ArrowUp: 1, PageUp: 4, End: Infinity });

function makeBorder(index) {
  const border = make("div", "border");
  Object.assign(border, { role: "slider", tabIndex: 0, ariaLabel: `End of step ${index + 1}` });
  border.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    border.focus();
    border.setPointerCapture(event.pointerId);
  });
  border.addEventListener("pointermove", (event) => {
    if (!border.hasPointerCapture(event.pointerId)) return;
    const { left, width } = $("bar").getBoundingClientRect();
    moveBorder(index, (total) => Math.round(((event.clientX - left) / width) * total));
  });
  border.addEventListener("keydown", (event) => {
    if (!(event.key in BY_KEY)) return;
    event.preventDefault();
    moveBorder(index, (total, place) => place + BY_KEY[event.key]);
  });
  return border;
}

// Put the border after step `index` where `where` says, in units of which the bar has `total`; no step vanishes.
function moveBorder(index, where) {
  const fine = Math.ceil((4 * card.loops) / sum(schedule));
  const weights = schedule.map((weight) => weight * fine);
  const start = sum(weights.slice(0, index));
  const both = weights[index] + weights[index + 1];
  const place = where(sum(weights), start + weights[index]);
  weights[index] = Math.min(Math.max(place - start, 1), both - 1);
  weights[index + 1] = both - weights[index];
  setSchedule(weights);
}

function typeSchedule(complain) {
  try {
    setSchedule(read($("trajectory").value), true);
    return true;
  } catch (refusal) {
    if (complain) wrong("trajectory", refusal.message);
    return false;
  }
}

// Texts

const MOST_BITS = 10; // of surprise, from which on a token has the full colour
const SHORTEST_GAP = 2; // milliseconds; tokens that arrive closer together count as one arrival
const SAMPLING = ["max_tokens", "temperature", "top_p", "seed"];
let running = null; // what stops the texts that stream now
let texts = []; // that are shown, those of fewer loops first
let chosen = null; // the token under the lens

async function generate() {
  stop();
  clearWrong($("ask"));
  const own = running = new AbortController();
  $("stop").disabled = false;
  $("lens").hidden = true;
  try {
    const common = { prompt: $("prompt").value, stream: true, logprobs: 0 };
    for (const id of SAMPLING) common[id] = numberOf(id);
    common.seed ??= Math.floor(Math.random() * 1e6); // drawn here, as all texts share it
    const budgets = [...$("budgets").querySelectorAll(":checked")].map((box) => box.value);
    const trajectories = [...new Set([...budgets, ...ownSchedule()])];
    if (trajectories.length === 0) throw new Refusal("Choose a budget.");
    trajectories.sort((a, b) => read(a).length - read(b).length);
    const prompt = (await (await ask("tokenize", { prompt: common.prompt }, own.signal)).json()).tokens;
    texts = trajectories.map((trajectory) => new Text(trajectory, common.prompt, prompt));
    chosen = null;
    $("lens-said").textContent = "Choose a token of a text.";
    $("texts-hint").hidden = false;
    $("texts").replaceChildren(...texts.map((text) => text.element));
    const inTurn = $("in-turn").checked;
    $("texts-said").textContent = inTurn ? "The texts run in turn." : "The texts run all at once.";
    $("sampling-said").textContent = describeSampling(common);
    const streams = texts.map((text) => () => text.stream(common, own.signal));
    if (inTurn) for (const stream of streams) await stream();
    else await Promise.all(streams.map((stream) => stream()));
    $("texts-said").textContent = own.signal.aborted ? "Stopped." : takeaway(inTurn);
    if (chosen === null) texts.at(-1).tokens.querySelector(".token")?.click();
  } catch (refusal) {
    if (refusal.name === "AbortError") return;
    own.abort();
    texts = [];
    $("texts").replaceChildren();
    $("texts-hint").hidden = true;
    $("texts-said").textContent = "Nothing yet.";
    $("sampling-said").textContent = "";
    const fields = Object.fromEntries(["prompt", "trajectory", ...SAMPLING].map((id) => [id, id]));
    say(refusal, fields, (message) => ($("texts-said").textContent = message));
  } finally {
    if (running === own) $("stop").disabled = true;
  }
}

function stop() {
  running?.abort();
  $("stop").disabled = true;
}

function describeSampling({ temperature = 1, top_p = 1, seed }) {
  if (temperature === 0) return "Greedy: every token is the most likely one.";
  return `Temperature ${temperature}, top-p ${top_p}, seed ${seed}. The same seed gives the same texts.`;
}

// What more loops cost, in a sentence. The time is that between tokens, as the first token waits for the prompt and,
// in a fresh server, for much else.
function takeaway(inTurn) {
  const [least, most] = [texts[0], texts.at(-1)];
  const times = (ratio) => `${ratio.toFixed(1)} times`;
  const gaps = texts.map((text) => median(text.gaps));
  const slower = gaps.at(-1) / gaps[0];
  if (texts.length === 1 || !Number.isFinite(slower)) return "Done.";
  if (!inTurn) return "The texts shared the server, so their times are not those of a text alone.";
  const cost = `Per token, ${most.title.textContent} took ${times(slower)} as long as ${least.title.textContent}, for
    ${times(most.flops / least.flops)} the compute (median time between tokens).`;
  const odd = gaps.findIndex((gap, index) => texts[index].flops > texts[index - 1]?.flops && gap < gaps[index - 1]);
  if (odd < 0) return cost;
  return `${cost} ${texts[odd].title.textContent} came faster than ${texts[odd - 1].title.textContent}, so the machine
    is busy with other work and these times say little.`;
}

function median(values) {
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
}

class Text {
  constructor(trajectory, prompt, ids) {
    this.ids = [...ids]; // of prompt and text
    this.count = 0;
    this.seconds = 0; // from the request to the last token
    this.arrived = null; // when the tokens before `arriving` came
    this.arriving = 0; // tokens since then
    this.gaps = []; // milliseconds before each token but the first
    this.held = ""; // text whose tokens are not drawn yet
    this.pending = []; // tokens without text: parts of a character
    this.title = make("h3");
    this.time = new Bar("time");
    this.compute = new Bar("compute");
    this.figures = make("p", "figures");
    this.tokens = make("p", "tokens", make("span", "prompt", prompt));
    this.note = make("p", "note", "Waiting.");
    this.note.setAttribute("role", "status");
    const facts = make("div", "facts", this.title, this.time.element, this.compute.element, this.figures);
    this.element = make("article", "card text", facts, make("div", "", this.tokens, this.note));
    this.follow(trajectory);
    this.tokens.addEventListener("keydown", (event) => this.steer(event));
  }

  follow(trajectory) {
    this.trajectory = trajectory;
    this.title.textContent = nameOf(trajectory);
    this.flops = card.flops_per_token[read(trajectory).length - 1];
    this.measure();
  }

  async stream(common, signal) {
    this.began = performance.now();
    this.note.textContent = "";
    try {
      // Equal steps are asked for as a budget, which a busy server may lower.
      const depth = isEqual(this.trajectory) ? { budget: Number(this.trajectory) } : { trajectory: this.trajectory };
      const answer = await ask("v1/completions", { ...common, ...depth }, signal);
      for await (const event of events(answer)) {
        if (event.loopformer?.degraded) this.lower(event.loopformer);
        for (const choice of event.choices) this.add(choice);
      }
    } catch (error) {
      if (error.status === 400 || error.status === 401) throw error;
      if (error.name !== "AbortError" && !(error instanceof Refusal)) throw error;
      this.note.textContent = error instanceof Refusal ? error.message : "Stopped.";
      this.note.classList.toggle("failed", error instanceof Refusal);
    }
  }

  lower({ trajectory, asked_budget }) {
    this.follow(trajectory);
    this.note.textContent = `The server is busy and grants this instead of ${loops(asked_budget)}.`;
  }

  add({ text, logprobs }) {
    logprobs.tokens.forEach((token, index) => {
      this.pending.push({ token, logprob: logprobs.token_logprobs[index], place: this.ids.length });
      this.ids.push(logprobs.token_ids[index]);
    });
    this.held += text;
    while (this.held && this.pending.length) {
      const whole = this.held.startsWith(this.pending[0].token);
      const parts = this.pending.splice(0, whole ? 1 : this.pending.length);
      const shown = whole ? parts[0].token : this.held;
      this.held = this.held.slice(shown.length);
      this.draw(shown, Math.exp(sum(parts.map((part) => part.logprob))), parts[0].place);
    }
    if (logprobs.tokens.length === 0) return; // the chunk before the first token
    this.count += logprobs.tokens.length;
    const now = performance.now();
    this.seconds = (now - this.began) / 1000;
    this.timeTokens(logprobs.tokens.length, now);
    this.measure();
  }

  // Several events may be read at once, although their tokens were made one after another: they share their time.
  timeTokens(count, now) {
    this.arriving += this.arrived === null ? 0 : count;
    const passed = now - (this.arrived ?? -Infinity);
    if (passed < SHORTEST_GAP) return;
    this.gaps.push(...Array(this.arriving).fill(passed / this.arriving));
    this.arrived = now;
    this.arriving = 0;
  }

  // In tokens per second, the prompt included, so that it says what the bar of time says.
  get speed() {
    return this.count / this.seconds;
  }

  draw(shown, probability, place) {
    const word = shown.trimStart() || shown;
    const token = make("span", "token", word);
    const tabIndex = this.tokens.querySelector(".token") ? -1 : 0; // the arrow keys lead on from the first
    Object.assign(token, { role: "button", tabIndex, ariaPressed: "false" });
    token.title = `probability ${probability.toPrecision(2)}`;
    token.style.setProperty("--surprise", Math.min(1, -Math.log2(probability) / MOST_BITS).toFixed(3));
    token.addEventListener("click", () => look(this, token, place));
    this.tokens.append(shown.slice(0, shown.length - word.length), token); // the space before it has no colour
  }

  measure() {
    const speed = this.count ? this.speed.toFixed(0) : "–";
    const tokens = this.count === 1 ? "1 token" : `${this.count} tokens`;
    const figures = [tokens, `${speed} tokens/s`];
    this.figures.replaceChildren(...figures.map((figure) => make("span", "", figure)));
    const longest = Math.max(...texts.map((text) => text.seconds));
    const dearest = Math.max(...texts.map((text) => text.flops * text.count));
    for (const text of texts) {
      text.time.draw(text.seconds / longest, `${text.seconds.toFixed(2)} s`);
      text.compute.draw((text.flops * text.count) / dearest, amount(text.flops * text.count));
    }
  }

  steer(event) {
    const by = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
    if (by) {
      const next = event.target[by];
      if (!next?.classList.contains("token")) return;
      event.target.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.target.click();
    } else {
      return;
    }
    event.preventDefault();
  }
}

// A bar of a text. All bars of a name share a scale: the longest is full.
class Bar {
  constructor(name) {
    this.fill = make("span", `fill ${name}`);
    this.value = make("span", "value", "–");
    this.element = make("p", "measure", make("span", "name", name), make("span", "track", this.fill), this.value);
  }

  draw(share, value) {
    this.fill.style.width = `${100 * (share || 0)}%`;
    this.value.textContent = share ? value : "–";
  }
}

// Lens

let looking = null; // what stops the look that is under way

async function look(text, token, place) {
  looking?.abort();
  const own = looking = new AbortController();
  if (chosen) chosen.ariaPressed = "false";
  chosen = token;
  token.ariaPressed = "true";
  const prompt = text.ids.slice(0, place);
  const full = String(card.loops);
  const trajectories = [...new Set([...usualBudgets(), text.trajectory, full])];
  trajectories.sort((a, b) => read(a).length - read(b).length);
  try {
    const loopsAlong = new Map();
    for (const trajectory of trajectories) {
      const answer = await ask("lens", { prompt, trajectory, top: 5 }, own.signal);
      loopsAlong.set(trajectory, (await answer.json()).loops);
    }
    const drawn = text.ids[place];
    const predictions = [...loopsAlong].map(([trajectory, loops]) => ({ ...loops.at(-1), title: nameOf(trajectory) }));
    const states = loopsAlong.get(full).map((state) => ({ ...state, title: `loop ${state.loop}` }));
    showGuesses("lens-budgets", predictions, drawn, "not trained", {
      all: "The model was trained to make each of these predictions.",
      some: "The model was trained to make only some of these predictions.",
      unknown: "Nothing says which of these predictions the model was trained to make.",
    });
    showGuesses("lens-loops", states, drawn, "intermediate", {
      all: "The model was trained to make each of these predictions.",
      some: `The model was trained to make only those marked as predictions. The others are intermediate states: they
        may still hold the token just read.`,
      unknown: "Nothing says after which loops the model was trained to predict.",
    });
    $("lens").hidden = false;
    $("lens-said").textContent = `The model's guesses for the token “${visible(token.textContent)}” in the text of
      ${text.title.textContent}. Bold: among the five most likely.`;
  } catch (refusal) {
    say(refusal, {}, (message) => ($("lens-said").textContent = message));
  }
}

// A card for each guess, and the sentence that is true of their training.
function showGuesses(id, guesses, drawn, untrained, sentences) {
  const trained = guesses.map((guess) => guess.trained);
  const key = trained.includes(null) ? "unknown" : trained.every(Boolean) ? "all" : "some";
  $(`${id}-said`).textContent = sentences[key];
  $(id).replaceChildren(...guesses.map((guess) => guessCard(guess, drawn, untrained)));
}

function guessCard({ title, trained, top }, drawn, untrained) {
  const rows = top.map(({ id, token, logprob }) => {
    const percent = 100 * Math.exp(logprob);
    const bar = make("span", "bar");
    bar.style.width = `${percent}%`;
    const word = make("span", "word", visible(token));
    const chance = make("span", "chance", `${percent.toFixed(percent < 10 ? 1 : 0)} %`);
    return make("div", id === drawn ? "guess chosen" : "guess", bar, word, chance);
  });
  const kind = { true: "prediction", false: untrained, null: "" }[trained];
  const heading = make("h4", "", title, make("span", "kind", kind));
  return make("li", trained === false ? "card untrained" : "card", heading, ...rows);
}

const visible = (token) => token.replaceAll("\n", "⏎").replace(/^\s+$/, (blank) => "␣".repeat(blank.length));

// Curve

const MOST_POINTS = 12;
let points = []; // trajectory, budget, flops, perplexity; whether it is the user's own schedule

async function measure() {
  clearWrong($("measure"));
  if ($("own").checked && !typeSchedule(true)) return;
  const step = Math.max(1, card.loops / MOST_POINTS);
  const count = Math.min(card.loops, MOST_POINTS);
  const budgets = equal(count).map((_, index) => String(Math.round((index + 1) * step)));
  const [mine] = ownSchedule();
  const schedules = new Set([...budgets, ...ownSchedule()]);
  const prompt = $("text").value;
  let said = "";
  points = [];
  $("measure-go").disabled = true;
  try {
    for (const trajectory of schedules) {
      $("curve-said").textContent = `Measuring ${points.length + 1} of ${schedules.size}.`;
      const body = { prompt, trajectory, max_tokens: 0, echo: true, logprobs: 0 };
      const answer = await (await ask("v1/completions", body)).json();
      const logprobs = answer.choices[0].logprobs.token_logprobs.slice(1);
      if (logprobs.length === 0) throw new Refusal("Two tokens or more can be measured.", 400, "prompt");
      const budget = read(trajectory).length;
      const flops = card.flops_per_token[budget - 1];
      const perplexity = Math.exp(-sum(logprobs) / logprobs.length);
      points.push({ trajectory, budget, flops, perplexity, own: trajectory === mine });
      drawCurve();
      said = `Perplexity of ${card.id} on this text by number of loops: ${logprobs.length} tokens, each given those
        before it. FLOPs per token are the mean over a full context. ${mine ? "The ring is your own schedule." : ""}`;
    }
    $("curve-said").textContent = said;
  } catch (refusal) {
    $("curve-said").textContent = "";
    say(refusal, { prompt: "text" }, (message) => ($("curve-said").textContent = message));
  } finally {
    $("measure-go").disabled = false;
  }
}

function drawCurve() {
  if (points.length === 0) return;
  const svg = $("curve");
  svg.removeAttribute("hidden");
  $("curve-table").hidden = false;
  const { width, height } = svg.getBoundingClientRect();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const values = points.map((point) => point.perplexity);
  const low = Math.min(...values), high = Math.max(...values);
  const room = (high - low || high) * 0.12;
  const most = card.flops_per_token.at(-1);
  const x = scale([0, most * 1.05], [48, width - 16]);
  const y = scale([low - room, high + room], [height - 44, 28]);
  const marks = [];
  for (const value of ticks(low - room, high + room, 6)) {
    marks.push(shape("line", { class: "grid", x1: 48, x2: width - 16, y1: y(value), y2: y(value) }));
    marks.push(shape("text", { x: 42, y: y(value) + 4, "text-anchor": "end" }, String(value)));
  }
  for (const value of ticks(0, most, width / 110)) {
    marks.push(shape("text", { x: x(value), y: height - 26, "text-anchor": "middle" }, value ? amount(value) : "0"));
  }
  marks.push(shape("text", { x: width - 16, y: height - 8, "text-anchor": "end" }, "compute per token"));
  marks.push(shape("text", { x: 12, y: 18 }, "perplexity (this axis does not start at 0)"));
  const line = points.filter((point) => isEqual(point.trajectory));
  const corners = line.map((point) => `${x(point.flops)},${y(point.perplexity)}`);
  marks.push(shape("polyline", { class: "path", points: corners.join(" ") }));
  for (const point of points) {
    const [cx, cy] = [x(point.flops), y(point.perplexity)];
    marks.push(shape("circle", { class: point.own ? "own" : "point", r: point.own ? 6 : 4, cx, cy }));
    if (!line.includes(point)) continue;
    marks.push(shape("text", { class: "name", x: cx, y: cy - 10, "text-anchor": "middle" }, point.trajectory));
  }
  svg.replaceChildren(...marks);
  const rows = points.map(({ trajectory, budget, flops, perplexity }) => {
    const cells = [trajectory, String(budget), amount(flops), perplexity.toFixed(2)];
    return make("tr", "", ...cells.map((cell) => make("td", "", cell)));
  });
  $("curve-table").tBodies[0].replaceChildren(...rows);
}

function scale([from, to], [start, end]) {
  return (value) => start + ((value - from) / (to - from)) * (end - start);
}

function ticks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const count = Math.floor(high / step) - Math.ceil(low / step) + 1;
  return equal(count).map((_, index) => Number(((Math.ceil(low / step) + index) * step).toPrecision(6)));
}

function shape(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

// Everything is tied together, and the server is asked for the first time.

function onSubmit(form, act) {
  $(form).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

$("key-form").addEventListener("submit", useKey);
onSubmit("ask", generate);
onSubmit("measure", measure);
$("stop").addEventListener("click", stop);
$("budget").addEventListener("input", () => setSchedule(equal(Number($("budget").value))));
$("own").addEventListener("change", showEditor);
$("equal").addEventListener("click", () => setSchedule(equal(schedule.length)));
$("trajectory").addEventListener("input", () => typeSchedule(false));
$("trajectory").addEventListener("change", () => typeSchedule(true));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.form === $("ask")) $("go").click();
  if (event.key === "Escape") stop();
});
new ResizeObserver(drawCurve).observe($("curve"));
watch();

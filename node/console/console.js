// The page's life: who is there, the stream of events and its ends, and what an administrator does.

import { shown } from "./address.js";
import { Board } from "./board.js";
import { place } from "./dom.js";
import { LookUp } from "./look.js";
import { ask, events, Refusal, token } from "./node.js";
import { count, nbytes } from "./words.js";

const HIDDEN_S = 20; // a page that nobody sees asks for nothing after this
const PAUSE_S_MAX = 15;

const lookUp = new LookUp(null);
const board = new Board();
let followed = null; // the state of the address that was applied last
let wanted = null; // ends the stream that runs

function tell(text, style) {
  place("link").textContent = text;
  place("link").className = style;
}

function askForToken(error) {
  place("board").hidden = place("sections").hidden = true;
  place("token-form").hidden = false;
  place("token-error").textContent = token.get() ? error.message : "";
  token.forget();
  place("sign-out").hidden = true;
  tell("waits for a token", "");
  place("token").focus();
}

// An ordinary link would lose the state that the address keeps.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  place("board").focus();
});

// ---- the stream --------------------------------------------------------------------------

async function watch() {
  wanted?.abort();
  const mine = (wanted = new AbortController());
  let pause = 1;
  while (!mine.signal.aborted) {
    try {
      for await (const { name, values } of events(mine.signal)) {
        if (name === "end") throw new Refusal(values.status || 0, values.error);
        pause = 1;
        show(values);
      }
      tell("the node hung up; connecting again", "lost");
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof Refusal && error.status === 401) {
        askForToken(error);
        return;
      }
      tell(`${error instanceof Refusal ? error.message : "no answer"}; trying again`, "lost");
    }
    await new Promise((done) => setTimeout(done, 1000 * pause));
    pause = Math.min(PAUSE_S_MAX, 2 * pause);
  }
}

function show(values) {
  place("token-form").hidden = true;
  place("board").hidden = place("sections").hidden = false;
  tell("live", "live");
  board.show(values);
  lookUp.members = values.cluster?.members || [];
  const admin = board.who.role === "admin";
  lookUp.remove = admin && !values.cluster ? removePage : null;
  place("acts").hidden = !(admin && board.who.tenant === "*" && values.disk);
  place("sign-out").hidden = !token.get();
  if (!followed) follow();
}

// Apply what the address says: after a link, a step back, or at the start.
function follow() {
  if (place("board").hidden) return;
  const before = followed || { range: shown().range, ns: "", key: "" };
  followed = shown();
  if (before.range !== followed.range) board.refresh();
  board.navigation();
  if (followed.ns && (before.ns !== followed.ns || before.key !== followed.key)) lookUp.follow();
  const target = followed.at && place(followed.at);
  if (!target) return;
  target.scrollIntoView({ block: "start" });
  (target.id === "look" ? place("h-look") : target).focus({ preventScroll: true });
}
window.addEventListener("hashchange", follow);

place("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(place("token").value.trim());
  place("token").value = "";
  watch();
});

place("sign-out").addEventListener("click", () => {
  token.forget();
  location.reload();
});

let hiding = 0;
function sleepUnseen() {
  clearTimeout(hiding);
  if (document.hidden) {
    hiding = setTimeout(() => {
      wanted?.abort();
      wanted = null;
      tell("paused while hidden", "");
    }, 1000 * HIDDEN_S);
  } else if (!wanted && place("token-form").hidden) watch();
}
document.addEventListener("visibilitychange", sleepUnseen);

// ---- what an administrator does ----------------------------------------------------------

function confirmed(question, name) {
  const dialog = place("confirm");
  place("confirm-text").textContent = question;
  place("confirm-yes").textContent = name;
  dialog.showModal();
  place("confirm-no").focus();
  return new Promise((done) => {
    const end = (answer) => {
      dialog.onclose = null;
      dialog.close();
      done(answer);
    };
    place("confirm-yes").onclick = () => end(true);
    place("confirm-no").onclick = () => end(false);
    dialog.onclose = () => done(false);
  });
}

async function removePage(at, say) {
  if (!(await confirmed(`Remove the page ${at.key.slice(0, 8)}… from RAM and disk? Engines compute it again.`, "Remove"))) return;
  try {
    const told = await ask("act", { act: "remove", ...at });
    say(told.removed[0] ? "The page is removed." : "The page was removed already.");
  } catch (error) {
    say(error.message);
  }
}

const ACTS = {
  flush: ["Write all pages that are in RAM only to the disk, and wait for it?", "Flush", flush],
  scrub: ["Read and verify every page on disk? Damaged ones are dropped.", "Scrub", scrub],
  recover: ["Use a failed disk again? Repair the cause first.", "Recover", recover],
};

async function flush() {
  return `${count((await ask("act", { act: "flush" })).pages_on_disk)} pages are on disk.`;
}

async function recover() {
  await ask("act", { act: "recover" });
  return "The disk serves.";
}

async function scrub() {
  const sums = { intact: 0, damaged: 0, nbytes: 0 };
  let cursor = "";
  do {
    const told = await ask("act", { act: "scrub", cursor });
    for (const name of Object.keys(sums)) sums[name] += told[name];
    cursor = told.next_cursor;
    place("act-said").textContent = `${nbytes(sums.nbytes)} read`;
  } while (cursor);
  return `${count(sums.intact)} pages are intact, ${count(sums.damaged)} were damaged and are dropped.`;
}

for (const button of document.querySelectorAll("[data-act]")) {
  const [question, name, act] = ACTS[button.dataset.act];
  button.addEventListener("click", async () => {
    if (!(await confirmed(question, name))) return;
    button.disabled = true;
    place("act-said").textContent = `${name}…`;
    try {
      place("act-said").textContent = await act();
    } catch (error) {
      place("act-said").textContent = error.message;
    }
    button.disabled = false;
  });
}

watch();
sleepUnseen(); // a tab may be opened behind others

// What is asked of the node. The token is in this tab only, and goes into a header: nothing is asked by a cookie, which
// another site's page could use, and nothing is in an address, which logs keep.

const KEPT = "kvstore-token";
const SILENT_S = 20; // events come each two seconds

export class Refusal extends Error {
  constructor(status, said) {
    super(said);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEPT) || "",
  set: (text) => sessionStorage.setItem(KEPT, text),
  forget: () => sessionStorage.removeItem(KEPT),
};

async function post(path, values, signal) {
  const headers = { "Content-Type": "application/json", "X-KVStore-Console": "1" };
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(values), signal, credentials: "same-origin" });
  if (!answer.ok) {
    const said = await answer.text();
    throw new Refusal(answer.status, errorIn(said) || said.slice(0, 300) || answer.statusText);
  }
  return answer;
}

function errorIn(text) {
  try {
    return JSON.parse(text).error;
  } catch {
    return "";
  }
}

export async function ask(path, values) {
  const told = await (await post(path, values)).json();
  if (told.error) throw new Refusal(200, told.error);
  return told;
}

// Bytes of a page; in several questions, since an answer has so many at most.
export async function bytes(place, offset, nbytes, most = 4 << 20) {
  const whole = new Uint8Array(nbytes);
  for (let start = 0; start < nbytes; start += most) {
    const values = { ...place, offset: offset + start, nbytes: Math.min(most, nbytes - start) };
    const answer = await post("bytes", values);
    if (answer.headers.get("Content-Type") !== "application/octet-stream") throw new Refusal(200, (await answer.json()).error);
    whole.set(new Uint8Array(await answer.arrayBuffer()), start);
  }
  return whole.buffer;
}

// Server-sent events, read by hand: EventSource can send no header. Ends, or throws, when the node does; a node that
// stands still, or can not be reached any more, hangs up nobody, and what it said last would look like now.
export async function* events(signal) {
  const stream = new AbortController();
  const silence = { over: false, timer: 0 };
  const heard = () => {
    clearTimeout(silence.timer);
    silence.timer = setTimeout(() => {
      silence.over = true;
      stream.abort();
    }, 1000 * SILENT_S);
  };
  signal.addEventListener("abort", () => stream.abort());
  try {
    heard();
    const answer = await post("events", {}, stream.signal);
    for await (const text of messages(answer.body.pipeThrough(new TextDecoderStream()).getReader())) {
      heard();
      const fields = Object.fromEntries(text.split("\n").map((line) => [line.split(": ", 1)[0], line.slice(line.indexOf(": ") + 2)]));
      yield { name: fields.event, values: JSON.parse(fields.data) };
    }
  } catch (error) {
    throw silence.over ? new Refusal(0, `no message from the node for ${SILENT_S} s`) : error;
  } finally {
    clearTimeout(silence.timer);
    stream.abort();
  }
}

async function* messages(reader) {
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const whole = text.split("\n\n");
    text = whole.pop();
    yield* whole;
  }
}

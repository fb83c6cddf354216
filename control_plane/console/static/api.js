// Calls of the admin API over HTTP, each a POST in JSON, and the streams among them. Nothing here is remembered but the key,
// for as long as the tab is open.

const KEY = "rachis-key";

export const key = {
  read: () => sessionStorage.getItem(KEY) ?? "",
  write: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class Refused extends Error {
  // status: the name of the gRPC status.
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function post(name, body, signal) {
  const headers = { "content-type": "application/json" };
  if (key.read()) headers.authorization = `Bearer ${key.read()}`;
  const response = await fetch(`/api/${name}`, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (response.ok) return response;
  const told = await response.json().catch(() => ({ error: { status: "UNKNOWN", message: response.statusText } }));
  throw new Refused(told.error.status, told.error.message);
}

// A call with one answer.
export async function call(name, body = {}, signal) {
  return (await post(name, body, signal)).json();
}

// A call that tells how it goes: `onMessage` for each message, until the router ends it. One that is silent for `silentMs`
// is given up.
export async function stream(name, body, onMessage, { signal, silentMs = 30_000 } = {}) {
  const giveUp = new AbortController();
  const abort = () => giveUp.abort();
  signal?.addEventListener("abort", abort);
  let watchdog = setTimeout(abort, silentMs);
  try {
    const reader = (await post(name, body, giveUp.signal)).body.pipeThrough(new TextDecoderStream()).getReader();
    let pending = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(watchdog);
      watchdog = setTimeout(abort, silentMs);
      pending += value;
      const events = pending.split("\n\n");
      pending = events.pop();
      for (const event of events) take(event, onMessage);
    }
  } finally {
    clearTimeout(watchdog);
    signal?.removeEventListener("abort", abort);
  }
}

function take(event, onMessage) {
  const lines = event.split("\n");
  const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
  if (!data) return;
  const told = JSON.parse(data);
  if (lines.includes("event: error")) throw new Refused(told.error.status, told.error.message);
  onMessage(told);
}

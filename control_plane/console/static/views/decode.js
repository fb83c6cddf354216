// How decode workers form their batches by shared prefixes, and why who waits.
import { html, useState } from "../vendor/htm-preact.js";
import { Meter } from "../charts.js";
import { count, seconds } from "../format.js";
import { usePolled } from "../polled.js";
import { Table } from "../table.js";

const ENTRIES = 50;

const GROUPS = [
  { title: "prefix", cell: (group) => html`<code>${group.hash || "none"}</code>` },
  { title: "shared tokens", number: true, cell: (group) => count(group.tokens) },
  { title: "running", number: true, cell: (group) => count(group.running) },
  { title: "waiting", number: true, cell: (group) => count(group.waiting) },
  { title: "of those that run", wide: true, cell: (group) => html`<${Meter} part=${group.running} whole=${group.whole} isBounded=${false} label="share of the batch" />` },
];
const WAITING = [
  { title: "request", cell: (request) => html`<a href=${`#requests/${encodeURIComponent(request.request_id)}`}>${request.request_id}</a>` },
  { title: "why", cell: (request) => request.cause.replaceAll("_", " ") },
  { title: "waited", number: true, cell: (request) => seconds(request.waited_s) },
  { title: "prompt", number: true, cell: (request) => count(request.prompt_tokens) },
  { title: "shares", number: true, wide: true, cell: (request) => count(request.shared_tokens) },
  { title: "priority", number: true, wide: true, cell: (request) => request.priority },
];

export function Decode({ overview }) {
  const workers = overview.workers.filter((row) => row.pool !== "POOL_PREFILL").map((row) => row.worker_id).sort();
  const [chosen, choose] = useState("");
  const worker = workers.includes(chosen) ? chosen : workers[0];
  if (!worker) return html`<h1>Decode</h1><p>There is no decode worker.</p>`;
  return html`
    <h1>Decode</h1>
    <form class="row" onSubmit=${(event) => event.preventDefault()}>
      <label for="worker">Worker</label>
      <select id="worker" value=${worker} onChange=${(event) => choose(event.target.value)}>${workers.map((each) => html`<option value=${each}>${each}</option>`)}</select>
    </form>
    <${Batch} worker=${worker} />
  `;
}

function Batch({ worker }) {
  const { answer, error } = usePolled("ListWorkers", { worker_ids: [worker], batch_entries: ENTRIES }, 2000);
  if (error) return html`<p class="wrong" role="alert">${error}</p>`;
  const view = answer?.workers[0];
  if (!answer) return html`<p>Asking ${worker} …</p>`;
  if (!view?.load) return html`<p>${worker} does not answer.</p>`;
  const { decode, batch } = view;
  if (!decode) return html`<p>${worker} does not form its batch by shared prefixes.</p>`;
  const waiting = Object.entries(decode.waiting).filter(([, number]) => number);
  const running = decode.running_requests;
  return html`
    <p>${worker} runs ${running} requests by ${decode.policy}${decode.mode ? ` (${decode.mode})` : ""}, which share ${count(decode.tip_tokens)} tokens; their working set has ${count(decode.working_set_tokens)}.
      ${waiting.length ? ` Waiting: ${waiting.map(([cause, number]) => `${number} ${cause.replaceAll("_", " ")}`).join(", ")}.` : " Nobody waits."}</p>
    ${batch ? html`
      <${Table} caption="The running batch by prefix group" columns=${GROUPS} rows=${batch.groups.map((group) => ({ ...group, whole: running }))} name=${(group) => group.hash} empty="no group" />
      <${Table} caption="Who waits, and why" columns=${WAITING} rows=${batch.waiting} name=${(request) => request.request_id} empty="nobody waits" />
    ` : html`<p>It had no time to tell of its batch.</p>`}
  `;
}

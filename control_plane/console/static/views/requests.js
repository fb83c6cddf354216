// Requests that run, by stage, and those that ended of late; one request's way as a timeline.
import { html, useState } from "../vendor/htm-preact.js";
import { Span, Stack } from "../charts.js";
import { count, ms, plural } from "../format.js";
import { usePolled } from "../polled.js";
import { State, Table } from "../table.js";

const LISTED = { running: 200, ended: 100 };
const link = (row) => html`<a href=${`#requests/${encodeURIComponent(row.request_id)}`}>${row.request_id || "(no name)"}</a>`;

const COLUMNS = [
  { title: "request", cell: link },
  { title: "stage", cell: (row) => row.stage },
  { title: "for", number: true, cell: (row) => ms(row.stage_ms) },
  { title: "worker", wide: true, cell: (row) => row.worker_id || "router" },
  { title: "age", number: true, cell: (row) => ms(row.age_ms) },
  { title: "TTFT", number: true, cell: (row) => ms(row.ttft_ms) },
  { title: "tenant", wide: true, cell: (row) => row.tenant || "–" },
  { title: "kind", wide: true, cell: (row) => row.kind },
];
const ENDED = [
  { title: "request", cell: link },
  { title: "ended", cell: (row) => html`<${State} state=${row.outcome} />` },
  { title: "took", number: true, cell: (row) => ms(row.age_ms) },
  { title: "TTFT", number: true, cell: (row) => ms(row.ttft_ms) },
  { title: "prompt", number: true, wide: true, cell: (row) => count(row.prompt_tokens) },
  { title: "answer", number: true, wide: true, cell: (row) => count(row.completion_tokens) },
  { title: "moved", number: true, wide: true, cell: (row) => count(row.migrations) },
  { title: "tenant", wide: true, cell: (row) => row.tenant || "–" },
];

export function Requests({ opened }) {
  const { answer, error } = usePolled("ListRequests", LISTED, 1000);
  const [stage, choose] = useState("");
  const running = answer?.running ?? [];
  const stages = Object.entries(Object.groupBy(running, (row) => row.stage)).map(([name, rows]) => [name, rows.length]);
  const shown = running.filter((row) => !stage || row.stage === stage);
  const more = answer ? answer.running_total - running.length : 0;
  return html`
    <h1>Requests</h1>
    ${error ? html`<p class="wrong" role="alert">${error}</p>` : null}
    ${opened ? html`<${Way} name=${opened} />` : null}
    ${stages.length ? html`<section aria-label="Stages">
      <${Stack} parts=${stages.map(([name, value]) => ({ name, value, kind: `stage ${kindOf(name)}` }))} label="running requests by stage" />
      <p class="states">${stages.map(([name, value]) => html`<button class="quiet" aria-pressed=${stage === name} onClick=${() => choose(stage === name ? "" : name)}><i class=${`swatch stage-${kindOf(name)}`}></i>${name} ${value}</button>`)}</p>
    </section>` : null}
    <${Table} caption=${`Running: ${answer ? count(answer.running_total) : "–"}, the oldest first`} columns=${COLUMNS} rows=${shown} name=${(row) => `${row.tenant}/${row.request_id}`} empty="no request runs" />
    ${more > 0 ? html`<p>${plural(more, "more request")} not listed here.</p>` : null}
    <${Table} caption="Ended of late, the last one first" columns=${ENDED} rows=${answer?.ended ?? []} name=${(row) => `${row.tenant}/${row.request_id}`} empty="none has ended" />
  `;
}

// What the time of a stage goes into, for its colour.
export const kindOf = (stage) =>
  /queue|admission|placement|first_choice/.test(stage) ? "waits"
    : /prefill_compute|input/.test(stage) ? "prefills"
    : stage === "decode" ? "decodes"
    : /pull|call/.test(stage) ? "moves" : "routes";

function Way({ name }) {
  const { answer, error } = usePolled("GetTrace", { request_id: name }, 2000);
  return html`<section class="card way" aria-label=${`The way of ${name}`}>
    <h2>${name} <a class="aside" href="#requests">close</a></h2>
    ${error ? html`<p class="wrong" role="alert">${error}</p>` : null}
    ${answer ? html`
      <p>${answer.kind}, ${answer.outcome || "running"}, trace <code>${answer.trace_id}</code></p>
      <${Answer} answer=${answer.answer} caption="Stages" />
      ${answer.further_choices.map((choice, place) => html`<${Answer} answer=${choice} caption=${`Stages of choice ${place + 2}`} />`)}
      ${answer.decisions.map((decision) => html`<p>${decision.worker_id ? html`Sent to <b>${decision.worker_id}</b> by ${decision.policy}` : "No worker could be chosen"}, of ${plural(decision.candidates.length, "candidate")} told. <a href=${`#placement/${encodeURIComponent(answer.request_id)}`}>Why</a></p>`)}
    ` : null}
  </section>`;
}

function Answer({ answer, caption }) {
  const whole = answer.end_to_end_ms;
  const columns = [
    { title: "stage", cell: (stage) => html`${stage.name}${stage.migrates ? html` <span class="detail">moves</span>` : null}` },
    { title: "when", grow: true, cell: (stage) => html`<${Span} start=${stage.start_ms} length=${stage.duration_ms} whole=${whole} kind=${kindOf(stage.name)} label=${`from ${ms(stage.start_ms)} for ${ms(stage.duration_ms)}`} />` },
    { title: "took", number: true, cell: (stage) => ms(stage.duration_ms) },
    { title: "worker", wide: true, cell: (stage) => stage.worker_id || "router" },
  ];
  return html`
    <${Table} caption=${`${caption}: ${ms(whole)} in all, first token after ${ms(answer.ttft_ms)}`} columns=${columns} rows=${answer.stages} name=${(stage) => `${stage.name} ${stage.start_ms}`} empty="none" />
    <p>${plural(answer.prompt_tokens, "prompt token")}, ${count(answer.cached_tokens)} of them cached; ${plural(answer.completion_tokens, "token")} answered.</p>
    ${answer.events.length ? html`<ol class="events">${answer.events.map((event) => html`<li><b>${ms(event.at_ms)}</b> ${event.name} ${event.detail}</li>`)}</ol>` : null}
  `;
}

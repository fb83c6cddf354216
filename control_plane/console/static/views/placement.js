// Where requests went of late, and why there: the candidates as they stood.
import { html } from "../vendor/htm-preact.js";
import { count, plural, seconds, word } from "../format.js";
import { usePolled } from "../polled.js";
import { Table } from "../table.js";

const WHY = {
  always: "disaggregated, as configured",
  remote_sooner: "disaggregated: a prefill worker is expected to be sooner",
  long_remainder: "disaggregated: what is not cached is more than a decode worker may prefill",
  short_remainder: "prefilled by the decode worker: little is left to compute, and it is expected to be sooner",
  prefill_slow: "prefilled by the decode worker: the prefill pool would take more than twice as long",
  prefill_down: "prefilled by the decode worker: no prefill worker is usable",
  decode_down: "prefilled by a prefill worker: no decode worker was usable then",
  session: "disaggregated: its prompt was still arriving",
  whole: "prefilled where it decodes: workers do both",
  append: "prefilled and decoded where most of its prompt lies",
  apart: "prefilled apart, and bound to a worker for decode at its first token",
  refused: "refused: no worker was expected to have its first token in time",
  refused_for_tpot: "refused: no worker was expected to keep TPOT with one request more",
};
const taken = (placement) => (placement.worker_id ? [placement.worker_id] : []);
const bound = (placement) => (placement.bound_worker_id ? [placement.bound_worker_id] : []);
const decided = (placement) => placement.decisions.map((decision) => decision.worker_id || `no ${word(decision.pool)} worker`);
const chosen = (placement) => [...decided(placement), ...taken(placement), ...bound(placement)].join(" → ") || "–";
const WAYS = [
  { title: "worker", cell: (way) => way.worker_id },
  { title: "way", cell: (way) => way.way },
  { title: "expected TTFT", number: true, cell: (way) => seconds(way.ttft_s) },
  { title: "step", number: true, cell: (way) => seconds(way.step_s) },
  { title: "objectives missed", number: true, cell: (way) => count(way.missed) },
  { title: "cost", number: true, cell: (way) => seconds(way.cost_s) },
];

const COLUMNS = [
  { title: "request", cell: (placement) => html`<a href=${`#placement/${encodeURIComponent(placement.request_id)}`}>${placement.request_id}</a>` },
  { title: "went to", cell: chosen },
  { title: "why", wide: true, cell: (placement) => WHY[placement.disaggregation] ?? "–" },
  { title: "alone", number: true, cell: (placement) => seconds(placement.prices?.local_s) },
  { title: "handed off", number: true, cell: (placement) => seconds(placement.prices?.remote_s) },
  { title: "prompt", number: true, wide: true, cell: (placement) => (placement.decisions.length ? count(placement.decisions[0].prompt_tokens) : "–") },
];

export function Placement({ opened }) {
  const { answer, error } = usePolled("ListPlacements", { at_most: 50 }, 2000);
  const placements = answer?.placements ?? [];
  const found = opened ? placements.find((placement) => placement.request_id === opened) : placements[0];
  return html`
    <h1>Placement</h1>
    ${error ? html`<p class="wrong" role="alert">${error}</p>` : null}
    ${opened && answer && !found ? html`<p>${opened} is not among the last ${placements.length}: <code>rachis placement explain</code> knows more.</p>` : null}
    ${found ? html`<${Decisions} placement=${found} />` : null}
    <${Table} caption="The last placements; expected seconds until the first token, prefilled by the decode worker alone or handed off" columns=${COLUMNS} rows=${placements} name=${(placement) => placement.request_id} empty="no request was placed yet" />
  `;
}

function Decisions({ placement }) {
  return html`<section class="card" aria-label=${`Why ${placement.request_id} went there`}>
    <h2>${placement.request_id}</h2>
    <p>${WHY[placement.disaggregation] ?? ""}</p>
    ${placement.decisions.map((decision) => html`<${Candidates} decision=${decision} />`)}
    ${placement.ways.length ? html`<${Table} caption="The ways that there were, the best first" columns=${WAYS} rows=${placement.ways} name=${(way) => `${way.worker_id} ${way.way}`} empty="" />` : null}
  </section>`;
}

function Candidates({ decision }) {
  const isPrefill = decision.pool === "POOL_PREFILL";
  const columns = [
    { title: "worker", cell: (each) => html`${each.worker_id}${each.worker_id === decision.worker_id ? html` <span class="detail">chosen</span>` : null}` },
    { title: "score", number: true, cell: (each) => (each.passed ? each.score.toFixed(3) : "left out") },
    ...decision.terms.map((term) => ({ title: `${term.weight} × ${term.name}`, number: true, wide: true, cell: (each) => (each.terms[term.name] ?? 0).toFixed(3) })),
    { title: "queue", number: true, cell: (each) => seconds(each.queue_s) },
    { title: "cached", number: true, cell: (each) => count(Number(each.device_tokens) + Number(each.host_tokens)) },
    { title: isPrefill ? "tokens in flight" : "shared", number: true, wide: true, cell: (each) => count(isPrefill ? each.in_flight_tokens : each.shared_tokens) },
    { title: "in flight", number: true, cell: (each) => count(each.in_flight_requests) },
  ];
  const drawn = decision.equals > 1 ? `, drawn from ${decision.equals} equals` : "";
  const caption = `${word(decision.pool)}: ${decision.worker_id || "nobody"} by ${decision.policy}${decision.load_only ? ", as the index was stale" : ""}${drawn}; the best ${plural(decision.candidates.length, "candidate")}`;
  return html`<${Table} caption=${caption} columns=${columns} rows=${decision.candidates} name=${(each) => each.worker_id} empty="no worker was usable" />`;
}

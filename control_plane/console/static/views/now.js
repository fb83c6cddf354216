// The service at this moment: what is wrong, times beside objectives, pools, workers.
import { html } from "../vendor/htm-preact.js";
import { Lines, Meter, Stack } from "../charts.js";
import { count, plural, seconds, word } from "../format.js";
import { usePolled } from "../polled.js";
import { Runbook } from "../runbook.js";
import { State, Table } from "../table.js";

const HISTORY_MS = 5000;

export function Now({ overview, opened }) {
  const { router } = overview;
  const history = usePolled("GetHistory", {}, HISTORY_MS).answer;
  return html`
    <h1>Now</h1>
    ${overview.imitates ? html`<p class="note">Imitated GPUs: they compute nothing, take the time of ${overview.imitates}, and answer with arbitrary tokens.</p>` : null}
    <${Alerts} overview=${overview} />
    ${opened ? html`<${Runbook} name=${opened} onClose="#now" />` : null}
    <section class="tiles" aria-label="Figures">
      <${Tile} name="running" value=${count(router.in_flight_requests)} detail=${`of ${count(overview.max_in_flight_requests)} slots`} />
      <${Tile} name="queued" value=${count(router.queued_requests)} detail=${`of ${count(overview.max_queued_requests)}`} isBad=${overview.max_queued_requests && router.queued_requests >= overview.max_queued_requests} />
      <${Tile} name="sessions" value=${count(router.open_sessions)} detail="open" />
      <${Times} name="TTFT" times=${overview.ttft} />
      <${Times} name="TPOT" times=${overview.tpot} />
      <${Tile} name="up" value=${seconds(router.uptime_s)} detail=${router.service_id} />
    </section>
    <section class="cards" aria-label="Pools">${overview.pools.map((pool) => html`<${Pool} key=${pool.pool} pool=${pool} />`)}</section>
    ${history ? html`<section class="cards" aria-label="The last hour">
      <${Trend} title="TTFT, 90% of requests" history=${history} of="ttft_p90_s" limit=${overview.ttft.objective_s} format=${seconds} />
      <${Trend} title="TPOT, 90% of requests" history=${history} of="tpot_p90_s" limit=${overview.tpot.objective_s} format=${seconds} />
    </section>` : null}
    <${Workers} overview=${overview} />
    <${Outcomes} router=${router} />
  `;
}

const Tile = ({ name, value, detail, isBad }) => html`<div class=${isBad ? "tile bad" : "tile"} data-tile=${name}>
  <span class="name">${name}</span> <span class="value">${value}</span> <span class="detail">${detail}</span>
</div>`;

function Times({ name, times }) {
  // 0: there is none.
  const objective = times.objective_s ? seconds(times.objective_s) : null;
  const isMissed = objective !== null && times.p90_s !== undefined && times.p90_s > times.objective_s;
  const kept = objective === null ? "no objective" : `${isMissed ? "misses" : "keeps"} ${objective}`;
  const detail = times.requests ? `P50 ${seconds(times.p50_s)} · ${kept}` : objective === null ? kept : `objective ${objective}`;
  return html`<${Tile} name=${`${name} P90`} value=${seconds(times.p90_s)} detail=${detail} isBad=${isMissed} />`;
}

function Alerts({ overview }) {
  const { alerts, unlisted_alerts: more } = overview;
  if (!alerts.length) return html`<p class="well">Nothing is wrong as far as this router sees.</p>`;
  return html`<section class="alerts" aria-label="Alerts">
    <ul>${alerts.map((alert) => html`<li key=${`${alert.name} ${alert.subject}`} class=${alert.severity} data-alert=${alert.name}>
      <span class="severity">${alert.severity}</span> <b>${alert.subject}</b> ${alert.sentence}.
      ${" "}<a href=${`#now/${alert.name}`}>Runbook ${alert.name}</a>
    </li>`)}</ul>
    ${more ? html`<p>${plural(more, "more alert")}</p>` : null}
  </section>`;
}

function Pool({ pool }) {
  const name = word(pool.pool);
  const states = Object.entries(pool.workers).sort(([a], [b]) => (b === "ready") - (a === "ready") || a.localeCompare(b));
  const ready = pool.workers.ready ?? 0;
  const parts = states.map(([state, value]) => ({ name: state.replaceAll("_", " "), value, kind: state }));
  return html`<article class="card" data-pool=${name}>
    <h2>${name} <span class="aside">${ready}${pool.desired_workers === undefined ? "" : ` of ${pool.desired_workers}`} ready</span></h2>
    <${Stack} parts=${parts} label=${`workers of ${name}`} />
    <p class="states">${states.map(([state, value]) => html`<span><${State} state=${state} /> ${count(value)}</span>`)}
      ${pool.lost_workers > 0 ? html`<span>${count(pool.lost_workers)} lost so far</span>` : null}</p>
    <dl>
      <div><dt>running</dt><dd>${count(pool.running_requests)}</dd></div>
      <div><dt>waiting</dt><dd>${count(pool.waiting_requests)}</dd></div>
      <div><dt>leased</dt><dd>${count(pool.leased_handoffs)}</dd></div>
      <div><dt>KV blocks</dt><dd><${Meter} part=${pool.total_blocks - pool.free_blocks} whole=${pool.total_blocks} label="KV blocks in use" /></dd></div>
    </dl>
  </article>`;
}

function Trend({ title, history, of, limit, format }) {
  const points = history.samples.map((sample) => ({ age_s: sample.age_s, value: sample[of] }));
  return html`<article class="card"><h2>${title}</h2>
    <${Lines} series=${[{ name: "P90", kind: "first", points }]} label=${title} format=${format} limit=${limit} /></article>`;
}

export const WORKER_COLUMNS = [
  { title: "worker", cell: (row) => row.worker_id },
  { title: "pool", cell: (row) => word(row.pool) },
  { title: "state", cell: (row) => html`<${State} state=${row.state} /> ${row.detail ? html`<span class="detail">${row.detail}</span>` : null}` },
  { title: "running", number: true, cell: (row) => count(row.running_requests) },
  { title: "waiting", number: true, cell: (row) => count(row.waiting_requests) },
  { title: "leased", number: true, wide: true, cell: (row) => count(row.leased_handoffs) },
  { title: "sessions", number: true, wide: true, cell: (row) => count(row.open_sessions) },
  { title: "KV blocks", wide: true, cell: (row) => html`<${Meter} part=${row.total_blocks - row.free_blocks} whole=${row.total_blocks} label=${`KV blocks in use at ${row.worker_id}`} />` },
  { title: "node", wide: true, cell: (row) => row.node || "–" },
];

function Workers({ overview }) {
  const more = overview.unlisted_workers;
  return html`<${Table} caption="Workers, those that need looking at first" columns=${WORKER_COLUMNS} rows=${overview.workers}
      name=${(row) => row.worker_id} empty="no worker has registered" />
    ${more ? html`<p>${plural(more, "more worker")} not listed here, and summed above.</p>` : null}`;
}

function Outcomes({ router }) {
  const ended = Object.entries(router.outcomes).filter(([, value]) => Number(value));
  return html`<p class="outcomes">Since the router started: ${ended.length ? ended.map(([name, value]) => `${count(value)} ${name}`).join(", ") : "no request has ended"}.
    Time of its own per request: P50 ${seconds(router.overhead_p50_ms / 1000)}, P99 ${seconds(router.overhead_p99_ms / 1000)}. Version ${router.version}.</p>`;
}

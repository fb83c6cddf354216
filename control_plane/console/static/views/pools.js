// The pools over the last hour, and changes of them.
import { html, useState } from "../vendor/htm-preact.js";
import { stream, call } from "../api.js";
import { Lines } from "../charts.js";
import { Confirm } from "../confirm.js";
import { plural, word } from "../format.js";
import { usePolled } from "../polled.js";
import { Table } from "../table.js";
import { WORKER_COLUMNS } from "./now.js";

const MOST_WORKERS = 1024;

export function Pools({ overview, mayOperate }) {
  const history = usePolled("GetHistory", {}, 5000).answer;
  const [asked, ask] = useState(null);
  const [said, say] = useState([]);
  const operate = async (operation) => {
    ask(null);
    const tell = (sentence) => say((before) => [`${operation.title}: ${sentence}`, ...before].slice(0, 20));
    tell("begun");
    try {
      await operation.run(tell);
      tell("done");
    } catch (error) {
      tell(error.message);
    }
  };
  const columns = mayOperate ? [...WORKER_COLUMNS.slice(0, 5), { title: "change", cell: (row) => html`<${WorkerButtons} row=${row} onAsk=${ask} />` }] : WORKER_COLUMNS;
  return html`
    <h1>Pools</h1>
    ${mayOperate ? null : html`<p class="note">Changing the pools needs a key with the role <code>operate</code>.</p>`}
    <section class="cards" aria-label="Pools">
      ${overview.pools.map((pool) => html`<${Pool} key=${pool.pool} pool=${pool} history=${history} mayOperate=${mayOperate} onAsk=${ask} />`)}
    </section>
    <div role="status" class="said">${said.length ? html`<h2>What was asked for here</h2><ol>${said.map((sentence) => html`<li>${sentence}</li>`)}</ol>` : null}</div>
    <${Table} caption="Workers" columns=${columns} rows=${overview.workers} name=${(row) => row.worker_id} empty="no worker has registered" />
    ${overview.unlisted_workers ? html`<p>${plural(overview.unlisted_workers, "more worker")}: see <code>rachis status</code>.</p>` : null}
    ${asked ? html`<${Confirm} operation=${asked} onYes=${() => operate(asked)} onNo=${() => ask(null)} />` : null}
  `;
}

function Pool({ pool, history, mayOperate, onAsk }) {
  const name = word(pool.pool);
  const samples = (history?.samples ?? []).flatMap((sample) => sample.pools.filter((each) => each.pool === pool.pool).map((each) => ({ age_s: sample.age_s, ...each })));
  const line = (of) => samples.map((sample) => ({ age_s: sample.age_s, value: sample[of] }));
  const series = [
    { name: "ready", kind: "first", step: true, points: line("ready_workers") },
    { name: "wanted", kind: "second", step: true, points: line("desired_workers") },
    { name: "running", kind: "third", points: line("running_requests") },
    { name: "waiting", kind: "fourth", points: line("waiting_requests") },
  ];
  return html`<article class="card" data-pool=${name}>
    <h2>${name} <span class="aside">${pool.workers.ready ?? 0}${pool.desired_workers === undefined ? "" : ` of ${pool.desired_workers}`} ready${pool.autoscales ? ", follows its load" : ""}</span></h2>
    ${samples.length ? html`<${Lines} series=${series} label=${`${name}: workers and requests`} />` : null}
    ${mayOperate && pool.desired_workers !== undefined ? html`<${Scale} pool=${pool} name=${name} onAsk=${onAsk} />` : null}
  </article>`;
}

function Scale({ pool, name, onAsk }) {
  const [size, resize] = useState("");
  const id = `size-${name}`;
  const submit = (event) => {
    event.preventDefault();
    onAsk(scaling(name, Number(size)));
    resize("");
  };
  return html`<form class="row" onSubmit=${submit}>
    <label for=${id}>Workers wanted</label>
    <input id=${id} type="number" min="0" max=${MOST_WORKERS} required placeholder=${pool.desired_workers} value=${size} onInput=${(event) => resize(event.target.value)} />
    <button type="submit">Scale ${name}</button>
  </form>`;
}

const WorkerButtons = ({ row, onAsk }) => html`<span class="buttons">
  ${row.state === "draining"
    ? html`<button aria-label=${`Resume ${row.worker_id}`} onClick=${() => onAsk(resuming(row.worker_id))}>Resume</button>`
    : html`<button aria-label=${`Drain ${row.worker_id}`} onClick=${() => onAsk(draining(row.worker_id))}>Drain</button>`}
  <button aria-label=${`Restart ${row.worker_id}`} onClick=${() => onAsk(restarting(row.worker_id))}>Restart</button>
  <button aria-label=${`Remove ${row.worker_id}`} onClick=${() => onAsk(removing(row.worker_id))}>Remove</button>
</span>`;

// Operations: `word` has to be typed before `run` runs, which tells how it goes.
const scaling = (name, size) => ({
  title: `scale ${name} to ${size}`,
  word: name,
  warning: `The ${name} pool is to have ${plural(size, "worker")}. Those that are too many end what they run, and leave.`,
  run: (tell) => stream("ScalePools", { [`${name}_workers`]: size }, progress(tell)),
});
const draining = (id) => ({
  title: `drain ${id}`,
  word: id,
  warning: "It gets nothing new until it is resumed, and ends what it runs. It stays in its pool.",
  run: async (tell) => tell(`is ${word((await call("DrainWorker", { worker_id: id })).state)}`),
});
const resuming = (id) => ({
  title: `resume ${id}`,
  word: id,
  warning: "It gets requests again.",
  run: async (tell) => tell(`is ${word((await call("ResumeWorker", { worker_id: id })).state)}`),
});
const restarting = (id) => ({
  title: `restart ${id}`,
  word: id,
  warning: "It ends what it runs, and starts again; its cached prefixes are gone then.",
  run: (tell) => stream("RestartWorkers", { worker_ids: [id] }, progress(tell)),
});
const removing = (id) => ({
  title: `remove ${id}`,
  word: id,
  warning: "It ends what it runs and leaves; its pool is one smaller then.",
  run: (tell) => stream("RemoveWorker", { worker_id: id }, progress(tell)),
});

const progress = (tell) => ({ event }) => tell(`${event.worker.worker_id} ${word(event.worker.phase)}${event.worker.detail ? `: ${event.worker.detail}` : ""} (${event.done} of ${event.of})`);

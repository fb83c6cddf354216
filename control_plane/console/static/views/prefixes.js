// What is cached where, by heat: names of prefixes are hashes, there is no text of prompts.
import { html, useState } from "../vendor/htm-preact.js";
import { Icicle } from "../charts.js";
import { count, plural } from "../format.js";
import { usePolled } from "../polled.js";
import { Table } from "../table.js";

const FEW = 4;
const names = (workers) => (workers.length > FEW ? `${workers.slice(0, FEW).join(", ")} and ${workers.length - FEW} more` : workers.join(", ") || "–");

const COLUMNS = [
  { title: "prefix", cell: (prefix) => html`<code>${prefix.name}</code>` },
  { title: "goes on from", wide: true, cell: (prefix) => (prefix.parent ? html`<code>${prefix.parent}</code>` : "–") },
  { title: "tokens", number: true, cell: (prefix) => count(prefix.tokens) },
  { title: "requests/s", number: true, cell: (prefix) => prefix.requests_per_s.toFixed(2) },
  { title: "on the device of", cell: (prefix) => names(prefix.device_workers) },
  { title: "in host memory of", wide: true, cell: (prefix) => names(prefix.host_workers) },
];

export function Prefixes() {
  const { answer, error } = usePolled("GetHottestPrefixes", { at_most: 100 }, 3000);
  const index = usePolled("GetIndexStatus", {}, 3000).answer;
  const [tier, choose] = useState("both");
  const [selected, select] = useState("");
  const prefixes = (answer?.prefixes ?? []).filter((prefix) => tier === "both" || prefix[`${tier}_workers`].length);
  const shown = prefixes.filter((prefix) => !selected || prefix.name === selected || prefix.parent === selected);
  return html`
    <h1>Prefixes</h1>
    ${error ? html`<p class="wrong" role="alert">${error}</p>` : null}
    ${index ? html`<p>The index knows ${count(index.entries)} chunks of ${plural(index.chunk_tokens, "token")}, of ${count(index.capacity_entries)} that it has room for${index.stale ? "; it is too old to be believed" : ""}.</p>` : null}
    <form class="row" onSubmit=${(event) => event.preventDefault()}>
      <label for="tier">Cached</label>
      <select id="tier" value=${tier} onChange=${(event) => choose(event.target.value)}>
        <option value="both">anywhere</option><option value="device">on devices</option><option value="host">in host memory</option>
      </select>
    </form>
    <${Icicle} roots=${tree(prefixes)} selected=${selected} onSelect=${(name) => select(selected === name ? "" : name)} />
    <${Table} caption=${selected ? `${selected} and what goes on from it` : "The hottest prefixes"} columns=${COLUMNS} rows=${shown} name=${(prefix) => prefix.name} empty="no prefix is known yet" />
  `;
}

// Each below the one that it goes on from, where that one is shown.
function tree(prefixes) {
  const nodes = new Map(prefixes.map((prefix) => [prefix.name, { name: prefix.name, rate: prefix.requests_per_s, tokens: Number(prefix.tokens), places: places(prefix), children: [] }]));
  const roots = [];
  for (const prefix of prefixes) (nodes.get(prefix.parent)?.children ?? roots).push(nodes.get(prefix.name));
  return roots;
}

const places = (prefix) => `${plural(prefix.device_workers.length, "device")}, ${prefix.host_workers.length} in host memory`;

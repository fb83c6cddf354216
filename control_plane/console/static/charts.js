// Small pictures in SVG. Each says in words what it shows, for who does not see it.
import { html } from "./vendor/htm-preact.js";
import { percent, seconds, share } from "./format.js";

// A part of a whole, with its share beside it. isBounded: little is left where it is almost full.
export const Meter = ({ part, whole, label, isBounded = true }) => {
  const filled = share(part, whole);
  return html`<span class="meter">
    <svg viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label=${`${label}: ${percent(filled)}`}>
      <rect class="track" width="100" height="8" rx="2" />
      <rect class=${isBounded && filled > 0.9 ? "fill high" : "fill"} width=${filled * 100} height="8" rx="2" />
    </svg>
    <span class="figure">${whole ? percent(filled) : "–"}</span>
  </span>`;
};

// Parts beside each other: [{name, value, kind}].
export const Stack = ({ parts, label }) => {
  const whole = parts.reduce((sum, part) => sum + part.value, 0);
  let x = 0;
  const said = parts.map((part) => `${part.value} ${part.name}`).join(", ") || "none";
  return html`<svg class="stack" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label=${`${label}: ${said}`}>
    <rect class="track" width="100" height="10" />
    ${parts.map((part) => {
      const width = share(part.value, whole) * 100;
      const rect = html`<rect class=${`kind-${part.kind}`} x=${x} width=${width} height="10"><title>${part.value} ${part.name}</title></rect>`;
      x += width;
      return rect;
    })}
  </svg>`;
};

const WIDTH = 600;
const HEIGHT = 120;

// Lines over the last hour or what there is of it. series: [{name, kind, points: [{age_s, value}], step}]; a value that is
// missing leaves a gap. limit: drawn across.
export const Lines = ({ series, label, format = (value) => value, limit }) => {
  const points = series.flatMap((each) => each.points).filter((point) => point.value !== undefined);
  const span = Math.max(60, ...points.map((point) => point.age_s));
  const top = Math.max(...points.map((point) => point.value), limit ?? 0, Number.EPSILON) * 1.1;
  const x = (age_s) => WIDTH * (1 - age_s / span);
  const y = (value) => HEIGHT * (1 - value / top);
  const last = series.map((each) => `${each.name} ${shown(each, format)}`).join(", ");
  return html`<figure class="lines">
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`${label}; now ${last}`}>
      ${[0.25, 0.5, 0.75].map((at) => html`<line class="grid" x1="0" x2=${WIDTH} y1=${HEIGHT * at} y2=${HEIGHT * at} />`)}
      ${limit ? html`<line class="limit" x1="0" x2=${WIDTH} y1=${y(limit)} y2=${y(limit)} />` : null}
      ${series.map((each) => html`<path class=${`line-${each.kind}`} d=${path(each, x, y)} />`)}
    </svg>
    <figcaption>
      <span>${seconds(span)} ago</span>
      <span class="legend">${series.map((each) => html`<span><i class=${`swatch line-${each.kind}`}></i>${each.name} ${shown(each, format)}</span>`)}
      ${limit ? html`<span><i class="swatch limit"></i>objective ${format(limit)}</span>` : null}</span>
      <span>now</span>
    </figcaption>
  </figure>`;
};

function shown(each, format) {
  const value = each.points.at(-1)?.value;
  return value === undefined ? "–" : format(value);
}

function path(series, x, y) {
  let drawn = "";
  let before;
  for (const { age_s, value } of series.points) {
    if (value === undefined) {
      before = undefined;
      continue;
    }
    if (before === undefined) drawn += `M${x(age_s).toFixed(1)} ${y(value).toFixed(1)}`;
    else if (series.step) drawn += `H${x(age_s).toFixed(1)}V${y(value).toFixed(1)}`;
    else drawn += `L${x(age_s).toFixed(1)} ${y(value).toFixed(1)}`;
    before = value;
  }
  return drawn;
}

// Stages that follow each other, each at its place in the whole: [{name, start_ms, duration_ms, migrates}].
export const Span = ({ start, length, whole, kind, label }) => html`<svg class="span" viewBox="0 0 100 10" preserveAspectRatio="none"
  role="img" aria-label=${label}>
  <rect class="track" width="100" height="10" />
  <rect class=${`stage-${kind}`} x=${share(start, whole) * 100} width=${Math.max(0.6, share(length, whole) * 100)} height="10" />
</svg>`;

const ROW = 46;
const GAP = 2;

// A tree of prefixes: each lies right of the one that it goes on from; as high as it is asked for, as strong as it is hot.
// nodes: [{name, rate, tokens, places, children}].
export const Icicle = ({ roots, onSelect, selected }) => {
  const cells = [];
  const depth = lay(roots, 0, 0, 1, cells);
  if (!cells.length) return null;
  const height = Math.max(160, leaves(roots) * ROW);
  const hottest = Math.max(...cells.map((cell) => cell.node.rate), Number.EPSILON);
  const width = 960 / depth;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Tree of cached prefixes"><svg class="icicle" viewBox=${`0 0 960 ${height}`} role="group" aria-label="Cached prefixes, the hottest first; the table below says the same">
    ${cells.map(({ node, level, from, to }) => {
      const box = { x: level * width, y: from * height, width: width - GAP, height: Math.max(3, (to - from) * height - GAP) };
      const heat = Math.max(1, Math.ceil((node.rate / hottest) * 5));
      const said = `${node.name} ${node.tokens} tokens · ${node.places}, ${node.rate.toFixed(2)} requests/s`;
      return html`<g key=${node.name} tabindex="0" role="button" aria-pressed=${selected === node.name}
        onClick=${() => onSelect(node.name)} onKeyDown=${(event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), onSelect(node.name))}>
        <rect class=${`heat heat-${heat}`} ...${box} />
        <title>${said}</title>
        ${box.height > 30 ? html`<text class=${`on-heat-${heat}`} x=${box.x + 8} y=${box.y + 18}>${node.name.slice(0, Math.floor(width / 9))}</text>` : null}
        ${box.height > 42 && width > 150 ? html`<text class=${`on-heat-${heat}`} x=${box.x + 8} y=${box.y + 35}>${node.tokens} tokens · ${node.places}</text>` : null}
      </g>`;
    })}
  </svg></div>`;
};

// Puts nodes into [from, to) by their rates; returns how deep the tree is.
function lay(nodes, level, from, to, cells) {
  const whole = nodes.reduce((sum, node) => sum + weight(node), 0);
  let at = from;
  let depth = level;
  for (const node of nodes) {
    const end = at + ((to - from) * weight(node)) / whole;
    cells.push({ node, level, from: at, to: end });
    depth = Math.max(depth, level + 1, lay(node.children, level + 1, at, end, cells));
    at = end;
  }
  return depth;
}

// No less than a little, so that it can be seen, and no less than what goes on from it.
const weight = (node) => Math.max(node.rate, 0.02, node.children.reduce((sum, child) => sum + weight(child), 0));
const leaves = (nodes) => nodes.reduce((sum, node) => sum + Math.max(1, leaves(node.children)), 0);

// A runbook of this version, as it stands in docs/runbooks: headings, code and paragraphs.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";

export function Runbook({ name, onClose }) {
  const [runbooks, read] = useState(null);
  const box = useRef(null);
  useEffect(() => {
    fetch("/static/runbooks.json").then((response) => response.json()).then(read, () => read({}));
  }, []);
  useEffect(() => box.current?.focus(), [runbooks]);
  if (!runbooks) return html`<p>Reading the runbook …</p>`;
  const text = Object.hasOwn(runbooks, name) ? runbooks[name] : "There is no such runbook in this version.";
  return html`<article class="runbook" ref=${box} tabindex="-1" aria-label=${`Runbook ${name}`}>
    <p><a href=${onClose}>Close the runbook</a></p>
    ${blocks(text).map(([kind, content]) => kind === "code" ? html`<pre tabindex="0"><code>${content}</code></pre>`
      : kind === "heading" ? html`<h2>${content}</h2>` : html`<p>${content}</p>`)}
  </article>`;
}

// [kind, text] of each piece between empty lines.
function blocks(text) {
  const found = [];
  for (const [place, part] of text.split(/^```.*$/m).entries()) {
    if (place % 2) found.push(["code", part.trim()]);
    else {
      for (const piece of part.split(/\n\s*\n/).map((each) => each.trim()).filter(Boolean)) {
        const heading = /^#+ (.*)$/.exec(piece);
        found.push(heading ? ["heading", heading[1]] : ["text", piece.replaceAll("`", "").replaceAll("**", "").replace(/\[([^\]]*)\]\([^)]*\)/g, "$1")]);
      }
    }
  }
  return found;
}

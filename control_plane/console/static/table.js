// Tables, whose rows keep their place in the document while figures change in them.
import { html } from "./vendor/htm-preact.js";

// columns: [{title, cell(row), number, wide, grow}]; those that are `wide` are left out on a narrow screen, the one
// that may `grow` takes the room that is left. name: of a row, unique.
export const Table = ({ caption, columns, rows, name, empty }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
  <table>
    <caption>${caption}</caption>
    <thead><tr>${columns.map((column) => html`<th scope="col" class=${classes(column)}>${column.title}</th>`)}</tr></thead>
    <tbody>
      ${rows.map((row) => html`<tr key=${name(row)} data-name=${name(row)}>
        ${columns.map((column, place) => place === 0
          ? html`<th scope="row" class=${classes(column)}>${column.cell(row)}</th>`
          : html`<td class=${classes(column)}>${column.cell(row)}</td>`)}
      </tr>`)}
      ${rows.length ? null : html`<tr><td class="empty" colspan=${columns.length}>${empty}</td></tr>`}
    </tbody>
  </table>
</div>`;

const classes = (column) => ["number", "wide", "grow"].filter((name) => column[name]).join(" ");

export const State = ({ state }) => html`<span class=${`state state-${state.replace(/[^a-z_]/g, "")}`}>${state.replaceAll("_", " ")}</span>`;

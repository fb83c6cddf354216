// Where a key is typed; it stays in this tab.
import { html, useRef } from "./vendor/htm-preact.js";
import { key } from "./api.js";

export function KeyForm({ why, isWrong, onKey }) {
  const typed = useRef(null);
  const submit = (event) => {
    event.preventDefault();
    key.write(typed.current.value.trim());
    onKey();
  };
  return html`<section class="narrow">
    <h1>A key is needed</h1>
    <p>This service asks who looks. A key with the role <code>observe</code> shows everything here, one with
      <code>operate</code> changes the pools, too. It is kept in this tab until it is closed.</p>
    ${key.read() || !isWrong ? html`<p class="wrong" role="alert">${why}</p>` : null}
    <form onSubmit=${submit}>
      <label for="key">API key</label>
      <input id="key" ref=${typed} type="password" autocomplete="off" spellcheck="false" required />
      <button type="submit">Look</button>
    </form>
  </section>`;
}

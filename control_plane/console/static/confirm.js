// Nothing is changed by one click: a word is typed first.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";

export function Confirm({ operation, onYes, onNo }) {
  const [typed, type] = useState("");
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  const submit = (event) => {
    event.preventDefault();
    if (typed === operation.word) onYes();
  };
  return html`<dialog ref=${dialog} onCancel=${(event) => (event.preventDefault(), onNo())} aria-labelledby="confirm-title">
    <form onSubmit=${submit}>
      <h2 id="confirm-title">${operation.title}?</h2>
      <p>${operation.warning}</p>
      <label for="confirm-word">Type <b>${operation.word}</b> to go on</label>
      <input id="confirm-word" autocomplete="off" spellcheck="false" value=${typed} onInput=${(event) => type(event.target.value)} />
      <p class="buttons"><button type="submit" class="strong" disabled=${typed !== operation.word}>Go on</button> <button type="button" onClick=${onNo}>Cancel</button></p>
    </form>
  </dialog>`;
}
